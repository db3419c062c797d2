"""A few bits an element: levels of its block's range, up or down at random."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, State, as_single, common_draw, payload_like
from thinwire.errors import ConfigError
from thinwire.kernels import dequantize_, quantize_, quantized_nbytes
from thinwire.validation import check_kinds

_SCALE_BYTES = 4


@dataclass(frozen=True)
class Quantize(Codec):
    r"""Round each element to one of the levels of its block's range, up or down at random, so that its mean is right.

    With $N_b$ the largest absolute value of a block, $s = 2^{b-1} - 1$ levels on either side of zero,
    $\Delta = N_b / s$ and $u_i$ uniform in $[0, 1)$,

    $$C(x)_i = \Delta \Bigl( \bigl\lfloor x_i / \Delta + s + u_i \bigr\rfloor - s \Bigr), \qquad E\,C(x) = x, \qquad
      E\,(C(x)_i - x_i)^2 \le \Delta^2 / 4 .$$

    With one bit there are two levels, $\pm N_b$. `dither` draws $u$ again where the payload is decoded and subtracts
    it: the error is then uniform, of variance $\Delta^2/12$, whatever $x$ is. `correlated` shares one $u$ among
    workers, each shifted by an equal part of the circle, so that their errors cancel where their vectors agree.
    Being right in the mean, it needs no error feedback.
    Payload: $b$ bits an element, and 4 bytes a block.

    Alistarh et al., QSGD, NeurIPS 2017, arXiv:1610.02132, with the largest value for a scale; dither: Roberts, Picture
    Coding Using Pseudo-Random Noise, IRE Transactions, 1962; correlated: Suresh et al., Correlated Quantization for
    Distributed Mean Estimation, ICML 2022, arXiv:2203.04925.

    Args:
        bits: $b$, an element, 1 to 8; fewer say less.
        block: elements that share a scale; fewer cost more bytes and are more exact.
        dither: subtract the draws again.
        correlated: let workers' draws complement each other.
    """

    bits: int = 4
    block: int = 2048
    dither: bool = False
    correlated: bool = False

    def __post_init__(self) -> None:
        """Check the kinds and the ranges."""
        check_kinds(self)
        if not 1 <= self.bits <= 8:
            raise ConfigError(f"bits={self.bits}: must lie in 1..8; use Bf16() for more")
        if self.block < 8 or self.block % 8:
            raise ConfigError(f"block={self.block}: codes are cut at whole bytes; use a multiple of 8, such as 2048")

    @property
    def expansion(self) -> float:
        """Of the worst vector: small elements beside a large one."""
        if self.bits == 1:
            return float(self.block)
        levels = 2 ** (self.bits - 1) - 1
        return self.block / (12 * levels**2) if self.dither else self.block**0.5 / (2 * levels)

    @property
    def alignment(self) -> int:
        """A block."""
        return self.block

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """The scales, then the codes, one plane of bits after the other."""
        payload, (draws, shift) = payload_like(x, self.nbytes(x.numel())), self._draw(key)
        quantize_(
            as_single(x),
            payload,
            bits=self.bits,
            block=self.block,
            key=draws,
            shift=shift,
            norm="max",
            scale_bytes=_SCALE_BYTES,
        )
        return payload

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """Each code's level."""
        x, (draws, shift) = torch.empty_like(like, dtype=torch.float32), self._draw(key)
        dequantize_(
            payload,
            x,
            bits=self.bits,
            block=self.block,
            key=draws,
            dither=self.dither,
            shift=shift,
            scale_bytes=_SCALE_BYTES,
        )
        return x.to(like.dtype)

    def nbytes(self, n: int) -> int:
        """The bits of all elements, and 4 bytes a block."""
        return quantized_nbytes(n, self.bits, self.block, _SCALE_BYTES)

    def _draw(self, key: int) -> tuple[int, float]:
        return common_draw(key) if self.correlated else (int(key), 0.0)
