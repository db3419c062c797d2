"""A mesh of threads: every rank of an r x c mesh in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from thinwire.comm.base import Comm
from thinwire.comm.threads import Hub, ThreadComm, run_threads
from thinwire.tensor2d.mesh import Mesh2D, Mesh3D
from thinwire.tensor2d.panels import Panels

T = TypeVar("T")


def run_mesh_threads(
    rows: int,
    columns: int,
    work: Callable[[Mesh2D], T],
    *,
    panels: Panels | None = None,
    timeout: float = 60.0,
) -> list[T]:
    """Run `work(mesh)` on rows x columns threads and return the results row by row.

    Args:
        rows: of the mesh.
        columns: of the mesh.
        work: what each rank does.
        panels: how operands travel where a layer does not say.
        timeout: how long one wait may last.

    Raises:
        Exception: the first failure of any thread; the others are told and end too.
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
    """Run `work(mesh)` on copies x rows x columns threads and return the results copy by copy, row by row.

    Args:
        copies: of the model.
        rows: of each copy's mesh.
        columns: of each copy's mesh.
        work: what each rank does.
        panels: how operands travel where a layer does not say.
        timeout: how long one wait may last.

    Raises:
        Exception: the first failure of any thread; the others are told and end too.
    """
    blocks = rows * columns
    whole = [Hub(blocks) for _ in range(copies)]
    across = [Hub(columns) for _ in range(copies * rows)]
    down = [Hub(rows) for _ in range(copies * columns)]
    data = [Hub(copies) for _ in range(blocks)]
    failures: list[BaseException] = []  # what a row or a column passes on comes after what it passes on

    def body(everyone: Comm) -> T:
        copy, block = divmod(everyone.rank, blocks)
        i, j = divmod(block, columns)

        def among(hub: Hub, rank: int) -> Comm:
            return ThreadComm(hub, rank, timeout=timeout)

        mesh = Mesh2D(
            among(across[copy * rows + i], j),
            among(down[copy * columns + j], i),
            among(whole[copy], block),
            panels=panels,
        )
        try:
            return work(Mesh3D(among(data[block], copy), mesh))
        except BaseException as error:
            failures.append(error)
            for hub in (*across, *down, *whole, *data):
                hub.lose(everyone.rank, error)
            raise

    try:
        return run_threads(copies * blocks, body, timeout=timeout)
    except BaseException:
        if failures:
            raise failures[0] from None
        raise
