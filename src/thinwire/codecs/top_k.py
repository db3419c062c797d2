"""The largest elements alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, State, as_single
from thinwire.errors import ConfigError
from thinwire.kernels import pack_indices, packed_nbytes, top_k, unpack_indices
from thinwire.validation import check_kinds

_VALUE_BYTES = 4


@dataclass(frozen=True)
class TopK(Codec):
    r"""Say the elements of largest absolute value, as they are, and where they are.

    Of $n$ elements $k = \lceil \phi n \rceil$ are said, and $|x - C(x)|^2 \le (1 - k/n)\,|x|^2$. The others are said by
    nobody, so this needs error feedback. Among equals the first is taken.
    Payload: $k$ values of 4 bytes, and $k$ places of $\lceil \log_2 n \rceil$ bits.

    Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017, arXiv:1704.05021; with
    feedback: Stich et al., Sparsified SGD with Memory, NeurIPS 2018, arXiv:1809.07599.

    Args:
        fraction: $\phi$, of elements that are said, in (0, 1]; less says less, later.
    """

    fraction: float = 0.01

    def __post_init__(self) -> None:
        """Check the kind and the range."""
        check_kinds(self)
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"fraction={self.fraction}: must lie in (0, 1]; 0.01 is usual")

    @property
    def needs_feedback(self) -> bool:
        """Yes."""
        return True

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """The values, then their places in ascending order."""
        x = as_single(x)
        return _message(x, top_k(x, self.count(x.numel())))

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """The values in their places, zero elsewhere."""
        n, k = like.numel(), self.count(like.numel())
        values, places = payload.split([_VALUE_BYTES * k, packed_nbytes(k, n)])
        x = torch.zeros_like(like, dtype=torch.float32)
        x[unpack_indices(places.clone(), n, k)] = values.clone().view(torch.float32)
        return x.to(like.dtype)

    def nbytes(self, n: int) -> int:
        """Four bytes a value, and the places."""
        return _VALUE_BYTES * self.count(n) + packed_nbytes(self.count(n), n)

    def encode_with_residual_(self, x: Tensor, residual: Tensor, key: int = 0) -> Tensor:
        """Move the largest elements of `x + residual` into the payload, whole."""
        places = top_k(x.add_(residual), self.count(x.numel()))
        payload = _message(x, places)
        x[places] = 0.0
        return payload

    def count(self, n: int) -> int:
        """How many of n elements are said."""
        return min(n, ceil(self.fraction * n))


def _message(x: Tensor, places: Tensor) -> Tensor:
    return torch.cat([x[places].view(torch.uint8), pack_indices(places, x.numel())])
