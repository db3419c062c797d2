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
    """Asks another searcher for every member, and tells it what has come of each.

    Args:
        searcher: of single members.
        together: members of a pack; the last pack may have fewer.
        metric: of a member, what `searcher` judges by.
        mode: "min" or "max".
        space: of a member, as Tune writes it.

    Raises:
        ConfigError: the searcher has a space of its own.
    """

    def __init__(self, searcher: Searcher, together: int, *, metric: str, mode: str, space: Hyperparameters) -> None:
        super().__init__(metric=metric, mode=mode)
        self.searcher, self.together, self.judged = searcher, together, metric
        self.asked: dict[str, dict[str, Hyperparameters]] = {}
        if not searcher.set_search_properties(metric, mode, space):
            raise ConfigError(f"{type(searcher).__name__} has a space of its own already; make it without one")

    def set_search_properties(self, metric: str | None, mode: str | None, config: Hyperparameters, **spec: Any) -> bool:
        """Take note of what Tune judges packs by.

        Raises:
            ConfigError: the tuner was given a `param_space` besides.
        """
        if config:
            raise ConfigError(f"param_space={config} beside packed(): it has the space of members; leave one out")
        return True

    def suggest(self, trial_id: str) -> dict[str, list[Hyperparameters]] | None:
        """The next pack; None while the inner searcher wants to wait, and Tune's own word when there is none left."""
        finished: Any = Searcher.FINISHED
        found = self.asked.setdefault(trial_id, {})
        for place in range(len(found), self.together):
            member = f"{trial_id}-{place}"
            hyperparameters = self.searcher.suggest(member)
            if hyperparameters is None:
                return None
            if hyperparameters == finished:
                break
            found[member] = hyperparameters
        return {"members": list(found.values())} if found else finished

    def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """Members are told of when their pack has ended."""

    def on_trial_complete(self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False) -> None:
        """Tell of every member of a pack; those that diverged have failed, as all of a pack that failed."""
        rows = {} if error or not result else {row["trial"]: row for row in result.get("members", [])}
        for place, member in enumerate(self.asked.pop(trial_id, {})):
            row = rows.get(place)
            if row is None or not math.isfinite(row[self.judged]):
                self.searcher.on_trial_complete(member, None, error=True)
            else:
                told = {self.judged: row[self.judged], "training_iteration": row["steps"]}
                self.searcher.on_trial_complete(member, told)

    def get_state(self) -> dict[str, Any]:
        """Who is being trained; the inner searcher is saved by itself."""
        return {"asked": self.asked}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """What `get_state` returned."""
        self.asked = state["asked"]

    def save(self, checkpoint_path: str) -> None:
        """As the inner searcher."""
        self.searcher.save(checkpoint_path)

    def restore(self, checkpoint_path: str) -> None:
        """As the inner searcher."""
        self.searcher.restore(checkpoint_path)
