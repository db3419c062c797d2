# SPDX-License-Identifier: Apache-2.0
"""The measurement behind `thinwire reproduce craig`: its optimum, its clock and its verdict."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from reproductions.craig.claim import CLAIM, Found, judge
from reproductions.craig.convex import Regression
from reproductions.craig.deep import DeepCourse, Recipe, train_network, two_layers
from reproductions.craig.incremental import (
    METHODS,
    Arm,
    Course,
    Method,
    Trial,
    _Runs,  # pyright: ignore[reportPrivateUsage]
    arms_of,
    race,
    redundant,
)
from reproductions.craig.pictures import draw_accuracies, draw_floors, draw_residuals
from reproductions.shared.claims import Outcome
from thinwire.coreset.baselines import Random
from thinwire.coreset.craig import Craig
from thinwire.coreset.subset import Subset, keyed
from thinwire.tasks import load


def problem(classes: int = 2) -> Regression:
    draw = torch.Generator().manual_seed(classes)
    y = torch.randint(classes, (200,), generator=draw)
    x = torch.nn.functional.one_hot(y, classes).float() @ torch.randn(classes, 5, generator=draw)
    return Regression("toy", x + torch.randn(200, 5, generator=draw), y, weight_decay=1e-3)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_optimum_has_no_gradient_left(classes: int) -> None:
    task = problem(classes)
    layer = task.solved(Subset.whole(200)).double()
    decay = sum(p.square().sum() for p in layer.parameters()) * task.weight_decay / 2
    (task.losses(layer, task.x.double(), task.y).mean() + decay).backward()
    assert all(p.grad is not None and float(p.grad.abs().max()) < 1e-6 for p in layer.parameters())
    assert task.residual(layer.float()) == pytest.approx(0, abs=1e-6)
    assert task.residual(task.layer()) == pytest.approx(1)


def loop(task: Regression, arm: Arm, method: str, trial: Trial, most: int) -> list[float]:
    """Parameters after `most` gradients or more, by a plain loop over single samples from the equations."""
    n, k = task.x.shape
    x = torch.cat([task.x, torch.ones(n, 1)], 1).double()
    decay = torch.tensor([task.weight_decay] * k + [0.0], dtype=torch.float64)
    size, taken, epoch = len(arm.indices), 0, 0
    w = torch.zeros(k + 1, dtype=torch.float64)

    def gradient(at: torch.Tensor, j: int) -> torch.Tensor:
        row = int(arm.indices[j])
        slope = torch.sigmoid(x[row] @ at) - float(task.y[row])
        return float(arm.weights[j]) * slope * x[row]

    last = [gradient(w, j) for j in range(size)]
    taken += size if method == "saga" else 0
    anchor, mean = w.clone(), w.clone()
    while taken < most:
        rate = trial.rate / (1 + trial.decay * epoch)
        if method == "svrg" and epoch % 2 == 0:
            anchor = w.clone()
            mean = torch.stack([gradient(anchor, j) for j in range(size)]).mean(0)
            taken += size
        for j in torch.randperm(size, generator=keyed(trial.seed, epoch)).tolist():
            if taken >= most:
                break
            if method == "ig":
                direction = gradient(w, j)
            elif method == "saga":
                new = gradient(w, j)
                direction = new - last[j] + torch.stack(last).mean(0)
                last[j] = new
            else:
                direction = gradient(w, j) - gradient(anchor, j) + mean
            w = w - rate * (direction + decay * w)
            taken += 2 if method == "svrg" else 1
        epoch += 1
    return w.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_runs_side_by_side_equal_plain_loops_over_single_samples(method: Method) -> None:
    task = problem()
    arms = arms_of(task, (0.1,))
    trials = [Trial(arm.name, 0.05, 0.5, seed) for arm in arms for seed in (3, 4)]
    runs = _Runs(task, {arm.name: arm for arm in arms}, method, trials)
    while int(runs.evaluations.min()) < 430:
        runs.step()
    for run, trial in enumerate(trials):
        arm = next(arm for arm in arms if arm.name == trial.arm)
        expected = loop(task, arm, method, trial, int(runs.evaluations[run]))
        assert runs.w[run].tolist() == pytest.approx(expected, abs=1e-4), trial


@pytest.mark.parametrize("method", METHODS)
def test_every_method_comes_near_the_optimum_and_counts_its_gradients(method: Method) -> None:
    task = problem()
    (course,) = race(task, arms_of(task, ()), method, [Trial("full", 0.1, 1.0, 0)], 4000)
    assert course.residuals[0] == pytest.approx(1)
    assert course.first(0.01) < 4000
    assert math.isinf(course.first(-1.0))
    assert list(course.evaluations) == sorted(course.evaluations)
    # SAGA's table and SVRG's first snapshot are gradients of all 200 samples, before any step or with the first.
    assert course.evaluations[0] == (200 if method == "saga" else 0)
    assert course.evaluations[-1] >= 4000


def test_arms_of_one_size_have_as_many_samples_and_weights_of_mean_one() -> None:
    arms = arms_of(problem(), (0.1, 0.3))
    assert [len(arm.indices) for arm in arms] == [200, 20, 20, 20, 60, 60, 60]
    assert all(float(arm.weights.mean()) == pytest.approx(1) for arm in arms)
    by_name = {arm.name: arm for arm in arms}
    random, weighted = by_name["random 10%"], by_name["weighted random 10%"]
    assert random.indices.tolist() == weighted.indices.tolist()
    assert len(set(weighted.weights.tolist())) > 1


def test_near_duplicates_are_near_their_samples_and_have_their_labels() -> None:
    task = problem()
    copied = redundant(task, 5, 50)
    assert copied.n == 250
    x, y = copied.x.view(5, 50, -1), copied.y.view(5, 50)
    assert torch.equal(y, y[:1].expand(5, 50))
    distances = (x[1:] - x[:1]).std(dim=(0, 1)) / x[0].std(0)
    assert distances.tolist() == pytest.approx([0.1] * x.shape[2], rel=0.2)


def found(full: float, craig: float, random: float, spent: float = 0.0) -> Found:
    """One seed's gradients to the target, of at most 900; a gradient takes a second."""
    counts = {"full": full, "craig 10%": craig, "random 10%": random, "weighted random 10%": 2 * random}
    courses = {
        arm: [Course((0, int(min(count, 900))), (1.0, 0.001 if count < 900 else 0.5))] for arm, count in counts.items()
    }
    return Found({}, dict.fromkeys(counts, 0.0) | {"craig 10%": spent}, 1.0, {"ig": courses})


def networks(full: float, craig: float) -> dict[str, dict[str, DeepCourse]]:
    """How long each took to its last accuracy."""
    return {
        "toy": {
            "full": DeepCourse((0.0, full), (0, 1), (0.1, 0.9), 0.0),
            "craig 10%": DeepCourse((0.0, craig), (0, 1), (0.1, 0.9), 0.0),
        }
    }


@pytest.mark.parametrize(
    ("counts", "spent", "network", "verdict", "value"),
    [
        ((600, 100, 200), 0.0, (4.0, 1.0), "holds", 6.0),
        ((600, 100, 200), 900.0, (4.0, 1.0), "holds in part: redundant data, gradients; beside random", 6.0),
        ((200, 100, 200), 0.0, (1.0, 1.0), "holds in part: redundant data, beside random", 2.0),
        ((600, 100, 50), 0.0, (1.0, 1.0), "holds in part: redundant data, gradients", 6.0),
        ((600, math.inf, math.inf), 0.0, (1.0, 1.0), "does not hold", 0.0),
        ((math.inf, 100, math.inf), 0.0, (1.0, 1.0), "does not hold: networks", 9.0),
    ],
)
def test_the_verdict_follows_the_figures(
    counts: tuple[float, float, float], spent: float, network: tuple[float, float], verdict: str, value: float
) -> None:
    one = found(*counts, spent=spent)
    result = judge({("toy", 20): one, ("toy", 1): one}, networks(*network), {})
    assert list(result.parts) == list(CLAIM.parts)
    assert result.verdict.startswith(verdict.partition(";")[0])
    assert result.value == value
    expected = spent == 0 and value >= 3 and counts[0] < math.inf
    assert (result.parts["redundant data, seconds"] is Outcome.HOLDS) == expected
    undecided = result.parts["redundant data, gradients"] is Outcome.UNDECIDED
    assert undecided == (counts[0] == math.inf)
    assert result.least <= result.value <= result.most


def test_a_network_s_clock_counts_selections() -> None:
    recipe = Recipe("digits", load("digits"), lambda: two_layers(64, 10))
    ours = train_network(recipe, Craig(0.1, every=1), lr=0.5, points=3200, looks=2, eval_limit=50)
    random = train_network(recipe, Random(0.1), lr=0.5, points=3200, looks=2, eval_limit=50)
    assert 0 < ours.selection_seconds <= ours.seconds[-1]
    assert random.selection_seconds < ours.selection_seconds
    assert random.accuracies[-1] > random.accuracies[0]
    assert ours.points == random.points == (0, 1600, 3200)


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    courses = found(600, 100, 200).courses
    first = {method: {arm: each[0] for arm, each in arms.items()} for method, arms in courses.items()}
    draw_residuals(tmp_path / "a.png", "toy", first, 0.01)
    draw_floors(tmp_path / "b.png", "toy", (0.1,), {"craig": [0.1], "random": [0.2], "weighted random": [0.3]})
    draw_accuracies(tmp_path / "c.png", "toy", {"full": DeepCourse((0.0, 1.0), (0, 32), (0.1, 0.9), 0.0)})
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("a.png", "b.png", "c.png"))


def test_the_claim_names_its_paper() -> None:
    assert CLAIM.name == "craig"
    assert "1906.01827" in CLAIM.paper
