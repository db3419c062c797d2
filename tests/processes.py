# SPDX-License-Identifier: Apache-2.0
"""The processes and threads that tests have started."""

from __future__ import annotations

import os
import threading
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from thinwire.lab.emulate.fork_server import kept


def left_behind(threads: set[threading.Thread], processes: set[int]) -> list[str]:
    # Those of requests to buckets serve all runs of the process.
    shared = ("thinwire-bucket", "thinwire-seal")
    new_threads = [
        f"thread {thread.name}"
        for thread in threading.enumerate()
        if thread not in threads and not thread.name.startswith(shared)
    ]
    new_processes = [f"process {pid} ({name})" for pid, name in descendants().items() if pid not in processes]
    return new_threads + new_processes


def descendants() -> dict[int, str]:
    """The living processes below this one by their id, without multiprocessing's own two and the server of forks.

    Linux lists the children of each thread; to read all of /proc instead takes milliseconds, twice for each test.
    """
    helpers = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
    helpers.update(kept())
    found: dict[int, str] = {}
    parents = [os.getpid()]
    while parents:
        for pid in _children(parents.pop()):
            name, state = _name_and_state(pid)
            if state not in "ZX":
                parents.append(pid)
                if pid not in helpers:
                    found[pid] = name
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for thread in _listed(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{thread}/children") as file:  # noqa: PTH123 - a path object costs more
                found += map(int, file.read().split())
        except OSError:
            continue  # it has ended meanwhile
    return found


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - as above
    except OSError:
        return []


def _name_and_state(pid: int) -> tuple[str, str]:
    try:
        head, _, tail = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return "", "X"
    return head.partition("(")[2], tail.split()[0]
