"""Checkpoints: safetensors and JSON, written whole or not at all, read back bit for bit.

A checkpoint is a folder `step-NNNNNNNN` with two files per rank: `rank-NNNN.safetensors` holds the tensors and
`rank-NNNN.json`, written last and only when every rank's tensors are safely on disk, holds the rest and the tensors'
checksum. A rank's part without its JSON does not exist. Ranks need not share a disk.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laconic._version import __version__
from laconic.comm.base import arrived
from laconic.errors import CheckpointError, NonFiniteError
from laconic.files import write_atomically
from laconic.handshake import gather_texts
from laconic.tree import pack, unpack

if TYPE_CHECKING:
    from laconic.attach import Attached

_FOLDER = re.compile(r"step-(\d{8})")


def state_of(attached: Attached) -> dict[str, Any]:
    """Everything one rank remembers, as nested dicts of tensors and JSON values."""
    attached.settle()
    return {
        "identity": _identity(attached),
        "replicas": [
            {
                "x": replica.x.detach().clone(),
                "step": replica.step,
                "state": {name: x.clone() for name, x in replica.state.items()},
                "inflight": {name: [x.clone() for x in work.wait()] for name, work in replica.inflight.items()},
            }
            for replica in attached.replicas
        ],
        "buffers": {name: buffer.detach().clone() for name, buffer in attached.model.named_buffers()},
        "optimizer": attached.optimizer.state_dict(),
    }


def restore(attached: Attached, state: Mapping[str, Any]) -> None:
    """Put `state_of` back; refuse one that belongs elsewhere before touching anything."""
    ours, theirs = _identity(attached), state["identity"]
    for key, value in ours.items():
        if theirs.get(key) != value:
            raise CheckpointError(f"the checkpoint's {key} is {theirs.get(key)}, this run's is {value}")
    attached.settle()
    with torch.no_grad():
        for replica, saved in zip(attached.replicas, state["replicas"], strict=True):
            replica.x.copy_(saved["x"])
            replica.step = saved["step"]
            like = replica.state
            replica.state = {name: x.clone().to(_home(like, name, x)) for name, x in saved["state"].items()}
            replica.inflight = {
                name: arrived([x.clone().to(replica.x.device) for x in received])
                for name, received in saved["inflight"].items()
            }
        for name, buffer in attached.model.named_buffers():
            buffer.copy_(state["buffers"][name])
    attached.optimizer.load_state_dict(state["optimizer"])


def _home(like: Mapping[str, Tensor], name: str, x: Tensor) -> torch.device:
    return like[name].device if name in like else x.device


def _identity(attached: Attached) -> dict[str, Any]:
    """What a checkpoint and a run must have in common."""
    return {
        "strategy": repr(attached.strategy),
        "number of workers": attached.comm.size,
        "rank": attached.comm.rank,
        "seed": attached.seed,
        "optimizer": type(attached.optimizer).__name__,
        "parameters": [
            [[segment.name, list(segment.shape)] for segment in segments] for _, segments in attached.layouts
        ],
    }


def save(attached: Attached, folder: Path, extra: dict[str, Any], *, keep: int = 3) -> Path:
    """Write every rank's part, then commit; keep the newest `keep` checkpoints."""
    state = state_of(attached)
    _refuse_non_finite(attached)
    home = folder / f"step-{attached.step:08d}"
    name = f"rank-{attached.comm.rank:04d}"
    tree, tensors = pack({"state": state, "extra": extra, "random": _random_state()})
    problem, checksum = "", ""
    try:
        home.mkdir(parents=True, exist_ok=True)
        checksum = _write_tensors(home / f"{name}.safetensors", tensors)
    except OSError as error:
        problem = f"rank {attached.comm.rank} cannot write {home}: {error.strerror or error}"
    _stop_together(attached, problem)
    body = {"laconic": __version__, "checksum": checksum, "tree": tree}
    try:
        write_atomically(home / f"{name}.json", json.dumps(body).encode())
    except OSError as error:
        problem = f"rank {attached.comm.rank} cannot write {home}: {error.strerror or error}"
    _stop_together(attached, problem)
    for old in _whole_steps(folder, attached.comm.rank)[:-keep]:
        _remove_part(folder / f"step-{old:08d}", name)
    return home


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    from safetensors.torch import save as to_bytes

    content = to_bytes(tensors)
    write_atomically(path, content)
    return hashlib.sha256(content).hexdigest()


def _remove_part(home: Path, name: str) -> None:
    """Forget one rank's part, its commit first; the last rank out removes the folder."""
    (home / f"{name}.json").unlink(missing_ok=True)
    (home / f"{name}.safetensors").unlink(missing_ok=True)
    if home.is_dir() and not any(home.iterdir()):
        shutil.rmtree(home, ignore_errors=True)


def load(attached: Attached, folder: Path) -> dict[str, Any]:
    """Restore the newest step that is whole on every rank."""
    comm, device = attached.comm, attached.replicas[0].x.device
    mine = _whole_steps(folder, comm.rank)
    everyone = [set(json.loads(row)) for row in gather_texts(comm, json.dumps(mine).encode(), device)]
    common = set.intersection(*everyone)
    if not common:
        lacking = [rank for rank, steps in enumerate(everyone) if not steps] or list(range(comm.size))
        raise CheckpointError(f"{folder} holds no whole checkpoint for ranks {lacking}; look for step-* folders")
    problem, content = "", {}
    try:
        content = read(folder / f"step-{max(common):08d}", comm.rank)
        restore(attached, content["state"])
    except CheckpointError as error:
        problem = str(error)
    _stop_together(attached, problem)
    _restore_random_state(content["random"])
    return content["extra"]


def read(home: Path, rank: int) -> dict[str, Any]:
    """One rank's part of a checkpoint, checked against its checksum.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    from safetensors.torch import load as from_bytes

    path = home / f"rank-{rank:04d}.safetensors"
    try:
        body = json.loads((home / f"rank-{rank:04d}.json").read_bytes())
        content = path.read_bytes()
        found = hashlib.sha256(content).hexdigest()
        if found != body["checksum"]:
            raise CheckpointError(
                f"{path} is damaged: its checksum is {found[:12]}, {body['checksum'][:12]} was written; "
                f"remove {home} to go on from the checkpoint before"
            )
        return unpack(body["tree"], from_bytes(content))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{home}, rank {rank}: cannot be read ({error}); remove it to go on from an older one"
        ) from error


def _whole_steps(folder: Path, rank: int) -> list[int]:
    """Steps whose part of this rank was committed, oldest first."""
    if not folder.is_dir():
        return []
    steps = [(int(m[1]), path) for path in folder.iterdir() if (m := _FOLDER.fullmatch(path.name))]
    return sorted(step for step, path in steps if (path / f"rank-{rank:04d}.json").exists())


def _stop_together(attached: Attached, problem: str) -> None:
    """Raise on every rank what went wrong on any."""
    device = attached.replicas[0].x.device
    problems = [text.decode() for text in gather_texts(attached.comm, problem.encode(), device)]
    first = next((p for p in problems if p), None)
    if first:
        raise CheckpointError(first)


def _refuse_non_finite(attached: Attached) -> None:
    bad = [
        segment.name
        for replica, (_, segments) in zip(attached.replicas, attached.layouts, strict=True)
        if not torch.isfinite(replica.x).all()
        for segment in segments
        if not torch.isfinite(segment.of(replica.x)).all()
    ]
    device = attached.replicas[0].x.device
    everyone = [json.loads(row) for row in gather_texts(attached.comm, json.dumps(bad).encode(), device)]
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
