# SPDX-License-Identifier: Apache-2.0
"""Minibatch against local steps: the problem, its runs in tensors, and the verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from reproductions.local_vs_minibatch.claim import judge
from reproductions.local_vs_minibatch.even_odd import MACHINES, EvenOdd, even_odd
from reproductions.local_vs_minibatch.grid import (
    ACCELERATED,
    INNER_OUTER,
    LOCAL,
    METHODS,
    MINIBATCH,
    Best,
    Cell,
    Scale,
    measured,
)
from reproductions.local_vs_minibatch.rounds import accelerated, inner_outer, minibatch, rounds_of
from reproductions.local_vs_minibatch.thread_runs import largest_difference
from tests.oracles import minibatch as oracles
from tests.oracles.common import Descent
from tests.oracles.machines import TwoRates, path
from tests.problems import distance


@pytest.fixture(scope="module")
def problem() -> EvenOdd:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("THINWIRE_DATA", raising=False)
        return even_odd(width=12)


def gradients(problem: EvenOdd, draws: Tensor) -> Callable[[Tensor, int], Tensor]:
    """Every machine's gradient at its own point, on the picture of a step."""

    def gradient(x: Tensor, step: int) -> Tensor:
        rows = draws[step]
        seen = problem.features[rows]
        return (torch.sigmoid((seen * x).sum(1)) - problem.even[rows])[:, None] * seen

    return gradient


def test_runs_in_tensors_equal_their_oracles(problem: EvenOdd) -> None:
    draws = torch.stack([problem.draws(0.5, 12, seed) for seed in (3, 4)])
    rates, inner = torch.tensor([0.5, 3.0]).double(), torch.tensor([1.0, 0.3]).double()
    kept = [
        inner_outer(rounds_of(problem, draws, 4), rates, inner, {2, 3}),
        minibatch(rounds_of(problem, draws, 4), rates, {2, 3}),
        accelerated(rounds_of(problem, draws, 4), rates, {2, 3}),
    ]
    start = torch.zeros(MACHINES, 12, dtype=torch.float64)
    for seed in (0, 1):
        gradient = gradients(problem, draws[seed])
        for c in (0, 1):
            rate = float(rates[c])
            for place, rounds in enumerate((2, 3)):
                told = [rate] * (4 * rounds)
                wanted = [
                    path(TwoRates(4, inner=float(inner[c])), gradient, start, Descent(told), told)[-1][0],
                    oracles.minibatch(gradient, start, [each / 4 for each in told], period=4)[0],
                    oracles.accelerated(gradient, start, rate, rounds, period=4)[1][0],
                ]
                for each, theirs in zip(kept, wanted, strict=True):
                    assert distance(each[place][seed, c], theirs) < 1e-12


def test_real_strategies_end_where_the_tensors_do(problem: EvenOdd) -> None:
    assert largest_difference(problem) < 1e-12


def test_at_the_optimum_there_is_no_gradient(problem: EvenOdd) -> None:
    point = problem.optimum
    gradient = problem.features.T @ (torch.sigmoid(problem.features @ point) - problem.even) / len(problem.features)
    assert float(gradient.norm()) < 1e-12
    around = point + 0.1 * torch.eye(12, dtype=torch.float64)
    assert float(problem.gaps(around).min()) > 0
    assert problem.gaps(point[None]).tolist() == [0.0]


def test_losses_are_those_of_logistic_regression(problem: EvenOdd) -> None:
    draw = torch.Generator().manual_seed(0)
    points = torch.randn(3, 12, generator=draw, dtype=torch.float64)
    logits = points @ problem.features.T
    direct = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, problem.even.expand_as(logits), reduction="none"
    )
    assert distance(problem.losses(points), direct.mean(1)) < 1e-12


def test_machines_see_two_digits_of_their_own_and_what_they_share(problem: EvenOdd) -> None:
    digits = problem.draws(1.0, 400, 0) // problem.each
    pairs = {tuple(column.unique().tolist()) for column in digits.T}
    assert pairs == {tuple(sorted((even, odd))) for even in range(0, 10, 2) for odd in range(1, 10, 2)}
    everyone = problem.draws(0.0, 400, 0) // problem.each
    assert all(len(column.unique()) == 10 for column in everyone.T)
    mixed = problem.draws(0.5, 2000, 0) // problem.each
    own = torch.stack([(mixed[:, m] == 2 * (m // 5)) | (mixed[:, m] == 2 * (m % 5) + 1) for m in range(MACHINES)])
    assert float(own.double().mean()) == pytest.approx(0.5 + 0.5 * 0.2, abs=0.01)


def test_figures_are_those_of_the_machines_own_gradients(problem: EvenOdd) -> None:
    point = torch.full((12,), 0.3, dtype=torch.float64)
    off = (torch.sigmoid(problem.features @ point) - problem.even)[:, None] * problem.features
    machines: list[Tensor] = []
    for m in range(MACHINES):
        rows = [digit * problem.each + i for digit in (2 * (m // 5), 2 * (m % 5) + 1) for i in range(problem.each)]
        machines.append(0.6 * off[rows].mean(0) + 0.4 * off.mean(0))
    own = torch.stack(machines)
    assert distance(own.mean(0), off.mean(0)) < 1e-12
    apart = float((own - own.mean(0)).square().sum(1).mean())
    noise = float(off.square().sum(1).mean()) - float(own.square().sum(1).mean())
    wanted = (apart, noise, float(off.mean(0).square().sum()))
    assert tuple(problem.figures(0.6, point).values()) == pytest.approx(wanted, rel=1e-10)


def test_a_small_grid_is_measured_and_its_best_rates_are_chosen_on_other_seeds(problem: EvenOdd) -> None:
    scale = Scale(periods=(2,), rounds=(2, 3), shares=(1.0,), tuning_seeds=1, seeds=2)
    lines: list[str] = []
    grid = measured(problem, scale, lines.append)
    assert set(grid) == {(method, Cell(1.0, 2, rounds)) for method in METHODS for rounds in (2, 3)}
    assert lines == ["2 gradients a round, 100% of them of the machine's own digits"]
    best = grid[MINIBATCH, Cell(1.0, 2, 3)]
    again = torch.stack([problem.draws(1.0, 6, seed) for seed in (0, 1, 2)])
    kept = minibatch(rounds_of(problem, again, 2), torch.tensor([best.rate]).double(), {3})[0][:, 0]
    assert best.gaps == pytest.approx(problem.gaps(kept)[1:].tolist())
    assert distance(best.point, kept[1]) < 1e-12


def made_up(gaps: Callable[[str, Cell], float]) -> dict[tuple[str, Cell], Best]:
    cells = [Cell(share, 16, rounds) for share in (1.0, 0.75, 0.25, 0.0) for rounds in (4, 16)]
    return {
        (method, cell): Best((gaps(method, cell), 1.01 * gaps(method, cell)), 1.0, 0.0, False, torch.zeros(12).double())
        for method in METHODS
        for cell in cells
    }


def as_published(method: str, cell: Cell) -> float:
    local = 0.1 + cell.share
    return {MINIBATCH: 0.5, ACCELERATED: 0.3, LOCAL: local, INNER_OUTER: min(local, 0.5)}[method]


def test_the_published_order_holds(problem: EvenOdd) -> None:
    found = judge(problem, made_up(as_published), 1e-15)
    assert found.holds
    assert found.value == pytest.approx(1.1 / 0.3)
    assert "with at most 0% own digits" in found.measured


@pytest.mark.parametrize(
    ("method", "share", "gap"),
    [
        (ACCELERATED, 1.0, 0.6),
        (LOCAL, 0.0, 0.4),
        (LOCAL, 1.0, 0.1),
        (INNER_OUTER, 0.75, 0.6),
    ],
)
def test_another_order_does_not(problem: EvenOdd, method: str, share: float, gap: float) -> None:
    grid = made_up(as_published)
    grid |= {
        (method, Cell(share, 16, rounds)): replace(grid[method, Cell(share, 16, rounds)], gaps=(gap, 1.01 * gap))
        for rounds in (4, 16)
    }
    assert not judge(problem, grid, 1e-15).holds


def test_strategies_that_differ_from_the_tensors_do_not(problem: EvenOdd) -> None:
    assert not judge(problem, made_up(as_published), 1e-3).holds


def test_both_pictures_are_drawn(tmp_path: Path) -> None:
    pictures = pytest.importorskip("reproductions.local_vs_minibatch.pictures")
    for draw in (pictures.rounds_picture, pictures.heterogeneity_picture):
        assert draw(made_up(as_published)).png(tmp_path).stat().st_size > 10_000
