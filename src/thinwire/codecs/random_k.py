"""A few elements, drawn alike on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, State, as_single
from thinwire.errors import ConfigError
from thinwire.kernels import top_k, uniform
from thinwire.validation import check_kinds


@dataclass(frozen=True)
class RandomK(Codec):
    r"""Say elements that are drawn anew for each message, the same on all ranks: no places are sent.

    Of $n$ elements $k = \lceil \phi n \rceil$ are said. `unbiased` multiplies them by $n/k$, so that the mean is right
    and $E|C(x) - x|^2 = (n/k - 1)\,|x|^2$; without, they stay as they are, $E|C(x) - x|^2 = (1 - k/n)\,|x|^2$, and it
    needs error feedback. Payloads have one form on all ranks, so the wire adds them up.
    Payload: $k$ values of 4 bytes.

    Stich et al., Sparsified SGD with Memory, NeurIPS 2018, arXiv:1809.07599, Definition 2.1; unbiased: Wangni et al.,
    Gradient Sparsification for Communication-Efficient Distributed Optimization, NeurIPS 2018, arXiv:1710.09854.

    Args:
        fraction: $\phi$, of elements that are said, in (0, 1]; less says less, later.
        unbiased: scale up what is said; for use without error feedback.
    """

    fraction: float = 0.01
    unbiased: bool = True

    def __post_init__(self) -> None:
        """Check the kinds and the range."""
        check_kinds(self)
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"fraction={self.fraction}: must lie in (0, 1]; 0.01 is usual")

    @property
    def linear(self) -> bool:
        """Yes, for equal keys."""
        return True

    @property
    def dtype(self) -> torch.dtype:
        """Values in fp32."""
        return torch.float32

    @property
    def needs_feedback(self) -> bool:
        """Unless it is unbiased."""
        return not self.unbiased and self.fraction < 1

    @property
    def expansion(self) -> float:
        """As many times more as fewer are said."""
        return 1 / self.fraction - 1 if self.unbiased else 0.0

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """The values, in fp32."""
        x, k = as_single(x), self.count(x.numel())
        if x.is_meta:
            return x.new_empty(k)
        values = x[_places(x, k, key)]
        return values.mul_(x.numel() / k) if self.unbiased and k else values

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """The values in their places, zero elsewhere."""
        x = torch.zeros_like(like)
        if not x.is_meta:
            x[_places(x, payload.numel(), key)] = payload.to(x.dtype)
        return x

    def nbytes(self, n: int) -> int:
        """Four bytes a value."""
        return 4 * self.count(n)

    def count(self, n: int) -> int:
        """How many of n elements are said."""
        return min(n, ceil(self.fraction * n))


def _places(x: Tensor, k: int, key: int) -> Tensor:
    """Where the k largest of as many random numbers as there are elements lie."""
    return top_k(uniform(x.numel(), int(key), device=x.device), k)
