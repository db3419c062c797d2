"""The measurement behind `thinwire reproduce craig`: its optimum, its clock and its verdict."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from reproductions.craig.claim import CLAIM, Convex, Outcome, judge
from reproductions.craig.convex import METHODS, Course, Regression, choose, descend
from reproductions.craig.deep import DeepCourse, Recipe, train_network, two_layers
from reproductions.craig.pictures import draw_accuracies, draw_floors, draw_residuals
from thinwire.coreset.baselines import Random
from thinwire.coreset.craig import Craig
from thinwire.coreset.subset import Subset
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


@pytest.mark.parametrize("method", METHODS)
def test_every_method_comes_near_the_optimum_and_counts_its_gradients(method: str) -> None:
    task, whole = problem(), Subset.whole(200)
    rest = {"batch_size": 8, "passes": 100.0, "spent": 7.0, "target": 0.01, "seed": 0}
    course = descend(task, whole, method, lr=0.1, **rest)  # type: ignore[arg-type]
    assert course.residuals[-1] < 0.01
    assert course.seconds[0] == 7
    assert list(course.seconds) == sorted(course.seconds)
    assert course.seconds_to(0.01) > 7
    assert course.points[1] == (200 if method == "svrg" else 32)
    assert math.isinf(course.seconds_to(-1.0))


def test_coresets_and_random_points_are_as_many() -> None:
    sizes = [len(choose(problem(), 0.1, kind, 0)[0]) for kind in ("craig", "random")]  # type: ignore[arg-type]
    assert sizes == [20, 20]


def outcome(full: float, craig: float, random: float) -> Outcome:
    times = {"full": full, "craig 10%": craig, "random 10%": random}
    courses = {arm: [Course((0.0, min(t, 9.0)), (0, 1), (1.0, 0.001 if t < 9 else 0.5))] for arm, t in times.items()}
    return Outcome({}, {}, dict.fromkeys(METHODS, courses))


@pytest.mark.parametrize(
    ("times", "holds", "value"),
    [
        ((6.0, 1.0, 2.0), True, 6.0),
        ((2.0, 1.0, 2.0), False, 2.0),
        ((6.0, 1.0, 0.5), False, 0.0),
        ((6.0, math.inf, math.inf), False, 0.0),
        ((math.inf, 1.0, math.inf), True, 9.0),
    ],
)
def test_the_verdict_follows_the_figures(times: tuple[float, float, float], holds: bool, value: float) -> None:
    result = judge([Convex("toy", (0.1,), (0.1,), 1, 1.0)], {"toy": outcome(*times)}, {})
    assert (result.holds, result.value) == (holds, value)
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
    courses = outcome(6.0, 1.0, 2.0).courses
    first = {method: {arm: each[0] for arm, each in arms.items()} for method, arms in courses.items()}
    draw_residuals(tmp_path / "a.png", "toy", first, 0.01)
    draw_floors(tmp_path / "b.png", "toy", (0.1,), {"craig": [0.1], "random": [0.2]})
    draw_accuracies(tmp_path / "c.png", "toy", {"full": DeepCourse((0.0, 1.0), (0, 32), (0.1, 0.9), 0.0)})
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("a.png", "b.png", "c.png"))


def test_the_claim_names_its_paper() -> None:
    assert CLAIM.name == "craig"
    assert "1906.01827" in CLAIM.paper
