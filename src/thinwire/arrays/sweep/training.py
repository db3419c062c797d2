# SPDX-License-Identifier: Apache-2.0
"""Training trials as one array, or one trial by itself: the same batches and the same mathematics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.arrays.finetuning.array import AdapterArray
from thinwire.arrays.fusion.array import FusedArray, fuse
from thinwire.arrays.fusion.checkpoints import restore, state_of
from thinwire.arrays.sweep.optimizers import fused_optimizer, torch_optimizer
from thinwire.arrays.sweep.plan import Plan
from thinwire.arrays.sweep.trials import Outcome, Trial
from thinwire.errors import ConfigError


class TrialArray:
    """Trials that train as one array: equal in all hyperparameters except those of `FUSIBLE`.

    Args:
        plan: what all trials have in common.
        trials: at least one.

    Attributes:
        trials: the trials by slot.
        losses: the loss of each trial's last batch, [B]; NaN before the first.

    Raises:
        ConfigError: trials differ in a hyperparameter that cannot be fused.
    """

    def __init__(self, plan: Plan, trials: Sequence[Trial]) -> None:
        self.plan = plan
        self.trials = list(trials)
        settings = [plan.setting(trial.hyperparameters) for trial in trials]
        fixed = {(each.optimizer, each.batch_size, each.model_size) for each in settings}
        if len(fixed) != 1:
            raise ConfigError(f"trials with {fixed}: an array has one optimizer, batch size and model. Partition them")
        ((_, self.batch_size, size),) = fixed
        (self._shard,) = plan.task.shards(1, seed=plan.seed)
        with torch.device("cpu"):  # where the batches are
            model = plan.task.model(size, seed=plan.seed)
        # `fuse` copies the model, so that all trials start from the same parameters.
        self.array: FusedArray | AdapterArray = (
            fuse([model] * len(trials)) if plan.adapting is None else plan.adapting.array(model, settings)
        )
        self.optimizer = fused_optimizer(self.array, settings)
        # In fp64, so that scheduled rates round as Python's floats do in `train_alone`.
        self.rates = torch.tensor([each.lr for each in settings], dtype=torch.float64, device="cpu")
        self.losses = torch.full((len(trials),), torch.nan, dtype=torch.float32, device="cpu")
        self.step = 0

    def advance(self) -> Tensor:
        """Train every trial for one step; returns their losses, [B], without waiting for the device."""
        *inputs, targets = self.plan.task.batch(
            self._shard, self.step, batch_size=self.batch_size, seed=self.plan.seed, rank=0
        )
        self.array.zero_grad()
        losses = self.array.losses(self.plan.task.objective.loss, self.array(*inputs), targets)
        # The sum, so that each model's gradient is that of its own loss.
        losses.sum().backward()
        # In place: the optimizer reads this tensor of learning rates, [B].
        self.optimizer.param_groups[0]["lr"].copy_(self.rates * self.plan.lr_factor(self.step))
        self.optimizer.step()
        self.step += 1
        self.losses = losses.detach()
        return self.losses

    def current_losses(self) -> list[tuple[Trial, float]]:
        """Return each trial with the loss of its last batch."""
        return list(zip(self.trials, self.losses.tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, as tensors and JSON values."""
        return {
            "trials": [[trial.number, dict(trial.hyperparameters)] for trial in self.trials],
            "step": self.step,
            "array": state_of(self.array, optimizer=self.optimizer),
        }

    @classmethod
    def from_state_dict(cls, plan: Plan, state: Mapping[str, Any]) -> TrialArray:
        """Return an array that continues from a `state_dict`, bit for bit.

        Args:
            plan: the plan of the saved array.
            state: the result of `state_dict`.

        Raises:
            CheckpointError: it belongs to another model or optimizer.
        """
        run = cls(plan, [Trial(number, hyperparameters) for number, hyperparameters in state["trials"]])
        restore(state["array"], run.array, optimizer=run.optimizer)
        run.step = state["step"]
        return run

    def select(self, slots: Sequence[int]) -> None:
        """Continue with the trials in these slots, in this order."""
        self.optimizer.select(self.array.select(slots))
        self.rates, self.losses = self.rates[list(slots)], self.losses[list(slots)]
        self.trials = [self.trials[slot] for slot in slots]

    def save_adapters(self) -> None:
        """Save each trial's adapter where the plan says so."""
        if self.plan.adapting is not None and isinstance(self.array, AdapterArray):
            self.plan.adapting.save(self.array, self.trials)

    def outcomes(self, *, stopped: bool = False) -> list[Outcome]:
        """Evaluate every trial on held-out data."""
        task, size = self.plan.task, len(self.trials)
        objective = task.objective
        loss, hits = (torch.zeros(size, dtype=torch.float64, device="cpu") for _ in range(2))
        total = 0
        with self.array.evaluating(), torch.no_grad():
            for batch in task.data.held_out(self.plan.eval_limit):
                *inputs, targets = batch
                outputs, count = self.array(*inputs), objective.count(batch)
                sums = self.array.losses(lambda x, y, n=count: objective.total(x, y, n), outputs, targets)
                loss += sums.double()
                if isinstance(outputs, Tensor):
                    hits += torch.stack([objective.hits(own, targets, count) for own in outputs])
                total += count
        return [
            Outcome(
                trial=trial,
                loss=float(loss[slot]) / total,
                metric=task.measure.of(float(loss[slot]), float(hits[slot]), total),
                steps=self.step,
                stopped=stopped,
            )
            for slot, trial in enumerate(self.trials)
        ]


StepCallback = Callable[[TrialArray, Sequence[Outcome]], None]
"""Called after a step with the array and with the outcomes that are known by then."""


def train_together(
    plan: Plan,
    trials: Sequence[Trial],
    callback: StepCallback | None = None,
    *,
    begun: tuple[TrialArray, list[Outcome]] | None = None,
    save: StepCallback | None = None,
) -> list[Outcome]:
    """Train trials as one array, with the plan's early stopping.

    Args:
        plan: what all trials have in common.
        trials: trials that are equal in what cannot be fused.
        callback: called after every step.
        begun: the array where it was interrupted, and the outcomes known by then; None starts from the beginning.
        save: called after every step but the last, before `callback`, to save the array.

    Returns:
        one outcome per trial, in their order.
    """
    rungs = set() if plan.halving is None else set(plan.halving.rungs(plan.steps))
    run, ended = begun or (TrialArray(plan, trials), list[Outcome]())
    while run.step < plan.steps:
        run.advance()
        if plan.halving is not None and run.step in rungs:
            outcomes = run.outcomes(stopped=True)
            promoted = {each.trial.number for each in plan.halving.promoted(outcomes)}
            ended += [each for each in outcomes if each.trial.number not in promoted]
            run.select([slot for slot, trial in enumerate(run.trials) if trial.number in promoted])
        # Saved first: where the callback interrupts the sweep, the step is on disk.
        if save is not None and run.step < plan.steps:
            save(run, ended)
        if callback is not None:
            callback(run, ended)
    ended += run.outcomes()
    run.save_adapters()
    order = {trial.number: index for index, trial in enumerate(trials)}
    return sorted(ended, key=lambda each: order[each.trial.number])


def train_alone(plan: Plan, trial: Trial) -> Outcome:
    """Train one trial by itself with torch's own optimizer; `train_together` has the same results up to rounding."""
    setting, task = plan.setting(trial.hyperparameters), plan.task
    (shard,) = task.shards(1, seed=plan.seed)
    with torch.device("cpu"):  # where the batches are
        model = task.model(setting.model_size, seed=plan.seed)
    if plan.adapting is not None:
        # PEFT's own model with the same initial adapter.
        model = plan.adapting.array(model, [setting]).extract(0)
    optimizer = torch_optimizer(model, setting)
    for step in range(plan.steps):
        batch = task.batch(shard, step, batch_size=setting.batch_size, seed=plan.seed, rank=0)
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.param_groups[0]["lr"] = setting.lr * plan.lr_factor(step)
        optimizer.step()
    found = task.evaluate(model, limit=plan.eval_limit)
    return Outcome(trial, found.loss, found.metric, plan.steps)
