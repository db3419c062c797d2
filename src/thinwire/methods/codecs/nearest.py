# SPDX-License-Identifier: Apache-2.0
"""A few bits an element: rounding to the nearest level, for use with error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from thinwire.core.kernels import decode_rounded_, encode_rounded_, sum_rounded_
from thinwire.core.validation import Range
from thinwire.methods.codecs.base import CodecTraits, ResidualPlanesCodec
from thinwire.registry import registered


@registered
class Nearest(ResidualPlanesCodec):
    r"""Round each element to the nearest of $2^b$ levels of its block.

    With levels at odd multiples of a block's scale $a$,

    $$C(x)_i = a\, l_i, \qquad l_i \in \{\pm 1, \pm 3, \dots, \pm (2^b - 1)\}, \qquad
      a = \frac{\sum_i x_i l_i}{\sum_i l_i^2} .$$

    Levels are chosen as for normally distributed numbers with the block's mean absolute value, so that a few large
    elements do not make all others coarse; from five bits on they reach the largest element. Then the least-squares
    scale is computed, so that $|x - C(x)|^2 < |x|^2$ unless $x$ is zero: the codec is biased, and error feedback with
    it never diverges. With one bit it is `OneBit`.
    Payload: $b$ bits an element, and 4 bytes a block.

    Max, Quantizing for Minimum Distortion, IRE Transactions on Information Theory, 1960; with error feedback on
    differences of parameters: MuLoCo, 2025, arXiv:2505.23725.

    Args:
        bits: $b$, bits per element, 1 to 8; fewer are less exact.
        block: elements that share a scale; fewer cost more bytes and are more exact.

    Example:
        >>> import torch
        >>> from thinwire import Nearest
        >>> codec, x = Nearest(bits=2, block=8), torch.tensor([3.0, -1.0, 1.0, -3.0])
        >>> codec.decode(codec.encode(x, {}), x).round(decimals=4).tolist(), codec.nbytes(2048)
        ([3.0, -1.0, 1.0, -3.0], 1536)
    """

    bits: Annotated[int, Range("1..8", "Use Bf16() for more")] = 4
    block: int = 2048

    def make_traits(self) -> CodecTraits:
        """See `CodecTraits`."""
        return CodecTraits(
            needs_feedback=True,
            sign_only=self.bits == 1,
            alignment=self.block,
            separable=True,
            takes_nan=True,
        )

    def write_(self, x: Tensor, payload: Tensor, key: int, left: Tensor | None = None) -> None:
        """Round each element to the nearest level, and compute the scales."""
        encode_rounded_(x, left, payload, bits=self.bits, block=self.block)

    def read_(self, payload: Tensor, x: Tensor, key: int) -> None:
        """Multiply each element's level by its block's scale."""
        decode_rounded_(payload, x, bits=self.bits, block=self.block)

    def decode_sum(self, payloads: Sequence[Tensor], like: Tensor, keys: Sequence[int]) -> Tensor:
        """Decode and add; on a GPU in one pass over memory."""
        x = torch.empty_like(like, dtype=torch.float32)
        sum_rounded_(payloads, x, bits=self.bits, block=self.block)
        return x.to(like.dtype)
