# SPDX-License-Identifier: Apache-2.0
"""Casts to fp32, bf16, fp16 and fp8, rounded to nearest."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from thinwire.core.kernels import decode_fp8, encode_fp8
from thinwire.core.validation import Range
from thinwire.methods.codecs.base import Codec, CodecTraits, State
from thinwire.registry import registered

_EIGHT_BITS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_SCALE_BYTES = 4


class _Cast(Codec):
    """Send each element in another dtype, which an all-reduce can add."""

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """Cast the vector; always a contiguous copy, since an all-reduce will overwrite it."""
        return x.detach().to(self.traits.dtype, copy=True, memory_format=torch.contiguous_format)

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """Cast the payload to the dtype of `like`."""
        return payload.to(like.dtype)

    def nbytes(self, n: int) -> int:
        """Return the bytes of n elements."""
        return n * self.traits.dtype.itemsize


@registered
class Fp32(_Cast):
    """Cast to fp32: 32-bit vectors are sent unchanged, and sums of 16-bit vectors are rounded only once, at the end.

    The payload of a 16-bit vector has twice the bytes of the vector. Elements of 64 bits get a relative error of at
    most 2**-24.
    Payload: 4 bytes an element.

    Example:
        >>> import torch
        >>> from thinwire import Fp32
        >>> Fp32().encode(torch.ones(2, dtype=torch.bfloat16), {}).dtype, Fp32().nbytes(1000)
        (torch.float32, 4000)
    """

    def make_traits(self) -> CodecTraits:
        """See `CodecTraits`."""
        return CodecTraits(linear=True, dtype=torch.float32, takes_nan=True)


@registered
class Bf16(_Cast):
    """Cast to bf16: eight bits of exponent, seven of mantissa.

    It has the range of fp32, and a relative error of at most 2**-8. Payload: 2 bytes an element.

    Example:
        >>> import torch
        >>> from thinwire import Bf16
        >>> x = torch.tensor([1.001, 1e30])
        >>> Bf16().decode(Bf16().encode(x, {}), x)[0].item()
        1.0
    """

    def make_traits(self) -> CodecTraits:
        """See `CodecTraits`."""
        # The all-reduce adds in bf16.
        return CodecTraits(linear=True, dtype=torch.bfloat16, rounds_sums=True, elementwise=True, takes_nan=True)


@registered
class Fp16(_Cast):
    """Cast to fp16: five bits of exponent, ten of mantissa.

    It is eight times finer than bf16, but infinite above 65,504. A sum can overflow although no summand does; the usual
    remedy is a loss scale. Payload: 2 bytes an element.

    Example:
        >>> import torch
        >>> from thinwire import Fp16
        >>> x = torch.tensor([0.5, 70000.0])
        >>> Fp16().decode(Fp16().encode(x, {}), x).tolist()
        [0.5, inf]
    """

    def make_traits(self) -> CodecTraits:
        """See `CodecTraits`."""
        # The all-reduce adds in fp16.
        return CodecTraits(linear=True, dtype=torch.float16, rounds_sums=True, elementwise=True, takes_nan=True)


@registered
class Fp8(Codec):
    """Cast to fp8: one byte an element, and a scale for every block that maps its largest element to fp8's largest.

    All-reduces cannot add fp8, so a mean takes two stages. An element's relative error is at most 2**-4 ("e4m3")
    or 2**-3 ("e5m2"), for elements down to 2**-15 or 2**-30 of the largest of their block.
    Payload: a byte an element, and 4 bytes a block.

    Micikevicius et al., FP8 Formats for Deep Learning, 2022, arXiv:2209.05433.

    Args:
        kind: bits of exponent and mantissa: "e4m3" is finer, "e5m2" represents smaller elements.
        block: elements that share a scale; fewer cost more bytes and lose fewer small elements next to large ones.

    Example:
        >>> import torch
        >>> from thinwire import Fp8
        >>> codec, x = Fp8(block=4), torch.tensor([448.0, 7.0, -1.0, 0.5])
        >>> codec.decode(codec.encode(x, {}), x).tolist(), codec.nbytes(4)
        ([448.0, 7.0, -1.0, 0.5], 8)
    """

    kind: Literal["e4m3", "e5m2"] = "e4m3"
    block: Annotated[int, Range("1..", "2048 is usual")] = 2048

    def make_traits(self) -> CodecTraits:
        """See `CodecTraits`."""
        return CodecTraits(alignment=self.block, takes_nan=True)

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """Write the scales, then a byte for each element."""
        return encode_fp8(x, _EIGHT_BITS[self.kind], block=self.block)

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """Multiply each byte by its block's scale."""
        x = decode_fp8(payload, like.numel(), _EIGHT_BITS[self.kind], block=self.block)
        return x.to(like.dtype)

    def nbytes(self, n: int) -> int:
        """Return one byte per element, and 4 per block."""
        return n + _SCALE_BYTES * -(-n // self.block)
