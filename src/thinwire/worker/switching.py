# SPDX-License-Identifier: Apache-2.0
"""Continue with another strategy, at a step that all ranks agree on.

The new strategy starts where the old one's round would end, at its `Strategy.average`. State of the old strategy is
kept if the new one has the same class and uses it in the same sense; `kept` is that rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from thinwire.core.comm.base import RULE
from thinwire.core.comm.pending import PendingMeans
from thinwire.core.replica.replica import Replica
from thinwire.core.replica.shards import local
from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec
from thinwire.methods.codecs.feedback import ErrorFeedback, residual_sizes
from thinwire.methods.strategies.base import Strategy, pace_rule, starts_again
from thinwire.methods.strategies.wrapper import Wrapper
from thinwire.worker.compatibility import (
    check_arguments,
    check_carried,
    check_closures,
    check_compatible,
    check_mesh,
    check_skipped_steps,
)
from thinwire.worker.guards import switched_between
from thinwire.worker.handshake import agree
from thinwire.worker.replica_state import new_replica
from thinwire.worker.state import WorkerState
from thinwire.worker.step import share_skips, watch_gradients

_BASE = "base/"


@dataclass(frozen=True)
class Switched:
    """The result of a switch on this rank.

    Attributes:
        step: optimizer steps done before it.
        before: the recipe until then.
        after: the recipe from then on.
        kept: names of the old strategy's state that the new one continues with; an anchor among it has moved.
        dropped: names of state that the new strategy does not use; its own state starts fresh.

    Example:
        >>> import torch, thinwire
        >>> model = torch.nn.Linear(1, 1)
        >>> worker = thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), thinwire.AllReduce())
        >>> worker.switch("SlowMo(period=12)").before, worker.strategy.period
        ('AllReduce()', 12)
    """

    step: int
    before: str
    after: str
    kept: tuple[str, ...]
    dropped: tuple[str, ...]


def switch(worker: WorkerState, strategy: Strategy | str) -> Switched:
    """Replace the worker's strategy; `Worker.switch` describes it."""
    before = worker.strategy
    if worker.replicas[0].active < worker.comm.size:
        # All that are here know it; the others answer steps, and nothing else.
        problem = "switch() within join(), when the data of some ranks have ended. Call it before or after that loop"
        worker.comm.raise_on_all(ConfigError(f"{worker.comm.name(worker.comm.rank)}, step {worker.step}: {problem}"))
    new = _agreed(worker, strategy)
    points = [_point(worker, before, replica) for replica in worker.replicas]
    # Requests to mailboxes of the old strategy are still answered: no rank closes one before all have arrived.
    worker.comm.check_in_step("switch()").wait()

    own = [replica.x.clone() for replica in worker.replicas]
    in_step, rule = worker.comm.in_step, worker.comm.rule
    try:
        worker.comm.in_step = worker.may_be_in_step and not new.traits.timing_dependent
        worker.comm.rule = pace_rule(new) if new.traits.meets_every > 1 else RULE
        means = PendingMeans()  # shared by all new replicas
        begun = [_begun(worker, i, new, point, means) for i, point in enumerate(points)]
    except BaseException:
        worker.comm.in_step, worker.comm.rule = in_step, rule
        with torch.no_grad():
            for replica, x in zip(worker.replicas, own, strict=True):
                replica.x.copy_(x)
        raise
    for replica in worker.replicas:
        for part in replica.tree():
            worker.comm.close_mailbox(part)
    held = [name for replica in worker.replicas for name in replica.state]
    if _must_meet(before, new):
        _let_optimizers_meet(worker)
    worker.strategy = new
    worker.replicas[:] = [replica for replica, _, _ in begun]
    worker.started[:] = [started for _, started, _ in begun]
    worker.shards.write()
    watch_gradients(worker)
    share_skips(worker)
    worker.just_switched = True
    names = {name for _, _, kept in begun for name in kept}
    return Switched(
        worker.step,
        str(before),
        str(new),
        tuple(dict.fromkeys(name for name in held if name in names)),
        tuple(dict.fromkeys(name for name in held if name not in names)),
    )


def _agreed(worker: WorkerState, strategy: Strategy | str) -> Strategy:
    """The new strategy, with which every rank has agreed and which can serve this worker; nothing has changed yet.

    Raises:
        MismatchError: ranks are at different steps, or name different strategies.
        ConfigError: on all ranks, if the strategy cannot serve the worker.
    """
    problem, new = None, worker.strategy
    try:
        new = check_arguments(worker.optimizer, strategy)
        _check(worker, new)
    except ConfigError as error:
        problem = error
    # A rank that refused its own argument alone would leave the others waiting.
    said = str(new) if problem is None else f"{strategy}, refused: {problem}"
    device = worker.replicas[0].x.device
    facts = [("the step", str(worker.step)), ("the strategy to switch to", said)]
    if problem is None and _must_meet(worker.strategy, new):
        facts += [(f"the optimizer state of {name}", what) for name, what in _remembered(worker)]
    agree(worker.comm, facts, device, how="called switch() differently")
    if worker.mesh is not None:
        agree(worker.mesh.block.whole, facts, device, how="called switch() differently")
    if problem is not None:
        raise problem
    return new


def _check(worker: WorkerState, new: Strategy) -> None:
    """Run the checks of `attach` on the new strategy."""
    scaled = worker.scaler is not None and worker.scaler.is_enabled()
    parameters = [p for each, _ in worker.layouts for p in each]
    check_skipped_steps(new, find_unused=worker.find_unused, scaled=scaled)
    check_compatible(new, worker.optimizer, worker.comm.size, parameters)
    check_closures(new, worker.optimizer)
    check_carried(new, math.inf if worker.comm.request_seconds else 0.0)
    if worker.mesh is not None:
        check_mesh(new, worker.optimizer, worker.mesh.block, scaled=scaled)
    # Of a step that a GradScaler has skipped, or a batch that all have left out, nothing is waiting.
    waiting = any(p.grad is not None and bool(local(p.grad).any()) for p in parameters)
    if worker.backward is not None and worker.backward.exchanged and waiting:
        raise ConfigError(switched_between(worker))
    if not _must_meet(worker.strategy, new):
        return
    known = {name for replica in worker.replicas for name in replica.moments.names}
    for state in worker.optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.numel() > 1 and name not in known:
                raise ConfigError(
                    f"{type(worker.optimizer).__name__} under {new!s}: workers that continue with equal parameters "
                    f"need equal optimizers, and the state {name!r} of this one has no mean. Switch before the "
                    "first step, or restart from exported weights"
                )


def _must_meet(before: Strategy, after: Strategy) -> bool:
    """Return True if the optimizers must be made equal, as momentum would make workers with one gradient diverge."""
    return after.traits.needs_equal_start and not before.traits.needs_equal_start


def _remembered(worker: WorkerState) -> Iterator[tuple[str, str]]:
    for parameters, segments in worker.layouts:
        for parameter, segment in zip(parameters, segments, strict=True):
            state = worker.optimizer.state.get(parameter, {})
            yield (
                segment.name,
                ", ".join(sorted(name for name, value in state.items() if value is not None)) or "nothing",
            )


def _let_optimizers_meet(worker: WorkerState) -> None:
    """Give all workers' optimizers the means of their moments, and the most steps where their numbers differ."""
    counts: list[Tensor] = []
    for replica, (parameters, _) in zip(worker.replicas, worker.layouts, strict=True):
        replica.moments.average_(worker.comm)
        states = [worker.optimizer.state.get(parameter, {}) for parameter in parameters]
        counts += [x for state in states for x in state.values() if isinstance(x, Tensor) and x.numel() == 1]
    if counts:
        own = torch.stack([x.detach().reshape(()).double() for x in counts]).to(worker.replicas[0].x.device)
        most = torch.stack(worker.comm.all_gather(own).wait()).amax(0)
        for x, value in zip(counts, most, strict=True):
            x.copy_(value)
    # LAMB counts steps in its groups, and a worker whose gradient was dropped has counted fewer.
    groups = [group for group in worker.optimizer.param_groups if isinstance(group.get("step"), int)]
    if groups:
        steps = torch.tensor([group["step"] for group in groups], dtype=torch.int64, device=worker.replicas[0].x.device)
        counted = torch.stack(worker.comm.all_gather(steps).wait()).amax(0).tolist()
        for group, count in zip(groups, counted, strict=True):
            group["step"] = count


def _point(worker: WorkerState, before: Strategy, replica: Replica) -> Tensor:
    """Return the point from which all workers continue."""
    # Equal parameters are not averaged: their mean could be rounded.
    if before.traits.equal_replicas and not starts_again(before):
        return replica.x.clone()
    with torch.no_grad():
        replica.wait_pending()
        return before.average(replica, "end").clone()


def _begun(
    worker: WorkerState, i: int, new: Strategy, point: Tensor, means: PendingMeans
) -> tuple[Replica, dict[str, tuple[torch.dtype, tuple[int, ...]]], list[str]]:
    """Make a replica of the new strategy at the point; return it with its initial and kept state names."""
    old, (parameters, segments) = worker.replicas[i], worker.layouts[i]
    with torch.no_grad():
        old.x.copy_(point)
        r = new_replica(worker, new, old.x, parameters, segments, means)
        r.step, r.active = old.step, old.active
        new.start(r)
        started = {name: (x.dtype, tuple(x.shape)) for name, x in r.state.items()}
        weight = worker.strategy.traits.rounds.weight
        held = {name: x for name, x in old.state.items() if name != weight}
        names = kept(worker.strategy, new, held, r)
        for name in names:
            r.state[name] = held[name]
        # Every rank calls it or none, whatever was found: it may send messages.
        if type(worker.strategy) is type(new) and not _begins_anew(new):
            new.restart(r)
    return r, started, names


# -- kept state ------------------------------------------------------------------------------------------------------


def kept(before: Strategy, after: Strategy, held: Mapping[str, Tensor], fresh: Replica) -> list[str]:
    """Return the names of state that the new strategy continues with.

    Kept is what belongs to a strategy of the same class at the same place of the recipe, if its size is the same:
    momenta, counters, and residuals where both codecs have error feedback. `Strategy.restart` then sets what refers to
    earlier parameters, such as an anchor, to the current ones. Strategies whose state belongs to single workers
    (`on_resize` "start") or to moments in time (`timing_dependent`) start fresh.

    Args:
        before: the old strategy.
        after: the new one.
        held: the old one's state.
        fresh: the new one's replica, as its `start` has left it.
    """
    names: list[str] = []
    pairs = list(_pairs(before, after))
    sizes = [part.x.numel() for part in fresh.tree()]
    for name, x in held.items():
        own, depth = name, 0
        while own.startswith(_BASE):
            own, depth = own.removeprefix(_BASE), depth + 1
        if depth >= len(pairs):
            continue
        mine, theirs = pairs[depth]
        if _begins_anew(theirs) or any(own.startswith(each) for each in theirs.traits.growing):
            continue
        if own == "error" or own.startswith("server_error/"):
            fits = _both_feed_back(mine, theirs) and x.numel() in (residual_sizes(own, sizes) or ())
        elif name in fresh.state:
            like = fresh.state[name]
            fits = like.dtype == x.dtype and like.shape == x.shape
        else:
            fits = mine == theirs
        if fits:
            names.append(name)
    return names


def _pairs(before: Strategy, after: Strategy) -> Iterator[tuple[Strategy, Strategy]]:
    """Yield the strategies of two recipes at the same places, outermost first, while their classes are equal."""
    while type(before) is type(after):
        yield before, after
        if not isinstance(before, Wrapper) or not isinstance(after, Wrapper):
            return
        before, after = before.base, after.base


def _begins_anew(strategy: Strategy) -> bool:
    return strategy.traits.timing_dependent or strategy.traits.on_resize == "start"


def _both_feed_back(mine: Strategy, theirs: Strategy) -> bool:
    codecs = [_codecs(mine), _codecs(theirs)]
    return codecs[0] == codecs[1] or all(any(isinstance(c, ErrorFeedback) for c in each) for each in codecs)


def _codecs(strategy: Strategy) -> list[Any]:
    values = [getattr(strategy, field.name) for field in fields(strategy)]  # type: ignore[arg-type]
    return [value for value in values if isinstance(value, Codec)]
