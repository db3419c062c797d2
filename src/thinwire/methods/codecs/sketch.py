# SPDX-License-Identifier: Apache-2.0
"""A count sketch: a small table of signed sums, from which the largest elements can be estimated."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.core.kernels import as_fp32, heavy, sketch_, unsketch
from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec, CodecTraits, State
from thinwire.registry import registered

# With fewer columns, large elements share cells so often that the median of few rows does not recover them.
_MIN_COLUMNS_PER_ELEMENT = 32


@registered
class Sketch(Codec):
    r"""Add all elements, with random signs, into a small table; estimate the largest elements from it.

    $$S_{q, h_q(i)} \leftarrow S_{q, h_q(i)} + \sigma_q(i)\, x_i, \qquad
      \hat x_i = \operatorname{median}_q\, \sigma_q(i)\, S_{q, h_q(i)}, \qquad
      C(x) = \hat x \text{ where it is among the } k \text{ largest, } 0 \text{ elsewhere,}$$

    with columns $h$ and signs $\sigma$ drawn for each message, the same on all ranks. An all-reduce adds the tables, so
    the estimates are of the largest elements of the *mean*, and the cost does not depend on the number of workers. The
    error of an estimate is about $|x|/\sqrt c$. The residual is known after the sum is decoded: each worker's residual
    is its vector minus the decoded mean. The codec needs error feedback.
    Vectors with no more elements than the table are sent uncompressed.
    Payload: $4rc$ bytes, for vectors of any length.

    Charikar, Chen and Farach-Colton, Finding Frequent Items in Data Streams, ICALP 2002; Ivkin et al.,
    Communication-efficient Distributed SGD with Sketching, NeurIPS 2019, arXiv:1903.04488.

    Args:
        rows: $r$, odd; more rows make a bad estimate less likely and cost more bytes.
        columns: $c$, columns of each row; more columns make estimates more exact.
        kept: $k$, elements that are estimated, at most 1/32 of the columns; more elements send more of the vector, less
            exactly.

    Example:
        >>> import torch
        >>> from thinwire import Sketch
        >>> codec, x = Sketch(rows=3, columns=64, kept=1), torch.zeros(1000)
        >>> x[7] = 5.0
        >>> y = codec.decode(codec.encode(x, {}, key=1), x, key=1)
        >>> y.nonzero().tolist(), y[7].item(), codec.nbytes(1000)
        ([[7]], 5.0, 768)
    """

    rows: int = 5
    columns: int = 16384
    kept: int = 512

    def __post_init__(self) -> None:
        if self.rows < 1 or self.rows % 2 == 0:
            raise ConfigError(f"rows={self.rows}: must be odd for a median. Use 3 or 5")
        if self.kept < 1 or self.columns < _MIN_COLUMNS_PER_ELEMENT * self.kept:
            raise ConfigError(
                f"columns={self.columns}, kept={self.kept}: large elements would collide. Use at least "
                f"{_MIN_COLUMNS_PER_ELEMENT * max(self.kept, 1)} columns"
            )

    def make_traits(self) -> CodecTraits:
        """See `CodecTraits`."""
        # Tables of equal keys can be added, and the decoded elements depend on the sum.
        return CodecTraits(
            linear=True,
            dtype=torch.float32,
            residual_after_sum=True,
            needs_feedback=True,
            takes_nan=True,
        )

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """Return the table in fp32, row by row; short vectors unchanged."""
        x = as_fp32(x)
        if self._fits_table(x.numel()):
            return x.clone()
        table = x.new_zeros(self.rows, self.columns)
        sketch_(x, table, key=int(key))
        return table.view(-1)

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """Write the largest estimates to their indices, zero elsewhere."""
        if self._fits_table(like.numel()):
            return payload.to(like.dtype)
        x = torch.zeros_like(like)
        table = payload.view(self.rows, self.columns)
        indices = heavy(table, x.numel(), self.kept, key=int(key))
        x[indices] = unsketch(table, indices, x.numel(), key=int(key)).to(x.dtype)
        return x

    def nbytes(self, n: int) -> int:
        """Return four bytes per cell of the table, or per element of a shorter vector."""
        return 4 * min(n, self.rows * self.columns)

    def _fits_table(self, n: int) -> bool:
        return n <= self.rows * self.columns
