# SPDX-License-Identifier: Apache-2.0
"""One rank's side of a quorum in a real process: connections, threads and a clock around a `Member`.

Two kinds of threads meet here. The training thread calls the public methods and waits in them. Control messages and
chunks are handled in the thread in which the mailbox delivers them, under the mailbox's lock, so that a computing rank
(also the coordinator) answers others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import ParamSpec, TypeVar
from weakref import WeakMethod, proxy

import torch
from torch import Tensor

from thinwire.asynchronous.quorum.coordinator import Coordinator
from thinwire.asynchronous.quorum.member import Action, Member, Send
from thinwire.asynchronous.quorum.messages import (
    HEADER_BYTES,
    ControlMessage,
    control_length,
    decode_control,
    decode_gradient_chunk,
    decode_state_chunk,
    encode_chunk,
)
from thinwire.asynchronous.quorum.reductions import Partition
from thinwire.asynchronous.quorum.rounds import Round
from thinwire.asynchronous.quorum.rules import QuorumRule
from thinwire.asynchronous.quorum.state_transfer import digest, pack, split_state, unpack_
from thinwire.core.comm.base import named
from thinwire.core.comm.mailbox.base import Mailbox, Message
from thinwire.core.replica.point_to_point import open_mailbox
from thinwire.core.replica.replica import Replica
from thinwire.errors import CommError, MismatchError, PeerLostError

_LOGGER = logging.getLogger("thinwire")
P = ParamSpec("P")
T = TypeVar("T")

_CONTROL, _GRADIENT, _STATE = 1, 2, 3  # topics of the mailbox
_CAPACITY = 64  # messages on one edge: a whole state in chunks and the control messages of some steps
_MIN_STATE_CHUNK_BYTES = 4096
_MAX_WAIT_SECONDS = 0.05  # how often a wait checks that the other ranks still run
_MIN_WAIT_SECONDS = 0.001
_LOOK_SECONDS = 0.01  # the shortest interval of these checks, however many messages arrive


def weak_callback(method: Callable[P, T], otherwise: T) -> Callable[P, T]:
    """Make a callback of a bound method that does not keep its object alive."""
    reference = WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        alive = reference()
        return otherwise if alive is None else alive(*args, **kwargs)

    return call


class Participant:
    """One rank of a quorum.

    Args:
        r: the replica.
        rule: decides for how many ranks to wait, and how long.
        coordinator: the rank that decides.
        retry_seconds: the least time before a waiting rank sends READY again.
        names: entries of the replica's state that a late rank must receive.
    """

    def __init__(
        self,
        r: Replica,
        rule: QuorumRule,
        *,
        coordinator: int,
        retry_seconds: float,
        names: Sequence[str],
    ) -> None:
        self._r, self._comm, self._names = proxy(r), r.comm, names
        self.rank, size, self._clock = r.comm.rank, r.comm.size, r.comm.runtime.clock
        partition = Partition(r.x.numel(), rule.least, r.x.dtype)
        self._member = Member(self.rank, size, rule.least, coordinator, partition, retry_seconds, self._clock(), r.step)
        if self.rank == coordinator:
            self._member.coordinator = Coordinator(rule)
        self._packed: tuple[int, Tensor] | None = None
        self._timer_at, self._looked_at = inf, -inf
        self._told = set[int]()
        self._state_chunk_bytes = max(r.x.numel() * r.x.element_size(), _MIN_STATE_CHUNK_BYTES)
        largest = HEADER_BYTES + max(partition.nbytes, self._state_chunk_bytes)
        like = torch.empty(largest, dtype=torch.uint8, device=r.x.device)
        self._box: Mailbox = proxy(open_mailbox(r, like, capacity=_CAPACITY))
        self._box.tolerant = True
        self._others = others = [other for other in range(size) if other != self.rank]
        self._box.lost_among(others)  # connects: only a connection shows the later loss of a rank
        gradient_bytes, state_bytes = HEADER_BYTES + partition.nbytes, HEADER_BYTES + self._state_chunk_bytes
        for topic, handler, length, dtype in (
            (_CONTROL, self._on_control, control_length(size), torch.int64),
            (_GRADIENT, self._on_gradient, gradient_bytes, torch.uint8),
            (_STATE, self._on_state, state_bytes, torch.uint8),
        ):
            like = torch.empty(length, dtype=dtype, device="cpu")
            self._box.on_message(topic, weak_callback(handler, True), like=like, src=others)

    # -- called by the strategy, in the training thread --------------------------------------------------------------

    @property
    def outcome(self) -> ControlMessage | None:
        """Return the decision on the step that this rank contributed to; None before it."""
        return None if self._member.round is None else self._member.round.outcome

    @property
    def lost(self) -> list[int]:
        """Return the lost ranks that the others continue without, in order."""
        with self._box.changed:
            self._look_for_losses(self._others)
        return sorted(self._member.gone)

    def is_member(self, outcome: ControlMessage) -> bool:
        """Return True if this rank's gradient was used, so that it holds the mean and can take the step."""
        return self._member.is_member(outcome)

    def contribute(self, gradient: Tensor) -> ControlMessage:
        """Contribute a gradient to the step; members replace it with their mean.

        Returns:
            The decision: COMMIT with the members of the step, or LATE with those of the latest step.

        Raises:
            CommTimeoutError: too few ranks were ready in time.
            PeerLostError: the coordinator is lost, or too many ranks.
            MismatchError: the optimizers of two ranks have different settings.
        """
        # On a GPU this is a thread of autograd, at the end of the backward pass.
        with self._box.in_thread_of_owner():
            return self._contribute(gradient)

    def _contribute(self, gradient: Tensor) -> ControlMessage:
        if self._member.idle_at != self._r.step:
            self._begin_after_loading()
        start = self._clock()
        own = gradient.detach().cpu()  # waits for the GPU, until the gradient is ready
        with self._box.changed:
            self._perform(self._member.contribute(self._r.step, own, digest(self._r), start, self._clock()))
            current = self._member.round
        assert current is not None, "this rank has just contributed"
        while (outcome := self._begin_update(current)) is None:
            counted = f"enough ranks to be ready, as rank {self._member.coordinator_rank} counts"
            self._wait(lambda: self._can_continue(current), counted)
            self._advance(current)
        self._tell_losses()
        end = self._clock()
        self._comm.meter.waited("quorum", start, start, current.started or end, current.step)
        if self.is_member(outcome):
            self._comm.meter.waited("mean", current.started, current.started, end, current.step)
            self._member.write_mean_(current, gradient)
        return outcome

    def recover(self) -> None:
        """Copy the members' state after the step that this rank missed, or after a later one.

        Raises:
            CommTimeoutError: no member answered.
            PeerLostError: as in `contribute`, or all ranks that could send a state are lost.
        """
        start, step, member = self._clock(), self._r.step, self._member
        with self._box.changed:
            self._perform(member.recover(start))
            donors = [] if member.transfer is None else sorted(member.transfer.donors)
        self._wait(lambda: member.has_state, f"the state of {named(donors)}, which were in time for the step")
        with self._box.changed:
            received_step, data = member.take_state()
        unpack_(self._r, data)
        self._r.step = received_step
        self._comm.meter.waited("state", start, start, self._clock(), step)

    def end_step(self) -> None:
        """End the step; until the next one this rank's state may be sent to others."""
        with self._box.changed:
            self._packed = None
            self._box.follow_stream()
            self._perform(self._member.end_step(self._r.step, self._clock()))
        self._box.process_deferred()  # raises errors of other threads

    def barrier(self) -> None:
        """Wait until all live ranks arrive; late ranks may receive this rank's state meanwhile.

        Raises:
            CommTimeoutError: some rank did not reach the barrier in time.
            PeerLostError: the coordinator is lost, or too many ranks.
        """
        start, member = self._clock(), self._member

        def missing() -> list[int]:
            # Ranks that arrived earlier may have continued and ended since.
            self._look_for_losses(member.missing_at_barrier())
            return member.lost_at_barrier() or member.missing_at_barrier()

        with self._box.changed:
            self._perform(member.enter_barrier(self._r.step, start))
            self._wait_until(missing, f"{{ranks}} to end step {self._r.step}")
        self._comm.meter.waited("barrier", start, start, self._clock(), self._r.step)

    # -- helpers of the training thread ------------------------------------------------------------------------------

    def _begin_after_loading(self) -> None:
        """Continue on all ranks from the step of a loaded checkpoint."""
        with self._box.changed:
            self._packed = None
            self._perform(self._member.begin_after_loading(self._r.step))
        self.barrier()

    def _begin_update(self, current: Round) -> ControlMessage | None:
        """Return the decision on the step, or None before it."""
        with self._box.changed:
            return None if current.outcome is None else self._member.begin_update(current, self._clock())

    def _can_continue(self, current: Round) -> bool:
        """Return True if the step is decided, or this rank has work for it."""
        if current.refused:
            first, second = current.refused
            raise MismatchError(
                f"step {current.step}: the optimizers of ranks {first} and {second} have different settings. A "
                "schedule that counts each worker's own steps causes this: make it a function of worker.step"
            )
        return current.outcome is not None or current.has_work

    def _advance(self, current: Round) -> None:
        """Send chunks, average the own part, and acknowledge the complete mean."""
        with self._box.changed:
            reduction, outbox = current.reduction, self._member.advance(current)
        for dst, chunk in outbox:
            self._box.send(dst, encode_chunk(chunk, self._member.partition.nbytes), topic=_GRADIENT)
        with self._box.changed:
            if reduction is not None:
                self._perform(self._member.acknowledge(reduction, self._clock()))

    def _wait(self, ready: Callable[[], bool], waiting_for: str) -> None:
        """Wait under the comm's timeout; only the loss of more ranks than backups ends the wait early."""
        member = self._member

        def missing() -> list[int]:
            self._look_for_losses(self._others)
            if ready():
                return []
            if member.stranded:
                fix = "" if member.coordinator_rank in member.gone else ". Resume from a checkpoint"  # added below
                problem = f"all other ranks are lost: {sorted(member.gone)}{fix}"
                raise self._comm.failure(waiting_for, problem, late=False)
            return member.waits_for()

        words = f"{waiting_for} (all ranks must train until the same worker.step)"
        with self._box.changed:
            self._wait_until(missing, words)

    def _wait_until(self, missing: Callable[[], Sequence[int]], waiting_for: str) -> None:
        try:
            self._box.wait_until(missing, waiting_for, meanwhile=self._meanwhile)
        except PeerLostError as error:
            rank = self._member.coordinator_rank
            if rank not in self._member.gone:
                raise
            raise PeerLostError(
                f"{error}. Rank {rank} is the coordinator of BackupWorkers and is lost: the other ranks cannot "
                "continue without it. Resume from a checkpoint"
            ) from None

    def _meanwhile(self) -> float:
        """Perform due actions while this rank waits; return the seconds until the next check."""
        self._perform(self._member.time_passed(self._clock()))
        seconds = self._member.seconds_to_wait(self._clock())
        return _MAX_WAIT_SECONDS if seconds is None else min(_MAX_WAIT_SECONDS, max(seconds, _MIN_WAIT_SECONDS))

    def _look_for_losses(self, ranks: Sequence[int]) -> None:
        """Report the lost ranks among these to the member."""
        now, known = self._clock(), self._member.gone
        if now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        if gone := self._box.lost_among([rank for rank in ranks if rank not in known]):
            self._perform(self._member.lose(gone, now))

    def _tell_losses(self) -> None:
        """Warn once about each lost rank: its data are not used any more."""
        gone = self._member.gone
        if new := sorted(gone - self._told):
            self._told.update(new)
            _LOGGER.warning(
                "rank %d, step %d: training continues without %s, which cannot be reached. %d of %d ranks are left",
                self.rank,
                self._r.step,
                named(new),
                self._member.size - len(gone),
                self._member.size,
            )

    # -- what the member has decided: in any thread, under the lock --------------------------------------------------

    def _perform(self, actions: Sequence[Action]) -> None:
        """Send the member's messages, and set the coordinator's timer."""
        self._box.dismiss(self._member.gone)
        for action in actions:
            if isinstance(action, Send):
                self._box.send(action.dst, action.message.encode(self._member.size), topic=_CONTROL)
            else:
                self._send_state(action.dst)
        seconds = None if self._member.coordinator is None else self._member.coordinator.seconds_to_wait(self._clock())
        # One timer is enough, unless an earlier action is due.
        if seconds is not None and self._clock() + seconds < self._timer_at - _MIN_WAIT_SECONDS:
            self._timer_at = self._clock() + seconds
            self._comm.runtime.call_later(seconds, weak_callback(self._on_timer, None))

    def _send_state(self, dst: int) -> None:
        if self._packed is None:
            with self._box.in_stream_of_owner():  # a timer's thread, or that of messages
                self._packed = self._member.idle_at, pack(self._r, self._names)
        for chunk in split_state(*self._packed, self._state_chunk_bytes):
            self._box.send(dst, encode_chunk(chunk, self._state_chunk_bytes), topic=_STATE)

    def _on_timer(self) -> None:
        with suppress(CommError, ReferenceError), self._box.changed:
            self._timer_at = inf
            self._perform(self._member.time_passed(self._clock()))
            self._box.changed.notify_all()

    def _on_control(self, message: Message) -> bool:
        self._perform(self._member.receive(message.src, decode_control(message.content.tolist()), self._clock()))
        return True

    def _on_gradient(self, message: Message) -> bool:
        self._member.receive_gradient(message.src, decode_gradient_chunk(message.content))
        return True

    def _on_state(self, message: Message) -> bool:
        self._member.receive_state(message.src, decode_state_chunk(message.content))
        return True
