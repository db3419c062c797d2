# SPDX-License-Identifier: Apache-2.0
"""Training that continues when workers are lost: all survivors keep a round, or all repeat it.

A round is a strategy's hook with messages to all workers. It ends with a few bytes from every worker to every other
that confirm the round's result. If a peer is lost, the survivors record in the store whether they have the result.
Either all have it and keep it, or all repeat the round from the state before it. Strategies that exchange with
neighbors at every step have no common end of a step: their survivors continue from their current parameters at the step
of the most advanced worker, and the others take their steps up to it without messages.

If a worker is a group of ranks, each rank exchanges messages with the same rank of the other groups. After everything
that may fail, the ranks of a group agree (`_attempt`): a group has the result of a round only if all its ranks have it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from thinwire.core.comm.base import Comm
from thinwire.core.comm.group import first_sentence
from thinwire.core.comm.work import Work
from thinwire.core.kernels.decisions import host_copy
from thinwire.core.replica.replica import Replica
from thinwire.core.replica.state import replace_entries
from thinwire.core.view import Progress, View, last_kept_round, rows_in
from thinwire.elastic.elastic_comm import ElasticComm
from thinwire.elastic.fleet import Fleet, close_at_exit, fleet_from_environment
from thinwire.elastic.handover import Arrivals, Offered, can_copy, hand_over
from thinwire.elastic.late import LateMerging
from thinwire.elastic.late_rounds import LateRounds
from thinwire.elastic.membership import StoreLostError
from thinwire.elastic.patience import Patience
from thinwire.elastic.ranks import GroupLostError, Ranks
from thinwire.elastic.sampler import MembershipInterval
from thinwire.elastic.unconnected import Unconnected
from thinwire.errors import CommTimeoutError, ConfigError, MismatchError, PeerLostError
from thinwire.methods.strategies.base import Strategy, check_workers, nested, starts_again, weight_of
from thinwire.methods.strategies.wrapper import Wrapper
from thinwire.worker import annexes
from thinwire.worker.guards import rebase
from thinwire.worker.handshake import Facts, agree
from thinwire.worker.state import WorkerState

T = TypeVar("T")
_LOGGER = logging.getLogger("thinwire")
_LOST = (PeerLostError, CommTimeoutError)
_ENDED_SECONDS = 1.0


@dataclass
class _Kept:
    """The state of a replica before a round; of tensors on a GPU, copies in host memory, which takes none of the GPU's.

    The copies are asynchronous: later work in the current stream waits for them, and the host does not.
    """

    x: Tensor | None
    g: Tensor | None
    state: dict[str, tuple[Tensor, torch.device]] | None
    inflight: dict[str, Work[list[Tensor]]]


class Elastic:
    """The additional parts of an elastic worker: the views, and the data to repeat a round.

    Args:
        fleet: this worker's way into the run, which it has entered.
        comm: that the worker's replicas have.
        offered: what this worker was sent of the others' state before it was taken in.

    Attributes:
        worker_id: of this worker, among the members of views.
        comm: of the worker.
        view: the current view.
        peers: the ids of the workers that take part in the calls that this one makes now, in the order of ranks.
        has_just_joined: whether this worker has joined a run without a step yet; its calls reach no other worker.
        costs: the losses in changes of view so far, by name, such as push-sum weight.
        on_view: called with each new view, on every worker in it.
    """

    def __init__(self, fleet: Fleet, comm: ElasticComm, offered: Offered) -> None:
        self.worker_id, self.comm = fleet.membership.worker, comm
        self.view = fleet.membership.current
        self.costs: dict[str, float] = {}
        self.on_view: list[Callable[[View], None]] = []
        self._fleet = fleet
        self._membership = fleet.membership
        self._connector = fleet.connector
        self._round = 0
        self._done = True
        self._requests = 0
        self._size = 0 if self.view.progress else self.view.size  # of the last view that was opened; 0 of none yet
        self.peers = self.view.members
        self._stepping = False
        self._whole: Comm | None = None  # of the whole view, while calls between two steps go to a part of it
        self._part: Comm | None = None
        self.has_just_joined = False
        self._entered_round = 0
        # The last two, as `Progress` has them. The first steps start from one that contains no step.
        self._averages: tuple[tuple[int, int], ...] = ((0, 0),)
        self._opens_at: int | None = None
        self._arrivals: Arrivals | None = None
        self._newcomers: set[str] = set()
        self._unconnected = Unconnected()
        self._offered = offered
        self._worker: WorkerState | None = None
        self._neighbours = False  # one that joins may meet another loss before `begin`
        self._patience = Patience(comm.timeout)
        self._ranks = fleet.ranks
        self._timed_out = False  # in the last attempt that failed
        self._round_ended = time.monotonic()

    # -- set-up ----------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Open the connections of the first view.

        Raises:
            CommError: not all its workers connected; or this one joins, and did not connect in several views.
        """
        _check_ranks(self.view, self.worker_id)
        while True:
            if not self.joins:
                self._connect(self.view)
                self._attempt(lambda: None)
                return
            if not (problem := self._attempt(lambda: self._connect(self.view))):
                return
            _LOGGER.warning("worker %s asks to join again: %s", self.worker_id, problem)
            # Another worker was lost just then.
            self.view = self._membership.change(Progress(0, done=True, step=0, ready=False), problem=problem)

    @property
    def joins(self) -> bool:
        """Return True if this worker comes to a run that has begun, and has no state of it yet."""
        return self._size == 0

    def agree(self, facts: Facts, device: torch.device) -> None:
        """Check that all workers are started alike; refuse to join a run of another model or recipe.

        Raises:
            MismatchError: with the first difference.
        """
        if not self.joins:
            agree(self.comm, facts, device)
        self._fleet.agree(facts)

    def gradients(self, exchange: Callable[[], None]) -> None:
        """Run the exchange of a backward pass, again where a worker was lost in it."""
        self.start_step()
        # Its messages were sent during the pass, before the round began.
        self.round(exchange, keeps_x=False, sends=True, uses=self.worker.step + 1)

    def begin(self, worker: WorkerState, after_step: Callable[[], None]) -> None:
        """Start to watch this worker's replicas; a joining worker takes part in the round that the others end.

        Args:
            worker: this one.
            after_step: the strategies' hook after the optimizer's step.
        """
        self._worker = worker
        strategy = worker.strategy
        # Their workers exchange with neighbors, each at its own time, so that not every step is a round.
        self._neighbours = starts_again(strategy)
        # Which of them send at a step depends on the rank, so a rank that sent nothing does not know whether all ranks
        # sent nothing.
        self._uneven = not self._neighbours and strategy.traits.topology is not None
        # Their own hooks send something.
        silent = (Strategy.after_step, Wrapper.after_step)
        self._parts = [each for each in nested(strategy) if type(each).after_step not in silent]
        self._reads_before = any(
            type(each).before_step not in (Strategy.before_step, Wrapper.before_step) for each in nested(strategy)
        )

        worker.undo.callback(self.close)
        if self._ranks is not None:
            close_at_exit(self.close)
        if self.view.progress:
            # Of a run that has begun: its state comes from one of its workers.
            self._round = last_kept_round(self.view.ready.values())
            self._enter(after_step)

    def _enter(self, after_step: Callable[[], None]) -> None:
        """Get the state of the run, and wait until the other workers begin their next step."""
        while True:
            self._open_again()
            if not (problem := self._attempt(lambda: self._receive_round(after_step))):
                self.has_just_joined = True
                self.worker.shards.write()
                return
            # Without a part in the run it is not a member of the next view, and asks to join again.
            self._size = 0
            self._next_view(problem, None)

    def _receive_round(self, after_step: Callable[[], None]) -> None:
        if self._newcomers:
            self._be_silent(after_step)
        self.worker.wait_pending()
        self._entered_round = self._membership.wait_for_step()
        self._hold((self.worker_id,))

    # -- attempts --------------------------------------------------------------------------------------------------

    def _attempt(self, body: Callable[[], object]) -> str:
        """Run calls that may fail; return the problem if a worker was lost meanwhile, else an empty text.

        The ranks of a group agree: all of them have failed, or none has.

        Raises:
            StoreLostError: this worker cannot know whether the others continue without it.
            GroupLostError: a rank of this worker's group is lost.
        """
        problem, self._timed_out = "", False
        try:
            body()
        except _LOST as error:
            if isinstance(error, StoreLostError):
                raise
            problem, self._timed_out = str(error), isinstance(error, CommTimeoutError)
        # Outside the handler: a traceback would keep the connections open.
        return problem if self._ranks is None else self._agree(self._ranks, problem)

    def _agree(self, ranks: Ranks, problem: str) -> str:
        """Return the problem of any rank of the group; take what the group knows and has, of all its ranks."""
        if problem:
            self._membership.report_failure()  # other ranks of the group may wait for messages in the same view
        step = 0 if self._worker is None else self._worker.step
        row = bool(problem), self._done, self._requests, self._timed_out, self._size > 0, self._round, step
        rows = self._in_group(lambda: ranks.gather(*row))
        failed, done, requests, timed_out, ready, *places = zip(*rows, strict=True)
        if len(set(zip(*places, strict=True))) > 1:
            raise MismatchError(
                f"the ranks of worker {self.worker_id} are in rounds {list(places[0])} at steps {list(places[1])}. "
                "They train one model, and must make the same calls after the same steps"
            )
        # A rank that has the result of a round must not keep it alone: the parts of the model would not fit together.
        self._done, self._requests, self._timed_out = all(done), max(requests), bool(any(timed_out))
        self._size = self._size if all(ready) else 0
        if any(failed) and not problem:
            return f"messages of rank {failed.index(1)} of this group have failed"
        return problem

    def _in_group(self, call: Callable[[], T]) -> T:
        """Run a call of all ranks of the group; leave the run if one of them is lost."""
        try:
            return call()
        except GroupLostError:
            self._fleet.withdraw()
            if self._worker is not None:
                self.close()
            raise

    # -- rounds ----------------------------------------------------------------------------------------------------

    def before_step(self, hook: Callable[[], None]) -> None:
        """Run the strategies' hook before the optimizer's step."""
        self.start_step()
        if self._opens_at is not None:
            return  # alone until then
        if self._reads_before:
            self.round(
                hook,
                keeps_gradient=self.worker.strategy.traits.reads_gradient,
                ends=not self._neighbours,
                sends=self._uneven,
                uses=self.worker.step + 1 if self.worker.strategy.traits.reads_gradient else None,
            )
        else:
            hook()

    def after_step(self, hook: Callable[[], None]) -> None:
        """Run the strategies' hook after the optimizer's step; then take in who wants to join."""
        self._membership.take_step()
        self._stepping = False
        step, ended = self.worker.step, False
        # Also values that a view set before this round, since only some workers may have opened it.
        self.comm.step = step
        if self._opens_at is not None:
            if step >= self._opens_at:
                self._open_again()
        elif self._neighbours and self._membership.requests() > self.view.requests:
            self._change("a worker asks to join", requests=self._membership.requests())
        elif (averages := self._averages_now()) or self._waits() or self._may_send(step):
            ends = averages or not self._neighbours
            if averages:
                step += -step % self.worker.strategy.traits.meets_every  # of all workers, at the end of the round
                if self._arrivals is not None:
                    self._admit(self._arrivals)
            self.round(
                hook,
                ends=ends,
                drops=self._neighbours,
                sends=ends and self._uneven,
                needed=lambda: averages or self._waits() or self._may_send(step),
                uses=self._steps_in_average(step),
            )
            ended = True
            if self._neighbours:  # also where it has failed: the view that followed has its loss
                self._averages = ((self._round, step),)
            if self._newcomers:
                self._end_arrival()
        else:
            hook()
        # Workers that have just joined do not know of further requests yet.
        if not self._neighbours and self._requests > self.view.requests and self._whole is None:
            self._take_in(round_ended=ended)

    def _take_in(self, *, round_ended: bool) -> None:
        """Let those come that ask to: with the state of another worker at once, or when they have got a copy of it."""
        if not can_copy(self.worker) or (self._arrivals is not None and self._arrivals.failed):
            self._change("a worker asks to join", requests=self._requests)
        elif self._arrivals is None:
            self._arrivals = Arrivals(self.worker, self._membership, self._connector, self._requests)
        elif round_ended:
            self._arrivals.end_round(self._ranks)

    def _admit(self, arrivals: Arrivals) -> None:
        """Before a round: take in those that have the state in which it began."""
        self.comm.timeout = self._membership.timeout  # the one that sends waits until all has arrived
        if problem := self._attempt(lambda: arrivals.agree(self.comm)):
            self._change(problem)
            return
        if self._ranks is not None:
            parts = self._ranks.gather(arrivals.complete, arrivals.failed)
            arrivals.complete = all(complete for complete, _ in parts)
            arrivals.failed = any(failed for _, failed in parts)
        if arrivals.complete:
            self._change("a worker joins", requests=arrivals.upto, donor=arrivals.donor)

    def _be_silent(self, after_step: Callable[[], None]) -> None:
        """Take part in the round that the others end, with nothing to add."""
        with torch.no_grad():
            for r in self.worker.replicas:
                r.x.zero_()
                r.samples = 0.0
                if (weight := weight_of(self.worker.strategy, r)) is not None:
                    weight.zero_()
            try:
                self._round, self._done = self._round + 1, False
                after_step()
                self._end_round(True, self._steps_in_average(self.worker.step))
            finally:
                for r in self.worker.replicas:
                    r.samples = 1.0
                self.comm.round = ""
        self._newcomers.clear()
        self.comm.silent = frozenset()

    def _end_arrival(self) -> None:
        """End the round to which new workers did not contribute; they take part from the next step on."""
        self._newcomers.clear()
        self.comm.silent = frozenset()

        def hold() -> None:
            self.worker.wait_pending()
            self._hold(self._kept_members)

        if problem := self._attempt(hold):
            self._change(problem)

    # -- between two steps -----------------------------------------------------------------------------------------

    @property
    def _kept_members(self) -> tuple[str, ...]:
        """The members of the view that were in the run before."""
        return tuple(each for each in self.view.members if each in self.view.ready)

    def _hold(self, members: tuple[str, ...]) -> None:
        """Let these members call each other alone until the next step begins.

        The loop may evaluate or save after the step at whose end others join. Those begin with the next step and make
        none of these calls, or all of them on their own.

        Raises:
            CommError: not all of them connected.
        """
        part = self._connector.connect(
            f"{self.view.epoch}/{members[0]}",
            members.index(self.worker_id),
            len(members),
            self._membership.timeout,
            self._membership.given_up,
        )
        self._release_part()
        self._whole, self._part, self.peers = self.comm.comm, part, members
        self.comm.use(part)

    def start_step(self) -> None:
        """Call before the first message of a step: from here on all members of the view take part."""
        self._stepping = True
        if self._whole is None:
            return
        self.comm.use(self._whole)
        self._whole, self.peers = None, self.view.members
        self._requests = 0  # of which only a part of the view knows
        if self.has_just_joined:
            self.has_just_joined, self._round = False, self._entered_round
        else:
            self._membership.announce_step(self._round)

    def _release_part(self) -> None:
        """Close the connections of calls between two steps, which no worker waits for any more."""
        if self._part is not None:
            self._connector.disconnect(self._part)
            self._part = None

    def drop_newcomers(self) -> None:
        """Let workers that have not begun yet ask to join again; the members that were here before call it together."""
        if self._whole is not None and not self.has_just_joined:
            self._change("the state has changed")

    def together(self, body: Callable[[], T], *, sends: bool = True) -> T:
        """Run a common call of all workers at one step, such as evaluation; repeat it if a worker is lost.

        Args:
            body: the call.
            sends: whether it is known to communicate; otherwise the meter shows it.
        """
        results: list[T] = []
        before = self.worker.step
        self.round(lambda: results.append(body()), sends=sends)
        if self.worker.step != before:  # a checkpoint was loaded
            self._averages = (*self._averages[-1:], (self._round, self._steps_in_last_average()))
        if not results:
            raise PeerLostError(
                f"worker {self.worker_id}, step {self.worker.step}: a worker was lost in a call that all make "
                f"together, and others have continued to step {self._opens_at} without it. Let all "
                "make the same calls after the same steps, and start this worker again to let it join"
            )
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
        needed: Callable[[], bool] = lambda: True,
        uses: int | None = None,
    ) -> T | None:
        """Run what communicates; where a worker is lost in it, all survivors keep its result, or none does.

        Args:
            body: run again, from the state before it, where it has failed.
            keeps_x: whether it changes the parameters.
            keeps_gradient: whether it changes the gradient.
            ends: whether a message of each to all ends it.
            drops: whether it is left out, and not repeated, where it has failed.
            sends: whether it is known to communicate; otherwise the meter shows it.
            needed: whether it is a round at all, asked in a new view: others, which had kept the round before, may be a
                step behind, and come here with nothing in flight.
            uses: how many steps of all workers its result contains; None where it is no average. With a delay it is one
                only if a mean that was in flight has arrived.
        """
        while True:
            kept = [
                _Kept(
                    _copied(r.x) if keeps_x else None,
                    _copied(r.g) if keeps_gradient else None,
                    {name: (_copied(x), x.device) for name, x in r.state.items()} if ends else None,
                    dict(r.inflight),
                )
                for r in self.worker.replicas
            ]
            result: Any = None

            def attempt(kept: list[_Kept] = kept) -> None:
                nonlocal result
                messages = self.comm.meter.messages
                if ends:
                    self._round, self._done = self._round + 1, False
                result = body()
                if ends:
                    # What was in flight and has arrived may have failed on some workers only.
                    arrived = any(
                        r.inflight.get(name) is not work
                        for r, before in zip(self.worker.replicas, kept, strict=True)
                        for name, work in before.inflight.items()
                    )
                    sent = sends or arrived or self.comm.meter.messages > messages
                    averages = arrived or not self.worker.strategy.traits.rounds.delay
                    self._end_round(sent, uses if averages else None)

            if not (problem := self._attempt(attempt)):
                return result
            keeps = self._change(problem, kept, repeats=ends)
            if keeps:
                return result
            if drops or self._opens_at is not None:
                return None
            if not needed():
                return body()

    def _end_round(self, sent: bool, uses: int | None) -> None:
        self._done = True
        if self.comm.size > 1 and not sent:
            self._round -= 1  # so it was on all ranks
            return
        if uses is not None:
            self._averages = (*self._averages[-1:], (self._round, uses))
        self.confirm()

    def confirm(self) -> None:
        """Tell all others that this worker has the round's result, and wait until all have it."""
        rows = self.comm.confirm(self._round, self._membership.requests())
        if self._whole is None:
            self._release_part()  # all have begun a step since
        now = time.monotonic()
        self._patience.record(now - self._round_ended)
        self._round_ended, self.comm.timeout = now, self._patience.seconds
        self._requests = max(requests for _, requests in rows)

    def _steps_in_average(self, step: int) -> int | None:
        """Return how many steps of all workers the round after so many steps contains; None where it is no average."""
        traits = self.worker.strategy.traits
        delay, period = traits.rounds.delay, traits.period or 1
        if traits.rounds.fragments > 1:
            return max(0, step - period - delay)
        if delay:
            return max(0, step - delay)
        return step if traits.averages_at(step) or not traits.rounds.local or self._neighbours else None

    def _steps_in_last_average(self) -> int:
        """Return how many steps of all workers a loaded state contains at least; later ones are each worker's own."""
        step, rounds = self.worker.step, self.worker.strategy.traits.rounds
        if rounds.delay or rounds.fragments > 1:
            return max(0, step - (self.worker.strategy.traits.period or 1) - rounds.delay)
        found = (self._steps_in_average(step) for step in range(step, 0, -1))
        return next((steps for steps in found if steps is not None), 0)

    def _waits(self) -> bool:
        """Return True if messages are in flight."""
        return any(r.inflight for r in self.worker.replicas)

    def _averages_now(self) -> bool:
        """Return True if this worker's round ends with an average of all workers' parameters."""
        return self.worker.strategy.ends_round(self.worker.replicas[0])

    def _may_send(self, step: int) -> bool:
        """Return True if a hook may communicate between averages; where it cannot, nothing has to be kept for it."""
        if self.worker.strategy.traits.skips_steps:
            return False
        return any(
            # Fragments of the parameters are averaged at steps between, and so are figures that depend on timing.
            not each.period or each.rounds.fragments > 1 or each.timing_dependent or step % each.period == 0
            for each in (part.traits for part in self._parts)
        )

    # -- leaving with notice ---------------------------------------------------------------------------------------

    def reason(self, own: str) -> str:
        """Return why this worker has to leave; of a group, the reason of the first rank that has one.

        Raises:
            GroupLostError: a rank of this worker's group is lost.
        """
        ranks = self._ranks
        return own if ranks is None else next(filter(None, self._in_group(lambda: ranks.texts(own))), "")

    def release(self, leaving: Mapping[str, str]) -> bool:
        """Release workers that leave gracefully; all call it after the same step. Return True if this one left.

        Their own state is passed to the others first. If no worker stays, all remain connected, so that they can save.

        Args:
            leaving: why each of them leaves, by their ids.
        """
        if all(each in leaving for each in self.peers):
            return True
        self.round(lambda: self._let_go(leaving), sends=True)
        if self.worker_id in leaving:
            left = Progress(self._round, self._done, self.worker.step, left=leaving[self.worker_id] or "notice")
            # No rank of a group ends before the first one has announced it, or the others would call the group lost.
            self._attempt(lambda: self._membership.register(left))
            self.close()
            return True
        # A worker that left the view was lost in between, or was released because of a loss.
        if gone := [each for each in self.view.members if each in leaving]:
            reasons = ", ".join(f"{each} has left: {leaving[each]}" for each in gone)
            self._change(reasons)  # join requests are handled after that
        return False

    def _let_go(self, leaving: Mapping[str, str]) -> None:
        ranks = [rank for rank, each in enumerate(self.peers) if each in leaving]
        if ranks and len(ranks) < len(self.peers):
            with torch.no_grad():
                for r in self.worker.replicas:
                    self.worker.strategy.before_leave(r, ranks)

    # -- a change of view ------------------------------------------------------------------------------------------

    def _change(
        self,
        problem: str,
        kept: Sequence[_Kept] = (),
        *,
        repeats: bool = False,
        requests: int | None = None,
        donor: str = "",
    ) -> bool:
        """Agree on a new view, and open it; returns whether the round's result is kept.

        Args:
            problem: what went wrong, in words.
            kept: the state of the replicas before the round.
            repeats: whether this worker is in a round; otherwise it keeps its state.
            requests: the number of join requests to accept; None accepts none.
            donor: the worker that has sent them its state.
        """
        self._next_view(problem, requests, donor)
        others = self.view.ready.values()
        keep = repeats and self._round <= last_kept_round(others)
        if not keep:
            if repeats:
                self._round, self._done = self._round - 1, True
                self._averages = tuple(each for each in self._averages if each[0] <= self._round)
            for r, before in zip(self.worker.replicas, kept, strict=bool(kept)):
                _put_back(r, before)
        self._opens_at = max(each.step for each in others)
        if not self._neighbours or self.worker.step >= self._opens_at:
            self._open_again()
        return keep

    def _next_view(self, problem: str, requests: int | None, donor: str = "") -> None:
        """Leave the view, and connect with the workers of the next one that comes about.

        Raises:
            CommTimeoutError: some do not reach each other, and this one must stop so that the others can continue.
        """
        unconnected = False
        while True:
            # The known join requests may differ between survivors.
            self._requests = 0
            self._disconnect()
            self.comm.round = ""
            if self._neighbours:
                # The proposer accepts requests that any survivor knows, so that no worker must ask for a view again.
                requests = self._membership.requests(now=True)
            progress = Progress(
                self._round,
                self._done,
                self.worker.step,
                ready=self._size > 0,
                unconnected=unconnected,
                averages=self._averages,
                in_step=self._stepping,
            )
            view = self._membership.change(progress, requests=requests, donor=donor, problem=problem)
            if self._arrivals is not None and not (view.joined and view.donor):
                self._arrivals.close()
                self._arrivals = None
            if self._size:
                self._size -= len(view.left)  # they have passed on their state: nothing is lost with them
            else:
                self._round = last_kept_round(view.ready.values())  # as begin() did in the view that has ended
            _LOGGER.warning("%s", _in_words(view, problem))
            self._stop_if_unconnected(view, problem)
            if not (problem := self._attempt(lambda view=view: self._connect(view))):
                return
            unconnected = self._timed_out

    def _stop_if_unconnected(self, view: View, problem: str) -> None:
        """Stop if this is the last of the workers that do not reach all others, which may continue without it."""
        unconnected = self._unconnected.add(view)
        if not unconnected or self.worker_id != unconnected[-1]:
            return
        # Registered as one that could not start, it is gone for the others at once, though its process may run.
        self._fleet.withdraw()
        self.close()
        raise CommTimeoutError(
            f"worker {self.worker_id}: {len(self._unconnected.views)} views in a row with the same {view.size} workers "
            f"did not connect. All reach the store, but {', '.join(unconnected)} did not reach all others; this one "
            "stops, so that the others can continue. Open all ports between workers in firewalls, and name the network "
            "interface that they share by GLOO_SOCKET_IFNAME; then start this worker again to let it join "
            f"({problem})"
        )

    def _connect(self, view: View) -> None:
        self.comm.size = view.size
        rank = view.rank(self.worker_id)
        assert rank is not None
        comm = self._connector.connect(
            view.epoch,
            rank,
            view.size,
            self._membership.timeout,
            self._membership.given_up,
        )
        self.comm.use(comm)
        self.view, self.peers = view, view.members
        # A joining worker must be prepared first, which no earlier round has measured.
        self.comm.timeout = self._membership.timeout
        if view.joined:
            self._newcomers = set(view.joined) if view.donor else set()
        self._newcomers &= set(view.members)
        self.comm.silent = frozenset(view.members.index(each) for each in self._newcomers)

    def _open_again(self) -> None:
        """Continue the strategy with the workers of the view; if one is lost meanwhile, in the next view."""
        while True:
            check_workers(self.worker.strategy, self.comm.size)
            if not (problem := self._attempt(self._open_view)):
                for call in self.on_view:
                    call(self.view)
                return
            self._next_view(problem, None)

    def _open_view(self) -> None:
        strategy, comm = self.worker.strategy, self.comm
        self._hand_over()
        comm.step = self.worker.step
        # `Strategy.change_view` then takes the mean of all parameters.
        averages = any(r.inflight for r in self.worker.replicas) or any(
            each.traits.on_resize != "keep" for each in nested(strategy)
        )
        with torch.no_grad():
            for r in self.worker.replicas:
                r.active = comm.size
                for name, cost in strategy.change_view(r, self._size).items():
                    self.costs[name] = self.costs.get(name, 0.0) + cost
        if averages:
            self._averages = (*self._averages[-1:], (self._round, self.worker.step))
        self.worker.shards.write()
        rebase(self.worker)
        joins, self._size, self._opens_at = self.joins, comm.size, None
        # Where one has begun the next step already, none of them calls anything before it.
        if self._has_newcomers() and not (joins or self._newcomers):
            if any(each.in_step and each.step == self.worker.step for each in self.view.ready.values()):
                self._membership.announce_step(self._round)
            else:
                self._hold(self._kept_members)

    def _hand_over(self) -> None:
        """Give those that are new in the view the state of the worker that is furthest."""
        if not self._has_newcomers():
            return
        there = self.view.ready
        new = [rank for rank, each in enumerate(self.view.members) if each not in there]
        step = max(each.step for each in there.values())
        source = next(each for each in there if there[each].step == step)
        self.comm.step = step
        if self.worker_id not in there:
            self._averages = (_last_average(self.view),)
        if not self._newcomers:
            hand_over(self.worker, new, self.view.members.index(source))
            return
        if self.worker_id in self._newcomers:
            self._offered.unpack(self.worker, self.view)
        elif self._arrivals is not None:
            self._arrivals.finish([self.view.members.index(each) for each in self._newcomers])
        self._arrivals = None

    def _has_newcomers(self) -> bool:
        """Return True if members of the view need the state of the others."""
        return self.view.epoch > self.view.begins and len(self.view.ready) < self.view.size

    def crews(self) -> list[MembershipInterval]:
        """Return the members by step; the same list on all workers, also on those that joined later."""
        crews = [MembershipInterval(0, self._membership.history()[0].members)]
        for view in self._membership.history()[1:]:
            step = max(each.step for each in view.ready.values())
            # Where a worker was lost, the others may be in the middle of this step, with batches that they had before.
            between = view.left or (view.joined and not self._neighbours)
            begins = step if between else step + 1
            crews.append(MembershipInterval(begins, view.members, tuple(view.left), self._unused_from(view)))
        return crews

    def _unused_from(self, view: View) -> int:
        """Return the first step of the workers lost before a view that the others' parameters do not contain."""
        if not self._neighbours:
            return _last_average(view)[1]
        if (period := min(part.traits.period or 1 for part in self._parts)) > 1:
            # Its partner in the last meeting that all of the others have passed has its steps before it.
            return min(each.averages[-1][1] for each in view.ready.values()) // period * period
        # One of the others has waited for the message of a lost worker's next step, and is not ahead of it.
        # A message is sent after the step, and may be used some steps later.
        late = sum(int(getattr(each, name, 0)) for each in self._parts for name in ("delay", "staleness"))
        return max(0, min(each.step for each in view.ready.values()) - 1 - late)

    @property
    def worker(self) -> WorkerState:
        """The worker that is watched over."""
        assert self._worker is not None
        return self._worker

    def close(self) -> None:
        """Leave: the others' next call finds this worker gone."""
        self._report_lost_rank()
        if self._whole is not None and not self.has_just_joined and not self._membership.has_left:
            self._membership.give_up_view()  # new workers wait for a step that does not come
        self._membership.close()
        if self._arrivals is not None:
            self._arrivals.close()
        self._disconnect()
        if self._ranks is not None:
            self._ranks.comm.disconnect()

    def _report_lost_rank(self) -> None:
        """Log why this group ends, where the loss of a rank made another call fail first, such as one of FSDP2."""
        failed = sys.exc_info()[1] or getattr(sys, "last_value", None)
        if self._ranks is None or not isinstance(failed, RuntimeError) or self._membership.has_left:
            return
        end = time.monotonic() + _ENDED_SECONDS
        while not (lost := self._membership.has_lost_rank()) and time.monotonic() < end:
            time.sleep(0.02)  # a process closes its connections before it has ended
        if lost:
            _LOGGER.error("%s", self._ranks.in_words(first_sentence(failed)))

    def _disconnect(self) -> None:
        """Close all connections, so that the waits of all others in this view fail."""
        self._connector.disconnect(self.comm.comm)
        self._release_part()
        if self._whole is not None:
            self._connector.disconnect(self._whole)
            self._whole = None
        self.has_just_joined = False

    def withdraw(self) -> None:
        """Leave a run in which this worker could not start, and take it off the model and the optimizer."""
        self._fleet.withdraw()
        if self._worker is not None:
            self._worker.undo.close()
        self.close()


# -- attach ------------------------------------------------------------------------------------------------------------


def enter(
    elastic: Literal[True] | annexes.Fleet | annexes.ElasticOptions, timeout: float, group: Comm | None = None
) -> Elastic | LateRounds:
    """Enter an elastic run, and connect with the workers of its current view.

    Args:
        elastic: which run.
        timeout: the limit of each wait, in seconds.
        group: the ranks of this worker, if it is a group.

    Raises:
        ConfigError: the environment names no store that outlives the workers, or `elastic` is something else.
        CommError: the other workers did not come, or do not accept this worker.
    """
    late = elastic if isinstance(elastic, LateMerging) else None
    entering = elastic is True or late
    fleet = fleet_from_environment(late=late, timeout=timeout, group=group) if entering else elastic
    if not isinstance(fleet, Fleet):
        raise ConfigError(f"elastic={fleet!r}: must be True, False, LateMerging() or a thinwire.elastic.fleet.Fleet")
    offered = Offered(fleet.membership, fleet.connector)
    fleet.membership.on_offer = offered.take
    try:
        fleet.membership.enter(fleet.rank, fleet.size)
        if fleet.late is not None:
            return LateRounds(fleet, fleet.late, timeout=timeout)
        views = Elastic(fleet, ElasticComm(timeout=timeout), offered)
        views.connect()
    except BaseException:
        fleet.withdraw()
        raise
    return views


def _check_ranks(view: View, worker: str) -> None:
    """Check that this worker has as many ranks as all others.

    Raises:
        MismatchError: another worker has another number.
    """
    numbers = {each: max(1, len(rows_in(row))) for each, row in view.rows.items()}
    other = next((each for each in view.members if numbers[each] != numbers[worker]), None)
    if other is not None:
        raise MismatchError(
            f"worker {worker} has {numbers[worker]} ranks, and worker {other} has {numbers[other]}. Each rank of a "
            "worker averages its shard with the same rank of the others: start all workers with the same number of "
            "ranks"
        )


def _last_average(view: View) -> tuple[int, int]:
    """Return the round of the last average whose result all members with a state keep, and the steps in it."""
    workers = view.ready.values()
    last = last_kept_round(workers)
    return max(average for each in workers for average in each.averages if average[0] <= last)


def _copied(x: Tensor) -> Tensor:
    return host_copy(x, pinned=True, wait=False)


@torch.no_grad()
def _put_back(r: Replica, before: _Kept) -> None:
    if before.x is not None:
        r.x.copy_(before.x)
    if before.g is not None:
        r.g.copy_(before.g)
    if before.state is not None:
        replace_entries(r.state, {name: x.to(device) for name, (x, device) in before.state.items()})
    replace_entries(r.inflight, before.inflight)


def _in_words(view: View, problem: str) -> str:
    gone = (*view.lost, *view.left)
    lost = f"without {', '.join(gone)}" if gone else "with the same workers"
    joined = f" and with {', '.join(view.joined)}" if view.joined else ""
    return f"view {view.epoch}: {view.size} workers continue, {lost}{joined} ({problem})"
