# SPDX-License-Identifier: Apache-2.0
"""Majority vote over the signs of the workers' elements."""

from __future__ import annotations

from math import inf

from torch import Tensor

from thinwire.core.kernels import pack_signs, unpack_signs
from thinwire.methods.codecs.base import Codec, CodecTraits, State
from thinwire.registry import registered


@registered
class MajorityVote(Codec):
    r"""Send the sign of each element; the result is the sign that most workers sent.

    $$C(x)_i = \pm 1 \quad\text{with the sign of } x_i, \qquad
      \text{in two stages: } \operatorname{sgn} \sum_w \operatorname{sgn} x_{w,i} .$$

    Zero counts as plus, unless it is stored as -0.0; a tie is plus. All elements move by the learning rate, whatever
    the size of their gradient, even if it is zero. Use 1 % to 10 % of the usual learning rate, little momentum, and
    gradients whose noise is symmetric about their mean. The codec is only accepted for the gradient of one step, and
    not in `ErrorFeedback`.
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

    def make_traits(self) -> CodecTraits:
        """See `CodecTraits`."""
        # An element close to zero is decoded to plus or minus one, so there is no bound; a byte has 8 signs.
        return CodecTraits(sign_only=True, keeps_size=False, error_bound=inf, alignment=8, takes_nan=True)

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """Write the signs: element 8k+j is bit j of byte k."""
        return pack_signs(x)

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """Decode each element to plus or minus one."""
        return unpack_signs(payload, like.numel()).to(like.dtype)

    def nbytes(self, n: int) -> int:
        """Return one bit per element, in whole bytes."""
        return -(-n // 8)
