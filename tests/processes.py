# SPDX-License-Identifier: Apache-2.0
"""The processes and threads that tests have started."""

from __future__ import annotations

import os
import threading
from multiprocessing import forkserver, resource_tracker
from pathlib import Path


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
