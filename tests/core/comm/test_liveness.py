# SPDX-License-Identifier: Apache-2.0
"""Whether other processes run, as the kernel says."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from thinwire.core.comm.liveness import ROW_BYTES, Processes, State, own_row

_PROGRAM = (
    "import sys, time; from thinwire.core.comm.liveness import own_row; "
    "print(own_row().hex(), flush=True); time.sleep(60)"
)


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen[str], bytes]]:
    """Another process, and its row."""
    with subprocess.Popen([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, bytes.fromhex(process.stdout.readline())
        finally:
            process.kill()


def eventually(processes: Processes, state: State) -> bool:
    end = time.monotonic() + 10
    while processes.state(1) is not state and time.monotonic() < end:
        time.sleep(0.01)
    return processes.state(1) is state


def test_a_process_runs_is_stopped_and_ends(other: tuple[subprocess.Popen[str], bytes]) -> None:
    process, row = other
    processes = Processes([own_row(), row], rank=0)
    assert processes.state(1) is State.RUNNING
    assert processes.ended(within=0) == []
    process.send_signal(signal.SIGSTOP)
    assert eventually(processes, State.STOPPED)
    assert processes.in_state(State.STOPPED, State.ENDED) == [1]
    process.kill()
    assert eventually(processes, State.ENDED)  # before anybody has waited for it
    assert processes.ended(within=0) == [1]
    process.wait()
    assert processes.state(1) is State.ENDED


def test_a_number_that_belongs_to_another_process_by_now_has_ended() -> None:
    started_earlier = own_row()[:-8] + bytes(8)
    assert Processes([own_row(), started_earlier], rank=0).state(1) is State.ENDED
    assert Processes([own_row(), own_row()], rank=0).state(1) is State.RUNNING


def test_nothing_is_known_of_other_machines_and_of_systems_that_do_not_tell() -> None:
    elsewhere = bytes(16) + own_row()[16:]
    other_container = own_row()[:16] + bytes(8) + own_row()[24:]
    for row in (elsewhere, other_container, bytes(ROW_BYTES)):
        assert Processes([own_row(), row], rank=0).state(1) is State.UNKNOWN
    assert Processes([], rank=0).state(1) is State.UNKNOWN
