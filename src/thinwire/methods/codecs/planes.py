# SPDX-License-Identifier: Apache-2.0
"""The base classes of codecs with a few bits for each element and a scale for each block."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.core.kernels import join, quantized_nbytes
from thinwire.methods.codecs.base import Codec, State, check_multiple_of_8


class PlanesCodec(Codec):
    """A codec whose payload has the scales in fp32, then the lowest bit of all elements, then the next bit.

    Attributes:
        bits: bits per element.
        block: elements that share a scale.
    """

    bits: int
    block: int

    def __post_init__(self) -> None:
        check_multiple_of_8("block", self.block, 2048)

    @abstractmethod
    def read_(self, payload: Tensor, x: Tensor, key: int) -> None:
        """Decode a payload into `x`, which is in fp32."""

    @abstractmethod
    def write_(self, x: Tensor, payload: Tensor, key: int) -> None:
        """Write the payload of `x`."""

    def span(self, n: int) -> int:
        """Return how many elements of a vector of n share a scale."""
        return self.block

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """Write the payload."""
        payload = x.new_empty(self.nbytes(x.numel()), dtype=torch.uint8)
        self.write_(x, payload, key)
        return payload

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """Decode each element to its level, times the scale of its block."""
        x = torch.empty_like(like, dtype=torch.float32)
        self.read_(payload, x, key)
        return x.to(like.dtype)

    def nbytes(self, n: int) -> int:
        """Return `bits` per element, in whole bytes, and 4 bytes per scale."""
        return quantized_nbytes(n, self.bits, self.span(n))


class ResidualPlanesCodec(PlanesCodec):
    """A codec without random draws, whose kernel also computes the residual, in one pass over memory."""

    @abstractmethod
    def write_(self, x: Tensor, payload: Tensor, key: int, left: Tensor | None = None) -> None:
        """Write the payload of `x`, or of `x + left`; then `left` becomes the new residual."""

    def encode_with_residual_(self, x: Tensor, residual: Tensor, key: int = 0) -> Tensor:
        """Encode in one pass over memory."""
        payload = x.new_empty(self.nbytes(x.numel()), dtype=torch.uint8)
        # The new residual belongs into `x`; swapping the two does not change their sum.
        self.write_(residual, payload, key, left=x)
        return payload

    def encode_pieces_with_residual_(
        self, x: Tensor, residual: Tensor, cuts: Sequence[slice], keys: Sequence[int]
    ) -> list[Tensor]:
        """Encode in one pass over all pieces."""
        return self._split(self.encode_with_residual_(x, residual), x.numel(), cuts)

    def decode_pieces_(self, payloads: Sequence[Tensor], x: Tensor, cuts: Sequence[slice], keys: Sequence[int]) -> None:
        """Decode in one pass over all pieces."""
        self.read_(self.join_parts(payloads, cuts), x, 0)

    def part_of(self, payload: Tensor, n: int, part: slice) -> Tensor:
        """Return the scales and the bits of the part, which starts at the beginning of a block."""
        return payload if part == slice(0, n) else self._split(payload, n, [part, slice(n, n)])[0]

    def join_parts(self, payloads: Sequence[Tensor], cuts: Sequence[slice]) -> Tensor:
        """Join the scales, and each plane, of parts of whole blocks."""
        parts = [self._planes(payload, cut.stop - cut.start) for payload, cut in zip(payloads, cuts, strict=True)]
        return join([*(scales for scales, _ in parts), *(row[bit] for bit in range(self.bits) for _, row in parts)])

    def _split(self, payload: Tensor, n: int, cuts: Sequence[slice]) -> list[Tensor]:
        """Split a payload into those of pieces, which start at multiples of 8.

        A block that belongs to several pieces has its scale in each of them.
        """
        if len(cuts) == 1:
            return [payload]
        span, (scales, planes) = self.span(n), self._planes(payload, n)
        found: list[Tensor] = []
        for cut in cuts:
            if cut.start == cut.stop:  # vectors shorter than the number of ranks have empty pieces
                found.append(payload[:0])
                continue
            rows = (plane[cut.start // 8 : -(-cut.stop // 8)] for plane in planes)
            found.append(join([scales[cut.start // span * 4 : -(-cut.stop // span) * 4], *rows]))
        return found

    def _planes(self, payload: Tensor, n: int) -> tuple[Tensor, list[Tensor]]:
        """Return the scales and the bit planes of the payload of n elements."""
        head, plane = 4 * -(-n // self.span(n)), -(-n // 8)
        return payload[:head], [payload[head + bit * plane : head + (bit + 1) * plane] for bit in range(self.bits)]
