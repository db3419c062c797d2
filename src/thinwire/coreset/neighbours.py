"""The nearest neighbours of each point: exact for tens of thousands of points, by inverted lists for millions.

Inverted lists: points are gathered into cells of about a thousand around centres found by k-means on a sample, and
each point is compared with those of the cells nearest to its own alone. What that misses is measured by `recall`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.coreset.similarity import to_rows

_EXACT_UP_TO = 20_000
_CELL = 1000
_PROBES = 8
_ROUNDS = 5
_SAMPLE = 40
_BLOCK = 1024


@dataclass(frozen=True)
class Neighbours:
    """Who is near to whom.

    Args:
        numbers: int32, [n, m + 1]; each point and its neighbours, itself first.
        distances: float32, [n, m + 1]; 0 first, in no order after it.
    """

    numbers: Tensor
    distances: Tensor


def neighbours(rows: Tensor, count: int, generator: torch.Generator, *, exact: bool | None = None) -> Neighbours:
    """So many neighbours of each row.

    Args:
        rows: float32, [n, d].
        count: m, neighbours of each besides itself; at most n - 1 are found.
        generator: draws the sample for the cells' centres, on the CPU.
        exact: compare all with all; unless given, up to 20,000 points.
    """
    n = len(rows)
    count = min(count, n - 1)
    numbers = torch.empty((n, count + 1), dtype=torch.int32)
    distances = torch.zeros((n, count + 1))
    numbers[:, 0] = torch.arange(n)
    if count:
        for size, others in _cells(rows, count, generator, n <= _EXACT_UP_TO if exact is None else exact):
            for part in torch.arange(size).split(_BLOCK):
                own = others[part]
                numbers[own, 1:], distances[own, 1:] = _nearest(rows, part, others, count)
    return Neighbours(numbers, distances)


def recall(rows: Tensor, found: Neighbours, generator: torch.Generator, *, sample: int = 200) -> float:
    """The share of the true nearest neighbours that was found, from a sample of points.

    Args:
        rows: float32, [n, d].
        found: their neighbours.
        generator: draws the sample, on the CPU.
        sample: how many points to look at.
    """
    count = found.numbers.shape[1] - 1
    drawn = torch.randperm(len(rows), generator=generator)[:sample]
    everyone = torch.arange(len(rows))
    hits = 0
    for part in drawn.split(16):
        true, _ = _nearest(rows, part, everyone, count)
        hits += int((true[:, :, None] == found.numbers[part, None, 1:]).any(2).sum())
    return hits / max(1, len(drawn) * count)


def _cells(rows: Tensor, count: int, generator: torch.Generator, exact: bool) -> Iterator[tuple[int, Tensor]]:
    """(how many points a cell has, those points and then all others to compare them with)."""
    everyone = torch.arange(len(rows))
    if exact:
        yield len(rows), everyone
        return
    centres = _centres(rows, max(1, len(rows) // _CELL), generator)
    cells = _nearest_centre(rows, centres)
    order, sizes = torch.argsort(cells, stable=True), torch.bincount(cells, minlength=len(centres))
    members = order.split(sizes.tolist())
    near = to_rows(centres, centres).argsort(1)
    for own, cells in enumerate(near.tolist()):
        if len(members[own]):
            others = [own, *(cell for cell in cells if cell != own)]
            yield len(members[own]), _enough(members, others, count + 1)


def _enough(members: tuple[Tensor, ...], cells: list[int], least: int) -> Tensor:
    """The points of the nearest cells, of more than usual where those hold too few."""
    taken: list[Tensor] = []
    for place, cell in enumerate(cells):
        if place >= _PROBES and sum(map(len, taken)) >= least:
            break
        taken.append(members[cell])
    return torch.cat(taken)


def _nearest(rows: Tensor, places: Tensor, others: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The nearest to the points at some places among others, and their distances, [places, count], without itself."""
    theirs = rows[others]
    # What lies far from the origin and close together would lose its digits.
    theirs = theirs - theirs[places[0]]
    mine = theirs[places]
    squares = torch.addmm(theirs.square().sum(1), mine, theirs.T, alpha=-2)
    squares[torch.arange(len(places)), places] = torch.inf
    found = squares.topk(count, largest=False, sorted=False).indices
    chosen = others[found]
    gaps = theirs[found] - mine[:, None]
    return chosen.int(), torch.linalg.vector_norm(gaps, dim=2)


def _centres(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Lloyd's k-means on a sample; a centre that nobody is near to stays where it is."""
    sample = rows[torch.randperm(len(rows), generator=generator)[: _SAMPLE * count]]
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
