# SPDX-License-Identifier: Apache-2.0
"""Training that goes on when workers are lost: each round is kept by all survivors, or repeated by all.

A round is what a strategy's hook does with messages to all workers. It ends with a few bytes from every worker to every
other, which say that its sender has the round's result. So when a peer is lost, the survivors know from what each of
them tells in the store whether all of them have the result, and keep it, or not all, and repeat the round from what
they had before it. Strategies whose workers exchange with neighbours only, at every step, have no such end of a step:
their survivors go on from where they are, at the step of the one that is furthest; the others take their steps up to
there alone.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.comm.base import Comm
from thinwire.comm.liveness import State
from thinwire.comm.work import Work
from thinwire.errors import CommTimeoutError, ConfigError, MismatchError, PeerLostError
from thinwire.membership.elastic_comm import Connector, ElasticComm
from thinwire.membership.fleet import Fleet, fleet_from_environment
from thinwire.membership.membership import Membership, StoreLostError
from thinwire.membership.patience import Patience
from thinwire.membership.view import Progress, View, settled
from thinwire.quorum.elastic_sampler import Crew
from thinwire.replica.replica import Replica
from thinwire.replica.shards import is_sharded
from thinwire.strategies.base import Strategy, codecs_of, nested
from thinwire.strategies.wrapper import Wrapper
from thinwire.worker.compatibility import evaluates_several_gradients
from thinwire.worker.handover import hand_over
from thinwire.worker.handshake import Facts, agree, first_difference
from thinwire.worker.state import WorkerState

T = TypeVar("T")
_LOGGER = logging.getLogger("thinwire")
_LOST = (PeerLostError, CommTimeoutError)


@dataclass
class _Kept:
    """What a replica was before a round."""

    x: Tensor | None
    g: Tensor | None
    state: dict[str, Tensor] | None
    inflight: dict[str, Work[list[Tensor]]]


class Elastic:
    """What an elastic worker has beside a fixed one: the views, and what a round needs to be repeated.

    Args:
        membership: has entered the run.
        connector: opens the connections of each view.
        comm: that the worker's replicas have.

    Attributes:
        view: the current view.
        told: what the changes of view so far have cost, by name, such as push-sum weight that was lost.
        on_view: called with each new view, on every worker in it.
    """

    def __init__(self, membership: Membership, connector: Connector, comm: ElasticComm) -> None:
        assert membership.view is not None
        self.view: View = membership.view
        self.told: dict[str, float] = {}
        self.on_view: list[Callable[[View], None]] = []
        self._membership = membership
        self._connector = connector
        self._comm = comm
        self._round = 0
        self._done = True
        self._requests = 0
        self._size = 0 if self.view.progress else self.view.size  # of the last view that was opened; 0 of none yet
        self._opens_at: int | None = None
        self._worker: WorkerState | None = None
        self._patience = Patience(comm.timeout)
        self._round_ended = time.monotonic()

    # -- set-up ----------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Open the connections of the first view.

        Raises:
            CommError: not all its workers connected.
        """
        self._connect(self.view)

    @property
    def comm(self) -> ElasticComm:
        """Of the worker."""
        return self._comm

    @property
    def joins(self) -> bool:
        """Whether this worker comes to a run that has begun, and has no state of it yet."""
        return self._size == 0

    def agree(self, facts: Facts, device: torch.device) -> None:
        """Check that all workers are started alike; refuse to join a run of another model or recipe.

        Raises:
            MismatchError: with the first difference.
        """
        if not self.joins:
            agree(self._comm, facts, device)
        mine = json.dumps([fact for fact in facts if fact[0] != "the number of workers"])
        theirs = self._membership.facts(mine)
        if theirs != mine:
            difference = first_difference(json.loads(theirs), json.loads(mine), self._comm.rank)
            raise MismatchError(
                f"worker {self._membership.worker} joins a run that was started otherwise: {difference}"
            )

    def gradients(self, exchange: Callable[[], None]) -> None:
        """Run the exchange of a backward pass, again where a worker was lost in it."""
        # Its messages were sent during the pass, before the round began.
        self.round(exchange, keeps_x=False, sends=True)

    def begin(self, worker: WorkerState) -> None:
        """Watch over this worker, whose replicas are there."""
        self._worker = worker
        strategy = worker.strategy
        # Their workers exchange with neighbours, each at its own time, so that not every step is a round.
        self._neighbours = any(each.restarts_on_resize for each in nested(strategy))
        self._parts = [each for each in nested(strategy) if not _silent(each)]
        self._reads_before = any(
            type(each).before_step not in (Strategy.before_step, Wrapper.before_step) for each in nested(strategy)
        )

        worker.undo.callback(self.close)
        if self.view.progress:
            # Of a run that has begun: its state comes from one of its workers.
            self._round = settled(self.view.ready.values())
            self._open_again()

    # -- rounds ----------------------------------------------------------------------------------------------------

    def before_step(self, hook: Callable[[], None]) -> None:
        """Run the strategies' hook before the optimizer's step."""
        if self._opens_at is not None:
            return  # alone until then
        if self._reads_before:
            self.round(hook, keeps_gradient=self.worker.strategy.reads_gradient, ends=not self._neighbours)
        else:
            hook()

    def after_step(self, hook: Callable[[], None]) -> None:
        """Run the strategies' hook after the optimizer's step; then take in who wants to join."""
        step = self.worker.step
        if self._opens_at is not None:
            if step >= self._opens_at:
                self._open_again()
        elif self._neighbours and self._membership.requests() > self.view.requests:
            self._change("a worker asks to join", [], repeats=False, requests=self._membership.requests())
        elif (waits := any(r.inflight for r in self.worker.replicas)) or self._may_send(step):
            ends = not self._neighbours or self.worker.strategy.averages_at(step)
            # What is in flight may be waited for in this hook, and fail on some workers only.
            self.round(hook, ends=ends, drops=self._neighbours, sends=waits and ends)
        else:
            hook()
        if not self._neighbours and self._requests > self.view.requests:
            self._change("a worker asks to join", [], repeats=False, requests=self._requests)

    def together(self, body: Callable[[], T]) -> T:
        """Run what all workers do at the same step, such as evaluate, again where one is lost in it."""
        results: list[T] = []
        self.round(lambda: results.append(body()), sends=True)
        return results[-1]

    def round(
        self,
        body: Callable[[], T],
        *,
        keeps_x: bool = True,
        keeps_gradient: bool = False,
        ends: bool = True,
        drops: bool = False,
        sends: bool = False,
    ) -> T | None:
        """Run what communicates; where a worker is lost in it, all survivors keep its result, or none does.

        Args:
            body: run again, from the state before it, where it has failed.
            keeps_x: whether it changes the parameters.
            keeps_gradient: whether it changes the gradient.
            ends: whether a message of each to all ends it.
            drops: whether it is left out, and not repeated, where it has failed.
            sends: whether it is known to communicate; else the meter says whether it has.
        """
        while True:
            kept = [
                _Kept(
                    r.x.clone() if keeps_x else None,
                    r.g.clone() if keeps_gradient else None,
                    {name: x.clone() for name, x in r.state.items()} if ends else None,
                    dict(r.inflight),
                )
                for r in self.worker.replicas
            ]
            sent = self._comm.meter.messages
            result: Any = None
            try:
                if ends:
                    self._round, self._done = self._round + 1, False
                result = body()
                if ends:
                    self._end_round(sends or self._comm.meter.messages > sent)
                return result
            except _LOST as error:
                if isinstance(error, StoreLostError):
                    raise
                problem = str(error)
            # Outside the handler: a traceback would keep the connections open.
            if self._change(problem, kept, repeats=ends):
                return result
            if drops or self._opens_at is not None:
                return None

    def _end_round(self, sent: bool) -> None:
        self._done = True
        if self._comm.size == 1:
            self._requests = self._membership.requests()
        elif not sent:
            self._round -= 1  # so it was on all ranks
        else:
            self.confirm()

    def confirm(self) -> None:
        """Tell all others that this worker has the round's result, and wait until all have it."""
        mine = torch.tensor([self._round, self._membership.requests()], device=self._comm.check_device)
        rows = self._comm.confirm(mine).wait()
        now = time.monotonic()
        self._patience.record(now - self._round_ended)
        self._round_ended, self._comm.timeout = now, self._patience.seconds
        self._requests = max(int(row[1]) for row in rows)

    def _may_send(self, step: int) -> bool:
        """Whether a hook after so many steps may communicate; where it cannot, nothing has to be kept for it."""
        if self.worker.strategy.averages_at(step):
            return True
        return any(
            # Fragments of the parameters are averaged at steps between.
            not each.has_period or getattr(each, "fragments", 1) > 1 or step % getattr(each, "period", 1) == 0
            for each in self._parts
        )

    # -- leaving with notice ---------------------------------------------------------------------------------------

    def release(self, leaving: Mapping[str, str]) -> bool:
        """Let workers go that have said so; all call it after the same step. Returns whether this one has left.

        What only they have goes to the others first; if nobody stays, all leave with what they have.

        Args:
            leaving: why each of them leaves, by their ids.
        """
        if all(each in leaving for each in self.view.members):
            self.close()
            return True
        self.round(lambda: self._let_go(leaving), sends=True)
        if self.worker_id in leaving:
            self._membership.leave(
                Progress(self._round, self._done, self.worker.step, left=leaving[self.worker_id] or "notice")
            )
            self.close()
            return True
        # Who is not in the view any more was lost meanwhile, or has been let go because of somebody who was.
        if gone := [each for each in self.view.members if each in leaving]:
            reasons = ", ".join(f"{each} has left: {leaving[each]}" for each in gone)
            self._change(reasons, [], repeats=False, requests=self._requests)
        return False

    def _let_go(self, leaving: Mapping[str, str]) -> None:
        ranks = [rank for rank, each in enumerate(self.view.members) if each in leaving]
        if ranks and len(ranks) < self.view.size:
            with torch.no_grad():
                for r in self.worker.replicas:
                    self.worker.strategy.before_leave(r, ranks)

    # -- a change of view ------------------------------------------------------------------------------------------

    def _change(self, problem: str, kept: list[_Kept], *, repeats: bool, requests: int | None = None) -> bool:
        """Agree on a new view, and open it; returns whether the round's result is kept.

        Args:
            problem: what went wrong, in words.
            kept: what the replicas were before the round.
            repeats: whether this worker is in a round; else it keeps what it has.
            requests: of workers that ask to join, how many are to be taken in; None is nobody.
        """
        self._next_view(problem, requests)
        others = self.view.ready.values()
        keep = repeats and self._round <= settled(others)
        if not keep:
            if repeats:
                self._round, self._done = self._round - 1, True
            for r, before in zip(self.worker.replicas, kept, strict=bool(kept)):
                _put_back(r, before)
        self._opens_at = max(each.step for each in others)
        if not self._neighbours or self.worker.step >= self._opens_at:
            self._open_again()
        return keep

    def _next_view(self, problem: str, requests: int | None) -> None:
        """Leave the view, and connect with the workers of the next one that comes about."""
        while True:
            self._connector.disconnect(self._comm.comm)
            self._comm.round = ""
            if self._neighbours:
                requests = self._membership.requests()
            progress = Progress(self._round, self._done, self.worker.step, ready=self._size > 0)
            view = self._membership.change(progress, requests=requests)
            if self._size:
                self._size -= len(view.left)  # they have handed on what they had: nothing is lost with them
            else:
                self._round = settled(view.ready.values())  # as begin() did in the view that has ended
            _LOGGER.warning("%s", _in_words(view, problem))
            try:
                self._connect(view)
                return
            except _LOST as error:
                problem = str(error)

    def _connect(self, view: View) -> None:
        self._comm.size = view.size
        rank = view.rank(self._membership.worker)
        assert rank is not None
        comm = self._connector.connect(
            view.epoch,
            rank,
            view.size,
            self._membership.timeout,
            lambda: any(self._membership.state(each) is State.ENDED for each in view.members),
        )
        self._comm.use(comm)
        self.view = view

    def _open_again(self) -> None:
        """Let the strategy go on among the workers of the view; where one is lost meanwhile, in the next view."""
        while True:
            strategy, comm = self.worker.strategy, self._comm
            strategy.check(comm.size)
            problem = ""
            try:
                self._hand_over()
                comm.step = self.worker.step
                with torch.no_grad():
                    for r in self.worker.replicas:
                        r.active = comm.size
                        for name, cost in strategy.change_view(r, self._size).items():
                            self.told[name] = self.told.get(name, 0.0) + cost
                self._size, self._opens_at = comm.size, None
                for call in self.on_view:
                    call(self.view)
                return
            except _LOST as error:
                if isinstance(error, StoreLostError):
                    raise
                problem = str(error)
            self._next_view(problem, None)

    def _hand_over(self) -> None:
        """Give those that are new in the view the state of the worker that is furthest."""
        there = self.view.ready
        new = [rank for rank, each in enumerate(self.view.members) if each not in there]
        if not new or not self.view.epoch:
            return
        step = max(each.step for each in there.values())
        source = next(each for each in there if there[each].step == step)
        self._comm.step = step
        hand_over(self.worker, new, self.view.members.index(source))

    @property
    def worker_id(self) -> str:
        """Of this worker, among the members of views."""
        return self._membership.worker

    def crews(self) -> list[Crew]:
        """Who took part from which step on; the same list on all workers, those that joined later too."""
        crews = [Crew(0, self._membership.history()[0].members)]
        for view in self._membership.history()[1:]:
            step = max((each.step for each in view.ready.values()), default=crews[-1].begins)
            # Where a worker was lost, the others may be in the middle of this step, with batches that they had before.
            between = view.joined or view.left
            crews.append(Crew(step if between else step + 1, view.members, tuple(view.left)))
        return crews

    @property
    def worker(self) -> WorkerState:
        """The worker that is watched over."""
        assert self._worker is not None
        return self._worker

    def close(self) -> None:
        """Leave: the others' next call finds this worker gone."""
        self._membership.close()
        self._connector.disconnect(self._comm.comm)


class ElasticState(WorkerState):
    """What an elastic worker knows of the others.

    Attributes:
        elastic: the views, and the rounds that survive a loss; None where the ranks are fixed.
    """

    elastic: Elastic | None = None

    @property
    def view(self) -> View:
        """The workers that train together, under `attach(elastic=True)`; its `members` are in the order of ranks.

        Raises:
            ConfigError: this worker is not elastic.
        """
        if self.elastic is None:
            raise ConfigError("view: only workers of attach(elastic=True) have views; use worker.comm.rank and .size")
        return self.elastic.view

    @property
    def worker_id(self) -> str:
        """This worker's id among `view.members`, under `attach(elastic=True)`; unlike the rank it never changes.

        Raises:
            ConfigError: this worker is not elastic.
        """
        if self.elastic is None:
            raise ConfigError("worker_id: only workers of attach(elastic=True) have views; use worker.comm.rank")
        return self.elastic.worker_id

    @property
    def rank(self) -> int:
        """This worker's number among those that train together, from 0; under `elastic=True` it changes with views."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """How many workers train together; under `elastic=True` it changes with views."""
        return self.comm.size

    @property
    def crews(self) -> list[Crew]:
        """Who took part from which step on, under `attach(elastic=True)`; by it `ElasticSampler.share` deals the data.

        Raises:
            ConfigError: this worker is not elastic.
        """
        if self.elastic is None:
            raise ConfigError(
                "crews: only workers of attach(elastic=True) have views; all ranks take part in all steps"
            )
        return self.elastic.crews()

    def on_view(self, call: Callable[[View], None]) -> None:
        """Call a function with each new view, on every worker in it, between two steps or in a step that is repeated.

        Args:
            call: such as one that divides the data anew; it must not communicate.

        Raises:
            ConfigError: this worker is not elastic.
        """
        if self.elastic is None:
            raise ConfigError("on_view: only workers of attach(elastic=True) have views")
        self.elastic.on_view.append(call)

    def _before(self, hook: Callable[[], None]) -> None:
        hook() if self.elastic is None else self.elastic.before_step(hook)

    def _after(self, hook: Callable[[], None]) -> None:
        hook() if self.elastic is None else self.elastic.after_step(hook)

    def _together(self, call: Callable[[], T]) -> T:
        """What all ranks do together; an elastic worker does it again where one is lost in it."""
        return call() if self.elastic is None else self.elastic.together(call)


def enter(elastic: Literal[True] | Fleet, timeout: float) -> Elastic:
    """Enter an elastic run, and connect with the workers of its current view.

    Raises:
        ConfigError: the environment names no store that outlives the workers.
        CommError: the others did not come, or do not take this worker in.
    """
    fleet = fleet_from_environment(timeout=timeout) if elastic is True else elastic
    fleet.membership.enter(fleet.rank, fleet.size)
    views = Elastic(fleet.membership, fleet.connector, ElasticComm(timeout=timeout))
    views.connect()
    return views


def agree_with(views: Elastic | None, comm: Comm, facts: Facts, device: torch.device) -> None:
    """Check that all ranks are started alike, and that who joins an elastic run is started as it was.

    Raises:
        MismatchError: with the first difference.
    """
    if views is None:
        agree(comm, facts, device)
    else:
        views.agree(facts, device)


def check_elastic(
    strategy: Strategy,
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    others: Sequence[object],
    *,
    scaled: bool,
    find_unused: bool,
) -> None:
    """Refuse what could not go on when a worker is lost, before anything is sent.

    Raises:
        ConfigError: with the reason and what to use instead.
    """
    check_survives(strategy)
    if any(other is not None for other in others):
        raise ConfigError(
            "elastic=True with a group, a comm or a mesh: these have fixed ranks; leave them out, or pass a Fleet"
        )
    if any(is_sharded(p) or p.device.type != "cpu" for p in parameters.values()):
        raise ConfigError(
            "elastic=True with parameters that are sharded or not on the CPU: connections are Gloo's, and every worker "
            "must hold the whole model; use worker.save and resume where a worker is lost"
        )
    if evaluates_several_gradients(optimizer):
        raise ConfigError(
            f"elastic=True with {type(optimizer).__name__}: its step evaluates several gradients, and could not be "
            "repeated as a whole; use an optimizer that takes one"
        )
    if find_unused:
        raise ConfigError("elastic=True with find_unused=True: use find_unused=False, where a missing gradient is zero")
    if scaled and (strategy.reads_gradient or not strategy.sends_gradients):
        raise ConfigError(
            f"elastic=True with a GradScaler and {type(strategy).__name__}: workers would have to agree on skipped "
            "steps; train in bf16, which needs no scaler, or use AllReduce()"
        )


def check_survives(strategy: Strategy) -> None:
    """Refuse a strategy that cannot go on when a worker is lost.

    Raises:
        ConfigError: with the reason.
    """
    for each in reversed(list(nested(strategy))):
        for part in (each, *codecs_of(each)):
            if part.inelastic:
                raise ConfigError(f"elastic=True with {type(part).__name__}: {part.inelastic}")


def _silent(strategy: Strategy) -> bool:
    """Whether a strategy's own hooks send nothing."""
    hooks = (Strategy.after_step, Wrapper.after_step)
    return type(strategy).after_step in hooks


@torch.no_grad()
def _put_back(r: Replica, before: _Kept) -> None:
    if before.x is not None:
        r.x.copy_(before.x)
    if before.g is not None:
        r.g.copy_(before.g)
    if before.state is not None:
        for name in list(r.state):
            if name not in before.state:
                del r.state[name]
        for name, x in before.state.items():
            r.state[name] = x
    for name in list(r.inflight):
        if name not in before.inflight:
            del r.inflight[name]
    for name, work in before.inflight.items():
        r.inflight[name] = work


def _in_words(view: View, problem: str) -> str:
    gone = (*view.lost, *view.left)
    lost = f"without {', '.join(gone)}" if gone else "with the same workers"
    joined = f" and with {', '.join(view.joined)}" if view.joined else ""
    return f"view {view.epoch}: {view.size} workers go on, {lost}{joined} ({problem})"
