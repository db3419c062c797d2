"""A selection's points, spread over ranks: who has which, and each class's facility."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.coreset.distributed import SharedFacility, agreed_rows, gathered_rows, greatest
from thinwire.coreset.facility import Facility, Numbers
from thinwire.coreset.fused import nearest_of
from thinwire.coreset.goals import Goal
from thinwire.coreset.greedi import picked
from thinwire.coreset.methods import Found, How, Warm, found, greedy, norm_of
from thinwire.coreset.similarity import power_above
from thinwire.errors import ConfigError


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
