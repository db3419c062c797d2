# SPDX-License-Identifier: Apache-2.0
"""Backup workers by an all-reduce to which late ranks add zeros: the same guarantees as with messages among members."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count

import pytest
import torch
from torch import Tensor

from tests.engine import attach, momentum, net, threads
from tests.methods.strategies.backup_runs import MakeOptimizer, Run, adam, check_runs, slow_last, stalls, train
from tests.pool import run_processes
from thinwire import AllReduce, Comm, ConfigError, run_threads
from thinwire.asynchronous.backup_workers import BackupWorkers
from thinwire.asynchronous.quorum.rules import Reduction
from thinwire.core.comm.counting import CountingComm
from thinwire.core.comm.threads import ThreadComm
from thinwire.core.comm.work import Work
from thinwire.planning.plan.traffic import DryRun

REDUCTIONS: tuple[Reduction, ...] = ("all_reduce", "messages")
NUMEL = sum(p.numel() for p in net().parameters())


def num_all_reduced(run: Run) -> float:
    """Of the steps that this rank took itself, those whose mean came from an all-reduce."""
    return sum(each["all_reduced"] for each in run.metrics)


def most_all_reduced(runs: list[Run]) -> float:
    """The most of those of any rank."""
    return max(num_all_reduced(run) for run in runs)


# -- without backups ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_without_backups_every_reduction_is_all_reduce_to_the_bit(reduction: Reduction) -> None:
    expected = threads(3, AllReduce())
    for mine, theirs in zip(threads(3, BackupWorkers(0, reduction=reduction)), expected, strict=True):
        assert torch.equal(mine, theirs)


# -- the method --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("make_optimizer", [momentum, adam])
@pytest.mark.parametrize(("backups", "pause"), [(1, stalls), (3, stalls), (1, slow_last)])
def test_all_ranks_hold_what_one_process_computes_from_the_log(
    make_optimizer: MakeOptimizer, backups: int, pause: Callable[[int, int], float]
) -> None:
    strategy = BackupWorkers(backups, reduction="all_reduce")
    # A late rank clips the mean as members do: it takes the step in its own loop, or receives their state.
    runs = run_threads(
        4, lambda comm: train(attach(comm, strategy, optimizer=make_optimizer), 25, pause, clip=0.3), timeout=20
    )
    check_runs(runs, strategy, make_optimizer, clip=0.3)
    assert most_all_reduced(runs) > 2


def stalled(reduction: Reduction) -> tuple[Run, dict[str, float]]:
    worker = attach(None, BackupWorkers(reduction=reduction), optimizer=adam)
    seen = train(worker, 25, stalls)
    return seen, worker.comm.meter.by_operation


@pytest.mark.parametrize("reduction", ["all_reduce", pytest.param("messages", marks=pytest.mark.slow)])
def test_all_ranks_hold_what_one_process_computes_from_the_log_on_processes(reduction: Reduction) -> None:
    found = run_processes(4, stalled, reduction)
    runs = [run for run, _ in found]
    check_runs(runs, BackupWorkers(reduction=reduction), adam, exact=reduction == "messages")
    share = 2 * 3 / 4 * 4 * NUMEL
    for run, sent in found:
        # A rank that received a state has taken part in the all-reduces of the steps that it missed.
        assert sent.get("all_reduce", 0.0) % share == 0
        assert sent.get("all_reduce", 0.0) >= share * num_all_reduced(run)
    assert (most_all_reduced(runs) > 2) == (reduction != "messages")


def test_a_number_of_members_chosen_from_times_is_the_divisor() -> None:
    strategy = BackupWorkers(2, "deadline", reduction="all_reduce")

    def body(comm: Comm) -> Run:
        return train(attach(comm, strategy, optimizer=adam), 30, lambda rank, _: 0.04 if rank == 3 else 0.004)

    runs = run_threads(4, body, timeout=20)
    check_runs(runs, strategy, adam)
    assert all(2 <= len(members) <= 4 for members in runs[0].log)


def test_a_run_goes_on_from_its_checkpoint_and_may_go_back(tmp_path: object) -> None:
    strategy, folder = BackupWorkers(reduction="all_reduce"), str(tmp_path)

    def body(comm: Comm) -> Run:
        worker = attach(comm, strategy, optimizer=adam)
        train(worker, 8, stalls, ends=False)
        worker.save(folder)
        train(worker, 9, stalls, ends=False)
        worker.load(folder)
        assert worker.step == 8
        return train(worker, 20, stalls)

    check_runs(run_threads(4, body, timeout=20), strategy, adam)


# -- late ranks --------------------------------------------------------------------------------------------------------


class OutOfStep:
    """Rank 2 is ready for each step but the last after the others have ended it, and before they end the next."""

    def __init__(self, count: int) -> None:
        self._last = count - 1
        self._ended = {(rank, step): threading.Event() for rank in range(3) for step in range(-1, count)}

    def pause(self, rank: int, step: int) -> float:
        self._ended[rank, step - 1].set()
        awaited = [(2, step - 1)] if rank < 2 else [(other, step) for other in (0, 1) if step < self._last]
        assert all(self._ended[each].wait(20) for each in awaited)
        return 0.0


def test_a_rank_late_by_less_than_a_step_uses_the_mean_and_receives_no_state() -> None:
    count = 12
    order = OutOfStep(count)

    def body(comm: Comm) -> tuple[Run, set[str]]:
        worker = attach(comm, BackupWorkers(retry_seconds=2.0, reduction="all_reduce"))
        comm.meter.tracing = True
        return train(worker, count, order.pause), {each.name for each in comm.meter.intervals}

    runs = run_threads(3, body, timeout=20)
    check_runs([run for run, _ in runs], BackupWorkers(), momentum)
    seen, names = runs[2]
    assert [each["on_time"] for each in seen.metrics[:-1]] == [0.0] * (count - 1)
    assert {each["steps_missed"] for each in seen.metrics[:-1]} == {1.0}
    assert sorted(seen.digests) == list(range(1, count + 1))
    assert "state" not in names


@pytest.mark.parametrize("reduction", ["messages", "all_reduce"])
def test_a_late_rank_sends_no_gradient_by_messages_and_its_share_of_zeros_in_an_all_reduce(
    reduction: Reduction,
) -> None:
    def body(comm: Comm) -> tuple[dict[str, float], Run]:
        worker = attach(comm, BackupWorkers(retry_seconds=2.0, reduction=reduction))
        before = dict(comm.meter.by_operation)
        seen = train(worker, 4, lambda rank, _: 0.3 if rank == 2 else 0.01)
        return {name: sent - before.get(name, 0.0) for name, sent in comm.meter.by_operation.items()}, seen

    (member, run), _, (late, late_run) = run_threads(3, body, timeout=20)
    steps_all_reduced = num_all_reduced(run)
    share = 2 * 2 / 3 * 4 * NUMEL
    assert steps_all_reduced == (4 if reduction == "all_reduce" else 0)
    assert late.get("all_reduce", 0.0) == member.get("all_reduce", 0.0)
    assert late.get("all_reduce", 0.0) == pytest.approx(steps_all_reduced * share)
    # Control messages only: READY, STATE_REQUEST, BARRIER, and an ACK of each all-reduce.
    messages = 2 * len(late_run.digests) + 2 + steps_all_reduced
    assert late["send_recv"] <= messages * 8 * (7 + 3)


@pytest.mark.parametrize(("size", "backups"), [(4, 1), (8, 2)])
def test_explaining_counts_an_all_reduce_among_all(size: int, backups: int) -> None:
    numel = 3_000_000

    def sent(reduction: Reduction) -> float:
        strategy = BackupWorkers(backups, reduction=reduction)
        run = DryRun(strategy, [numel], workers=size, rank=1, dtype=torch.float32, bucket_bytes=1 << 20)
        return run.step().sent

    assert sent("all_reduce") == pytest.approx(2 * (size - 1) / size * 4 * numel, rel=1e-3)
    assert sent("messages") == pytest.approx(2 * (size - backups - 1) / (size - backups) * 4 * numel, rel=1e-3)


# -- the thread and its connections ------------------------------------------------------------------------------------


def all_reduce_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "thinwire-all-reduce"]


def all_threads_end(seconds: float) -> bool:
    end = time.monotonic() + seconds
    while all_reduce_threads() and time.monotonic() < end:
        time.sleep(0.01)
    return not all_reduce_threads()


def test_the_thread_ends_with_the_training() -> None:
    def body(comm: Comm) -> int:
        worker = attach(comm, BackupWorkers(reduction="all_reduce"))
        train(worker, 3, ends=False)
        count = len(all_reduce_threads())
        worker.detach()
        return count

    assert max(run_threads(2, body, timeout=20)) >= 1
    assert all_threads_end(5.0)


_duplicate = ThreadComm.duplicate


def breaking(comm: ThreadComm) -> Comm:
    """Connections whose third all-reduce fails on rank 2."""
    side_comm, calls = _duplicate(comm), count(1)
    plain, side_comm.timeout = side_comm.all_reduce_, 1.0

    def all_reduce_(x: Tensor) -> Work[Tensor]:
        if next(calls) == 3 and comm.rank == 2:
            raise RuntimeError("the connection is broken")
        return plain(x)

    side_comm.all_reduce_ = all_reduce_
    return side_comm


def test_if_all_reduces_fail_members_continue_by_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadComm, "duplicate", breaking)
    strategy = BackupWorkers(reduction="all_reduce")
    body: Callable[[Comm], Run] = lambda comm: train(attach(comm, strategy), 20, stalls)  # noqa: E731
    runs = run_threads(3, body, timeout=20)
    check_runs(runs, strategy, momentum)
    assert most_all_reduced(runs) == 2
    assert all_threads_end(5.0)


def test_a_comm_without_spare_connections_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"CountingComm cannot open connections .* Gloo can"):
        CountingComm(0, 2).duplicate()


def test_without_spare_connections_all_reduces_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(comm: Comm) -> Comm:
        raise ConfigError("none")

    monkeypatch.setattr(ThreadComm, "duplicate", refuse)
    with pytest.raises(ConfigError, match="none"):
        run_threads(2, lambda comm: train(attach(comm, BackupWorkers(reduction="all_reduce")), 5), timeout=20)


def two_all_reduces() -> bool:
    from thinwire.core.comm.group import comm_for

    comm = comm_for()
    side_comm, rank = comm.duplicate(), comm.rank
    late = partial(time.sleep, 0.05 * rank)
    thread = threading.Thread(
        target=lambda: (late(), results.append(side_comm.all_reduce_(torch.full((5,), 1.0 + rank)).wait()))
    )
    results: list[Tensor] = []
    thread.start()
    mine = comm.all_reduce_(torch.full((7,), 10.0 + rank)).wait()
    thread.join()
    return mine.tolist() == [33.0] * 7 and results[0].tolist() == [6.0] * 5


def test_all_reduces_in_a_thread_do_not_mix_with_those_of_the_training_thread() -> None:
    assert run_processes(3, two_all_reduces) == [True] * 3
