"""Natural compression: stochastic rounding to powers of two."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, State, as_single, payload_like
from thinwire.kernels import decode_signs_, encode_signs_, uniform
from thinwire.registry import registered

_MANTISSA_BITS, _LARGEST = 23, 254
_SCALE_BYTES = 4


@registered
class Natural(Codec):
    r"""Round each element to one of the two powers of two around it, at random and without bias.

    $$C(x) = \operatorname{sgn}(x)\, 2^{\lfloor \log_2 |x| \rfloor} (1 + \zeta), \qquad
      P(\zeta = 1) = |x|\, 2^{-\lfloor \log_2 |x| \rfloor} - 1,$$

    so only the sign and the exponent of fp32 are sent, and no mantissa. $E|C(x) - x|^2 \le |x|^2/8$ for elements of any
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

    @property
    def error_bound(self) -> float:
        """1/8, by Theorem 1 of the paper."""
        return 0.125

    @property
    def alignment(self) -> int:
        """8, as one byte holds the signs of 8 elements."""
        return 8

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """The payload: one byte of exponent for each element, then one bit of sign for each."""
        x, n = as_single(x), x.numel()
        # The bits of fp32 without the sign: the mantissa over 2**23 is the probability of rounding up.
        pattern = x.view(torch.int32) & 0x7FFFFFFF
        up = (pattern & 0x7FFFFF).to(torch.float32) * 2.0**-_MANTISSA_BITS > uniform(n, int(key), device=x.device)
        # Exponent 255 would be infinity, so the largest numbers are rounded down.
        exponents = ((pattern >> _MANTISSA_BITS) + up.to(torch.int32)).clamp(max=_LARGEST)
        signs = payload_like(x, _SCALE_BYTES * bool(n) + -(-n // 8))
        encode_signs_(x, None, signs, block=max(n, 1), norm="l1", scale_bytes=_SCALE_BYTES)
        return torch.cat([exponents.to(torch.uint8), signs[_SCALE_BYTES:]])

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """Powers of two with their signs; exponent 0 decodes to zero."""
        n = like.numel()
        exponents, signs = payload.split([n, -(-n // 8)])
        size = (exponents.to(torch.int32) << _MANTISSA_BITS).view(torch.float32)
        one = torch.ones(int(bool(n)), device=payload.device).view(torch.uint8)
        x = torch.empty_like(size)
        decode_signs_(torch.cat([one, signs]), x, block=max(n, 1), scale_bytes=_SCALE_BYTES)
        return x.mul_(size).to(like.dtype)

    def nbytes(self, n: int) -> int:
        """Nine bits per element."""
        return n + -(-n // 8)
