# SPDX-License-Identifier: Apache-2.0
"""One bit an element: the sign, and a scale for every block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from thinwire.core.kernels import decode_signs_, encode_signs_, join, sum_signs_
from thinwire.methods.codecs.base import Codec, CodecTraits, ResidualPlanesCodec
from thinwire.registry import registered


@registered
class OneBit(ResidualPlanesCodec):
    r"""Send the sign of each element, and the mean absolute value of each block.

    $$C(x)_i = \pm\sigma_b, \qquad \sigma_b = \tfrac1{|b|}\sum_{j \in b} |x_j| \;\text{("l1")}, \qquad
      \sigma_b = \sqrt{\tfrac1{|b|}\sum_{j \in b} x_j^2} \;\text{("l2")}$$

    with the sign of $x_i$; a block of zeros stays zero. With "l1" the error is never larger than the vector,
    $|x - C(x)|^2 = |x|^2 - |b|\sigma_b^2$ in each block; with "l2" it can reach $2|x|^2$, but the larger scale reduces
    the residual faster. Small elements of a block are overestimated, so this needs error feedback.
    Payload: 1/8 byte an element, and 4 bytes a block.

    Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy et al., Error Feedback Fixes
    SignSGD, ICML 2019, arXiv:1901.09847; whole vectors: Tang et al., 1-bit Adam, ICML 2021, arXiv:2102.02888.

    Args:
        block: elements that share a scale, a multiple of 8; fewer are more exact and cost more bytes.
        norm: the scale is the mean absolute value ("l1") or the root mean square ("l2").
        whole: use one scale for the whole vector, as in the papers; parts with much smaller elements are then sent with
            a large error.

    Example:
        >>> import torch
        >>> from thinwire import OneBit
        >>> codec, x = OneBit(block=8), torch.tensor([1.0, -3.0, 2.0, -2.0])
        >>> codec.decode(codec.encode(x, {}), x).tolist(), codec.nbytes(1024)
        ([2.0, -2.0, 2.0, -2.0], 640)
    """

    block: int = 2048
    norm: Literal["l1", "l2"] = "l1"
    whole: bool = False

    bits = 1

    def make_traits(self) -> CodecTraits:
        """See `CodecTraits`."""
        # With one scale for the whole vector, a piece needs only whole bytes of signs.
        return CodecTraits(
            needs_feedback=True,
            sign_only=True,
            alignment=8 if self.whole else self.block,
            separable=not self.whole,
            takes_nan=True,
        )

    def write_(self, x: Tensor, payload: Tensor, key: int, left: Tensor | None = None) -> None:
        """Write the scales, then the signs: element 8k+j is bit j of byte k."""
        encode_signs_(x, left, payload, block=self.span(x.numel()), norm=self.norm)

    def read_(self, payload: Tensor, x: Tensor, key: int) -> None:
        """Multiply each element's sign by its block's scale."""
        decode_signs_(payload, x, block=self.span(x.numel()))

    def decode_pieces_(self, payloads: Sequence[Tensor], x: Tensor, cuts: Sequence[slice], keys: Sequence[int]) -> None:
        """Decode in one pass over all pieces, unless `whole`: then each payload has the scale."""
        kind = Codec if self.whole else ResidualPlanesCodec
        kind.decode_pieces_(self, payloads, x, cuts, keys)

    def decode_sum(self, payloads: Sequence[Tensor], like: Tensor, keys: Sequence[int]) -> Tensor:
        """Decode and add in one pass over memory."""
        x = torch.empty_like(like, dtype=torch.float32)
        sum_signs_(join(payloads).view(len(payloads), -1), x, block=self.span(x.numel()))
        return x.to(like.dtype)

    def span(self, n: int) -> int:
        """Return the size of a block, or of the whole vector."""
        return max(n, 1) if self.whole else self.block
