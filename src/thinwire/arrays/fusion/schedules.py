# SPDX-License-Identifier: Apache-2.0
"""Schedule every model's hyperparameters by a scheduler of torch of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from thinwire.arrays.fusion.optimizers.base import FusedOptimizer
from thinwire.arrays.fusion.recording import RECORDER
from thinwire.arrays.fusion.store import Selection
from thinwire.errors import ConfigError

Scheduler = LRScheduler | ReduceLROnPlateau
Factory = Callable[[Optimizer], Scheduler]


class Schedules:
    """One scheduler of torch per model, each attached to a proxy optimizer that has a single number per group.

    What a scheduler changes (learning rate, momentum, betas) is copied into its model's slot; edits of the slot are
    copied to the proxy before the next step.

    Args:
        optimizer: of the array.
        factories: make a scheduler for an optimizer; one for all models, or one per model.

    Raises:
        ConfigError: not one per model.

    Example:
        >>> import torch
        >>> from thinwire.arrays.fusion import SGD, Schedules, fuse
        >>> array = fuse([torch.nn.Linear(1, 1) for _ in range(2)])
        >>> optimizer = SGD(array.parameters(), lr=[0.5, 1.0])
        >>> schedules = Schedules(optimizer, lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.5))
        >>> schedules.step()
        >>> optimizer.param_groups[0]["lr"].tolist()
        [0.25, 0.5]
    """

    def __init__(self, optimizer: FusedOptimizer, factories: Factory | Sequence[Factory]) -> None:
        every = list(factories) if isinstance(factories, Sequence) else [factories] * optimizer.models
        if len(every) != optimizer.models:
            raise ConfigError(
                f"factories of length {len(every)}: one for all, or one for each of {optimizer.models} models"
            )
        self.optimizer = optimizer
        self._proxies = [optimizer.alone(model) for model in range(optimizer.models)]
        self.schedulers = [factory(proxy) for factory, proxy in zip(every, self._proxies, strict=True)]
        for model in range(optimizer.models):
            self._copy_from_proxy(model)

    def step(self, metrics: Sequence[float] | torch.Tensor | None = None) -> None:
        """Step the schedulers of all active models; call it after the optimizer's step.

        Args:
            metrics: one per model, for `ReduceLROnPlateau`.

        Raises:
            ConfigError: there is not one metric per model, a scheduler needs one, or a captured step calls this.
        """
        if RECORDER.get() is not None:
            raise ConfigError(
                "the captured step calls schedules.step(): a replay runs no Python. Step the schedules between replays"
            )
        values = (
            None if metrics is None else torch.as_tensor(metrics, dtype=torch.float64, device="cpu").detach().tolist()
        )
        if values is not None and len(values) != len(self.schedulers):
            raise ConfigError(f"metrics of length {len(values)}: there are {len(self.schedulers)} models")
        for model, scheduler in enumerate(self.schedulers):
            if not bool(self.optimizer.active[model]):
                continue
            self._copy_to_proxy(model)
            # Schedulers warn if their optimizer has not stepped.
            self._proxies[model].step()
            if not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()
            elif values is None:
                raise ConfigError(f"model {model} has a ReduceLROnPlateau: pass one metric per model to step()")
            else:
                scheduler.step(values[model])
            self._copy_from_proxy(model)

    def _copy_to_proxy(self, model: int) -> None:
        for group, proxy in self._groups(model):
            for name in self.optimizer.ranges:
                value = float(group[name][model])
                if name in ("beta1", "beta2") and "betas" in proxy:
                    first, second = proxy["betas"]
                    proxy["betas"] = (value, second) if name == "beta1" else (first, value)
                elif name in proxy and name != "nesterov":  # a bool in torch, and no scheduler changes it
                    proxy[name] = value

    def _copy_from_proxy(self, model: int) -> None:
        for group, proxy in self._groups(model):
            for name in self.optimizer.ranges:
                if name in ("beta1", "beta2") and "betas" in proxy:
                    group[name][model] = proxy["betas"][int(name[-1]) - 1]
                elif name in proxy:
                    group[name][model] = float(proxy[name])

    def _groups(self, model: int) -> Any:
        return zip(self.optimizer.param_groups, self._proxies[model].param_groups, strict=True)

    def extract(self, index: int) -> dict[str, Any]:
        """Return the `state_dict` of one model's scheduler."""
        return copy.deepcopy(self.schedulers[index].state_dict())

    def insert(self, index: int, scheduler: Factory | dict[str, Any]) -> None:
        """Put another scheduler into a slot, or load the state of one of the same class.

        Args:
            index: the slot.
            scheduler: a factory, or what `extract` returned.
        """
        if isinstance(scheduler, dict):
            self.schedulers[index].load_state_dict(copy.deepcopy(scheduler))
            return
        self._proxies[index] = self.optimizer.alone(index)
        self.schedulers[index] = scheduler(self._proxies[index])
        self._copy_from_proxy(index)

    def select(self, kept: Selection) -> None:
        """Follow `FusedArray.select` and the optimizer's."""
        pairs = [(self._proxies[index], self.schedulers[index]) for index in kept.indices]
        # A model that was copied has two schedulers from now on; each is copied together with its proxy.
        pairs = [copy.deepcopy(pair) if pair in pairs[:slot] else pair for slot, pair in enumerate(pairs)]
        self._proxies = [proxy for proxy, _ in pairs]
        self.schedulers = [scheduler for _, scheduler in pairs]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all schedulers."""
        return {"schedulers": [self.extract(model) for model in range(len(self.schedulers))]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ConfigError: it has another number of models.
        """
        every = state_dict["schedulers"]
        if len(every) != len(self.schedulers):
            raise ConfigError(f"the state is of {len(every)} schedulers, and there are {len(self.schedulers)}")
        for model, state in enumerate(every):
            self.insert(model, state)
