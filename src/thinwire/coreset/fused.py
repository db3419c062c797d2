"""The nearest representatives by the compiled kernel, which never holds a distance longer than it takes to use it."""

from __future__ import annotations

from ctypes import CDLL, byref

import numpy as np
import torch
from torch import Tensor

from thinwire.coreset.facility import CoordinateFacility, Facility, Gains, Nearest, Numbers, TorchNearest
from thinwire.coreset.goals import Goal, Picks
from thinwire.kernels import nearest

_WIDEST = 512
_ROUND = 64
_GUESSES = 64
_WORTH_A_GUESS = 256


class FusedNearest(Nearest):
    """On the CPU, by `thinwire.kernels.nearest`; large pieces of work are shared out to threads that end with it.

    Args:
        rows: float32, [n, d]; no two are further apart than 1.
        library: the compiled kernel.
        threads: how many at most.
    """

    def __init__(self, rows: Tensor, library: CDLL, *, threads: int = 1) -> None:
        self.n, self._features = rows.shape
        self._library = library
        self._lanes, self._together = int(library.thinwire_lanes()), int(library.thinwire_together())
        self._threads = min(threads, int(library.thinwire_most_threads()))
        self._panels = _panels(rows, self._lanes)
        self._near = torch.zeros(len(self._panels) * self._lanes)
        self._near[: self.n] = 1
        self._who = torch.zeros(len(self._near), dtype=torch.int32)
        self._facility = self._facility_of(self._near, self._who)

    def _facility_of(self, near: Tensor, who: Tensor) -> nearest.Facility:
        """The points, as near to their representatives as that."""
        return nearest.Facility(
            points=self._panels.data_ptr(),
            near=near.data_ptr(),
            nearest=who.data_ptr(),
            panels=len(self._panels),
            features=self._features,
            threads=self._threads,
        )

    def of(self, points: Tensor) -> Tensor:
        """The coordinates of some of the points."""
        # By numpy, as torch would start its threads for so few numbers.
        places = points.numpy()
        return torch.from_numpy(self._panels.numpy()[places // self._lanes, :, places % self._lanes])

    def gains(self, rows: Tensor) -> Gains:
        """What candidates would save."""
        return self._gains(rows, None)[0]

    def _gains(self, rows: Tensor, later: Tensor | None) -> Gains:
        """What candidates would save now, and what they would if the points were as near as `later`; [1 or 2, m]."""
        count = -(-len(rows) // self._together) * self._together
        candidates = rows.new_zeros((count, self._features))
        candidates[: len(rows)] = rows
        times = 1 if later is None else 2
        sums = np.empty((times * self._threads, count))
        nearer = None if later is None else later.data_ptr()
        given = nearer, candidates.data_ptr(), count, sums.ctypes.data
        used = self._library.thinwire_gains(byref(self._facility), *given)
        return sums[: times * used].reshape(times, used, count).sum(1)[:, : len(rows)]

    def take(self, row: Tensor, position: int, own: int | None) -> None:
        """Make coordinates a representative."""
        row = row.contiguous()
        self._library.thinwire_take(byref(self._facility), row.data_ptr(), position)
        if own is not None:
            self._near[own], self._who[own] = 0, position

    def lazy(self, candidates: Numbers, picks: Picks, goal: Goal) -> None:
        """Go on choosing by lazy greedy until the goal is reached.

        Args:
            candidates: int64, [m]; those not chosen yet.
            picks: what has been chosen; grows.
            goal: when to stop.
        """
        candidates, bounds = self._bounds(candidates, picks)
        # Sorted, and therefore a heap.
        heap = candidates[np.lexsort((candidates, -bounds))]
        known = np.full(self.n, -1.0)
        known[candidates] = bounds
        rows, sums = np.empty((_WIDEST, self._features), np.float32), np.empty((self._threads, _WIDEST))
        asked, picked, gains = np.empty_like(heap), np.empty(_ROUND, np.int64), np.empty(_ROUND)
        search = nearest.Search(
            ids=heap.ctypes.data,
            asked=asked.ctypes.data,
            picked=picked.ctypes.data,
            bounds=known.ctypes.data,
            sums=sums.ctypes.data,
            gains=gains.ctypes.data,
            rows=rows.ctypes.data,
            size=len(heap),
            block=self._together,
            widest=_WIDEST,
            cost=picks.cost,
            enough=-1.0 if goal.cost is None else goal.cost,
        )
        while not picks.done(goal) and search.size:
            search.position = len(picks.indices)
            search.picks = min(_ROUND, goal.budget - len(picks.indices))
            count = self._library.thinwire_lazy(byref(self._facility), byref(search))
            picks.indices += picked[:count].tolist()
            picks.gains += gains[:count].tolist()
            picks.cost = float(search.cost)

    def _bounds(self, candidates: Numbers, picks: Picks) -> tuple[Numbers, Gains]:
        """Candidates left, and what each would save; the first pick is made here where it was guessed.

        After the first pick all gains have shrunk so much that each would be asked for again. Who will be first is
        easily guessed, and then one pass over all distances gives the gains before it and after it.
        """
        guess = None if picks.indices or len(candidates) < _WORTH_A_GUESS else self._guess(candidates)
        later = None if guess is None else self._from(self.of(torch.tensor([guess]))[0])
        found = np.concatenate(
            [self._gains(self.of(part), later) for part in torch.from_numpy(candidates).split(1024)], axis=1
        )
        first = int(found[0].argmax())
        if guess is None or candidates[first] != guess:
            return candidates, found[0]
        self.take(self.of(torch.tensor([guess]))[0], 0, guess)
        picks.add(guess, float(found[0, first]))
        return np.delete(candidates, first), np.delete(found[1], first)

    def _guess(self, candidates: Numbers) -> int:
        """The best of those that are nearest to the mean."""
        mean = self._panels.sum((0, 2), dtype=torch.float64) / self.n
        middle = np.sort(candidates[np.argsort(self._from(mean.float()).numpy()[candidates], kind="stable")[:_GUESSES]])
        return int(middle[self.gains(self.of(torch.from_numpy(middle))).argmax()])

    def _from(self, row: Tensor) -> Tensor:
        """How near the points would be with these coordinates as their first representative."""
        near, who, row = self._near.clone(), self._who.clone(), row.contiguous()
        self._library.thinwire_take(byref(self._facility_of(near, who)), row.data_ptr(), 0)
        return near

    def cost(self) -> float:
        """The sum of the distances to the nearest representatives."""
        return float(self._near.sum(dtype=torch.float64))

    def representatives(self) -> Tensor:
        """The position of the nearest representative of each point."""
        return self._who[: self.n].long()


def nearest_of(rows: Tensor, *, threads: int = 1) -> tuple[Nearest, int]:
    """The fastest way there is for these rows, and how many candidates it likes to be asked for at a time."""
    library = nearest.compiled(rows)
    if library is None or len(rows) == 0:
        return TorchNearest(rows), 64
    return FusedNearest(rows, library, threads=threads), int(library.thinwire_together())


def fused(facility: Facility) -> FusedNearest | None:
    """The compiled part of a facility whose candidates are its points; None where it has none."""
    found = facility.nearest if isinstance(facility, CoordinateFacility) else None
    return found if isinstance(found, FusedNearest) else None


def _panels(rows: Tensor, lanes: int) -> Tensor:
    """[n, d] as [panels, d, lanes], filled up with zeros."""
    count = -(-len(rows) // lanes)
    filled = rows.new_zeros((count, rows.shape[1], lanes))
    whole = len(rows) // lanes
    filled[:whole] = rows[: whole * lanes].view(whole, lanes, rows.shape[1]).transpose(1, 2)
    if whole < count:
        filled[whole, :, : len(rows) - whole * lanes] = rows[whole * lanes :].T
    return filled
