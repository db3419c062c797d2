"""A count sketch: sums of elements with random signs, from which the large ones can be told."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, State, as_single
from thinwire.errors import ConfigError
from thinwire.kernels import heavy, sketch_, unsketch
from thinwire.validation import check_kinds

_LEAST_COLUMNS = 32


@dataclass(frozen=True)
class Sketch(Codec):
    r"""Add all elements, with random signs, into a small table; read the largest ones back from it.

    $$S_{q, h_q(i)} \leftarrow S_{q, h_q(i)} + \sigma_q(i)\, x_i, \qquad
      \hat x_i = \operatorname{median}_q\, \sigma_q(i)\, S_{q, h_q(i)}, \qquad
      C(x) = \hat x \text{ where it is among the } k \text{ largest, } 0 \text{ elsewhere,}$$

    with places $h$ and signs $\sigma$ drawn anew for each message, the same on all ranks. Tables add up on the wire, so
    that what is read back are the largest elements of the *mean*, at a cost that does not depend on the number of
    workers. An estimate is off by $|x|/\sqrt c$ or so. What a table leaves unsaid is known once the sum has been read:
    each worker then owes its own vector less what everyone has read. It needs error feedback.
    Vectors with no more elements than the table travel as they are.
    Payload: $4rc$ bytes, however long the vector is.

    Charikar, Chen and Farach-Colton, Finding Frequent Items in Data Streams, ICALP 2002; Ivkin et al.,
    Communication-efficient Distributed SGD with Sketching, NeurIPS 2019, arXiv:1903.04488.

    Args:
        rows: $r$, odd; more make a bad estimate less likely, in more bytes.
        columns: $c$ of each row; more make estimates more exact.
        kept: $k$, elements read back, at most a thirty-second of the columns; more say more, less exactly.
    """

    rows: int = 5
    columns: int = 16384
    kept: int = 512

    def __post_init__(self) -> None:
        """Check the kinds and the ranges."""
        check_kinds(self)
        if self.rows < 1 or self.rows % 2 == 0:
            raise ConfigError(f"rows={self.rows}: a median wants an odd number; use 3 or 5")
        if self.kept < 1 or self.columns < _LEAST_COLUMNS * self.kept:
            raise ConfigError(
                f"columns={self.columns}, kept={self.kept}: large elements would hide each other; use at least "
                f"{_LEAST_COLUMNS * max(self.kept, 1)} columns"
            )

    @property
    def linear(self) -> bool:
        """Yes, for equal keys."""
        return True

    @property
    def residual_after_sum(self) -> bool:
        """Yes: which elements are read back depends on the sum."""
        return True

    @property
    def dtype(self) -> torch.dtype:
        """Values in fp32."""
        return torch.float32

    @property
    def needs_feedback(self) -> bool:
        """Yes."""
        return True

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """The table, row after row, in fp32; short vectors as they are."""
        x = as_single(x)
        if self._short(x.numel()):
            return x.clone()
        table = x.new_zeros(self.rows, self.columns)
        if not x.is_meta:
            sketch_(x, table, key=int(key))
        return table.view(-1)

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """The largest estimates in their places, zero elsewhere."""
        if self._short(like.numel()):
            return payload.to(like.dtype)
        x = torch.zeros_like(like)
        if not x.is_meta:
            table = payload.view(self.rows, self.columns)
            places = heavy(table, x.numel(), self.kept, key=int(key))
            x[places] = unsketch(table, places, x.numel(), key=int(key)).to(x.dtype)
        return x

    def nbytes(self, n: int) -> int:
        """Four bytes a cell, or an element where those are fewer."""
        return 4 * min(n, self.rows * self.columns)

    def _short(self, n: int) -> bool:
        return n <= self.rows * self.columns
