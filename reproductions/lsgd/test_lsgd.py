# SPDX-License-Identifier: Apache-2.0
"""The claim about leaders is judged by its figures, whatever they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from reproductions.lsgd.claim import (
    _WELLS,
    CLAIM,
    METHODS,
    WORKERS,
    Landscapes,
    Races,
    Scale,
    _led,
    _raced,
    _searched,
    best,
    judge,
    trapped,
)
from reproductions.lsgd.landscapes import EVERY, Completion, Descent, double_well, go_down
from reproductions.shared.claims import Attempt
from reproductions.shared.curves import Curve
from thinwire import EASGD, LeaderGradientDescent, LeaderSGD
from thinwire.lab.runs import Settings
from thinwire.lab.runs.defaults import check_recipe
from thinwire.lab.runs.folder import Fields


def curve(loss: float) -> Curve:
    return Curve((0, 10), (0.0, 8.0), (2.3, loss), 0.1, 0.05, 1000.0)


def races(**ends: tuple[float, ...]) -> Races:
    """Every method ends at 0.2 and 0.3 in two rounds, LSGD at half of that; others as given, by name."""
    losses: dict[str, tuple[float, ...]] = dict.fromkeys(METHODS, (0.2, 0.3))
    losses |= {"LSGD": (0.1, 0.15)} | {name.replace("_", " "): each for name, each in ends.items()}
    tried = {name: {0.01: 0.4, 0.02: 0.3, 0.04: 0.5} for name in METHODS}
    tried |= {"EASGD": {0.01: 0.3, 0.02: 0.4, 0.04: 0.5}}
    return Races(tried, {name: [curve(loss) for loss in each] for name, each in losses.items()}, LED)


def ended(first: float, second: float, shipped: float) -> Descent:
    return Descent(torch.tensor([[[first], [second]]], dtype=torch.float64), torch.tensor([1.0, shipped]))


def landscapes(*, centre: float = 0.25, crossed: float = 1.0, completed: float = 1e-6) -> Landscapes:
    wells = {
        name: ended(0.6, -0.6, centre if "EASGD" in name else 0.0) if held else ended(1.0, crossed, 0.0)
        for name, (_, held) in _WELLS.items()
    }
    return Landscapes(
        wells,
        {
            f"{kind}, pull {pull:g}": [ended(0, 0, 0.5 if kind == "EASGD" else completed)]
            for pull in (0.01, 0.1)
            for kind in ("EASGD", "LSGD")
        },
    )


LED = {"LSGD": [3, 1, 2, 2]}


def test_all_that_is_claimed_holds() -> None:
    result = judge(races(), landscapes(), "20mbit")
    assert result.holds
    assert list(result.parts) == list(CLAIM.parts)
    assert (result.value, result.most) == pytest.approx((0.5, 0.5))
    assert "periodic averaging 0.2500" in result.measured
    assert result.details["elections won, LSGD"] == "3, 1, 2, 2"
    assert result.details["learning rate, LSGD"] == "0.02 (in the search 0.01: 0.4000, 0.02: 0.3000, 0.04: 0.5000)"
    assert result.details["learning rates at an edge of those tried"] == "EASGD 0.01"
    assert result.details["loss of LSGD, two nodes over that of LSGD, each round"] == "2.000, 2.000"
    assert result.details["where it falls short"] == "nowhere"


def test_rounds_that_differ_are_within_noise_whatever_their_means() -> None:
    result = judge(races(AllReduce=(5.0, 0.14), EASGD=(0.05, 0.1)), landscapes(), "20mbit")
    outcomes = {part: str(outcome) for part, outcome in result.parts.items()}
    assert outcomes["than AllReduce"] == outcomes["two nodes, than AllReduce"] == "within noise"
    assert outcomes["than EASGD"] == outcomes["two nodes, than EASGD"] == "does not hold"
    assert outcomes["than periodic averaging"] == "holds"
    assert "than AllReduce: higher in 1 of 2 rounds" in result.details["where it falls short"]


def test_a_run_that_diverges_is_higher_than_any() -> None:
    diverged = {"LSGD": (float("nan"), 0.1)}
    assert not judge(races(**diverged), landscapes(), None).holds
    assert judge(races(AllReduce=(float("nan"), 0.3)), landscapes(), None).parts["than AllReduce"] == "holds"


@pytest.mark.parametrize(
    "land",
    [landscapes(centre=0.1), landscapes(crossed=-1.0), landscapes(completed=0.6)],
    ids=["the centre is not on the hill", "a follower that stays", "a matrix"],
)
def test_one_figure_that_differs_is_enough_to_lose(land: Landscapes) -> None:
    assert not judge(races(), land, None).holds


def test_rates_are_chosen_with_a_seed_apart_and_methods_take_turns_at_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, float, int]] = []

    def launched(settings: Settings, folder: Path, *, listener: object) -> Fields:
        ran.append((settings.strategy, settings.lr, settings.seed))
        folder.mkdir(parents=True)
        # All-reduce ends lowest at the lower rate, leaders at the higher one.
        loss = settings.lr if settings.strategy.startswith("AllReduce") else 1 - settings.lr
        line = {"eval_loss": loss, "step": 1, "seconds": 1.0}
        (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        return dict.fromkeys(("seconds_per_step", "exposed_seconds_per_step", "payload_bytes_per_worker_per_step"), 0.1)

    pytest.importorskip("sklearn")
    monkeypatch.delenv("THINWIRE_DATA", raising=False)
    monkeypatch.setattr("reproductions.shared.claims.launch", launched)
    scale = Scale(rates=(0.01, 0.02), methods=("AllReduce", "LSGD"), rounds=2)
    attempt = Attempt(tmp_path, quick=False, listener=lambda event: None, on_begin=lambda what, place: None)
    tried = _searched(attempt, scale, None)
    assert {name: best(each) for name, each in tried.items()} == {"AllReduce": 0.01, "LSGD": 0.02}
    searching = {seed for _, _, seed in ran}
    ran.clear()
    found = _raced(attempt, scale, None, tried)
    names = [check_recipe(METHODS[name], WORKERS) for name in scale.methods]
    assert ran == [(names[0], 0.01, 0), (names[1], 0.02, 0), (names[0], 0.01, 1), (names[1], 0.02, 1)]
    assert not searching & {0, 1}
    assert found.led == {"LSGD": [0, 0, 0, 0]}
    ran.clear()
    assert best(_searched(attempt, Scale(rates=(0.01,)), None)["EASGD"]) == 0.01
    assert not ran


def test_the_best_learning_rate_has_the_lowest_loss() -> None:
    assert best({0.1: 0.2, 0.2: 0.25, 0.4: float("inf")}) == 0.1


def test_elections_are_counted_from_what_every_round_noticed(tmp_path: Path) -> None:
    for name, leaders in (("LSGD", [0, 2]), ("LSGD.2", [2, 3])):
        (tmp_path / name).mkdir()
        led = [{"leader": float(rank)} for rank in leaders]
        rows = [{"step": step, "loss": 1.0, "metrics": each} for step, each in enumerate(({}, *led), 1)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert _led([tmp_path / "LSGD", tmp_path / "LSGD.2"]) == [1, 0, 2, 1]


def test_descents_end_where_theory_says() -> None:
    sides = torch.tensor([[1.1], [-1.0]], dtype=torch.float64)
    held = go_down(double_well, EASGD(period=1, pull=0.03, centre_pull=0.06), sides, lr=0.1, steps=200)
    assert trapped(held)
    assert held.places.shape == (201, 2, 1)
    assert len(held.shipped) == 200 // EVERY + 1
    assert float(held.shipped[-1]) == pytest.approx(0.25, abs=1e-3)
    assert not trapped(go_down(double_well, LeaderGradientDescent(pull=0.5), sides, lr=0.1, steps=200))


def test_a_matrix_is_completed_by_a_leader() -> None:
    problem = Completion(side=8)
    ours = go_down(problem.loss(), LeaderSGD(period=1, pull=0.01), problem.starts(2), lr=1.0, steps=150)
    assert float(ours.shipped[-1]) < 0.02 * float(ours.shipped[0])


def test_everything_is_drawn(tmp_path: Path) -> None:
    pictures = pytest.importorskip("reproductions.lsgd.pictures")
    land = landscapes()
    drawn = [
        pictures.loss_picture(races().rounds),
        pictures.leaders_picture({"LSGD": [3, 1, 2, 2], "LSGD, two nodes": [1, 1, 0, 0]}),
        pictures.well_picture(land.wells),
        pictures.completion_picture(land.completions),
    ]
    names = [picture.png(tmp_path).name for picture in drawn]
    assert names == ["loss.png", "leaders.png", "double-well.png", "completion.png"]
