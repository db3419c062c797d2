# SPDX-License-Identifier: Apache-2.0
"""Top-k sparsification: the elements of largest absolute value."""

from __future__ import annotations

from math import ceil
from typing import Annotated

import torch
from torch import Tensor

from thinwire.core.kernels import as_fp32, join, pack_indices, packed_nbytes, take, top_k, unpack_indices
from thinwire.core.validation import Range
from thinwire.methods.codecs.base import Codec, CodecTraits, State
from thinwire.registry import registered

_VALUE_BYTES = 4


@registered
class TopK(Codec):
    r"""Send the elements of largest absolute value and their indices.

    Of $n$ elements $k = \lceil \phi n \rceil$ are sent, and $|x - C(x)|^2 \le (1 - k/n)\,|x|^2$. Small elements might
    never be sent, so this needs error feedback. The first of equal elements is sent.
    Payload: $k$ values of 4 bytes, and $k$ indices of $\lceil \log_2 n \rceil$ bits.

    Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017, arXiv:1704.05021; with
    feedback: Stich et al., Sparsified SGD with Memory, NeurIPS 2018, arXiv:1809.07599.

    Args:
        fraction: $\phi$, the fraction of sent elements, in (0, 1]; a smaller one sends fewer bytes, with a larger
            error.

    Example:
        >>> import torch
        >>> from thinwire import TopK
        >>> codec, x = TopK(fraction=0.5), torch.tensor([0.1, -3.0, 2.0, 0.2])
        >>> codec.decode(codec.encode(x, {}), x).tolist()
        [0.0, -3.0, 2.0, 0.0]
    """

    fraction: Annotated[float, Range("(0, 1]", "0.01 is usual")] = 0.01

    def make_traits(self) -> CodecTraits:
        """See `CodecTraits`."""
        return CodecTraits(needs_feedback=True, takes_nan=True)

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """Write the values, then their indices in ascending order."""
        x = as_fp32(x)
        return _payload(x, top_k(x, self.count(x.numel())))

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """Write the values to their indices, zero elsewhere."""
        n, k = like.numel(), self.count(like.numel())
        values, indices = payload.split([_VALUE_BYTES * k, packed_nbytes(k, n)])
        # Slices of a payload may not be aligned to four bytes, but clones are.
        x = torch.zeros_like(like, dtype=torch.float32)
        x[unpack_indices(indices.clone(), n, k)] = values.clone().view(torch.float32)
        return x.to(like.dtype)

    def nbytes(self, n: int) -> int:
        """Return four bytes per value, and the bytes of the packed indices."""
        return _VALUE_BYTES * self.count(n) + packed_nbytes(self.count(n), n)

    def encode_with_residual_(self, x: Tensor, residual: Tensor, key: int = 0) -> Tensor:
        """Encode without decoding: the sent elements leave no residual."""
        indices = top_k(x.add_(residual), self.count(x.numel()))
        payload = _payload(x, indices)
        x.index_fill_(0, indices, 0.0)
        return payload

    def count(self, n: int) -> int:
        """Return how many of n elements are sent."""
        return min(n, ceil(self.fraction * n))


def _payload(x: Tensor, indices: Tensor) -> Tensor:
    return join([take(x, indices).view(torch.uint8), pack_indices(indices, x.numel())])
