# SPDX-License-Identifier: Apache-2.0
"""What the reproduction of backup workers makes of its races, and what a race keeps."""

from __future__ import annotations

from math import inf, log2

import pytest

from reproductions.backup_workers.claim import ALL, ASYNCHRONOUS, CLAIM, CONDITIONS, Scale, judge
from reproductions.backup_workers.pictures import ends_picture, time_picture
from reproductions.backup_workers.race import Race, Ran, run_race
from reproductions.backup_workers.tuning import Tuned, best_of, search_rate
from thinwire.emulate import Straggler
from thinwire.strategies.base import Strategy
from thinwire.strategies.stragglers.backup_workers import BackupWorkers
from thinwire.strategies.stragglers.parameter_server import ParameterServer
from thinwire.tasks import load


def ran(loss: float) -> Ran:
    """Falling to a loss, with some noise at the end."""
    losses = (3.0, 2.0, 1.0, loss * 1.1, loss, loss * 0.9)
    return Ran((0.0, 1.0, 2.0, 3.0, 4.0, 5.0), losses, 100, (1.0, 0.9, 0.8, 0.3), 3)


def races(everyone: float, some: float, nobody: float) -> dict[tuple[str, str], Tuned]:
    """What each method ends with at its own rate."""
    ends = {ALL: everyone, "b = 1": some, "b = 2": some * 1.5, ASYNCHRONOUS: nobody}
    return {
        (condition, name): Tuned(0.2, {0.1: 2 * loss, 0.2: loss, 0.4: 3 * loss}, (ran(loss * 0.9), ran(loss * 1.1)))
        for condition in CONDITIONS
        for name, loss in ends.items()
    }


@pytest.mark.parametrize(
    ("everyone", "some", "nobody", "old", "holds", "where"),
    [
        (0.4, 0.2, 0.3, 0.9, True, "nowhere"),
        (0.4, 0.2, 0.1, 0.9, False, "asynchronous SGD ends lower at its own"),
        (0.4, 0.2, 0.3, inf, True, "nowhere"),
        (0.4, 0.2, 0.1, 0.1, False, "asynchronous SGD ends lower at the same"),
        (0.2, 0.4, 0.5, 0.9, False, "b = 0 ends lower"),
    ],
)
def test_the_claim_holds_where_backups_end_lower_than_all_and_than_old_gradients(
    everyone: float, some: float, nobody: float, old: float, holds: bool, where: str
) -> None:
    result = judge(races(everyone, some, nobody), {key: [ran(old)] for key in CONDITIONS}, [])
    assert result.holds is holds
    assert list(result.parts) == list(CLAIM.parts)
    assert result.value == pytest.approx(everyone / some)
    assert where in result.details["where it falls short"]
    assert "b = 1 ends at" in result.measured
    late = next(iter(CONDITIONS))
    assert "tried 0.1: " in result.details[f"{ALL}, {late}"]
    assert f"loss {old:.4f}" in result.details[f"{ASYNCHRONOUS} at the rate of b = 1, {late}"]
    assert result.details[f"b that ends lowest, {late}"] == "1"
    assert result.details[f"b by the times of steps, each seed, {late}"] == "1, 1"


@pytest.mark.parametrize("best", [0.05, 0.1, 0.2, 0.8])
def test_a_rate_is_found_between_a_lower_and_a_higher_one_that_end_higher(best: float) -> None:
    tried = search_rate(lambda rate: abs(log2(rate / best)), 0.1)
    assert best_of(tried) == pytest.approx(best)
    assert Tuned(best_of(tried), tried, ()).inner
    assert len(tried) <= abs(log2(best / 0.1)) + 3


def test_a_rate_that_diverges_is_infinitely_bad_and_a_search_has_an_end() -> None:
    assert ran(float("nan")).end == inf
    tried = search_rate(lambda rate: inf if rate > 0.1 else rate, 0.1)
    assert best_of(tried) == min(tried)
    assert not Tuned(best_of(tried), tried, ()).inner


def test_every_number_of_backups_is_raced() -> None:
    assert list(Scale().methods) == ["b = 0", "b = 1", "b = 2", "b = 3", "asynchronous"]


def test_pictures_are_drawn_of_what_was_chosen() -> None:
    chosen = {key: tuned.rans for key, tuned in races(0.4, 0.2, 0.3).items()}
    for picture in (time_picture(chosen), ends_picture(chosen)):
        assert picture.figure.axes


def test_bars_are_as_high_as_the_figures_of_the_report() -> None:
    chosen = {key: tuned.rans for key, tuned in races(0.4, 0.2, 0.3).items()}
    heights = [bar.get_height() for bar in ends_picture(chosen).figure.axes[0].patches]
    assert sorted(heights) == pytest.approx(sorted([0.4, 0.2, 0.3, 0.3] * 2))


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
