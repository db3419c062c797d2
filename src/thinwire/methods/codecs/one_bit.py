# SPDX-License-Identifier: Apache-2.0
"""One bit an element: the sign, and a scale for every block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from thinwire.core.kernels import decode_signs_, encode_signs_, join, sign_nbytes, sum_signs_
from thinwire.methods.codecs.base import (
    Codec,
    CodecTraits,
    State,
    check_multiple_of_8,
    join_planes,
    part_of_planes,
    split_planes,
)
from thinwire.registry import registered


@registered
class OneBit(Codec):
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

    def __post_init__(self) -> None:
        check_multiple_of_8("block", self.block, 2048)

    @cached_property
    def traits(self) -> CodecTraits:
        """See `CodecTraits`."""
        # With one scale for the whole vector, a piece needs only whole bytes of signs.
        return CodecTraits(
            needs_feedback=True,
            sign_only=True,
            alignment=8 if self.whole else self.block,
            separable=not self.whole,
            takes_nan=True,
        )

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """Write the scales, then the signs: element 8k+j is bit j of byte k."""
        payload = x.new_empty(self.nbytes(x.numel()), dtype=torch.uint8)
        encode_signs_(x, None, payload, block=self._span(x.numel()), norm=self.norm)
        return payload

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """Multiply each element's sign by its block's scale."""
        x = torch.empty_like(like, dtype=torch.float32)
        decode_signs_(payload, x, block=self._span(x.numel()))
        return x.to(like.dtype)

    def nbytes(self, n: int) -> int:
        """Return one bit per element, in whole bytes, and 4 bytes per block."""
        return sign_nbytes(n, self._span(n))

    def encode_with_residual_(self, x: Tensor, residual: Tensor, key: int = 0) -> Tensor:
        """Encode in one pass over memory."""
        payload = x.new_empty(self.nbytes(x.numel()), dtype=torch.uint8)
        # The kernel writes the new residual into its second argument; swapping the two does not change their sum.
        encode_signs_(residual, x, payload, block=self._span(x.numel()), norm=self.norm)
        return payload

    def encode_pieces_with_residual_(
        self, x: Tensor, residual: Tensor, cuts: Sequence[slice], keys: Sequence[int]
    ) -> list[Tensor]:
        """Encode in one pass over all pieces; with `whole`, each payload has the scale."""
        payload = self.encode_with_residual_(x, residual)
        return split_planes(payload, x.numel(), cuts, bits=1, block=self._span(x.numel()))

    def decode_pieces_(self, payloads: Sequence[Tensor], x: Tensor, cuts: Sequence[slice], keys: Sequence[int]) -> None:
        """Decode in one pass over all pieces, unless `whole`."""
        if self.whole:
            for payload, cut in zip(payloads, cuts, strict=True):
                decode_signs_(payload, x[cut], block=max(cut.stop - cut.start, 1))
            return
        decode_signs_(join_planes(payloads, cuts, bits=1, block=self.block), x, block=self.block)

    def decode_sum(self, payloads: Sequence[Tensor], like: Tensor, keys: Sequence[int]) -> Tensor:
        """Decode and add in one pass over memory."""
        x = torch.empty_like(like, dtype=torch.float32)
        sum_signs_(join(payloads).view(len(payloads), -1), x, block=self._span(x.numel()))
        return x.to(like.dtype)

    def part_of(self, payload: Tensor, n: int, part: slice) -> Tensor:
        """Return the scales and the bits of the part."""
        return part_of_planes(payload, n, part, bits=1, block=self.block)

    def join_parts(self, payloads: Sequence[Tensor], cuts: Sequence[slice]) -> Tensor:
        """Join the scales, and each plane."""
        return join_planes(payloads, cuts, bits=1, block=self.block)

    def _span(self, n: int) -> int:
        return max(n, 1) if self.whole else self.block
