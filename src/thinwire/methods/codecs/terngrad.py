# SPDX-License-Identifier: Apache-2.0
"""TernGrad: stochastic rounding to minus one, zero or one times a scale."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from thinwire.core.kernels import clip_outliers, dequantize_, quantize_
from thinwire.core.validation import Range
from thinwire.methods.codecs.base import CodecTraits, PlanesCodec
from thinwire.registry import registered


@registered
class TernGrad(PlanesCodec):
    r"""Clip the outliers of each block, then round each element at random to 0 or to its sign times the scale $s_b$.

    $$\hat x_i = \operatorname{sgn}(x_i) \min(|x_i|, c\,\sigma_b), \qquad s_b = \max_i |\hat x_i|, \qquad
      C(x)_i = s_b \operatorname{sgn}(\hat x_i) \text{ with probability } |\hat x_i| / s_b, \text{ else } 0,$$

    with $\sigma_b$ the standard deviation of the block (the paper's blocks are layers). Only the clipping is biased, so
    the codec needs no error feedback. `ErrorFeedback` refuses it, since its error can be larger than the vector.
    Payload: 2 bits an element, and 4 bytes a block.

    Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning, NeurIPS 2017,
    arXiv:1705.07878, Algorithm 1 and section 3.3.

    Args:
        block: elements that share a scale; fewer cost more bytes and are more exact.
        clip: $c$, in standard deviations; a smaller one has more bias and less variance. None does not clip.

    Example:
        >>> import torch
        >>> from thinwire import TernGrad
        >>> codec, x = TernGrad(block=8, clip=None), torch.tensor([2.0, -2.0, 0.0])
        >>> codec.decode(codec.encode(x, {}, key=1), x).tolist(), codec.nbytes(2048)
        ([2.0, -2.0, 0.0], 1536)
    """

    block: int = 2048
    clip: Annotated[float | None, Range("(0, inf]", "2.5 standard deviations is usual")] = 2.5

    bits = 2

    def make_traits(self) -> CodecTraits:
        """See `CodecTraits`."""
        # The bound is for a block of one large element and many small ones.
        return CodecTraits(error_bound=self.block**0.5 / 2, alignment=self.block, takes_nan=True)

    def write_(self, x: Tensor, payload: Tensor, key: int) -> None:
        """Clip, then round each element at random to zero or to plus or minus the scale of its block."""
        clipped = x if self.clip is None else clip_outliers(x, block=self.block, deviations=self.clip)
        quantize_(clipped, payload, bits=self.bits, block=self.block, key=int(key))

    def read_(self, payload: Tensor, x: Tensor, key: int) -> None:
        """Decode each element to zero, or to plus or minus the scale of its block."""
        dequantize_(payload, x, bits=self.bits, block=self.block, key=int(key))
