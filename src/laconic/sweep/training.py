"""Trials trained as one array, or one after another: the same batches, the same mathematics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from laconic.errors import ConfigError
from laconic.fusion.array import FusedArray, fuse
from laconic.fusion.checkpoints import restore, state_of
from laconic.fusion.optimizers.adam import AdamW
from laconic.fusion.optimizers.base import FusedOptimizer
from laconic.fusion.optimizers.sgd import SGD
from laconic.sweep.space import Knobs, Value
from laconic.sweep.trials import Halving, Outcome, Trial
from laconic.tasks.base import IGNORED, Task, evaluating

Told = Callable[[int, Sequence[Outcome]], None]


@dataclass(frozen=True)
class Setting:
    """All knobs of one trial.

    Args:
        lr: the peak learning rate.
        momentum: of sgd.
        weight_decay: as the optimizer means it.
        beta1: of adamw.
        beta2: of adamw.
        eps: of adamw.
        optimizer: "sgd" or "adamw".
        batch_size: examples a step.
        model_size: a named size of the task's model.

    Raises:
        ConfigError: a number out of its range.
    """

    lr: float
    momentum: float
    weight_decay: float
    optimizer: str
    batch_size: int
    model_size: str
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        for name in ("lr", "momentum", "weight_decay", "eps"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name}={value}: must be finite and not negative")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ConfigError(f"{name}={value}: must lie in [0, 1); 0.9 and 0.999 are usual")
        if self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size}: a step needs at least 1 example")


FUSIBLE = ("lr", "momentum", "weight_decay", "beta1", "beta2", "eps")
"""The knobs in which members of one array may differ."""


@dataclass(frozen=True)
class Plan:
    """What all trials of a sweep have in common.

    Args:
        task: what is learned.
        steps: optimizer steps of a trial that is not given up.
        seed: of the first parameters and of the order of data, the same for all trials.
        schedule: of the learning rate: "constant", or "cosine" down to a tenth.
        halving: when to give trials up; None never does.
        eval_limit: held-out examples looked at; None takes all.
    """

    task: Task
    steps: int
    seed: int = 0
    schedule: Literal["constant", "cosine"] = "constant"
    halving: Halving | None = None
    eval_limit: int | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps}: a trial needs at least 1")

    def setting(self, knobs: Knobs) -> Setting:
        """The knobs with the task's own settings for those left alone.

        Raises:
            ConfigError: there is no such knob, or its value is not of its kind.
        """
        known = {field.name for field in fields(Setting)}
        for name in knobs:
            if name not in known:
                raise ConfigError(f"knob {name!r}: there are {', '.join(sorted(known))}")
        optimizer = _text(knobs, "optimizer", self.task.defaults.optimizer)
        if optimizer not in ("sgd", "adamw"):
            raise ConfigError(f"optimizer={optimizer!r}: a sweep has sgd and adamw")
        usual = self.task.defaults_for(optimizer)
        size = _text(knobs, "model_size", self.task.default_size)
        if size not in self.task.sizes:
            raise ConfigError(f"model_size={size!r}: {self.task.name} has {', '.join(self.task.sizes)}")
        return Setting(
            lr=_number(knobs, "lr", usual.lr),
            momentum=_number(knobs, "momentum", usual.momentum),
            weight_decay=_number(knobs, "weight_decay", usual.weight_decay),
            optimizer=usual.optimizer,
            batch_size=int(_number(knobs, "batch_size", usual.batch_size)),
            model_size=size,
            beta1=_number(knobs, "beta1", 0.9),
            beta2=_number(knobs, "beta2", 0.999),
            eps=_number(knobs, "eps", 1e-8),
        )

    def factor(self, step: int) -> float:
        """What learning rates are multiplied by at a step, counted from 0."""
        if self.schedule == "constant":
            return 1.0
        return 0.55 + 0.45 * math.cos(math.pi * step / self.steps)


def _number(knobs: Knobs, name: str, usual: float) -> float:
    value: Value = knobs.get(name, usual)
    if isinstance(value, str):
        raise ConfigError(f"{name}={value!r}: must be a number, such as {usual:g}")
    return value


def _text(knobs: Knobs, name: str, usual: str) -> str:
    return str(knobs.get(name, usual))


class Together:
    """Trials as one array: alike in all knobs but those of `FUSIBLE`.

    Args:
        plan: of the sweep.
        trials: at least one.

    Raises:
        ConfigError: trials differ in a knob that cannot be fused.
    """

    def __init__(self, plan: Plan, trials: Sequence[Trial]) -> None:
        self.plan = plan
        self.live = list(trials)
        settings = [plan.setting(trial.knobs) for trial in trials]
        fixed = {(each.optimizer, each.batch_size, each.model_size) for each in settings}
        if len(fixed) != 1:
            raise ConfigError(f"trials with {fixed}: one array has one optimizer, batch size and model; partition them")
        ((_, self.batch_size, size),) = fixed
        (self._shard,) = plan.task.shards(1, seed=plan.seed)
        self.array = fuse([plan.task.model(size, seed=plan.seed)] * len(trials))
        self.optimizer = optimizer_of(self.array, settings)
        self.rates = torch.tensor([each.lr for each in settings], dtype=torch.float64)
        self.step = 0

    def advance(self) -> Tensor:
        """One step of every trial; returns their losses, [B], not waited for."""
        *inputs, targets = self.plan.task.batch(
            self._shard, self.step, batch_size=self.batch_size, seed=self.plan.seed, rank=0
        )
        self.array.zero_grad()
        losses = self.array.losses(cross_entropy, self.array(*inputs), targets)
        losses.sum().backward()
        self.optimizer.param_groups[0]["lr"].copy_(self.rates * self.plan.factor(self.step))
        self.optimizer.step()
        self.step += 1
        return losses.detach()

    def state(self) -> dict[str, Any]:
        """Everything that `restored` needs: tensors and JSON values."""
        return {
            "live": [[trial.number, dict(trial.knobs)] for trial in self.live],
            "step": self.step,
            "rates": self.rates.clone(),
            "array": state_of(self.array, optimizer=self.optimizer),
        }

    @classmethod
    def restored(cls, plan: Plan, state: Mapping[str, Any]) -> Together:
        """Go on from `state`, bit for bit.

        Args:
            plan: the one it was made with.
            state: what the method of that name returned.

        Raises:
            CheckpointError: it is of another model or optimizer.
        """
        run = cls(plan, [Trial(number, knobs) for number, knobs in state["live"]])
        restore(state["array"], run.array, optimizer=run.optimizer)
        run.rates.copy_(state["rates"])
        run.step = state["step"]
        return run

    def keep(self, places: Sequence[int]) -> None:
        """Go on with some of the trials, in this order, one as often as it is named."""
        self.optimizer.select(self.array.select(places))
        self.rates = self.rates[list(places)]
        self.live = [self.live[place] for place in places]

    def outcomes(self, *, stopped: bool = False) -> list[Outcome]:
        """How well every trial does on held-out data."""
        task, size = self.plan.task, len(self.live)
        loss, hits, targets = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.int64), 0
        self.array.eval()
        with torch.no_grad():
            for *inputs, wanted in task.data.held_out(self.plan.eval_limit):
                logits = self.array(*inputs)
                counted = wanted != IGNORED
                loss += self.array.losses(partial(cross_entropy, reduction="sum"), logits, wanted).double()
                hits += ((logits.argmax(-1) == wanted) & counted).flatten(1).sum(1)
                targets += int(counted.sum())
        self.array.train()
        return [
            Outcome(
                trial=trial,
                loss=float(loss[place]) / targets,
                metric=task.measure.of(float(loss[place]), int(hits[place]), targets),
                steps=self.step,
                stopped=stopped,
            )
            for place, trial in enumerate(self.live)
        ]


def train_together(
    plan: Plan,
    trials: Sequence[Trial],
    told: Told | None = None,
    *,
    begun: tuple[Together, list[Outcome]] | None = None,
    kept: Callable[[Together, Sequence[Outcome]], None] | None = None,
) -> list[Outcome]:
    """Train trials as one array; at each rung of `plan.halving` the array shrinks to those that go on.

    Args:
        plan: of the sweep.
        trials: alike in what cannot be fused.
        told: called after every step with how many have been made, and with the outcomes that are known by then.
        begun: the array where it was interrupted, and the outcomes known by then; None begins anew.
        kept: called after every step with both, to be saved.

    Returns:
        one outcome per trial, in their order.
    """
    rungs = set() if plan.halving is None else set(plan.halving.rungs(plan.steps))
    run, ended = begun or (Together(plan, trials), list[Outcome]())
    while run.step < plan.steps:
        run.advance()
        if plan.halving is not None and run.step in rungs:
            found = run.outcomes(stopped=True)
            on = {each.trial.number for each in plan.halving.promoted(found)}
            ended += [each for each in found if each.trial.number not in on]
            run.keep([place for place, trial in enumerate(run.live) if trial.number in on])
        if kept is not None and run.step < plan.steps:
            kept(run, ended)
        if told is not None:
            told(run.step, ended)
    ended += run.outcomes()
    places = {trial.number: place for place, trial in enumerate(trials)}
    return sorted(ended, key=lambda each: places[each.trial.number])


def train_alone(plan: Plan, trial: Trial) -> Outcome:
    """Train one trial by itself, with torch's own optimizer: what `train_together` must agree with."""
    setting, task = plan.setting(trial.knobs), plan.task
    (shard,) = task.shards(1, seed=plan.seed)
    model = task.model(setting.model_size, seed=plan.seed)
    optimizer = plain_optimizer_of(model, setting)
    for step in range(plan.steps):
        batch = task.batch(shard, step, batch_size=setting.batch_size, seed=plan.seed, rank=0)
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.param_groups[0]["lr"] = setting.lr * plan.factor(step)
        optimizer.step()
    with evaluating(model):
        found = task.evaluate(model, limit=plan.eval_limit)
    return Outcome(trial, found.loss, found.metric, plan.steps)


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """One model's cross entropy in nats, as tasks mean it."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction=reduction)


def optimizer_of(array: FusedArray, settings: Sequence[Setting]) -> FusedOptimizer:
    """The array's optimizer, with each trial's knobs."""
    lr, decay = [each.lr for each in settings], [each.weight_decay for each in settings]
    if settings[0].optimizer == "sgd":
        momenta = [each.momentum for each in settings]
        return SGD(array.parameters(), lr=lr, momentum=momenta, weight_decay=decay)
    betas = [each.beta1 for each in settings], [each.beta2 for each in settings]
    return AdamW(array.parameters(), lr=lr, betas=betas, eps=[each.eps for each in settings], weight_decay=decay)


def plain_optimizer_of(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    """Torch's own optimizer, with one trial's knobs."""
    if setting.optimizer == "sgd":
        return torch.optim.SGD(
            model.parameters(), lr=setting.lr, momentum=setting.momentum, weight_decay=setting.weight_decay
        )
    betas = (setting.beta1, setting.beta2)
    return torch.optim.AdamW(
        model.parameters(), lr=setting.lr, betas=betas, eps=setting.eps, weight_decay=setting.weight_decay
    )
