# SPDX-License-Identifier: Apache-2.0
"""The mailbox of a simulated worker: messages take time, may be late, and overtake each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from thinwire.core.comm.mailbox.base import Loss, Mailbox, Message
from thinwire.core.comm.mailbox.frame import HEADER_BYTES
from thinwire.errors import PeerLostError, ThinwireError
from thinwire.planning.simulate.schedule import VirtualCondition
from thinwire.planning.simulate.world import RECONNECT_SECONDS, World

if TYPE_CHECKING:
    from thinwire.core.comm.base import Comm


class SimulatedMailbox(Mailbox):
    """A mailbox between simulated workers: handlers run when a message arrives, whatever its worker computes.

    Args:
        comm: the worker's.
        world: shared by the workers.
        epoch: the number of the mailbox.
        like: a vector as long as the longest message.
        capacity: unconsumed messages allowed on one edge.
    """

    def __init__(self, comm: Comm, world: World, epoch: int, like: Tensor, capacity: int) -> None:
        self._lock = VirtualCondition(world.times)
        super().__init__(comm, like, capacity, self._lock)
        self._world, self._epoch = world, epoch
        self._last_arrival: dict[int, float] = {}
        self._closed_peers: set[int] = set()
        world.mailboxes[epoch, comm.rank] = self

    def wait_until(
        self,
        missing: Callable[[], Sequence[int]],
        waiting_for: str,
        *,
        meanwhile: Callable[[], float | None] | None = None,
    ) -> None:
        """As any mailbox; a wait that only another worker can end does not poll, and is known to be one."""
        actor, start, ranks = self._world.times.current, self.clock(), list[int]()
        if actor is None:  # an event, which must not wait: it fails if anything is missing
            super().wait_until(missing, waiting_for, meanwhile=meanwhile)
            return

        def seen() -> Sequence[int]:
            found = missing()
            ranks[:] = found or ranks
            return found

        named = waiting_for
        actor.reason = lambda: f"rank {self._rank}, step {self._comm.step}, waits for {_with_ranks(named, ranks)}"
        actor.until = None if meanwhile is not None else start + self._comm.timeout
        try:
            super().wait_until(seen, waiting_for, meanwhile=meanwhile)
        finally:
            actor.reason = actor.until = None
        if self.clock() > start and ranks:
            self._world.record.wait(self._rank, ranks[0], start, self.clock(), self.clock())

    def close(self) -> None:
        """Tell the other ranks, behind the messages under way."""
        with self.changed:
            if self._closed:
                return
            self._closed = True
            self.changed.notify_all()
        for dst in range(self._size):
            if dst != self._rank and (peer := self._peer(dst)) is not None:
                self._arrive(dst, 0.0, lambda peer=peer: peer._on_close(self._rank), last=True)

    def _transmit(self, dst: int, message: Message, number: int) -> None:
        world = self._world
        content = message.content if message.content.is_meta else message.content.clone()
        nbytes = content.nbytes + HEADER_BYTES
        arrived = world.wires.send(world.times.now, self._rank, dst, nbytes)[1]
        if delay := world.draws.message_delay(self._rank):
            world.record.late_messages += 1
        sent = message._replace(content=content)

        def deliver() -> None:
            peer = self._peer(dst)
            if peer is not None and not peer._closed:
                peer._deliver(sent, number)

        self._arrive(dst, arrived + delay - world.times.now, deliver)

    def _acknowledge(self, src: int, consumed: int) -> None:
        world = self._world
        arrived = world.wires.send(world.times.now, self._rank, src, HEADER_BYTES)[1]

        def deliver() -> None:
            if (peer := self._peer(src)) is not None:
                peer._on_acknowledgement(self._rank, consumed)

        self._arrive(src, arrived - world.times.now, deliver)

    def has_ended(self, rank: int) -> bool:
        """Return True if a rank has closed its mailbox: machines of others do not tell which processes have ended."""
        return rank in self._closed_peers

    def _check_usable(self) -> None:
        super()._check_usable()
        self._world.check_heard()

    def _loss_of(self, rank: int) -> Loss | None:
        loss = self._world.lost.get(rank)
        if loss is not None and not loss.silent and self.clock() >= loss.at + RECONNECT_SECONDS:
            return Loss(f"rank {rank} is lost ({loss.reason})")
        if rank in self._closed_peers:
            return Loss(f"rank {rank} has closed its mailbox. End training on all ranks together", closed=True)
        return None

    def _lost_error(self, problem: str, *, closed: bool = False) -> ThinwireError:
        return PeerLostError(f"rank {self._rank}, step {self._comm.step}: {problem}")

    def _on_close(self, rank: int) -> None:
        self._closed_peers.add(rank)
        self.changed.notify_all()

    def _peer(self, rank: int) -> SimulatedMailbox | None:
        found = self._world.mailboxes.get((self._epoch, rank))
        return found if isinstance(found, SimulatedMailbox) else None

    def _arrive(self, dst: int, seconds: float, call: Callable[[], None], *, last: bool = False) -> None:
        """Let something happen at another worker, behind what was sent before unless messages may overtake."""
        world = self._world
        at, before = world.times.now + seconds, self._last_arrival.get(dst, 0.0)
        if last or not world.network.overtaking:
            at = max(at, before)
        self._last_arrival[dst] = max(at, before)

        def arrive() -> None:
            if dst in world.lost:
                world.record.lost_messages += 1
                return
            until = world.times.paused.get(dst, 0.0)
            if until > world.times.now:
                world.times.at(until, arrive)
                return
            peer = self._peer(dst)
            if peer is None:
                call()
            else:
                peer._lock.when_free(call)

        world.times.at(at, arrive)


def _with_ranks(words: str, ranks: Sequence[int]) -> str:
    named = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return words.replace("{ranks}", named)
