"""An array on disk: tensors and JSON, written whole or not at all, read back bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import MultiStepLR

from thinwire.errors import CheckpointError
from thinwire.fusion.array import FusedArray
from thinwire.fusion.optimizers.base import FusedOptimizer
from thinwire.fusion.scaling import GradScaler
from thinwire.fusion.schedules import Scheduler, Schedules
from thinwire.fusion.store import owner_of
from thinwire.storage.rank_file import RankFile

State = dict[str, Any]
# What an outline has.
_PARTS = ("identity", "models", "training", "rates", "generators", "random", "schedules", "scaler")


def save(
    folder: str | Path,
    array: FusedArray,
    *,
    optimizer: FusedOptimizer | None = None,
    schedules: Schedules | None = None,
    scaler: GradScaler | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write an array as it is now, in place of what was saved there; whole or not at all.

    Args:
        folder: of this checkpoint alone.
        array: its tensors, dropout rates and generators, and torch's own generator.
        optimizer: of the array: states, ages, hyperparameters and which slots are active.
        schedules: of the optimizer.
        scaler: of the losses.
        extra: more to keep: dicts of tensors and JSON values.

    Raises:
        CheckpointError: there is something that is neither a tensor nor JSON, such as a schedule's own function.
        OSError: the disk refused; what was saved before is still there.
    """
    state = state_of(array, optimizer=optimizer, schedules=schedules, scaler=scaler)
    return write(folder, {"array": state, "extra": dict(extra or {})})


def load(
    folder: str | Path,
    array: FusedArray,
    *,
    optimizer: FusedOptimizer | None = None,
    schedules: Schedules | None = None,
    scaler: GradScaler | None = None,
) -> State:
    """Go on from `save`, bit for bit; returns the `extra` that was kept.

    The array must be of the same models, in any number: it is made as large as the one that was saved. Optimizer,
    schedules and scaler must be given where they were saved, and be made like them; schedules with what is in the slots
    now.

    Raises:
        CheckpointError: there is none, it is damaged, or it belongs to other models: it names the first difference,
            and nothing was touched.
    """
    content = read(folder)
    if "array" not in content:
        raise CheckpointError(f"{folder}: holds one model and no array; use load_member")
    restore(content["array"], array, optimizer=optimizer, schedules=schedules, scaler=scaler)
    return content["extra"]


def write(folder: str | Path, content: State) -> Path:
    """Write a tree of tensors and JSON values in place of what is there; returns the folder.

    Raises:
        CheckpointError: there is something else in it.
        OSError: the disk refused.
    """
    part = RankFile(Path(folder), 0)
    part.commit(part.stage(content))
    part.remove_stale()
    return part.home


def read(folder: str | Path) -> State:
    """What `write` was given.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    found: State = RankFile(Path(folder), 0).read()
    return found


# -- all models --------------------------------------------------------------------------------------------------------


def state_of(
    array: FusedArray,
    *,
    optimizer: FusedOptimizer | None = None,
    schedules: Schedules | None = None,
    scaler: GradScaler | None = None,
) -> State:
    """Everything that an array would need to go on as if it had never stopped: tensors and JSON values."""
    return {
        **outline_of(array, optimizer=optimizer, schedules=schedules, scaler=scaler),
        "tensors": {name: tensor.detach().clone() for name, tensor in _named(array)},
        "optimizer": None if optimizer is None else deepcopy(optimizer.state_dict()),
    }


def outline_of(
    array: FusedArray,
    *,
    optimizer: FusedOptimizer | None = None,
    schedules: Schedules | None = None,
    scaler: GradScaler | None = None,
) -> State:
    """What `state_of` says of an array besides its tensors and what the optimizer remembers."""
    random: dict[str, Tensor] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        random["cuda"] = torch.cuda.get_rng_state()
    return {
        "identity": _identity(array, optimizer, schedules, scaler),
        "models": array.size,
        "training": array.training,
        "rates": {name: list(values) for name, values in array.dropout_rates().items()},
        "generators": [each.get_state() for each in array.generators or ()],
        "random": random,
        "schedules": None if schedules is None else [_of_scheduler(each) for each in schedules.schedulers],
        "scaler": None if scaler is None else scaler.state_dict(),
    }


def restore(
    state: Mapping[str, Any],
    array: FusedArray,
    *,
    optimizer: FusedOptimizer | None = None,
    schedules: Schedules | None = None,
    scaler: GradScaler | None = None,
) -> None:
    """Put `state_of` back; refuse one that belongs elsewhere before touching anything.

    Raises:
        CheckpointError: naming the first difference.
    """
    refuse_older(state, (*_PARTS, "tensors", "optimizer"))
    check(state, array, optimizer=optimizer, schedules=schedules, scaler=scaler)
    _make_as_large(state, array, optimizer, schedules, scaler)
    with torch.no_grad():
        for name, tensor in _named(array):
            tensor.copy_(state["tensors"][name])
    if optimizer is not None:
        optimizer.load_state_dict(deepcopy(state["optimizer"]))
        part_ages(optimizer)
    restore_outline(state, array, schedules=schedules, scaler=scaler)


def restore_outline(
    outline: Mapping[str, Any],
    array: FusedArray,
    *,
    schedules: Schedules | None = None,
    scaler: GradScaler | None = None,
    random: bool = True,
) -> None:
    """Put `outline_of` back into an array of as many models, after its optimizer's state.

    Args:
        outline: of an array that `check` found to be alike.
        array: its modes, dropout rates and generators.
        schedules: of the optimizer.
        scaler: of the losses.
        random: False lets generators be, the models' and torch's own.
    """
    for name, values in outline["rates"].items():
        array.set_dropout_rates(name, values)
    array.train(outline["training"])
    if schedules is not None:
        for scheduler, saved in zip(schedules.schedulers, outline["schedules"], strict=True):
            _into_scheduler(scheduler, saved)
    if scaler is not None:
        scaler.load_state_dict(outline["scaler"])
    if not random:
        return
    for generator, saved in zip(array.generators or (), outline["generators"], strict=True):
        generator.set_state(saved.cpu())
    torch.set_rng_state(outline["random"]["cpu"])
    if "cuda" in outline["random"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(outline["random"]["cuda"])


def check(
    outline: Mapping[str, Any],
    array: FusedArray,
    *,
    optimizer: FusedOptimizer | None = None,
    schedules: Schedules | None = None,
    scaler: GradScaler | None = None,
) -> None:
    """Refuse what was saved of other models, or with other things that train them.

    Raises:
        CheckpointError: naming the first difference.
    """
    refuse_older(outline, _PARTS)
    models = outline["models"]
    if models != array.size and any(owner_of(parameter) is not None for parameter in array.parameters()):
        raise CheckpointError(
            f"{models} models in the checkpoint and {array.size} here, and layers differ between them; fuse the models "
            "that are left"
        )
    _refuse_stranger(outline, _identity(array, optimizer, schedules, scaler))
    kinds = [] if schedules is None else [type(each).__name__ for each in schedules.schedulers]
    places = [min(slot, array.size - 1) for slot in range(models)]
    for slot, place in enumerate(places if schedules is not None else ()):
        saved = outline["schedules"][slot]["kind"]
        if saved != kinds[place]:
            raise CheckpointError(
                f"slot {slot} has a {saved} in the checkpoint and a {kinds[place]} here; make Schedules with a factory "
                "for each slot as it is now"
            )


def refuse_older(found: Mapping[str, Any], wanted: Iterable[str]) -> None:
    """Refuse what another version of thinwire wrote, which kept less.

    Raises:
        CheckpointError: naming what is missing.
    """
    missing = [name for name in wanted if name not in found]
    if missing:
        raise CheckpointError(
            f"the checkpoint has no {missing[0]!r}: another version of thinwire wrote it; go on with that version, or "
            "begin anew"
        )


def _identity(
    array: FusedArray, optimizer: FusedOptimizer | None, schedules: Schedules | None, scaler: GradScaler | None
) -> dict[str, str]:
    """What a checkpoint and an array must have in common, one line each; the number of models is not among it."""
    generators = array.generators
    found = {
        "the generator of each model": "none" if generators is None else generators[0].device.type,
        "the optimizer": "none" if optimizer is None else _looks_of(optimizer),
        "the schedules": "none" if schedules is None else "one for each model",
        "the scaler": "none" if scaler is None else "one for each model",
    }
    for name, tensor in _named(array):
        own = "" if owner_of(tensor) is None else ", of this model alone"
        found[f"tensor {name}"] = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape[1:])}{own}"
    return found


def _looks_of(optimizer: FusedOptimizer) -> str:
    groups = [sum(owner_of(p) is None for p in group["params"]) for group in optimizer.param_groups]
    return f"{type(optimizer).__name__} over groups of {groups} parameters"


def _named(array: FusedArray) -> Iterator[tuple[str, Tensor]]:
    yield from array.named_parameters()
    yield from array.named_buffers()


def _refuse_stranger(state: Mapping[str, Any], ours: Mapping[str, str]) -> None:
    theirs = state["identity"]
    for name in {**ours, **theirs}:
        if name not in theirs or name not in ours:
            raise CheckpointError(f"{name} is in the {'checkpoint' if name in theirs else 'array'} only")
        if ours[name] != theirs[name]:
            raise CheckpointError(f"{name}: {theirs[name]} in the checkpoint and {ours[name]} here; make it alike")


def _make_as_large(
    state: Mapping[str, Any],
    array: FusedArray,
    optimizer: FusedOptimizer | None,
    schedules: Schedules | None,
    scaler: GradScaler | None,
) -> None:
    if state["models"] == array.size:
        return
    kept = array.select([min(slot, array.size - 1) for slot in range(state["models"])])
    for follower in (optimizer, schedules, scaler):
        if follower is not None:
            follower.select(kept)


def part_ages(optimizer: FusedOptimizer) -> None:
    """Groups count their own steps: no two of them may share the tensor that counts."""
    for group in optimizer.param_groups:
        own: dict[int, Tensor] = {}
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if state:
                state["step"] = own.setdefault(id(state["step"]), state["step"].clone())


def _of_scheduler(scheduler: Scheduler) -> State:
    groups = [
        {name: value for name, value in group.items() if name != "params"} for group in scheduler.optimizer.param_groups
    ]
    return {"kind": type(scheduler).__name__, "state": deepcopy(scheduler.state_dict()), "groups": groups}


def _into_scheduler(scheduler: Scheduler, saved: Mapping[str, Any]) -> None:
    load_scheduler(scheduler, saved["state"])
    for group, values in zip(scheduler.optimizer.param_groups, saved["groups"], strict=True):
        group.update(values)


def load_scheduler(scheduler: Scheduler, state: Mapping[str, Any]) -> None:
    """Put back a scheduler's own `state_dict`, from JSON too, which has no counters."""
    scheduler.load_state_dict(deepcopy(dict(state)))
    for each in (scheduler, *getattr(scheduler, "_schedulers", ())):
        if isinstance(each, MultiStepLR):
            each.milestones = Counter(each.milestones)
