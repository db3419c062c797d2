# SPDX-License-Identifier: Apache-2.0
"""Natural compression: stochastic rounding to powers of two."""

from __future__ import annotations

from torch import Tensor

from thinwire.core.kernels import decode_powers, encode_powers
from thinwire.methods.codecs.base import Codec, CodecTraits, State
from thinwire.registry import registered


@registered
class Natural(Codec):
    r"""Round each element at random to one of the two adjacent powers of two, without bias.

    $$C(x) = \operatorname{sgn}(x)\, 2^{\lfloor \log_2 |x| \rfloor} (1 + \zeta), \qquad
      P(\zeta = 1) = |x|\, 2^{-\lfloor \log_2 |x| \rfloor} - 1,$$

    so only the sign and the exponent of fp32 are sent. $E|C(x) - x|^2 \le |x|^2/8$ for elements of any
    magnitude, so no scales are needed. Subnormal elements become zero or the smallest normal number.
    Payload: 9 bits an element.

    Horvath et al., Natural Compression for Distributed Deep Learning, MSML 2022, arXiv:1905.10988, Definition 1.

    Example:
        >>> import torch
        >>> from thinwire import Natural
        >>> codec, x = Natural(), torch.tensor([4.0, -0.5, 0.0])
        >>> codec.decode(codec.encode(x, {}, key=1), x).tolist(), codec.nbytes(1000)
        ([4.0, -0.5, 0.0], 1125)
    """

    def make_traits(self) -> CodecTraits:
        """See `CodecTraits`."""
        # The bound is that of Theorem 1 of the paper; a byte has 8 signs.
        return CodecTraits(error_bound=0.125, alignment=8, takes_nan=True)

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """Write one exponent byte per element, then one sign bit per element."""
        return encode_powers(x, key=int(key))

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """Decode to powers of two with their signs; exponent 0 decodes to zero."""
        return decode_powers(payload, like.numel()).to(like.dtype)

    def nbytes(self, n: int) -> int:
        """Return nine bits per element, in whole bytes."""
        return n + -(-n // 8)
