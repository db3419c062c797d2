# SPDX-License-Identifier: Apache-2.0
"""The state of all simulated workers: the clock, the wires, the lost workers and the record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from thinwire.core.comm.mailbox.base import Mailbox
from thinwire.core.comm.work import Interval
from thinwire.errors import CommError, CommTimeoutError, PeerLostError, ThinwireError, error_named
from thinwire.planning.simulate.faults import Draws
from thinwire.planning.simulate.network import Death, Network
from thinwire.planning.simulate.record import NETWORK, Record, Step
from thinwire.planning.simulate.schedule import Actor, Schedule, Stopped
from thinwire.planning.simulate.wires import Wires

_LEAST_LOST = 1e-9  # of the clock's time, which has no more digits to spare
RECONNECT_SECONDS = 1.0
"""How long a mailbox's connection may be gone before its rank counts as lost, as with ZeroMQ."""


@dataclass(frozen=True)
class Loss:
    """A worker that is gone.

    Attributes:
        rank: which.
        at: when, in virtual seconds.
        reason: in words.
        silent: whether its connections were left open.
    """

    rank: int
    at: float
    reason: str
    silent: bool = False


@dataclass(eq=False)
class Pending:
    """One rank's part of an operation in flight.

    Attributes:
        rank: whose.
        missing: how many things have still to happen before the end is known.
        done_at: when it ends, as far as is known.
        cause: the rank that came last, and made it end so late.
        came: when that rank came.
        late: the ranks that are waited for, for errors.
        actor: the thread that waits for it.
    """

    rank: int
    missing: int
    late: Callable[[], Sequence[int]]
    done_at: float = 0.0
    cause: int = NETWORK
    came: float = 0.0
    actor: Actor | None = None

    def know(self, times: Schedule, at: float, cause: int, came: float) -> None:
        """One of the missing things will have happened at a time."""
        self.missing -= 1
        if at >= self.done_at:
            self.done_at, self.cause, self.came = at, cause, came
        if not self.missing and self.actor is not None:
            actor, wait = self.actor, self.actor.waits
            times.at(self.done_at, lambda: times.wake(actor, wait))


@dataclass
class Connections:
    """One group of connections between all ranks: a failed call closes it, as `GroupComm` does.

    Attributes:
        fault: why it is closed.
        waiting: what threads wait for on it.
    """

    fault: CommError | None = None
    waiting: dict[Actor, Pending] = field(default_factory=dict[Actor, Pending])


class World:
    """All of one simulation but the workers themselves.

    Attributes:
        size: the number of workers.
        network: rates, latencies and faults.
        times: the clock and the threads.
        wires: the interfaces.
        draws: random numbers.
        record: what has happened.
        lost: workers that are gone, by rank.
        ended: ranks whose work is done.
        groups: connections that are open.
        mailboxes: by (number, rank).
        shared: an error that a rank has found, and that all are to raise.
        heard: the same, once the others have heard of it.
    """

    def __init__(self, size: int, network: Network, draws: Draws) -> None:
        self.size, self.network, self.draws = size, network, draws
        self.times = Schedule()
        self.wires = Wires(network, size)
        self.record = Record()
        self.lost: dict[int, Loss] = {}
        self.ended: set[int] = set()
        self.shared: ThinwireError | None = None
        self.heard: ThinwireError | None = None
        self.groups: list[Connections] = []
        self.mailboxes: dict[tuple[int, int], Mailbox] = {}
        self._stolen = [0.0] * size
        self._deaths: dict[int, Death] = {}
        for death in network.deaths:
            if death.at is None:
                self._deaths[death.rank] = death
            else:
                self.times.at(death.at, lambda death=death: self._die(death))
        for pause in network.pauses:
            self.times.at(pause.at, lambda pause=pause: self._pause(pause.rank, pause.seconds))

    # -- workers -------------------------------------------------------------------------------------------------

    def lose(self, loss: Loss) -> None:
        """A worker is gone; the others learn of it when its connections close."""
        if loss.rank in self.lost:
            return
        self.lost[loss.rank] = loss
        if loss.silent:
            self.times.may_time_out = True
            return
        closing = self.network.latency
        self.times.at(self.times.now + closing, lambda: self._close_groups(loss))
        self.times.at(self.times.now + closing + RECONNECT_SECONDS, self._notify_mailboxes)

    def share(self, error: ThinwireError) -> ThinwireError:
        """Let all waits raise an error that a rank has found; returns the first such error of any rank."""
        if self.shared is None:
            self.shared = error
            self.times.at(self.times.now + self.network.latency, self._tell_all)
        return self.shared

    def check_heard(self) -> None:
        """Raise what another rank has found."""
        if self.heard is not None:
            raise error_named(type(self.heard).__name__, str(self.heard))

    def check_step(self, rank: int, step: int) -> None:
        """End a worker that was to die in a training step."""
        death = self._deaths.get(rank)
        if death is not None and death.step is not None and step >= death.step:
            del self._deaths[rank]
            self._die(death)
            raise Stopped

    def compute(self, rank: int, step: int, seconds: float) -> None:
        """Let a worker compute."""
        start = self.times.now
        self.take(rank, seconds)
        if self.record.tracing:
            self.record.computing[rank].append(Interval("compute", "compute", start, self.times.now, step))

    def take(self, rank: int, seconds: float) -> None:
        """Let something take a worker so long; pauses, and what messages take from its processor, come on top."""
        start, before = self.times.now, self._stolen[rank]
        contention = self.network.contention
        busy = self.wires.busy_seconds(rank, start) if contention else 0.0
        self.times.sleep(seconds)
        while True:
            while self.times.now < (end := start + seconds + self._stolen[rank] - before):
                self.times.sleep(end - self.times.now)
            if not contention:
                return
            # More messages may pass while it catches up.
            earlier, busy = busy, self.wires.busy_seconds(rank, self.times.now)
            lost = contention * (busy - earlier)
            if lost <= _LEAST_LOST * self.times.now:
                return
            seconds += lost

    def ends_step(self, rank: int, step: int, start: float, computed: float) -> None:
        """Write down a step."""
        self.record.steps.append(Step(rank, step, start, self.times.now, computed))

    def _die(self, death: Death) -> None:
        if death.rank in self.lost or death.rank in self.ended:
            return
        reason = f"died at {self.times.now:g} s"
        self.lose(Loss(death.rank, self.times.now, reason, death.silent))
        self.times.kill(death.rank)

    def _pause(self, rank: int, seconds: float) -> None:
        self.times.paused[rank] = max(self.times.paused.get(rank, 0.0), self.times.now) + seconds
        self._stolen[rank] += seconds

    def _close_groups(self, loss: Loss) -> None:
        for group in self.groups:
            if group.fault is None:
                group.fault = PeerLostError(f"rank {loss.rank} is lost ({loss.reason})")
            self._wake_all(group)

    def _tell_all(self) -> None:
        self.heard = self.shared
        self._notify_mailboxes()
        for group in self.groups:
            self._wake_all(group)

    def _wake_all(self, group: Connections) -> None:
        """Let all look again that wait for something of which it is not known when it ends."""
        for actor, pending in list(group.waiting.items()):
            if pending.missing:
                self.times.wake(actor)

    def _notify_mailboxes(self) -> None:
        for box in self.mailboxes.values():
            box.changed.notify_all()

    # -- waits for operations ------------------------------------------------------------------------------------

    def wait(self, group: Connections, pending: Pending, where: Callable[[], str], timeout: float) -> None:
        """Wait until an operation is over.

        Args:
            group: its connections.
            pending: the operation.
            where: returns the rank, its step and the call, for errors.
            timeout: in virtual seconds.

        Raises:
            PeerLostError: a rank is gone.
            CommTimeoutError: a rank did not come in time.
        """
        times, start = self.times, self.times.now
        while pending.missing or pending.done_at > times.now:
            if pending.missing:
                self.check_heard()
            if pending.missing and group.fault is not None:
                raise type(group.fault)(f"{where()}: {group.fault}")
            actor = times.current
            assert actor is not None, "only workers wait"
            until = start + timeout
            if not pending.missing:
                if pending.done_at <= until:
                    until = inf  # the event comes before, so no deadline is needed
                wait = actor.waits + 1
                times.at(pending.done_at, lambda actor=actor, wait=wait: times.wake(actor, wait))
            pending.actor = actor
            group.waiting[actor] = pending
            try:
                in_time = times.wait(lambda: self._stuck(where(), pending), until=until)
            finally:
                pending.actor = None
                del group.waiting[actor]
            if not in_time and (pending.missing or pending.done_at > times.now):
                raise self._timed_out(group, pending, where(), timeout)
        self.record.wait(pending.rank, pending.cause, start, pending.came, times.now)

    def _timed_out(self, group: Connections, pending: Pending, where: str, timeout: float) -> CommTimeoutError:
        """Close the connections, so that all ranks name the same ones."""
        silent = [rank for rank in self.lost if self.lost[rank].silent]
        missing = sorted(silent) or sorted(pending.late())
        be = "is" if len(missing) == 1 else "are"
        names = f"; {', '.join(f'rank {rank}' for rank in missing)} {be} not answering" if missing else ""
        fault = CommTimeoutError(f"no answer within {timeout:g} s{names}")
        group.fault = group.fault or fault
        self._wake_all(group)
        return CommTimeoutError(f"{where}: {fault}")

    def _stuck(self, where: str, pending: Pending) -> str:
        late = sorted(pending.late())
        names = ", ".join(map(str, late[:8])) + ", ..." * (len(late) > 8)
        ended = " (which has ended)" if late and all(rank in self.ended for rank in late) else ""
        return f"{where}, waits for rank{'s' * (len(late) > 1)} {names}{ended}"
