# SPDX-License-Identifier: Apache-2.0
r"""Greedy where only near neighbours can represent a point: millions of points, in minutes.

$F_m(S)=\sum_i\max(0, d_0-\min_{j\in S\cap N(i)}d_{ij})$ with $N(i)$ the point itself and its m nearest neighbours; with
$m=n-1$ it is facility location itself. All gains are kept up to date: a pick only changes those of its neighbours'
neighbours. In the end every point is assigned to its nearest pick, among all picks where no neighbour was picked.

Neighbours are exact for tens of thousands of points, and found by inverted lists for millions: points are assigned to
cells of about a thousand around centres from k-means on a sample, and each point is compared only with those of the
cells nearest to its own. `recall` measures what that misses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.coreset.facility import Gains, Goal, Picks, rounded
from thinwire.coreset.greedy import Bounds
from thinwire.coreset.similarity import to_rows

_Numbers: TypeAlias = NDArray[np.int32]
_BLOCK = 1024
_LAST = np.iinfo(np.int64).max


def sparse(rows: Tensor, goal: Goal, *, neighbours: int, generator: torch.Generator) -> tuple[Picks, Tensor]:
    """Select with near neighbours only.

    Args:
        rows: float32, [n, d]; no two are further apart than 1.
        goal: when to stop.
        neighbours: m, of each point besides itself.
        generator: draws the sample for the cells' centres, on the CPU.

    Returns:
        The picks, with the cost of the final assignment, and the number of points that each represents.
    """
    # Graph updates are scattered reads and writes in NumPy.
    rows = rows.cpu()
    found = find_neighbours(rows, neighbours, generator)
    found = Neighbours(found.numbers, rounded(found.distances))
    picks = _pick(Graph(found), goal)
    nearest, positions = _assign_all(rows, found, picks.indices)
    picks.cost = float(nearest.sum(dtype=torch.float64))
    return picks, torch.bincount(positions, minlength=len(picks.indices))


class Graph:
    """Which candidates can represent which points, and the current gain of each candidate.

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
        # Edges by candidate: those of one candidate are contiguous. 32 bits halve the memory where they suffice.
        self._edges = np.argsort(flat, kind="stable").astype(np.uint32 if flat.size < 2**32 else np.int64)
        self._ends = np.concatenate([[0], np.cumsum(np.bincount(flat, minlength=self.n))])
        self._near = np.ones(self.n, dtype=np.float32)

    def take(self, candidate: int) -> None:
        """Make a candidate a representative, and update all gains."""
        edges = self._edges[self._ends[candidate] : self._ends[candidate + 1]]
        points, apart = edges // self._width, self._apart.ravel()[edges]
        closer = apart < self._near[points]
        points, now = points[closer], apart[closer]
        away = self._apart[points]
        # Every neighbour of these points can now save less of their distance.
        lost = np.maximum(self._near[points][:, None] - away, 0) - np.maximum(now[:, None] - away, 0)
        # Candidates repeat, so plain indexing would subtract only once for each.
        np.subtract.at(self.gains, self._candidates[points].ravel(), lost.ravel().astype(np.float64))
        self._near[points] = now


def _pick(graph: Graph, goal: Goal) -> Picks:
    """Greedy: the first candidate whose bound equals its current gain is the best."""
    picks = Picks(cost=float(graph.n))
    bounds = Bounds(np.arange(graph.n), graph.gains.copy())
    while not picks.done(goal):
        top = bounds.top()
        assert top is not None, "there are as many candidates as points"
        gain, best = float(graph.gains[top[1]]), bounds.pop()
        if gain < -top[0]:
            # The bound is out of date; with the current gain the candidate may no longer be first.
            bounds.push(gain, best)
            continue
        graph.take(best)
        picks.add(best, gain)
    return picks


def _assign_all(rows: Tensor, found: Neighbours, indices: list[int]) -> tuple[Tensor, Tensor]:
    """Return the distance of each point to its nearest pick, float32 [n], and that pick's position, int64 [n]."""
    chosen = torch.tensor(indices, dtype=torch.int64, device="cpu")
    place = torch.full((len(rows),), _LAST, dtype=torch.int64, device="cpu")
    place[chosen] = torch.arange(len(indices), device="cpu")
    nearest, positions = (
        torch.empty(len(rows), dtype=torch.float32, device="cpu"),
        torch.empty(len(rows), dtype=torch.int64, device="cpu"),
    )
    for part in torch.arange(len(rows), device="cpu").split(1 << 16):
        places = place[found.numbers[part].long()]
        apart = found.distances[part].masked_fill(places == _LAST, torch.inf)
        nearest[part] = apart.min(1).values
        # Of equal distances the earlier pick wins, as in exact greedy.
        positions[part] = places.masked_fill(apart > nearest[part][:, None], _LAST).min(1).values
    # The remaining points have no neighbour among the picks: compare them with all.
    for part in nearest.isinf().nonzero().flatten().split(_BLOCK):
        nearest[part], positions[part] = nearest_of_many(rows[part], rows[chosen])
    # A pick represents itself, even where an equal point was picked earlier.
    nearest[chosen], positions[chosen] = 0, torch.arange(len(indices), device="cpu")
    return nearest, positions


def nearest_of_many(points: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least distance of each row to the chosen rows, and the position of that row among them."""
    least = torch.full((len(points),), torch.inf, dtype=torch.float32, device="cpu")
    positions = torch.zeros(len(points), dtype=torch.int64, device="cpu")
    # In blocks: all distances at once would not fit in memory.
    for start in range(0, len(chosen), 4 * _BLOCK):
        apart, place = rounded(to_rows(points, chosen[start : start + 4 * _BLOCK])).min(1)
        closer = apart < least
        least[closer], positions[closer] = apart[closer], place[closer] + start
    return least, positions


# -- nearest neighbours ------------------------------------------------------------------------------------------------


_EXACT_UP_TO = 20_000  # points for which all pairs are compared
_CELL = 1000  # points of a cell on average
_PROBES = 8  # cells that a point is compared with
_ROUNDS = 5  # of k-means
_SAMPLE = 40  # points of the k-means sample for each centre


@dataclass(frozen=True)
class Neighbours:
    """The nearest neighbours of each point.

    Args:
        numbers: int32, [n, m + 1]; each point and its neighbours, itself first.
        distances: float32, [n, m + 1]; 0 first, the rest unsorted.
    """

    numbers: Tensor
    distances: Tensor


def find_neighbours(rows: Tensor, count: int, generator: torch.Generator, *, exact: bool | None = None) -> Neighbours:
    """Return the nearest neighbours of each row.

    Args:
        rows: float32, [n, d].
        count: m, neighbours of each besides itself; at most n - 1 are found.
        generator: draws the sample for the cells' centres, on the CPU.
        exact: compare all pairs; by default up to 20,000 points.
    """
    n = len(rows)
    count = min(count, n - 1)
    numbers = torch.empty((n, count + 1), dtype=torch.int32, device="cpu")
    distances = torch.zeros((n, count + 1), dtype=torch.float32, device="cpu")
    numbers[:, 0] = torch.arange(n, device="cpu")
    if count:
        for size, others in _cells(rows, count, generator, n <= _EXACT_UP_TO if exact is None else exact):
            for part in torch.arange(size, device="cpu").split(_BLOCK):
                own = others[part]
                numbers[own, 1:], distances[own, 1:] = _nearest(rows, part, others, count)
    return Neighbours(numbers, distances)


def _cells(rows: Tensor, count: int, generator: torch.Generator, exact: bool) -> Iterator[tuple[int, Tensor]]:
    """(the size of a cell, its points and then all others to compare them with), for each cell."""
    if exact:
        yield len(rows), torch.arange(len(rows), device="cpu")
        return
    centres = _centres(rows, max(1, len(rows) // _CELL), generator)
    cells = _nearest_centre(rows, centres)
    order, sizes = torch.argsort(cells, stable=True), torch.bincount(cells, minlength=len(centres))
    members = order.split(sizes.tolist())
    near = to_rows(centres, centres).argsort(1)
    for own, cells in enumerate(near.tolist()):
        if len(members[own]):
            others = [own, *(cell for cell in cells if cell != own)]
            compared: list[Tensor] = []
            for place, cell in enumerate(others):
                # More cells where the nearest ones hold too few points.
                if place >= _PROBES and sum(map(len, compared)) >= count + 1:
                    break
                compared.append(members[cell])
            yield len(members[own]), torch.cat(compared)


def _nearest(rows: Tensor, places: Tensor, others: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The neighbours among `others` of those at `places`, without themselves, and their distances; [places, count]."""
    theirs = rows[others]
    # Points far from the origin and close together would lose their digits in the product below.
    theirs = theirs - theirs[places[0]]
    mine = theirs[places]
    squares = torch.addmm(theirs.square().sum(1), mine, theirs.T, alpha=-2)
    # A point is not its own neighbour.
    squares[torch.arange(len(places), device="cpu"), places] = torch.inf
    found = squares.topk(count, largest=False, sorted=False).indices
    chosen = others[found]
    # The distances themselves from differences, which keep the digits that the product has lost.
    gaps = theirs[found] - mine[:, None]
    return chosen.int(), torch.linalg.vector_norm(gaps, dim=2)


def _centres(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Lloyd's k-means on a sample; the centre of an empty cell does not move."""
    sample = rows[torch.randperm(len(rows), generator=generator, device="cpu")[: _SAMPLE * count]]
    centres = sample[:count].clone()
    for _ in range(_ROUNDS):
        cells = _nearest_centre(sample, centres)
        sizes = torch.bincount(cells, minlength=count)
        sums = torch.zeros_like(centres).index_add_(0, cells, sample)
        centres = torch.where(sizes[:, None] > 0, sums / sizes.clamp_min(1)[:, None], centres)
    return centres


def _nearest_centre(rows: Tensor, centres: Tensor) -> Tensor:
    sizes = centres.square().sum(1)
    return torch.cat([torch.addmm(sizes, part, centres.T, alpha=-2).argmin(1) for part in rows.split(4096)])
