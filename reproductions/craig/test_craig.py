# SPDX-License-Identifier: Apache-2.0
"""The measurement behind `python -m reproductions craig`: its optimum, its clock and its verdict."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from reproductions.craig.claim import CLAIM, beyond, judge
from reproductions.craig.convex import Regression
from reproductions.craig.deep import (
    DeepCourse,
    DeepFound,
    DeepRuns,
    Recipe,
    WeightedRandom,
    train_network,
    two_layers,
)
from reproductions.craig.incremental import (
    METHODS,
    Arm,
    Course,
    Method,
    Trial,
    _Runs,  # pyright: ignore[reportPrivateUsage]
    coresets_of,
    race,
    random_arms,
    redundant,
)
from reproductions.craig.logistic import APART, Convex, Found, Round, Runs, measure_convex
from reproductions.craig.pictures import accuracy_picture, floor_picture, residual_picture
from thinwire.coreset import Craig
from thinwire.coreset.baselines import Random
from thinwire.coreset.subset import Subset, keyed
from thinwire.lab.tasks import load


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
    assert task.residual(layer) == 0
    assert task.residual(layer.float()) == pytest.approx(0, abs=1e-6)
    assert task.residual(task.layer()) == pytest.approx(1)


def test_runs_and_optimum_have_one_objective_on_data_with_a_large_intercept() -> None:
    draw = torch.Generator().manual_seed(0)
    y = (torch.arange(200) < 4).long()
    task = Regression("uneven", torch.randn(200, 2, generator=draw), y, weight_decay=0.1)
    best = task.solved(Subset.whole(200))
    assert abs(float(best.bias.detach())) > 0.5  # so that its decay counts
    (arm,) = coresets_of(task, ())
    runs = _Runs(task, "ig", [Trial(arm, 0.1, 1.0, 0)] * 40)
    at = torch.cat([best.weight[0], best.bias]).detach().float()
    # At the optimum, and all around it: at a smaller intercept's decay, some of these would be below zero.
    runs.w = at + 0.3 * torch.randn(40, 3, generator=draw) * torch.cat([torch.zeros(1), torch.ones(39)])[:, None]
    first, *others = runs.residuals()
    assert first == pytest.approx(0, abs=1e-6)
    assert min(others) > 0
    (course,) = race(task, "saga", [Trial(arm, 0.3, 0.1, 0)], 20_000)
    assert min(course.residuals) == pytest.approx(0, abs=1e-5)
    assert min(course.residuals) > -1e-6


def loop(task: Regression, arm: Arm, method: str, trial: Trial, most: int) -> list[float]:
    """Parameters after `most` gradients or more, by a plain loop over single samples from the equations."""
    n, k = task.x.shape
    x = torch.cat([task.x, torch.ones(n, 1)], 1).double()
    decay = torch.full((k + 1,), task.weight_decay, dtype=torch.float64)  # of the intercept too
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
    arms = [*coresets_of(task, (0.1,)), *random_arms(task, (0.1,), 0)]
    trials = [Trial(arm, 0.05, 0.5, seed) for arm in arms for seed in (3, 4)]
    runs = _Runs(task, method, trials)
    while int(runs.evaluations.min()) < 250:
        runs.step()
    # Those that go on do not notice that others end.
    rows = [1, 2, 5, 6]
    runs.keep(rows)
    trials = [trials[row] for row in rows]
    while int(runs.evaluations.min()) < 430:
        runs.step()
    for run, trial in enumerate(trials):
        expected = loop(task, trial.arm, method, trial, int(runs.evaluations[run]))
        assert runs.w[run].tolist() == pytest.approx(expected, abs=1e-4), trial


@pytest.mark.parametrize("method", METHODS)
def test_every_method_comes_near_the_optimum_and_counts_its_gradients(method: Method) -> None:
    task = problem()
    (full,) = coresets_of(task, ())
    (course,) = race(task, method, [Trial(full, 0.1, 1.0, 0)], 4000)
    assert course.residuals[0] == pytest.approx(1)
    assert course.first(0.01) < 4000
    assert math.isinf(course.first(-1.0))
    assert list(course.evaluations) == sorted(course.evaluations)
    # SAGA's table and SVRG's first snapshot are gradients of all 200 samples, before any step or with the first.
    assert course.evaluations[0] == (200 if method == "saga" else 0)
    assert course.evaluations[-1] >= 4000


def test_runs_end_at_the_target_and_those_of_an_arm_with_its_first() -> None:
    task = problem()
    (full,) = coresets_of(task, ())
    good, slow, diverges = (Trial(full, rate, 0.1, 0) for rate in (0.03, 1e-5, math.inf))
    alone = race(task, "ig", [good, slow, diverges], 2000, target=0.01)
    assert alone[0].residuals[-1] <= 0.01 < alone[0].residuals[-2]
    assert alone[1].evaluations[-1] == 2000
    assert alone[2].evaluations[-1] <= 2
    fewer = race(task, "ig", [good, slow], 2000, target=0.01, together=True)
    assert fewer[0] == alone[0]
    assert fewer[1].evaluations == fewer[0].evaluations


def test_a_course_is_at_the_target_between_two_looks() -> None:
    # The residual falls tenfold from look to look: it is at 0.01 * sqrt(10) halfway.
    course = Course((0, 100, 200), (1.0, 0.1, 0.01))
    assert course.first(0.01) == 200
    assert course.first(0.1**1.5) == pytest.approx(150)
    assert Course((0, 100), (math.inf, 0.001)).first(0.01) == 100
    assert math.isinf(course.first(0.001))
    seen = DeepCourse((0.0, 2.0, 4.0), (0, 20, 40), (0.1, 0.5, 0.9), 0.0)
    assert seen.first(0.7, seen.seconds) == pytest.approx(3.0)
    assert seen.first(0.1, seen.points) == 0
    assert math.isinf(seen.first(0.95, seen.points))


def test_arms_of_one_size_have_as_many_samples_and_weights_of_mean_one() -> None:
    arms = [*coresets_of(problem(), (0.1, 0.3)), *random_arms(problem(), (0.1, 0.3), 0)]
    assert [len(arm.indices) for arm in arms] == [200, 20, 60, 20, 20, 60, 60]
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


def runs_of(counts: list[float]) -> Runs:
    """Gradients to the target of each judged seed, of at most 900; the seed apart is the first of them."""
    courses = [Course((0, int(min(count, 900))), (1.0, 0.01 if count < 900 else 0.5)) for count in counts]
    return Runs(0.1, 0.1, courses[:1], courses)


def found(full: list[float], craig: list[float], random: list[float], spent: float = 0.0) -> Found:
    """Planted gradients to the target by seed; a gradient takes a second."""
    runs = {
        "full": runs_of(full),
        "craig 10%": runs_of(craig),
        "random 10%": runs_of(random),
        "weighted random 10%": runs_of([2 * count for count in random]),
    }
    return Found({}, {}, {"ig": runs}, [Round(1.0, 1.0, spent)] * len(full))


def network(full: list[float], craig: list[float]) -> DeepFound:
    """How long each took to the accuracy, by seed; all 100 s without coming there where infinite."""

    def runs(seconds: list[float]) -> DeepRuns:
        courses = [
            DeepCourse((0.0, min(each, 100.0)), (0, 1), (0.1, 0.9 if each < 100 else 0.5), 0.0) for each in seconds
        ]
        return DeepRuns(0.1, courses[0], courses)

    return DeepFound(
        0.9, {"full": runs(full), "craig 10%": runs(craig), "random 10%": runs(full), "weighted random 10%": runs(full)}
    )


NEVER = math.inf
GRADIENTS, SECONDS, RANDOM, AS_IS, NETWORKS = list(CLAIM.parts)


@pytest.mark.parametrize(
    ("planted", "outcomes"),
    [
        (found([600, 600], [100, 110], [200, 200]), ("holds", "holds", "holds")),
        # Selection takes longer than all the data.
        (found([600, 600], [100, 110], [200, 200], 900.0), ("holds", "does not hold", "holds")),
        (found([200, 200], [100, 110], [200, 200]), ("does not hold", "does not hold", "holds")),
        # One seed meets the rule and the other does not.
        (found([600, 600], [100, 300], [200, 290]), ("within noise", "within noise", "within noise")),
        # The seeds that meet it are within a look of the limit, or of random points.
        (found([309, 309], [100, 100], [104, 200]), ("within noise", "holds", "within noise")),
        (found([600, 600], [100, 110], [50, 60]), ("holds", "holds", "does not hold")),
        (found([600, 600], [NEVER, NEVER], [NEVER, NEVER]), ("does not hold",) * 3),
        (found([NEVER, NEVER], [100, 110], [200, 200]), ("cannot be decided here",) * 3),
    ],
)
def test_each_part_is_judged_by_paired_seeds(planted: Found, outcomes: tuple[str, ...]) -> None:
    result = judge({("toy", 20): planted, ("toy", 1): planted}, {"toy": network([4, 4], [1, 1])}, {})
    assert list(result.parts) == list(CLAIM.parts)
    assert tuple(result.parts[part] for part in (GRADIENTS, SECONDS, RANDOM)) == outcomes
    assert result.parts[AS_IS] == outcomes[0]
    assert result.least <= result.value <= result.most


@pytest.mark.parametrize(
    ("full", "craig", "outcome"),
    [
        ([4.0, 4.0], [1.0, 1.9], "holds"),
        ([4.0, 4.0], [1.0, 2.1], "within noise"),
        ([4.0, 4.0], [3.0, NEVER], "does not hold"),
        ([NEVER, NEVER], [3.0, 3.0], "cannot be decided here"),
    ],
)
def test_networks_are_judged_by_paired_seeds(full: list[float], craig: list[float], outcome: str) -> None:
    one = found([600], [100], [200])
    assert judge({("toy", 20): one, ("toy", 1): one}, {"toy": network(full, craig)}, {}).parts[NETWORKS] == outcome


def test_a_data_set_that_cannot_be_decided_is_told_and_does_not_decide_for_the_others() -> None:
    good, never, bad = (found([full], [craig], [250]) for full, craig in ((600, 100), (NEVER, 100), (600, 400)))
    deep = {"toy": network([4], [1])}

    def outcome(*each: Found) -> str:
        data = {(name, copies): one for name, one in zip("abc", each, strict=False) for copies in (1, 20)}
        result = judge(data, deep, {})
        said = result.details[f"{GRADIENTS}: by data set"].split("; ")
        assert [part.startswith(name) for name, part in zip("abc", said, strict=False)] == [True] * len(each)
        assert sum("cannot be decided" in part for part in said) == each.count(never)
        return result.parts[GRADIENTS]

    assert outcome(good, good, never) == "holds"
    assert outcome(good, never) == "cannot be decided here"
    assert outcome(never, bad) == "does not hold"


def test_figures_within_a_look_of_the_limit_are_on_neither_side() -> None:
    assert [beyond([each], 1.0).value for each in (1.06, 1.04, 0.96, 0.94)] == [
        "holds",
        "within noise",
        "within noise",
        "does not hold",
    ]


def test_sizes_are_chosen_with_the_seeds_apart() -> None:
    near, far = Course((0, 100), (1.0, 0.01)), Course((0, 300), (1.0, 0.01))
    runs = {"craig 10%": Runs(0.1, 0.1, [near], [far]), "craig 20%": Runs(0.1, 0.1, [far], [near])}
    assert Found({}, {}, {"ig": runs}, []).best("ig", "craig") == "craig 10%"


def test_one_problem_is_tuned_and_run_and_timed_with_random_points_of_each_seed() -> None:
    plan = Convex("digits", 1, 120, ("ig",), seeds=2, rates=(0.03, 0.1), decays=(0.1,))
    measured = measure_convex(plan)
    assert len(measured.runs["ig"]) == 10
    for arm, runs in measured.runs["ig"].items():
        assert runs.rate in plan.rates
        assert len(runs.apart) == len(APART)
        assert len(runs.courses) == 2
        assert arm == "full" or len(measured.floors[arm]) == (1 if arm.startswith("craig") else 2)
    assert len(set(measured.floors["random 10%"])) == 2
    assert len(measured.sooner()) == len(measured.rounds) == 2


def test_a_network_s_clock_counts_selections() -> None:
    recipe = Recipe("digits", load("digits"), lambda seed: two_layers(64, 10, seed))
    ours = train_network(recipe, Craig(0.1, every=1), lr=0.5, points=3200, looks=2, eval_limit=50)
    random = train_network(recipe, Random(0.1), lr=0.5, points=3200, looks=2, eval_limit=50)
    assert 0 < ours.selection_seconds <= ours.seconds[-1]
    assert random.selection_seconds < ours.selection_seconds
    assert random.accuracies[-1] > random.accuracies[0]
    assert ours.points == random.points == (0, 1600, 3200)
    weighted = train_network(recipe, WeightedRandom(0.1), lr=0.5, points=3200, looks=2, eval_limit=50, until=0.0)
    assert weighted.points == (0, 1600)
    assert weighted.selection_seconds > 0


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arms = ("full", "craig 10%", "random 10%", "weighted random 10%")
    first = {"ig": dict.fromkeys(arms, Course((0, 50, 100), (1.0, 0.1, 0.01)))}
    floors = {"craig": [0.1], "random": [0.2], "weighted random": [0.3]}
    drawn = [
        residual_picture("toy-1", "toy", first, 0.01),
        floor_picture("toy-1", "toy", (0.1,), floors, 0.01),
        accuracy_picture("toy", {"full": DeepCourse((0.0, 1.0), (0, 32), (0.1, 0.9), 0.0)}),
    ]
    names = [each.png(tmp_path).name for each in drawn]
    assert names == ["toy-1-residual.png", "toy-1-floors.png", "toy-accuracy.png"]
