# SPDX-License-Identifier: Apache-2.0
"""Save one model of an array to disk, as state dicts of plain torch objects."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.arrays.fusion.array import FusedArray
from thinwire.arrays.fusion.checkpoints import State, load_scheduler, read, refuse_older, separate_step_counters, write
from thinwire.arrays.fusion.optimizers.base import FusedOptimizer
from thinwire.arrays.fusion.scaling import GradScaler
from thinwire.arrays.fusion.schedules import Scheduler, Schedules
from thinwire.arrays.fusion.store import is_of
from thinwire.errors import CheckpointError


@dataclass(frozen=True)
class Member:
    """One saved model of an array, as state dicts of plain torch objects.

    Args:
        model: the module's `state_dict`.
        rates: its dropout rates by full name.
        optimizer: the `state_dict` of torch's own optimizer; None if it was not saved.
        scheduler: the scheduler's `state_dict`, or None.
        scaler: the `state_dict` of `torch.amp.GradScaler`, or None.
        generator: the state of the model's generator, or None.
        extra: what else was saved.
    """

    model: dict[str, Tensor]
    rates: dict[str, float]
    optimizer: State | None
    scheduler: State | None
    scaler: State | None
    generator: Tensor | None
    extra: State

    def into(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Scheduler | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Load the state into plain torch objects, to continue as a separate run.

        Raises:
            CheckpointError: something given was not saved, or does not fit; nothing was changed.
        """
        # All checks come before the first load, so that an error changes nothing.
        self._check_saved(optimizer=optimizer, scheduler=scheduler, scaler=scaler)
        theirs, ours = (
            {name: str(list(getattr(value, "shape", ()))) for name, value in state.items()}
            for state in (self.model, model.state_dict())
        )
        for name in {**theirs, **ours}:
            before, now = theirs.get(name, "not there"), ours.get(name, "not there")
            if before != now:
                raise CheckpointError(
                    f"the checkpoint is of another model: {name} is {before} in it and {now} here. Make it alike"
                )
        if optimizer is not None:
            self._check_groups([len(group["params"]) for group in optimizer.param_groups])
        model.load_state_dict(self.model)
        for name, rate in self.rates.items():
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, rate)
        if optimizer is not None and self.optimizer is not None:
            optimizer.load_state_dict(deepcopy(self.optimizer))
        if scheduler is not None and self.scheduler is not None:
            load_scheduler(scheduler, self.scheduler)
        if scaler is not None and self.scaler is not None:
            scaler.load_state_dict(self.scaler)

    def into_slot(
        self,
        array: FusedArray,
        index: int,
        *,
        optimizer: FusedOptimizer | None = None,
        schedules: Schedules | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        """Load the model into a slot of an array, to continue there; all other slots are unchanged, bitwise.

        Raises:
            ConfigError: no such slot, or the optimizer has another option that all models share.
            CheckpointError: something given was not saved, or the model does not fit.
        """
        self._check_generator(array)
        model = array.extract(index)
        self.into(model)
        self._check_saved(optimizer=optimizer, scheduler=schedules, scaler=scaler)
        if optimizer is not None:
            own = [[p for p in group["params"] if is_of(p, index)] for group in optimizer.param_groups]
            self._check_groups([len(parameters) for parameters in own])
            if self.optimizer is not None:
                optimizer.check_state(index, self.optimizer)
        array.insert(index, model)
        if array.generators is not None and self.generator is not None:
            array.generators[index].set_state(self.generator.clone())
        if optimizer is not None and self.optimizer is not None:
            optimizer.insert(index, deepcopy(self.optimizer))
            separate_step_counters(optimizer)
        if schedules is not None and self.scheduler is not None:
            load_scheduler(schedules.schedulers[index], self.scheduler)
            self._load_scheduled(schedules.schedulers[index].optimizer)
        if scaler is not None and self.scaler is not None:
            scaler.insert(index, self.scaler)

    def _load_scheduled(self, proxy: Optimizer) -> None:
        """Load what some schedulers keep in the groups, such as `max_lr`: the slot has that of the model before."""
        saved = [] if self.optimizer is None else self.optimizer["param_groups"]
        # All else in the groups is the optimizer's own.
        made: Any = type(proxy)
        own = {
            name
            for group in made([torch.zeros((), dtype=torch.float32, device="cpu")], lr=0.1).param_groups
            for name in group
        }
        for group, values in zip(proxy.param_groups, saved, strict=False):
            group.update({name: value for name, value in values.items() if name not in own and name in group})

    def _check_generator(self, array: FusedArray) -> None:
        """Refuse a generator's state of another type of device: theirs differ in length."""
        if array.generators is None or self.generator is None:
            return
        theirs, ours = self.generator.numel(), array.generators[0].get_state().numel()
        if theirs != ours:
            raise CheckpointError(
                f"the model's generator has a state of {theirs} bytes in the checkpoint and of {ours} here, on "
                f"{array.generators[0].device.type}: it was saved on another type of device. Move the array there"
            )

    def _check_saved(self, **given: object) -> None:
        for name, value in given.items():
            if value is not None and getattr(self, name) is None:
                raise CheckpointError(f"no {name} was saved with this model. Leave it out, or save it too")

    def _check_groups(self, ours: list[int]) -> None:
        theirs = [] if self.optimizer is None else [len(group["params"]) for group in self.optimizer["param_groups"]]
        if ours != theirs:
            raise CheckpointError(
                f"the optimizer has groups of {theirs} parameters in the checkpoint and of {ours} here. Make it alike"
            )


def member_of(
    array: FusedArray,
    index: int,
    *,
    optimizer: FusedOptimizer | None = None,
    schedules: Schedules | None = None,
    scaler: GradScaler | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Member:
    """Return one model of an array with its part of the optimizer, the schedules and the scaler."""
    own = None if optimizer is None else optimizer.extract(index)
    if own is not None and schedules is not None:
        # Some schedulers keep values in the groups, such as `initial_lr`.
        for group, proxy in zip(own["param_groups"], schedules.schedulers[index].optimizer.param_groups, strict=True):
            group.update({name: value for name, value in proxy.items() if name not in group})
    return Member(
        model={name: tensor.detach() for name, tensor in array.extract(index).state_dict().items()},
        rates={name: values[index] for name, values in array.dropout_rates().items()},
        optimizer=own,
        scheduler=None if schedules is None else schedules.extract(index),
        scaler=None if scaler is None else scaler.extract(index),
        generator=None if array.generators is None else array.generators[index].get_state(),
        extra=dict(extra or {}),
    )


def save_member(
    folder: str | Path,
    array: FusedArray,
    index: int,
    *,
    optimizer: FusedOptimizer | None = None,
    schedules: Schedules | None = None,
    scaler: GradScaler | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Save one model of an array, and replace an earlier checkpoint in the folder atomically.

    Args:
        folder: for this checkpoint alone.
        array: that has the model.
        index: the model's slot.
        optimizer: of the array.
        schedules: of the optimizer.
        scaler: of the losses.
        extra: anything else, as dicts of tensors and JSON values.

    Raises:
        ConfigError: no such slot.
        CheckpointError: something is neither a tensor nor JSON.
        OSError: writing failed; the earlier checkpoint is unchanged.

    Example:
        >>> import tempfile, torch
        >>> from thinwire.arrays.fusion import fuse, members
        >>> folder, array = tempfile.TemporaryDirectory(), fuse([torch.nn.Linear(2, 1) for _ in range(3)])
        >>> _ = members.save_member(folder.name, array, 1)
        >>> model = torch.nn.Linear(2, 1)
        >>> members.load_member(folder.name).into(model)
        >>> torch.equal(model.weight, array.extract(1).weight)
        True
        >>> folder.cleanup()
    """
    member = member_of(array, index, optimizer=optimizer, schedules=schedules, scaler=scaler, extra=extra)
    return write(folder, {"member": {field.name: getattr(member, field.name) for field in fields(Member)}})


def load_member(folder: str | Path) -> Member:
    """Read what `save_member` wrote; load it into plain torch objects by `Member.into`.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it is of a whole array.
    """
    content = read(folder)
    if "member" not in content:
        raise CheckpointError(f"{folder}: holds an array and no single model. Use load")
    names = [field.name for field in fields(Member)]
    refuse_older(content["member"], names)
    return Member(**{name: content["member"][name] for name in names})
