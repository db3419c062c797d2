"""Trials trained as one array, or one after another: the same batches, the same mathematics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.errors import ConfigError
from thinwire.fusion.array import FusedArray, fuse
from thinwire.fusion.checkpoints import restore, state_of
from thinwire.fusion.optimizers.adam import AdamW
from thinwire.fusion.optimizers.base import FusedOptimizer
from thinwire.fusion.optimizers.sgd import SGD
from thinwire.sweep.plan import Plan, Setting
from thinwire.sweep.population import Population, draws_of
from thinwire.sweep.trials import Copy, Outcome, Trial
from thinwire.tasks.base import IGNORED, evaluating


class Together:
    """Trials as one array: alike in all hyperparameters but those of `FUSIBLE`.

    Args:
        plan: of the sweep.
        trials: at least one.

    Attributes:
        live: the trials by place, with the hyperparameters that they have now.
        copies: of each, as in its `Outcome`.
        losses: of each in its last batch, [B]; NaN before the first.

    Raises:
        ConfigError: trials differ in a hyperparameter that cannot be fused, or the population perturbs none that the
            optimizer has.
    """

    def __init__(self, plan: Plan, trials: Sequence[Trial]) -> None:
        self.plan = plan
        self.live = list(trials)
        self.copies: list[tuple[Copy, ...]] = [()] * len(trials)
        settings = [plan.setting(trial.hyperparameters) for trial in trials]
        fixed = {(each.optimizer, each.batch_size, each.model_size) for each in settings}
        if len(fixed) != 1:
            raise ConfigError(f"trials with {fixed}: one array has one optimizer, batch size and model; partition them")
        ((_, self.batch_size, size),) = fixed
        (self._shard,) = plan.task.shards(1, seed=plan.seed)
        self.array = fuse([plan.task.model(size, seed=plan.seed)] * len(trials))
        self.optimizer = optimizer_of(self.array, settings)
        if plan.population is not None:
            self._perturbed_by(plan.population)
        self.rates = torch.tensor([each.lr for each in settings], dtype=torch.float64)
        self.losses = torch.full((len(trials),), torch.nan)
        self.step = 0

    def _perturbed_by(self, population: Population) -> list[str]:
        """Of what a population perturbs, what this optimizer has."""
        names, known = population.perturbed, self.optimizer.param_groups[0]
        found = [name for name in names if name in known]
        if not found:
            raise ConfigError(
                f"perturbed={names}: {type(self.optimizer).__name__} has none of them; lr is one that it has"
            )
        return found

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
        self.losses = losses.detach()
        return self.losses

    def running(self) -> list[tuple[Trial, float]]:
        """Each trial with its last batch's loss."""
        return list(zip(self.live, self.losses.tolist(), strict=True))

    def state(self) -> dict[str, Any]:
        """Everything that `restored` needs: tensors and JSON values."""
        return {
            "live": [[trial.number, dict(trial.hyperparameters)] for trial in self.live],
            "copies": [
                [[each.step, each.source, dict(each.hyperparameters)] for each in copies] for copies in self.copies
            ],
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
        run = cls(plan, [Trial(number, hyperparameters) for number, hyperparameters in state["live"]])
        restore(state["array"], run.array, optimizer=run.optimizer)
        run.copies = [tuple(Copy(*each) for each in copies) for copies in state["copies"]]
        run.rates.copy_(state["rates"])
        run.step = state["step"]
        return run

    def keep(self, places: Sequence[int]) -> None:
        """Go on with some of the trials, in this order, one as often as it is named."""
        self.optimizer.select(self.array.select(places))
        self.rates, self.losses = self.rates[list(places)], self.losses[list(places)]
        self.live = [self.live[place] for place in places]
        self.copies = [self.copies[place] for place in places]

    def exchange(self, population: Population) -> list[int]:
        """Judge all members, copy the best over the worst and perturb those; returns whom each place goes on from."""
        before, copies, names = self.live, self.copies, self._perturbed_by(population)
        draws = draws_of(self.plan.seed, min(trial.number for trial in before), self.step)
        sources = population.sources(self.outcomes(), draws)
        self.keep(sources)
        self.copies = copies
        for place, source in enumerate(sources):
            if source != place:
                changed = {name: self._move(name, place, population, draws) for name in names}
                hyperparameters = {**before[source].hyperparameters, **changed}
                self.live[place] = Trial(before[place].number, hyperparameters)
                copies[place] += (Copy(self.step, before[source].number, hyperparameters),)
        return sources

    def _move(self, name: str, place: int, population: Population, draws: np.random.Generator) -> float:
        values = self.rates if name == "lr" else self.optimizer.param_groups[0][name]
        values[place] = population.moved(name, float(values[place]), draws)
        return float(values[place])

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
                copies=self.copies[place],
            )
            for place, trial in enumerate(self.live)
        ]


Seen = Callable[[Together, Sequence[Outcome]], None]


def train_together(
    plan: Plan,
    trials: Sequence[Trial],
    told: Seen | None = None,
    *,
    begun: tuple[Together, list[Outcome]] | None = None,
    kept: Seen | None = None,
) -> list[Outcome]:
    """Train trials as one array, which `plan.halving` shrinks at each rung and `plan.population` copies within itself.

    Args:
        plan: of the sweep.
        trials: alike in what cannot be fused.
        told: called after every step with the array, and with the outcomes that are known by then.
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
        if plan.population is not None and run.step % plan.population.every == 0 and run.step < plan.steps:
            run.exchange(plan.population)
        if kept is not None and run.step < plan.steps:
            kept(run, ended)
        if told is not None:
            told(run, ended)
    ended += run.outcomes()
    places = {trial.number: place for place, trial in enumerate(trials)}
    return sorted(ended, key=lambda each: places[each.trial.number])


def train_alone(plan: Plan, trial: Trial) -> Outcome:
    """Train one trial by itself, with torch's own optimizer: what `train_together` must agree with."""
    setting, task = plan.setting(trial.hyperparameters), plan.task
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
    """The array's optimizer, with each trial's hyperparameters."""
    lr, decay = [each.lr for each in settings], [each.weight_decay for each in settings]
    if settings[0].optimizer == "sgd":
        momenta = [each.momentum for each in settings]
        return SGD(array.parameters(), lr=lr, momentum=momenta, weight_decay=decay)
    betas = [each.beta1 for each in settings], [each.beta2 for each in settings]
    return AdamW(array.parameters(), lr=lr, betas=betas, eps=[each.eps for each in settings], weight_decay=decay)


def plain_optimizer_of(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    """Torch's own optimizer, with one trial's hyperparameters."""
    if setting.optimizer == "sgd":
        return torch.optim.SGD(
            model.parameters(), lr=setting.lr, momentum=setting.momentum, weight_decay=setting.weight_decay
        )
    betas = (setting.beta1, setting.beta2)
    return torch.optim.AdamW(
        model.parameters(), lr=setting.lr, betas=betas, eps=setting.eps, weight_decay=setting.weight_decay
    )
