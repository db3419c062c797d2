"""Messages that a gradient travels too: sums along a column, wider activations along a row, a transposed table."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from thinwire.comm.base import Comm
from thinwire.tensor2d.mesh import Mesh2D
from thinwire.tensor2d.products import sum_exactly
from thinwire.tensor2d.tape import kept


def shared_down(parameters: list[Tensor], mesh: Mesh2D) -> list[Tensor]:
    """The parameters that all rows hold alike, so that one message sums the gradients of all of them.

    The forward pass sends nothing. The backward pass sums over the column once everything that was made of any of them
    has its gradient.

    Args:
        parameters: of one dtype.
        mesh: the ranks.
    """
    if mesh.rows == 1:
        return parameters
    return list(cast("tuple[Tensor, ...]", _SharedDown.apply(mesh, *parameters)))


def total_down(x: Tensor, mesh: Mesh2D) -> Tensor:
    """The sum of each row's `x`, of which this row's part alone has a gradient here."""
    return cast(Tensor, _TotalDown.apply(x, mesh))


def gathered_across(x: Tensor, mesh: Mesh2D) -> Tensor:
    """[..., n / c] of every column to [..., n]; gradients are summed on their way back."""
    return cast(Tensor, _GatheredAcross.apply(x, mesh))


def transposed(table: Tensor, mesh: Mesh2D) -> Tensor:
    """Block [v / r, h / c] of a table to the block [h / r, v / c] of its transpose; gradients go back the same way.

    On a square mesh each rank swaps with the one across the diagonal: v h / p elements, in one message.
    """
    return cast(Tensor, _Transposed.apply(table, mesh))


class _SharedDown(Function):
    @staticmethod
    def forward(ctx: Any, mesh: Mesh2D, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.mesh = mesh
        ctx.set_materialize_grads(False)
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        there = [k for k, grad in enumerate(grads) if grad is not None]
        flat = torch.cat([grads[k].reshape(-1) for k in there])
        parts = ctx.mesh.along_column.all_reduce_(flat).wait().split([grads[k].numel() for k in there])
        sums: list[Tensor | None] = [None] * len(grads)
        for k, part in zip(there, parts, strict=True):
            sums[k] = part.view(grads[k].shape)
        return None, *sums


class _TotalDown(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh2D) -> Tensor:
        return kept(lambda: mesh.along_column.all_reduce_(x.clone()).wait())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _GatheredAcross(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh2D) -> Tensor:
        ctx.mesh = mesh
        return kept(lambda: torch.cat(mesh.along_row.all_gather(x.contiguous()).wait(), dim=-1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return sum_parts([part.contiguous() for part in grads[0].chunk(ctx.mesh.columns, -1)], ctx.mesh.along_row), None


class _Transposed(Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, mesh: Mesh2D) -> Tensor:
        ctx.mesh = mesh
        return kept(lambda: _swap(table, mesh))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _swap(grads[0].contiguous(), ctx.mesh), None


def sum_parts(parts: list[Tensor], comm: Comm) -> Tensor:
    """Send part k to rank k and add up what arrives, in the order of ranks, in fp32 at least."""
    arrived = comm.all_to_all([part.reshape(-1) for part in parts], [parts[comm.rank].numel()] * comm.size).wait()
    return sum_exactly(arrived).to(parts[0].dtype).view(parts[comm.rank].shape)


def _swap(block: Tensor, mesh: Mesh2D) -> Tensor:
    """The block of the transposed matrix, from all ranks that hold a piece of it."""
    i, j, rows, columns = mesh.place
    tall, wide = block.shape[0] * rows, block.shape[1] * columns
    ours = _Rectangle.block(mesh, i, j, tall, wide)
    wanted = [_Rectangle.block(mesh, k, m, wide, tall).flipped() for k in range(rows) for m in range(columns)]
    sent = [block[ours.within(want)].reshape(-1) for want in wanted]
    held = [_Rectangle.block(mesh, k, m, tall, wide) for k in range(rows) for m in range(columns)]
    here = wanted[mesh.whole.rank]
    spots = [here.within(other) for other in held]
    swapped = block.new_empty((tall // columns, wide // rows))
    arrived = mesh.whole.all_to_all(sent, [swapped[spot].numel() for spot in spots]).wait()
    for spot, piece in zip(spots, arrived, strict=True):
        swapped[spot] = piece.view(swapped[spot].shape)
    return swapped.T.contiguous()


class _Rectangle(tuple[int, int, int, int]):
    """Rows [top, bottom) and columns [left, right) of a matrix."""

    @classmethod
    def block(cls, mesh: Mesh2D, row: int, column: int, tall: int, wide: int) -> _Rectangle:
        """The block of one rank."""
        a, b = tall // mesh.rows, wide // mesh.columns
        return cls((row * a, row * a + a, column * b, column * b + b))

    def flipped(self) -> _Rectangle:
        """The same place in the transposed matrix."""
        return _Rectangle((self[2], self[3], self[0], self[1]))

    def within(self, other: _Rectangle) -> tuple[slice, slice]:
        """Where `other` meets this rectangle, counted from this one's corner."""
        top, bottom = max(self[0], other[0]), min(self[1], other[1])
        left, right = max(self[2], other[2]), min(self[3], other[3])
        if top >= bottom or left >= right:
            return slice(0, 0), slice(0, 0)
        return slice(top - self[0], bottom - self[0]), slice(left - self[2], right - self[2])
