"""Casts: fp32 itself, half its bytes, or a quarter, rounded to nearest."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, State, as_single, blockwise
from thinwire.errors import ConfigError
from thinwire.validation import check_kinds

_EIGHT_BITS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_SCALE_BYTES = 4


class _Cast(Codec):
    """Each element in another dtype, which the wire can add up."""

    @property
    def linear(self) -> bool:
        """Yes."""
        return True

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of an element on the wire."""

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """The vector in the dtype of the wire, without gaps; a copy even where it is so already."""
        return x.detach().to(self.dtype, copy=True, memory_format=torch.contiguous_format)

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """Back in the dtype of `like`."""
        return payload.to(like.dtype)

    def nbytes(self, n: int) -> int:
        """What n elements of the dtype take."""
        return n * self.dtype.itemsize


@dataclass(frozen=True)
class Fp32(_Cast):
    """No code at all for parameters of 32 bits; for 16 bits twice their bytes, in sums that are rounded once.

    Elements of 64 bits keep a relative error of at most 2**-24.
    """

    @property
    def dtype(self) -> torch.dtype:
        """Four bytes an element."""
        return torch.float32


@dataclass(frozen=True)
class Bf16(_Cast):
    """Eight bits of exponent, seven of mantissa: the range of fp32, a relative error of at most 2**-8."""

    @property
    def rounded(self) -> bool:
        """Yes."""
        return True

    @property
    def dtype(self) -> torch.dtype:
        """Two bytes an element."""
        return torch.bfloat16


@dataclass(frozen=True)
class Fp16(_Cast):
    """Five bits of exponent, ten of mantissa: eight times finer than bf16, but infinite above 65,504.

    A sum on the wire can overflow where no summand does; a loss scale is the usual remedy.
    """

    @property
    def rounded(self) -> bool:
        """Yes."""
        return True

    @property
    def dtype(self) -> torch.dtype:
        """Two bytes an element."""
        return torch.float16


@dataclass(frozen=True)
class Fp8(Codec):
    """One byte an element, and a scale for every block that brings its largest element to the largest byte.

    No wire adds up fp8, so payloads go through two stages; an element's relative error is at most 2**-4 ("e4m3") or
    2**-3 ("e5m2") down to a 2**-15th or a 2**-30th of its block's largest.
    Payload: a byte an element, and 4 bytes a block.

    Micikevicius et al., FP8 Formats for Deep Learning, 2022, arXiv:2209.05433.

    Args:
        kind: bits of exponent and mantissa: "e4m3" is finer, "e5m2" reaches further down.
        block: elements that share a scale; fewer cost more bytes and lose fewer small elements beside large ones.
    """

    kind: Literal["e4m3", "e5m2"] = "e4m3"
    block: int = 2048

    def __post_init__(self) -> None:
        """Check the kinds and the block."""
        check_kinds(self)
        if self.block < 1:
            raise ConfigError(f"block={self.block}: must be at least 1 element; 2048 is usual")

    @property
    def alignment(self) -> int:
        """A block."""
        return self.block

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """The scales, then a byte for each element."""
        kind, scales, codes = _EIGHT_BITS[self.kind], [x.new_empty(0, dtype=torch.uint8)], list[Tensor]()
        largest = torch.finfo(kind).max
        for rows in blockwise(as_single(x), self.block):
            scale = rows.abs().amax(1, keepdim=True) / largest
            scales.append(scale.view(-1).view(torch.uint8))
            # A scale that is nothing, or nearly, may be too coarse by rounding: what is then too large is the largest.
            scaled = torch.where(scale > 0, rows / scale, 0.0).clamp(-largest, largest)
            codes.append(scaled.to(kind).view(torch.uint8).view(-1))
        return torch.cat([*scales, *codes])

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """Each byte times its block's scale."""
        n = like.numel()
        scales, codes = payload.split([self.nbytes(n) - n, n])
        x = codes.view(_EIGHT_BITS[self.kind]).to(torch.float32)
        start = 0
        for rows in blockwise(x, self.block):
            count = rows.shape[0]
            rows.mul_(scales.clone().view(torch.float32)[start : start + count, None])
            start += count
        return x.to(like.dtype)

    def nbytes(self, n: int) -> int:
        """A byte an element, and 4 bytes a block."""
        return n + _SCALE_BYTES * -(-n // self.block)
