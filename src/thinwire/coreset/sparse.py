r"""Greedy where each point can be represented by its near neighbours alone: millions of points, in minutes.

$F_m(S)=\sum_i\max(0, d_0-\min_{j\in S\cap N(i)}d_{ij})$ with $N(i)$ the point itself and its m nearest neighbours; with
$m=n-1$ it is facility location itself. All gains are kept up to date: a pick changes those of its neighbours'
neighbours alone. In the end every point goes to its nearest pick, among all of them where no neighbour was picked.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.coreset.facility import Gains, rounded
from thinwire.coreset.goals import Goal, Picks
from thinwire.coreset.greedy import Bounds
from thinwire.coreset.neighbours import Neighbours, neighbours
from thinwire.coreset.similarity import to_rows

_Numbers: TypeAlias = NDArray[np.int32]
_BLOCK = 1024
_LAST = np.iinfo(np.int64).max


def sparse(rows: Tensor, goal: Goal, *, neighbours: int, generator: torch.Generator) -> tuple[Picks, Tensor]:
    """Select among near neighbours.

    Args:
        rows: float32, [n, d]; no two are further apart than 1.
        goal: when to stop.
        neighbours: m, of each point besides itself.
        generator: draws where the neighbours are looked for.

    Returns:
        The picks, with the cost of the final representation, and how many points each speaks for.
    """
    rows = rows.cpu()
    found = _found(rows, neighbours, generator)
    picks = _picked(Graph(found), goal)
    nearest, who = _represented(rows, found, picks.indices)
    picks.cost = float(nearest.sum(dtype=torch.float64))
    return picks, torch.bincount(who, minlength=len(picks.indices))


class Graph:
    """Who can represent whom, and what each candidate would save now.

    Args:
        found: each point's neighbours.
    """

    def __init__(self, found: Neighbours) -> None:
        self._candidates: _Numbers = found.numbers.numpy()
        self._apart = found.distances.numpy()
        self.n, self._width = self._candidates.shape
        flat = self._candidates.ravel()
        saved = 1.0 - self._apart.ravel().astype(np.float64)
        self.gains: Gains = np.bincount(flat, saved, minlength=self.n).astype(np.float64)
        self._edges = np.argsort(flat, kind="stable").astype(np.uint32 if flat.size < 2**32 else np.int64)
        self._ends = np.concatenate([[0], np.cumsum(np.bincount(flat, minlength=self.n))])
        self._near = np.ones(self.n, dtype=np.float32)

    def take(self, candidate: int) -> None:
        """Make one a representative, and bring all gains up to date."""
        edges = self._edges[self._ends[candidate] : self._ends[candidate + 1]]
        points, apart = edges // self._width, self._apart.ravel()[edges]
        closer = apart < self._near[points]
        points, now = points[closer], apart[closer]
        away = self._apart[points]
        lost = np.maximum(self._near[points][:, None] - away, 0) - np.maximum(now[:, None] - away, 0)
        np.subtract.at(self.gains, self._candidates[points].ravel(), lost.ravel().astype(np.float64))
        self._near[points] = now


def _found(rows: Tensor, count: int, generator: torch.Generator) -> Neighbours:
    found = neighbours(rows, count, generator)
    return Neighbours(found.numbers, rounded(found.distances))


def _picked(graph: Graph, goal: Goal) -> Picks:
    """Greedy: a bound that is the gain of today belongs to the best."""
    picks = Picks(cost=float(graph.n))
    bounds = Bounds(np.arange(graph.n), graph.gains.copy())
    while not picks.done(goal):
        top = bounds.top()
        assert top is not None, "there are as many candidates as points"
        gain, best = float(graph.gains[top[1]]), bounds.pop()
        if gain < -top[0]:
            bounds.push(gain, best)
            continue
        graph.take(best)
        picks.add(best, gain)
    return picks


def _represented(rows: Tensor, found: Neighbours, indices: list[int]) -> tuple[Tensor, Tensor]:
    """The distance of each point to its nearest pick, float32 [n], and that pick's position, int64 [n]."""
    chosen = torch.tensor(indices)
    place = torch.full((len(rows),), _LAST)
    place[chosen] = torch.arange(len(indices))
    nearest, who = torch.empty(len(rows)), torch.empty(len(rows), dtype=torch.int64)
    for part in torch.arange(len(rows)).split(1 << 16):
        places = place[found.numbers[part].long()]
        apart = found.distances[part].masked_fill(places == _LAST, torch.inf)
        nearest[part] = apart.min(1).values
        who[part] = places.masked_fill(apart > nearest[part][:, None], _LAST).min(1).values
    for part in nearest.isinf().nonzero().flatten().split(_BLOCK):
        nearest[part], who[part] = nearest_of_many(rows[part], rows[chosen])
    nearest[chosen], who[chosen] = 0, torch.arange(len(indices))
    return nearest, who


def nearest_of_many(points: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The least distance of each row to the chosen rows, and which of them it is to."""
    least = torch.full((len(points),), torch.inf)
    who = torch.zeros(len(points), dtype=torch.int64)
    for start in range(0, len(chosen), 4 * _BLOCK):
        apart, place = rounded(to_rows(points, chosen[start : start + 4 * _BLOCK])).min(1)
        closer = apart < least
        least[closer], who[closer] = apart[closer], place[closer] + start
    return least, who
