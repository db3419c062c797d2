"""Plain casts: half the bytes of fp32, rounded to nearest."""

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.codecs.base import Codec, State


@dataclass(frozen=True)
class Bf16(Codec):
    """Eight bits of exponent, seven of mantissa: the range of fp32, a relative error of at most 2**-8."""

    linear = True

    def encode(self, x: Tensor, state: State) -> Tensor:
        """The vector in bfloat16."""
        return x.to(torch.bfloat16)

    def decode(self, payload: Tensor, like: Tensor) -> Tensor:
        """Back in the dtype of `like`."""
        return payload.to(like.dtype)

    def nbytes(self, n: int) -> int:
        """Two bytes an element."""
        return 2 * n


@dataclass(frozen=True)
class Fp16(Codec):
    """Five bits of exponent, ten of mantissa: eight times finer than bf16, but infinite above 65,504.

    A sum on the wire can overflow where no summand does; a loss scale is the usual remedy.
    """

    linear = True

    def encode(self, x: Tensor, state: State) -> Tensor:
        """The vector in float16."""
        return x.to(torch.float16)

    def decode(self, payload: Tensor, like: Tensor) -> Tensor:
        """Back in the dtype of `like`."""
        return payload.to(like.dtype)

    def nbytes(self, n: int) -> int:
        """Two bytes an element."""
        return 2 * n
