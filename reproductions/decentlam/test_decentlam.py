# SPDX-License-Identifier: Apache-2.0
"""The reproduction of the decentralised momentum methods: its equations, its training, its verdict, its pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reproductions.decentlam import claim as decentlam
from reproductions.decentlam import least_squares
from reproductions.decentlam.claim import Accuracies, AtRest, Biases, Choices, Scale, judge
from reproductions.decentlam.methods import METHODS
from reproductions.decentlam.pictures import accuracy_picture, bias_picture
from reproductions.shared.claims import Attempt, claim, write_result
from reproductions.shared.curves import Choice
from reproductions.shared.threads import Schedule, train_on_threads
from thinwire import Complete, Gossip, OnePeerExponential, Ring
from thinwire.lab.tasks import load

BY_NAME = {method.name: method for method in METHODS}


def test_the_point_of_rest_solves_its_equation_and_the_optimum_its_own() -> None:
    problem = least_squares.drawn(5, width=3, seed=1)
    mixing = Ring().matrix(5, 0)
    rows = problem.rest(mixing, 0.2 * mixing)
    residuals = np.einsum("nra,na->nr", problem.features, rows) - problem.targets
    gradients = np.einsum("nra,nr->na", problem.features, residuals)
    assert np.allclose((np.eye(5) - mixing) @ rows, -0.2 * mixing @ gradients, rtol=0, atol=1e-13)
    at_optimum = np.einsum("nra,a->nr", problem.features, problem.optimum) - problem.targets
    assert np.allclose(np.einsum("nra,nr->a", problem.features, at_optimum), 0, rtol=0, atol=1e-12)
    assert problem.bias(np.tile(problem.optimum, (5, 1))) == 0
    assert problem.bias(rows) > 1e-3
    assert np.allclose(problem.rest(Complete().matrix(5, 0), Complete().matrix(5, 0)), problem.optimum, atol=1e-12)


def test_workers_disagree_and_their_curvatures_are_as_promised() -> None:
    problem = least_squares.drawn(4, seed=3)
    values = np.linalg.eigvalsh(np.einsum("nra,nrb->nab", problem.features, problem.features))
    assert values.min() >= 0.5
    assert values.max() <= 1.5
    assert np.ptp(problem.targets, 0).min() > 0.1
    assert np.array_equal(problem.targets, least_squares.drawn(4, seed=3).targets)


@pytest.mark.parametrize("name", ["DmSGD", "DecentLaM", "EDM"])
def test_training_ends_where_the_method_says_at_every_learning_rate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(least_squares, "_LOOK_EVERY", 50)
    problem, graph, rates, method = least_squares.drawn(4, width=2), Ring(), (0.2, 0.4), BY_NAME[name]
    own = method.own_momentum(0.5)
    rows, steps = least_squares.trained(problem, method.recipe(graph, 0.5), rates, momentum=own)
    assert rows.shape == (2, 4, 2)
    assert steps < 1000
    for rate, real in zip(rates, rows, strict=True):
        assert np.abs(real - method.rest(problem, graph, rate, 0.5)).max() < 1e-9


def test_training_that_does_not_come_to_rest_is_given_up() -> None:
    problem = least_squares.drawn(2, width=2)
    assert least_squares.trained(problem, Gossip(Ring(), "after"), [1e-4], most=200)[1] == 200


def test_a_task_is_learned_on_threads_and_the_same_again() -> None:
    task, schedule = load("digits"), Schedule(steps=20, batch_size=16, lr=0.1, momentum=0.9)
    recipe = Gossip(OnePeerExponential(), "after")
    first, again = (train_on_threads(task, recipe, schedule, workers=3, split="iid", seed=1) for _ in range(2))
    assert first == again
    assert first.metric > 0.5


def test_the_learning_rate_warms_up_over_a_tenth_of_the_steps() -> None:
    schedule = Schedule(steps=40, batch_size=1, lr=0.8)
    assert [schedule.rate(step) for step in (0, 1, 3, 4, 39)] == [0.2, 0.4, 0.8, 0.8, 0.8]
    assert Schedule(steps=5, batch_size=1, lr=0.8).rate(0) == 0.8


def figures(
    off: float = 1e-12,
    ratio: float = 50.0,
    predicted: float = 50.0,
    added: float = 1.0,
    gains: tuple[float, ...] = (0.02, 0.022, 0.021),
    earlier: tuple[float, ...] = (0.0, 0.001, -0.001),
) -> tuple[Biases, Choices, Accuracies]:
    """What might have been measured."""
    biases: Biases = {}
    for method in METHODS:
        for momentum in (0.0,) if method.name == "DSGD" else (0.5, 0.9):
            for rate in (0.05, 0.1):
                real, told = {"DmSGD": (ratio, predicted), "DecentLaM": (added, 1.0)}.get(method.name, (1.0, 1.0))
                scale = 0.0 if method.pull is None else rate
                biases[method.name, momentum, rate] = AtRest(scale * real, off, scale * told)
    accuracies = {(method.name, total): [0.9, 0.92, 0.91] for method in METHODS for total in (64, 1024)}
    for total, differences in ((64, earlier), (1024, gains)):
        pairs = zip(accuracies["DmSGD", total], differences, strict=True)
        accuracies["DecentLaM", total] = [theirs + more for theirs, more in pairs]
    accuracies["EDM", 1024] = [0.95, 0.95, 0.95]
    choices = dict.fromkeys(accuracies, Choice({0.5: 0.3, 1.0: 0.2, 2.0: 0.4}))
    return biases, choices, accuracies


@pytest.mark.parametrize(
    ("changes", "part", "outcome"),
    [
        ({"off": 1e-8}, "points of rest", "does not hold"),
        ({"ratio": 0.9, "predicted": 0.9}, "bias", "does not hold"),
        ({"ratio": 51.0}, "bias", "does not hold"),
        ({"added": 1.02, "predicted": 50.0 / 1.02}, "bias", "does not hold"),
        ({"gains": (-0.01, -0.02, 0.01)}, "accuracy", "does not hold"),
        ({"gains": (0.02, 0.0, 0.01)}, "accuracy", "within noise"),
        ({"earlier": (0.02, 0.022, 0.021)}, "growing with the batch", "does not hold"),
        ({"earlier": (0.02, 0.0, 0.021)}, "growing with the batch", "within noise"),
        ({"gains": (-0.01, -0.02, 0.01), "earlier": (-0.03, -0.04, -0.01)}, "growing with the batch", "holds"),
    ],
)
def test_each_part_of_the_verdict_follows_from_the_figures(changes: dict[str, Any], part: str, outcome: str) -> None:
    assert judge(*figures()).holds
    result = judge(*figures(**changes))
    assert result.parts[part] == outcome
    assert list(result.parts) == list(claim("decentlam").parts)


def test_losses_are_told_as_well_as_wins() -> None:
    result = judge(*figures())
    assert result.details["more accurate than DecentLaM at 1024 examples a step"] == "EDM"
    assert result.details["accuracy at 1024 examples a step: DmSGD"] == "91.00 % (90.00 to 92.00)"
    assert result.details["squared bias, momentum 0.9: DmSGD"] == "2.5 at 0.05, 5 at 0.1"
    assert result.details["factor of the learning rate at 64 examples a step: DmSGD"].startswith("1 (loss 0.300 at 0.5")
    assert "50.0 to 50.0 times" in result.measured
    assert result.least < result.value < result.most


def test_a_small_run_measures_draws_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = tuple(BY_NAME[name] for name in ("DSGD", "DmSGD", "DecentLaM"))
    monkeypatch.setattr(decentlam, "METHODS", few)
    monkeypatch.setattr(decentlam, "WORKERS", 4)
    monkeypatch.setattr(decentlam, "QUICK", Scale((0.3,), (0.9,), (16,), factors=(0.5, 1.0), seeds=2))
    monkeypatch.setattr(decentlam, "_EXAMPLES", 16 * 4 * 5)
    monkeypatch.setattr(least_squares, "_LOOK_EVERY", 50)
    begun: list[tuple[str, int]] = []
    result = decentlam.measure(Attempt(tmp_path, True, lambda event: None, lambda *words: begun.append(words)))
    assert [place for _, place in begun] == [0, 1, 2, 3, 4, 5]
    assert "DecentLaM" in begun[2][0]
    assert float(result.measured.rpartition(" ")[2]) < 1e-9
    page = write_result(tmp_path, claim("decentlam"), result, quick=True, when="today").read_text()
    assert "squared bias, momentum 0.9: DecentLaM" in page


def test_both_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    biases, choices, accuracies = figures()
    drawn = bias_picture({key: rest.bias for key, rest in biases.items()}, 0.9), accuracy_picture(accuracies)
    attempt = Attempt(tmp_path, True, lambda event: None, lambda *_: None)
    result = attempt.illustrated(judge(biases, choices, accuracies), lambda: drawn)
    assert result.details["pictures"] == "![bias.png](bias.png) ![accuracy.png](accuracy.png)"
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("bias.png", "accuracy.png"))
