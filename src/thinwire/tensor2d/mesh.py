"""Ranks in rows and columns, each of which can talk among itself.

Rank (i, j) of an r x c mesh is number i * c + j. Its row is (i, 0) .. (i, c - 1), its column (0, j) .. (r - 1, j).
"""

from __future__ import annotations

from math import lcm
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from thinwire.comm.base import Comm
from thinwire.comm.group import GroupComm
from thinwire.errors import ConfigError
from thinwire.tensor2d.panels import Panels


class Place(NamedTuple):
    """Where a rank stands in a mesh."""

    row: int
    column: int
    rows: int
    columns: int


class Mesh2D:
    """One rank's view of an r x c mesh.

    Args:
        along_row: the c ranks of this row, in the order of columns.
        along_column: the r ranks of this column, in the order of rows.
        whole: all ranks, row by row.
        panels: how operands travel where a layer does not say.

    Raises:
        ConfigError: the three do not make a mesh.
    """

    def __init__(self, along_row: Comm, along_column: Comm, whole: Comm, *, panels: Panels | None = None) -> None:
        self.along_row = along_row
        self.along_column = along_column
        self.whole = whole
        self.panels = panels or Panels()
        self.place = Place(along_column.rank, along_row.rank, along_column.size, along_row.size)
        row, column, rows, columns = self.place
        if (whole.size, whole.rank) != (rows * columns, row * columns + column):
            raise ConfigError(
                f"rank {whole.rank} of {whole.size} at ({row}, {column}) of a {rows}x{columns} mesh: ranks must be "
                "numbered row by row"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh2D:
        """Copies of a model talk over the same wires."""
        return self

    def __repr__(self) -> str:
        return f"Mesh2D({self.rows}x{self.columns} at ({self.row}, {self.column}))"

    @property
    def rows(self) -> int:
        """How many rows there are, r."""
        return self.place.rows

    @property
    def columns(self) -> int:
        """How many columns there are, c."""
        return self.place.columns

    @property
    def row(self) -> int:
        """This rank's row, i."""
        return self.place.row

    @property
    def column(self) -> int:
        """This rank's column, j."""
        return self.place.column

    @property
    def slices(self) -> int:
        """Into how many equal parts a dimension must fall that both rows and columns cut: their least multiple."""
        return lcm(self.rows, self.columns)

    @property
    def payload_bytes(self) -> float:
        """Bytes that this rank has sent so far, along its row, its column and across the whole mesh."""
        return sum(comm.meter.payload_bytes for comm in (self.along_row, self.along_column, self.whole))

    @property
    def messages(self) -> int:
        """Calls so far in which this rank sent anything."""
        return sum(comm.meter.messages for comm in (self.along_row, self.along_column, self.whole))

    def rows_of(self, batch: Tensor) -> Tensor:
        """This row's share of a batch: [b, ...] to [b / r, ...].

        Raises:
            ConfigError: the rows cannot share it evenly.
        """
        if batch.shape[0] % self.rows:
            raise ConfigError(
                f"a batch of {batch.shape[0]}: {self.rows} rows must share it evenly; "
                f"use {-(-batch.shape[0] // self.rows) * self.rows}"
            )
        return batch.chunk(self.rows)[self.row]

    def columns_of(self, x: Tensor) -> Tensor:
        """This column's share of the last dimension: [..., h] to [..., h / c].

        Raises:
            ConfigError: the columns cannot share it evenly.
        """
        check_divides(x.shape[-1], self.columns, "an activation", f"the mesh is {self.rows}x{self.columns}")
        return x.chunk(self.columns, dim=-1)[self.column].contiguous()


class Mesh3D:
    """One rank's view of a d x r x c mesh: d copies of a model, each on r x c ranks.

    Rank (k, i, j) holds block (i, j) of copy k, and is number (k r + i) c + j. Copies talk along the first dimension
    only, block (i, j) of one with block (i, j) of the others.

    Args:
        data: the d ranks that hold this block, in the order of copies.
        block: the r x c ranks that hold this copy.
    """

    def __init__(self, data: Comm, block: Mesh2D) -> None:
        self.data = data
        self.block = block

    def __repr__(self) -> str:
        return f"Mesh3D(copy {self.data.rank} of {self.data.size}, {self.block!r})"

    @property
    def folder(self) -> str:
        """A name for this rank's block, the same in every copy."""
        row, column, rows, columns = self.block.place
        return f"mesh-{rows}x{columns}-row-{row}-column-{column}"

    @property
    def payload_bytes(self) -> float:
        """Bytes that this rank has sent so far, to other copies and within its own."""
        return self.data.meter.payload_bytes + self.block.payload_bytes


def check_divides(size: int, divisor: int, what: str, because: str) -> None:
    """Refuse a size that cannot be cut evenly.

    Raises:
        ConfigError: naming the thing, its size and the divisor.
    """
    if size % divisor:
        raise ConfigError(
            f"{what}: {size} % {divisor} must be 0, because {because}; "
            f"use a mesh that fits or pad to {-(-size // divisor) * divisor}"
        )


def mesh_2d(
    shape: tuple[int, int] | DeviceMesh,
    *,
    device: str = "cpu",
    panels: Panels | None = None,
    timeout: float = 60.0,
) -> Mesh2D:
    """The mesh of this process; all processes of the default group, or of the `DeviceMesh`, call together.

    Args:
        shape: rows and columns over the default group, or a `DeviceMesh` of two dimensions, the rows first.
        device: the kind of device, where a shape is given.
        panels: how operands travel where a layer does not say.
        timeout: how long one wait may last.

    Raises:
        ConfigError: the shape does not fit the number of processes, or the `DeviceMesh` has not two dimensions.
    """
    if not isinstance(shape, DeviceMesh):
        rows, columns = shape
        if rows < 1 or columns < 1 or rows * columns != dist.get_world_size():
            raise ConfigError(
                f"a {rows}x{columns} mesh needs {rows * columns} processes; there are {dist.get_world_size()}"
            )
        shape = init_device_mesh(device, (rows, columns), mesh_dim_names=("row", "column"))
    if shape.ndim != 2:
        raise ConfigError(f"a mesh of shape {tuple(shape.shape)}: name two dimensions, as in mesh['row', 'column']")
    along_row, along_column = (GroupComm(shape.get_group(dimension), timeout=timeout) for dimension in (1, 0))
    ranks = [int(rank) for rank in shape.mesh.flatten()]
    whole = cast(dist.ProcessGroup, dist.new_group(ranks, use_local_synchronization=True))
    return Mesh2D(along_row, along_column, GroupComm(whole, timeout=timeout), panels=panels)


def mesh_3d(
    shape: tuple[int, int, int] | DeviceMesh,
    *,
    device: str = "cpu",
    panels: Panels | None = None,
    timeout: float = 60.0,
) -> Mesh3D:
    """The mesh of this process where several copies of a model train together; all processes call together.

    Args:
        shape: copies, rows and columns over the default group, or a `DeviceMesh` of these three dimensions.
        device: the kind of device, where a shape is given.
        panels: how operands travel where a layer does not say.
        timeout: how long one wait may last.

    Raises:
        ConfigError: the shape does not fit the number of processes, or the `DeviceMesh` has not three dimensions.
    """
    names = ("data", "row", "column")
    if not isinstance(shape, DeviceMesh):
        copies, rows, columns = shape
        if min(shape) < 1 or copies * rows * columns != dist.get_world_size():
            raise ConfigError(
                f"{copies} copies on {rows}x{columns} meshes need {copies * rows * columns} processes; there are "
                f"{dist.get_world_size()}"
            )
        shape = init_device_mesh(device, (copies, rows, columns), mesh_dim_names=names)
    if shape.ndim != 3 or shape.mesh_dim_names is None:
        raise ConfigError(f"a mesh of shape {tuple(shape.shape)}: name three dimensions, copies, rows and columns")
    data, *block = shape.mesh_dim_names
    comm = GroupComm(shape.get_group(data), timeout=timeout)
    return Mesh3D(comm, mesh_2d(shape[tuple(block)], panels=panels, timeout=timeout))
