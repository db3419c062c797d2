# SPDX-License-Identifier: Apache-2.0
"""The plan of a sweep, common to all trials, and the settings of one trial."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from thinwire.arrays.sweep.adapting import ADAPTED, Adapting
from thinwire.arrays.sweep.optimizers import OPTIMIZERS
from thinwire.arrays.sweep.setting import Setting
from thinwire.arrays.sweep.space import Choices, Hyperparameters, Range, Space, Value
from thinwire.arrays.sweep.trials import Halving
from thinwire.core.validation import check_ranges
from thinwire.errors import ConfigError
from thinwire.lab.tasks.base import Task


@dataclass(frozen=True)
class Plan:
    """The settings that all trials of a sweep have in common.

    Args:
        task: the task that is learned.
        steps: optimizer steps of a trial that is not stopped early.
        seed: seed of the initial parameters and of the order of data, the same for all trials.
        schedule: learning rate schedule: "constant", or "cosine" down to a tenth.
        halving: when trials are stopped early; None never stops one.
        eval_limit: number of held-out examples; None takes all.
        adapting: trains adapters of the task's model; None trains whole models.

    Raises:
        ConfigError: fewer than one step or held-out example, or a negative seed.
    """

    task: Task
    steps: int
    seed: int = 0
    schedule: Literal["constant", "cosine"] = "constant"
    halving: Halving | None = None
    eval_limit: int | None = None
    adapting: Adapting | None = None

    def __post_init__(self) -> None:
        check_ranges(
            self,
            steps=("1..", "300 is usual"),
            seed=(f"0..{2**32 - 1}", "0 is usual"),
            eval_limit=("1..", "None takes all held-out examples"),
        )

    def setting(self, hyperparameters: Hyperparameters) -> Setting:
        """Return all hyperparameters of a trial: the given ones, and the task's defaults for the others.

        Raises:
            ConfigError: a hyperparameter does not exist, or its value has the wrong type.
        """
        known = {field.name for field in fields(Setting)} - ({*ADAPTED} if self.adapting is None else set[str]())
        for name in hyperparameters:
            if name not in known:
                raise ConfigError(f"hyperparameter {name!r}: must be one of {', '.join(sorted(known))}")
        optimizer = str(hyperparameters.get("optimizer", self.task.defaults.optimizer))
        if optimizer not in OPTIMIZERS:
            raise ConfigError(f"optimizer={optimizer!r}: must be one of {', '.join(OPTIMIZERS)}")
        kind, own = OPTIMIZERS[optimizer], self.task.defaults
        # The task's defaults belong to an optimizer: another optimizer has another usual learning rate.
        known_here = next((each for each in self.task.settings if each.optimizer == optimizer), None)
        rate, decay = (kind.rate, own.weight_decay) if known_here is None else (known_here.lr, known_here.weight_decay)
        momentum = kind.hyperparameters.get("momentum", 0.0) if known_here is None else known_here.momentum
        size = str(hyperparameters.get("model_size", self.task.default_size))
        if size not in self.task.sizes:
            raise ConfigError(f"model_size={size!r}: {self.task.name} has {', '.join(self.task.sizes)}")
        # Those of other optimizers too: `check` says that they have no effect, and a wrong value is wrong anyway.
        others = {each.name: each.default for each in fields(Setting) if isinstance(each.default, float)}
        rest = {name: kind.hyperparameters.get(name, usual) for name, usual in others.items()}
        return Setting(
            lr=_number(hyperparameters, "lr", rate),
            momentum=_number(hyperparameters, "momentum", momentum),
            weight_decay=_number(hyperparameters, "weight_decay", decay),
            optimizer=optimizer,
            batch_size=_whole(hyperparameters, "batch_size", own.batch_size),
            model_size=size,
            lora_alpha=_number(hyperparameters, "lora_alpha", 16.0) if "lora_alpha" in hyperparameters else None,
            **{name: _number(hyperparameters, name, usual) for name, usual in rest.items()},
        )

    def check(self, space: Space) -> None:
        """Check a search space before anything is trained.

        Raises:
            ConfigError: a hyperparameter does not exist, has an impossible value, or has no effect because none of the
                optimizers has it.
        """
        for name in ADAPTED if self.adapting is None else ():
            if name in space.domains:
                raise ConfigError(
                    f"{name}={space.domains[name]}: belongs to a sweep over adapters. Add --adapters, or leave it out"
                )
        for name in ("rank", "adapter_seed"):
            domain = space.domains.get(name)
            if isinstance(domain, Range) and domain.scale != "whole":
                raise ConfigError(f"{name}={domain}: must be whole numbers. Use whole:2:16, or a list such as 4,8,16")
        # Settings are valid in intervals, so the ends of a range stand for all of it.
        for hyperparameters in space.extremes():
            self.setting(hyperparameters)
        if self.task.divided and "batch_size" in space.domains:
            raise ConfigError(f"batch_size={space.domains['batch_size']}: {self.task.title} has its own. Leave it out")
        sizes = space.domains.get("batch_size")
        if isinstance(sizes, Range) and sizes.scale != "whole":
            raise ConfigError(
                f"batch_size={sizes}: examples are whole, and every size needs its own array. Use a list such as "
                "16,32,64"
            )
        domain = space.domains.get("optimizer")
        used = [str(each) for each in domain.values] if isinstance(domain, Choices) else [self.task.defaults.optimizer]
        for name in space.domains:
            owners = [each for each, kind in OPTIMIZERS.items() if name in kind.hyperparameters]
            if owners and not set(owners) & set(used):
                raise ConfigError(
                    f"{name}={space.domains[name]}: {' and '.join(used)} has no such hyperparameter. Leave it out, or "
                    f"use {' or '.join(owners)}"
                )

    def lr_factor(self, step: int) -> float:
        """Return the factor of the learning rate at a step, counted from 0."""
        if self.schedule == "constant":
            return 1.0
        # From 1 at the first step to 0.1 after the last.
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
