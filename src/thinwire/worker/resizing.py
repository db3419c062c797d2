# SPDX-License-Identifier: Apache-2.0
"""Resume from a checkpoint, whatever number of workers wrote it.

As many workers as before go on bit for bit. Another number goes on from what the workers that were had in common: the
strategy's `resume_point` for the parameters, `Strategy.resized` for its own state, and means for what optimizers and
buffers hold. What is found is checked as a whole before any rank changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.comm.threads import run_threads
from thinwire.comm.work import completed
from thinwire.errors import CheckpointError, ConfigError
from thinwire.registry import canonical
from thinwire.replica.flat import Segment, flatten, views
from thinwire.replica.replica import Replica
from thinwire.storage.rank_file import RankFile
from thinwire.strategies.base import Strategy, nested
from thinwire.strategies.recipe import parse
from thinwire.worker import checkpoint, snapshot, switching
from thinwire.worker.snapshot import RANK, SIZE, STRATEGY, State
from thinwire.worker.state import WorkerState


def saved_step(folder: Path) -> int | None:
    """The step of the newest checkpoint visible in a folder; None if there is none."""
    return max(checkpoint.whole_steps(folder, 0), default=None)


def saved_size(folder: Path) -> int | None:
    """How many workers wrote the newest checkpoint visible in a folder; None if there is none."""
    steps = checkpoint.whole_steps(folder, 0)
    if not steps:
        return None
    return int(checkpoint.facts_of(RankFile(folder / f"step-{steps[-1]:08d}", 0).outline())["size"])


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
        raise CheckpointError(f"{folder} holds no whole checkpoint; look for step-* folders, or pass missing_ok=True")
    content = snapshot.mapping_of(RankFile(folder / f"step-{step:08d}", 0).read(), "a part")
    return dict(snapshot.mapping_of(content.get("extra"), "extra"))


def load(worker: WorkerState, folder: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """Resume from the newest complete checkpoint, whatever number of workers wrote it; returns its `extra`.

    With another number, the state of torch's random generators is not restored, and every rank must see every part.
    With `missing_ok`, and no checkpoint on any rank, it changes nothing and returns {}.

    Raises:
        CheckpointError: there is none, parts are damaged or do not belong together, they belong to another run, or
            something in them cannot be given to another number of workers. Nothing has changed then, on any rank.
    """
    if missing_ok and not checkpoint.exists(worker, folder):
        return {}
    home, contents = checkpoint.newest(worker, folder)
    same = contents[0]["save"]["size"] == worker.comm.size

    def planned() -> State:
        for content in contents:
            snapshot.same_names("a part", content, ("save", "state", "names", "extra", "random"))
            snapshot.mapping_of(content["extra"], "extra")
            checkpoint.check_random(content["random"])
            if content["state"]["step"] != content["save"]["step"]:
                raise CheckpointError(f"holds step {content['state']['step']}, not that of its folder")
        states = [content["state"] for content in contents]
        state = states[0] if same else resized(states, worker)
        snapshot.check_state(worker, state, ranks=same, finite=True)
        return state

    before = _follow(worker, home, contents[0], same=same)
    try:
        # Checked on all ranks before any of them restores: a refusal changes nothing anywhere.
        state = checkpoint.together(worker, home, planned)
    except CheckpointError:
        if worker.strategy is not before:
            switching.switch(worker, before)
        raise
    put_back(worker, state, same_size=same)
    if same:
        checkpoint.restore_random(worker, contents[0]["random"])
        return contents[0]["extra"]
    # A rank that existed before gets its own extra back; a new one gets rank 0's.
    return {**contents[0]["extra"], **(contents[worker.comm.rank]["extra"] if worker.comm.rank < len(contents) else {})}


def _follow(worker: WorkerState, home: Path, content: Mapping[str, Any], *, same: bool) -> Strategy:
    """Where "auto" has chosen, go on with the checkpoint's strategy; returns the worker's own.

    Links that are measured again may give another choice than those of the run that saved, and a guard may have fallen
    back in one of the two.
    """
    before = worker.strategy
    if not worker.automatic:
        return before

    def saved() -> Strategy:
        theirs = snapshot.mapping_of(content["state"]["identity"], "the identity")
        named = theirs.get(STRATEGY)
        if not isinstance(named, str) or named == canonical(before):
            return before
        snapshot.check_identity(worker, {**theirs, STRATEGY: canonical(before)}, ranks=same)
        try:
            # Nothing that a file names is imported: the classes must be there.
            return parse(named, imports=False)
        except ConfigError as error:
            raise CheckpointError(f"{STRATEGY} {named} in the checkpoint: {error}") from error

    strategy = checkpoint.together(worker, home, saved)
    if strategy != before:
        switching.switch(worker, strategy)
    return before


def load_parts(worker: WorkerState, parts: Mapping[str, Any]) -> None:
    """Continue from the `Worker.state_dict` of this rank, or from all ranks' where their number was another one.

    Raises:
        CheckpointError: they do not fit; nothing has changed then.
    """
    found = {name: _unwrapped(part) for name, part in snapshot.mapping_of(parts, "the state").items()}
    if not found:
        raise CheckpointError("the state holds no rank's part; pass what Worker.state_dict() returned")
    own = found.get(snapshot.part_name(worker, worker.comm.rank), next(iter(found.values())))
    written_by = snapshot.mapping_of(own.get("identity"), "the identity").get(SIZE)
    if written_by in (None, str(worker.comm.size)):
        snapshot.restore(worker, own)
        return
    names = [snapshot.part_name(worker, rank) for rank in range(len(found))]
    if written_by != str(len(found)) or set(names) != found.keys():
        raise CheckpointError(
            f"{written_by} workers have written the state, and {worker.comm.size} would go on: every rank needs the "
            "parts of all of them; with torch.distributed.checkpoint use thinwire.integrations.dcp.load(worker, folder)"
        )

    def planned() -> State:
        state = resized([found[name] for name in names], worker)
        snapshot.check_state(worker, state, ranks=False, finite=True)
        return state

    put_back(worker, checkpoint.together(worker, Path("the state"), planned), same_size=False)


def _unwrapped(part: Any) -> State:
    return snapshot.mapping_of(part[0] if isinstance(part, tuple) and part else part, "a rank's part")


def put_back(worker: WorkerState, state: State, *, same_size: bool) -> None:
    """Restore a state that has been checked; one from `resized` on all ranks together."""
    if same_size:
        snapshot.put_back(worker, state)
        return
    snapshot.put_back_parameters(worker, state)
    with torch.no_grad():
        for replica, saved in zip(worker.replicas, state["replicas"], strict=True):
            replica.equal_start = True
            snapshot.replace_state(replica, {}, {})
            worker.strategy.start(replica)
            # What could not be carried over is as the strategy begins with it at these parameters.
            whole = {**replica.state, **saved["state"]}
            keeps = not any(each.traits.restarts_on_resize for each in nested(worker.strategy))
            snapshot.replace_state(replica, whole, saved["inflight"] if keeps else None)
    snapshot.put_back_rest(worker, state)
    # Nobody trains, and sends messages, before all are here.
    checkpoint.gathered(worker, None)


# -- from the workers that were to those that are ----------------------------------------------------------------------


def resized(states: Sequence[State], worker: WorkerState) -> State:
    """This rank's state for another number of workers, from the `Worker.state_dict` of every old rank.

    Raises:
        CheckpointError: they are not states of one run of this recipe, or something cannot be redistributed.
    """
    first, size, rank = states[0], worker.comm.size, worker.comm.rank
    for old, state in enumerate(states):
        identity = snapshot.mapping_of(state["identity"], "the identity")
        snapshot.check_identity(worker, identity, ranks=False)
        if (identity[SIZE], identity[RANK]) != (str(len(states)), str(old)) or state["step"] != first["step"]:
            raise CheckpointError(f"part {old} is not that of rank {old} among {len(states)} at step {first['step']}")
        snapshot.check_state(worker, state, ranks=False, finite=False)
    vectors = [_resized_vector(states, worker, i) for i in range(len(worker.replicas))]
    replicas = [_resized_replica([state["replicas"][i] for state in states], worker) for i in range(len(vectors))]
    return {
        "identity": {**first["identity"], SIZE: str(size), RANK: str(rank)},
        "step": first["step"],
        "parameters": {
            segment.name: view
            for x, (_, segments) in zip(vectors, worker.layouts, strict=True)
            for segment, view in zip(segments, views(x, segments), strict=True)
        },
        "replicas": replicas,
        "others": {name: mean_of([state["others"][name] for state in states]) for name in first["others"]},
        "optimizer": _merged_optimizer(
            [state["optimizer"] for state in states],
            {name: tuple(x.shape) for name, x in {**first["others"], **first["parameters"]}.items()},
        ),
    }


def _resized_vector(states: Sequence[State], worker: WorkerState, i: int) -> Tensor:
    """The parameters from which the new workers go on."""
    replica, (_, segments) = worker.replicas[i], worker.layouts[i]
    saved = [state["replicas"][i] for state in states]
    xs = [flatten([state["parameters"][segment.name] for segment in segments], segments) for state in states]
    # Equal vectors are not averaged: their mean could be rounded.
    if all(torch.equal(x, xs[0]) for x in xs) and not any(s.traits.restarts_on_resize for s in nested(worker.strategy)):
        return xs[0]
    rate = replica.lr
    return resume_point(
        worker.strategy,
        xs,
        saved,
        segments,
        step=states[0]["step"],
        seed=worker.seed,
        lr=rate.cpu() if isinstance(rate, Tensor) else rate,
        timeout=worker.comm.timeout,
    )


def resume_point(
    strategy: Strategy,
    xs: Sequence[Tensor],
    saved: Sequence[Mapping[str, Any]],
    segments: Sequence[Segment],
    *,
    step: int,
    seed: int,
    lr: float | Tensor = 0.0,
    timeout: float = 60.0,
    consensus: bool = False,
) -> Tensor:
    """What the workers that were agree on, by the strategy itself: they meet once more, as threads.

    Args:
        strategy: of the run.
        xs: the parameters of each of them.
        saved: their state and messages in flight, as `snapshot.state_of` has them.
        segments: where parameters lie in the vectors.
        step: at which they were saved.
        seed: of the run.
        lr: the learning rate.
        timeout: of their calls, in seconds.
        consensus: whether what they would evaluate is meant, and not where they would go on.
    """

    def compute(comm: Comm) -> Tensor:
        x, own = xs[comm.rank].clone(), saved[comm.rank]
        r = Replica(x, x.new_empty(0), comm, lr=lambda: lr, seed=seed, segments=segments)
        r.step = comm.step = step
        r.state.update({name: y.clone() for name, y in own["state"].items()})
        r.inflight.update({name: completed([y.clone() for y in ys]) for name, ys in own["inflight"].items()})
        with torch.no_grad():
            return (strategy.consensus if consensus else strategy.resume_point)(r).clone()

    found = run_threads(len(xs), compute, timeout=timeout)[0]
    if found.shape != xs[0].shape or found.dtype != xs[0].dtype:
        raise CheckpointError(
            f"{type(strategy).__name__}: the workers that were agree on no vector like the parameters"
        )
    return found


def _resized_replica(saved: Sequence[Mapping[str, Any]], worker: WorkerState) -> dict[str, Any]:
    states = worker.strategy.resized([each["state"] for each in saved], worker.comm.size)
    if states is None:
        raise CheckpointError(
            f"{type(worker.strategy).__name__} has state on every worker that cannot be redistributed over another "
            f"number; resume with {len(saved)} workers"
        )
    # What each worker received for itself cannot be given to others; what it was for is in the resume point.
    alike = all(same(each["inflight"], saved[0]["inflight"]) for each in saved)
    return {
        "layout": saved[0]["layout"],
        "state": states[worker.comm.rank],
        "inflight": saved[0]["inflight"] if alike else {},
    }


# -- means -------------------------------------------------------------------------------------------------------------


def _merged_optimizer(states: Sequence[State], shapes: Mapping[str, tuple[int, ...]]) -> State:
    """One optimizer's state for all: means of moments, and the most steps where their numbers differ.

    Args:
        states: of all workers that were.
        shapes: of the parameters, by name.
    """
    states = _with_most_steps(states)
    first = states[0]
    for name in first:
        if name != "state" and not all(same(state.get(name), first[name]) for state in states):
            raise CheckpointError(
                f"the optimizer's {_difference([s[name] for s in states])} differs between workers, so their number "
                "cannot change; let all use one schedule"
            )
    held = list(dict.fromkeys(name for state in states for name in state["state"]))
    merged: State = {}
    for parameter in held:
        entries = [state["state"][parameter] for state in states if state["state"].get(parameter)]
        names = list(dict.fromkeys(name for entry in entries for name in entry))
        merged[parameter] = {
            name: _merged_memory(name, parameter, [entry.get(name) for entry in entries], shapes.get(parameter))
            for name in names
        }
    return {**first, "state": merged}


def _with_most_steps(states: Sequence[State]) -> list[State]:
    """The states with the most steps of any in the groups that count them, as LAMB's do.

    A worker whose gradient was dropped has counted fewer.
    """
    most: list[dict[str, Any]] = []
    for groups in zip(*(state["param_groups"] for state in states), strict=True):
        steps = [group.get("step") for group in groups]
        most.append({"step": max(steps)} if all(isinstance(each, int | float | Tensor) for each in steps) else {})
    return [
        {**state, "param_groups": [{**group, **step} for group, step in zip(state["param_groups"], most, strict=True)]}
        for state in states
    ]


def _merged_memory(name: str, parameter: str, values: Sequence[Any], shape: tuple[int, ...] | None) -> Any:
    # A worker whose parameter had no gradient yet remembers nothing of it; the others' mean is then that of fewer.
    found = [value for value in values if value is not None]
    if not found or all(same(value, found[0]) for value in found):
        return found[0] if found else None
    if all(isinstance(value, int | float) for value in found):
        return max(found)
    if all(isinstance(value, Tensor) and value.shape == found[0].shape for value in found):
        tensors = cast(list[Tensor], found)
        # A counter of steps is one number; so is the momentum of a parameter with one element, which is like it.
        like = tensors[0].is_floating_point() and name != "step" and tuple(tensors[0].shape) == shape
        if tensors[0].numel() == 1 and not like:
            return torch.stack(tensors).amax(0)
        # What is not like the parameter, such as a table of samples, belongs to the worker's own data.
        if tensors[0].is_floating_point() and shape is not None and snapshot.fits(tuple(tensors[0].shape), shape):
            return mean_of(tensors)
    raise CheckpointError(
        f"what optimizers remember as {name!r} of {parameter} differs between workers and has no mean, so their number "
        f"cannot change; resume with {len(values)} workers, or begin anew from exported weights"
    )


def _difference(values: Sequence[Any]) -> str:
    """The name of the first hyperparameter that differs between workers."""
    groups = cast(list[list[dict[str, Any]]], values)
    if all(isinstance(each, list) for each in values):
        for mine, theirs in pairwise(groups):
            for i, (a, b) in enumerate(zip(mine, theirs, strict=False)):
                for name in a:
                    if not same(a[name], b.get(name)):
                        return f"{name} of group {i}"
    return "settings"


def mean_of(tensors: Sequence[Tensor]) -> Tensor:
    """What all workers' values of a buffer, or of a moment, become: their mean, or rank 0's where there is none."""
    first = tensors[0]
    dense = first.layout == torch.strided
    # Equal tensors are not averaged: the mean could round them.
    if not (dense and first.is_floating_point() and first.element_size() > 1) or all(same(x, first) for x in tensors):
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
