"""Signs alone: every worker has a vote on every element's direction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, State, as_single, payload_like
from thinwire.kernels import decode_signs_, encode_signs_

_SCALE_BYTES = 4


@dataclass(frozen=True)
class MajorityVote(Codec):
    r"""Say the sign of each element; the mean of workers becomes the sign that most of them have.

    $$C(x)_i = \pm 1 \quad\text{with the sign of } x_i, \qquad
      \text{in two stages: } \operatorname{sgn} \sum_w \operatorname{sgn} x_{w,i} .$$

    Zero has the sign that it is stored with, as a rule plus; a tie is plus. All elements move by the learning rate,
    whatever their gradient: it wants a tenth to a hundredth of the usual one, no momentum of size, and gradients
    whose noise is symmetric about their mean. Elements whose gradient is always zero move too.
    Payload: 1 bit an element, on the way there and on the way back.

    Bernstein et al., signSGD with Majority Vote is Communication Efficient and Fault Tolerant, ICLR 2019,
    arXiv:1810.05291, Algorithm 1.
    """

    @property
    def alignment(self) -> int:
        """Whole bytes of signs."""
        return 8

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """The signs: element 8k+j is bit j of byte k."""
        n = x.numel()
        scaled = payload_like(x, _SCALE_BYTES * bool(n) + self.nbytes(n))
        encode_signs_(as_single(x), None, scaled, block=max(n, 1), norm="l1", scale_bytes=_SCALE_BYTES)
        return scaled[_SCALE_BYTES * bool(n) :].clone()

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """One or minus one for each element."""
        n = like.numel()
        one = torch.ones(int(bool(n)), device=payload.device).view(torch.uint8)
        x = torch.empty_like(like, dtype=torch.float32)
        decode_signs_(torch.cat([one, payload]), x, block=max(n, 1), scale_bytes=_SCALE_BYTES)
        return x.to(like.dtype)

    def nbytes(self, n: int) -> int:
        """An eighth of a byte an element."""
        return -(-n // 8)
