"""A parallel array on disk: a part for each rank, and a step counts where every rank has its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from thinwire.errors import CheckpointError
from thinwire.fusion.array import FusedArray
from thinwire.fusion.checkpoints import check, outline_of, part_ages, restore_outline
from thinwire.fusion.optimizers.base import FusedOptimizer
from thinwire.fusion.scaling import GradScaler
from thinwire.fusion.schedules import Schedules
from thinwire.fusion.store import Selection
from thinwire.storage.rank_file import RankFile
from thinwire.strategies.recipe import brief
from thinwire.worker import checkpoint, resizing
from thinwire.worker.handshake import gather_texts
from thinwire.worker.state import WorkerState

Fields = dict[str, Any]


class Saveable(Protocol):
    """What is saved and loaded: a `ParallelArray`, whose module imports this one."""

    array: FusedArray
    optimizer: FusedOptimizer

    @property
    def worker(self) -> WorkerState:
        """The array as one worker."""
        ...

    def select(self, indices: Sequence[int]) -> Selection:
        """Keep some models; the worker is another one afterwards."""
        ...


def save(
    parallel: Saveable,
    folder: Path,
    *,
    schedules: Schedules | None,
    scaler: GradScaler | None,
    extra: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write every rank's part, then let it count; keep the newest `keep` checkpoints."""
    worker = parallel.worker
    outline = outline_of(parallel.array, optimizer=parallel.optimizer, schedules=schedules, scaler=scaler)
    content = {
        "state": checkpoint.state_of(worker),
        "extra": {"array": outline, "own": dict(extra)},
        "random": outline["random"],
    }
    part = RankFile(_home(folder, worker.step), worker.comm.rank)
    checkpoint.write_together(worker, part, content, keep=keep)
    return part.home


def load(parallel: Saveable, folder: Path, *, schedules: Schedules | None, scaler: GradScaler | None) -> Fields:
    """Restore the newest step that is whole, whatever numbers of workers and of models wrote it."""
    worker = parallel.worker
    home, contents = _newest(worker, folder)
    first, same = contents[0], _size(contents[0]) == worker.comm.size

    def checked() -> Fields:
        if "array" not in first["extra"]:
            raise CheckpointError(f"{home}: holds one model and no array; load it with worker.load")
        _refuse_other_recipe(worker, first["state"]["identity"])
        check(first["extra"]["array"], parallel.array, optimizer=parallel.optimizer, schedules=schedules, scaler=scaler)
        return first["state"] if same else _resized(contents, worker)

    state = checkpoint.together(worker, home, checked)
    outline: Fields = first["extra"]["array"]
    _make_as_large(parallel, outline["models"], schedules, scaler)
    checkpoint.restore(parallel.worker, state)
    part_ages(parallel.optimizer)
    restore_outline(outline, parallel.array, schedules=schedules, scaler=scaler, random=same)
    found: Fields = first["extra"]["own"]
    return found


def _newest(worker: WorkerState, folder: Path) -> tuple[Path, list[Fields]]:
    """The newest step that every rank can go on from: its part, or those of all where their number was another."""
    rank, size = worker.comm.rank, worker.comm.size
    seen = {step for other in {rank, 0} for step in checkpoint.whole_steps(folder, other)}
    for step in sorted(set[int]().union(*_gathered(worker, sorted(seen))), reverse=True):
        home = _home(folder, step)
        parts = [part for part in (RankFile(home, rank), RankFile(home, 0)) if part.path.exists()]
        near = checkpoint.together(worker, home, partial(_read, parts[:1]))
        wrote = _size(near[0]) if near else 0
        ranks = [rank] if wrote == size else list(range(wrote))
        needed = [RankFile(home, other) for other in ranks]
        if all(_gathered(worker, bool(needed) and all(part.path.exists() for part in needed))):
            held = needed == parts[:1]
            others = checkpoint.together(worker, home, partial(_read, [] if held else needed))
            return home, near if held else others
    raise CheckpointError(
        f"{folder} holds no checkpoint of which every rank sees what it needs; look for step-* folders"
    )


def _read(parts: Sequence[RankFile]) -> list[Fields]:
    return [part.read() for part in parts]


def _size(content: Mapping[str, Any]) -> int:
    return int(content["state"]["identity"]["the number of workers"])


def _refuse_other_recipe(worker: WorkerState, theirs: Mapping[str, str]) -> None:
    ours = {"the strategy": brief(worker.strategy), "the seed": str(worker.seed)}
    for name, value in ours.items():
        if theirs[name] != value:
            raise CheckpointError(f"{name} is {theirs[name]} in the checkpoint and {value} in this run; make it alike")


def _resized(contents: Sequence[Fields], worker: WorkerState) -> Fields:
    """This rank's state in a world of another size."""
    for name in ("rates", "schedules", "scaler"):
        if not all(
            resizing.same(each["extra"]["array"][name], contents[0]["extra"]["array"][name]) for each in contents
        ):
            raise CheckpointError(
                f"the {name} differ between workers, so their number cannot change here; go on with {len(contents)} "
                "workers"
            )
    return resizing.resized([content["state"] for content in contents], worker)


def _make_as_large(parallel: Saveable, models: int, schedules: Schedules | None, scaler: GradScaler | None) -> None:
    if models == parallel.array.size:
        return
    kept = parallel.select([min(slot, parallel.array.size - 1) for slot in range(models)])
    for follower in (schedules, scaler):
        if follower is not None:
            follower.select(kept)


def _home(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _gathered(worker: WorkerState, value: object) -> list[Any]:
    """What every rank says, in the order of ranks."""
    texts = gather_texts(worker.comm, json.dumps(value).encode(), worker.replicas[0].x.device)
    return [json.loads(text) for text in texts]
