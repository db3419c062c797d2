# SPDX-License-Identifier: Apache-2.0
r"""Count sketches whose hash rotates blocks of the vector, so memory is read in runs and no hash is stored.

With $c$ columns, element $i$ goes to column $(i + o_q(\lfloor i/c \rfloor)) \bmod c$ of row $q$, with an offset $o_q$
drawn for each block of $c$ elements. Two elements of different blocks collide with probability $1/c$, two of one block
never.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from thinwire.core.kernels.base import as_fp32, check_same_device, compiled, on_gpu, sample_of, writable
from thinwire.core.kernels.largest import candidate_buffers, refuse_nan, top_k
from thinwire.core.kernels.reference import sketched
from thinwire.errors import ConfigError

# As in sketched.c.
_SPAN = 512
_MAX_ROWS = 15
_UINT64 = 0xFFFFFFFFFFFFFFFF


class _Sketch(ctypes.Structure):
    """`sketch` of sketched.c: a table to read, and the length of the vector that it holds."""

    _fields_ = [
        ("table", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "columns")),
        ("key", ctypes.c_uint64),
        ("n", ctypes.c_int64),
    ]


def sketch_(x: Tensor, table: Tensor, *, key: int, scale: float = 1.0) -> None:
    r"""Add `scale * x`, fp32 [n], into a table, fp32 [rows, columns]: $S_{q, h_q(i)} \mathrel{+}= \sigma_q(i)\, x_i$.

    Elements of a cell are added in order. Charikar, Chen and Farach-Colton, ICALP 2002.

    Args:
        x: fp32, [n]; other floats are converted.
        table: fp32, [rows, columns].
        key: of columns and signs; tables of one key can be added.
        scale: multiplies x.

    Raises:
        ConfigError: the table is empty.
    """
    _check(table)
    check_same_device(x, table)
    if x.numel() == 0 or x.is_meta:
        return
    x, library = as_fp32(x), compiled(x)
    with writable(table, read=True) as cells:
        if library is not None:
            library.thinwire_sketch(x.data_ptr(), x.numel(), cells.data_ptr(), *table.shape, key & _UINT64, scale)
            return
        sketch_by = sketched.sketch_
        if on_gpu(x, _sample):
            from thinwire.core.kernels.triton_sketched import sketch_ as sketch_by
        sketch_by(x, cells, key=key, scale=scale)


def unsketch(table: Tensor, indices: Tensor | None, n: int, *, key: int) -> Tensor:
    """Estimate elements of the vector [n] that a table holds, by the median over rows; all elements if None.

    Args:
        table: fp32, [rows, columns].
        indices: of the elements to estimate, int64 [k], in any order.
        n: elements of the vector.
        key: of columns and signs.

    Raises:
        ConfigError: the table is empty, or an index is not below n.
    """
    _check(table)
    table = as_fp32(table)
    if n == 0 or (indices is not None and indices.numel() == 0):
        return table.new_zeros(0)
    if table.is_meta:
        return table.new_empty(n if indices is None else indices.numel())
    if indices is not None:
        return _unsketch_at(table, indices, n, key)
    if on_gpu(table, _sample):
        from thinwire.core.kernels import triton_sketched

        return triton_sketched.unsketch(table, n, key=key)
    library = _median_kernels(table)
    if library is None:
        return sketched.unsketch(table, None, n, key=key)
    out, wrapped = torch.empty(n, dtype=torch.float32, device="cpu"), _wrapped(table)
    sketch = _Sketch(wrapped.data_ptr(), *table.shape, key & _UINT64, n)
    library.thinwire_unsketch(ctypes.byref(sketch), out.data_ptr())
    return out


def _unsketch_at(table: Tensor, indices: Tensor, n: int, key: int) -> Tensor:
    check_same_device(table, indices)
    library = compiled(table) if len(table) <= _MAX_ROWS else None
    if table.device.type == "cpu":  # on a GPU, reading the range back would wait for the device
        low, high = (int(end) for end in indices.aminmax())
        if low < 0 or high >= n:
            raise ConfigError(f"indices from {low} to {high}: must lie in 0..{n - 1}, as the vector has {n} elements")
    if library is None:
        return sketched.unsketch(table, indices, n, key=key)
    indices, out = indices.to(torch.int64).contiguous(), torch.empty(indices.numel(), dtype=torch.float32, device="cpu")
    sketch = _Sketch(table.data_ptr(), *table.shape, key & _UINT64, n)
    library.thinwire_unsketch_at(ctypes.byref(sketch), indices.data_ptr(), indices.numel(), out.data_ptr())
    return out


def cells_at(table: Tensor, indices: Tensor, *, key: int) -> tuple[Tensor, Tensor]:
    """Return the columns of elements in every row of a table, int64 [rows, k], and their signs.

    Args:
        table: [rows, columns]; only its shape is used.
        indices: of the elements, int64 [k].
        key: of columns and signs.

    Returns:
        The columns, and +1 or -1 in fp32.
    """
    rows, columns = table.shape
    if indices.is_meta:
        cells = indices.new_empty((rows, indices.numel()))
        return cells, cells.to(torch.float32)
    return sketched.cells_at(rows, columns, indices, key)


def heavy(table: Tensor, n: int, k: int, *, key: int) -> Tensor:
    """Return the indices of the heavy hitters, the k largest estimates, int64, ascending; the first of equal ones.

    On the CPU estimates are computed a few at a time and never stored.

    Raises:
        ConfigError: the table is empty.
        NonFiniteError: an estimate is NaN; not on a GPU, as in `top_k`.
    """
    _check(table)
    table, k = as_fp32(table), min(k, n)
    if table.is_meta:
        return torch.empty(max(k, 0), dtype=torch.int64, device=table.device)
    library = _median_kernels(table) if k > 0 else None
    if library is None:
        return top_k(unsketch(table, None, n, key=key), k)
    sizes, indices, counts = candidate_buffers(n, k)
    buffers, wrapped = [each.data_ptr() for each in (sizes, indices, counts)], _wrapped(table)
    sketch = _Sketch(wrapped.data_ptr(), *table.shape, key & _UINT64, n)
    found = library.thinwire_heavy(ctypes.byref(sketch), k, *buffers, sizes.numel())
    if found < 0:
        refuse_nan(table)
    return indices[:found].clone()


def _median_kernels(table: Tensor) -> ctypes.CDLL | None:
    """Return the compiled kernels if they can compute the medians: their sorting networks would lose a NaN."""
    library = compiled(table)
    return None if library is None or len(table) > _MAX_ROWS or bool(table.isnan().any()) else library


def _wrapped(table: Tensor) -> Tensor:
    """Append the first columns, as many as one read covers, so that no read wraps around."""
    columns = table.shape[1]
    if columns >= _SPAN:
        return torch.cat([table, table[:, :_SPAN]], 1)
    return table[:, torch.arange(columns + _SPAN, device="cpu") % columns].contiguous()


def _check(table: Tensor) -> None:
    if table.ndim != 2 or not table.numel():
        raise ConfigError(f"table of shape {tuple(table.shape)}: must be [rows, columns], at least one of each")


def _sample(device: torch.device) -> list[Tensor]:
    """See `on_gpu`."""
    x, table = sample_of(device), torch.zeros((3, 700), dtype=torch.float32, device=device)
    sketch_(x, table, key=1)
    return [table, unsketch(table, None, x.numel(), key=1)]
