# SPDX-License-Identifier: Apache-2.0
"""Detect which processes of other ranks have ended, on the same machine.

A closed connection does not show which rank failed: the survivors of a failure close their connections too, and some of
them compute for a while before they notice. The kernel knows at once which processes on the same machine have ended.
"""

from __future__ import annotations

import os
import struct
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path

_ROW = struct.Struct("!16sQQQ")  # machine, namespace of process numbers, process, start time
ROW_BYTES = _ROW.size
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")
_POLL_SECONDS = 0.005
_OTHERS_SECONDS = 0.01


class State(Enum):
    """The known state of a process."""

    UNKNOWN = "unknown"  # on another machine, or in another container
    RUNNING = "running"
    STOPPED = "stopped"
    ENDED = "ended"


def own_row() -> bytes:
    """Return an identifier of this process for others on the machine; zeros if the system has none."""
    with suppress(OSError, ValueError, IndexError):
        machine = uuid.UUID(_BOOT_ID.read_text().strip()).bytes
        return _ROW.pack(machine, _NAMESPACE.stat().st_ino, os.getpid(), _stat(os.getpid())[1])
    return bytes(ROW_BYTES)


def _stat(process: int) -> tuple[str, int]:
    """Return the state of a process as one character, and the clock tick of its start."""
    # The name, in parentheses, may contain any character.
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


class Processes:
    """The processes of a group's ranks.

    Args:
        rows: `own_row` of each rank; empty if they are not known.
        rank: this process's.
    """

    def __init__(self, rows: Sequence[bytes], rank: int) -> None:
        self._rows = {other: _ROW.unpack(row) for other, row in enumerate(rows) if other != rank}
        self._own = _ROW.unpack(own_row())

    def state(self, rank: int) -> State:
        """Return the known state of a rank's process."""
        row = self._rows.get(rank)
        if row is None or row[:2] != self._own[:2] or not any(row[0]):
            return State.UNKNOWN
        try:
            state, started = _stat(row[2])
        except (FileNotFoundError, ProcessLookupError):
            return State.ENDED
        except (OSError, ValueError, IndexError):
            return State.UNKNOWN
        # The number may belong to another process by now. Z and X are processes that have ended.
        if started != row[3] or state in "ZX":
            return State.ENDED
        return State.STOPPED if state in "Tt" else State.RUNNING

    def in_state(self, *states: State) -> list[int]:
        """Return the ranks in one of these states."""
        return [rank for rank in self._rows if self.state(rank) in states]

    def ended(self, *, within: float) -> list[int]:
        """Return the ranks whose process has ended; wait up to `within` seconds for the first."""
        # The kernel closes a killed process's connections just before it reports the process as ended.
        end = time.monotonic() + within
        while not (found := self.in_state(State.ENDED)) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        if found:
            time.sleep(_OTHERS_SECONDS)  # the same event may be ending other processes
        return self.in_state(State.ENDED)
