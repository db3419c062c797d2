"""What the reproduction of backup workers makes of its races, and what a race keeps."""

from __future__ import annotations

import pytest

from laconic.emulate import Straggler
from laconic.runs.claims.backup_workers import ALL, ASYNCHRONOUS, CONDITIONS, Scale, best, judge
from laconic.runs.studies.backup_pictures import ends_picture, time_picture
from laconic.runs.studies.backup_race import Race, Ran, run_race
from laconic.strategies.backup_workers import BackupWorkers
from laconic.strategies.base import Strategy
from laconic.strategies.parameter_server import ParameterServer
from laconic.tasks import load


def ran(loss: float) -> Ran:
    """Falling to a loss, with some noise at the end."""
    losses = (3.0, 2.0, 1.0, loss * 1.1, loss, loss * 0.9)
    return Ran((0.0, 1.0, 2.0, 3.0, 4.0, 5.0), losses, 100, (1.0, 0.9, 0.8, 0.3), 3)


def races(everyone: float, some: float, nobody: float) -> dict[tuple[str, str], dict[float, list[Ran]]]:
    """What each method ends with at its best rate; at another it ends higher."""
    ends = {ALL: everyone, "b = 1": some, "b = 2": some * 1.5, ASYNCHRONOUS: nobody}
    return {
        (condition, name): {0.1: [ran(2 * loss), ran(2 * loss)], 0.2: [ran(loss), ran(loss)]}
        for condition in CONDITIONS
        for name, loss in ends.items()
    }


@pytest.mark.parametrize(
    ("everyone", "some", "nobody", "holds", "where"),
    [
        (0.4, 0.2, 0.3, True, "nowhere"),
        (0.4, 0.2, 0.1, False, "asynchronous SGD ends lower"),
        (0.2, 0.4, 0.5, False, "b = 0 ends lower"),
    ],
)
def test_the_claim_holds_where_backups_end_lower_than_all_and_than_nobody(
    everyone: float, some: float, nobody: float, holds: bool, where: str
) -> None:
    result = judge(races(everyone, some, nobody), [])
    assert result.holds is holds
    assert result.value == pytest.approx(everyone / some)
    assert where in result.details["where it falls short"]
    assert "b = 1 ends at" in result.measured


def test_the_best_rate_is_the_one_that_ends_lowest() -> None:
    assert best({0.1: [ran(0.2)], 0.4: [ran(0.1)], 0.8: [ran(3.0)]}) == 0.4


def test_every_number_of_backups_is_raced() -> None:
    assert list(Scale().methods) == ["b = 0", "b = 1", "b = 2", "b = 3", "asynchronous"]


def test_pictures_are_drawn_of_what_was_chosen() -> None:
    chosen = {key: trials[0.2] for key, trials in races(0.4, 0.2, 0.3).items()}
    for picture in (time_picture(chosen), ends_picture(chosen)):
        assert picture.figure.axes


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
