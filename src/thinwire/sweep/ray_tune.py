"""Ray Tune over arrays: one of Tune's trials is a process that trains many members as one array.

Tune gives every trial a process of its own, and an array wants many trials in one process. So what Tune is told is a
trial is a *pack*: its configuration is `{"members": [hyperparameters, ...]}`, what it reports is its best member's
loss and the table of all. Tune's searchers still learn from single members, through `packed`; its schedulers compare
packs, while within a pack `Plan.halving` gives members up. Which members share a pack does not depend on who arrives
when.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.sweep.journal import Journal, fields_of
from thinwire.sweep.plan import Plan
from thinwire.sweep.space import Choices, Domain, Space
from thinwire.sweep.training import Together
from thinwire.sweep.trials import FUSIBLE, Outcome, Trial, partition, ranked

MEMBERS = "members"
Config = Mapping[str, Any]
Fields = dict[str, Any]


def _tune() -> Any:
    try:
        return import_module("ray.tune")
    except ModuleNotFoundError:
        raise ConfigError("Ray Tune is not installed; pip install 'thinwire[ray]'") from None


def trainable(plan: Plan, *, every: int = 100) -> Callable[[Config], None]:
    """A function that Tune can run: trains the members of its configuration as one array, in one process.

    It reports `loss` (held out, of the best member), `best` (its place), `steps` (of all arrays of the pack) and
    `members` (of each its place, hyperparameters, loss, metric, steps and whether it was stopped), with a checkpoint
    from which a pack that failed or was paused goes on bit for bit. Members that differ in what cannot be fused are
    trained array after array.

    Args:
        plan: of every member.
        every: steps between reports.

    Raises:
        ConfigError: Ray Tune is not installed.
    """
    _tune()
    return partial(_train_pack, plan, every)


def _train_pack(plan: Plan, every: int, config: Config) -> None:
    with tempfile.TemporaryDirectory(prefix="thinwire-") as temporary:
        pack = _Pack(plan, members_of(config), Path(temporary) / "pack", every)
        pack.train()


class _Pack:
    """Members that share a process, and what Tune is told of them."""

    def __init__(self, plan: Plan, trials: Sequence[Trial], folder: Path, every: int) -> None:
        self.plan, self.trials, self.folder, self.tune = plan, trials, folder, _tune()
        self.done, self.arrays = list[Outcome](), 0
        before = self.tune.get_checkpoint()
        if before is not None:
            before.to_directory(str(folder))
        self.journal = Journal(
            folder,
            {MEMBERS: [dict(trial.hyperparameters) for trial in trials]},
            resume=before is not None,
            every_seconds=0,
            every_steps=every,
            written=self._under_way,
        )

    def train(self) -> None:
        """Array after array; one that has ended before is not trained again."""
        for group in partition(self.trials, FUSIBLE):
            self.done += self.journal.train(self.plan, group)
            self.arrays += 1
        self._report(self.done, 0)

    def _under_way(self, run: Together, ended: Sequence[Outcome]) -> None:
        self._report([*self.done, *ended, *run.outcomes()], run.step)

    def _report(self, outcomes: Sequence[Outcome], step: int) -> None:
        checkpoint = self.tune.Checkpoint.from_directory(str(self.folder))
        self.tune.report(summary(outcomes, self.arrays * self.plan.steps + step), checkpoint=checkpoint)


def members_of(config: Config) -> list[Trial]:
    """The members of a pack, numbered by their places.

    Raises:
        ConfigError: there is none, or the configuration is not that of a pack.
    """
    members = config.get(MEMBERS)
    if not isinstance(members, list) or not members or not all(isinstance(each, Mapping) for each in members):
        raise ConfigError(
            f"config={dict(config)}: a pack is {{'members': [hyperparameters, ...]}}; see packed() and pack_of()"
        )
    return [Trial(place, dict(hyperparameters)) for place, hyperparameters in enumerate(members)]


def summary(outcomes: Iterable[Outcome], steps: int) -> Fields:
    """What a pack reports: the best member's figures, and the table of all in the order of their places."""
    every = sorted(outcomes, key=lambda each: each.trial.number)
    best = ranked(every)[0]
    loss = best.loss if math.isfinite(best.loss) else math.inf
    table = [fields_of(each) for each in every]
    return {"loss": loss, "best": best.trial.number, "steps": steps, MEMBERS: table}


def pack_of(space: Space, together: int) -> Fields:
    """Tune's own search space of a pack: as many members, each drawn by itself.

    Args:
        space: of each member.
        together: members of a pack.

    Raises:
        ConfigError: fewer than one, or Ray Tune is not installed.
    """
    _check_together(together)
    tune = _tune()
    return {MEMBERS: [{name: _domain(tune, each) for name, each in space.domains.items()} for _ in range(together)]}


def _domain(tune: Any, domain: Domain) -> Any:
    if isinstance(domain, Choices):
        return tune.choice(list(domain.values))
    if domain.scale == "whole":
        return tune.randint(int(domain.low), int(domain.high) + 1)
    return tune.loguniform(domain.low, domain.high) if domain.scale == "log" else tune.uniform(domain.low, domain.high)


def packed(searcher: Any, space: Space, together: int, *, metric: str = "loss", mode: str = "min") -> Any:
    """A searcher of Tune that proposes packs, from one that proposes single members and learns from them.

    Args:
        searcher: any `ray.tune.search.Searcher` that was made without a space, such as `OptunaSearch()`.
        space: of each member; the tuner needs no `param_space`.
        together: members of a pack.
        metric: of a member, what the searcher judges by: "loss" or "metric".
        mode: "min" or "max".

    Raises:
        ConfigError: fewer than one member, another metric, the searcher has a space, or Ray Tune is not installed.
    """
    _check_together(together)
    if metric not in ("loss", "metric") or mode not in ("min", "max"):
        raise ConfigError(f"metric={metric!r}, mode={mode!r}: of a member there are loss and metric, min and max")
    domains = {name: _domain(_tune(), domain) for name, domain in space.domains.items()}
    kind: Any = import_module("thinwire.sweep.packing").PackedSearcher
    return kind(searcher, together, metric=metric, mode=mode, space=domains)


def _check_together(together: int) -> None:
    if together < 1:
        raise ConfigError(f"together={together}: a pack has at least 1 member")
