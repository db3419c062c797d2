"""What all trials of a sweep have in common, and what a trial's hyperparameters come to."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from thinwire.errors import ConfigError
from thinwire.sweep.population import Population
from thinwire.sweep.space import Choices, Domain, Hyperparameters, Range, Space, Value
from thinwire.sweep.trials import Halving
from thinwire.tasks.base import Task

_ALONE = {"momentum": "sgd", "beta1": "adamw", "beta2": "adamw", "eps": "adamw"}


@dataclass(frozen=True)
class Setting:
    """All hyperparameters of one trial.

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
        population: when members become copies of better ones; None leaves each to itself.

    Raises:
        ConfigError: no steps or nothing to evaluate by, a negative seed, or both halving and a population.
    """

    task: Task
    steps: int
    seed: int = 0
    schedule: Literal["constant", "cosine"] = "constant"
    halving: Halving | None = None
    eval_limit: int | None = None
    population: Population | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps}: a trial needs at least 1")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed}: must not be negative; 0 is usual")
        if self.eval_limit is not None and self.eval_limit < 1:
            raise ConfigError(f"eval_limit={self.eval_limit}: at least 1 held-out example is needed; None takes all")
        if self.halving is not None and self.population is not None:
            raise ConfigError(
                f"halving={self.halving} with a population: members are copied over, not given up; keep one of the two"
            )

    def setting(self, hyperparameters: Hyperparameters) -> Setting:
        """The hyperparameters with the task's own settings for those left alone.

        Raises:
            ConfigError: there is no such hyperparameter, or its value is not of its kind.
        """
        known = {field.name for field in fields(Setting)}
        for name in hyperparameters:
            if name not in known:
                raise ConfigError(f"hyperparameter {name!r}: there are {', '.join(sorted(known))}")
        optimizer = _text(hyperparameters, "optimizer", self.task.defaults.optimizer)
        if optimizer not in ("sgd", "adamw"):
            raise ConfigError(f"optimizer={optimizer!r}: a sweep has sgd and adamw")
        usual = self.task.defaults_for(optimizer)
        size = _text(hyperparameters, "model_size", self.task.default_size)
        if size not in self.task.sizes:
            raise ConfigError(f"model_size={size!r}: {self.task.name} has {', '.join(self.task.sizes)}")
        return Setting(
            lr=_number(hyperparameters, "lr", usual.lr),
            momentum=_number(hyperparameters, "momentum", usual.momentum),
            weight_decay=_number(hyperparameters, "weight_decay", usual.weight_decay),
            optimizer=usual.optimizer,
            batch_size=_whole(hyperparameters, "batch_size", usual.batch_size),
            model_size=size,
            beta1=_number(hyperparameters, "beta1", 0.9),
            beta2=_number(hyperparameters, "beta2", 0.999),
            eps=_number(hyperparameters, "eps", 1e-8),
        )

    def check(self, space: Space) -> None:
        """Refuse a space before anything is trained.

        Raises:
            ConfigError: a hyperparameter does not exist, has a value that no trial can be made with, or does nothing
                because none of the optimizers has it.
        """
        for hyperparameters in space.corners():
            self.setting(hyperparameters)
        sizes = space.domains.get("batch_size")
        if isinstance(sizes, Range) and sizes.scale != "whole":
            raise ConfigError(
                f"batch_size={sizes}: examples are whole, and every size has arrays of its own; use a list such as "
                "16,32,64"
            )
        used = self._optimizers(space.domains.get("optimizer"))
        for name in space.domains:
            owner = _ALONE.get(name)
            if owner is not None and owner not in used:
                raise ConfigError(
                    f"{name}={space.domains[name]}: {' and '.join(used)} has no such hyperparameter; leave it out, or "
                    f"use {owner}"
                )

    def _optimizers(self, domain: Domain | None) -> list[str]:
        return [str(each) for each in domain.values] if isinstance(domain, Choices) else [self.task.defaults.optimizer]

    def factor(self, step: int) -> float:
        """What learning rates are multiplied by at a step, counted from 0."""
        if self.schedule == "constant":
            return 1.0
        return 0.55 + 0.45 * math.cos(math.pi * step / self.steps)


def _number(hyperparameters: Hyperparameters, name: str, usual: float) -> float:
    value: Value = hyperparameters.get(name, usual)
    if isinstance(value, str):
        raise ConfigError(f"{name}={value!r}: must be a number, such as {usual:g}")
    return value


def _whole(hyperparameters: Hyperparameters, name: str, usual: int) -> int:
    value = _number(hyperparameters, name, usual)
    if not math.isfinite(value) or value != int(value):
        raise ConfigError(f"{name}={value}: must be a whole number, such as {usual}")
    return int(value)


def _text(hyperparameters: Hyperparameters, name: str, usual: str) -> str:
    return str(hyperparameters.get(name, usual))
