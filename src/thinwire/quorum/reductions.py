"""The mean of members' gradients: by messages among the members, or by an all-reduce in a thread of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.comm.work import Meter
from thinwire.errors import CommError, ConfigError
from thinwire.quorum.messages import ControlMessage, GradientChunk
from thinwire.replica.replica import Replica

# -- by messages -----------------------------------------------------------------------------------------------------


class Partition(NamedTuple):
    """A vector in parts of one length, of which the last ones may be shorter or empty.

    Attributes:
        numel: elements of the vector.
        parts: how many parts.
        dtype: of the elements.
    """

    numel: int
    parts: int
    dtype: torch.dtype

    @property
    def length(self) -> int:
        """Elements of a full part."""
        return -(-self.numel // self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of a full part."""
        return self.length * self.dtype.itemsize

    def slices(self) -> list[slice]:
        """Where each part lies in the vector."""
        ends = [min(self.numel, part * self.length) for part in range(self.parts + 1)]
        return [slice(start, stop) for start, stop in pairwise(ends)]

    def read(self, content: Tensor, part: int) -> Tensor:
        """A copy of a part's elements, from the bytes of a message."""
        where = self.slices()[part]
        return content[: (where.stop - where.start) * self.dtype.itemsize].clone().view(self.dtype)


@dataclass
class MessageReduction:
    """One attempt to average a gradient among members: a reduce-scatter and an all-gather by messages.

    The i-th member averages the i-th part for all; members beyond the number of parts average none. Gradients are added
    in the order of ranks, so that the same members have a mean of the same bits in every attempt.

    Attributes:
        partition: of the gradient.
        rank: this member.
        members: in the order of ranks, at least as many as parts.
        step: the training step.
        attempt: the attempt at that step.
        received: every member's gradient of the own part, by rank.
        means: the mean of each part that is known here, by part.
        sent: whether the own gradient was sent.
        acknowledged: whether ACK was sent, because all of the mean is here.
    """

    partition: Partition
    rank: int
    members: tuple[int, ...]
    step: int = 0
    attempt: int = 0
    received: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    means: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    sent: bool = False
    acknowledged: bool = False

    @property
    def own(self) -> int:
        """The part that this member averages; `partition.parts` or more where it averages none."""
        return self.members.index(self.rank)

    @property
    def can_average(self) -> bool:
        """Whether every member's gradient of the own part is here, and not averaged yet."""
        own = self.own
        return own < self.partition.parts and own not in self.means and len(self.received) == len(self.members)

    @property
    def done(self) -> bool:
        """Whether the mean of every part is here."""
        return len(self.means) == self.partition.parts

    @property
    def has_work(self) -> bool:
        """Whether this member has something to compute or to send."""
        return not self.sent or self.can_average or (self.done and not self.acknowledged)

    def receive(self, src: int, chunk: GradientChunk) -> None:
        """Take in a part from another member."""
        content = self.partition.read(chunk.content, chunk.part)
        if chunk.reduced:
            self.means[chunk.part] = content
        else:
            self.received[src] = content

    def advance(self, gradient: Tensor) -> list[tuple[int, GradientChunk]]:
        """What is to be sent now, each with its destination; averages the own part once it can be."""
        outbox: list[tuple[int, GradientChunk]] = []
        own, slices, size = self.own, self.partition.slices(), len(self.members)
        if not self.sent:
            self.sent = True
            if own < self.partition.parts:
                self.received[self.rank] = gradient[slices[own]].cpu()
            # Each member begins with the one after itself, so that not all of them write to the same one at once.
            for part in ((own + offset) % size for offset in range(1, size)):
                if part < self.partition.parts:
                    content = gradient[slices[part]].cpu()
                    outbox.append((self.members[part], GradientChunk(self.step, self.attempt, part, 0, content)))
        if self.can_average:
            mean = reduce(torch.add, [self.received[rank] for rank in self.members]) / size
            self.means[own] = mean
            chunk = GradientChunk(self.step, self.attempt, own, 1, mean)
            outbox += [(rank, chunk) for rank in self.members if rank != self.rank]
        return outbox

    def write_(self, vector: Tensor) -> None:
        """Write the mean over a vector."""
        for part, where in enumerate(self.partition.slices()):
            vector[where].copy_(self.means[part])


# -- by an all-reduce ------------------------------------------------------------------------------------------------

Wait = Callable[[Collection[object]], bool]


@dataclass
class AllReduceThread:
    """One rank's part in all-reduces among all ranks, in the order in which the coordinator starts them.

    A thread takes part in each, whatever its rank computes meanwhile: otherwise every all-reduce would wait for the
    slowest rank, which is what a quorum is to avoid.

    Attributes:
        changed: the mailbox's lock, which guards everything here.
        queue: START messages of all-reduces that have not begun here.
        latest: the number of the last one that was started.
        ended: the number of the last one that has ended here.
        unmetered: bytes sent for each of those that the meter has not counted yet.
        broken: whether the connections have failed, so that none will end any more.
    """

    changed: threading.Condition
    queue: deque[ControlMessage] = field(default_factory=deque[ControlMessage])
    latest: int = 0
    ended: int = 0
    unmetered: list[float] = field(default_factory=list[float])
    broken: bool = False

    def enqueue(self, start: ControlMessage) -> None:
        """Take part in one more, after those before it."""
        self.queue.append(start)
        self.latest = start.all_reduce
        self.changed.notify_all()

    def is_pending(self, number: int) -> bool:
        """Whether an all-reduce was started and has still to end here."""
        return self.ended < number <= self.latest and not self.broken

    def flush_meter(self, meter: Meter) -> None:
        """Count what was sent; called by the thread that owns the meter, which is not safe to share."""
        for nbytes in self.unmetered:
            meter.sent("all_reduce", nbytes)
        self.unmetered.clear()

    def run_in_background(
        self,
        comm: Comm,
        *,
        contribute: Callable[[ControlMessage], Tensor],
        finish: Callable[[ControlMessage, Tensor], None],
        wait: Wait,
    ) -> None:
        """Start the thread; it keeps nothing alive but this object and the arguments.

        Args:
            comm: connections that nobody else uses.
            contribute: makes what this rank adds, a vector on the CPU that belongs to the thread from then on.
            finish: called with each START message and the mean that it led to, on the CPU.
            wait: waits a while for the queue to fill, under the lock; the thread ends where it returns False.
        """

        def run() -> None:
            while (start := self._next(wait)) is not None:
                comm.step, before = start.step, comm.meter.payload_bytes
                try:
                    mean = comm.all_reduce_(contribute(start)).wait().div_(len(start.members))
                except (CommError, RuntimeError):
                    break
                with self.changed:
                    self.unmetered.append(comm.meter.payload_bytes - before)
                with suppress(CommError, ReferenceError):
                    finish(start, mean)
                # After `finish`: the training thread may wait for the end of this all-reduce, and reads the mean then.
                with self.changed:
                    self.ended = start.all_reduce
                    self.changed.notify_all()
            with self.changed:
                self.broken = True
                self.changed.notify_all()

        threading.Thread(target=run, daemon=True, name="thinwire-all-reduce").start()

    def _next(self, wait: Wait) -> ControlMessage | None:
        with self.changed:
            while not self.queue:
                if not wait(self.queue):
                    return None
            return self.queue.popleft()


def wait_while_possible(r: Replica) -> Wait:
    """A wait for an all-reduce that returns False once none can be started any more; it keeps no replica alive.

    An all-reduce needs all ranks: none is possible once a rank is lost or has closed its mailbox, nor once the thread
    that called this function, the training thread, has ended.
    """
    training_thread = threading.current_thread()
    owner, others = ref(r), [rank for rank in range(r.comm.size) if rank != r.comm.rank]

    def wait(queue: Collection[object]) -> bool:
        alive, first_look = owner(), iter([others])
        if alive is None or not training_thread.is_alive():
            return False
        try:
            box = alive.comm.mailbox(alive)
            del alive  # a wait must not keep the replica alive
            # `until` raises if a rank it waits for is gone. The second look reports nobody missing, and so ends it.
            box.wait_until(lambda: [] if queue else next(first_look, []), "an all-reduce")
        except (CommError, ConfigError):
            return False
        return True

    return wait
