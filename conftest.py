"""One thread per process, and nothing left behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

_GRACE_SECONDS = 3.0

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail a test whose threads or processes outlive it."""
    threads, processes = set(threading.enumerate()), set(descendants())
    yield
    end = time.monotonic() + _GRACE_SECONDS
    while left := left_behind(threads, processes):
        if time.monotonic() > end:
            pytest.fail(f"left behind: {', '.join(left)}")
        time.sleep(0.02)


@pytest.fixture
def no_way_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Arrays choose their ways anew, and write none of it beside the kernels."""
    from thinwire.fusion import autotune_cache as remembered
    from thinwire.fusion import forget_choices

    monkeypatch.setattr(remembered, "place", lambda: tmp_path / "ways.json")
    forget_choices()
    yield
    forget_choices()


def left_behind(threads: set[threading.Thread], processes: set[int]) -> list[str]:
    new_threads = [f"thread {thread.name}" for thread in threading.enumerate() if thread not in threads]
    new_processes = [f"process {pid} ({name})" for pid, name in descendants().items() if pid not in processes]
    return new_threads + new_processes


def descendants() -> dict[int, str]:
    """The living processes below this one by their id, without multiprocessing's own two."""
    parents: dict[int, tuple[int, str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            head, _, tail = (folder / "stat").read_text().rpartition(")")
        except OSError:
            continue  # it has ended meanwhile
        state, parent = tail.split()[:2]
        if state not in "ZX":
            parents[int(folder.name)] = (int(parent), head.partition("(")[2])
    helpers = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
    found = {os.getpid()}
    while more := {pid for pid, (parent, _) in parents.items() if parent in found} - found:
        found |= more
    return {pid: parents[pid][1] for pid in found - helpers - {os.getpid()}}
