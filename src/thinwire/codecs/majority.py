"""Majority vote over the signs of the workers' elements."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, State, as_single, payload_like
from thinwire.kernels import decode_signs_, encode_signs_
from thinwire.registry import registered

_SCALE_BYTES = 4


@registered
class MajorityVote(Codec):
    r"""Send the sign of each element; the result is the sign that most workers sent.

    $$C(x)_i = \pm 1 \quad\text{with the sign of } x_i, \qquad
      \text{in two stages: } \operatorname{sgn} \sum_w \operatorname{sgn} x_{w,i} .$$

    Zero has the sign bit that it is stored with, mostly plus; a tie is plus. All elements move by the learning rate,
    whatever the size of their gradient: use a tenth to a hundredth of the usual learning rate, little momentum, and
    gradients whose noise is symmetric about their mean. Elements whose gradient is always zero move too.
    Payload: 1 bit an element, in either stage.

    Bernstein et al., signSGD with Majority Vote is Communication Efficient and Fault Tolerant, ICLR 2019,
    arXiv:1810.05291, Algorithm 1.

    Example:
        >>> import torch
        >>> from thinwire import MajorityVote
        >>> codec, x = MajorityVote(), torch.tensor([0.1, -3.0, 2.0])
        >>> codec.decode(codec.encode(x, {}), x).tolist(), codec.nbytes(1000)
        ([1.0, -1.0, 1.0], 125)
    """

    @property
    def alignment(self) -> int:
        """The elements in a byte of signs."""
        return 8

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """The signs: element 8k+j is bit j of byte k."""
        n = x.numel()
        # The kernel writes a scale in front of the signs, which is cut off here and put back by `decode`.
        scaled = payload_like(x, _SCALE_BYTES * bool(n) + self.nbytes(n))
        encode_signs_(as_single(x), None, scaled, block=max(n, 1), norm="l1", scale_bytes=_SCALE_BYTES)
        return scaled[_SCALE_BYTES * bool(n) :].clone()

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """Plus or minus one for each element."""
        n = like.numel()
        one = torch.ones(int(bool(n)), device=payload.device).view(torch.uint8)
        x = torch.empty_like(like, dtype=torch.float32)
        decode_signs_(torch.cat([one, payload]), x, block=max(n, 1), scale_bytes=_SCALE_BYTES)
        return x.to(like.dtype)

    def nbytes(self, n: int) -> int:
        """One bit per element."""
        return -(-n // 8)
