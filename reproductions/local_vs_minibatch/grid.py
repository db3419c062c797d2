# SPDX-License-Identifier: Apache-2.0
"""The grid of steps a round, rounds and heterogeneity: each method with the step size that suits it best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reproductions.local_vs_minibatch.even_odd import EvenOdd
from reproductions.local_vs_minibatch.rounds import accelerated, inner_outer, minibatch, rounds_of

MINIBATCH, ACCELERATED, LOCAL, INNER_OUTER = "minibatch", "accelerated minibatch", "local", "inner/outer"
METHODS = (MINIBATCH, ACCELERATED, LOCAL, INNER_OUTER)
_LONG = tuple(2.0**i for i in range(11))
_ACCELERATED = tuple(2.0**i for i in range(-3, 8))
_SHORT = tuple(2.0**i for i in range(-3, 6))
_BETWEEN = (0.1, 0.3)


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Args:
        periods: K, gradients of a machine in a round.
        rounds: R.
        shares: what machines draw of their own two digits; 1 is the most heterogeneity, 0 is none.
        tuning_seeds: with which step sizes are compared.
        seeds: others, with which the best are.
    """

    periods: tuple[int, ...] = (4, 16, 64, 256)
    rounds: tuple[int, ...] = (4, 8, 16, 32)
    shares: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25, 0.0)
    tuning_seeds: int = 6
    seeds: int = 8


QUICK = Scale(periods=(16, 256), rounds=(4, 16), tuning_seeds=3, seeds=6)


@dataclass(frozen=True)
class Cell:
    """Where in the grid."""

    share: float
    period: int
    rounds: int


@dataclass(frozen=True, eq=False)
class Best:
    """How far above the optimum a method ends with the step size that suits it best.

    Args:
        gaps: one for each seed.
        rate: the best rate: along the mean gradient for both minibatch methods, along each gradient for others.
        inner: the inner step over the outer one.
        at_the_edge: whether the best rate is the least or greatest that was tried.
        point: where the first seed ended, [width].
    """

    gaps: tuple[float, ...]
    rate: float
    inner: float
    at_the_edge: bool
    point: Tensor

    @property
    def mean(self) -> float:
        """Over seeds."""
        return sum(self.gaps) / len(self.gaps)


Grid = Mapping[tuple[str, Cell], Best]


@dataclass(frozen=True, eq=False)
class Candidates:
    """Runs that differ in their step sizes.

    Args:
        rates: [C], as given.
        inner: [C].
        kept: their points, after each number of rounds: [S, C, D] each.
    """

    rates: Tensor
    inner: Tensor
    kept: Sequence[Tensor]


def measured(problem: EvenOdd, scale: Scale, begin: Callable[[str], None]) -> dict[tuple[str, Cell], Best]:
    """Run everything.

    Args:
        problem: what is learned.
        scale: how much is measured.
        begin: called before each part starts.
    """
    found: dict[tuple[str, Cell], Best] = {}
    for share in scale.shares:
        for period in scale.periods:
            begin(f"{period} gradients a round, {share:.0%} of them of the machine's own digits")
            runs = _runs(problem, scale, share, period)
            for place, rounds in enumerate(scale.rounds):
                for method, candidates in runs.items():
                    cell = Cell(share, period, rounds)
                    found[method, cell] = _best(problem, candidates, place, scale.tuning_seeds)
    return found


def _runs(problem: EvenOdd, scale: Scale, share: float, period: int) -> dict[str, Candidates]:
    seeds = range(scale.tuning_seeds + scale.seeds)
    draws = torch.stack([problem.draws(share, max(scale.rounds) * period, seed) for seed in seeds])
    keep = set(scale.rounds)
    long, fast, short = (torch.tensor(each, dtype=torch.float64) for each in (_LONG, _ACCELERATED, _SHORT))
    inner = torch.tensor((1.0, *_BETWEEN), dtype=torch.float64).repeat_interleave(len(short))
    rates = short.repeat(1 + len(_BETWEEN))
    plain = minibatch(rounds_of(problem, draws, period), long, keep)
    between = inner_outer(rounds_of(problem, draws, period), rates, inner, keep)
    whole, none = torch.ones_like(short), torch.zeros_like(long)
    return {
        MINIBATCH: Candidates(long, none, plain),
        ACCELERATED: Candidates(fast, none, accelerated(rounds_of(problem, draws, period), fast, keep)),
        LOCAL: Candidates(short, whole, [each[:, : len(short)] for each in between]),
        INNER_OUTER: Candidates(
            torch.cat([rates, long / period]),
            torch.cat([inner, none]),
            [torch.cat(each, dim=1) for each in zip(between, plain, strict=True)],
        ),
    }


def _best(problem: EvenOdd, candidates: Candidates, place: int, tuning_seeds: int) -> Best:
    """The candidate that is best on the first seeds, as it does on the others."""
    points = candidates.kept[place]
    tuning = problem.gaps(points[:tuning_seeds].flatten(0, 1)).view(tuning_seeds, -1).mean(0)
    chosen = int(tuning.nan_to_num(torch.inf).argmin())
    theirs = points[tuning_seeds:, chosen]
    rate, inner = float(candidates.rates[chosen]), float(candidates.inner[chosen])
    tried = candidates.rates[candidates.inner == candidates.inner[chosen]]
    edge = rate in (float(tried.min()), float(tried.max()))
    return Best(tuple(problem.gaps(theirs).tolist()), rate, inner, edge, theirs[0])
