# SPDX-License-Identifier: Apache-2.0
"""Save an array to disk as tensors and JSON, atomically, and continue from it bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor
from torch.optim.lr_scheduler import MultiStepLR

from thinwire.arrays.fusion.model_array import ModelArray
from thinwire.arrays.fusion.optimizers.base import FusedOptimizer
from thinwire.arrays.fusion.scaling import GradScaler
from thinwire.arrays.fusion.schedules import Scheduler, Schedules
from thinwire.arrays.fusion.store import Selection, is_shared, overwrite_, owner_of
from thinwire.core.storage.files import local_path
from thinwire.core.storage.rank_file import RankFile
from thinwire.core.torch_internals import inner_schedulers
from thinwire.errors import CheckpointError, ConfigError

State = dict[str, Any]
_WORKER = "Use save() and load() of the worker"
# The keys of `state_of`.
_KEYS = (
    *("identity", "models", "training", "rates", "generators", "random", "schedules", "scaler"),
    *("tensors", "optimizer"),
)


class Parts(TypedDict, total=False):
    """The optimizer, schedules and scaler that are saved and loaded with an array."""

    optimizer: FusedOptimizer | None
    schedules: Schedules | None
    scaler: GradScaler | None


def save(
    folder: str | Path, array: ModelArray, *, extra: Mapping[str, Any] | None = None, **parts: Unpack[Parts]
) -> Path:
    """Save an array, and replace an earlier checkpoint in the folder atomically.

    Args:
        folder: for this checkpoint alone.
        array: its tensors, dropout rates and generators are saved, and torch's own generator.
        extra: anything else, as dicts of tensors and JSON values.
        parts: `optimizer`, `schedules` and `scaler` that train the array.

    Raises:
        CheckpointError: something is neither a tensor nor JSON, such as a scheduler's function.
        OSError: writing failed; the earlier checkpoint is unchanged.

    Example:
        >>> import tempfile, torch
        >>> from thinwire.arrays.fusion import checkpoints, fuse
        >>> folder, array = tempfile.TemporaryDirectory(), fuse([torch.nn.Linear(2, 1) for _ in range(3)])
        >>> _ = checkpoints.save(folder.name, array, extra={"step": 7})
        >>> other = fuse([torch.nn.Linear(2, 1) for _ in range(2)])
        >>> checkpoints.load(folder.name, other), other.size
        ({'step': 7}, 3)
        >>> folder.cleanup()
    """
    return write(folder, {"array": state_of(array, **parts), "extra": dict(extra or {})})


def load(folder: str | Path, array: ModelArray, **parts: Unpack[Parts]) -> State:
    """Load what `save` wrote, to continue bit for bit; returns the `extra` that was saved.

    The array must be of the same models, in any number: it is resized to the one that was saved. Optimizer, schedules
    and scaler must be passed if they were saved, and made alike; schedules with the factory of each slot's model at the
    time of saving.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it belongs to other models: it names the first
            difference, and nothing was changed.
    """
    content = read(folder)
    if "array" not in content:
        raise CheckpointError(f"{folder}: holds no array. Give the folder of one")
    restore(content["array"], array, **parts)
    return content["extra"]


def write(folder: str | Path, content: State) -> Path:
    """Write a tree of tensors and JSON values atomically; returns the folder.

    Raises:
        CheckpointError: something in it is neither.
        OSError: writing failed.
    """
    part = RankFile(local_path(folder), 0)
    # The old checkpoint is removed only after the new one is complete.
    part.commit(part.stage(content))
    part.remove_stale()
    return part.home


def read(folder: str | Path) -> State:
    """Read what `write` wrote.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    found: State = RankFile(local_path(folder), 0).read()
    return found


# -- state of an array -------------------------------------------------------------------------------------------------


def state_of(array: ModelArray, **parts: Unpack[Parts]) -> State:
    """Return everything that an array needs to continue bit for bit, as tensors and JSON values."""
    array.refuse_attached("a checkpoint", _WORKER)
    optimizer, schedules, scaler = parts.get("optimizer"), parts.get("schedules"), parts.get("scaler")
    random: dict[str, Tensor] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        random["cuda"] = torch.cuda.get_rng_state(_gpu_of(array))
    return {
        "identity": _identity(array, parts),
        "models": array.size,
        "training": array.training,
        "rates": {name: list(values) for name, values in array.dropout_rates().items()},
        "generators": [each.get_state() for each in array.generators or ()],
        "random": random,
        "schedules": None if schedules is None else [_scheduler_state(each) for each in schedules.schedulers],
        "scaler": None if scaler is None else scaler.state_dict(),
        "tensors": {name: tensor.detach().clone() for name, tensor in _named(array)},
        "optimizer": None if optimizer is None else deepcopy(optimizer.state_dict()),
    }


def restore(state: Mapping[str, Any], array: ModelArray, **parts: Unpack[Parts]) -> None:
    """Load what `state_of` returned; refuse the state of other models before changing anything.

    Raises:
        CheckpointError: it names the first difference.
    """
    array.refuse_attached("a checkpoint", _WORKER)
    check(state, array, **parts)
    if state["models"] != array.size:
        # The selected models only give the shapes: all their tensors are overwritten below.
        select_parts(array.select([min(slot, array.size - 1) for slot in range(state["models"])]), **parts)
    with torch.no_grad():
        for name, tensor in _named(array):
            overwrite_(tensor, state["tensors"][name])
    optimizer, schedules, scaler = parts.get("optimizer"), parts.get("schedules"), parts.get("scaler")
    if optimizer is not None:
        optimizer.load_state_dict(deepcopy(state["optimizer"]))
    for name, values in state["rates"].items():
        array.set_dropout_rates(name, values)
    if array.training != state["training"]:
        # Not otherwise: layers that are kept in evaluation mode while others train stay in it.
        array.train(state["training"])
    if schedules is not None:
        for scheduler, saved in zip(schedules.schedulers, state["schedules"], strict=True):
            _load_scheduler(scheduler, saved["state"])
            # Some schedulers keep values in the groups, such as `initial_lr` and `max_lr`.
            for group, values in zip(scheduler.optimizer.param_groups, saved["groups"], strict=True):
                group.update(values)
    if scaler is not None:
        scaler.load_state_dict(state["scaler"])
    for generator, saved in zip(array.generators or (), state["generators"], strict=True):
        generator.set_state(saved.cpu())
    torch.set_rng_state(state["random"]["cpu"])
    if "cuda" in state["random"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["random"]["cuda"], _gpu_of(array))


def select_parts(kept: Selection, **parts: Unpack[Parts]) -> None:
    """Follow `select` of the array."""
    for part in (parts.get("optimizer"), parts.get("schedules"), parts.get("scaler")):
        if part is not None:
            part.select(kept)


def _gpu_of(array: ModelArray) -> torch.device:
    """Return the GPU that the models draw on, which need not be the current one; that one where they are on the CPU."""
    device = next((p.device for p in array.parameters()), torch.device("cuda"))
    return device if device.type == "cuda" else torch.device("cuda")


def check(state: Mapping[str, Any], array: ModelArray, **parts: Unpack[Parts]) -> None:
    """Refuse the state of other models, or of another optimizer, schedules or scaler.

    Raises:
        CheckpointError: it names the first difference.
    """
    _refuse_older(state, _KEYS)
    models = state["models"]
    if models != array.size and any(owner_of(p) is not None and not is_shared(p) for p in array.parameters()):
        raise CheckpointError(
            f"{models} models in the checkpoint and {array.size} here, and their layers differ. Fuse the models that "
            "are left"
        )
    ours, theirs = _identity(array, parts), state["identity"]
    for name in {**ours, **theirs}:
        if name not in theirs or name not in ours:
            raise CheckpointError(f"{name} is in the {'checkpoint' if name in theirs else 'array'} only")
        if ours[name] != theirs[name]:
            raise CheckpointError(f"{name}: {theirs[name]} in the checkpoint and {ours[name]} here. Make them equal")
    schedules = parts.get("schedules")
    kinds = [] if schedules is None else [type(each).__name__ for each in schedules.schedulers]
    for slot in range(models if schedules is not None else 0):
        # A checkpoint of more models than here continues with copies of the last one.
        saved, here = state["schedules"][slot]["kind"], kinds[min(slot, array.size - 1)]
        if saved != here:
            raise CheckpointError(
                f"slot {slot} has a {saved} in the checkpoint and a {here} here. Give Schedules the factory that made "
                f"the {saved}"
            )


def _refuse_older(found: Mapping[str, Any], wanted: Iterable[str]) -> None:
    """Refuse what a version of thinwire wrote that saved fewer parts.

    Raises:
        CheckpointError: it names the missing part.
    """
    missing = [name for name in wanted if name not in found]
    if missing:
        raise CheckpointError(
            f"the checkpoint has no {missing[0]!r}: another version of thinwire wrote it. Continue with that version, "
            "or start again"
        )


def _identity(array: ModelArray, parts: Parts) -> dict[str, str]:
    """Describe what a checkpoint and an array must have in common; the number of models may differ."""
    for name in parts:
        if name not in Parts.__optional_keys__:
            raise ConfigError(f"{name}: an array is saved with its optimizer, schedules and scaler. Leave {name} out")
    generators, optimizer, described = array.generators, parts.get("optimizer"), "none"
    if optimizer is not None:
        counts = [sum(owner_of(p) is None for p in group["params"]) for group in optimizer.param_groups]
        described = f"{type(optimizer).__name__} over groups of {counts} parameters"
    found = {
        "the generator of each model": "none" if generators is None else generators[0].device.type,
        "the optimizer": described,
        "the schedules": "none" if parts.get("schedules") is None else "one for each model",
        "the scaler": "none" if parts.get("scaler") is None else "one for each model",
    }
    for name, tensor in _named(array):
        kind, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape[1:])
        if is_shared(tensor):
            described = f"{kind}{list(tensor.shape)}, shared by all models"
        else:
            described = f"{kind}{shape}" if owner_of(tensor) is None else f"{kind}{shape}, of this model alone"
        found[f"tensor {name}"] = described
    return found


def _named(array: ModelArray) -> Iterator[tuple[str, Tensor]]:
    yield from array.named_parameters()
    yield from array.named_buffers()


def _scheduler_state(scheduler: Scheduler) -> State:
    groups = [
        {name: value for name, value in group.items() if name != "params"} for group in scheduler.optimizer.param_groups
    ]
    return {"kind": type(scheduler).__name__, "state": deepcopy(scheduler.state_dict()), "groups": groups}


def _load_scheduler(scheduler: Scheduler, state: Mapping[str, Any]) -> None:
    """Load a scheduler's `state_dict`, also after JSON has turned a `Counter` into a dict."""
    scheduler.load_state_dict(deepcopy(dict(state)))
    for each in (scheduler, *inner_schedulers(scheduler)):
        if isinstance(each, MultiStepLR):
            each.milestones = Counter(each.milestones)
