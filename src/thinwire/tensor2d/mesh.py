# SPDX-License-Identifier: Apache-2.0
"""A mesh of ranks, with a communicator for this rank's row, for its column and for the whole mesh.

Rank (i, j) of an r x c mesh is number i * c + j. Its row is (i, 0) .. (i, c - 1), its column (0, j) .. (r - 1, j).
"""

from __future__ import annotations

from collections.abc import Callable
from math import lcm, prod
from typing import Any, NamedTuple, TypeVar, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from thinwire.core.comm.base import Comm
from thinwire.core.comm.group import GroupComm, count_in_store
from thinwire.core.comm.threads import Hub, ThreadComm, run_threads
from thinwire.errors import ConfigError
from thinwire.tensor2d.panels import Panels

T = TypeVar("T")


class Place(NamedTuple):
    """The coordinates of a rank and the shape of its mesh."""

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
        panels: how operands are sent in layers without their own setting.

    Attributes:
        place: this rank's row i and column j, and the numbers of rows r and columns c; also `row`, `column`, `rows`
            and `columns`.

    Raises:
        ConfigError: the ranks are not numbered row by row.
    """

    def __init__(self, along_row: Comm, along_column: Comm, whole: Comm, *, panels: Panels | None = None) -> None:
        self.along_row = along_row
        self.along_column = along_column
        self.whole = whole
        self.panels = panels or Panels()
        self.place = Place(along_column.rank, along_row.rank, along_column.size, along_row.size)
        row, column, rows, columns = self.row, self.column, self.rows, self.columns = self.place
        # Transposing a table addresses rank (i, j) as number i * c + j.
        if (whole.size, whole.rank) != (rows * columns, row * columns + column):
            raise ConfigError(
                f"rank {whole.rank} of {whole.size} at ({row}, {column}) of a {rows}x{columns} mesh: ranks must be "
                "numbered row by row"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh2D:
        """Return this mesh, so that copies of a model share its communicators."""
        return self

    def __repr__(self) -> str:
        return f"Mesh2D({self.rows}x{self.columns} at ({self.row}, {self.column}))"

    @property
    def slices(self) -> int:
        """The required divisor of a dimension that both rows and columns split: lcm(r, c)."""
        return lcm(self.rows, self.columns)

    @property
    def payload_bytes(self) -> float:
        """Bytes that this rank has sent so far, along its row, its column and across the whole mesh."""
        return sum(comm.meter.payload_bytes for comm in (self.along_row, self.along_column, self.whole))

    @property
    def messages(self) -> int:
        """Number of calls so far in which this rank sent data."""
        return sum(comm.meter.messages for comm in (self.along_row, self.along_column, self.whole))

    def rows_of(self, batch: Tensor) -> Tensor:
        """Return this row's share of a batch: [b, ...] to [b / r, ...].

        Raises:
            ConfigError: the rows do not divide the batch.
        """
        if batch.shape[0] % self.rows:
            raise ConfigError(
                f"a batch of {batch.shape[0]}: {self.rows} rows must divide it. "
                f"Use {-(-batch.shape[0] // self.rows) * self.rows}"
            )
        return batch.chunk(self.rows)[self.row]

    def columns_of(self, x: Tensor) -> Tensor:
        """Return this column's share of the last dimension: [..., h] to [..., h / c].

        Raises:
            ConfigError: the columns do not divide the dimension.
        """
        check_divides(x.shape[-1], self.columns, "an activation", f"the mesh is {self.rows}x{self.columns}")
        return x.chunk(self.columns, dim=-1)[self.column].contiguous()


class Mesh3D:
    """One rank's view of a d x r x c mesh: d copies of a model, each on r x c ranks.

    Rank (k, i, j) holds block (i, j) of copy k, and is number (k r + i) c + j. Copies communicate along the first
    dimension only: block (i, j) of one copy with block (i, j) of the others.

    Args:
        data: the d ranks that hold this block, in copy order.
        block: the r x c ranks that hold this copy.
    """

    def __init__(self, data: Comm, block: Mesh2D) -> None:
        self.data = data
        self.block = block

    def __repr__(self) -> str:
        return f"Mesh3D(copy {self.data.rank} of {self.data.size}, {self.block!r})"

    @property
    def folder(self) -> str:
        """The checkpoint folder of this rank's block, the same in every copy."""
        row, column, rows, columns = self.block.place
        return f"mesh-{rows}x{columns}-row-{row}-column-{column}"

    @property
    def payload_bytes(self) -> float:
        """Bytes that this rank has sent so far, to other copies and within its own."""
        return self.data.meter.payload_bytes + self.block.payload_bytes


def check_divides(size: int, divisor: int, what: str, because: str) -> None:
    """Check that a size can be split evenly.

    Raises:
        ConfigError: it cannot; the message has the size and the divisor.
    """
    if size % divisor:
        raise ConfigError(
            f"{what}: {size} % {divisor} must be 0, because {because}. "
            f"Use a mesh that fits or pad to {-(-size // divisor) * divisor}"
        )


def mesh_2d(
    shape: tuple[int, int] | DeviceMesh,
    *,
    device: str = "cpu",
    panels: Panels | None = None,
    timeout: float = 60.0,
) -> Mesh2D:
    """Make the mesh of this process; a collective call of the default group or the `DeviceMesh`'s ranks.

    Args:
        shape: rows and columns over the default group, or a `DeviceMesh` of two dimensions, the rows first.
        device: the device type, if `shape` is not a `DeviceMesh`.
        panels: how operands are sent in layers without their own setting.
        timeout: the longest that one wait may take, in seconds.

    Raises:
        ConfigError: the shape does not match the number of processes, or the `DeviceMesh` does not have two dimensions.
        CommError: not all ranks take part within the timeout.
    """
    shape = _device_mesh(shape, ("row", "column"), device, timeout)
    along_row, along_column = (GroupComm(shape.get_group(dimension), timeout=timeout) for dimension in (1, 0))
    ranks = [int(rank) for rank in shape.mesh.flatten()]
    # Local synchronization: ranks outside this mesh do not take part in creating the group.
    whole = cast(dist.ProcessGroup, dist.new_group(ranks, use_local_synchronization=True))
    return Mesh2D(along_row, along_column, GroupComm(whole, timeout=timeout), panels=panels)


def mesh_3d(
    shape: tuple[int, int, int] | DeviceMesh,
    *,
    device: str = "cpu",
    panels: Panels | None = None,
    timeout: float = 60.0,
) -> Mesh3D:
    """Make the mesh of this process for several copies of a model; a collective call.

    Args:
        shape: copies, rows and columns over the default group, or a `DeviceMesh` of these three dimensions.
        device: the device type, if `shape` is not a `DeviceMesh`.
        panels: how operands are sent in layers without their own setting.
        timeout: the longest that one wait may take, in seconds.

    Raises:
        ConfigError: the shape does not match the number of processes, or the `DeviceMesh` does not have three
            dimensions.
        CommError: not all ranks take part within the timeout.
    """
    shape = _device_mesh(shape, ("data", "row", "column"), device, timeout)
    data, *block = shape.mesh_dim_names or ("data", "row", "column")
    comm = GroupComm(shape.get_group(data), timeout=timeout)
    return Mesh3D(comm, mesh_2d(shape[tuple(block)], panels=panels, timeout=timeout))


def _device_mesh(
    shape: tuple[int, ...] | DeviceMesh, names: tuple[str, ...], device: str, timeout: float
) -> DeviceMesh:
    """Make a mesh of dimensions with these names over the default group, or check the one that is given.

    Raises:
        ConfigError: the shape does not match the number of processes, or the mesh does not have these dimensions.
    """
    if not isinstance(shape, DeviceMesh):
        size, mesh = dist.get_world_size(), "x".join(map(str, shape))
        if min(shape) < 1 or prod(shape) != size:
            raise ConfigError(
                f"shape={mesh} with {size} processes: dimensions must be at least 1, and their product {size}"
            )
        count_in_store("thinwire/meshes", timeout)  # PyTorch would wait forever for a store that does not answer
        return init_device_mesh(device, shape, mesh_dim_names=names)
    if shape.ndim != len(names) or (len(names) > 2 and shape.mesh_dim_names is None):
        raise ConfigError(
            f"the mesh has shape {tuple(shape.shape)}: it must have {len(names)} dimensions. Select them, as in "
            f"mesh{list(names)}"
        )
    return shape


def run_mesh_threads(
    rows: int,
    columns: int,
    work: Callable[[Mesh2D], T],
    *,
    panels: Panels | None = None,
    timeout: float = 60.0,
) -> list[T]:
    """Run `work(mesh)` on rows x columns threads of this process, and return the results row by row.

    Args:
        rows: rows of the mesh.
        columns: columns of the mesh.
        work: the function that each rank runs.
        panels: how operands are sent in layers without their own setting.
        timeout: the longest that one wait may take, in seconds.

    Raises:
        Exception: the first failure of any thread; it ends the other threads too.
    """
    return run_mesh_3d_threads(1, rows, columns, lambda mesh: work(mesh.block), panels=panels, timeout=timeout)


def run_mesh_3d_threads(
    copies: int,
    rows: int,
    columns: int,
    work: Callable[[Mesh3D], T],
    *,
    panels: Panels | None = None,
    timeout: float = 60.0,
) -> list[T]:
    """Run `work(mesh)` on copies x rows x columns threads, and return the results copy by copy, row by row.

    Args:
        copies: copies of the model.
        rows: rows of each copy's mesh.
        columns: columns of each copy's mesh.
        work: the function that each rank runs.
        panels: how operands are sent in layers without their own setting.
        timeout: the longest that one wait may take, in seconds.

    Raises:
        Exception: the first failure of any thread; it ends the other threads too.
    """
    blocks = rows * columns
    whole = [Hub(blocks) for _ in range(copies)]
    across = [Hub(columns) for _ in range(copies * rows)]
    down = [Hub(rows) for _ in range(copies * columns)]
    data = [Hub(copies) for _ in range(blocks)]
    # A failure makes other threads fail with a lost peer; the first in this list is the cause.
    failures: list[BaseException] = []

    def body(world: Comm) -> T:
        copy, block = divmod(world.rank, blocks)
        i, j = divmod(block, columns)

        def comm_of(hub: Hub, rank: int) -> Comm:
            return ThreadComm(hub, rank, timeout=timeout)

        mesh = Mesh2D(
            comm_of(across[copy * rows + i], j),
            comm_of(down[copy * columns + j], i),
            comm_of(whole[copy], block),
            panels=panels,
        )
        try:
            return work(Mesh3D(comm_of(data[block], copy), mesh))
        except BaseException as error:
            failures.append(error)
            # Other threads may be waiting in any of the communicators.
            for hub in (*across, *down, *whole, *data):
                hub.report_failure(world.rank, error)
            raise

    try:
        return run_threads(copies * blocks, body, timeout=timeout)
    except BaseException:
        if failures:
            raise failures[0] from None
        raise
