"""Embeddings whose table is cut by vocabulary and by feature, and tables of positions."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from thinwire.tensor2d.exchanges import sum_parts
from thinwire.tensor2d.mesh import Mesh2D, check_divides
from thinwire.tensor2d.module import Module2D
from thinwire.tensor2d.placement import Axis, Placement
from thinwire.tensor2d.products import exact_dtype
from thinwire.tensor2d.tape import kept

Algorithm = Literal["auto", "table", "tokens"]


class Embedding2D(Module2D):
    """Row `id` of a table of which rank (i, j) holds [v / r, h / c], for ids [b / r, s] of row i.

    "table" gathers this column's part of the table, a panel at a time, and looks the row's own tokens up; it moves
    v h / c (r - 1) / r elements however many tokens there are. "tokens" gathers all rows' ids and sums what each part
    of the table knows of them; it moves T h / c (r - 1) / r. The backward pass goes the same way back.

    On a CPU an id that is not in the table is an IndexError.

    Args:
        weight: the whole table, [v, h].
        mesh: the ranks.
        algorithm: "auto" takes "tokens" where a batch has fewer tokens than the table has rows.
        padding: an id whose row has no gradient; None is none.
        name: of the layer, for messages.

    Raises:
        ConfigError: the columns cannot share the features evenly.
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
        """int64 [b / r, s], the same in all columns, to [b / r, s, h / c]."""
        if ids.numel() and not torch.compiler.is_compiling() and ids.device.type == "cpu":
            _check_ids(ids, self.num_embeddings)
        return cast(Tensor, _Lookup.apply(self.weight, ids, self.mesh, self._choose(ids), self.padding))

    def _choose(self, ids: Tensor) -> str:
        if self.algorithm != "auto":
            return self.algorithm
        return "tokens" if ids.numel() * self.mesh.rows < self.num_embeddings else "table"


class PositionTable2D(Module2D):
    """A table of which each column holds its features, alike in all rows: positions, or kinds of token.

    Args:
        weight: the whole table, [n, h].
        mesh: the ranks.
        parameter: the name of the table in the serial layer.
        added: whether the layer adds its first s rows to a stream, instead of looking ids up.

    Raises:
        ConfigError: the columns cannot share the features evenly.
    """

    def __init__(self, weight: Tensor, mesh: Mesh2D, *, parameter: str = "weight", added: bool = False) -> None:
        super().__init__(mesh)
        rows, size = weight.shape
        check_divides(size, mesh.columns, f"a table of {size} features", f"the mesh has {mesh.columns} columns")
        self._parameter, self._added = parameter, added
        self.place_(parameter, Placement((Axis(rows), Axis(size, "columns"))), weight)

    def forward(self, x: Tensor) -> Tensor:
        """Ids [...] to [..., h / c]; or a stream [b / r, s, h / c] to the same."""
        table = self.shared(self._parameter)
        assert table is not None, "the table was placed when the layer was made"
        return x + table[: x.shape[1]] if self._added else F.embedding(x, table)


def padded_size(vocabulary: int, mesh: Mesh2D) -> int:
    """The vocabulary after padding, so that rows and columns can cut it; 0 where nothing is to be padded."""
    return -(-vocabulary // mesh.slices) * mesh.slices if vocabulary % mesh.slices else 0


def _check_ids(ids: Tensor, vocabulary: int) -> None:
    low, high = ids.aminmax()
    if low < 0 or high >= vocabulary:
        raise IndexError(f"token ids from {int(low)} to {int(high)}: they must lie in 0..{vocabulary - 1}")


class _Lookup(Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, mesh: Mesh2D, algorithm: str, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.how, ctx.table_shape = (mesh, algorithm, padding), table.shape
        find = _by_tokens if algorithm == "tokens" else _by_table
        return kept(lambda: find(table, ids, mesh))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (ids,), (mesh, algorithm, padding) = ctx.saved_tensors, ctx.how
        spread = _back_to_tokens if algorithm == "tokens" else _back_to_table
        return spread(grads[0], ids, ctx.table_shape, mesh, padding), None, None, None, None


def _by_table(table_vh: Tensor, ids: Tensor, mesh: Mesh2D) -> Tensor:
    height = table_vh.shape[0]
    found = table_vh.new_zeros((*ids.shape, table_vh.shape[1]))
    panels = mesh.panels
    arriving = panels.arriving(
        panels.cuts(height), lambda cut: [lambda: mesh.along_column.all_gather(table_vh[cut[0] : cut[1]].contiguous())]
    )
    for (start, stop), (pieces,) in arriving:
        for row, piece in enumerate(pieces):
            here, mine = _within(ids - row * height - start, stop - start)
            found = torch.where(mine, piece[here], found)
    return found


def _back_to_table(grad: Tensor, ids: Tensor, shape: torch.Size, mesh: Mesh2D, padding: int | None) -> Tensor:
    height = shape[0]
    total = grad.new_empty(shape)
    for start, stop in mesh.panels.cuts(height):
        parts = [_sum_rows(grad, ids - row * height - start, stop - start, padding, ids) for row in range(mesh.rows)]
        total[start:stop] = sum_parts(parts, mesh.along_column)
    return total


def _by_tokens(table_vh: Tensor, ids: Tensor, mesh: Mesh2D) -> Tensor:
    everyone = torch.stack(mesh.along_column.all_gather(ids.to(torch.int32)).wait()).long()
    here, mine = _within(everyone - mesh.row * table_vh.shape[0], table_vh.shape[0])
    return sum_parts(list(torch.where(mine, table_vh[here], 0)), mesh.along_column)


def _back_to_tokens(grad: Tensor, ids: Tensor, shape: torch.Size, mesh: Mesh2D, padding: int | None) -> Tensor:
    everyone = torch.stack(mesh.along_column.all_gather(ids.to(torch.int32)).wait()).long()
    grads = torch.stack(mesh.along_column.all_gather(grad.contiguous()).wait())
    return _sum_rows(grads, everyone - mesh.row * shape[0], shape[0], padding, everyone).to(grad.dtype)


def _sum_rows(grad: Tensor, here: Tensor, height: int, padding: int | None, ids: Tensor) -> Tensor:
    """[height, h / c]: the gradients of those rows of a table that `here` names, added up in fp32 at least."""
    here, mine = _within(here, height)
    if padding is not None:
        mine = mine & (ids != padding).unsqueeze(-1)
    total = grad.new_zeros((height, grad.shape[-1]), dtype=exact_dtype(grad.dtype))
    rows = torch.where(mine, grad, 0).flatten(0, -2).to(total.dtype)
    return total.index_add_(0, here.flatten(), rows).to(grad.dtype)


def _within(here: Tensor, height: int) -> tuple[Tensor, Tensor]:
    """Rows that exist, and [..., 1] whether they are the ones asked for; without waiting for a GPU to say how many."""
    return here.clamp(0, height - 1), ((here >= 0) & (here < height)).unsqueeze(-1)
