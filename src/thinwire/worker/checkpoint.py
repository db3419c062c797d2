# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: safetensors and JSON, written atomically, read back bit for bit, by any number of workers.

A checkpoint is a folder `step-NNNNNNNN` with one `RankFile` per rank. Every rank first writes its file to disk under a
temporary name; when all have done so, each renames its own. A checkpoint is complete when every rank's file has its
name. Each part holds the step, the number of parts, and an id that rank 0 draws for every save, so that parts of two
runs never load together. Ranks need not share a disk.

The same number of workers continues bit for bit. Another number continues from the consensus of the old workers:
`Strategy.average` for the parameters, `Strategy.resized` for the strategy's state, and means for the optimizer's
state and buffers. All ranks check what they have read before any of them changes anything.

`export` writes the weights alone, in one safetensors file by the model's own names.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from thinwire._version import __version__
from thinwire.core.replica.shards import MOST_NUMBERS, describe_shard, is_sharded
from thinwire.core.storage.files import local_path, write_atomically
from thinwire.core.storage.rank_file import RankFile
from thinwire.errors import CheckpointError, ConfigError, NonFiniteError, ThinwireError
from thinwire.methods.strategies.base import Strategy
from thinwire.methods.strategies.recipe import parse
from thinwire.registry import canonical
from thinwire.worker import switching
from thinwire.worker.compatibility import has_other_result
from thinwire.worker.handshake import both, gather_texts
from thinwire.worker.members import StackedModule
from thinwire.worker.parameters import named_buffers, named_parameters, own_name
from thinwire.worker.replica_state import (
    PARTS,
    SIZE,
    STRATEGY,
    State,
    check,
    check_identity,
    from_flat,
    is_count,
    mapping_of,
    merge,
    pack,
    part_name,
    parts_of_state,
    same_names,
    unpack,
)
from thinwire.worker.state import WorkerState

T = TypeVar("T")
Content = dict[str, Any]
_STATISTICS = ("running_mean", "running_var")
_FOLDER = re.compile(r"step-([0-9]{8,18})")
_ID = re.compile(r"[0-9a-f]{32}")
_ALONE = re.compile(r"worker-[0-9]{4,9}")
_TOGETHER = re.compile(r"step-[0-9]{8,18}|(shard|mesh)-.*")


# -- writing -----------------------------------------------------------------------------------------------------------


def save(worker: WorkerState, folder: Path, extra: dict[str, Any], *, keep: int | None = 3) -> Path:
    """Write a checkpoint of all ranks; keep the newest `keep` complete ones, or all of them."""
    if keep is not None and keep < 1:
        raise ConfigError(f"keep={keep}: must be at least 1 checkpoint. None keeps all of them")
    content = {
        "state": pack(worker),
        "names": _names_in_state_dict(worker),
        "extra": extra,
        "random": _random_of(worker),
        **({} if worker.pack_rounds is None else {"late": worker.pack_rounds()}),
    }
    # A model of an array that has diverged must not keep the others from being saved.
    if not isinstance(worker.model, StackedModule):
        _refuse_non_finite(worker)
    return write_together(worker, folder, content, keep=keep)


def write_together(worker: WorkerState, folder: Path, content: Mapping[str, Any], *, keep: int | None) -> Path:
    """Write every rank's part, then commit all of them; keep the newest `keep` checkpoints. Returns this one's folder.

    Raises:
        CheckpointError: ranks are at different steps, or one of them cannot write.
    """
    rank, step = worker.comm.rank, worker.step
    rows = gathered(worker, {"id": secrets.token_hex(16), "step": step})
    for other, row in enumerate(rows):
        if row["step"] != rows[0]["step"]:
            raise CheckpointError(
                f"{worker.comm.name(other)} saves step {row['step']} and {worker.comm.name(0)} step {rows[0]['step']}. "
                "Let all ranks save after the same step"
            )
    file = RankFile(folder / f"step-{step:08d}", rank)
    facts = {"id": rows[0]["id"], "step": step, "size": worker.comm.size, "rank": rank}
    try:
        # Two phases: no rank renames its file before all ranks have theirs on disk, so a full disk or a killed writer
        # leaves the previous checkpoint the newest one on every rank.
        aside = together(worker, file.home, lambda: file.stage({"save": facts, **content}))
        together(worker, file.home, lambda: file.commit(aside))
    finally:
        # A file that cannot be removed is no reason to fail; the next call tries again.
        with suppress(OSError, ValueError, LookupError):
            file.remove_stale()
    _prune(worker, folder, step, keep)
    return file.home


def _prune(worker: WorkerState, folder: Path, step: int, keep: int | None) -> None:
    """Remove this rank's parts of checkpoints before the newest `keep` that all ranks have; never that of `step`."""
    mine = list[int]()
    with suppress(OSError):
        mine = whole_steps(folder, worker.comm.rank)
    complete = sorted(set[int].intersection(*(set(row) for row in gathered(worker, mine))))
    if keep is None or not complete:
        return
    # Also what unfinished saves have left behind. Later steps are of a run that went another way; they stay.
    first = min(step, complete[-keep:][0])
    with suppress(OSError, ValueError, LookupError):
        for old, home in _steps(folder):
            if old < first:
                RankFile(home, worker.comm.rank).remove()


def remove_others(worker: WorkerState, home: Path) -> None:
    """Remove this rank's parts of all other checkpoints: earlier and later ones, complete or not."""
    with suppress(OSError, ValueError, LookupError):
        for _, other in _steps(home.parent):
            if other != home:
                RankFile(other, worker.comm.rank).remove()


def _refuse_non_finite(worker: WorkerState) -> None:
    bad = [
        segment.name
        for replica, (_, segments) in zip(worker.replicas, worker.layouts, strict=True)
        if not torch.isfinite(replica.x).all()
        for segment in segments
        if not torch.isfinite(segment.of(replica.x)).all()
    ]
    # Shared, so that all ranks refuse together: a rank that continued to write would wait for this one.
    found = next(((rank, names) for rank, names in enumerate(gathered(worker, bad)) if names), None)
    error = None
    if found is not None:
        name = worker.comm.name(found[0])
        error = NonFiniteError(f"{name}: parameter {found[1][0]} is not finite. The last good checkpoint is kept")
    _raise_in_all_parts(worker, "the checkpoint", error)


def _names_in_state_dict(worker: WorkerState) -> dict[str, str | None]:
    """Map each name in the model's `state_dict` to its parameter or buffer; None for other entries."""
    model = worker.model
    names = {id(x): name for name, x in (named_parameters(model) | named_buffers(model)).items()}
    found: Mapping[str, Any] = model.state_dict(keep_vars=True)
    # An optimizer may train at other parameters than those of its result; only itself can put that in their place.
    result = not has_other_result(worker.optimizer)
    return {own_name(name): names.get(id(x)) if result else None for name, x in found.items()}


# -- reading -----------------------------------------------------------------------------------------------------------


def exists(worker: WorkerState, folder: Path) -> bool:
    """Return True if any rank sees a checkpoint in a folder, complete or not; the same on all ranks."""
    seen = gathered(worker, together(worker, folder, lambda: _visible_steps(folder, worker.comm.rank)))
    return any(_of_parts(worker, sorted(set[int]().union(*seen), reverse=True)))


def newest(worker: WorkerState, folder: Path) -> tuple[Path, list[Content]]:
    """Return the newest complete checkpoint: this rank's part, or all parts if another number of ranks wrote it.

    Returns:
        Its folder, and the parts. They are of one save, on all ranks, at the step that the folder names. Nothing else
        of them has been checked.

    Raises:
        CheckpointError: there is none, it is damaged, or its parts do not belong together.
    """
    comm = worker.comm
    mine = together(worker, folder, lambda: _visible_steps(folder, comm.rank))
    everyone = gathered(worker, mine)

    def ranks_of(step: int) -> tuple[list[int], set[int]]:
        home = folder / f"step-{step:08d}"
        rows = gathered(worker, _on_workers(worker, home, partial(_survey, home, comm.rank)))
        sizes = {row["size"] for row in rows if row["size"] is not None}
        if sizes == {comm.size}:
            return ([comm.rank] if all(row["own"] for row in rows) else []), sizes
        return (list(range(*sizes)) if len(sizes) == 1 and all(row["all"] for row in rows) else []), sizes

    # Without a shared disk, ranks may see different steps. All go through the same ones, and make the same calls.
    steps = sorted(set[int]().union(*everyone), reverse=True)
    if worker.own_folder("").name:
        # A run that ends while it saves may leave a newer step of some parts of the model than of others.
        mine, error = list[int](), None
        try:
            mine = [step for step in steps if ranks_of(step)[0]]
        except CheckpointError as damaged:
            error = damaged
        _raise_in_all_parts(worker, folder, error)
        complete = _of_parts(worker, mine)
        common = set(complete[0]).intersection(*complete)
        if any(complete) and not common:
            each = "; ".join(sorted({", ".join(map(str, sorted(own))) or "none" for own in complete}))
            raise CheckpointError(
                f"{folder.parent}: the parts of the model have no complete checkpoint of the same step ({each}). Every "
                "rank must see the checkpoints of its part. Check the path on every rank"
            )
        steps = sorted(common, reverse=True)
    for step in steps:
        ranks, sizes = ranks_of(step)
        if ranks:
            home = folder / f"step-{step:08d}"
            contents = together(worker, home, partial(read_parts, home, ranks, step, *sizes))
            _check_one_save(worker, home, contents)
            return home, contents
    lacking = [rank for rank, steps in enumerate(everyone) if not steps] or list(range(comm.size))
    raise CheckpointError(
        f"{folder} holds no complete checkpoint for {comm.names(lacking)}. Every rank must see its own part in a "
        "step-* folder, or all parts if another number of workers wrote it. Check the path on every rank"
    )


def _of_parts(worker: WorkerState, steps: list[int]) -> list[list[int]]:
    """Gather steps from the ranks that hold the other parts of this copy of the model, if it is cut into parts."""
    if worker.mesh is not None:
        texts = gather_texts(worker.mesh.block.whole, json.dumps(steps).encode(), worker.replicas[0].x.device)
        return [json.loads(text) for text in texts]
    return worker.shards.gather(steps[:MOST_NUMBERS])


def read_parts(home: Path, ranks: Sequence[int], step: int, size: int) -> list[Content]:
    """Return some ranks' parts of a checkpoint, of one save."""
    contents = [mapping_of(RankFile(home, rank).read(), "a part") for rank in ranks]
    found = [facts_of(content) for content in contents]
    for rank, facts in zip(ranks, found, strict=True):
        wanted = {"id": found[0]["id"], "step": step, "size": size, "rank": rank}
        for name, value in wanted.items():
            if facts[name] != value:
                what = "another save" if name == "id" else f"{name} {facts[name]}, not {value}"
                raise CheckpointError(f"{RankFile(home, rank).path}: is of {what}. {_FIX.format(home=home)}")
    # Earlier versions saved compiled models under the names of the wrapper.
    named = ("state", "names")
    return [{part: _own_names(x) if part in named else x for part, x in content.items()} for content in contents]


def _own_names(value: Any) -> Any:
    if isinstance(value, str):
        return own_name(value)
    if type(value) is dict:
        return {_own_names(key): _own_names(each) for key, each in cast(dict[Any, Any], value).items()}
    if type(value) is list:
        return [_own_names(each) for each in cast(list[Any], value)]
    return value


_FIX = "Parts of different saves cannot be combined. Remove {home}"
_EXPORT = "Attach as in that run to continue it, or start another one from the weights, which thinwire export writes"


def facts_of(content: object) -> dict[str, Any]:
    """Return the save that a part belongs to: its id, the step, the number of ranks and the rank.

    Raises:
        CheckpointError: the part has no such data.
    """
    facts = mapping_of(mapping_of(content, "a part").get("save"), "the save")
    counts = all(is_count(facts.get(name)) for name in ("step", "size", "rank"))
    if not counts or not isinstance(facts.get("id"), str) or not _ID.fullmatch(facts["id"]):
        raise CheckpointError("has no save id, step and rank")
    return facts


def _check_one_save(worker: WorkerState, home: Path, contents: Sequence[Content]) -> None:
    rows = gathered(worker, contents[0]["save"]["id"])
    other = next((rank for rank, row in enumerate(rows) if row != rows[0]), None)
    if other is not None:
        raise CheckpointError(
            f"{home}: the parts of {both(worker.comm, 0, other)} are of two saves. {_FIX.format(home=home)}"
        )


def _survey(home: Path, rank: int) -> dict[str, Any]:
    """Return this rank's view of a checkpoint: its own part, the number of parts, and whether all exist."""
    parts = [part for part in (RankFile(home, 0), RankFile(home, rank)) if part.path.exists()]
    size = facts_of(parts[0].outline())["size"] if parts else None
    # One file is looked for after the other, so that a size that is made up costs nothing.
    whole = size is not None and all(RankFile(home, other).path.exists() for other in range(size))
    return {"own": RankFile(home, rank).path.exists(), "size": size, "all": whole}


def _visible_steps(folder: Path, rank: int) -> list[int]:
    """Steps of which this rank's part or rank 0's was committed: a rank that is new sees only those of others."""
    return sorted({step for other in {rank, 0} for step in whole_steps(folder, other)})


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints in a folder, complete or not, oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(m[1]), path) for path in folder.iterdir() if (m := _FOLDER.fullmatch(path.name))]
    return sorted((step, path) for step, path in found if path.name == f"step-{step:08d}")


def step_of(home: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder; None for another name."""
    match = _FOLDER.fullmatch(home.resolve().name)
    return None if match is None else int(match[1])


def whole_steps(folder: Path, rank: int) -> list[int]:
    """Return the steps of which this rank's part was committed, oldest first."""
    return [step for step, home in _steps(folder) if RankFile(home, rank).path.exists()]


# -- resuming ----------------------------------------------------------------------------------------------------------


def saved_step(folder: Path) -> int | None:
    """Return the step of the newest checkpoint visible in a folder; None if none exists."""
    return max(whole_steps(folder, 0), default=None)


def saved_extra(folder: Path, *, missing_ok: bool) -> dict[str, Any]:
    """Return rank 0's `extra` of the newest checkpoint visible in a folder.

    Args:
        folder: of the checkpoints.
        missing_ok: return {} where there is none.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    step = saved_step(folder)
    if step is None:
        if missing_ok:
            return {}
        raise CheckpointError(
            f"{folder} holds no complete checkpoint. Look for step-* folders, or pass missing_ok=True"
        )
    content = mapping_of(RankFile(folder / f"step-{step:08d}", 0).read(), "a part")
    return dict(mapping_of(content.get("extra"), "extra"))


def load(worker: WorkerState, folder: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """Resume from the newest complete checkpoint, whatever number of workers wrote it; returns its `extra`.

    With another number, the state of torch's random generators is not restored, and every rank must see every part.
    With `missing_ok`, and no checkpoint on any rank, it changes nothing and returns {}.

    Raises:
        CheckpointError: there is none, parts are damaged or do not belong together, they belong to another run, or
            something in them cannot be given to another number of workers. Nothing has changed then, on any rank.
    """
    if worker.load_alone is not None:
        return worker.load_alone(folder.parent, missing_ok)
    if missing_ok and not exists(worker, folder):
        return {}
    home, contents = newest(worker, folder)
    same = contents[0]["save"]["size"] == worker.comm.size

    def planned() -> State:
        for content in contents:
            if "late" in content:
                raise CheckpointError(f"is of one worker with LateMerging. {_EXPORT}")
            same_names("a part", content, ("save", "state", "names", "extra", "random"))
            mapping_of(content["extra"], "extra")
            if content["state"]["step"] != content["save"]["step"]:
                raise CheckpointError(f"holds step {content['state']['step']}, not that of its folder")
        states = [content["state"] for content in contents]
        state = states[0] if same else merge(states, worker)
        check(state, worker, ranks=same, finite=not isinstance(worker.model, StackedModule))
        for content in contents:
            check_random(content["random"], _generators_of(worker))
        return state

    before = _follow(worker, home, contents[0], same=same)
    try:
        # Checked on all ranks before any of them restores: a refusal changes nothing anywhere.
        state = together(worker, home, planned)
    except CheckpointError:
        if worker.strategy is not before:
            switching.switch(worker, before)
        raise
    restore(worker, state, same_size=same)
    if same:
        restore_random(worker, contents[0]["random"])
        return contents[0]["extra"]
    # A rank that existed before gets its own extra back; a new one gets rank 0's.
    return {**contents[0]["extra"], **(contents[worker.comm.rank]["extra"] if worker.comm.rank < len(contents) else {})}


def _follow(worker: WorkerState, home: Path, content: Mapping[str, Any], *, same: bool) -> Strategy:
    """If "auto" has chosen, continue with the checkpoint's strategy; return the worker's own.

    Links that are measured again may give another choice than those of the run that saved, and a guard may have fallen
    back in one of the two.
    """
    before = worker.strategy
    if not worker.automatic:
        return before

    def saved() -> Strategy:
        theirs = mapping_of(content["state"]["identity"], "the identity")
        named = theirs.get(STRATEGY)
        if not isinstance(named, str) or named == canonical(before):
            return before
        check_identity(worker, {**theirs, STRATEGY: canonical(before)}, ranks=same)
        try:
            # Nothing that a file names is imported: the classes must be there.
            return parse(named, imports=False)
        except ConfigError as error:
            raise CheckpointError(f"{STRATEGY} {named} in the checkpoint: {error}") from error

    strategy = together(worker, home, saved)
    if strategy != before:
        switching.switch(worker, strategy)
    return before


def load_parts(worker: WorkerState, state: Mapping[str, Any]) -> None:
    """Continue from the `Worker.state_dict` of this rank, or from all ranks' where their number was another one.

    Raises:
        CheckpointError: they do not fit; nothing has changed then.
    """
    found = _parts_in(mapping_of(state, "the state"))
    if not found:
        raise CheckpointError("the state holds no rank's part. Pass the result of Worker.state_dict()")
    own = found.get(part_name(worker, worker.comm.rank), next(iter(found.values())))
    written_by = mapping_of(own.get("identity"), "the identity").get(SIZE)
    if written_by in (None, str(worker.comm.size)):
        check(own, worker, parts_of_state(model="parameters" in own, optimizer="optimizer" in own))
        restore(worker, own, same_size=True)
        return
    names = [part_name(worker, rank) for rank in range(len(found))]
    if written_by != str(len(found)) or set(names) != found.keys():
        raise CheckpointError(
            f"{written_by} workers have written the state, and {worker.comm.size} would continue: every rank needs the "
            "parts of all of them. With torch.distributed.checkpoint use thinwire.integrations.dcp.load(worker, folder)"
        )
    if not all(set(PARTS) <= part.keys() for part in found.values()):
        raise CheckpointError(
            f"{written_by} workers have written the state, and {worker.comm.size} would continue: another number of "
            "workers needs the models and optimizers of all. Save worker.state_dict(model=True, optimizer=True)"
        )

    def planned() -> State:
        merged = merge([found[name] for name in names], worker)
        check(merged, worker, ranks=False, finite=True)
        return merged

    restore(worker, together(worker, Path("the state"), planned), same_size=False)


def _parts_in(state: dict[str, Any]) -> dict[str, State]:
    """Return the states of ranks in what `Worker.state_dict` returned, which was not flat in earlier versions."""
    if not all(isinstance(part, tuple | dict) for part in state.values()):
        return from_flat(state)
    each = {name: part[0] if isinstance(part, tuple) and part else part for name, part in state.items()}
    return {name: mapping_of(part, "a rank's part") for name, part in each.items()}


def restore(worker: WorkerState, state: State, *, same_size: bool) -> None:
    """Restore a state that all ranks have checked; with another number of workers all ranks call together."""
    unpack(state, worker, same_size=same_size)
    if not same_size:
        gathered(worker, None)  # no rank trains and sends messages before all ranks are ready


# -- on all ranks ------------------------------------------------------------------------------------------------------


def check_kind(folder: Path, *, alone: bool) -> None:
    """Refuse a folder with checkpoints of another kind of run.

    Args:
        folder: of the checkpoints of all workers.
        alone: whether each worker saves alone, as with `LateMerging`, into a folder of its own.

    Raises:
        CheckpointError: naming one of them.
    """
    if alone and _ALONE.fullmatch(folder.name):
        raise CheckpointError(f"{folder} is the folder of one worker. Give the folder that holds it, {folder.parent}")
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    found = next((name for name in names if (_TOGETHER if alone else _ALONE).fullmatch(name)), None)
    if found is not None:
        kind = "without" if alone else "with"
        raise CheckpointError(
            f"{folder} holds {found}, which a run {kind} LateMerging has saved. Give each run its own folder. {_EXPORT}"
        )


def own_folder(worker: WorkerState, folder: str | Path, *, loads: bool = False) -> Path:
    """Return the folder of this worker's checkpoints within the one that a user gave.

    Raises:
        CheckpointError: on all ranks, if it is a URL, or has checkpoints of another kind of run, on any of them.
    """

    def checked() -> Path:
        path = local_path(folder)
        if not (loads and worker.load_alone):  # which checks it on all workers
            check_kind(path, alone=worker.load_alone is not None)
        return path

    return worker.own_folder(together(worker, folder, checked))


def on_disk(worker: WorkerState, path: str | Path) -> Path:
    """Return the path that a user gave, with `~` expanded.

    Raises:
        CheckpointError: on all ranks, if it is a URL on any of them.
    """
    return together(worker, path, lambda: local_path(path))


def together(worker: WorkerState, home: str | Path, work: Callable[[], T]) -> T:
    """Do `work` on every rank and return this rank's result; an error on any rank is raised on all of them.

    Raises:
        CheckpointError: naming the rank, and the first error where several failed.
    """
    results, error = list[T](), None
    try:
        results.append(_on_workers(worker, home, work))
    except CheckpointError as failed:
        error = failed
    _raise_in_all_parts(worker, home, error)
    return results[0]


def _on_workers(worker: WorkerState, home: str | Path, work: Callable[[], T]) -> T:
    """Do `work` together with the other workers; those that hold other parts of the model are not asked."""
    rank, results, problem, cause = worker.comm.rank, list[T](), "", None
    try:
        results.append(work())
    except Exception as error:
        cause = error
        # Any error: a rank that raised another one alone would leave the others waiting for it.
        known = isinstance(error, OSError | CheckpointError | ConfigError)
        text = str(error) if known else f"does not fit ({type(error).__name__}: {error})"
        problem = f"{worker.comm.name(rank)}: {'' if str(home) in text else f'{home}: '}{text}"
    texts = gather_texts(worker.comm, problem.encode(errors="replace"), worker.replicas[0].x.device)
    first = next((text.decode() for text in texts if text), None)
    if first:
        raise CheckpointError(first) from cause
    return results[0]


def _raise_in_all_parts(worker: WorkerState, home: str | Path, error: ThinwireError | None) -> None:
    """Raise an error also on the ranks that hold the other parts of this copy of the model."""
    failed = _of_parts(worker, [] if error is None else [1])
    if error is not None:
        raise error
    if any(failed):
        raise CheckpointError(f"{home}: ranks with another part of the model have failed. Their errors name the cause")


def gathered(worker: WorkerState, value: object) -> list[Any]:
    """All-gather a JSON value."""
    texts = gather_texts(worker.comm, json.dumps(value).encode(), worker.replicas[0].x.device)
    return [json.loads(text) for text in texts]


# -- torch's random generators -----------------------------------------------------------------------------------------


def _random_of(worker: WorkerState) -> dict[str, Any]:
    """Return the states of torch's random generators."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state(_gpu_of(worker))
    return state | {name: own.get_state() for name, own in _generators_of(worker).items()}


def _generators_of(worker: WorkerState) -> dict[str, torch.Generator]:
    """Return the random generators of an array's models, by name; empty for other models."""
    own = worker.model.array.generators if isinstance(worker.model, StackedModule) else None
    return {f"model-{index}": generator for index, generator in enumerate(own or ())}


def _gpu_of(worker: WorkerState) -> torch.device:
    """The GPU that the model draws on, which need not be the current one; that one where the model is on the CPU."""
    device = worker.replicas[0].x.device
    return device if device.type == "cuda" else torch.device("cuda")


def check_random(state: object, generators: Mapping[str, torch.Generator] | None = None) -> None:
    """Check that torch accepts the state of its random generators, and of these of an array."""
    own = generators or {}
    for name, x in mapping_of(state, "the random generators' state").items():
        if name not in ("cpu", "cuda", *own) or not isinstance(x, Tensor) or x.dtype != torch.uint8:
            raise CheckpointError(f"the random generators' state holds {name!r}, which is none")
    states = cast(Mapping[str, Tensor], state)
    try:
        torch.Generator().set_state(states["cpu"])
        for name, generator in own.items():
            torch.Generator(generator.device).set_state(states[name])
        if "cuda" in states and torch.cuda.is_available():
            torch.Generator("cuda").set_state(states["cuda"])
    except (RuntimeError, LookupError, TypeError) as error:
        raise CheckpointError(f"the state of the random generator cannot be used ({error})") from error


def restore_random(worker: WorkerState, state: Mapping[str, Tensor]) -> None:
    """Set torch's random generators to a state that `check_random` has accepted."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"], _gpu_of(worker))
    for name, generator in _generators_of(worker).items():
        generator.set_state(state[name])


# -- the weights alone, in one file ------------------------------------------------------------------------------------


def export(worker: WorkerState, model: nn.Module, path: Path) -> Path:
    """Write a model's `state_dict`; every rank calls, at consensus, and rank 0 writes.

    Raises:
        CheckpointError: it cannot be written, or something in it is no tensor.
        NonFiniteError: a parameter or a running statistic is NaN or infinite, or another buffer holds NaN.
        ConfigError: the model is split over a mesh.
    """
    if worker.block:
        raise ConfigError(
            "export() of a model that is split over a mesh: gather it with thinwire.tensor2d.write_whole(model, path, "
            "mesh.block) within worker.consensus()"
        )
    found = cast(Mapping[str, Any], model.state_dict())
    # Gathered by all ranks; the first of each dimension of a mesh writes.
    tensors = {own_name(name): x.full_tensor() if is_sharded(x) else dense(x) for name, x in found.items()}
    constants = {own_name(name) for name, _ in model.named_buffers(remove_duplicate=False)}
    places = [describe_shard(x) for x in found.values() if isinstance(x, Tensor) and is_sharded(x)]
    writes = worker.comm.rank == 0 and all("part 0 of" in place for place in places if place)
    together(worker, path, lambda: check_tensors(tensors))
    bad = gathered(worker, first_nonfinite(tensors, constants))
    for rank, name in enumerate(bad):
        if name:
            raise NonFiniteError(f"{worker.comm.name(rank)}: {name} is not finite, so nothing was written to {path}")
    together(worker, path, lambda: write_weights(path, tensors, worker.step) if writes else None)
    return path


def check_tensors(tensors: Mapping[str, Any]) -> None:
    """Check that a file of weights can hold a `state_dict`.

    Raises:
        CheckpointError: naming an entry that is no tensor.
    """
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise CheckpointError(
                f"{name} in the model's state_dict is a {type(x).__name__}: a safetensors file holds tensors only"
            )


def dense(x: Any) -> Any:
    """Return a sparse tensor as a dense one, since files of weights know no sparse tensors; else the value itself."""
    return x.to_dense() if isinstance(x, Tensor) and x.layout != torch.strided else x


def first_nonfinite(tensors: Mapping[str, Any], constants: Container[str]) -> str:
    """Return the first tensor that holds NaN, or an infinity where it must not, as a mask of attention may; else empty.

    Args:
        tensors: by name.
        constants: the names of buffers, which may hold infinities unless training computes them.
    """
    for name, x in tensors.items():
        if not x.is_floating_point():
            continue
        x = x.float() if x.element_size() == 1 else x  # of float8, torch does not know whether it is finite
        constant = name in constants and name.rpartition(".")[2] not in _STATISTICS
        if bool(x.isnan().any() if constant else not x.isfinite().all()):
            return name
    return ""


def write_weights(path: Path, tensors: Mapping[str, Any], step: int) -> None:
    """Write tensors as a safetensors file, in place of one that is there."""
    from safetensors.torch import save  # here, so that thinwire needs it only for files

    # Copies, since the format refuses tensors that share memory, as tied parameters do.
    content = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save(content, metadata={"format": "pt", "thinwire": __version__, "step": str(step)}))
