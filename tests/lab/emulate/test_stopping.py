# SPDX-License-Identifier: Apache-2.0
"""Workers that are suspended for a while."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from thinwire import ConfigError
from thinwire.lab.emulate.stopping import Stop, Stopping, parse_stops


def until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.01)


def state(pid: int) -> str:
    """R, S or T: running, sleeping, stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True) as process:
        yield process
        process.kill()


def test_stops_are_read_by_rank() -> None:
    assert parse_stops("2:3s:5s, 0:200ms:1s", workers=4) == (Stop(2, 3.0, 5.0), Stop(0, 0.2, 1.0))
    assert parse_stops(None, workers=4) == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2:3s", "A stop is RANK:AFTER:DURATION, such as 2:3s:5s"),
        ("4:3s:5s", "there is no worker '4'. With 4 they are 0 to 3"),
        ("1:3:5s", "a duration is a number and us, ms or s"),
    ],
)
def test_what_is_no_stop_is_refused_with_an_example(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_stops(text, workers=4)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_process_is_stopped_and_goes_on(child: subprocess.Popen[bytes]) -> None:
    with Stopping([Stop(0, 0.01, 0.3)], [child.pid]) as stopping:
        assert state(child.pid) != "T"
        stopping.begin()
        until(lambda: state(child.pid) == "T")
        until(lambda: state(child.pid) != "T")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_who_is_stopped_goes_on_at_the_end_at_the_latest(child: subprocess.Popen[bytes]) -> None:
    with Stopping([Stop(0, 0.01, 60.0)], [child.pid]) as stopping:
        stopping.begin()
        stopping.begin()
        until(lambda: state(child.pid) == "T")
    until(lambda: state(child.pid) != "T")


def test_a_process_that_has_ended_is_left_alone(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    raised, sent = list[object](), list[int]()
    deliver = os.killpg

    def send(group: int, number: int) -> None:
        sent.append(number)
        deliver(group, number)

    monkeypatch.setattr(threading, "excepthook", raised.append)
    monkeypatch.setattr(os, "killpg", send)
    child.kill()
    child.wait()
    with Stopping([Stop(0, 0.01, 0.01)], [child.pid]) as stopping:
        stopping.begin()
        until(lambda: signal.SIGCONT in sent)
    assert sent[0] == signal.SIGSTOP
    assert not raised
