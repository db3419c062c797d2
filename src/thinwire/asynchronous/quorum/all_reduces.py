# SPDX-License-Identifier: Apache-2.0
"""Average members' gradients by an all-reduce of all ranks, in a separate thread."""

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
    """One rank's side of all-reduces among all ranks, in the order of the coordinator's STARTs.

    A thread takes part in each, while its rank may compute: otherwise every all-reduce would wait for the slowest rank,
    which a quorum must avoid.

    Attributes:
        changed: the mailbox's lock, which guards all attributes.
        queue: START messages of all-reduces that have not started on this rank.
        latest: the number of the last all-reduce that was started.
        ended: the number of the last all-reduce that has ended on this rank.
        unmetered: bytes sent by each all-reduce that the meter has not counted yet.
        broken: whether the connections have failed, so that no all-reduce will end any more.
    """

    changed: Condition
    queue: deque[ControlMessage] = field(default_factory=deque[ControlMessage])
    latest: int = 0
    ended: int = 0
    unmetered: list[float] = field(default_factory=list[float])
    broken: bool = False

    def enqueue(self, start: ControlMessage) -> None:
        """Take part in one more all-reduce, after the queued ones."""
        self.queue.append(start)
        self.latest = start.all_reduce
        self.changed.notify_all()

    def is_pending(self, number: int) -> bool:
        """Return True if an all-reduce was started and has not ended on this rank."""
        return self.ended < number <= self.latest and not self.broken

    def flush_meter(self, meter: Meter) -> None:
        """Count the sent bytes; called by the thread that owns the meter, which is not thread-safe."""
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
        """Start the thread; it keeps only this object and the arguments alive.

        Args:
            comm: a comm that is not used elsewhere.
            contribute: returns this rank's contribution, a vector on the CPU that the thread then owns.
            finish: called with each START message and the resulting mean, on the CPU.
            wait: waits for the queue to fill, under the lock; the thread ends if it returns False.
            runtime: starts the thread.
        """

        def run() -> None:
            while (start := self._next(wait)) is not None:
                comm.step, before = start.step, comm.meter.payload_bytes
                try:
                    own, size = contribute(start), len(start.members)
                    # In fp16 a sum can overflow although the mean is finite.
                    half = own.dtype == torch.float16
                    mean = comm.all_reduce_(own.div_(size) if half else own).wait().div_(1 if half else size)
                except (CommError, RuntimeError):
                    break
                with self.changed:
                    self.unmetered.append(comm.meter.payload_bytes - before)
                with suppress(CommError, ReferenceError):
                    finish(start, mean)
                # After `finish`: the training thread may wait for the end of this all-reduce and then read the mean.
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
    """Make a wait for all-reduces that returns False if none is possible any more.

    An all-reduce needs all ranks: none is possible after a rank is lost or has closed its mailbox, or after the calling
    thread (the training thread) has ended. The wait keeps no replica alive.
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
            # `wait_until` raises if an awaited rank is gone. The second check reports no missing rank, which ends it.
            box.wait_until(lambda: [] if queue else next(first_look, []), "an all-reduce")
        except (CommError, ConfigError):
            return False
        return True

    return wait
