# SPDX-License-Identifier: Apache-2.0
"""A few bits an element: rounding to the nearest level, for use with error feedback."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.core.kernels import decode_rounded_, encode_rounded_, quantized_nbytes
from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec, State, as_single, payload_like
from thinwire.registry import registered


@registered
class Nearest(Codec):
    r"""Round each element to the nearest of $2^b$ levels of its block.

    With levels at odd multiples of a block's scale $a$,

    $$C(x)_i = a\, l_i, \qquad l_i \in \{\pm 1, \pm 3, \dots, \pm (2^b - 1)\}, \qquad
      a = \frac{\sum_i x_i l_i}{\sum_i l_i^2} .$$

    Levels are assigned with the best distance for normally distributed numbers of the block's mean absolute value, so
    that a few large elements do not make all others coarse; from five bits on they reach the largest element. Then the
    least-squares scale is computed, so that $|x - C(x)|^2 < |x|^2$ unless $x$ is zero: the codec is biased, and with
    error feedback it never diverges. With one bit it is `OneBit`.
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

    bits: int = 4
    block: int = 2048

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 1 <= self.bits <= 8:
            raise ConfigError(f"bits={self.bits}: must lie in 1..8. Use Bf16() for more")
        if self.block < 8 or self.block % 8:
            raise ConfigError(
                f"block={self.block}: must be a multiple of 8, since blocks fill whole bytes. Use 2048, for example"
            )

    @property
    def needs_feedback(self) -> bool:
        """True."""
        return True

    @property
    def sign_only(self) -> bool:
        """True with one bit."""
        return self.bits == 1

    @property
    def alignment(self) -> int:
        """The elements of a block."""
        return self.block

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """Write the scales, then the levels: the lowest bit of all elements, then the next bit."""
        payload = payload_like(x, self.nbytes(x.numel()))
        encode_rounded_(as_single(x), None, payload, bits=self.bits, block=self.block)
        return payload

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """Multiply each element's level by its block's scale."""
        x = torch.empty_like(like, dtype=torch.float32)
        decode_rounded_(payload, x, bits=self.bits, block=self.block)
        return x.to(like.dtype)

    def nbytes(self, n: int) -> int:
        """`bits` per element, and 4 bytes per block."""
        return quantized_nbytes(n, self.bits, self.block)

    def encode_with_residual_(self, x: Tensor, residual: Tensor, key: int = 0) -> Tensor:
        """Encode in one pass over memory, block by block."""
        payload = payload_like(x, self.nbytes(x.numel()))
        # The kernel writes the new residual into its second argument; swapping the two does not change their sum.
        encode_rounded_(residual, x, payload, bits=self.bits, block=self.block)
        return payload
