# SPDX-License-Identifier: Apache-2.0
"""The mean of members' gradients by an all-reduce of all ranks, in a thread of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from weakref import ref

import torch
from torch import Tensor

from thinwire.asynchronous.quorum.messages import ControlMessage
from thinwire.core.comm.base import Comm
from thinwire.core.comm.runtime import Condition, Runtime
from thinwire.core.comm.work import Meter
from thinwire.core.replica.replica import Replica
from thinwire.errors import CommError, ConfigError

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

    changed: Condition
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
        runtime: Runtime,
    ) -> None:
        """Start the thread; it keeps nothing alive but this object and the arguments.

        Args:
            comm: connections that nobody else uses.
            contribute: makes what this rank adds, a vector on the CPU that belongs to the thread from then on.
            finish: called with each START message and the mean that it led to, on the CPU.
            wait: waits a while for the queue to fill, under the lock; the thread ends where it returns False.
            runtime: starts the thread.
        """

        def run() -> None:
            while (start := self._next(wait)) is not None:
                comm.step, before = start.step, comm.meter.payload_bytes
                try:
                    own, size = contribute(start), len(start.members)
                    # In fp16 a sum overflows where the mean is finite.
                    half = own.dtype == torch.float16
                    mean = comm.all_reduce_(own.div_(size) if half else own).wait().div_(1 if half else size)
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

        runtime.start_thread(run)

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
