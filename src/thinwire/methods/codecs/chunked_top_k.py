# SPDX-License-Identifier: Apache-2.0
"""The largest elements of every chunk, in few bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from thinwire.core.kernels import add_chunks_, chunk_kept, chunked_nbytes, encode_chunks_
from thinwire.core.validation import Range
from thinwire.methods.codecs.base import Codec, CodecTraits, State
from thinwire.registry import registered

_MOST_CHUNK = 16384


@registered
class ChunkedTopK(Codec):
    r"""Send the $k$ largest elements of every chunk by absolute value: packed positions, and values in $b$ bits.

    In a chunk of $c$ elements a position takes $\lceil \log_2 c \rceil$ bits, fewer than in the whole vector, and every
    part of the vector sends its share. Values are rounded as in `Nearest`, with a scale for each chunk, so that
    $|x - C(x)|^2 \le |x|^2$. Small elements might never be sent, so the codec needs error feedback. Of equal elements
    the first are sent. A shorter last chunk sends a proportional number, rounded up.
    Payload of a chunk: 4 bytes, $\lceil k \lceil\log_2 c\rceil / 8 \rceil$ for positions and $\lceil k b / 8 \rceil$
    for values: with the defaults 116 bytes for 4096 elements, 1/141 of fp32.

    SparseLoCo, 2025, arXiv:2508.15706: with `ErrorFeedback(decay=0.95)`, under `DiLoCo` with an outer step without
    momentum.

    Args:
        kept: $k$, sent elements of each chunk; fewer send fewer bytes, with a larger error.
        chunk: $c$, elements of a chunk; larger chunks select more freely, and need more bits for a position.
        bits: $b$, bits of a value, 1 to 8.

    Example:
        >>> import torch
        >>> from thinwire import ChunkedTopK
        >>> codec, x = ChunkedTopK(kept=1, chunk=4), torch.tensor([0.1, -3.0, 2.0, 0.2, 0.0, 0.5, 0.4, 0.0])
        >>> codec.decode(codec.encode(x, {}), x).tolist()
        [0.0, -3.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0]
        >>> 4 * 4096 / ChunkedTopK().nbytes(4096)
        141.24137931034483
    """

    kept: Annotated[int, Range("1..{chunk}", "64 of 4096 is usual")] = 64
    chunk: Annotated[int, Range(f"2..{_MOST_CHUNK}", "4096 is usual")] = 4096
    bits: Annotated[int, Range("1..8", "Use TopK() for values in fp32")] = 2

    def make_traits(self) -> CodecTraits:
        """See `CodecTraits`."""
        return CodecTraits(needs_feedback=True, alignment=self.chunk, takes_nan=True)

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """Write a record for each chunk: scale, positions, values."""
        payload = x.new_empty(self.nbytes(x.numel()), dtype=torch.uint8)
        encode_chunks_(x, None, payload, chunk=self.chunk, kept=self.kept, bits=self.bits)
        return payload

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """Write the values to their positions, zero elsewhere."""
        return self.decode_sum([payload], like, [key])

    def nbytes(self, n: int) -> int:
        """Return 4 bytes per chunk, plus its positions and its values in whole bytes."""
        return chunked_nbytes(n, self.chunk, self.kept, self.bits)

    def encode_with_residual_(self, x: Tensor, residual: Tensor, key: int = 0) -> Tensor:
        """Encode in one pass over memory, chunk by chunk."""
        payload = x.new_empty(self.nbytes(x.numel()), dtype=torch.uint8)
        # The kernel writes the new residual into its second argument; swapping the two does not change their sum.
        encode_chunks_(residual, x, payload, chunk=self.chunk, kept=self.kept, bits=self.bits)
        return payload

    def decode_sum(self, payloads: Sequence[Tensor], like: Tensor, keys: Sequence[int]) -> Tensor:
        """Decode and add the sent elements only."""
        total = torch.empty_like(like, dtype=torch.float32)
        for i, payload in enumerate(payloads):
            add_chunks_(payload, total, chunk=self.chunk, kept=self.kept, bits=self.bits, fresh=i == 0)
        return total.to(like.dtype)

    def count(self, n: int) -> int:
        """Return how many of n elements are sent."""
        whole, rest = divmod(n, self.chunk)
        return whole * self.kept + chunk_kept(rest, self.chunk, self.kept)
