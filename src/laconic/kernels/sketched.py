r"""Count sketches whose hash is a rotation of every block, so that no table of places is ever held.

With $c$ columns, element $i$ goes to column $(i + o_q(\lfloor i/c \rfloor)) \bmod c$ of row $q$, with an offset $o_q$
drawn for each block of $c$ elements. Two elements of different blocks meet with probability $1/c$, two of one never.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.kernels.chance import mix64, words
from laconic.kernels.largest import top_k


def sketch_(x: Tensor, table: Tensor, *, key: int, scale: float = 1.0) -> None:
    """Add `scale * x`, fp32 [n], into a table, fp32 [rows, columns]."""
    n, columns = x.numel(), table.shape[1]
    for row, line in enumerate(table):
        signed = x * _signs(n, row, key, x.device)
        for block, offset in enumerate(_offsets(n, columns, row, key)):
            piece = signed[block * columns : (block + 1) * columns]
            head = min(len(piece), columns - offset)
            line[offset : offset + head].add_(piece[:head], alpha=scale)
            line[: len(piece) - head].add_(piece[head:], alpha=scale)


def unsketch(table: Tensor, indices: Tensor | None, n: int, *, key: int) -> Tensor:
    """Estimates of elements of the vector [n] that a table holds: the median over rows; of all where None."""
    rows, columns = table.shape
    places = torch.arange(n, device=table.device) if indices is None else indices
    found: list[Tensor] = []
    for row in range(rows):
        offsets = torch.tensor(_offsets(n, columns, row, key), dtype=torch.int64, device=table.device)
        columns_of = (places + offsets[places // columns]) % columns
        found.append(table[row][columns_of] * _signs(n, row, key, table.device)[places])
    return torch.stack(found).median(0).values if n else table.new_zeros(0)


def heavy(table: Tensor, n: int, k: int, *, key: int) -> Tensor:
    """Places of the k largest estimates, int64, rising; the first among equals.

    Raises:
        NonFiniteError: an estimate is NaN.
    """
    return top_k(unsketch(table, None, n, key=key), k)


def _offsets(n: int, columns: int, row: int, key: int) -> list[int]:
    """Of every block in one row."""
    return [mix64(mix64(key) ^ mix64((row << 40) + block + 1)) % columns for block in range(-(-n // columns))]


def _signs(n: int, row: int, key: int, device: torch.device) -> Tensor:
    """+1 or -1, fp32 [n]."""
    drawn = words(n, mix64(key) + 2 * row + 1, device=device)
    return 1.0 - 2.0 * (drawn >> 31).to(torch.float32)
