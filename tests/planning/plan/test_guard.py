# SPDX-License-Identifier: Apache-2.0
"""A strategy that is slower than promised gives way, on all ranks at the same step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import thinwire
from tests.engine import attach, batches, flat, steps
from tests.rules import for_each
from thinwire import AllReduce, Comm, ConfigError, LocalSGD, Strategy
from thinwire.planning.plan.guard import Guard, Verdict


class Clock:
    """Each reading of a rank's clock is so many steps after its last, of so many seconds for each strategy."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(comm: Comm, slow_rank: int, seconds: dict[str, float], **settings: float) -> tuple[Verdict | None, Strategy]:
    """Sixty steps whose times depend on the strategy; one rank's are twice as long."""
    clock = Clock()
    comm.runtime = replace(comm.runtime, clock=clock)
    worker = attach(comm, LocalSGD(period=3))
    guard = Guard(worker, **settings)  # pyright: ignore[reportArgumentType]
    for step in range(60):
        factor = 2 if comm.rank == slow_rank else 1
        clock.now += factor * seconds[type(worker.strategy).__name__]
        steps(worker, batches(comm.rank, 1, first=step))
    final = flat(worker.model)
    if worker.strategy == AllReduce():
        assert torch.equal(*(x for x in comm.all_gather(final).wait()))
    return guard.verdict, worker.strategy


@pytest.mark.parametrize(("local", "kept"), [(1.01, True), (1.03, False), (0.2, True)])
def test_it_is_kept_up_to_two_percent_slower_than_the_fallback_that_was_measured(local: float, kept: bool) -> None:
    found = thinwire.run_threads(2, lambda comm: run(comm, 1, {"AllReduce": 1.0, "LocalSGD": local}), timeout=20)
    assert found[0] == found[1]
    verdict, strategy = found[0]
    assert verdict is not None
    assert verdict.kept is kept
    assert verdict.fallback_seconds == pytest.approx(2.0)
    assert verdict.seconds == pytest.approx(2 * local)
    assert strategy == (LocalSGD(period=3) if kept else AllReduce())


def test_a_prediction_stands_for_the_fallback_and_all_ranks_go_by_the_slowest() -> None:
    def work(comm: Comm) -> tuple[Verdict | None, Strategy]:
        return run(comm, 0, {"LocalSGD": 1.0, "AllReduce": 1.0}, fallback_seconds=1.5)

    first, second = thinwire.run_threads(2, work, timeout=20)
    assert first == second
    verdict, strategy = first
    assert verdict is not None
    assert (verdict.kept, verdict.seconds, verdict.step) == (False, pytest.approx(2.0), 2 + 3 * 9)
    assert strategy == AllReduce()


@pytest.mark.parametrize(
    ("local", "kept", "step", "seconds"),
    [(0.4, True, 2 + 9, 0.5), (0.9, True, 2 + 9 + 2 + 8, 1.0), (1.1, False, 2 + 9 + 2 + 8, 1.0)],
    ids=["faster than the least", "faster than the fallback", "slower"],
)
def test_the_fallback_is_measured_only_where_it_could_be_faster(
    local: float, kept: bool, step: int, seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="thinwire")

    def work(comm: Comm) -> tuple[Verdict | None, Strategy]:
        return run(comm, -1, {"LocalSGD": local, "AllReduce": 1.0}, fallback_least=0.5, windows=1)

    first, second = thinwire.run_threads(2, work, timeout=20)
    assert first == second
    verdict, strategy = first
    assert verdict is not None
    assert (verdict.kept, verdict.step) == (kept, step)
    assert verdict.seconds == pytest.approx(local) and verdict.fallback_seconds == pytest.approx(seconds)
    assert strategy == (LocalSGD(period=3) if kept else AllReduce())
    (record,) = caplog.records
    assert record.levelname == ("INFO" if kept else "WARNING") and f"{strategy!s} continues" in record.getMessage()


def test_what_is_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="Use one of the two"):
        Guard(attach(None, LocalSGD(period=3)), fallback_seconds=1.0, fallback_least=1.0)


@for_each([{"fallback_least": -1.0}, {"fallback_seconds": 0.0}, {"tolerance": -1.0}, {"windows": 0}])
def test_values_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Guard(attach(None, LocalSGD(period=3)), **wrong)  # pyright: ignore[reportArgumentType]


def test_another_guard_looks_again_after_the_link_has_changed() -> None:
    """On the first link local steps are faster, on the second one not: all ranks fall back at the same step."""

    def work(comm: Comm) -> tuple[bool, bool, int, Strategy]:
        clock, seconds = Clock(), {"AllReduce": 2.0, "LocalSGD": 1.0}
        comm.runtime = replace(comm.runtime, clock=clock)
        worker = attach(comm, LocalSGD(period=3))

        def watched() -> Verdict:
            guard = Guard(worker)
            while guard.verdict is None:
                clock.now += seconds[type(worker.strategy).__name__]
                steps(worker, batches(comm.rank, 1, first=worker.step))
            return guard.verdict

        first = watched()
        seconds["AllReduce"] = 0.5
        second = watched()
        return first.kept, second.kept, second.step, worker.strategy

    found = thinwire.run_threads(2, work)
    assert found[0] == found[1]
    assert found[0][:2] == (True, False) and found[0][3] == AllReduce()


def test_steps_in_which_some_ranks_have_no_data_are_neither_measured_nor_switched_at() -> None:
    def work(comm: Comm) -> tuple[bool, int, Strategy]:
        clock = Clock()
        comm.runtime = replace(comm.runtime, clock=clock)
        worker = attach(comm, LocalSGD(period=3))
        guard = Guard(worker, fallback_seconds=1e-9)
        for count in (9 if comm.rank else 40, 60):
            for data in worker.join(batches(comm.rank, count)):
                clock.now += 1.0
                steps(worker, [data])
        assert guard.verdict is not None
        return guard.verdict.kept, guard.verdict.step, worker.strategy

    found = thinwire.run_threads(2, work, timeout=20)
    assert found[0] == found[1] == (False, 40 + 2 + 3 * 9, AllReduce())
