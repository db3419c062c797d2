r"""The same selection where every rank keeps its own points.

Each rank knows how near its points are to the nearest representative. For a block of m candidates the ranks add up m
partial sums, and since those are exact (see `facility`) every rank goes on with the very gains that one machine with
all points would have worked out: the same picks in the same order, without the loss of methods that select in parts.

The candidates' coordinates are sent once, to all, where they fit (`replicate_bytes`); where they do not, those of each
block are sent with it, $4md$ bytes. At the end k numbers are added up for the weights.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.coreset.facility import Facility, Gains, Goal, Nearest, Numbers, nearest_of
from thinwire.coreset.greedy import picked
from thinwire.coreset.methods import Found, How, Warm, found, greedy, norm_of
from thinwire.coreset.similarity import Features, centre_of, checked, power_above
from thinwire.errors import ConfigError

_BLOCK = 64
REPLICATE_BYTES = 1 << 30


class SharedFacility(Facility):
    """The points of all ranks, numbered in the order of ranks; all ranks make the same calls.

    Args:
        nearest: of this rank's points.
        unit: what a distance of 1 is.
        comm: the ranks.
        replicate_bytes: coordinates of up to so many bytes are kept by every rank.
    """

    def __init__(self, nearest: Nearest, unit: float, comm: Comm, *, replicate_bytes: int = REPLICATE_BYTES) -> None:
        own = nearest.of(torch.arange(nearest.n))
        counts = gathered_numbers(comm, [nearest.n], own.device)[:, 0].tolist()
        self.n = self.points = sum(counts)
        self.unit = unit
        self.block = _BLOCK
        self._nearest, self._comm, self._device = nearest, comm, own.device
        self._start, self._width = sum(counts[: comm.rank]), own.shape[1]
        fits = 4 * self.n * self._width <= replicate_bytes
        self._everything = gathered_rows(comm, own, counts) if fits else None

    def gains(self, candidates: Numbers) -> Gains:
        """What each of the candidates would save now, everywhere."""
        found: list[Gains] = []
        for part in torch.from_numpy(candidates).split(1024 if self._everything is not None else _BLOCK):
            partial = torch.from_numpy(self._nearest.gains(self._rows(part))).to(self._device)
            found.append(self._comm.all_reduce_(partial).wait().cpu().numpy())
        return np.concatenate(found)

    def take(self, candidate: int, position: int) -> None:
        """Make the candidate a representative, everywhere."""
        own = candidate - self._start
        mine = 0 <= own < self._nearest.n
        self._nearest.take(self._rows(torch.tensor([candidate]))[0], position, own if mine else None)

    def cost(self) -> float:
        """The sum of all ranks' points' distances to their nearest representatives."""
        own = torch.tensor([self._nearest.cost()], dtype=torch.float64, device=self._device)
        return float(self._comm.all_reduce_(own).wait())

    def sizes(self, count: int) -> Tensor:
        """How many points of all ranks each representative speaks for."""
        own = torch.bincount(self._nearest.representatives(), minlength=count)
        return self._comm.all_reduce_(own.to(self._device)).wait().cpu()

    def _rows(self, candidates: Tensor) -> Tensor:
        """The candidates' coordinates: at hand, or sent by those who have them."""
        if self._everything is not None:
            return self._everything[candidates.to(self._device)]
        own = candidates - self._start
        mine = (own >= 0) & (own < self._nearest.n)
        rows = torch.zeros((len(candidates), self._width), device=self._device)
        if bool(mine.any()):
            rows[mine.to(self._device)] = self._nearest.of(own[mine])
        return self._comm.all_reduce_(rows).wait()


def agreed_rows(features: Features, comm: Comm) -> tuple[Tensor, list[int]]:
    """This rank's rows, float32 and centred at the mean of all, and how many each rank has.

    Raises:
        ConfigError: on all ranks, where the features of any are not fit to be used.
    """
    rows, problem = _looked_at(features)
    facts = gathered_numbers(comm, [len(rows), rows.shape[1], int(problem is not None)], rows.device)
    bad = facts[:, 2].nonzero().flatten().tolist()
    if bad:
        raise problem or ConfigError(f"features of rank {bad[0]}: cannot be used; its own error says why")
    widths = facts[:, 1].tolist()
    if len(set(widths)) > 1:
        raise ConfigError(f"features of {widths} columns, by rank: all ranks need the same")
    total = comm.all_reduce_(rows.sum(0, dtype=torch.float64)).wait()
    counts = facts[:, 0].tolist()
    return (rows - centre_of(total, sum(counts)).to(rows.dtype)).float(), counts


def greatest(comm: Comm, value: float, device: torch.device) -> float:
    """The greatest of one number a rank."""
    return float(torch.stack(comm.all_gather(torch.tensor([value], dtype=torch.float64, device=device)).wait()).max())


def gathered_numbers(comm: Comm, values: list[int], device: torch.device) -> Tensor:
    """As many whole numbers from each rank, int64 [ranks, values]."""
    return torch.stack(comm.all_gather(torch.tensor(values, dtype=torch.int64, device=device)).wait()).cpu()


def gathered_rows(comm: Comm, rows: Tensor, counts: list[int]) -> Tensor:
    """The rows of all ranks, in the order of ranks."""
    filled = rows.new_zeros((max(counts), *rows.shape[1:]))
    filled[: len(rows)] = rows
    everyone = comm.all_gather(filled).wait()
    return torch.cat([part[:count] for part, count in zip(everyone, counts, strict=True)])


def _looked_at(features: Features) -> tuple[Tensor, ConfigError | None]:
    """The features, and what is wrong with them."""
    try:
        return checked(features), None
    except ConfigError as problem:
        return torch.zeros((0, 1)), problem


# -- selection over ranks ----------------------------------------------------------------------------------------------


class Shards:
    """All ranks' points, numbered in the order of ranks; made and asked by all ranks together.

    Args:
        features: this rank's rows.
        labels: this rank's classes; None on all ranks or on none.
        comm: the ranks.

    Attributes:
        n: points of all ranks.
        members: int64, the points of each class.
        sizes: how many each class has.

    Raises:
        ConfigError: on all ranks, where the features of any cannot be used or labels do not fit.
    """

    def __init__(self, features: object, labels: NDArray[np.generic] | None, comm: Comm) -> None:
        if not isinstance(features, (Tensor, np.ndarray)):
            raise ConfigError("features: with comm a rank's own rows are needed, since its distances end at its shard")
        self._comm = comm
        self._rows, counts = agreed_rows(features, comm)
        self._start = sum(counts[: comm.rank])
        self.n = sum(counts)
        self.members = self._classes(labels, counts)
        self.sizes = [len(each) for each in self.members]

    def solve(self, group: int, goal: Goal, how: How, warm: Warm | None) -> Found:
        """Select in one class.

        Args:
            group: which.
            goal: when to stop, its cost in distances.
            how: the method.
            warm: an earlier selection of the class.

        Raises:
            ConfigError: the method needs all points in one place.
        """
        if how.method in ("sparse", "streaming"):
            raise ConfigError(f"method={how.method!r}: selects on one rank alone; with comm use lazy, or greedi")
        mine = self._own(group)
        unit = power_above(2 * greatest(self._comm, norm_of(self._rows[mine]), self._rows.device))
        rows = self._rows[mine] / unit
        inner = Goal(goal.budget, None if goal.cost is None else goal.cost / unit, goal.told)

        def make() -> Facility:
            return SharedFacility(nearest_of(rows, threads=torch.get_num_threads())[0], unit, self._comm)

        parts = self._parts(group, rows, inner) if how.method == "greedi" else []
        picks, sizes = greedy(make, inner, how, how.generator(group), warm, parts)
        return found(picks, sizes, unit)

    def _own(self, group: int) -> Tensor:
        """The rows of this rank that belong to a class."""
        members = self.members[group] - self._start
        return members[(members >= 0) & (members < len(self._rows))].to(self._rows.device)

    def _parts(self, group: int, rows: Tensor, goal: Goal) -> list[Numbers]:
        """What each rank picks among its own points, in the class's numbers."""
        members = self.members[group]
        before = int((members < self._start).sum())
        own = torch.from_numpy(picked(rows, torch.arange(len(rows)), goal)) + before
        counts = gathered(self._comm, own)
        return [part.cpu().numpy() for part in counts if len(part)]

    def _classes(self, labels: NDArray[np.generic] | None, counts: list[int]) -> list[Tensor]:
        fits = labels is None or (len(labels) == len(self._rows) and labels.dtype.kind in "biu")
        kinds = torch.tensor([labels is not None, fits], dtype=torch.int64, device=self._rows.device)
        facts = torch.stack(self._comm.all_gather(kinds).wait()).cpu()
        if not bool(facts[:, 1].all()) or len(facts[:, 0].unique()) > 1:
            raise ConfigError("labels: with comm all ranks need a whole number for each of their rows, or none does")
        if labels is None:
            return [torch.arange(self.n)]
        own = torch.from_numpy(labels.astype(np.int64)).to(self._rows.device)
        everyone = gathered_rows(self._comm, own, counts).cpu()
        return [(everyone == label).nonzero().flatten() for label in everyone.unique()]


def gathered(comm: Comm, own: Tensor) -> list[Tensor]:
    """Each rank's vector, of whatever length."""
    counts = [int(count) for count in comm.all_gather(torch.tensor([len(own)])).wait()]
    everything = gathered_rows(comm, own, counts)
    return list(everything.split(counts))
