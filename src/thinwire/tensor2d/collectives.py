# SPDX-License-Identifier: Apache-2.0
"""Collectives with gradients: sums over rows, gathers over columns, and the transpose of a table over the mesh.

Autograd runs the backward of each as a collective too, so every rank must use their results in the same order.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from thinwire.core.comm.base import Comm
from thinwire.tensor2d.mesh import Mesh2D
from thinwire.tensor2d.products import sum_terms
from thinwire.tensor2d.tape import recorded


def sum_gradients_over_rows(parameters: list[Tensor], mesh: Mesh2D) -> list[Tensor]:
    """Return parameters that are replicated over the rows, with gradients that one all-reduce sums over the rows.

    The forward pass sends nothing. The backward pass runs the all-reduce when autograd has the gradients of all uses of
    these parameters.

    Args:
        parameters: parameters of one dtype.
        mesh: the ranks.
    """
    if mesh.rows == 1:
        return parameters
    return list(cast("tuple[Tensor, ...]", _SumGradientsOverRows.apply(mesh, *parameters)))


def sum_over_rows(x: Tensor, mesh: Mesh2D) -> Tensor:
    """Sum `x` over the rows; the gradient flows to this row's `x` unchanged, without communication."""
    return cast(Tensor, _Sum.apply(x, mesh.along_column))


def sum_over_columns(x: Tensor, mesh: Mesh2D) -> Tensor:
    """Sum `x` over the columns; the gradient flows to this column's `x` unchanged, without communication."""
    return cast(Tensor, _Sum.apply(x, mesh.along_row))


def gather_over_columns(x: Tensor, mesh: Mesh2D) -> Tensor:
    """All-gather [..., n / c] over the columns to [..., n]; the backward pass reduce-scatters the gradient."""
    return cast(Tensor, _GatherOverColumns.apply(x, mesh))


@torch.no_grad()
def whole_activation(x: Tensor, mesh: Mesh2D, *, size: int | None = None) -> Tensor:
    """All-gather an activation [b / r, ..., h / c] to [b, ..., h] on every rank, for inspection; it has no gradient.

    Args:
        x: this rank's block.
        mesh: the ranks.
        size: number of features before padding; None if they were not padded.
    """
    row = torch.cat(mesh.along_row.all_gather(x.contiguous()).wait(), dim=-1)
    return torch.cat(mesh.along_column.all_gather(row).wait())[..., :size]


def transpose_blocks(table: Tensor, mesh: Mesh2D) -> Tensor:
    """Transpose a table: from the block [v / r, h / c] to the block [h / r, v / c] of its transpose.

    The backward pass transposes the gradient back. On a square mesh each rank exchanges v h / p elements with the
    rank across the diagonal, in one message.
    """
    return cast(Tensor, _TransposeBlocks.apply(table, mesh))


class _SumGradientsOverRows(Function):
    @staticmethod
    def forward(ctx: Any, mesh: Mesh2D, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.mesh = mesh
        # An unused parameter must get no gradient instead of zeros, as in the serial model.
        ctx.set_materialize_grads(False)
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        # Unused parameters have no gradient; they are the same in every row.
        used = [k for k, grad in enumerate(grads) if grad is not None]
        flat = torch.cat([grads[k].reshape(-1) for k in used])
        parts = ctx.mesh.along_column.all_reduce_(flat).wait().split([grads[k].numel() for k in used])
        sums: list[Tensor | None] = [None] * len(grads)
        for k, part in zip(used, parts, strict=True):
            sums[k] = part.view(grads[k].shape)
        return None, *sums


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        return recorded(lambda: comm.all_reduce_(x.clone()).wait())  # all_reduce_ overwrites its input

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _GatherOverColumns(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh2D) -> Tensor:
        ctx.mesh = mesh
        return recorded(lambda: torch.cat(mesh.along_row.all_gather(x.contiguous()).wait(), dim=-1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        parts = [part.contiguous() for part in grads[0].chunk(ctx.mesh.columns, -1)]
        return reduce_scatter(parts, ctx.mesh.along_row), None


class _TransposeBlocks(Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, mesh: Mesh2D) -> Tensor:
        ctx.mesh = mesh
        return recorded(lambda: _transpose_over_mesh(table, mesh))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _transpose_over_mesh(grads[0].contiguous(), ctx.mesh), None


def reduce_scatter(parts: list[Tensor], comm: Comm) -> Tensor:
    """Send part k to rank k, and return the sum of the received parts, in rank order and fp32 at least."""
    arrived = comm.all_to_all([part.reshape(-1) for part in parts], [parts[comm.rank].numel()] * comm.size).wait()
    return sum_terms(arrived).to(parts[0].dtype).view(parts[comm.rank].shape)


def _transpose_over_mesh(block: Tensor, mesh: Mesh2D) -> Tensor:
    """Return this rank's block of the transposed matrix, from all ranks with a piece of it."""
    i, j, rows, columns = mesh.place
    tall, wide = block.shape[0] * rows, block.shape[1] * columns
    ours = _Rectangle.block(mesh, i, j, tall, wide)
    needed = [_Rectangle.block(mesh, k, m, wide, tall).flipped() for k in range(rows) for m in range(columns)]
    sent = [block[ours.within(piece)].reshape(-1) for piece in needed]
    held = [_Rectangle.block(mesh, k, m, tall, wide) for k in range(rows) for m in range(columns)]
    here = needed[mesh.whole.rank]
    spots = [here.within(other) for other in held]
    # Received as rectangles of this matrix and transposed at the end, so that sender and receiver use equal indices.
    swapped = block.new_empty((tall // columns, wide // rows))
    arrived = mesh.whole.all_to_all(sent, [swapped[spot].numel() for spot in spots]).wait()
    for spot, piece in zip(spots, arrived, strict=True):
        swapped[spot] = piece.view(swapped[spot].shape)
    return swapped.T.contiguous()


class _Rectangle(tuple[int, int, int, int]):
    """Rows [top, bottom) and columns [left, right) of a matrix."""

    @classmethod
    def block(cls, mesh: Mesh2D, row: int, column: int, tall: int, wide: int) -> _Rectangle:
        """Return the rectangle of rank (row, column) in a matrix of `tall` rows and `wide` columns."""
        a, b = tall // mesh.rows, wide // mesh.columns
        return cls((row * a, row * a + a, column * b, column * b + b))

    def flipped(self) -> _Rectangle:
        """Return the same rectangle in the transposed matrix."""
        return _Rectangle((self[2], self[3], self[0], self[1]))

    def within(self, other: _Rectangle) -> tuple[slice, slice]:
        """Return the intersection with `other`, as slices of this rectangle."""
        top, bottom = max(self[0], other[0]), min(self[1], other[1])
        left, right = max(self[2], other[2]), min(self[3], other[3])
        if top >= bottom or left >= right:
            return slice(0, 0), slice(0, 0)
        return slice(top - self[0], bottom - self[0]), slice(left - self[2], right - self[2])
