"""One bit an element: its sign, and a scale for every block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, State, as_single, payload_like
from thinwire.errors import ConfigError
from thinwire.kernels import decode_signs_, encode_signs_, sign_nbytes, sum_signs_
from thinwire.validation import check_kinds

_SCALE_BYTES = 4


@dataclass(frozen=True)
class OneBit(Codec):
    r"""Signs, and the mean size of each block's elements.

    $$C(x)_i = \pm\sigma_b, \qquad \sigma_b = \tfrac1{|b|}\sum_{j \in b} |x_j| \;\text{("l1")}, \qquad
      \sigma_b = \sqrt{\tfrac1{|b|}\sum_{j \in b} x_j^2} \;\text{("l2")}$$

    with the sign of $x_i$; a block of zeros stays zero. With the mean of sizes nothing unsaid ever exceeds what was to
    be said, $|x - C(x)|^2 = |x|^2 - |b|\sigma_b^2$ in each block; the root of the mean square can leave twice as much,
    and drains what is owed faster. Small elements of a block are overstated, so this needs error feedback.
    Payload: an eighth of a byte an element, and 4 bytes a block.

    Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy et al., Error Feedback Fixes
    SignSGD, ICML 2019, arXiv:1901.09847; whole vectors: Tang et al., 1-bit Adam, ICML 2021, arXiv:2102.02888.

    Args:
        block: elements that share a scale, a multiple of 8; fewer say more, in more bytes.
        norm: the scale is the mean absolute value, "l1", or the root of the mean square, "l2".
        whole: one scale for the whole vector instead, as in the papers; parts of it that are much smaller than the
            rest are then lost in it.
    """

    block: int = 2048
    norm: Literal["l1", "l2"] = "l1"
    whole: bool = False

    def __post_init__(self) -> None:
        """Check the kinds and the block."""
        check_kinds(self)
        if self.block < 8 or self.block % 8:
            raise ConfigError(f"block={self.block}: signs are cut at whole bytes; use a multiple of 8, such as 2048")

    @property
    def needs_feedback(self) -> bool:
        """Yes."""
        return True

    @property
    def alignment(self) -> int:
        """A block; whole bytes of signs where the scale is everyone's."""
        return 8 if self.whole else self.block

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """The scales, then the signs: element 8k+j is bit j of byte k."""
        payload = payload_like(x, self.nbytes(x.numel()))
        encode_signs_(as_single(x), None, payload, **self._how(x.numel()))
        return payload

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """Each element its block's scale, with its sign."""
        x = torch.empty_like(like, dtype=torch.float32)
        self.decode_(payload, x)
        return x.to(like.dtype)

    def decode_(self, payload: Tensor, x: Tensor, key: int = 0) -> None:
        """In place, in one pass."""
        decode_signs_(payload, x, block=self._span(x.numel()), scale_bytes=_SCALE_BYTES)

    def nbytes(self, n: int) -> int:
        """An eighth of a byte an element, and 4 bytes a block."""
        return sign_nbytes(n, self._span(n), _SCALE_BYTES)

    def encode_with_residual_(self, x: Tensor, residual: Tensor, key: int = 0) -> Tensor:
        """Encode `x + residual` and leave the rest in `x`, in one pass."""
        payload = payload_like(x, self.nbytes(x.numel()))
        # The kernel leaves the rest where it found its second argument; a sum has no order.
        encode_signs_(residual, x, payload, **self._how(x.numel()))
        return payload

    def encode_pieces_with_residual_(
        self, x: Tensor, residual: Tensor, cuts: Sequence[slice], keys: Sequence[int]
    ) -> list[Tensor]:
        """One pass over all pieces, whose scales and signs lie end to end; a whole vector's scale goes to each."""
        payload, span = self.encode_with_residual_(x, residual), self._span(x.numel())
        scales, signs = payload.split([payload.numel() - -(-x.numel() // 8), -(-x.numel() // 8)])
        return [_piece(cut, scales, signs, span) for cut in cuts]

    def total(self, payloads: Sequence[Tensor], like: Tensor, keys: Sequence[int]) -> Tensor:
        """The sum of what payloads stand for, in one pass."""
        x = torch.empty_like(like, dtype=torch.float32)
        sum_signs_(torch.stack(list(payloads)), x, block=self._span(x.numel()), scale_bytes=_SCALE_BYTES)
        return x.to(like.dtype)

    def _span(self, n: int) -> int:
        return max(n, 1) if self.whole else self.block

    def _how(self, n: int) -> dict[str, Any]:
        return {"block": self._span(n), "norm": self.norm, "scale_bytes": _SCALE_BYTES}


def _piece(cut: slice, scales: Tensor, signs: Tensor, span: int) -> Tensor:
    """The scales of the blocks that a piece touches, and its signs."""
    if cut.start == cut.stop:
        return signs[:0]
    touched = scales[cut.start // span * _SCALE_BYTES : -(-cut.stop // span) * _SCALE_BYTES]
    return torch.cat([touched, signs[cut.start // 8 : -(-cut.stop // 8)]])
