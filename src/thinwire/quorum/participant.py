"""One rank's side of a quorum: it contributes gradients, reduces with other members, and recovers when it was late.

Three threads meet here. The training thread calls the public methods and waits in them. Control messages and chunks are
handled in whatever thread the mailbox delivers them, under the mailbox's lock: a rank that computes, the coordinator
too, answers others meanwhile. All-reduces run in a thread of their own.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import ParamSpec, TypeVar
from weakref import WeakMethod, proxy

import torch
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.comm.mailbox.base import Mailbox, Message
from thinwire.errors import CommError, CommTimeoutError, MismatchError
from thinwire.quorum.coordinator import Coordinator, Outbox
from thinwire.quorum.messages import (
    HEADER_BYTES,
    ControlMessage,
    GradientChunk,
    Kind,
    control_length,
    decode_control,
    decode_gradient_chunk,
    decode_state_chunk,
    encode_chunk,
)
from thinwire.quorum.reductions import AllReduceThread, MessageReduction, Partition, wait_while_possible
from thinwire.quorum.rules import QuorumRule, ReductionSelector
from thinwire.quorum.state_transfer import StateTransfer, digest, pack, split_state, unpack_
from thinwire.replica.point_to_point import open_mailbox
from thinwire.replica.replica import Replica

P = ParamSpec("P")
T = TypeVar("T")

_CONTROL, _GRADIENT, _STATE = 1, 2, 3  # topics of the mailbox
_CAPACITY = 64  # messages on one edge: a whole state in chunks beside the control messages of some steps
_MIN_STATE_CHUNK_BYTES = 4096
_MAX_WAIT_SECONDS = 0.05  # how often a wait asks whether the coordinator is still there
_MIN_WAIT_SECONDS = 0.001
_WINDOW = 16  # latest reductions whose time is kept
_USUAL_REDUCTIONS = 3  # a rank waits for so many usual reductions before it sends READY again
_FIRST_RETRY_SECONDS = 2.0  # before the first reduction was timed
_OTHERS_FACTOR = 4  # ranks that are no members wait so many times longer


def weak_callback(method: Callable[P, T], otherwise: T) -> Callable[P, T]:
    """A bound method as a callback that does not keep its object alive; returns `otherwise` once that is gone."""
    reference = WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        alive = reference()
        return otherwise if alive is None else alive(*args, **kwargs)

    return call


class CoordinatorEndpoint:
    """The coordinator's messages and its timer; called in whatever thread messages arrive, under the mailbox's lock.

    Args:
        coordinator: decides.
        changed: the mailbox's lock.
        send: sends a control message to a rank.
    """

    def __init__(
        self, coordinator: Coordinator, changed: threading.Condition, send: Callable[[int, ControlMessage], None]
    ) -> None:
        self.coordinator = coordinator
        self._changed, self._send = changed, send

    def receive(self, src: int, message: ControlMessage) -> None:
        """Pass a READY or ACK message to the coordinator, and send what it answers."""
        self._send_all(self.coordinator.receive(src, message, time.monotonic()))

    def _send_all(self, outbox: Outbox) -> None:
        for dst, message in outbox:
            self._send(dst, message)
        seconds = self.coordinator.seconds_to_wait(time.monotonic())
        if seconds:
            timer = threading.Timer(seconds, weak_callback(self._on_timer, None))
            timer.daemon = True
            timer.start()

    def _on_timer(self) -> None:
        with suppress(CommError, ReferenceError), self._changed:
            self._send_all(self.coordinator.start_if_due(time.monotonic()))


@dataclass
class Round:
    """A step that this rank has contributed to and not ended.

    Attributes:
        step: of training.
        gradient: this rank's, on the CPU.
        began: when it was contributed, in seconds.
        notified: when READY was last sent.
        started: when the latest attempt with this rank as a member started here.
        attempt: the latest attempt that this rank is a member of; 0 before the first.
        reduction: of that attempt; None where it is an all-reduce.
        early: chunks of attempts that have not started here, each with its sender.
        outcome: COMMIT or LATE once the step is decided; None before.
        all_reduced: the number of the latest all-reduce of this step, and its mean.
        lent: whether the all-reduce thread reads the gradient, which must not change meanwhile.
        has_mean: whether the gradient was replaced by the mean of the members.
        refused: two ranks whose optimizers are set differently.
    """

    step: int
    gradient: Tensor
    began: float
    notified: float = 0.0
    started: float = 0.0
    attempt: int = 0
    reduction: MessageReduction | None = None
    early: list[tuple[int, GradientChunk]] = field(default_factory=list[tuple[int, GradientChunk]])
    outcome: ControlMessage | None = None
    all_reduced: tuple[int, Tensor] | None = None
    lent: bool = False
    has_mean: bool = False
    refused: tuple[int, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether the step is decided, and nobody reads the gradient any more."""
        return self.outcome is not None and not self.lent

    def lend(self, step: int) -> bool:
        """Lend the gradient to the all-reduce thread, if this is that step and it is not decided."""
        self.lent = self.step == step and self.outcome is None
        return self.lent

    def start(self, attempt: int, reduction: MessageReduction | None) -> None:
        """Start an attempt."""
        self.attempt, self.reduction, self.started = attempt, reduction, time.perf_counter()
        # Another member may have learned of this attempt first, so that its chunks are here before START.
        for src, chunk in self.early:
            if chunk.attempt == attempt and reduction is not None:
                reduction.receive(src, chunk)
        self.early = [(src, chunk) for src, chunk in self.early if chunk.attempt > attempt]

    def receive(self, src: int, chunk: GradientChunk) -> None:
        """Take in a chunk of this attempt or a later one."""
        if chunk.attempt > self.attempt:
            self.early.append((src, chunk))
        elif chunk.attempt == self.attempt and self.reduction is not None:
            self.reduction.receive(src, chunk)


class Participant:
    """One rank of a quorum.

    Args:
        r: the replica.
        rule: for how many ranks to wait, and how long.
        selector: by which reduction members average.
        side_comm: connections of their own for all-reduces; None where members average by messages alone.
        coordinator: the rank that decides.
        retry_seconds: the least time that a rank waits before it sends READY again.
        names: entries of the replica's state that a late rank must receive.
    """

    def __init__(
        self,
        r: Replica,
        rule: QuorumRule,
        selector: ReductionSelector,
        side_comm: Comm | None,
        *,
        coordinator: int,
        retry_seconds: float,
        names: Sequence[str],
    ) -> None:
        self.rank, self.size, self.coordinator_rank = r.comm.rank, r.comm.size, coordinator
        self._partition = Partition(r.x.numel(), rule.least, r.x.dtype)
        self._state_chunk_bytes = max(r.x.numel() * r.x.element_size(), _MIN_STATE_CHUNK_BYTES)
        self._r, self._comm, self._names = proxy(r), r.comm, names
        self._retry_seconds = retry_seconds
        self._reduction_seconds = deque[float](maxlen=_WINDOW)
        self._round: Round | None = None
        self._transfer = StateTransfer()
        self._packed: tuple[int, Tensor] | None = None
        self._barriers: Counter[int] = Counter()
        # The step after which this rank's state is consistent and may be sent; -1 while a step is being taken.
        self._idle_at, self._computing_since = r.step, time.perf_counter()
        largest = HEADER_BYTES + max(self._partition.nbytes, self._state_chunk_bytes)
        like = torch.empty(largest, dtype=torch.uint8, device=r.x.device)
        self._box: Mailbox = proxy(open_mailbox(r, like, capacity=_CAPACITY))
        self._latest_mean: tuple[int, Tensor] | None = None
        self._all_reduces = AllReduceThread(self._box.changed)
        self._endpoint: CoordinatorEndpoint | None = None
        if self.rank == coordinator:
            send = weak_callback(self._send_control, None)
            self._endpoint = CoordinatorEndpoint(Coordinator(rule, selector), self._box.changed, send)
        others = [rank for rank in range(self.size) if rank != self.rank]
        for topic, handler, like in (
            (_CONTROL, self._on_control, torch.empty(control_length(self.size), dtype=torch.int64)),
            (_GRADIENT, self._on_gradient, torch.empty(HEADER_BYTES + self._partition.nbytes, dtype=torch.uint8)),
            (_STATE, self._on_state, torch.empty(HEADER_BYTES + self._state_chunk_bytes, dtype=torch.uint8)),
        ):
            self._box.on_message(topic, weak_callback(handler, True), like=like, src=others)
        if side_comm is not None:
            zeros = torch.zeros(self._partition.numel, dtype=self._partition.dtype)
            self._all_reduces.run_in_background(
                side_comm,
                contribute=weak_callback(self._all_reduce_input, zeros),
                finish=weak_callback(self._all_reduce_ended, None),
                wait=wait_while_possible(r),
            )

    # -- called by the strategy, in the training thread --------------------------------------------------------------

    @property
    def outcome(self) -> ControlMessage | None:
        """How the step that this rank contributed to was decided; None before."""
        return None if self._round is None else self._round.outcome

    @property
    def has_mean(self) -> bool:
        """Whether the contributed gradient was replaced by the mean, so that this rank can take the step itself."""
        return self._round is not None and self._round.has_mean

    def is_member(self, outcome: ControlMessage) -> bool:
        """Whether this rank's gradient has counted."""
        return outcome.kind is Kind.COMMIT and self.rank in outcome.members

    def contribute(self, gradient: Tensor) -> ControlMessage:
        """Contribute a gradient to the replica's step, and replace it by the members' mean where that is known here.

        Members know it; so does a late rank that took part in the all-reduce beside its computation.

        Returns:
            How the step was decided: COMMIT with its members, or LATE with those of the latest step.

        Raises:
            CommTimeoutError: too few ranks were ready in time.
            PeerLostError: the coordinator is gone.
            MismatchError: the optimizers of two ranks are set differently.
        """
        self._barrier_after_loading()
        start = time.perf_counter()
        own = gradient.detach().cpu()  # waits for a GPU: before that the gradient is not ready
        with self._box.changed:
            current = self._round = Round(self._r.step, own, start)
            self._send_ready(current)
        while not current.is_over:
            self._wait(lambda: self._can_continue(current), "enough ranks to be ready", lambda: self._retry(current))
            self._advance(current)
        outcome = current.outcome
        assert outcome is not None, "it was waited for"
        end = time.perf_counter()
        self._comm.meter.waited("quorum", start, start, current.started or end, current.step)
        with self._box.changed:
            self._idle_at = -1  # the optimizer is about to change the state
        if self.is_member(outcome):
            self._comm.meter.waited("mean", current.started, current.started, end, current.step)
            self._reduction_seconds.append(end - current.started)
        if outcome.kind is Kind.COMMIT:
            self._write_mean_(current, outcome, gradient)
        return outcome

    def recover(self, outcome: ControlMessage) -> None:
        """Take the state that members had after the step for which this rank was late, or after a later one.

        Raises:
            CommTimeoutError: no member answered.
        """
        start, step = time.perf_counter(), self._r.step
        wanted = outcome.step + (outcome.kind is Kind.COMMIT)
        donors = [rank for rank in outcome.members if rank != self.rank]
        requests, next_request = 0, start
        with self._box.changed:
            self._transfer.request(wanted)

        def request_again() -> float:
            nonlocal requests, next_request
            if time.perf_counter() >= next_request:
                # Late ranks begin at different members, and go on to the next one: any of them may have stopped.
                donor = donors[(self.rank + requests) % len(donors)]
                self._send_control(donor, ControlMessage(Kind.STATE_REQUEST, wanted))
                requests += 1
                next_request = time.perf_counter() + requests * _OTHERS_FACTOR * self._patience()
            return next_request - time.perf_counter()

        self._wait(lambda: self._transfer.complete is not None, f"the state of step {wanted}", request_again)
        with self._box.changed:
            received = self._transfer.complete
            self._transfer.request(-1)
        assert received is not None, "it was waited for"
        unpack_(self._r, received[1])
        self._r.step = received[0]
        self._comm.meter.waited("state", start, start, time.perf_counter(), step)

    def end_step(self) -> None:
        """The step has ended: until the next one this rank's state may be sent to others."""
        with self._box.changed:
            self._idle_at, self._packed, self._round = self._r.step, None, None
            self._all_reduces.flush_meter(self._comm.meter)
        self._computing_since = time.perf_counter()
        self._box.process_deferred()  # state requests that were put aside

    def barrier(self) -> None:
        """Wait until all ranks are here; late ranks receive this rank's state meanwhile.

        Raises:
            CommTimeoutError: some rank did not reach the barrier in time.
            PeerLostError: some rank is gone.
        """
        start = time.perf_counter()
        with self._box.changed:
            self._barriers[self.rank] += 1
            entered = self._barriers[self.rank]
            for rank in range(self.size):
                if rank != self.rank:
                    self._send_control(rank, ControlMessage(Kind.BARRIER, self._r.step))
            self._box.wait_until(
                lambda: [rank for rank in range(self.size) if self._barriers[rank] < entered],
                f"all ranks to end step {self._r.step}",
            )
            self._all_reduces.flush_meter(self._comm.meter)
        self._comm.meter.waited("barrier", start, start, time.perf_counter(), self._r.step)

    # -- helpers of the training thread ------------------------------------------------------------------------------

    def _barrier_after_loading(self) -> None:
        """If a checkpoint was loaded since the last step, all ranks continue from its step together."""
        if self._idle_at == self._r.step:
            return
        with self._box.changed:
            self._idle_at, self._packed = self._r.step, None
            if self._endpoint is not None:
                self._endpoint.coordinator.begin(self._r.step)
        self.barrier()

    def _send_ready(self, current: Round) -> None:
        current.notified = time.perf_counter()
        microseconds = int(1e6 * (current.began - self._computing_since))
        message = ControlMessage(Kind.READY, current.step, current.attempt, digest(self._r), microseconds)
        self._send_control(self.coordinator_rank, message)

    def _retry(self, current: Round) -> float:
        """Send READY again when that is due, since another member may never send its part; seconds until it is."""
        # A member waits for messages that are on their way. Other ranks wait for ranks that still compute.
        patience = self._patience() * (current.attempt or _OTHERS_FACTOR)
        left = max(current.notified, current.started) + patience - time.perf_counter()
        if left <= 0:
            self._send_ready(current)
        return left if left > 0 else patience

    def _patience(self) -> float:
        """Longer than a reduction usually takes, in seconds."""
        times = self._reduction_seconds
        return max(self._retry_seconds, _USUAL_REDUCTIONS * median(times) if times else _FIRST_RETRY_SECONDS)

    def _can_continue(self, current: Round) -> bool:
        """Whether the step is decided, or this rank has something to compute or to send for it."""
        if current.refused:
            first, second = current.refused
            raise MismatchError(
                f"step {current.step}: the optimizers of ranks {first} and {second} are set differently; a schedule "
                "that counts each worker's own steps does this: make it a function of worker.step"
            )
        reduction = current.reduction
        return current.is_over or (current.outcome is None and reduction is not None and reduction.has_work)

    def _advance(self, current: Round) -> None:
        """Send chunks, average the own part, and acknowledge when all of the mean is here."""
        with self._box.changed:
            reduction, attempt = current.reduction, current.attempt
            if reduction is None or current.outcome is not None:
                return
            outbox = reduction.advance(current.gradient)
        for dst, chunk in outbox:
            self._box.send(dst, encode_chunk(chunk, self._partition.nbytes), topic=_GRADIENT)
        with self._box.changed:
            # Only after the chunks were sent: nobody waits for a member that has acknowledged, so all others must have
            # its part of the mean.
            if reduction.done and not reduction.acknowledged:
                reduction.acknowledged = True
                self._send_control(self.coordinator_rank, ControlMessage(Kind.ACK, current.step, attempt))

    def _write_mean_(self, current: Round, outcome: ControlMessage, gradient: Tensor) -> None:
        """Write the mean over the gradient, if this rank has it or will have it without anybody's help."""
        number, thread = outcome.all_reduce, self._all_reduces
        if number:
            self._wait(lambda: not thread.is_pending(number), f"all-reduce {number}", lambda: _MAX_WAIT_SECONDS)
            means = dict(each for each in (current.all_reduced, self._latest_mean) if each is not None)
            if number in means:
                gradient.copy_(means[number])
                current.has_mean = True
        elif current.reduction is not None and self.is_member(outcome):
            current.reduction.write_(gradient)
            current.has_mean = True

    def _wait(self, ready: Callable[[], bool], waiting_for: str, meanwhile: Callable[[], float]) -> None:
        """Wait under the comm's timeout; the coordinator's loss ends the wait at once, another rank's does not.

        `meanwhile` is called whenever anything has changed, and again within the seconds that it returns.
        """
        end = time.monotonic() + self._comm.timeout
        # Nobody sends messages of topic 0 here. To ask whether one is ready raises PeerLostError once its sender is
        # gone, which is all that is wanted of it.
        lifeline = None if self._endpoint else self._box.expect(self.coordinator_rank, torch.empty(0))
        with self._box.changed:
            while not ready():
                self._box.process_deferred()
                seconds = meanwhile()
                if ready():
                    return
                if time.monotonic() > end:
                    raise CommTimeoutError(
                        f"rank {self.rank} waited {self._comm.timeout:g} s for {waiting_for} "
                        f"at step {self._r.step}; all ranks must train until the same worker.step"
                    )
                if lifeline is not None:
                    _ = lifeline.ready
                self._box.changed.wait(min(_MAX_WAIT_SECONDS, max(seconds, _MIN_WAIT_SECONDS)))

    # -- messages: in any thread, under the lock ---------------------------------------------------------------------

    def _send_control(self, dst: int, message: ControlMessage) -> None:
        with self._box.changed:
            if dst == self.rank:
                self._handle(dst, message)
            else:
                self._box.send(dst, message.encode(self.size), topic=_CONTROL)

    def _on_control(self, message: Message) -> bool:
        return self._handle(message.src, decode_control(message.content.tolist()))

    def _on_gradient(self, message: Message) -> bool:
        chunk = decode_gradient_chunk(message.content)
        if self._round is not None and chunk.step == self._round.step:
            self._round.receive(message.src, chunk)
        return True

    def _on_state(self, message: Message) -> bool:
        self._transfer.receive(message.src, decode_state_chunk(message.content))
        return True

    def _handle(self, src: int, message: ControlMessage) -> bool:
        """Handle a control message; False puts it aside until `end_step`."""
        if message.kind is Kind.START and message.all_reduce:
            self._all_reduces.enqueue(message)
        if message.kind is Kind.STATE_REQUEST:
            return self._send_state(src, message.step)
        if message.kind is Kind.BARRIER:
            self._barriers[src] += 1
        elif message.kind in (Kind.READY, Kind.ACK):
            if self._endpoint is not None:
                self._endpoint.receive(src, message)
        elif self._round is not None and self._round.outcome is None:
            self._follow(self._round, message)
        return True

    def _follow(self, current: Round, message: ControlMessage) -> None:
        """Do what the coordinator has decided about the step that this rank is at."""
        if message.kind is Kind.LATE and message.attempt == current.step:
            missed = message.step - current.step
            # A rank that is late by one step only may know the mean already, as if it had been there at the commit.
            current.outcome = message if missed > 1 else message._replace(kind=Kind.COMMIT, step=current.step)
        elif message.step != current.step:
            return
        elif message.kind is Kind.START and message.attempt > current.attempt and self.rank in message.members:
            reduction = None
            if not message.all_reduce:
                reduction = MessageReduction(self._partition, self.rank, message.members, message.step, message.attempt)
            current.start(message.attempt, reduction)
        elif message.kind is Kind.COMMIT:
            current.outcome = message
        elif message.kind is Kind.REFUSED:
            current.refused = message.members
        self._box.changed.notify_all()

    def _send_state(self, dst: int, wanted: int) -> bool:
        """Send this rank's state, if it is that of the wanted step or a later one and no step is being taken."""
        if self._idle_at < wanted:
            return False
        if self._packed is None:
            self._packed = self._idle_at, pack(self._r, self._names)
        for chunk in split_state(*self._packed, self._state_chunk_bytes):
            self._box.send(dst, encode_chunk(chunk, self._state_chunk_bytes), topic=_STATE)
        return True

    # -- in the all-reduce thread ------------------------------------------------------------------------------------

    def _all_reduce_input(self, start: ControlMessage) -> Tensor:
        """What this rank adds: a copy of its gradient if it is a member that still waits, else zeros."""
        with self._box.changed:
            current = self._round
            if current is None or self.rank not in start.members or not current.lend(start.step):
                return torch.zeros(self._partition.numel, dtype=self._partition.dtype)
        try:
            return current.gradient.clone()  # outside the lock: it may take long, and messages go on meanwhile
        finally:
            with self._box.changed:
                current.lent = False
                self._box.changed.notify_all()

    def _all_reduce_ended(self, start: ControlMessage, mean: Tensor) -> None:
        """Keep the mean, and acknowledge, so that the coordinator may start another all-reduce."""
        with self._box.changed:
            self._latest_mean = start.all_reduce, mean
            if self._round is not None and self._round.step == start.step:
                self._round.all_reduced = self._latest_mean
            acknowledgement = ControlMessage(Kind.ACK, start.step, start.attempt, all_reduce=start.all_reduce)
            self._send_control(self.coordinator_rank, acknowledgement)
