"""Backup workers by an all-reduce to which late ranks add zeros: the same promises as with messages among members."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count

import pytest
import torch
from torch import Tensor

from tests.engine import attach, batches, flat, momentum, net, steps, threads
from tests.oracles.backup import Optimizing, Run, adam, slow_last, stalls, together, train
from tests.pool import run_processes
from thinwire import AllReduce, Comm, ConfigError, run_threads
from thinwire.comm.counting import CountingComm
from thinwire.comm.threads import ThreadComm
from thinwire.comm.work import Work
from thinwire.plan.traffic import DryRun
from thinwire.quorum.reduction_selector import Plane
from thinwire.strategies.stragglers.backup_workers import BackupWorkers

PLANES: tuple[Plane, ...] = ("auto", "zeros", "ring")
NUMEL = sum(p.numel() for p in net().parameters())


def summed(run: Run) -> float:
    """Of the steps that this rank has taken itself, those whose mean an all-reduce has brought."""
    return sum(each["all_reduced"] for each in run.metrics)


def taken(runs: list[Run]) -> float:
    """The most of those of any rank."""
    return max(summed(run) for run in runs)


# -- without backups ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plane", PLANES)
def test_without_backups_every_plane_is_all_reduce_to_the_bit(plane: Plane) -> None:
    expected = threads(3, AllReduce())
    for mine, theirs in zip(threads(3, BackupWorkers(0, plane=plane)), expected, strict=True):
        assert torch.equal(mine, theirs)


def ends_equally(planes: tuple[Plane, ...]) -> bool:
    def end(strategy: AllReduce | BackupWorkers) -> Tensor:
        return flat(steps(attach(None, strategy), batches(int(os.environ["RANK"]), 6)).model)

    expected = end(AllReduce())
    return all(torch.equal(end(BackupWorkers(0, plane=plane)), expected) for plane in planes)


def test_without_backups_every_plane_is_all_reduce_to_the_bit_on_processes() -> None:
    assert run_processes(4, ends_equally, PLANES) == [True] * 4


# -- the method --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plane", ["auto", "zeros"])
@pytest.mark.parametrize("optimizing", [momentum, adam])
@pytest.mark.parametrize(("backups", "pause"), [(1, stalls), (3, stalls), (1, slow_last)])
def test_all_ranks_hold_what_one_process_makes_of_the_log(
    plane: Plane, optimizing: Optimizing, backups: int, pause: Callable[[int, int], float]
) -> None:
    strategy = BackupWorkers(backups, plane=plane)
    # A late rank clips the mean as members do: it takes the step in its own loop, or their state.
    runs = run_threads(
        4, lambda comm: train(attach(comm, strategy, optimizer=optimizing), 25, pause, clip=0.3), timeout=20
    )
    together(runs, strategy, optimizing, clip=0.3)
    assert taken(runs) > 2


def stalled(plane: Plane) -> tuple[Run, dict[str, float]]:
    worker = attach(None, BackupWorkers(plane=plane), optimizer=adam)
    seen = train(worker, 25, stalls)
    return seen, worker.comm.meter.by_operation


@pytest.mark.parametrize("plane", PLANES)
def test_all_ranks_hold_what_one_process_makes_of_the_log_on_processes(plane: Plane) -> None:
    found = run_processes(4, stalled, plane)
    runs = [run for run, _ in found]
    together(runs, BackupWorkers(plane=plane), adam, exact=plane == "ring")
    share = 2 * 3 / 4 * 4 * NUMEL
    for run, sent in found:
        # A rank that took another's state has taken part in the sums of the steps that it missed.
        assert sent.get("all_reduce", 0.0) % share == 0
        assert sent.get("all_reduce", 0.0) >= share * summed(run)
    assert (taken(runs) > 2) == (plane != "ring")


@pytest.mark.parametrize("choice", ["deadline", "online"])
def test_a_number_that_is_chosen_by_the_clock_divides_by_who_came(choice: str) -> None:
    strategy = BackupWorkers(2, choice, plane="zeros")  # type: ignore[arg-type]

    def body(comm: Comm) -> Run:
        return train(attach(comm, strategy, optimizer=adam), 30, lambda rank, _: 0.04 if rank == 3 else 0.004)

    runs = run_threads(4, body, timeout=20)
    together(runs, strategy, adam)
    assert all(2 <= len(members) <= 4 for members in runs[0].log)


def test_a_run_goes_on_from_its_checkpoint_and_may_go_back(tmp_path: object) -> None:
    strategy, folder = BackupWorkers(plane="zeros"), str(tmp_path)

    def body(comm: Comm) -> Run:
        worker = attach(comm, strategy, optimizer=adam)
        train(worker, 8, stalls, ends=False)
        worker.save(folder)
        train(worker, 9, stalls, ends=False)
        worker.load(folder)
        assert worker.step == 8
        return train(worker, 20, stalls)

    together(run_threads(4, body, timeout=20), strategy, adam)


# -- the late ----------------------------------------------------------------------------------------------------------


class OutOfStep:
    """Rank 2 comes to each step but the last when the others have ended it, and before they end the next."""

    def __init__(self, count: int) -> None:
        self._last = count - 1
        self._ended = {(rank, step): threading.Event() for rank in range(3) for step in range(-1, count)}

    def pause(self, rank: int, step: int) -> float:
        self._ended[rank, step - 1].set()
        awaited = [(2, step - 1)] if rank < 2 else [(other, step) for other in (0, 1) if step < self._last]
        assert all(self._ended[each].wait(20) for each in awaited)
        return 0.0


def test_who_is_late_by_less_than_a_step_takes_the_mean_and_nobody_s_state() -> None:
    count = 12
    order = OutOfStep(count)

    def body(comm: Comm) -> tuple[Run, set[str]]:
        worker = attach(comm, BackupWorkers(patience_seconds=2.0, plane="zeros"))
        comm.meter.tracing = True
        return train(worker, count, order.pause), {each.name for each in comm.meter.intervals}

    runs = run_threads(3, body, timeout=20)
    together([run for run, _ in runs], BackupWorkers(), momentum)
    seen, names = runs[2]
    assert [each["on_time"] for each in seen.metrics[:-1]] == [0.0] * (count - 1)
    assert {each["steps_missed"] for each in seen.metrics[:-1]} == {1.0}
    assert sorted(seen.digests) == list(range(1, count + 1))
    assert "state" not in names


@pytest.mark.parametrize("plane", ["ring", "zeros"])
def test_a_late_rank_sends_none_of_the_gradient_by_letters_and_its_share_of_zeros(plane: Plane) -> None:
    def body(comm: Comm) -> tuple[dict[str, float], Run]:
        worker = attach(comm, BackupWorkers(patience_seconds=2.0, plane=plane))
        before = dict(comm.meter.by_operation)
        seen = train(worker, 4, lambda rank, _: 0.3 if rank == 2 else 0.01)
        return {name: sent - before.get(name, 0.0) for name, sent in comm.meter.by_operation.items()}, seen

    (member, run), _, (late, late_run) = run_threads(3, body, timeout=20)
    steps_summed = summed(run)
    share = 2 * 2 / 3 * 4 * NUMEL
    assert steps_summed == (4 if plane == "zeros" else 0)
    assert late.get("all_reduce", 0.0) == member.get("all_reduce", 0.0)
    assert late.get("all_reduce", 0.0) == pytest.approx(steps_summed * share)
    # Notes only: that it is here, what state it wants, that it stands still, and the end of each all-reduce.
    notes = 2 * len(late_run.digests) + 2 + steps_summed
    assert late["send_recv"] <= notes * 8 * (6 + 3)


@pytest.mark.parametrize(("size", "backups"), [(4, 1), (8, 2)])
def test_explaining_counts_an_all_reduce_among_all(size: int, backups: int) -> None:
    numel = 3_000_000

    def sent(plane: Plane) -> float:
        strategy = BackupWorkers(backups, plane=plane)
        run = DryRun(strategy, [numel], workers=size, rank=1, dtype=torch.float32, bucket_bytes=1 << 20)
        return run.step().sent

    assert sent("zeros") == pytest.approx(2 * (size - 1) / size * 4 * numel, rel=1e-3)
    assert (
        sent("auto") == sent("ring") == pytest.approx(2 * (size - backups - 1) / (size - backups) * 4 * numel, rel=1e-3)
    )


# -- the thread and its connections ------------------------------------------------------------------------------------


def helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "thinwire-all-reduce"]


def none_left(seconds: float) -> bool:
    end = time.monotonic() + seconds
    while helpers() and time.monotonic() < end:
        time.sleep(0.01)
    return not helpers()


def test_the_thread_ends_with_the_training() -> None:
    def body(comm: Comm) -> int:
        worker = attach(comm, BackupWorkers(plane="zeros"))
        train(worker, 3, ends=False)
        count = len(helpers())
        worker.detach()
        return count

    assert max(run_threads(2, body, timeout=20)) >= 1
    assert none_left(5.0)


_aside = ThreadComm.duplicate


def breaking(comm: ThreadComm) -> Comm:
    """Connections of which the third sum fails on rank 2."""
    aside, calls = _aside(comm), count(1)
    usual, aside.timeout = aside.all_reduce_, 1.0

    def all_reduce_(x: Tensor) -> Work[Tensor]:
        if next(calls) == 3 and comm.rank == 2:
            raise RuntimeError("this wire is torn")
        return usual(x)

    aside.all_reduce_ = all_reduce_
    return aside


def test_where_all_reduces_fail_members_go_on_by_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadComm, "duplicate", breaking)
    strategy = BackupWorkers(plane="zeros")
    body: Callable[[Comm], Run] = lambda comm: train(attach(comm, strategy), 20, stalls)  # noqa: E731
    runs = run_threads(3, body, timeout=20)
    together(runs, strategy, momentum)
    assert taken(runs) == 2
    assert none_left(5.0)


def test_a_wire_without_connections_to_spare_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"CountingComm has no connections to spare .* Gloo has"):
        CountingComm(0, 2).duplicate()


def test_where_there_are_none_automatic_choice_is_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(comm: Comm) -> Comm:
        raise ConfigError("none")

    def run(plane: Plane) -> list[Run]:
        return run_threads(2, lambda comm: train(attach(comm, BackupWorkers(plane=plane)), 5), timeout=20)

    monkeypatch.setattr(ThreadComm, "duplicate", refuse)
    assert taken(run("auto")) == 0
    with pytest.raises(ConfigError, match="none"):
        run("zeros")


def sums_aside() -> bool:
    from thinwire.comm.group import comm_for

    comm = comm_for()
    aside, rank = comm.duplicate(), comm.rank
    late = partial(time.sleep, 0.05 * rank)
    beside = threading.Thread(
        target=lambda: (late(), results.append(aside.all_reduce_(torch.full((5,), 1.0 + rank)).wait()))
    )
    results: list[Tensor] = []
    beside.start()
    mine = comm.all_reduce_(torch.full((7,), 10.0 + rank)).wait()
    beside.join()
    return mine.tolist() == [33.0] * 7 and results[0].tolist() == [6.0] * 5


def test_sums_beside_do_not_meet_those_of_the_training_thread() -> None:
    assert run_processes(3, sums_aside) == [True] * 3
