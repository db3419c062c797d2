# SPDX-License-Identifier: Apache-2.0
"""One rank is asked to leave by a signal: all save after the same step and exit, and go on when started again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import thinwire
from tests.engine import attach, batches, flat, steps
from tests.pool import run_processes
from thinwire import Comm, ConfigError, LocalSGD
from thinwire.elastic.notice import Notice


def noticed(folder: Path, number: int) -> tuple[int, str | None, list[float]]:
    """Rank 1 gets a signal after its seventh step."""
    worker = attach(None, LocalSGD(period=4))
    notice = Notice(worker, every=5)
    for step in range(40):
        steps(worker, batches(worker.comm.rank, 1, first=step))
        if (worker.comm.rank, step) == (1, 6):
            os.kill(os.getpid(), number)
        if notice.agreed():
            worker.save(folder)
            break
    notice.close()
    return worker.step, notice.received, flat(worker.model).tolist()


def resumed(folder: Path) -> tuple[int, list[float]]:
    """The ranks that are started again."""
    worker = attach(None, LocalSGD(period=4))
    worker.load(folder)
    return worker.step, flat(worker.model).tolist()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_on_one_rank_lets_all_save_after_the_same_step(number: signal.Signals, tmp_path: Path) -> None:
    found = run_processes(3, noticed, tmp_path, int(number))
    assert [step for step, _, _ in found] == [10, 10, 10]
    assert [name for _, name, _ in found] == [None, number.name, None]
    again = run_processes(3, resumed, tmp_path)
    assert again == [(step, x) for step, _, x in found]


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    notice = Notice(attach(None, LocalSGD(period=4)))
    assert signal.getsignal(signal.SIGUSR1) is not before
    notice.close()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_it_is_refused_beside_the_main_thread() -> None:
    def work(comm: Comm) -> None:
        Notice(attach(comm, LocalSGD(period=4)))

    with pytest.raises(ConfigError, match="main one"):
        thinwire.run_threads(2, work)


def test_no_step_between_flags_is_refused() -> None:
    with pytest.raises(ConfigError, match="every=0"):
        Notice(attach(None, LocalSGD(period=4)), every=0)
