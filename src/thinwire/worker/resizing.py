"""Go on from a checkpoint with another number of workers.

What all ranks held alike is every new rank's; what each held for itself is shared out by the strategy, which knows
what must not be lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire.codecs.base import State
from thinwire.errors import CheckpointError
from thinwire.storage.rank_file import RankFile
from thinwire.worker import checkpoint
from thinwire.worker.handshake import gather_texts
from thinwire.worker.state import WorkerState

_SIZE, _RANK = "the number of workers", "the rank"


@runtime_checkable
class Resizable(Protocol):
    """A strategy that can share its state out anew."""

    def resized(self, states: Sequence[State], size: int) -> list[dict[str, Tensor]]:
        """The states of so many workers that together remember what these do."""
        ...


def saved_size(folder: Path) -> int | None:
    """How many workers wrote the newest checkpoint that can be seen in a folder; None if there is none."""
    steps = checkpoint.whole_steps(folder, 0)
    return None if not steps else _size(_read(folder, steps[-1], 0))


def load(worker: WorkerState, folder: Path) -> dict[str, Any]:
    """Go on from the newest whole checkpoint in a folder, whatever number of workers wrote it; returns its `extra`.

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
    """Restore the newest step that is whole, whatever number of workers wrote it, and return the `extra` beside it.

    Parameters must have been equal on all ranks, as they are where gradients or momenta are exchanged at every step;
    buffers become the mean over ranks. Random numbers of torch begin anew, and so does the deal of data. Every rank
    must see the parts of all.

    Args:
        worker: the run that goes on.
        folder: of checkpoints, as for `Worker.save`.

    Raises:
        CheckpointError: there is no such step, a part is damaged or belongs to another run, workers had different
            parameters, or the strategy cannot share its state out anew.
    """
    step = _agreed_step(worker, folder)
    first = _read(folder, step, 0)
    parts = [first, *(_read(folder, step, rank) for rank in range(1, _size(first)))]
    state = resized([part["state"] for part in parts], worker)
    checkpoint.restore(worker, state)
    return {**first["extra"], **(parts[worker.comm.rank]["extra"] if worker.comm.rank < len(parts) else {})}


def resized(states: Sequence[Mapping[str, Any]], worker: WorkerState) -> dict[str, Any]:
    """One rank's state in a world of another size, from the states of all ranks as `Worker.state_dict` gave them.

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
                "save after an agreement"
            )
    states = [each["state"] for each in saved]
    if isinstance(worker.strategy, Resizable):
        shared = worker.strategy.resized(states, size)
    elif all(same(state, states[0]) for state in states):
        shared = [dict(states[0]) for _ in range(size)]
    else:
        raise CheckpointError(
            f"{type(worker.strategy).__name__} keeps on every worker what cannot be shared out among another number; "
            f"go on with {len(saved)} workers"
        )
    return [{**first, "state": state} for state in shared]


def _agreed_step(worker: WorkerState, folder: Path) -> int:
    """The newest step of which every rank sees every part."""
    mine = [step for step in checkpoint.whole_steps(folder, 0) if _all_there(folder, step)]
    device = worker.replicas[0].x.device
    everyone = [set(json.loads(row)) for row in gather_texts(worker.comm, json.dumps(mine).encode(), device)]
    common: set[int] = set.intersection(*everyone)
    if not common:
        raise CheckpointError(f"{folder} holds no checkpoint whose parts every rank can see; look for step-* folders")
    return max(common)


def _all_there(folder: Path, step: int) -> bool:
    return all(_part(folder, step, rank).path.exists() for rank in range(_size(_read(folder, step, 0))))


def _read(folder: Path, step: int, rank: int) -> dict[str, Any]:
    return _part(folder, step, rank).read()


def _part(folder: Path, step: int, rank: int) -> RankFile:
    return RankFile(folder / f"step-{step:08d}", rank)


def _size(content: Mapping[str, Any]) -> int:
    return int(content["state"]["identity"][_SIZE])


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    if not first.is_floating_point() or all(same(x, first) for x in tensors):
        return first
    return torch.stack([x.double() for x in tensors]).mean(0).to(first.dtype)


def same(a: Any, b: Any) -> bool:
    """Whether two trees of tensors and plain values are equal; NaN is equal to NaN."""
    if isinstance(a, Tensor):
        alike = isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype
        return alike and (torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all()))
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b or (a != a and b != b))
