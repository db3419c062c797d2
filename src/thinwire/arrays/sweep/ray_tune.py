# SPDX-License-Identifier: Apache-2.0
"""Ray Tune over arrays: each of Tune's trials is a pack of members that one process trains as one array.

Tune runs every trial in its own process, while an array trains many trials in one process. So one trial of Tune is a
*pack*: its configuration is `{"members": [hyperparameters, ...]}`, and it reports its best member's loss and a table of
all members. Tune's searchers still learn from single members, through `packed`. Its schedulers compare packs; within a
pack `Plan.halving` stops members early. Which members share a pack does not depend on timing.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from thinwire.arrays.sweep.journal import Journal
from thinwire.arrays.sweep.plan import Plan
from thinwire.arrays.sweep.space import Choices, Domain, Space
from thinwire.arrays.sweep.training import TrialArray
from thinwire.arrays.sweep.trials import FUSIBLE, Outcome, Trial, partition, ranked
from thinwire.core.validation import check_range
from thinwire.errors import ConfigError

MEMBERS = "members"
Config = Mapping[str, Any]
Fields = dict[str, Any]


def _tune() -> Any:
    try:
        return import_module("ray.tune")
    except ModuleNotFoundError:
        raise ConfigError("Ray Tune is not installed; pip install 'thinwire[ray]'") from None


def trainable(plan: Plan, *, every: int = 100) -> Callable[[Config], None]:
    """Return a trainable for Tune: trains the members of its configuration as one array, in one process.

    It reports `loss` (held out, of the best member), `best` (that member's index), `steps` (of all arrays of the pack)
    and `members` (index, hyperparameters, loss, metric and steps of each, and whether it was stopped early). Each
    report has a checkpoint, from which a pack that failed or was paused resumes bit for bit. Members that differ in
    what cannot be fused are trained in several arrays, one after another.

    With `plan.adapting`, members are adapters of the task's model. The checkpoint of a pack's last report has the
    adapter of member N as the PEFT folder `adapters/trial-N`; members that were stopped early have none.

    Args:
        plan: what all members have in common.
        every: steps between reports.

    Raises:
        ConfigError: Ray Tune is not installed, or the plan names a folder for adapters.
    """
    _tune()  # a missing installation is an error here, and not in every worker process
    if plan.adapting is not None and plan.adapting.folder is not None:
        raise ConfigError(
            f"Adapting(folder={str(plan.adapting.folder)!r}) under Ray Tune: packs may train on other machines, so "
            "their adapters are in the checkpoints of their reports. Leave folder out"
        )
    return partial(_train_pack, plan, every)


def _train_pack(plan: Plan, every: int, config: Config) -> None:
    with tempfile.TemporaryDirectory(prefix="thinwire-") as temporary:
        _Pack(plan, members_of(config), Path(temporary) / "pack", every).train()


class _Pack:
    """Members that share a process, with their reports to Tune."""

    def __init__(self, plan: Plan, trials: Sequence[Trial], folder: Path, every: int) -> None:
        if plan.adapting is not None:
            plan = replace(plan, adapting=replace(plan.adapting, folder=folder / "adapters"))
        self.plan, self.trials, self.folder, self.tune = plan, trials, folder, _tune()
        self.finished, self.arrays = list[Outcome](), 0
        # Tune restarts a failed or paused pack from its last checkpoint, perhaps on another machine.
        before = self.tune.get_checkpoint()
        if before is not None:
            before.to_directory(str(folder))
        self.journal = Journal(
            folder,
            {MEMBERS: [dict(trial.hyperparameters) for trial in trials]},
            resume=before is not None,
            # By steps only, so that the reports of all packs are at the same steps.
            every_seconds=0,
            every_steps=every,
            on_write=self._report_current,
        )

    def train(self) -> None:
        """Train the arrays one after another; those that had finished before an interruption are not trained again."""
        for group in partition(self.trials, FUSIBLE):
            self.finished += self.journal.train(self.plan, group)
            self.arrays += 1
        self._report(self.finished, 0)

    def _report_current(self, run: TrialArray, ended: Sequence[Outcome]) -> None:
        self._report([*self.finished, *ended, *run.outcomes()], run.step)

    def _report(self, outcomes: Sequence[Outcome], step: int) -> None:
        checkpoint = self.tune.Checkpoint.from_directory(str(self.folder))
        self.tune.report(summary(outcomes, self.arrays * self.plan.steps + step), checkpoint=checkpoint)


def members_of(config: Config) -> list[Trial]:
    """Return the members of a pack, numbered by their index.

    Raises:
        ConfigError: the configuration is not that of a pack, or the pack is empty.
    """
    members = config.get(MEMBERS)
    if not isinstance(members, list) or not members or not all(isinstance(each, Mapping) for each in members):
        raise ConfigError(
            f"config={dict(config)}: a pack is {{'members': [hyperparameters, ...]}}. See packed() and pack_of()"
        )
    return [Trial(index, dict(hyperparameters)) for index, hyperparameters in enumerate(members)]


def summary(outcomes: Iterable[Outcome], steps: int) -> Fields:
    """Return the report of a pack: the best member's loss and index, and a table of all members in their order."""
    every = sorted(outcomes, key=lambda each: each.trial.number)
    best = ranked(every)[0]
    # Tune compares reports by loss, and NaN has no order.
    loss = best.loss if math.isfinite(best.loss) else math.inf
    table = [each.to_json() for each in every]
    return {"loss": loss, "best": best.trial.number, "steps": steps, MEMBERS: table}


def pack_of(space: Space, together: int) -> Fields:
    """Return a search space for Tune, in which every member of a pack is drawn independently.

    Args:
        space: search space of each member.
        together: members of a pack.

    Raises:
        ConfigError: `together` is less than 1, or Ray Tune is not installed.
    """
    check_range("together", together, "1..", "A pack has at least 1 member")
    tune = _tune()
    return {MEMBERS: [{name: _domain(tune, each) for name, each in space.domains.items()} for _ in range(together)]}


def _domain(tune: Any, domain: Domain) -> Any:
    if isinstance(domain, Choices):
        return tune.choice(list(domain.values))
    if domain.scale == "whole":
        return tune.randint(int(domain.low), int(domain.high) + 1)
    return tune.loguniform(domain.low, domain.high) if domain.scale == "log" else tune.uniform(domain.low, domain.high)


def packed(searcher: Any, space: Space, together: int, *, metric: str = "loss", mode: str = "min") -> Any:
    """Return a searcher for Tune that proposes packs, made from a searcher that proposes single members.

    Args:
        searcher: any `ray.tune.search.Searcher` that was made without a space, such as `OptunaSearch()`.
        space: search space of each member; the tuner needs no `param_space`.
        together: members of a pack.
        metric: the member's result that the searcher optimizes: "loss" or "metric".
        mode: "min" or "max".

    Raises:
        ConfigError: `together` is less than 1, another metric or mode, the searcher has a space, or Ray Tune is not
            installed.
    """
    check_range("together", together, "1..", "A pack has at least 1 member")
    if metric not in ("loss", "metric") or mode not in ("min", "max"):
        raise ConfigError(f"metric={metric!r}, mode={mode!r}: must be loss or metric, and min or max")
    domains = {name: _domain(_tune(), domain) for name, domain in space.domains.items()}
    kind: Any = import_module("thinwire.arrays.sweep.ray_searcher").PackedSearcher
    return kind(searcher, together, metric=metric, mode=mode, space=domains)
