r"""Count sketches whose hash is a rotation of every block, so that no table of places is ever held.

With $c$ columns, element $i$ goes to column $(i + o_q(\lfloor i/c \rfloor)) \bmod c$ of row $q$, with an offset $o_q$
drawn for each block of $c$ elements. Two elements of different blocks meet with probability $1/c$, two of one never.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.kernels.base import check_same_device, compiled, on_gpu, single, writable
from thinwire.kernels.largest import check_numbers, net_of, top_k
from thinwire.kernels.reference import sketched

# As in sketched.c.
_SPAN = 512
_MOST_ROWS = 15
_LONG = 0xFFFFFFFFFFFFFFFF


class _Sketch(ctypes.Structure):
    """`sketch` of sketched.c: a table that is read, and how many elements it holds."""

    _fields_ = [
        ("table", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "columns")),
        ("key", ctypes.c_uint64),
        ("n", ctypes.c_int64),
    ]


def sketch_(x: Tensor, table: Tensor, *, key: int, scale: float = 1.0) -> None:
    r"""Add `scale * x`, fp32 [n], into a table, fp32 [rows, columns]: $S_{q, h_q(i)} \mathrel{+}= \sigma_q(i)\, x_i$.

    Elements of a cell are added in their order. Charikar, Chen and Farach-Colton, ICALP 2002.

    Args:
        x: fp32, [n]; other floats are converted.
        table: fp32, [rows, columns].
        key: of places and signs; tables of one key add up.
        scale: of what is added.

    Raises:
        ConfigError: the table has no cell.
    """
    _check(table)
    check_same_device(x, table)
    if x.numel() == 0:
        return
    with writable(table, read=True) as cells:
        _sketch(single(x), cells, key, scale)


def _sketch(x: Tensor, table: Tensor, key: int, scale: float) -> None:
    library = compiled(x)
    if library is not None:
        library.thinwire_sketch(x.data_ptr(), x.numel(), table.data_ptr(), *table.shape, key & _LONG, scale)
    elif on_gpu(x):
        from thinwire.kernels import triton_sketched

        triton_sketched.sketch_(x, table, key=key, scale=scale)
    else:
        sketched.sketch_(x, table, key=key, scale=scale)


def unsketch(table: Tensor, indices: Tensor | None, n: int, *, key: int) -> Tensor:
    """Estimates of elements of the vector [n] that a table holds: the median over rows; of all where None.

    Raises:
        ConfigError: the table has no cell.
    """
    _check(table)
    table = single(table)
    if n == 0 or (indices is not None and indices.numel() == 0):
        return table.new_zeros(0)
    if indices is None and on_gpu(table):
        from thinwire.kernels import triton_sketched

        return triton_sketched.unsketch(table, n, key=key)
    library = None if indices is not None else _reader(table)
    if library is None:
        return sketched.unsketch(table, indices, n, key=key)
    out, around = torch.empty(n), _around(table)
    sketch = _Sketch(around.data_ptr(), *table.shape, key & _LONG, n)
    library.thinwire_unsketch(ctypes.byref(sketch), out.data_ptr())
    return out


def heavy(table: Tensor, n: int, k: int, *, key: int) -> Tensor:
    """Places of the k largest estimates, int64, rising; the first among equals.

    On the CPU estimates are made a few at a time and never held.

    Raises:
        ConfigError: the table has no cell.
        NonFiniteError: an estimate is NaN.
    """
    _check(table)
    table, k = single(table), min(k, n)
    library = _reader(table) if k > 0 else None
    if library is None:
        return top_k(unsketch(table, None, n, key=key), k)
    sizes, places, counts = net_of(n, k)
    caught, around = [each.data_ptr() for each in (sizes, places, counts)], _around(table)
    sketch = _Sketch(around.data_ptr(), *table.shape, key & _LONG, n)
    found = library.thinwire_heavy(ctypes.byref(sketch), k, *caught, sizes.numel())
    if found < 0:
        check_numbers(table)
    return places[:found].clone()


def _reader(table: Tensor) -> ctypes.CDLL | None:
    """The compiled kernels, for tables whose medians they take; NaN has no place in a median of theirs."""
    library = compiled(table)
    return None if library is None or len(table) > _MOST_ROWS or bool(table.isnan().any()) else library


def _around(table: Tensor) -> Tensor:
    """The table with as many columns more as are read at once, going round."""
    columns = table.shape[1]
    if columns >= _SPAN:
        return torch.cat([table, table[:, :_SPAN]], 1)
    return table[:, torch.arange(columns + _SPAN) % columns].contiguous()


def _check(table: Tensor) -> None:
    if table.ndim != 2 or not table.numel():
        raise ConfigError(f"table of shape {tuple(table.shape)}: must be [rows, columns], at least one of each")
