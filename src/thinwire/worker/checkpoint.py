"""Checkpoints: safetensors and JSON, written atomically, read back bit for bit.

A checkpoint is a folder `step-NNNNNNNN` with one `RankFile` per rank. Every rank first writes its file to disk under a
temporary name; when all have done so, each renames its own. A checkpoint is complete when every rank's file has its
name. Ranks need not share a disk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.comm.work import completed
from thinwire.errors import CheckpointError, NonFiniteError
from thinwire.replica.shards import local, rewrap_, unwrap_dtensors
from thinwire.storage.rank_file import RankFile
from thinwire.strategies.recipe import brief
from thinwire.worker.handshake import describe_tensor, gather_texts
from thinwire.worker.state import WorkerState

T = TypeVar("T")
_FOLDER = re.compile(r"step-(\d{8,})")


def state_of(worker: WorkerState) -> dict[str, Any]:
    """The whole state of one rank, as nested dicts of tensors and JSON values."""
    worker.wait_pending()
    worker.shards.read()
    return {
        "identity": _identity(worker),
        "replicas": [
            {
                "x": replica.x.detach().clone(),
                "step": replica.step,
                "state": {name: x.clone() for name, x in replica.state.items()},
                # Saved as what was received: the resumed run collects it as if it had just arrived.
                "inflight": {name: [x.clone() for x in work.wait()] for name, work in replica.inflight.items()},
            }
            for replica in worker.replicas
        ],
        "others": {name: x.clone() for name, x in _others(worker).items()},
        "optimizer": deepcopy(unwrap_dtensors(worker.optimizer.state_dict())),
    }


def restore(worker: WorkerState, state: Mapping[str, Any]) -> None:
    """Restore what `state_of` returned; one of another run is refused before anything is changed."""
    _check_identity(worker, state)
    worker.wait_pending()
    with torch.no_grad():
        for replica, saved in zip(worker.replicas, state["replicas"], strict=True):
            fresh = dict(replica.state)
            replica.x.copy_(saved["x"])
            replica.step = saved["step"]
            states = {
                name: x.clone().to(_device_for(fresh.get(name), x, replica.x)) for name, x in saved["state"].items()
            }
            received = {
                name: completed([x.clone().to(replica.x.device) for x in tensors])
                for name, tensors in saved["inflight"].items()
            }
            # In place, because parts of the replica are views of these mappings; and in one call, because a message of
            # a rank that trains already may be handled meanwhile.
            for mapping, new in ((replica.state, states), (replica.inflight, received)):
                mapping.update(new)
                for name in mapping.keys() - new.keys():
                    del mapping[name]
        worker.shards.write()
        for name, x in _others(worker).items():
            x.copy_(state["others"][name])
    # Optimizers keep the tensors they are given and change them in place; the caller's state must stay as it is.
    worker.optimizer.load_state_dict(deepcopy(state["optimizer"]))
    rewrap_(worker.optimizer)
    worker.comm.step = worker.step


def _others(worker: WorkerState) -> dict[str, Tensor]:
    """The model's buffers, and the parameters that the optimizer does not update, by name."""
    flat = {id(p) for parameters, _ in worker.layouts for p in parameters}
    parameters = {name: local(p.detach()) for name, p in worker.model.named_parameters() if id(p) not in flat}
    return parameters | {name: buffer.detach() for name, buffer in worker.model.named_buffers()}


def _device_for(fresh: Tensor | None, saved: Tensor, x: Tensor) -> torch.device:
    """The device on which a strategy allocates this state tensor, which may be the CPU; else that of the parameters."""
    return fresh.device if fresh is not None and fresh.shape == saved.shape else x.device


def _identity(worker: WorkerState) -> dict[str, str]:
    """What must be equal in a checkpoint and in the run that loads it."""
    groups = [len(group["params"]) for group in worker.optimizer.param_groups]
    return {
        "the strategy": brief(worker.strategy),
        "the number of workers": str(worker.comm.size),
        "the rank": str(worker.comm.rank),
        "the seed": str(worker.seed),
        "the optimizer": f"{type(worker.optimizer).__name__} over groups of {groups} parameters",
        **{
            f"parameter {segment.name}": describe_tensor(parameter)
            for parameters, segments in worker.layouts
            for parameter, segment in zip(parameters, segments, strict=True)
        },
        **{f"{name}, which is not trained,": describe_tensor(x) for name, x in _others(worker).items()},
    }


def _check_identity(worker: WorkerState, state: Mapping[str, Any]) -> None:
    ours, theirs = _identity(worker), state["identity"]
    for name in {**ours, **theirs}:
        if name not in theirs or name not in ours:
            raise CheckpointError(f"{name} is in the {'checkpoint' if name in theirs else 'run'} only")
        if ours[name] != theirs[name]:
            raise CheckpointError(f"{name} is {theirs[name]} in the checkpoint and {ours[name]} in this run")


def save(worker: WorkerState, folder: Path, extra: dict[str, Any], *, keep: int = 3) -> Path:
    """Write a checkpoint of all ranks; keep the newest `keep` checkpoints."""
    content = {"state": state_of(worker), "extra": extra, "random": _random_state()}
    _refuse_non_finite(worker)
    file = RankFile(folder / f"step-{worker.step:08d}", worker.comm.rank)
    write_together(worker, file, content, keep=keep)
    return file.home


def write_together(worker: WorkerState, file: RankFile, content: dict[str, Any], *, keep: int) -> None:
    """Write every rank's file, then commit all of them; keep the newest `keep` steps."""
    try:
        # Two phases: no rank renames its file before all ranks have theirs on disk, so a full disk or a killed writer
        # leaves the previous checkpoint the newest one on every rank.
        aside = together(worker, file.home, lambda: file.stage(content))
        together(worker, file.home, lambda: file.commit(aside))
    finally:
        # A file that cannot be removed is no reason to fail; the next call tries again.
        with suppress(OSError, ValueError, LookupError):
            file.remove_stale()
            complete = whole_steps(file.home.parent, file.rank)
            for step, home in _steps(file.home.parent):
                if step < min(complete[-keep:], default=0):
                    RankFile(home, file.rank).remove()


def load(worker: WorkerState, folder: Path) -> dict[str, Any]:
    """Restore the newest checkpoint that is complete on every rank."""
    comm, device = worker.comm, worker.replicas[0].x.device
    mine = whole_steps(folder, comm.rank)
    # Without a shared disk, ranks may see different steps.
    everyone = [set(json.loads(row)) for row in gather_texts(comm, json.dumps(mine).encode(), device)]
    common = set.intersection(*everyone)
    if not common:
        lacking = [rank for rank, steps in enumerate(everyone) if not steps] or list(range(comm.size))
        raise CheckpointError(f"{folder} holds no whole checkpoint for ranks {lacking}; look for step-* folders")
    file = RankFile(folder / f"step-{max(common):08d}", comm.rank)

    def read() -> dict[str, Any]:
        content = file.read()
        _check_identity(worker, content["state"])
        return content

    # Checked on all ranks before any of them restores: a refusal changes nothing anywhere.
    content = together(worker, file.home, read)
    restore(worker, content["state"])
    _restore_random_state(content["random"])
    return content["extra"]


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints in a folder, complete or not, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((int(m[1]), path) for path in folder.iterdir() if (m := _FOLDER.fullmatch(path.name)))


def whole_steps(folder: Path, rank: int) -> list[int]:
    """Steps of which this rank's file was committed, oldest first."""
    return [step for step, home in _steps(folder) if RankFile(home, rank).path.exists()]


def together(worker: WorkerState, home: Path, work: Callable[[], T]) -> T:
    """Do `work` on every rank and return this rank's result; an error on any rank is raised on all of them.

    Raises:
        CheckpointError: naming the rank, and the first error where several failed.
    """
    rank, results, problem = worker.comm.rank, list[T](), ""
    try:
        results.append(work())
    except (OSError, CheckpointError) as error:
        place = "" if str(home) in str(error) else f"{home}: "
        problem = f"rank {rank}: {place}{error}"
    texts = gather_texts(worker.comm, problem.encode(), worker.replicas[0].x.device)
    first = next((text.decode() for text in texts if text), None)
    if first:
        raise CheckpointError(first)
    return results[0]


def _refuse_non_finite(worker: WorkerState) -> None:
    bad = [
        segment.name
        for replica, (_, segments) in zip(worker.replicas, worker.layouts, strict=True)
        if not torch.isfinite(replica.x).all()
        for segment in segments
        if not torch.isfinite(segment.of(replica.x)).all()
    ]
    device = worker.replicas[0].x.device
    # Shared, so that all ranks refuse together: one that went on to write would wait for this one.
    everyone = [json.loads(row) for row in gather_texts(worker.comm, json.dumps(bad).encode(), device)]
    for rank, names in enumerate(everyone):
        if names:
            raise NonFiniteError(f"rank {rank}: parameter {names[0]} is not finite; the last good checkpoint is kept")


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
