# SPDX-License-Identifier: Apache-2.0
"""The state of one worker between two steps: packed, checked, unpacked, and merged for another number of workers.

A state is nested dicts of named tensors and JSON values. Checkpoints write it to disk, joining workers receive it, and
`Worker.state_dict` returns it under flat names. `check` refuses a state that is damaged, forged or of another run
before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from math import isnan
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from thinwire.core.comm.base import Comm
from thinwire.core.comm.pending import PendingMeans
from thinwire.core.comm.threads import run_threads
from thinwire.core.comm.work import completed
from thinwire.core.kernels.decisions import host_copy
from thinwire.core.replica.flat import Segment, flatten, views
from thinwire.core.replica.moments import Moments, fresh_optimizer, parts_of
from thinwire.core.replica.replica import Replica
from thinwire.core.replica.shards import local
from thinwire.core.replica.state import (
    SCHEDULED,
    load_optimizer,
    pack_optimizer,
    parameter_names,
    replace_entries,
)
from thinwire.core.storage.tree import HEADER, from_tensors, to_tensors
from thinwire.errors import CheckpointError
from thinwire.methods.codecs.feedback import residual_sizes
from thinwire.methods.strategies.base import At, Strategy, codecs_of, gradient_buffer, nested, starts_again
from thinwire.registry import canonical
from thinwire.worker.guards import rebase
from thinwire.worker.handshake import describe_tensor, fingerprint
from thinwire.worker.parameters import learning_rate, named_buffers, named_parameters
from thinwire.worker.state import WorkerState

State = dict[str, Any]
STRATEGY, SIZE, RANK = "the strategy", "the number of workers", "the rank"
PARTS = ("identity", "step", "parameters", "replicas", "others", "optimizer")
_NUMBERS = frozenset(("step", "fingerprint"))
_OWN = "thinwire."
_ALIKE = "Load a checkpoint of the same model, optimizer, strategy and version of thinwire"


def new_replica(
    worker: WorkerState,
    strategy: Strategy,
    x: Tensor,
    parameters: list[nn.Parameter],
    segments: tuple[Segment, ...],
    means: PendingMeans,
) -> Replica:
    """Return a replica over a flat vector of a worker, for a strategy that is to start on it."""
    return Replica(
        x,
        gradient_buffer(strategy, x),
        worker.comm,
        lr=learning_rate(worker.optimizer, parameters, segments, x),
        seed=worker.seed,
        segments=segments,
        moments=Moments(worker.optimizer, parameters, segments),
        pending_means=means,
    )


def part_name(worker: WorkerState, rank: int) -> str:
    """Return the key of a rank's state among those of all ranks, of all parts of the model."""
    place = worker.own_folder("").name
    return f"{place}-rank-{rank:04d}" if place else f"rank-{rank:04d}"


def pack(
    worker: WorkerState,
    parts: Collection[str] = PARTS,
    *,
    keeps: Callable[[Replica, str], bool] = lambda replica, name: True,
    inflight: bool = True,
) -> State:
    """Return the state of this rank in host memory; it shares no memory with the worker.

    Args:
        worker: this rank's.
        parts: which parts of the state; all unless given.
        keeps: whether an entry of a strategy's state is packed, from its replica and its name.
        inflight: whether to wait for messages in flight and pack the received data.
    """
    if inflight:
        worker.wait_pending()
    worker.shards.read()
    packers: dict[str, Callable[[], Any]] = {
        "identity": lambda: identity_of(worker),
        "step": lambda: worker.step,
        "parameters": lambda: {name: host_copy(x) for name, x in _parameters(worker).items()},
        "replicas": lambda: [
            {
                # In this order, and with these strides, they lie in the vectors of the strategy's state.
                "layout": layout_of(worker, i),
                "state": {name: host_copy(x) for name, x in replica.state.items() if keeps(replica, name)},
                # Saved as received data: the resumed run collects it as if it had just arrived.
                "inflight": {
                    name: [host_copy(x) for x in work.wait()] for name, work in replica.inflight.items() if inflight
                },
            }
            for i, replica in enumerate(worker.replicas)
        ],
        "fingerprint": lambda: _fingerprint(worker),
        "others": lambda: {name: host_copy(x) for name, x in others_of(worker).items()},
        "optimizer": lambda: pack_optimizer(worker.optimizer, _optimizer_names(worker)),
    }
    return {part: packers[part]() for part in parts}


def parts_of_state(*, model: bool, optimizer: bool) -> tuple[str, ...]:
    """Return the parts of a state with or without the model and the optimizer."""
    # Without the parameters the state has a fingerprint of those it was packed at.
    with_model = ("parameters", "others") if model else ("fingerprint",)
    return ("identity", "step", "replicas", *with_model, *(("optimizer",) if optimizer else ()))


# -- flat names --------------------------------------------------------------------------------------------------------


def to_flat(state: State, part: str) -> dict[str, Tensor]:
    """Return a state as tensors by flat names, which begin with the name of its part.

    The header, a JSON text, is a tensor of bytes among them.
    """
    numbers = {name: torch.tensor(state[name], dtype=torch.int64, device="cpu") for name in _NUMBERS & state.keys()}
    return {f"{part}{path}": x for path, x in to_tensors({**state, **numbers}).items()}


def from_flat(tensors: Mapping[str, Any]) -> dict[str, State]:
    """Restore the states that `to_flat` returned, by their parts.

    Raises:
        CheckpointError: they are no such states, or of a later version of thinwire.
    """
    parts: dict[str, dict[str, Any]] = {}
    for name, x in tensors.items():
        part, slash, path = name.partition("/")
        parts.setdefault(part, {})[slash + path] = x
    return {part: _joined(part, found) for part, found in parts.items()}


def _joined(part: str, tensors: dict[str, Any]) -> State:
    if HEADER not in tensors:
        raise CheckpointError(f"the state lacks {part}{HEADER}. Pass the result of Worker.state_dict()")
    try:
        state = mapping_of(from_tensors(part, tensors), "a rank's part")
        if "parameters" in state:
            state.pop("fingerprint", None)
        return {**state, **{name: int(state[name]) for name in _NUMBERS & state.keys()}}
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(
            f"the state lacks {part}{error.args[0]}. torch.distributed.checkpoint.load reads only what the new worker "
            "has already. Use thinwire.integrations.dcp.load(worker, folder)"
        ) from error
    except Exception as error:  # whatever a parser of damaged or forged bytes raises
        raise CheckpointError(f"{part}: cannot be read ({type(error).__name__}: {error})"[:300]) from error


def layout_of(worker: WorkerState, replica: int) -> list[list[Any]]:
    """Return the parameters of a replica's vector in their order: names and strides."""
    _, segments = worker.layouts[replica]
    return [[segment.name, list(segment.stride)] for segment in segments]


def _fingerprint(worker: WorkerState) -> int:
    worker.shards.read()
    return fingerprint(r.x for r in worker.replicas)


def _parameters(worker: WorkerState) -> dict[str, Tensor]:
    """Return the trained parameters by name, as views of the replicas' vectors."""
    return {
        segment.name: view
        for replica, (_, segments) in zip(worker.replicas, worker.layouts, strict=True)
        for segment, view in zip(segments, views(replica.x.detach(), segments), strict=True)
    }


def others_of(worker: WorkerState) -> dict[str, Tensor]:
    """Return the model's buffers, and the parameters that the optimizer does not update, by name."""
    flat = {id(p) for parameters, _ in worker.layouts for p in parameters}
    parameters = {name: local(p.detach()) for name, p in named_parameters(worker.model).items() if id(p) not in flat}
    # A sparse tensor that is detached has indices and values of its own, and copying into it changes nothing.
    return parameters | {
        name: buffer.detach() if buffer.layout == torch.strided else buffer
        for name, buffer in named_buffers(worker.model).items()
    }


def identity_of(worker: WorkerState) -> dict[str, str]:
    """Return the facts that must be equal in a checkpoint and in the run that loads it."""
    groups = [len(group["params"]) for group in worker.optimizer.param_groups]
    return {
        STRATEGY: canonical(worker.strategy),
        SIZE: str(worker.comm.size),
        RANK: str(worker.comm.rank),
        "the seed": str(worker.seed),
        "the optimizer": f"{type(worker.optimizer).__name__} over groups of {groups} parameters",
        **{
            f"parameter {segment.name}": describe_tensor(parameter)
            for parameters, segments in worker.layouts
            for parameter, segment in zip(parameters, segments, strict=True)
        },
        **{f"{name}, which is not trained,": describe_tensor(x) for name, x in others_of(worker).items()},
    }


# -- the optimizer, by the parameters' names ---------------------------------------------------------------------------


def _optimizer_names(worker: WorkerState) -> list[str]:
    """Return the names of the optimizer's parameters, in the order in which torch numbers them."""
    return parameter_names(worker.optimizer, {id(p): name for name, p in named_parameters(worker.model).items()})


def optimizer_groups(worker: WorkerState) -> list[dict[str, Any]]:
    """Return the optimizer's groups, with the names of parameters in place of their numbers."""
    return pack_optimizer(worker.optimizer, _optimizer_names(worker), only=())["param_groups"]


# -- check and unpack --------------------------------------------------------------------------------------------------


def unpack(state: Mapping[str, Any], worker: WorkerState, *, same_size: bool = True) -> None:
    """Restore a state that `check` has accepted.

    Args:
        state: from `pack`, or from `merge` where another number of workers has packed it.
        worker: this rank's.
        same_size: whether it is from `pack`. Otherwise all ranks must call together: strategies start at the parameters
            of the state, and what was merged of their state then takes the place of what they start with.
    """
    _unpack_parameters(worker, state)
    with torch.no_grad():
        for replica, saved in zip(worker.replicas, state["replicas"], strict=True):
            strategy, inflight = saved["state"], saved["inflight"]
            if not same_size:
                replica.equal_start = True
                replace_state(replica, {}, {})
                worker.strategy.start(replica)
                strategy = {**replica.state, **strategy}
                if starts_again(worker.strategy):
                    inflight = None
            # In one call, because a message of a rank that trains already may be handled meanwhile.
            replace_state(replica, strategy, inflight)
        for name, x in others_of(worker).items() if "others" in state else ():
            x.copy_(state["others"][name])
    if "optimizer" in state:
        load_optimizer(worker.optimizer, _optimizer_names(worker), state["optimizer"])
    worker.resumed = True
    rebase(worker)


def _unpack_parameters(worker: WorkerState, state: Mapping[str, Any]) -> None:
    worker.wait_pending()
    if "parameters" in state:
        with torch.no_grad():
            for name, x in _parameters(worker).items():
                x.copy_(state["parameters"][name])
        worker.shards.write()
    for replica in worker.replicas:
        replica.step = state["step"]
    worker.comm.step = worker.step


def replace_state(
    replica: Replica, state: Mapping[str, Tensor], inflight: Mapping[str, Sequence[Tensor]] | None
) -> None:
    """Replace a replica's state and messages in flight, in place: parts of the replica are views of these mappings.

    Args:
        replica: the replica.
        state: copied to the devices on which the strategy keeps it.
        inflight: received messages that were not used yet; None keeps messages in flight.
    """
    states = {name: x.clone().to(_device_for(replica.state.get(name), x, replica.x)) for name, x in state.items()}
    received = {name: completed([x.clone().to(replica.x.device) for x in xs]) for name, xs in (inflight or {}).items()}
    replace_entries(replica.state, states)
    if inflight is not None:
        replace_entries(replica.inflight, received)


def _device_for(fresh: Tensor | None, saved: Tensor, x: Tensor) -> torch.device:
    """The device on which a strategy allocates this state tensor, which may be the CPU; else that of the parameters."""
    return fresh.device if fresh is not None and fresh.shape == saved.shape else x.device


# -- checks ------------------------------------------------------------------------------------------------------------


def check(
    state: object, worker: WorkerState, parts: Collection[str] = PARTS, *, ranks: bool = True, finite: bool = False
) -> None:
    """Refuse a state that does not fit the worker; nothing is changed.

    Args:
        state: from `pack`, a file or a user; it may be anything.
        worker: the worker that is to continue from it.
        parts: the parts that it must have.
        ranks: whether it must be of this rank and this number of workers.
        finite: whether parameters must be finite, as those that `Worker.save` writes are.

    Raises:
        CheckpointError: naming the first thing that does not fit.
    """
    found = mapping_of(state, "the state")
    same_names("the state", found, parts)
    check_identity(worker, mapping_of(found["identity"], "the identity"), ranks=ranks)
    if not is_count(found["step"]):
        raise CheckpointError(f"step={found['step']!r}: must be a number of steps")
    if "parameters" in found:
        _check_tensors("parameters", found["parameters"], _parameters(worker))
        for name, x in found["parameters"].items() if finite else ():
            if x.is_floating_point() and not torch.isfinite(x).all():
                raise CheckpointError(f"parameter {name} is not finite. Continue from an earlier checkpoint")
        _check_tensors("buffers and frozen parameters", found["others"], others_of(worker))
    elif found["fingerprint"] != _fingerprint(worker):
        raise CheckpointError(
            "the parameters are not those at which the state was saved, and it holds no model. Load the model before "
            "the worker, each rank its own, or save worker.state_dict(model=True, optimizer=True)"
        )
    replicas = found["replicas"]
    if not isinstance(replicas, list) or len(cast(list[Any], replicas)) != len(worker.replicas):
        raise CheckpointError(
            f"replicas: must be a list of {len(worker.replicas)} flat vectors, one for each dtype and device"
        )
    for i, saved in enumerate(cast(list[Any], replicas)):
        _check_replica(worker, i, mapping_of(saved, f"vector {i}"), whole=ranks)
    if "optimizer" in found:
        _check_optimizer(worker, mapping_of(found["optimizer"], "the optimizer's state"))


def check_identity(worker: WorkerState, theirs: Mapping[str, Any], *, ranks: bool = True) -> None:
    """Refuse a state of another recipe, model, seed or optimizer; of another rank only if `ranks`."""
    ours = identity_of(worker)
    for name in {**ours, **theirs}:
        if name not in theirs or name not in ours:
            raise CheckpointError(f"{name} is missing in the {'run' if name in theirs else 'checkpoint'}")
        if ours[name] != theirs[name] and (ranks or name not in (SIZE, RANK)):
            fix = ". Attach with that of the checkpoint" * (name == STRATEGY)
            raise CheckpointError(f"{name} is {theirs[name]} in the checkpoint and {ours[name]} in this run{fix}")


def is_count(value: object) -> bool:
    """Return True if it is an integer that is not negative; JSON's `true` is none."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def mapping_of(value: object, what: str) -> dict[str, Any]:
    """Return the value, which must be a dict by name.

    Raises:
        CheckpointError: it is something else.
    """
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in cast(dict[Any, Any], value)):
        raise CheckpointError(f"{what} is a {type(value).__name__}: must be a dict whose keys are names. {_ALIKE}")
    return cast(dict[str, Any], value)


def same_names(what: str, found: Iterable[str], wanted: Iterable[str]) -> None:
    """Refuse other names than these.

    Raises:
        CheckpointError: naming the first that is missing or too many.
    """
    missing, extra = set(wanted) - set(found), set(found) - set(wanted)
    if missing or extra:
        name, how = (min(missing), "lacks") if missing else (min(extra), "has the unknown entry")
        raise CheckpointError(f"{what} {how} {name!r}")


def _check_tensors(what: str, found: object, wanted: Mapping[str, Tensor]) -> None:
    tensors = mapping_of(found, what)
    same_names(what, tensors, wanted)
    for name, x in wanted.items():
        _check_like(f"{what}: {name}", tensors[name], x.dtype, [x.shape])
        if tensors[name].layout != x.layout:
            raise CheckpointError(f"{what}: {name} has layout {tensors[name].layout}: must be {x.layout}. {_ALIKE}")


def _check_like(what: str, found: object, dtype: torch.dtype | None, shapes: Iterable[Sequence[int]]) -> None:
    if not isinstance(found, Tensor):
        raise CheckpointError(f"{what} is a {type(found).__name__}: must be a tensor. {_ALIKE}")
    if dtype is not None and found.dtype != dtype:
        raise CheckpointError(f"{what} has dtype {found.dtype}: must be {dtype}. {_ALIKE}")
    allowed = [tuple(shape) for shape in shapes]
    if allowed and tuple(found.shape) not in allowed:
        raise CheckpointError(f"{what} has shape {tuple(found.shape)}: must be {allowed[0]}. {_ALIKE}")


def _check_replica(worker: WorkerState, i: int, saved: Mapping[str, Any], *, whole: bool) -> None:
    """Check the strategy's state and messages, as far as their sizes can be known before training continues."""
    same_names(f"vector {i}", saved, ("layout", "state", "inflight"))
    if saved["layout"] != layout_of(worker, i):
        raise CheckpointError(
            f"vector {i}: parameters lie in another order or memory format than in this run. Build the same model"
        )
    state = mapping_of(saved["state"], "the strategy's state")
    inflight = mapping_of(saved["inflight"], "what is in flight")
    for name, xs in inflight.items():
        if not isinstance(xs, list):
            raise CheckpointError(f"{name!r} in flight is a {type(xs).__name__}: must be a list of tensors. {_ALIKE}")
    received = [(f"{name!r} in flight", name, x) for name, xs in inflight.items() for x in cast(list[Any], xs)]
    for what, _, x in [*((f"state {name!r}", name, x) for name, x in state.items()), *received]:
        _check_like(what, x, None, ())
    # A rank of another number of workers has other sizes; and only its author knows a strategy from elsewhere.
    if not whole or not all(type(each).__module__.startswith(_OWN) for each in nested(worker.strategy)):
        return
    started, replica = worker.started[i], worker.replicas[i]
    for name in started:
        if name not in state:
            raise CheckpointError(
                f"state {name!r} is missing: {type(worker.strategy).__name__} starts with it. {_ALIKE}"
            )
    # The replica's vector, and those of its parts.
    sizes = list(dict.fromkeys(part.x.numel() for part in replica.tree()))
    like = [(), (1,), *((n,) for n in sizes), *(shape for _, shape in started.values())]
    for what, name, x in [*((f"state {name!r}", name, x) for name, x in state.items()), *received]:
        if _grows(worker.strategy, name):
            continue
        if x is state.get(name) and name in started:
            _check_like(what, x, started[name][0], [started[name][1]])
        else:
            residual = residual_sizes(name, sizes)
            _check_like(what, x, None, like if residual is None else [(n,) for n in residual])


def _grows(strategy: Strategy, name: str) -> bool:
    parts = [part for method in nested(strategy) for part in (method, *codecs_of(method))]
    return any(f"/{each}" in f"/{name}" for part in parts for each in part.traits.growing)


def _check_optimizer(worker: WorkerState, saved: Mapping[str, Any]) -> None:
    """Compare the structure with that of this run's optimizer."""
    ours, names = worker.optimizer.state_dict(), _optimizer_names(worker)
    same_names("the optimizer's state", saved, ours)
    groups = saved["param_groups"]
    if not isinstance(groups, list) or len(cast(list[Any], groups)) != len(ours["param_groups"]):
        raise CheckpointError(f"param_groups: must be a list of {len(ours['param_groups'])} parameter groups")
    for i, (mine, theirs) in enumerate(zip(ours["param_groups"], cast(list[Any], groups), strict=True)):
        what = f"optimizer group {i}"
        one_only = (mapping_of(theirs, what).keys() ^ mine.keys()) & SCHEDULED
        same_names(what, theirs.keys() - one_only, mine.keys() - one_only)
        for name in one_only & theirs.keys():
            _check_setting(f"{name} of {what}", theirs[name], 0.0)
        for name, value in mine.items():
            if name == "params":
                # In any order: the state of each parameter is found by its name.
                same_names(what, _texts(theirs[name], what), [names[number] for number in value])
            elif name not in one_only:
                _check_setting(f"{name} of {what}", theirs[name], value)
    held, likes = mapping_of(saved["state"], "the optimizer state"), _likes(worker)
    own = {names[key] if isinstance(key, int) else key: value for key, value in ours["state"].items()}
    for name, entries in held.items():
        if name not in names and name not in own:
            raise CheckpointError(f"the optimizer state has an entry for {name!r}, which the optimizer does not train")
        what = f"the optimizer state of {name}"
        _check_memory(name, mapping_of(entries, what), own.get(name), likes.get(name))


def _texts(value: object, what: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in cast(list[Any], value)):
        raise CheckpointError(
            f"the parameters of {what} are {value!r:.80}: must be a list of names. Save a new checkpoint"
        )
    return cast(list[str], value)


def _check_setting(what: str, found: Any, wanted: Any) -> None:
    """Compare a hyperparameter's type; its value may have been scheduled."""
    if isinstance(wanted, int | float):
        alike = isinstance(found, int | float | Tensor) and not (isinstance(found, float) and isnan(found))
    elif isinstance(wanted, tuple | list):
        alike = isinstance(found, tuple | list) and len(cast(list[Any], found)) == len(cast(list[Any], wanted))
    else:
        alike = wanted is None or found is None or isinstance(found, type(wanted))
    if not alike:
        raise CheckpointError(f"{what} is {found!r} in the checkpoint and {wanted!r} in this run. Make them equal")


def _check_memory(name: str, found: Mapping[str, Any], ours: Mapping[str, Any] | None, like: _Like | None) -> None:
    """Check the optimizer state of one parameter.

    Args:
        name: of the parameter.
        found: its saved state.
        ours: its state in this run's optimizer, if any: tensors must have these sizes.
        like: the parameter's shape, and the names that there must be; None where neither is known.
    """
    for key, value in found.items():
        what, mine = f"{key!r} in the optimizer state of {name}", (ours or {}).get(key)
        if isinstance(mine, Tensor):
            _check_like(what, value, None, [local(mine).shape])
        elif isinstance(value, Tensor) and like is not None and not fits(tuple(value.shape), like.shape):
            raise CheckpointError(f"{what} has shape {tuple(value.shape)}, but the parameter has {like.shape}")
    missing = like.names - found.keys() if like is not None and found else ()
    if missing:
        raise CheckpointError(
            f"the optimizer state of {name} needs {min(missing)!r}, which the checkpoint does not have"
        )


class _Like(NamedTuple):
    """Optimizer state of a parameter has its shape, or is reduced over dimensions; and has these names."""

    shape: tuple[int, ...]
    names: frozenset[str]


def _likes(worker: WorkerState) -> dict[str, _Like]:
    """Return the known optimizer state of each parameter for torch's own optimizers, from one step of a new one."""
    names = iter(_optimizer_names(worker))
    found: dict[str, _Like] = {}
    for optimizer, group in ((each, group) for each in parts_of(worker.optimizer) for group in each.param_groups):
        # LBFGS has vectors of all parameters together; other packages' optimizers are unknown.
        known = type(optimizer).__module__.startswith("torch.optim") and not isinstance(optimizer, LBFGS)
        samples: dict[tuple[int, torch.dtype], frozenset[str]] = {}
        for parameter in group["params"]:
            name, kind = next(names), (parameter.dim(), parameter.dtype)
            if known and kind not in samples:
                samples[kind] = _names_after_a_step(optimizer, group, *kind)
            if known:
                found[name] = _Like(tuple(local(parameter).shape), samples[kind])
    return found


def _names_after_a_step(
    optimizer: Optimizer, group: Mapping[str, Any], dimensions: int, dtype: torch.dtype
) -> frozenset[str]:
    sample = nn.Parameter(torch.zeros((2,) * dimensions, dtype=dtype, device="cpu"))
    sample.grad = torch.zeros_like(sample)
    try:
        with torch.device("cpu"):  # torch makes counters on the default device
            new = fresh_optimizer(optimizer, [{**group, "params": [sample]}])
            new.step()
    except Exception:
        return frozenset()
    return frozenset(name for name, value in new.state[sample].items() if value is not None)


def fits(shape: tuple[int, ...], parameter: tuple[int, ...]) -> bool:
    """Return True if a tensor can belong to a parameter: like it, a number, or reduced over some of its dimensions."""
    if len(shape) > len(parameter):
        return shape == (1,)
    rest = iter(parameter)
    return all(any(n in (1, m) for m in rest) for n in shape)


# -- for another number of workers -------------------------------------------------------------------------------------


def merge(states: Sequence[State], worker: WorkerState) -> State:
    """Return this rank's state for another number of workers, from the states of all old ranks.

    Raises:
        CheckpointError: they are not states of one run of this recipe, or something cannot be redistributed.
    """
    first, size, rank = states[0], worker.comm.size, worker.comm.rank
    for old, state in enumerate(states):
        identity = mapping_of(state["identity"], "the identity")
        check_identity(worker, identity, ranks=False)
        if (identity[SIZE], identity[RANK]) != (str(len(states)), str(old)) or state["step"] != first["step"]:
            raise CheckpointError(f"part {old} is not that of rank {old} among {len(states)} at step {first['step']}")
        check(state, worker, ranks=False)
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
    """Return the parameters from which the new workers continue."""
    replica, (_, segments) = worker.replicas[i], worker.layouts[i]
    saved = [state["replicas"][i] for state in states]
    xs = [flatten([state["parameters"][segment.name] for segment in segments], segments) for state in states]
    # Equal vectors are not averaged: their mean could be rounded.
    if all(torch.equal(x, xs[0]) for x in xs) and not starts_again(worker.strategy):
        return xs[0]
    rate = replica.lr
    return average_of(
        worker.strategy,
        xs,
        saved,
        segments,
        step=states[0]["step"],
        seed=worker.seed,
        lr=rate.cpu() if isinstance(rate, Tensor) else rate,
        timeout=worker.comm.timeout,
    )


def average_of(
    strategy: Strategy,
    xs: Sequence[Tensor],
    saved: Sequence[Mapping[str, Any]],
    segments: Sequence[Segment],
    *,
    step: int,
    seed: int,
    lr: float | Tensor = 0.0,
    timeout: float = 60.0,
    at: At = "resume",
) -> Tensor:
    """Compute the consensus of the old workers with the strategy itself, on threads.

    Args:
        strategy: of the run.
        xs: the parameters of each of them.
        saved: their state and messages in flight, as `pack` has them.
        segments: where parameters lie in the vectors.
        step: at which they were saved.
        seed: of the run.
        lr: the learning rate.
        timeout: of their calls, in seconds.
        at: what the average is for.
    """

    def compute(comm: Comm) -> Tensor:
        x, own = xs[comm.rank].clone(), saved[comm.rank]
        r = Replica(x, x.new_empty(0), comm, lr=lambda: lr, seed=seed, segments=segments)
        r.step = comm.step = step
        r.state.update({name: y.clone() for name, y in own["state"].items()})
        r.inflight.update({name: completed([y.clone() for y in ys]) for name, ys in own["inflight"].items()})
        with torch.no_grad():
            return strategy.average(r, at).clone()

    found = run_threads(len(xs), compute, timeout=timeout)[0]
    if found.shape != xs[0].shape or found.dtype != xs[0].dtype:
        raise CheckpointError(
            f"{type(strategy).__name__}: the workers that saved agree on no vector of the parameters' shape and dtype"
        )
    return found


def _resized_replica(saved: Sequence[Mapping[str, Any]], worker: WorkerState) -> dict[str, Any]:
    states = worker.strategy.resized([each["state"] for each in saved], worker.comm.size)
    if states is None:
        raise CheckpointError(
            f"{type(worker.strategy).__name__} has state on every worker that cannot be redistributed over another "
            f"number. Resume with {len(saved)} workers"
        )
    # Messages that a worker received cannot be given to others; their effect is in the resume point.
    alike = all(same(each["inflight"], saved[0]["inflight"]) for each in saved)
    return {
        "layout": saved[0]["layout"],
        "state": states[worker.comm.rank],
        "inflight": saved[0]["inflight"] if alike else {},
    }


# -- means -------------------------------------------------------------------------------------------------------------


def _merged_optimizer(states: Sequence[State], shapes: Mapping[str, tuple[int, ...]]) -> State:
    """Return one optimizer's state for all: means of moments, and the most steps where their numbers differ.

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
                "cannot change. Use one schedule on all workers"
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
    """Return the states with the most steps of any in the groups that count them, as LAMB's do.

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
    # A worker without a gradient of a parameter has no state of it; the mean is over the others.
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
        # State with another shape, such as a table of samples, belongs to the worker's own data.
        if tensors[0].is_floating_point() and shape is not None and fits(tuple(tensors[0].shape), shape):
            return mean_of(tensors)
    raise CheckpointError(
        f"the optimizer state {name!r} of {parameter} differs between workers and has no mean, so their number "
        f"cannot change. Resume with {len(values)} workers, or restart from exported weights"
    )


def _difference(values: Sequence[Any]) -> str:
    """Return the name of the first hyperparameter that differs between workers."""
    groups = cast(list[list[dict[str, Any]]], values)
    if all(isinstance(each, list) for each in values):
        for mine, theirs in pairwise(groups):
            for i, (a, b) in enumerate(zip(mine, theirs, strict=False)):
                for name in a:
                    if not same(a[name], b.get(name)):
                        return f"{name} of group {i}"
    return "settings"


def mean_of(tensors: Sequence[Tensor]) -> Tensor:
    """Merge all workers' values of a buffer or a moment: their mean, or rank 0's value if there is none."""
    first = tensors[0]
    dense = first.layout == torch.strided
    # Equal tensors are not averaged: the mean could round them.
    if not (dense and first.is_floating_point() and first.element_size() > 1) or all(same(x, first) for x in tensors):
        return first
    return torch.stack([x.double() for x in tensors]).mean(0).to(first.dtype)


def same(a: Any, b: Any) -> bool:
    """Return True if two trees of tensors and plain values are equal; NaN counts as equal to NaN."""
    if isinstance(a, Tensor):
        alike = isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype
        return alike and (torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all()))
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b or (a != a and b != b))
