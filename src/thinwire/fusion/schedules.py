"""Every model's learning rate by a scheduler of its own: torch's, unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from thinwire.errors import ConfigError
from thinwire.fusion.optimizers.base import FusedOptimizer
from thinwire.fusion.store import Selection

Scheduler = LRScheduler | ReduceLROnPlateau
Factory = Callable[[Optimizer], Scheduler]


class Schedules:
    """One genuine scheduler of torch per model, each on an optimizer of a single number per group.

    What a scheduler changes (learning rate, momentum, betas) is copied into that model's slot, and what was edited in
    the slot is seen by the scheduler at its next step.

    Args:
        optimizer: the array's.
        factories: makes a scheduler for an optimizer; one for all models, or one per model.

    Raises:
        ConfigError: not one per model.
    """

    def __init__(self, optimizer: FusedOptimizer, factories: Factory | Sequence[Factory]) -> None:
        every = list(factories) if isinstance(factories, Sequence) else [factories] * optimizer.models
        if len(every) != optimizer.models:
            raise ConfigError(
                f"factories of length {len(every)}: one for all, or one for each of {optimizer.models} models"
            )
        self.optimizer = optimizer
        self._stands = [self._stand_in(model) for model in range(optimizer.models)]
        self.schedulers = [factory(stand) for factory, stand in zip(every, self._stands, strict=True)]
        for model in range(optimizer.models):
            self._write(model)

    def _stand_in(self, model: int) -> Optimizer:
        """An optimizer like torch's own of one model, over one number per group."""
        groups: list[dict[str, Any]] = []
        for place, group in enumerate(self.optimizer.param_groups):
            options = self.optimizer.options(self.optimizer.hyperparameters(model, place), group)
            groups.append({**_known(options), "params": [nn.Parameter(torch.zeros(()))]})
        kind: Any = self.optimizer.genuine or torch.optim.Adam
        return kind(groups, lr=groups[0]["lr"])

    def step(self, metrics: Sequence[float] | torch.Tensor | None = None) -> None:
        """Step the schedulers of all active models, after the optimizer's step.

        Args:
            metrics: one per model, for schedulers that wait for a plateau.

        Raises:
            ConfigError: a scheduler needs its model's metric.
        """
        values = None if metrics is None else torch.as_tensor(metrics).detach().tolist()
        if values is not None and len(values) != len(self.schedulers):
            raise ConfigError(f"metrics of length {len(values)}: there are {len(self.schedulers)} models")
        for model, scheduler in enumerate(self.schedulers):
            if bool(self.optimizer.active[model]):
                self._read(model)
                self._stands[model].step()
                self._step(scheduler, None if values is None else values[model], model)
                self._write(model)

    def _step(self, scheduler: Scheduler, metric: float | None, model: int) -> None:
        if not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()
            return
        if metric is None:
            raise ConfigError(f"model {model} waits for a plateau: pass one metric per model to step()")
        scheduler.step(metric)

    def _read(self, model: int) -> None:
        for group, stand in self._groups(model):
            for name in self.optimizer.ranges:
                value = float(group[name][model])
                if name in ("beta1", "beta2") and "betas" in stand:
                    first, second = stand["betas"]
                    stand["betas"] = (value, second) if name == "beta1" else (first, value)
                elif name in stand and name != "nesterov":
                    stand[name] = value

    def _write(self, model: int) -> None:
        for group, stand in self._groups(model):
            for name in self.optimizer.ranges:
                if name in ("beta1", "beta2") and "betas" in stand:
                    group[name][model] = stand["betas"][int(name[-1]) - 1]
                elif name in stand:
                    group[name][model] = float(stand[name])

    def _groups(self, model: int) -> Any:
        return zip(self.optimizer.param_groups, self._stands[model].param_groups, strict=True)

    def extract(self, index: int) -> dict[str, Any]:
        """One model's scheduler as its own `state_dict`."""
        return copy.deepcopy(self.schedulers[index].state_dict())

    def insert(self, index: int, scheduler: Factory | dict[str, Any]) -> None:
        """Put another scheduler into a slot: a new one, or the state of one of the same kind.

        Args:
            index: the slot.
            scheduler: makes one for an optimizer; or what `extract` returned.
        """
        if isinstance(scheduler, dict):
            self.schedulers[index].load_state_dict(copy.deepcopy(scheduler))
            return
        self._stands[index] = self._stand_in(index)
        self.schedulers[index] = scheduler(self._stands[index])
        self._write(index)

    def select(self, kept: Selection) -> None:
        """Follow `FusedArray.select` and the optimizer's."""
        pairs = [(self._stands[index], self.schedulers[index]) for index in kept.indices]
        # A model that is there twice has two schedulers from now on.
        pairs = [copy.deepcopy(pair) if pair in pairs[:slot] else pair for slot, pair in enumerate(pairs)]
        self._stands = [stand for stand, _ in pairs]
        self.schedulers = [scheduler for _, scheduler in pairs]

    def state_dict(self) -> dict[str, Any]:
        """Every scheduler's."""
        return {"schedulers": [self.extract(model) for model in range(len(self.schedulers))]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            ConfigError: of another number of models.
        """
        every = state_dict["schedulers"]
        if len(every) != len(self.schedulers):
            raise ConfigError(f"the state is of {len(every)} schedulers, and there are {len(self.schedulers)}")
        for model, state in enumerate(every):
            self.insert(model, state)


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """LAMB has bounds that no optimizer of torch knows."""
    return {name: value for name, value in options.items() if not name.endswith("_trust")}
