"""A mesh of threads: every rank of an r x c mesh in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from laconic.comm.base import Comm
from laconic.comm.threads import Hub, ThreadComm, run_threads
from laconic.tensor2d.mesh import Mesh2D
from laconic.tensor2d.panels import Panels

T = TypeVar("T")


def run_mesh_threads(
    rows: int,
    columns: int,
    work: Callable[[Mesh2D], T],
    *,
    panels: Panels | None = None,
    deadline_seconds: float = 60.0,
) -> list[T]:
    """Run `work(mesh)` on rows x columns threads and return the results row by row.

    Args:
        rows: of the mesh.
        columns: of the mesh.
        work: what each rank does.
        panels: how operands travel where a layer does not say.
        deadline_seconds: how long one wait may last.

    Raises:
        Exception: the first failure of any thread; the others are told and end too.
    """
    across = [Hub(columns) for _ in range(rows)]
    down = [Hub(rows) for _ in range(columns)]
    failures: list[BaseException] = []  # what a row or a column passes on comes after what it passes on

    def body(whole: Comm) -> T:
        i, j = divmod(whole.rank, columns)
        along_row = ThreadComm(across[i], j, deadline_seconds=deadline_seconds)
        along_column = ThreadComm(down[j], i, deadline_seconds=deadline_seconds)
        try:
            return work(Mesh2D(along_row, along_column, whole, panels=panels))
        except BaseException as error:
            failures.append(error)
            for hub in (*across, *down):
                hub.lose(whole.rank, error)
            raise

    try:
        return run_threads(rows * columns, body, deadline_seconds=deadline_seconds)
    except BaseException:
        if failures:
            raise failures[0] from None
        raise
