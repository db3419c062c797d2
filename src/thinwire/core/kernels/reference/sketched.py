# SPDX-License-Identifier: Apache-2.0
"""Count sketches, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.core.kernels.reference.rng import mix64, words, words_at

_WORD_BITS = 32


def sketch_(x: Tensor, table: Tensor, *, key: int, scale: float) -> None:
    """Add `scale * x` into a table, block after block."""
    n, columns = x.numel(), table.shape[1]
    for row, line in enumerate(table):
        signed = x * signs_of(n, row, key, x.device) * scale
        # Block after block, as in the compiled kernel: sums of floats depend on the order.
        for block, offset in enumerate(rotations(n, columns, row, key, x.device).tolist()):
            piece = signed[block * columns : (block + 1) * columns]
            head = min(len(piece), columns - offset)
            line[offset : offset + head].add_(piece[:head])
            line[: len(piece) - head].add_(piece[head:])


def unsketch(table: Tensor, indices: Tensor | None, n: int, *, key: int) -> Tensor:
    """Estimate elements by the medians over rows."""
    rows, columns = table.shape
    if indices is not None:
        cells, signs = cells_at(rows, columns, indices, key)
        return (table.gather(1, cells) * signs).median(0).values
    indices = torch.arange(n, device=table.device)
    found: list[Tensor] = []
    for row in range(rows):
        offset = rotations(n, columns, row, key, table.device)[indices // columns]
        found.append(table[row][(indices + offset) % columns] * signs_of(n, row, key, table.device)[indices])
    return torch.stack(found).median(0).values


def cells_at(rows: int, columns: int, indices: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """Return the column of every element in every row, int64 [rows, k], and its sign there, +1 or -1, fp32."""
    cells, signs = list[Tensor](), list[Tensor]()
    for row in range(rows):
        offset = words_at(indices // columns, mix64(key) + 2 * row) % columns
        cells.append((indices + offset) % columns)
        drawn = words_at(indices // _WORD_BITS, mix64(key) + 2 * row + 1) >> indices % _WORD_BITS
        signs.append(1.0 - 2.0 * (drawn & 1).to(torch.float32))
    return torch.stack(cells), torch.stack(signs)


def rotations(n: int, columns: int, row: int, key: int, device: torch.device) -> Tensor:
    """Return the offset of every block in one row, int64 [ceil(n/columns)]."""
    return words(-(-n // columns), mix64(key) + 2 * row, device=device) % columns


def signs_of(n: int, row: int, key: int, device: torch.device) -> Tensor:
    """Return +1 or -1, fp32 [n]; one random word gives the signs of 32 elements, the lowest bit first."""
    drawn = words(-(-n // _WORD_BITS), mix64(key) + 2 * row + 1, device=device)
    flags = (drawn[:, None] >> torch.arange(_WORD_BITS, device=device)) & 1
    return 1.0 - 2.0 * flags.reshape(-1)[:n].to(torch.float32)
