"""Resume from a checkpoint with another number of workers.

State that was equal on all ranks is given to every new rank. State that each rank had for itself, such as residuals of
error feedback, is redistributed by the strategy, which knows what sum must be preserved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import CheckpointError
from thinwire.storage.rank_file import RankFile
from thinwire.worker import checkpoint
from thinwire.worker.handshake import gather_texts
from thinwire.worker.state import WorkerState

_SIZE, _RANK = "the number of workers", "the rank"


def saved_size(folder: Path) -> int | None:
    """How many workers wrote the newest checkpoint visible in a folder; None if there is none."""
    steps = checkpoint.whole_steps(folder, 0)
    return None if not steps else _size(_file(folder, steps[-1], 0).read())


def load(worker: WorkerState, folder: Path) -> dict[str, Any]:
    """Resume from the newest complete checkpoint, whatever number of workers wrote it; returns its `extra`.

    Raises:
        CheckpointError: as `Worker.load`, and as `load_resized` where the number is another.
    """
    device = worker.replicas[0].x.device
    seen = gather_texts(worker.comm, json.dumps(saved_size(folder)).encode(), device)
    sizes = {json.loads(row) for row in seen}
    if sizes & {None, worker.comm.size}:
        return checkpoint.load(worker, worker.own_folder(folder))
    return load_resized(worker, folder)


def load_resized(worker: WorkerState, folder: Path) -> dict[str, Any]:
    """Restore the newest complete checkpoint, whatever number of workers wrote it, and return its `extra`.

    Parameters must have been equal on all ranks, as they are where gradients or momenta are exchanged at every step;
    buffers become the mean over ranks. The state of torch's random generators is not restored, and data are divided
    among the new number of workers. Every rank must see every rank's file.

    Args:
        worker: of the run that resumes.
        folder: of checkpoints, as for `Worker.save`.

    Raises:
        CheckpointError: there is no such step, a file is damaged or belongs to another run, workers had different
            parameters, or the strategy cannot redistribute its state.
    """
    step = _newest_common_step(worker, folder)
    first = _file(folder, step, 0).read()
    contents = [first, *(_file(folder, step, rank).read() for rank in range(1, _size(first)))]
    checkpoint.restore(worker, resized([content["state"] for content in contents], worker))
    # A rank that existed before gets its own extra back; a new one gets rank 0's.
    return {**first["extra"], **(contents[worker.comm.rank]["extra"] if worker.comm.rank < len(contents) else {})}


def resized(states: Sequence[Mapping[str, Any]], worker: WorkerState) -> dict[str, Any]:
    """This rank's state for another number of workers, from the `Worker.state_dict` of every old rank.

    Raises:
        CheckpointError: as `load_resized`.
    """
    first, size, rank = states[0], worker.comm.size, worker.comm.rank
    replicas = [
        _resized_replica([state["replicas"][i] for state in states], worker, size)[rank]
        for i in range(len(first["replicas"]))
    ]
    if not all(same(state["optimizer"], first["optimizer"]) for state in states):
        raise CheckpointError("what optimizers remember differs between workers, so their number cannot change here")
    others = {name: _mean([state["others"][name] for state in states]) for name in first["others"]}
    identity = {**first["identity"], _SIZE: str(size), _RANK: str(rank)}
    return {**first, "identity": identity, "replicas": replicas, "others": others}


def _resized_replica(saved: Sequence[Mapping[str, Any]], worker: WorkerState, size: int) -> list[dict[str, Any]]:
    first = saved[0]
    for name, what in (("x", "parameters"), ("inflight", "messages in flight")):
        if not all(same(each[name], first[name]) for each in saved):
            raise CheckpointError(
                f"{what} differ between workers at step {first['step']}, so their number cannot change here; "
                "save after a step at which all of them agree"
            )
    states = [each["state"] for each in saved]
    shared = worker.strategy.resized(states, size)
    if shared is None:
        raise CheckpointError(
            f"{type(worker.strategy).__name__} has state on every worker that cannot be redistributed over another "
            f"number; resume with {len(saved)} workers"
        )
    return [{**first, "state": state} for state in shared]


def _newest_common_step(worker: WorkerState, folder: Path) -> int:
    """The newest step of which every rank sees every file."""
    mine = [
        step
        for step in checkpoint.whole_steps(folder, 0)
        if all(_file(folder, step, rank).path.exists() for rank in range(_size(_file(folder, step, 0).read())))
    ]
    device = worker.replicas[0].x.device
    everyone = [set(json.loads(row)) for row in gather_texts(worker.comm, json.dumps(mine).encode(), device)]
    common: set[int] = set.intersection(*everyone)
    if not common:
        raise CheckpointError(f"{folder} holds no checkpoint whose parts every rank can see; look for step-* folders")
    return max(common)


def _file(folder: Path, step: int, rank: int) -> RankFile:
    return RankFile(folder / f"step-{step:08d}", rank)


def _size(content: Mapping[str, Any]) -> int:
    return int(content["state"]["identity"][_SIZE])


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    # Equal tensors are not averaged: the mean could round them.
    if not first.is_floating_point() or all(same(x, first) for x in tensors):
        return first
    return torch.stack([x.double() for x in tensors]).mean(0).to(first.dtype)


def same(a: Any, b: Any) -> bool:
    """Whether two trees of tensors and plain values are equal; NaN counts as equal to NaN."""
    if isinstance(a, Tensor):
        alike = isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype
        return alike and (torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all()))
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b or (a != a and b != b))
