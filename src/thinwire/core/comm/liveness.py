# SPDX-License-Identifier: Apache-2.0
"""Whether the processes of other ranks still run, as far as this machine can tell.

A closed connection does not say who has failed: the survivors of a failure close theirs too, and some of them compute
for a while before they notice. The kernel knows at once which processes have ended, of those on the same machine.
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

_ROW = struct.Struct("!16sQQQ")  # the machine, its namespace of process numbers, the process, and when it started
ROW_BYTES = _ROW.size
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")
_POLL_SECONDS = 0.005
_OTHERS_SECONDS = 0.01


class State(Enum):
    """What is known of a process."""

    UNKNOWN = "unknown"  # on another machine, or in another container
    RUNNING = "running"
    STOPPED = "stopped"
    ENDED = "ended"


def own_row() -> bytes:
    """This process, as others on the same machine can recognise it; zeros where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        machine = uuid.UUID(_BOOT_ID.read_text().strip()).bytes
        return _ROW.pack(machine, _NAMESPACE.stat().st_ino, os.getpid(), _stat(os.getpid())[1])
    return bytes(ROW_BYTES)


def _stat(process: int) -> tuple[str, int]:
    """The state of a process as one character, and the clock tick at which it started."""
    # The name, in parentheses, may hold anything.
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


class Processes:
    """The processes of a group's ranks.

    Args:
        rows: `own_row` of each rank; none where they are not known.
        rank: this process's.
    """

    def __init__(self, rows: Sequence[bytes], rank: int) -> None:
        self._rows = {other: _ROW.unpack(row) for other, row in enumerate(rows) if other != rank}
        self._own = _ROW.unpack(own_row())

    def state(self, rank: int) -> State:
        """Whether a rank's process runs."""
        row = self._rows.get(rank)
        if row is None or row[:2] != self._own[:2] or not any(row[0]):
            return State.UNKNOWN
        try:
            state, started = _stat(row[2])
        except (FileNotFoundError, ProcessLookupError):
            return State.ENDED
        except (OSError, ValueError, IndexError):
            return State.UNKNOWN
        # Its number may belong to another process by now; Z and X are processes that have ended.
        if started != row[3] or state in "ZX":
            return State.ENDED
        return State.STOPPED if state in "Tt" else State.RUNNING

    def in_state(self, *states: State) -> list[int]:
        """The ranks of which one of these is known."""
        return [rank for rank in self._rows if self.state(rank) in states]

    def ended(self, *, within: float) -> list[int]:
        """The ranks whose process has ended; waits so many seconds for the first."""
        # The kernel closes the connections of a killed process a moment before it counts as ended.
        end = time.monotonic() + within
        while not (found := self.in_state(State.ENDED)) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        if found:
            time.sleep(_OTHERS_SECONDS)  # what has ended one process may be ending others
        return self.in_state(State.ENDED)
