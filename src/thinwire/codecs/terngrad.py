"""TernGrad: minus one, zero or one times a scale, at random."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, State, as_single, blockwise, payload_like
from thinwire.errors import ConfigError
from thinwire.kernels import dequantize_, quantize_, quantized_nbytes
from thinwire.validation import check_kinds

_BITS, _SCALE_BYTES = 2, 4


@dataclass(frozen=True)
class TernGrad(Codec):
    r"""Clip a block's outliers; then each element becomes its block's scale, with its sign, or zero, at random.

    $$\hat x_i = \operatorname{sgn}(x_i) \min(|x_i|, c\,\sigma_b), \qquad s_b = \max_i |\hat x_i|, \qquad
      C(x)_i = s_b \operatorname{sgn}(\hat x_i) \text{ with probability } |\hat x_i| / s_b, \text{ else } 0,$$

    with $\sigma_b$ the standard deviation of the block (the paper's blocks are layers). Up to the clipping the mean
    is right, so it needs no error feedback; and bears none, for what is left unsaid can exceed what was to be said.
    Payload: 2 bits an element, and 4 bytes a block.

    Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning, NeurIPS 2017,
    arXiv:1705.07878, Algorithm 1 and section 3.3.

    Args:
        block: elements that share a scale; fewer cost more bytes and are more exact.
        clip: $c$, standard deviations at which elements are cut off; less is biased more and varies less. None cuts
            nothing off.
    """

    block: int = 2048
    clip: float | None = 2.5

    def __post_init__(self) -> None:
        """Check the kinds and the ranges."""
        check_kinds(self)
        if self.block < 8 or self.block % 8:
            raise ConfigError(f"block={self.block}: codes are cut at whole bytes; use a multiple of 8, such as 2048")
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"clip={self.clip}: must be positive; 2.5 standard deviations is usual")

    @property
    def expansion(self) -> float:
        """Of the worst block: many small elements beside a large one."""
        return self.block**0.5 / 2

    @property
    def alignment(self) -> int:
        """A block."""
        return self.block

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """The scales, then the codes, one plane of bits after the other."""
        payload = payload_like(x, self.nbytes(x.numel()))
        clipped = self._clipped(as_single(x))
        quantize_(clipped, payload, bits=_BITS, block=self.block, key=int(key), norm="max", scale_bytes=_SCALE_BYTES)
        return payload

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """Each code's level."""
        x = torch.empty_like(like, dtype=torch.float32)
        dequantize_(payload, x, bits=_BITS, block=self.block, key=int(key), scale_bytes=_SCALE_BYTES)
        return x.to(like.dtype)

    def nbytes(self, n: int) -> int:
        """Two bits an element, and 4 bytes a block."""
        return quantized_nbytes(n, _BITS, self.block, _SCALE_BYTES)

    def _clipped(self, x: Tensor) -> Tensor:
        if self.clip is None:
            return x
        clipped = torch.empty_like(x)
        for rows, found in zip(blockwise(x, self.block), blockwise(clipped, self.block), strict=True):
            most = self.clip * _deviations(rows, found)
            # A block of equal elements has no outliers, and no deviation either; one that is not finite stays as it is.
            most.masked_fill_((most > 0).logical_not_(), torch.inf)
            # With two bounds at once torch does not use the processor's vectors.
            torch.minimum(rows, most, out=found)
            torch.maximum(found, -most, out=found)
        return clipped


def _deviations(rows: Tensor, scratch: Tensor) -> Tensor:
    """Of each row, [n, 1]; of equal elements it is exactly zero, for they are moved to zero before their mean is."""
    torch.sub(rows, rows[:, :1], out=scratch)
    scratch.sub_(scratch.mean(1, keepdim=True))
    return torch.linalg.vector_norm(scratch, dim=1, keepdim=True) / rows.shape[1] ** 0.5
