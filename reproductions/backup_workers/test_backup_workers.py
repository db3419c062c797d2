# SPDX-License-Identifier: Apache-2.0
"""What the reproduction of backup workers makes of its races, and what a race keeps."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log2

import pytest

from reproductions.backup_workers.claim import (
    ALL,
    ASYNCHRONOUS,
    CHOSEN,
    CLAIM,
    CONDITIONS,
    QUICK,
    STALE,
    Course,
    Scale,
    chosen,
    judge,
)
from reproductions.backup_workers.pictures import ends_picture, time_picture
from reproductions.backup_workers.race import Race, Ran, run_race
from reproductions.backup_workers.tuning import Tuned, best_of, search_rate
from thinwire import BackupWorkers, ParameterServer, Strategy
from thinwire.lab.emulate import Straggler
from thinwire.lab.tasks import load


def ran(loss: float) -> Ran:
    """Falling to a loss, with some noise at the end."""
    losses = (3.0, 2.0, 1.0, loss * 1.1, loss, loss * 0.9)
    return Ran((0.0, 1.0, 2.0, 3.0, 4.0, 5.0), losses, 100, (1.0, 0.9, 0.8, 0.3), 3)


def tuned(loss: float) -> Tuned:
    """A method that ended with this loss in the search."""
    return Tuned(0.2, {0.1: 2 * loss, 0.2: loss, 0.4: 3 * loss})


def courses(
    everyone: Sequence[float], ours: Sequence[float], stale: Sequence[float], nobody: Sequence[float]
) -> dict[str, Course]:
    """What every arm ends with, seed by seed; in the search, 2 backups were the best."""
    found = {ALL: tuned(0.9), "b = 1": tuned(0.3), "b = 2": tuned(0.2), ASYNCHRONOUS: tuned(0.1)}
    ends = {ALL: everyone, CHOSEN: ours, STALE: stale, ASYNCHRONOUS: nobody}
    return {c: Course(found, {arm: [ran(end) for end in each] for arm, each in ends.items()}) for c in CONDITIONS}


@pytest.mark.parametrize(
    ("everyone", "stale", "nobody", "outcomes", "where"),
    [
        ((0.4, 0.5), (0.9, 0.9), (0.3, 0.3), ("holds", "holds", "holds"), "nowhere"),
        ((0.4, 0.5), (inf, inf), (0.1, 0.1), ("holds", "holds", "does not hold"), "lower with 0 of 2 seeds"),
        # The rival's mean is ten times ours, and with one of the two seeds it is lower.
        ((0.1, 4.0), (0.9, 0.9), (0.3, 0.3), ("within noise", "holds", "holds"), "lower with 1 of 2 seeds"),
        ((0.1, 0.1), (0.1, 0.1), (0.1, 0.1), ("does not hold",) * 3, "lower with 0 of 2 seeds"),
        ((0.2, 0.2), (0.9, 0.9), (0.3, 0.3), ("does not hold", "holds", "holds"), "lower with 0 of 2 seeds"),
    ],
    ids=["all lower", "asynchronous is lower at its own rate", "seeds differ", "highest", "a tie is not lower"],
)
def test_the_chosen_backups_are_judged_seed_by_seed(
    everyone: Sequence[float], stale: Sequence[float], nobody: Sequence[float], outcomes: Sequence[str], where: str
) -> None:
    result = judge(courses(everyone, (0.2, 0.2), stale, nobody))
    assert list(result.parts) == list(CLAIM.parts)
    assert [str(each) for name, each in result.parts.items() if name.startswith("one worker")] == list(outcomes)
    assert where in result.details["where it falls short"]


def test_what_was_chosen_and_found_is_told() -> None:
    late = next(iter(CONDITIONS))
    result = judge(courses((0.4, 0.8), (0.2, 0.2), (0.9, 0.9), (0.3, 0.3)))
    assert (result.value, result.least, result.most) == pytest.approx((3, 2, 4))
    assert "b = 2 ends at 0.2000" in result.measured
    assert result.details[f"rival's loss over the chosen b's, each seed, {late}: than all workers"] == "2.000, 4.000"
    assert result.details[f"search, b = 1, {late}"] == "learning rate 0.2 (tried 0.1: 0.600, 0.2: 0.300, 0.4: 0.900)"
    assert result.details[f"chosen b, {late}"].startswith("2, at an edge of those tried (in the search b = 1: 0.300")
    assert result.details[f"b by the times of steps, each seed, {late}"] == "1, 1"
    assert result.details["learning rates found at an edge"] == "none"


def test_backups_are_chosen_by_the_search_whatever_the_judged_seeds_say() -> None:
    assert chosen({ALL: tuned(0.1), "b = 1": tuned(0.3), "b = 2": tuned(0.2), ASYNCHRONOUS: tuned(0.1)}) == "b = 2"


def test_seeds_that_choose_are_not_judged() -> None:
    for scale in (Scale(), QUICK):
        assert not set(scale.searched) & set(scale.seeds)


@pytest.mark.parametrize("best", [0.05, 0.1, 0.2, 0.8])
def test_a_rate_is_found_between_a_lower_and_a_higher_one_that_end_higher(best: float) -> None:
    tried = search_rate(lambda rate: abs(log2(rate / best)), 0.1)
    assert best_of(tried) == pytest.approx(best)
    assert Tuned(best_of(tried), tried).inner
    assert len(tried) <= abs(log2(best / 0.1)) + 3


def test_a_rate_that_diverges_is_infinitely_bad_and_a_search_has_an_end() -> None:
    assert ran(float("nan")).end == inf
    tried = search_rate(lambda rate: inf if rate > 0.1 else rate, 0.1)
    assert best_of(tried) == min(tried)
    assert not Tuned(best_of(tried), tried).inner


@pytest.mark.parametrize("most", [0.001, 0.06, 0.4])
def test_lower_rates_are_tried_where_the_first_and_its_neighbours_diverge(most: float) -> None:
    tried = search_rate(lambda rate: inf if rate > most else abs(log2(rate / (most / 4))), 0.4)
    found = Tuned(best_of(tried), tried)
    if most < 0.4 / 2**6:
        assert found.loss == inf
        assert not found.inner
    else:
        assert most / 8 < found.rate < most / 2
        assert found.inner


def test_every_number_of_backups_is_raced() -> None:
    assert list(Scale().methods) == ["b = 0", "b = 1", "b = 2", "b = 3", "asynchronous"]


@pytest.fixture
def shown() -> dict[tuple[str, str], Sequence[Ran]]:
    found = courses((0.4, 0.4), (0.2, 0.2), (0.9, 0.9), (0.3, 0.3))
    return {(condition, arm): rans for condition, course in found.items() for arm, rans in course.rans.items()}


def test_pictures_are_drawn_of_what_was_judged(shown: dict[tuple[str, str], Sequence[Ran]]) -> None:
    for picture in (time_picture(shown), ends_picture(shown)):
        assert picture.figure.axes


def test_bars_are_as_high_as_the_figures_of_the_report(shown: dict[tuple[str, str], Sequence[Ran]]) -> None:
    heights = [bar.get_height() for bar in ends_picture(shown).figure.axes[0].patches]
    assert sorted(heights) == pytest.approx(sorted([0.4, 0.2, 0.9, 0.3] * 2))


@pytest.mark.parametrize("strategy", [BackupWorkers(0), BackupWorkers(), ParameterServer()])
def test_a_race_ends_in_time_and_keeps_what_was_known_when(strategy: Strategy) -> None:
    pytest.importorskip("sklearn")

    def slow(rank: int, seed: int) -> Straggler:
        return Straggler(factor=5.0 if rank == 2 else 1.0)

    found = run_race(load("digits"), strategy, Race(0.4, 0.004, 8, 0.1, workers=3, looks=6), slow, seed=0)
    assert len(found.seconds) == len(found.losses) > 1
    assert found.steps > 3
    assert list(found.seconds) == sorted(found.seconds)
    if strategy == BackupWorkers():
        assert sum(found.shares) == pytest.approx(2)
        assert 1 <= found.best <= 3


@pytest.mark.parametrize("strategy", [BackupWorkers(backups=1), ParameterServer()], ids=str)
def test_a_race_that_diverges_ends_infinitely_high_and_does_not_end_the_search(strategy: Strategy) -> None:
    pytest.importorskip("sklearn")

    def never(rank: int, seed: int) -> Straggler:
        return Straggler()

    fast = Race(0.4, 0.004, 8, 1e30, workers=3, looks=6)
    assert run_race(load("digits"), strategy, fast, never, seed=0).end == inf
