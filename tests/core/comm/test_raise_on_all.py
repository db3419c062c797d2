# SPDX-License-Identifier: Apache-2.0
"""An error that one rank has found by itself, and that all ranks raise."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pool import run_processes
from thinwire import Comm, ConfigError, CountingComm, GroupComm, NonFiniteError, run_threads
from thinwire.core.comm.threads import single_worker
from thinwire.errors import ThinwireError, error_named

TEXT = "rank 1, step 7: the loss is nan"
Ending = tuple[str, str]


def ending(comm: Comm, *, finders: tuple[int, ...] = (1,)) -> Ending:
    """The class and the text of the error on this rank, where some ranks find one and the others wait."""
    comm.all_reduce_(torch.ones(1)).wait()
    comm.step = 7
    try:
        if comm.rank in finders:
            time.sleep(0.1)
            comm.raise_on_all(NonFiniteError(TEXT.replace("1", str(comm.rank), 1)))
        comm.all_reduce_(torch.ones(1000)).wait()
    except ThinwireError as error:
        return type(error).__name__, str(error)
    return "none", ""


def on_threads(**settings: Any) -> list[Ending]:
    """`ending` on three threads, none of which fails by itself."""
    return run_threads(3, lambda comm: ending(comm, **settings), timeout=10)


def test_all_threads_raise_what_one_has_found() -> None:
    assert on_threads() == [("NonFiniteError", TEXT)] * 3


def test_where_several_threads_find_something_all_raise_the_first() -> None:
    found = on_threads(finders=(0, 1, 2))
    assert len(set(found)) == 1
    assert found[0][0] == "NonFiniteError"


def test_a_worker_alone_raises_the_error_itself() -> None:
    for comm in (single_worker(), CountingComm(0, 4)):
        with pytest.raises(ConfigError, match="too long"):
            comm.raise_on_all(ConfigError("too long"))


def test_an_unknown_class_is_the_base_of_all() -> None:
    for kind in ("dict", "ArithmeticError", "error_named", "annotations", "no such name"):
        assert type(error_named(kind, "text")) is ThinwireError
    assert type(error_named("NonFiniteError", "text")) is NonFiniteError


def in_processes() -> list[tuple[Ending, str]]:
    """One finder, and all of them finders."""
    found: list[tuple[Ending, str]] = []
    for finders in ((1,), (0, 1, 2)):
        comm = GroupComm(timeout=30)
        found.append((ending(comm, finders=finders), again(comm)))
    dist.barrier()
    return found


def again(comm: Comm) -> str:
    """A later call on the same comm."""
    try:
        comm.all_reduce_(torch.ones(1)).wait()
    except NonFiniteError as error:
        return str(error)
    return "none"


def test_all_processes_raise_what_one_has_found() -> None:
    ranks = run_processes(3, in_processes)
    one, several = ([rank[case] for rank in ranks] for case in range(2))
    assert [how for how, _ in one] == [("NonFiniteError", TEXT)] * 3
    assert len({how for how, _ in several}) == 1
    assert several[0][0][0] == "NonFiniteError"
    for (_, text), later in one + several:
        assert later == f"the connections are closed after an earlier failure: {text}"
