# SPDX-License-Identifier: Apache-2.0
"""Embeddings whose table is split by vocabulary and by features, and tables of positions."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from thinwire.errors import ConfigError
from thinwire.tensor2d.collectives import reduce_scatter
from thinwire.tensor2d.mesh import Mesh2D, check_divides
from thinwire.tensor2d.module import Module2D
from thinwire.tensor2d.placement import Axis, Placement
from thinwire.tensor2d.products import accumulation_dtype
from thinwire.tensor2d.tape import recorded

Algorithm = Literal["auto", "table", "tokens"]


class Embedding2D(Module2D):
    """An embedding of ids [b / r, s]; rank (i, j) holds the block [v / r, h / c] of the table.

    The algorithm "table" gathers this column's part of the table, a panel at a time, and looks up the row's own
    tokens; it sends v h / c (r - 1) / r elements for any number of tokens. "tokens" gathers the ids of all rows,
    looks them up in each part of the table and reduce-scatters the results; it sends T h / c (r - 1) / r elements. The
    backward pass sends as much.

    On a CPU an id outside the table raises ConfigError on all ranks, with the row of the mesh.

    Args:
        weight: the whole table, [v, h].
        mesh: the ranks.
        algorithm: "auto" uses "tokens" if a batch has fewer tokens than the table has rows.
        padding: the id whose row has no gradient, or None.
        name: name of the layer, for error messages.

    Raises:
        ConfigError: the mesh does not divide the features.
    """

    weight: Tensor

    def __init__(
        self,
        weight: Tensor,
        mesh: Mesh2D,
        *,
        algorithm: Algorithm = "auto",
        padding: int | None = None,
        name: str = "Embedding2D",
    ) -> None:
        super().__init__(mesh)
        vocabulary, size = weight.shape
        check_divides(size, mesh.slices, f"{name} of {size} features", f"the mesh is {mesh.rows}x{mesh.columns}")
        self.algorithm, self.padding = algorithm, padding
        self.num_embeddings, self.embedding_dim = vocabulary, size
        padded = padded_size(vocabulary, mesh)
        axes = (Axis(vocabulary, "rows", padded=padded), Axis(size, "columns"))
        self.place_("weight", Placement(axes), weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Map int64 [b / r, s], the same in all columns, to [b / r, s, h / c]."""
        # Not on a GPU: reading the range back would wait for the device at every call.
        if ids.numel() and not torch.compiler.is_compiling() and ids.device.type == "cpu":
            low, high = ids.aminmax()
            if low < 0 or high >= self.num_embeddings:
                # The other rows wait in their columns for this one, now or later.
                self.mesh.along_column.raise_on_all(
                    ConfigError(
                        f"row {self.mesh.row} of the mesh has token ids from {int(low)} to {int(high)}: they must lie "
                        f"in 0..{self.num_embeddings - 1}, the rows of the table"
                    )
                )
        algorithm: str = self.algorithm
        if algorithm == "auto":
            algorithm = "tokens" if ids.numel() * self.mesh.rows < self.num_embeddings else "table"
        return cast(Tensor, _Lookup.apply(self.weight, ids, self.mesh, algorithm, self.padding))


class PositionTable2D(Module2D):
    """A table of positions or token types, split by features and replicated over the rows.

    Args:
        weight: the whole table, [n, h].
        mesh: the ranks.
        parameter: the name of the table in the serial layer.
        added: whether the layer adds the table's first s rows to a stream, instead of looking up ids.

    Raises:
        ConfigError: the columns do not divide the features.
    """

    def __init__(self, weight: Tensor, mesh: Mesh2D, *, parameter: str = "weight", added: bool = False) -> None:
        super().__init__(mesh)
        rows, size = weight.shape
        check_divides(size, mesh.columns, f"a table of {size} features", f"the mesh has {mesh.columns} columns")
        self._parameter, self._added = parameter, added
        self.place_(parameter, Placement((Axis(rows), Axis(size, "columns"))), weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map ids [...] to [..., h / c]; with `added`, a stream [b / r, s, h / c] to the same shape."""
        table = self.shared(self._parameter)
        assert table is not None, "the constructor placed the table"
        return x + table[: x.shape[1]] if self._added else F.embedding(x, table)


def padded_size(vocabulary: int, mesh: Mesh2D) -> int:
    """Return the vocabulary padded to a multiple of rows and columns; 0 if no padding is needed."""
    return -(-vocabulary // mesh.slices) * mesh.slices if vocabulary % mesh.slices else 0


class _Lookup(Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, mesh: Mesh2D, algorithm: str, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.settings, ctx.table_shape = (mesh, algorithm, padding), table.shape
        look_up = _gather_ids if algorithm == "tokens" else _gather_table
        return recorded(lambda: look_up(table, ids, mesh))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (ids,), (mesh, algorithm, padding) = ctx.saved_tensors, ctx.settings
        table_gradient = _gradient_from_ids if algorithm == "tokens" else _gradient_of_gathered_table
        return table_gradient(grads[0], ids, ctx.table_shape, mesh, padding), None, None, None, None


def _gather_table(table_vh: Tensor, ids: Tensor, mesh: Mesh2D) -> Tensor:
    height = table_vh.shape[0]
    found = table_vh.new_zeros((*ids.shape, table_vh.shape[1]))
    panels = mesh.panels
    gathered = panels.pipeline(
        panels.cuts(height), lambda cut: [lambda: mesh.along_column.all_gather(table_vh[cut[0] : cut[1]].contiguous())]
    )
    for (start, stop), (pieces,) in gathered:
        # Each row of the mesh holds the same part of its block of this panel.
        for row, piece in enumerate(pieces):
            local, inside = _within(ids - row * height - start, stop - start)
            found = torch.where(inside, piece[local], found)
    return found


def _gradient_of_gathered_table(
    grad: Tensor, ids: Tensor, shape: torch.Size, mesh: Mesh2D, padding: int | None
) -> Tensor:
    height = shape[0]
    total = grad.new_empty(shape)
    for start, stop in mesh.panels.cuts(height):
        parts = [_sum_rows(grad, ids - row * height - start, stop - start, padding, ids) for row in range(mesh.rows)]
        total[start:stop] = reduce_scatter(parts, mesh.along_column)
    return total


def _gather_ids(table_vh: Tensor, ids: Tensor, mesh: Mesh2D) -> Tensor:
    # As int32, which halves the bytes and suffices for any vocabulary.
    all_ids = torch.stack(mesh.along_column.all_gather(ids.to(torch.int32)).wait()).long()
    local, inside = _within(all_ids - mesh.row * table_vh.shape[0], table_vh.shape[0])
    return reduce_scatter(list(torch.where(inside, table_vh[local], 0)), mesh.along_column)


def _gradient_from_ids(grad: Tensor, ids: Tensor, shape: torch.Size, mesh: Mesh2D, padding: int | None) -> Tensor:
    all_ids = torch.stack(mesh.along_column.all_gather(ids.to(torch.int32)).wait()).long()
    grads = torch.stack(mesh.along_column.all_gather(grad.contiguous()).wait())
    return _sum_rows(grads, all_ids - mesh.row * shape[0], shape[0], padding, all_ids).to(grad.dtype)


def _sum_rows(grad: Tensor, local: Tensor, height: int, padding: int | None, ids: Tensor) -> Tensor:
    """Return the gradient [height, h / c] of a part of the table with rows `local`, summed in fp32 at least."""
    local, inside = _within(local, height)
    if padding is not None:
        inside = inside & (ids != padding).unsqueeze(-1)
    total = grad.new_zeros((height, grad.shape[-1]), dtype=accumulation_dtype(grad.dtype))
    rows = torch.where(inside, grad, 0).flatten(0, -2).to(total.dtype)
    return total.index_add_(0, local.flatten(), rows).to(grad.dtype)


def _within(local: Tensor, height: int) -> tuple[Tensor, Tensor]:
    """Clamp row numbers into [0, height), and return a mask [..., 1] of those that were inside.

    Masks are used since indexing by a condition would make a GPU report the result size to the CPU.
    """
    return local.clamp(0, height - 1), ((local >= 0) & (local < height)).unsqueeze(-1)
