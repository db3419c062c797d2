# SPDX-License-Identifier: Apache-2.0
"""When to select again: every few epochs, or when the choice no longer represents all points."""

from __future__ import annotations

import time
from typing import Any

from thinwire.coreset.policy import Points, Policy
from thinwire.coreset.subset import Strata, Subset
from thinwire.errors import CheckpointError


class Selector:
    """The selections of one training run under a policy.

    An epoch visits every chosen point once. A selection happens only at the first call of an epoch for which it is due.

    Args:
        policy: which points to choose, and how often.
        points: to choose among, with the model in training.
        seed: the key of every draw, equal on all ranks.

    Attributes:
        seconds: spent on selections and measurements so far.
        selections: number of selections so far.
    """

    def __init__(self, policy: Policy, points: Points, *, seed: int = 0) -> None:
        self.policy = policy
        self.points = points
        self.seed = seed
        self.seconds = 0.0
        self.selections = 0
        self._chosen: Subset | Strata | None = None
        self._selected = -1
        self._epoch = -1
        self._subset: Subset | None = None

    @property
    def began(self) -> bool:
        """Return True if `subset` was called yet."""
        return self._subset is not None

    def subset(self, epoch: int) -> Subset:
        """Return the points of an epoch; call it for epochs in their order, for each as often as needed."""
        if self._subset is not None and epoch == self._epoch:
            return self._subset
        start = time.perf_counter()
        if epoch < self.policy.full_epochs:
            subset = Subset.whole(self.points.n)
        else:
            chosen = self._chosen
            if chosen is None or self._is_due(epoch):
                chosen = self._chosen = self.policy.choose(self.points, seed_of(self.seed, epoch))
                self._selected, self.selections = epoch, self.selections + 1
            subset = chosen.draw(self.seed, epoch) if isinstance(chosen, Strata) else chosen
        self._subset, self._epoch = subset, epoch
        self.seconds += time.perf_counter() - start
        return subset

    def _is_due(self, epoch: int) -> bool:
        every = self.policy.every
        if every is not None and epoch - self._selected >= every:
            return True
        # Measuring the drift takes a forward pass, so it comes last.
        return self._subset is not None and self.policy.has_drifted(self.points, self._subset, self.seed + epoch)

    def state_dict(self) -> dict[str, Any]:
        """Everything that later epochs depend on, as numbers and tensors."""
        return {
            "policy": repr(self.policy),
            "epoch": self._epoch,
            "selected": self._selected,
            "seconds": self.seconds,
            "selections": self.selections,
            "subset": _entries(self._subset),
            # Usually the subset itself, which need not be saved twice.
            "chosen": _entries(self._chosen) if self._chosen is not self._subset else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned: later epochs are those of the uninterrupted run.

        Raises:
            CheckpointError: it is of another policy, or of other points.
        """
        if state["policy"] != repr(self.policy):
            raise CheckpointError(f"the selection was saved with {state['policy']}, not with {self.policy!r}")
        subset, chosen = _from_entries(state["subset"]), _from_entries(state["chosen"])
        if subset is not None and subset.n != self.points.n:
            raise CheckpointError(f"the selection was saved among {subset.n} points. There are {self.points.n}")
        assert not isinstance(subset, Strata)
        self._epoch, self._selected = state["epoch"], state["selected"]
        self.seconds, self.selections = state["seconds"], state["selections"]
        self._subset = subset
        self._chosen = chosen if chosen is not None or self._selected < 0 else subset


def seed_of(seed: int, epoch: int) -> int:
    """Return a seed for each selection of a run."""
    # Multiplied, so that (seed, epoch) and (seed + 1, epoch - 1) have different seeds.
    return (seed * 0x9E3779B1 + epoch) % 2**31


def _entries(chosen: Subset | Strata | None) -> dict[str, Any] | None:
    return None if chosen is None else dict(vars(chosen))


def _from_entries(content: dict[str, Any] | None) -> Subset | Strata | None:
    if content is None:
        return None
    return (Strata if "members" in content else Subset)(**content)
