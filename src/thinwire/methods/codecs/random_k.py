# SPDX-License-Identifier: Apache-2.0
"""A random subset of the elements, the same on all ranks."""

from __future__ import annotations

from math import ceil
from typing import Annotated

import torch
from torch import Tensor

from thinwire.core.kernels import as_fp32, take, top_k, uniform
from thinwire.core.validation import Range
from thinwire.methods.codecs.base import Codec, CodecTraits, State
from thinwire.registry import registered


@registered
class RandomK(Codec):
    r"""Send a random subset of the elements, drawn for each message and the same on all ranks, so without indices.

    Of $n$ elements $k = \lceil \phi n \rceil$ are sent. `unbiased` multiplies them by $n/k$, so that $E\,C(x) = x$
    and $E|C(x) - x|^2 = (n/k - 1)\,|x|^2$. Otherwise they are unchanged, $E|C(x) - x|^2 = (1 - k/n)\,|x|^2$, and the
    codec needs error feedback. All ranks send the same elements, so an all-reduce adds the payloads.
    Payload: $k$ values of 4 bytes.

    Stich et al., Sparsified SGD with Memory, NeurIPS 2018, arXiv:1809.07599, Definition 2.1; unbiased: Wangni et al.,
    Gradient Sparsification for Communication-Efficient Distributed Optimization, NeurIPS 2018, arXiv:1710.09854.

    Args:
        fraction: $\phi$, the fraction of sent elements, in (0, 1]; less sends fewer bytes, with a larger error.
        unbiased: scale up the sent elements; for use without error feedback.

    Example:
        >>> import torch
        >>> from thinwire import RandomK
        >>> codec, x = RandomK(fraction=0.25), torch.ones(8)
        >>> codec.decode(codec.encode(x, {}, key=1), x, key=1).sort().values.tolist(), codec.nbytes(8)
        ([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 4.0, 4.0], 8)
    """

    fraction: Annotated[float, Range("(0, 1]", "0.01 is usual")] = 0.01
    unbiased: bool = True

    def make_traits(self) -> CodecTraits:
        """See `CodecTraits`."""
        # Payloads of equal keys can be added; the bound is the variance of the unbiased codec.
        return CodecTraits(
            linear=True,
            dtype=torch.float32,
            needs_feedback=not self.unbiased and self.fraction < 1,
            error_bound=1 / self.fraction - 1 if self.unbiased else 0.0,
            takes_nan=True,
        )

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """Return the values, in fp32."""
        x, k = as_fp32(x), self.count(x.numel())
        values = take(x, _indices(x, k, key))
        return values.mul_(x.numel() / k) if self.unbiased and k else values

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """Write the values to their indices, zero elsewhere."""
        x = torch.zeros_like(like)
        x[_indices(x, payload.numel(), key)] = payload.to(x.dtype)
        return x

    def nbytes(self, n: int) -> int:
        """Return four bytes per value."""
        return 4 * self.count(n)

    def count(self, n: int) -> int:
        """Return how many of n elements are sent."""
        return min(n, ceil(self.fraction * n))


def _indices(x: Tensor, k: int, key: int) -> Tensor:
    """Return the indices of the k largest of n random numbers: the same random subset on any device."""
    # Not `torch.randperm`, which draws different numbers on a GPU and on a CPU.
    return top_k(uniform(x.numel(), int(key), device=x.device), k)
