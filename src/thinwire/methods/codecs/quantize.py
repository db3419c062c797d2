# SPDX-License-Identifier: Apache-2.0
"""A few bits an element: stochastic rounding to levels of the block's range."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from thinwire.core.kernels import dequantize_, quantize_
from thinwire.core.validation import Range
from thinwire.methods.codecs.base import CodecTraits, DrawKey, PlanesCodec
from thinwire.registry import registered


@registered
class Quantize(PlanesCodec):
    r"""Round each element at random to a level of its block's range, without bias.

    With $N_b$ the largest absolute value of a block, $s = 2^{b-1} - 1$ levels on either side of zero,
    $\Delta = N_b / s$ and $u_i$ uniform in $[0, 1)$,

    $$C(x)_i = \Delta \Bigl( \bigl\lfloor x_i / \Delta + s + u_i \bigr\rfloor - s \Bigr), \qquad E\,C(x) = x, \qquad
      E\,(C(x)_i - x_i)^2 \le \Delta^2 / 4 .$$

    With one bit the levels are $\pm N_b$. `dither` draws $u$ again at decoding and subtracts it: the error is then
    uniform, of variance $\Delta^2/12$, whatever $x$ is. With `correlated` all workers use one $u$, shifted by
    $\text{rank}/n$ modulo 1, so that their errors cancel if their vectors are similar. The codec is unbiased, so it
    needs no error feedback.
    Payload: $b$ bits an element, and 4 bytes a block.

    Alistarh et al., QSGD, NeurIPS 2017, arXiv:1610.02132, with the largest value as the scale; dither: Roberts, Picture
    Coding Using Pseudo-Random Noise, IRE Transactions, 1962; correlated: Suresh et al., Correlated Quantization for
    Distributed Mean Estimation, ICML 2022, arXiv:2203.04925.

    Args:
        bits: $b$, bits per element, 1 to 8; fewer are less exact.
        block: elements that share a scale; fewer cost more bytes and are more exact.
        dither: subtract the random numbers after decoding.
        correlated: let the workers' random numbers differ by a shift only, so that errors cancel.

    Example:
        >>> import torch
        >>> from thinwire import Quantize
        >>> codec, x = Quantize(bits=3, block=8), torch.tensor([3.0, -1.0, 0.5])
        >>> codec.decode(codec.encode(x, {}, key=1), x)[:2].tolist(), codec.nbytes(2048)
        ([3.0, -1.0], 1792)
    """

    bits: Annotated[int, Range("1..8", "Use Bf16() for more")] = 4
    block: int = 2048
    dither: bool = False
    correlated: bool = False

    def make_traits(self) -> CodecTraits:
        """See `CodecTraits`."""
        levels = 2 ** (self.bits - 1) - 1
        if self.bits == 1:  # every element becomes plus or minus the largest of its block
            bound = float(self.block)
        else:  # that of a block of one large element and many small ones
            bound = self.block / (12 * levels**2) if self.dither else self.block**0.5 / (2 * levels)
        return CodecTraits(sign_only=self.bits == 1, error_bound=bound, alignment=self.block, takes_nan=True)

    def write_(self, x: Tensor, payload: Tensor, key: int) -> None:
        """Round each element at random to one of the two levels next to it."""
        draw, shift = self._draw(key)
        quantize_(x, payload, bits=self.bits, block=self.block, key=draw, shift=shift)

    def read_(self, payload: Tensor, x: Tensor, key: int) -> None:
        """Decode each element to its level."""
        draw, shift = self._draw(key)
        dequantize_(payload, x, bits=self.bits, block=self.block, key=draw, dither=self.dither, shift=shift)

    def _draw(self, key: int) -> tuple[int, float]:
        """Return the key of the random numbers, and their shift."""
        return (key.shared, key.shift) if self.correlated and isinstance(key, DrawKey) else (int(key), 0.0)
