# SPDX-License-Identifier: Apache-2.0
"""Count sketches on a GPU with the same bits as on the CPU: each program owns its cells and adds block after block."""
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.core.kernels.base import on_its_device
from thinwire.core.kernels.decisions import to_device
from thinwire.core.kernels.reference import sketched
from thinwire.core.kernels.reference.rng import mix64
from thinwire.core.kernels.triton_rng import halves, word_at

_SPAN = 1024
# Numbers of rows for which the median is a short network of minima and maxima.
_MEDIAN_ROWS = (1, 3, 5)


@triton.jit
def _negative(place, low, high):
    """Return True if an element's sign is minus."""
    return ((word_at(place >> 5, low, high) >> (place & 31).to(tl.uint32)) & 1) != 0


@triton.jit(do_not_specialize=["scale"])
def _sketch(x, table, seeds, n, columns, blocks, scale, SPAN: tl.constexpr):
    row = tl.program_id(1)
    column = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    mine = column < columns
    offset_low, offset_high = tl.load(seeds + row * 4), tl.load(seeds + row * 4 + 1)
    sign_low, sign_high = tl.load(seeds + row * 4 + 2), tl.load(seeds + row * 4 + 3)
    cells = table + row.to(tl.int64) * columns + column
    total = tl.load(cells, mask=mine, other=0.0)
    for block in range(blocks):
        offset = (word_at(block, offset_low, offset_high) % tl.cast(columns, tl.uint32)).to(tl.int32)
        inner = column - offset
        place = tl.cast(block, tl.int64) * columns + tl.where(inner < 0, inner + columns, inner)
        value = tl.load(x + place, mask=mine & (place < n), other=0.0) * scale
        # Elements beyond the end are not added: even adding a zero could change the sign of a zero.
        total = tl.where(place < n, total + tl.where(_negative(place, sign_low, sign_high), -value, value), total)
    tl.store(cells, total, mask=mine)


@triton.jit
def _cell(table, seeds, place, columns, real, ROW: tl.constexpr):
    """Estimate elements by one row."""
    offset = word_at(place // columns, tl.load(seeds + ROW * 4), tl.load(seeds + ROW * 4 + 1)) % tl.cast(
        columns, tl.uint32
    )
    column = (place % columns + offset.to(tl.int64)) % columns
    value = tl.load(table + ROW * tl.cast(columns, tl.int64) + column, mask=real, other=0.0)
    return tl.where(_negative(place, tl.load(seeds + ROW * 4 + 2), tl.load(seeds + ROW * 4 + 3)), -value, value)


@triton.jit
def _unsketch(table, seeds, out, n, columns, SPAN: tl.constexpr, ROWS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    real = place < n
    a = _cell(table, seeds, place, columns, real, 0)
    # Minima and maxima would lose a NaN of one row.
    wrong = a != a
    middle = a
    if ROWS > 1:
        b, c = _cell(table, seeds, place, columns, real, 1), _cell(table, seeds, place, columns, real, 2)
        wrong = wrong | (b != b) | (c != c)
        low, high, last = tl.minimum(a, b), tl.maximum(a, b), c
        if ROWS > 3:
            d, e = _cell(table, seeds, place, columns, real, 3), _cell(table, seeds, place, columns, real, 4)
            wrong = wrong | (d != d) | (e != e)
            low, high, last = (
                tl.maximum(tl.minimum(a, b), tl.minimum(c, d)),
                tl.minimum(tl.maximum(a, b), tl.maximum(c, d)),
                e,
            )
        middle = tl.maximum(tl.minimum(low, high), tl.minimum(tl.maximum(low, high), last))
    tl.store(out + place, tl.where(wrong, float("nan"), middle), mask=real)


@on_its_device
def sketch_(x: Tensor, table: Tensor, *, key: int, scale: float) -> None:
    """Run `thinwire.core.kernels.sketch_`, with the same bits."""
    rows, columns = table.shape
    _sketch[(triton.cdiv(columns, _SPAN), rows)](
        *(x, table, _seeds(rows, key, x.device), x.numel(), columns, triton.cdiv(x.numel(), columns), scale),
        SPAN=_SPAN,
        enable_fp_fusion=False,
    )


@on_its_device
def unsketch(table: Tensor, n: int, *, key: int) -> Tensor:
    """Run `thinwire.core.kernels.unsketch` for all elements; torch computes tables without 1, 3 or 5 rows."""
    rows, columns = table.shape
    if rows not in _MEDIAN_ROWS:
        return sketched.unsketch(table, None, n, key=key)
    out = torch.empty(n, dtype=torch.float32, device=table.device)
    _unsketch[(triton.cdiv(n, _SPAN),)](
        *(table, _seeds(rows, key, table.device), out, n, columns),
        SPAN=_SPAN,
        ROWS=rows,
        enable_fp_fusion=False,
    )
    return out


def _seeds(rows: int, key: int, device: torch.device) -> Tensor:
    """Return for every row the halves of the seeds of its rotations and of its signs, int64 [rows, 4]."""
    words = [[*halves(mix64(mix64(key) + 2 * row)), *halves(mix64(mix64(key) + 2 * row + 1))] for row in range(rows)]
    return to_device(torch.tensor(words, dtype=torch.int64, device="cpu"), device)  # the host does not wait
