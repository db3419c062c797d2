"""One model of an array on disk, as plain states of plain torch objects."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.errors import CheckpointError
from thinwire.fusion.array import FusedArray
from thinwire.fusion.checkpoints import State, load_scheduler, part_ages, read, refuse_older, write
from thinwire.fusion.optimizers.base import FusedOptimizer
from thinwire.fusion.scaling import GradScaler
from thinwire.fusion.schedules import Scheduler, Schedules
from thinwire.fusion.store import owner_of


@dataclass(frozen=True)
class Member:
    """One model of an array as it was saved: plain states of plain torch objects.

    Args:
        model: the module's `state_dict`.
        rates: its dropout rates by full name, where it has any.
        optimizer: the `state_dict` of torch's own optimizer; None where it was not saved.
        scheduler: the scheduler's `state_dict`, likewise.
        scaler: that of `torch.amp.GradScaler`, likewise.
        generator: the state of its own generator, likewise.
        extra: what else was kept.
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
        """Let a run by itself go on from here: each object given takes over its state.

        Raises:
            CheckpointError: it was not saved, or it does not fit the model or the optimizer; nothing was touched.
        """
        given = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        missing = [name for name, value in given.items() if value is not None and getattr(self, name) is None]
        if missing:
            raise CheckpointError(f"no {missing[0]} was saved with this model; leave it out, or save it too")
        _refuse_other_model(self.model, model.state_dict())
        if optimizer is not None:
            self._refuse_other_groups([len(group["params"]) for group in optimizer.param_groups])
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
        """Put the model into a slot of an array, to go on there; all others stay as they are, bitwise.

        Raises:
            ConfigError: no such slot.
            CheckpointError: something given was not saved, or the model does not fit.
        """
        model = array.extract(index)
        self.into(model)
        for name, given in (("optimizer", optimizer), ("scheduler", schedules), ("scaler", scaler)):
            if given is not None and getattr(self, name) is None:
                raise CheckpointError(f"no {name} was saved with this model; leave it out, or save it too")
        if optimizer is not None:
            own = [[p for p in group["params"] if owner_of(p) in (None, index)] for group in optimizer.param_groups]
            self._refuse_other_groups([len(parameters) for parameters in own])
        array.insert(index, model)
        if array.generators is not None and self.generator is not None:
            array.generators[index].set_state(self.generator.clone())
        if optimizer is not None and self.optimizer is not None:
            optimizer.insert(index, deepcopy(self.optimizer))
            part_ages(optimizer)
        if schedules is not None and self.scheduler is not None:
            load_scheduler(schedules.schedulers[index], self.scheduler)
        if scaler is not None and self.scaler is not None:
            scaler.insert(index, self.scaler)

    def _refuse_other_groups(self, ours: list[int]) -> None:
        theirs = [] if self.optimizer is None else [len(group["params"]) for group in self.optimizer["param_groups"]]
        if ours != theirs:
            raise CheckpointError(
                f"the optimizer has groups of {theirs} parameters in the checkpoint and of {ours} here; make it alike"
            )


def _refuse_other_model(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    looks = [{name: list(getattr(value, "shape", ())) for name, value in each.items()} for each in (theirs, ours)]
    for name in {**looks[0], **looks[1]}:
        before, now = (str(each.get(name, "not there")) for each in looks)
        if before != now:
            raise CheckpointError(
                f"the checkpoint is of another model: {name} is {before} in it and {now} here; make it alike"
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
    """One model of an array, with its own part of what trains it."""
    own = None if optimizer is None else optimizer.extract(index)
    if own is not None and schedules is not None:
        # What a scheduler keeps in the groups, such as `initial_lr`, goes with them.
        for group, stand in zip(own["param_groups"], schedules.schedulers[index].optimizer.param_groups, strict=True):
            group.update({name: value for name, value in stand.items() if name not in group})
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
    """Write one model of an array, as `save` writes all of them.

    Args:
        folder: of this checkpoint alone.
        array: the model is one of its.
        index: the slot.
        optimizer: of the array.
        schedules: of the optimizer.
        scaler: of the losses.
        extra: more to keep.

    Raises:
        ConfigError: no such slot.
        CheckpointError: there is something that is neither a tensor nor JSON.
        OSError: the disk refused; what was saved before is still there.
    """
    member = member_of(array, index, optimizer=optimizer, schedules=schedules, scaler=scaler, extra=extra)
    return write(folder, {"member": {field.name: getattr(member, field.name) for field in fields(Member)}})


def load_member(folder: str | Path) -> Member:
    """What `save_member` wrote: put it into plain torch objects by `Member.into`.

    Raises:
        CheckpointError: there is none, it is damaged, or it is of a whole array.
    """
    content = read(folder)
    if "member" not in content:
        raise CheckpointError(f"{folder}: holds an array and no single model; use load")
    names = [field.name for field in fields(Member)]
    refuse_older(content["member"], names)
    return Member(**{name: content["member"][name] for name in names})
