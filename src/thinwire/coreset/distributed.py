# SPDX-License-Identifier: Apache-2.0
r"""Selection where every rank holds its own points; the result is that of one machine with all points.

Each rank keeps the distances of its points to their nearest representatives. For a block of m candidates the ranks
all-reduce m partial sums. Since these are exact (see `facility`), every rank gets exactly the gains that one machine
with all points would compute: the same picks in the same order.

All candidates' coordinates are all-gathered once. At the end k numbers are all-reduced for the weights.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.core.comm.base import Comm
from thinwire.coreset.facility import Facility, Gains, Goal, Nearest, Numbers, nearest_for, norm_of
from thinwire.coreset.methods import ClassSelection, MethodSettings, greedy, in_distances
from thinwire.coreset.similarity import Distances, Features, centre_of, checked, minus, power_above
from thinwire.errors import ConfigError

_BLOCK = 64  # candidates of one all-reduce


class SharedFacility(Facility):
    """The points of all ranks, numbered in the order of ranks; all ranks make the same calls.

    Args:
        nearest: of this rank's points.
        comm: the ranks.
    """

    def __init__(self, nearest: Nearest, comm: Comm) -> None:
        own = nearest.of(torch.arange(nearest.n, device="cpu"))
        counts = gather_numbers(comm, [nearest.n], own.device)[:, 0].tolist()
        self.n, self.block = sum(counts), _BLOCK
        self._nearest, self._comm, self._device = nearest, comm, own.device
        self._start, self._rows = sum(counts[: comm.rank]), gather_rows(comm, own, counts)

    def gains(self, candidates: Numbers) -> Gains:
        """Return the gain of each candidate now, over all ranks."""
        found: list[Gains] = []
        for part in torch.from_numpy(candidates).split(1024):
            partial = torch.from_numpy(self._nearest.gains(self._rows[part.to(self._device)])).to(self._device)
            found.append(self._comm.all_reduce_(partial).wait().cpu().numpy())
        return np.concatenate(found)

    def take(self, candidate: int, position: int) -> None:
        """Make the candidate a representative, on all ranks."""
        own = candidate - self._start
        mine = 0 <= own < self._nearest.n
        self._nearest.take(self._rows[candidate], position, own if mine else None)

    def sizes(self, count: int) -> Tensor:
        """Return the number of points of all ranks that each representative represents."""
        own = torch.bincount(self._nearest.representatives(), minlength=count)
        return self._comm.all_reduce_(own.to(self._device)).wait().cpu()


def centred_rows(features: Features | Distances, comm: Comm) -> tuple[Tensor, list[int]]:
    """Return this rank's rows, float32 and centred at the mean of all ranks' rows, and the number of rows of each rank.

    Raises:
        ConfigError: on all ranks, where the features of any are invalid.
    """
    problem: ConfigError | None = None
    try:
        if isinstance(features, Distances):
            raise ConfigError(
                "features: with comm give a rank's own rows. Distances between points of two ranks need them"
            )
        rows = checked(features)
    except ConfigError as error:
        # All ranks must learn of it: the others would wait for this one.
        rows, problem = torch.zeros((0, 1), dtype=torch.float32, device="cpu"), error
    if comm.check_device.type not in ("cpu", rows.device.type):
        rows = rows.to(comm.check_device)  # ranks without Gloo, as with NCCL alone, send nothing from the host
    facts = gather_numbers(comm, [len(rows), rows.shape[1], int(problem is not None)], rows.device)
    bad = facts[:, 2].nonzero().flatten().tolist()
    if bad:
        raise problem or ConfigError(f"features of rank {bad[0]} are invalid. See the error of that rank")
    widths = facts[:, 1].tolist()
    if len(set(widths)) > 1:
        raise ConfigError(f"features of {widths} columns, by rank: all ranks need the same")
    total = comm.all_reduce_(rows.sum(0, dtype=torch.float64)).wait()
    counts = facts[:, 0].tolist()
    return minus(rows, centre_of(total, sum(counts))), counts


def max_over_ranks(comm: Comm, value: float, device: torch.device) -> float:
    """Return the greatest value of all ranks."""
    return float(torch.stack(comm.all_gather(torch.tensor([value], dtype=torch.float64, device=device)).wait()).max())


def gather_numbers(comm: Comm, values: list[int], device: torch.device) -> Tensor:
    """All-gather whole numbers, int64 [ranks, values]."""
    return torch.stack(comm.all_gather(torch.tensor(values, dtype=torch.int64, device=device)).wait()).cpu()


def gather_rows(comm: Comm, rows: Tensor, counts: list[int]) -> Tensor:
    """All-gather rows, in the order of ranks; ranks may have different numbers of rows."""
    # An all-gather needs equal shapes.
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    every_rank = comm.all_gather(padded).wait()
    return torch.cat([part[:count] for part, count in zip(every_rank, counts, strict=True)])


# -- selection over ranks ----------------------------------------------------------------------------------------------


class Shards:
    """All ranks' points, numbered in the order of ranks; every call is collective.

    Args:
        features: this rank's rows.
        labels: returns this rank's classes, or raises ConfigError; None on all ranks or on none.
        comm: the ranks.

    Attributes:
        n: points of all ranks.
        members: int64, the points of each class.
        sizes: points of each class.

    Raises:
        ConfigError: on all ranks, where the features of any cannot be used or labels do not fit.
    """

    def __init__(
        self, features: Features | Distances, labels: Callable[[], NDArray[np.generic] | None], comm: Comm
    ) -> None:
        self._comm = comm
        self._rows, counts = centred_rows(features, comm)
        self._start = sum(counts[: comm.rank])
        self.n = sum(counts)
        self.members = self._classes(labels, counts)
        self.sizes = [len(each) for each in self.members]

    def solve(self, group: int, goal: Goal, settings: MethodSettings) -> ClassSelection:
        """Select in one class.

        Args:
            group: the class, from 0.
            goal: when to stop, its cost in distances.
            settings: of the method.

        Raises:
            ConfigError: the method needs all points on one rank.
        """
        if settings.method == "sparse":
            raise ConfigError("method='sparse': selects on one rank alone. With comm use lazy")
        members = self.members[group]
        own = members - self._start
        mine = own[(own >= 0) & (own < len(self._rows))].to(self._rows.device)
        unit = power_above(2 * max_over_ranks(self._comm, norm_of(self._rows[mine]), self._rows.device))
        rows = self._rows[mine] / unit
        inner = Goal(goal.budget, None if goal.cost is None else goal.cost / unit, goal.on_progress)

        facility = SharedFacility(nearest_for(rows, threads=torch.get_num_threads()), self._comm)
        picks, sizes = greedy(facility, inner, settings.method)
        return in_distances(picks, sizes, unit)

    def _classes(self, read: Callable[[], NDArray[np.generic] | None], counts: list[int]) -> list[Tensor]:
        # All ranks raise together: one that continued alone would wait for the others.
        labels, problem = None, None
        try:
            labels = read()
        except ConfigError as error:
            problem = error
        fits = problem is None and (labels is None or (len(labels) == len(self._rows) and labels.dtype.kind in "biu"))
        kinds = torch.tensor([labels is not None, fits], dtype=torch.int64, device=self._rows.device)
        facts = torch.stack(self._comm.all_gather(kinds).wait()).cpu()
        if not bool(facts[:, 1].all()) or len(facts[:, 0].unique()) > 1:
            raise problem or ConfigError(
                "labels: with comm give a whole number for each row on every rank, or labels on none"
            )
        if labels is None:
            return [torch.arange(self.n, device="cpu")]
        own = torch.from_numpy(labels.astype(np.int64)).to(self._rows.device)
        every_label = gather_rows(self._comm, own, counts).cpu()
        return [(every_label == label).nonzero().flatten() for label in every_label.unique()]
