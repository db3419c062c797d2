# SPDX-License-Identifier: Apache-2.0
"""A searcher of Ray Tune that proposes packs of members; imported only where Ray is installed."""
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownParameterType=false

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ray.tune.search import Searcher

from thinwire.errors import ConfigError

Hyperparameters = dict[str, Any]


class PackedSearcher(Searcher):
    """Proposes packs whose members another searcher proposes, and reports every member's result to that searcher.

    Args:
        searcher: proposes single members.
        together: members of a pack; the last pack may have fewer.
        metric: the member's result that `searcher` optimizes.
        mode: "min" or "max".
        space: search space of a member, as Tune's search space.

    Raises:
        ConfigError: the searcher already has a space.
    """

    def __init__(self, searcher: Searcher, together: int, *, metric: str, mode: str, space: Hyperparameters) -> None:
        super().__init__(metric=metric, mode=mode)
        self.searcher, self.together, self.member_metric = searcher, together, metric
        # The members that have no result yet, by pack and by the name that the inner searcher knows them by.
        self.pending: dict[str, dict[str, Hyperparameters]] = {}
        if not searcher.set_search_properties(metric, mode, space):
            raise ConfigError(f"{type(searcher).__name__} has a space of its own already. Make it without one")

    def set_search_properties(self, metric: str | None, mode: str | None, config: Hyperparameters, **spec: Any) -> bool:
        """Accept the tuner's metric, by which Tune compares packs.

        Raises:
            ConfigError: the tuner has a `param_space` too.
        """
        if config:
            raise ConfigError(f"param_space={config} with packed(), which has the space of the members. Leave one out")
        return True

    def suggest(self, trial_id: str) -> dict[str, list[Hyperparameters]] | None:
        """The next pack; None while the inner searcher waits for results, `Searcher.FINISHED` after its last trial."""
        finished: Any = Searcher.FINISHED
        found = self.pending.setdefault(trial_id, {})
        # Where the inner searcher returned None, Tune asks again for the same pack, which is then continued.
        for index in range(len(found), self.together):
            member = f"{trial_id}-{index}"
            hyperparameters = self.searcher.suggest(member)
            if hyperparameters is None:
                return None
            if hyperparameters == finished:
                break
            found[member] = hyperparameters
        return {"members": list(found.values())} if found else finished

    def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """Does nothing: results of members are reported when their pack has finished."""

    def on_trial_complete(self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False) -> None:
        """Report the result of every member of a pack; diverged members, and all of a failed pack, as errors."""
        rows = {} if error or not result else {row["trial"]: row for row in result.get("members", [])}
        for index, member in enumerate(self.pending.pop(trial_id, {})):
            row = rows.get(index)
            if row is None or not math.isfinite(row[self.member_metric]):
                self.searcher.on_trial_complete(member, None, error=True)
            else:
                found = {self.member_metric: row[self.member_metric], "training_iteration": row["steps"]}
                self.searcher.on_trial_complete(member, found)

    def get_state(self) -> dict[str, Any]:
        """Return the members that have no result yet; the inner searcher saves itself."""
        return {"pending": self.pending}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `get_state`."""
        self.pending = state["pending"]

    def save(self, checkpoint_path: str) -> None:
        """Save the inner searcher."""
        self.searcher.save(checkpoint_path)

    def restore(self, checkpoint_path: str) -> None:
        """Restore the inner searcher."""
        self.searcher.restore(checkpoint_path)
