# SPDX-License-Identifier: Apache-2.0
"""The claim about leaders is judged by its figures, whatever they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from reproductions.lsgd.claim import _WELLS, CLAIM, METHODS, WORKERS, Landscapes, _led, best, judge, trapped
from reproductions.lsgd.landscapes import EVERY, Completion, Descent, double_well, go_down
from reproductions.shared.curves import Curve
from thinwire.strategies.leader.leader import LeaderSGD
from thinwire.strategies.leader.leader_gradient import LeaderGradientDescent
from thinwire.strategies.local.elastic_averaging import EASGD


def curve(loss: float) -> Curve:
    return Curve((0, 10), (0.0, 8.0), (2.3, loss), 0.1, 0.05, 1000.0)


def runs(ours: float = 0.1) -> dict[str, dict[float, list[Curve]]]:
    """Every method ends at 0.2 with one learning rate and at 0.3 with another, LSGD at its own figure."""
    found = {name: {0.01: [curve(0.3)], 0.02: [curve(0.2), curve(0.2)]} for name in METHODS}
    return found | {"LSGD": {0.01: [curve(9.0)], 0.02: [curve(ours), curve(ours)]}}


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
    result = judge(runs(), LED, landscapes(), "20mbit", [])
    assert result.holds
    assert result.value == pytest.approx(0.1)
    assert "periodic averaging 0.2000" in result.measured
    assert result.details["elections won, LSGD"] == "3, 1, 2, 2"
    assert "learning rate 0.02" in result.details["held-out loss, LSGD"]
    assert result.details["where it falls short"] == "nowhere"


def test_a_rival_that_ends_lower_is_named() -> None:
    raced = runs() | {"periodic averaging": {0.02: [curve(0.05)]}}
    result = judge(raced, LED, landscapes(), "20mbit", [])
    assert result.parts["than periodic averaging"] == "does not hold"
    assert list(result.parts) == list(CLAIM.parts)
    assert result.details["where it falls short"] == "periodic averaging ends lower"


@pytest.mark.parametrize(
    ("raced", "land"),
    [
        (runs(0.21), landscapes()),
        (runs(), landscapes(centre=0.1)),
        (runs(), landscapes(crossed=-1.0)),
        (runs(), landscapes(completed=0.6)),
    ],
    ids=["slower", "the centre is not on the hill", "a follower that stays", "a matrix"],
)
def test_one_figure_that_differs_is_enough_to_lose(
    raced: dict[str, dict[float, list[Curve]]], land: Landscapes
) -> None:
    assert not judge(raced, LED, land, None, []).holds


def test_the_best_learning_rate_has_the_lowest_mean_loss() -> None:
    assert best({0.1: [curve(0.3), curve(0.1)], 0.2: [curve(0.25), curve(0.25)]}) == 0.1


def test_elections_are_counted_from_what_every_run_noticed(tmp_path: Path) -> None:
    for rate, leaders in (("0.1", [0, 2]), ("0.2", [2, 3])):
        home = tmp_path / f"rate-{rate}"
        (home / "LSGD").mkdir(parents=True)
        (home / "comparison.json").write_text(json.dumps({"rounds": {"AllReduce": ["AllReduce"], "LSGD": ["LSGD"]}}))
        rows = [{"step": 1, "loss": 1.0}, *({"step": 2, "metrics": {"leader": float(rank)}} for rank in leaders)]
        (home / "LSGD" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert _led(tmp_path, 1) == [1, 0, 2, 1]


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
        pictures.loss_picture({name: trials[0.02] for name, trials in runs().items()}),
        pictures.leaders_picture({"LSGD": [3, 1, 2, 2], "LSGD, two nodes": [1, 1, 0, 0]}),
        pictures.well_picture(land.wells),
        pictures.completion_picture(land.completions),
    ]
    names = [picture.png(tmp_path).name for picture in drawn]
    assert names == ["loss.png", "leaders.png", "double-well.png", "completion.png"]


def test_the_claim_names_its_paper_and_has_four_workers() -> None:
    assert CLAIM.name == "lsgd"
    assert "arXiv:1905.10395" in CLAIM.paper
    assert WORKERS == 4
