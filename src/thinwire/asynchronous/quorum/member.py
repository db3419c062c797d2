# SPDX-License-Identifier: Apache-2.0
"""One rank of a quorum as a state machine.

Its inputs are events: a gradient is ready, a message was received, time has passed, ranks were lost, a step has ended.
Its outputs are actions for `participant` to perform. Decisions are kept in attributes, such as `Round.outcome`. The
machine has no thread and no connection, and reads no clock: each event carries its time, in seconds.

Messages of one rank must arrive in order. A duplicate message has no effect.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.asynchronous.quorum.coordinator import Coordinator, Outbox
from thinwire.asynchronous.quorum.messages import ControlMessage, GradientChunk, Kind, StateChunk
from thinwire.asynchronous.quorum.reductions import MessageReduction, Partition
from thinwire.asynchronous.quorum.rounds import Round, StateTransfer

_WINDOW = 16  # the number of latest reductions whose time is kept
_USUAL_REDUCTIONS = 3  # a rank sends READY again after the usual time of this many reductions
_FIRST_RETRY_SECONDS = 2.0  # before the first reduction was timed
_OTHERS_FACTOR = 4  # ranks that are not members wait this many times longer


class Send(NamedTuple):
    """Send a control message to another rank."""

    dst: int
    message: ControlMessage


class SendState(NamedTuple):
    """Send this rank's parameters, optimizer state and settings to another rank."""

    dst: int


Action = Send | SendState


@dataclass
class Member:
    """One rank of a quorum.

    Attributes:
        rank: this rank.
        size: the number of ranks.
        least: the number of ranks that every step needs.
        coordinator_rank: the rank that decides.
        partition: the partition of the gradient, with as many parts as a step has members at least.
        retry_seconds: the least time that a rank waits before it sends READY again.
        computing_since: the time at which this rank started to compute its next gradient.
        idle_at: the step after which this rank's state is consistent and may be sent; -1 while a step is being taken.
        coordinator: the coordinator, on the deciding rank; None on others.
        gone: lost ranks, which never return.
        round: the step that this rank has contributed to and has not ended.
        transfer: the transfer of a state to this rank, while it catches up.
        state_requests: ranks that requested a state that this rank does not have yet, with its first valid step.
        barriers: the number of barriers that each rank has reached.
        reduction_seconds: the durations of the latest reductions.
    """

    rank: int
    size: int
    least: int
    coordinator_rank: int
    partition: Partition
    retry_seconds: float
    computing_since: float
    idle_at: int = 0
    coordinator: Coordinator | None = None
    gone: set[int] = field(default_factory=set[int])
    round: Round | None = None
    transfer: StateTransfer | None = None
    state_requests: dict[int, int] = field(default_factory=dict[int, int])
    barriers: Counter[int] = field(default_factory=Counter[int])
    reduction_seconds: deque[float] = field(default_factory=lambda: deque[float](maxlen=_WINDOW))

    # -- a step -----------------------------------------------------------------------------------------------------

    def contribute(self, step: int, gradient: Tensor, digest: int, began: float, now: float) -> list[Action]:
        """Contribute this rank's gradient of a step.

        Args:
            step: the training step.
            gradient: a vector on the CPU, which must not change until the round is over.
            digest: the digest of the optimizer's settings.
            began: the time at which its computation started.
            now: the time.
        """
        ready = ControlMessage(Kind.READY, step, 0, digest, int(1e6 * (began - self.computing_since)))
        self.round = Round(step, gradient, ready, now)
        return self._to_coordinator(ready, now)

    def advance(self, current: Round) -> list[tuple[int, GradientChunk]]:
        """Average the own part if possible; return the chunks for other members."""
        if current.reduction is None or current.outcome is not None:
            return []
        return current.reduction.advance(current.gradient)

    def acknowledge(self, reduction: MessageReduction, now: float) -> list[Action]:
        """Acknowledge the mean to the coordinator after all chunks were sent, if the mean is complete.

        Not earlier: others do not wait for a member that has acknowledged, so they must have its part.
        """
        if not reduction.done or reduction.acknowledged:
            return []
        reduction.acknowledged = True
        message = ControlMessage(Kind.ACK, reduction.step, reduction.attempt)
        return self._to_coordinator(message, now)

    def is_member(self, outcome: ControlMessage) -> bool:
        """Return True if this rank's gradient was used."""
        return outcome.kind is Kind.COMMIT and self.rank in outcome.members

    def begin_update(self, current: Round, now: float) -> ControlMessage:
        """End the round before the state changes; return the decision on the step."""
        assert current.outcome is not None, "the round is over"
        self.idle_at = -1
        if self.is_member(current.outcome):
            self.reduction_seconds.append(now - current.started)
        return current.outcome

    def write_mean_(self, current: Round, gradient: Tensor) -> None:
        """Overwrite a gradient with the mean of a committed step, which all its members hold."""
        assert current.reduction is not None, "a member has acknowledged the mean"
        current.reduction.write_(gradient)

    def recover(self, now: float) -> list[Action]:
        """Ask a member for the state after the step that this rank missed, or a later one."""
        assert self.round is not None, "the step has not ended"
        assert self.round.outcome is not None, "the round is over"
        outcome = self.round.outcome
        self.transfer = StateTransfer(
            outcome.step + (outcome.kind is Kind.COMMIT), self._donors_among(outcome.members), now
        )
        return self._request_state(now)

    @property
    def has_state(self) -> bool:
        """Return True if a requested state has arrived."""
        return self.transfer is not None and bool(self.transfer.complete)

    def take_state(self) -> tuple[int, Tensor]:
        """Return step and bytes of the received state; no other state is accepted from now on."""
        assert self.transfer is not None, "it was waited for"
        chunks, self.transfer = self.transfer.complete, None
        return chunks[0].step, torch.cat([chunk.content for chunk in chunks])[: chunks[0].nbytes]

    def end_step(self, step: int, now: float) -> list[Action]:
        """End a step; until the next decision, this rank's state may be sent to others.

        Args:
            step: the number of steps done.
            now: the time.
        """
        self.idle_at, self.round, self.computing_since = step, None, now
        return self._answer_state_requests()

    def begin_after_loading(self, step: int) -> list[Action]:
        """Decide this step next, after all ranks have loaded a checkpoint."""
        self.idle_at = step
        if self.coordinator is not None:
            self.coordinator.begin(step)
        return self._answer_state_requests()

    def enter_barrier(self, step: int, now: float) -> list[Action]:
        """Enter a barrier; the rank waits there while others are `missing_at_barrier`."""
        entered = self.barriers[self.rank] + 1
        message = ControlMessage(Kind.BARRIER, step, entered)
        return self._post([(rank, message) for rank in (self.rank, *self._others())], now)

    def missing_at_barrier(self) -> list[int]:
        """Return the live ranks that have not reached this rank's barrier."""
        return [rank for rank in self._others() if self.barriers[rank] < self.barriers[self.rank]]

    def lost_at_barrier(self) -> list[int]:
        """Return the lost ranks that have not reached this rank's barrier, if it needs them."""
        # Ranks that reached it have continued, and may have ended since.
        absent = {rank for rank in self.gone if self.barriers[rank] < self.barriers[self.rank]}
        if self.coordinator_rank in absent:
            return [self.coordinator_rank]
        return sorted(absent) if self.size - len(absent) < self.least else []

    # -- losses ------------------------------------------------------------------------------------------------------

    def lose(self, ranks: Collection[int], now: float) -> list[Action]:
        """Continue without these ranks; their messages are ignored even if they live."""
        new = set(ranks) - self.gone
        if not new:
            return []
        self.gone |= new
        outbox = [] if self.coordinator is None else self.coordinator.lose(new, now)
        return self._post(outbox, now) + self._renew_donors(now)

    def waits_for(self) -> list[int]:
        """Return the ranks on which a decision depends; lost ones if no decision is possible."""
        # The coordinator may have ended because of too many other losses, which are then the cause.
        others = self.gone - {self.coordinator_rank}
        return sorted(others) if self.size - len(others) < self.least else [self.coordinator_rank]

    @property
    def stranded(self) -> bool:
        """Return True if this rank needs a state, and no other rank is left to send one."""
        return self.transfer is not None and not self.transfer.donors

    def _renew_donors(self, now: float) -> list[Action]:
        """Ask another rank for the state, in case the previous one is lost."""
        if self.transfer is None:
            return []
        self.transfer.donors = self._donors_among(self.transfer.donors)
        self.transfer.next_request = now
        return self._request_state(now)

    def _donors_among(self, ranks: Sequence[int]) -> list[int]:
        """Return the live ranks among these, or all other live ranks if there are none."""
        living = self._others()
        return [rank for rank in ranks if rank in living] or living

    # -- time --------------------------------------------------------------------------------------------------------

    def time_passed(self, now: float) -> list[Action]:
        """Perform due actions: start an attempt, send READY again, or request a state from another member."""
        actions = list[Action]()
        if self.coordinator is not None:
            actions += self._post(self.coordinator.start_if_due(now), now)
        if self._waits_for_decision and self._seconds_to_retry(now) <= 0:
            actions += self._remind(now)
        return actions + self._request_state(now)

    def seconds_to_wait(self, now: float) -> float | None:
        """Return the seconds until the next `time_passed` for this rank's own actions; None for never."""
        if self.transfer is not None:
            return max(0.0, self.transfer.next_request - now)
        return max(0.0, self._seconds_to_retry(now)) if self._waits_for_decision else None

    @property
    def _waits_for_decision(self) -> bool:
        current = self.round
        return current is not None and current.outcome is None and not current.has_work

    def _seconds_to_retry(self, now: float) -> float:
        """Return the wait before READY is repeated; members wait for messages, other ranks for computation."""
        assert self.round is not None, "only while a step is to be decided"
        patience = self._patience() * (self.round.attempt or _OTHERS_FACTOR)
        return max(self.round.notified, self.round.started) + patience - now

    def _remind(self, now: float) -> list[Action]:
        """Send READY again, since another member may never send its part."""
        assert self.round is not None, "only while a step is to be decided"
        self.round.notified = now
        return self._to_coordinator(self.round.ready._replace(attempt=self.round.attempt), now)

    def _request_state(self, now: float) -> list[Action]:
        transfer = self.transfer
        if transfer is None or transfer.complete or now < transfer.next_request:
            return []
        if not transfer.donors:
            return []
        # Late ranks start with different members and continue with the next one: any member may have stopped.
        donor = transfer.donors[(self.rank + transfer.requests) % len(transfer.donors)]
        transfer.requests += 1
        transfer.next_request = now + transfer.requests * _OTHERS_FACTOR * self._patience()
        return self._post([(donor, ControlMessage(Kind.STATE_REQUEST, transfer.wanted))], now)

    def _patience(self) -> float:
        """Return a time in seconds that is longer than a usual reduction."""
        times = self.reduction_seconds
        return max(self.retry_seconds, _USUAL_REDUCTIONS * median(times) if times else _FIRST_RETRY_SECONDS)

    # -- messages ----------------------------------------------------------------------------------------------------

    def receive(self, src: int, message: ControlMessage, now: float) -> list[Action]:
        """Handle a control message."""
        if src in self.gone:
            return []
        if message.kind is Kind.STATE_REQUEST:
            self.state_requests[src] = message.step  # the latest one is valid
            return self._answer_state_requests()
        if message.kind is Kind.BARRIER:
            self.barriers[src] = max(self.barriers[src], message.attempt)
        elif message.kind in (Kind.READY, Kind.ACK):
            if self.coordinator is not None:
                return self._post(self.coordinator.receive(src, message, now), now)
        elif src == self.coordinator_rank and self.round is not None and self.round.outcome is None:
            self._follow(self.round, message, now)
        return []

    def receive_gradient(self, src: int, chunk: GradientChunk) -> None:
        """Handle a part of a gradient; one of another step is dropped."""
        if self.round is not None and chunk.step == self.round.step and src not in self.gone:
            self.round.receive(src, chunk)

    def receive_state(self, src: int, chunk: StateChunk) -> None:
        """Handle a part of a state; one that was not requested is dropped."""
        if self.transfer is not None and src not in self.gone:
            self.transfer.receive(src, chunk)

    def _follow(self, current: Round, message: ControlMessage, now: float) -> None:
        """Follow the coordinator's decision on this rank's step."""
        if message.kind is Kind.LATE and message.answers == current.step:
            current.outcome = message
        elif message.step != current.step:
            return
        elif message.kind is Kind.START and message.attempt > current.attempt and self.rank in message.members:
            reduction = MessageReduction(self.partition, self.rank, message.members, message.step, message.attempt)
            current.start(message.attempt, reduction, now)
        elif message.kind is Kind.COMMIT:
            current.outcome = message
        elif message.kind is Kind.REFUSED:
            current.refused = message.members

    def _answer_state_requests(self) -> list[Action]:
        """Send this rank's state to ranks that requested it or an earlier one, unless a step is being taken."""
        ranks = [rank for rank, wanted in self.state_requests.items() if self.idle_at >= wanted]
        for rank in ranks:
            del self.state_requests[rank]
        return [SendState(rank) for rank in ranks if rank not in self.gone]

    def _post(self, outbox: Outbox, now: float) -> list[Action]:
        """Send messages to other ranks; messages to itself are handled at once, in order."""
        actions = list[Action]()
        for dst, message in outbox:
            if dst == self.rank:
                actions += self.receive(dst, message, now)
            elif dst not in self.gone:
                actions.append(Send(dst, message))
        return actions

    def _to_coordinator(self, message: ControlMessage, now: float) -> list[Action]:
        return self._post([(self.coordinator_rank, message)], now)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.gone and rank != self.rank]
