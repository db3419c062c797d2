# SPDX-License-Identifier: Apache-2.0
"""QSGD: stochastic rounding to levels of the Euclidean norm."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from thinwire.core.kernels import dequantize_, quantize_
from thinwire.core.validation import Range
from thinwire.methods.codecs.base import CodecTraits, PlanesCodec, check_multiple_of_8
from thinwire.registry import registered


@registered
class QSGD(PlanesCodec):
    r"""Round each element at random to a level of its bucket's Euclidean norm, without bias.

    With $s = 2^{b-1} - 1$ levels on either side of zero,

    $$C(x)_i = |x|_2 \operatorname{sgn}(x_i)\, \zeta_i, \qquad
      \zeta_i = \tfrac{l+1}{s} \text{ with probability } \tfrac{|x_i|}{|x|_2} s - l, \text{ else } \tfrac{l}{s},$$

    so that $E\,C(x) = x$ and $E|C(x) - x|^2 \le \min(d/s^2, \sqrt d/s)\,|x|^2$ in a bucket of $d$ elements. Few
    elements are near the norm, so with equal bits `Quantize`, whose scale is the largest element, is more exact. This
    codec is the paper's.
    Payload: $b$ bits an element (of fixed length, where the paper uses Elias codes), and 4 bytes a bucket.

    Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, NeurIPS 2017,
    arXiv:1610.02132, equation 3.

    Args:
        bits: $b$, bits per element including the sign, 2 to 8; fewer are less exact.
        bucket: $d$, elements that share a norm; fewer cost more bytes and are more exact.

    Example:
        >>> import torch
        >>> from thinwire import QSGD
        >>> codec, x = QSGD(bits=3, bucket=8), torch.tensor([3.0, -4.0])
        >>> codec.decode(codec.encode(x, {}, key=1), x).abs().div(5 / 3).round().tolist(), codec.nbytes(512)
        ([2.0, 2.0], 448)
    """

    bits: Annotated[int, Range("2..8", "Use OneBit() for one")] = 4
    bucket: int = 512

    def __post_init__(self) -> None:
        check_multiple_of_8("bucket", self.bucket, 512)

    def make_traits(self) -> CodecTraits:
        """See `CodecTraits`."""
        levels = 2 ** (self.bits - 1) - 1
        # The bound of Lemma 3.1 of the paper.
        bound = min(self.bucket / levels**2, self.bucket**0.5 / levels)
        return CodecTraits(error_bound=bound, alignment=self.bucket, takes_nan=True)

    def span(self, n: int) -> int:
        """Return the size of a bucket."""
        return self.bucket

    def write_(self, x: Tensor, payload: Tensor, key: int) -> None:
        """Round each element at random to one of the two levels next to it."""
        quantize_(x, payload, bits=self.bits, block=self.bucket, key=int(key), norm="l2")

    def read_(self, payload: Tensor, x: Tensor, key: int) -> None:
        """Decode each element to its level."""
        dequantize_(payload, x, bits=self.bits, block=self.bucket, key=int(key))
