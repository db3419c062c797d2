# SPDX-License-Identifier: Apache-2.0
"""Backup workers that are lost for good: the others continue, but not without the coordinator."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from tempfile import TemporaryDirectory

import pytest

from tests.engine import attach, flat, momentum
from tests.methods.strategies.backup_runs import Run, check_runs, stalls, train
from tests.pool import start_processes
from thinwire import Comm, PeerLostError, run_threads
from thinwire.asynchronous.backup_workers import BackupWorkers
from thinwire.asynchronous.quorum.participant import Participant
from thinwire.asynchronous.quorum.rounds import Round

STEPS = 30


def dies(victims: dict[int, int], within: bool, backups: int) -> Run:
    """Victims are killed at their step: while they compute, or as members that have sent only a part of what is due."""
    mine, advance = int(os.environ["RANK"]), Participant._advance
    last = victims.get(mine, STEPS)

    def stop_within(self: Participant, current: Round) -> None:
        if current.step >= last and current.reduction is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        advance(self, current)

    def pause(_: int, step: int) -> float:
        if not within and step >= last:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0.0 if within and mine in victims else 0.005  # early, so that it is a member

    Participant._advance = stop_within if within else advance  # type: ignore[method-assign]
    try:
        worker = attach(None, BackupWorkers(backups))
        seen = train(worker, STEPS, pause, ends=False)
        with worker.consensus() as model:
            assert flat(model).tolist() == seen.values
        with TemporaryDirectory() as folder, pytest.raises(PeerLostError, match=rf"save\(\): ranks? .*{min(victims)}"):
            worker.save(folder)
        worker.detach()
        return seen
    finally:
        Participant._advance = advance  # type: ignore[method-assign]


def check_survivors(size: int, backups: int, victims: dict[int, int], within: bool) -> None:
    workers = start_processes(size, dies, victims, within, backups)
    deadline = time.monotonic() + 40
    for worker in workers:
        worker.finish(deadline)
    assert [worker.error for worker in workers if worker.rank in victims] == ["ended without an answer"] * len(victims)
    check_survived([worker.result for worker in workers if worker.rank not in victims], victims, backups)


def check_survived(runs: Sequence[Run], victims: dict[int, int], backups: int) -> None:
    assert None not in runs
    strategy = BackupWorkers(backups, "deadline")  # whose number of members is not that of these few runs
    check_runs(runs, strategy, momentum)
    assert len(runs[0].log) == STEPS
    assert not any(set(members) & set(victims) for members in runs[0].log[max(victims.values()) + 1 :])


def test_the_others_go_on_without_a_worker_that_is_killed() -> None:
    check_survivors(4, 1, {2: 5}, False)


LOST = r"rank {rank}, step \d+.*\. Rank 0 is the coordinator of BackupWorkers and is lost: the other ranks cannot"


@pytest.mark.parametrize(
    ("size", "backups", "within"),
    [
        (4, 1, False),
        pytest.param(4, 2, True, marks=pytest.mark.slow),
        pytest.param(2, 1, False, marks=pytest.mark.slow),
        pytest.param(2, 1, True, marks=pytest.mark.slow),
    ],
)
def test_the_loss_of_the_coordinator_ends_the_run_on_all_ranks(size: int, backups: int, within: bool) -> None:
    workers = start_processes(size, dies, {0: 5}, within, backups)
    deadline = time.monotonic() + 40
    for worker in workers:
        worker.finish(deadline)
    for worker in workers[1:]:
        assert "PeerLostError" in str(worker.error), worker.error
        assert re.search(LOST.format(rank=worker.rank), str(worker.error)), worker.error


def test_threads_end_without_a_coordinator_that_leaves() -> None:
    def body(comm: Comm) -> str:
        worker = attach(comm, BackupWorkers(2))
        try:
            train(worker, 5 if comm.rank == 0 else STEPS, stalls, ends=False)
            raise InterruptedError
        except (InterruptedError, PeerLostError) as error:
            worker.detach()  # where an error is handled, nobody is waited for
            return str(error)

    for rank, told in enumerate(run_threads(4, body, timeout=20)):
        assert rank == 0 or re.search(LOST.format(rank=rank), told), told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "backups", "victims", "within"),
    [
        (4, 1, {2: 5}, True),
        (4, 1, {3: 5}, False),
        (5, 2, {1: 5, 2: 9}, False),
        (5, 2, {1: 5, 2: 6}, True),
        (2, 1, {1: 5}, False),
    ],
)
def test_the_others_go_on_without_up_to_as_many_as_backups(
    size: int, backups: int, victims: dict[int, int], within: bool
) -> None:
    check_survivors(size, backups, victims, within)


def test_nobody_is_told_of_losses_where_there_are_none(caplog: pytest.LogCaptureFixture) -> None:
    def body(comm: Comm) -> None:
        worker = attach(comm, BackupWorkers())
        train(worker, 5)

    run_threads(3, body, timeout=20)
    assert not caplog.messages


def test_more_losses_than_backups_end_training_on_all_ranks() -> None:
    def body(comm: Comm) -> str:
        worker = attach(comm, BackupWorkers(coordinator=3))
        try:
            train(worker, 5 if comm.rank < 2 else STEPS, lambda *_: 0.002, ends=False)
            if comm.rank < 2:
                raise InterruptedError
        except (InterruptedError, PeerLostError) as error:
            worker.detach()
            return str(error)
        return ""

    # A rank that comes late finds all others gone.
    for said in run_threads(4, body, timeout=20)[2:]:
        assert re.search("rank 0 has closed its mailbox|all other ranks are lost", said)
