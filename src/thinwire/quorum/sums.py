"""All-reduces beside the computation: a thread takes part in each, whatever its rank is doing."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import ref

from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.comm.work import Meter
from thinwire.errors import CommError, ConfigError
from thinwire.quorum.control_messages import Note
from thinwire.replica.replica import Replica

Look = Callable[[Collection[object]], bool]


class Ended(NamedTuple):
    """An all-reduce that has ended here.

    Attributes:
        note: by which the keeper had announced it.
        mean: over its members, on the CPU.
    """

    note: Note
    mean: Tensor


@dataclass
class Sums:
    """One rank's part in the all-reduces of all, in the order in which the keeper announces them; under one lock.

    Args:
        changed: that lock, which is the mailbox's.
        waiting: all-reduces that were announced and not begun.
        latest: the number of the last that was announced.
        ended: the number of the last that has ended here.
        uncounted: bytes that this rank has sent for each of those that the meter does not know of yet.
        broken: whether the connections have failed, so that none will end any more.
    """

    changed: threading.Condition
    waiting: deque[Note] = field(default_factory=deque[Note])
    latest: int = 0
    ended: int = 0
    uncounted: list[float] = field(default_factory=list[float])
    broken: bool = False

    def announce(self, note: Note) -> None:
        """Take part in one more, after those before it."""
        self.waiting.append(note)
        self.latest = note.sum
        self.changed.notify_all()

    def is_coming(self, number: int) -> bool:
        """Whether an all-reduce that was announced has still to end."""
        return self.ended < number <= self.latest and not self.broken

    def count(self, meter: Meter) -> None:
        """Tell a meter what was sent, in the thread whose meter it is."""
        for nbytes in self.uncounted:
            meter.sent("all_reduce", nbytes)
        self.uncounted.clear()

    def begin(self, comm: Comm, *, bring: Callable[[Note], Tensor], told: Callable[[Ended], None], look: Look) -> None:
        """Start the thread, which keeps nobody alive but this.

        Args:
            comm: of connections that nobody else uses.
            bring: makes what this rank adds, a vector on the CPU that is the thread's from then on.
            told: of every all-reduce that has ended.
            look: waits a while for one to be announced, under the lock; the thread ends where that returns False.
        """
        threading.Thread(
            target=self._run, args=(comm, bring, told, look), daemon=True, name="thinwire-all-reduce"
        ).start()

    def _run(self, comm: Comm, bring: Callable[[Note], Tensor], told: Callable[[Ended], None], look: Look) -> None:
        while (note := self._next(look)) is not None:
            comm.step, before = note.step, comm.meter.payload_bytes
            try:
                mean = comm.all_reduce_(bring(note)).wait().div_(len(note.members))
            except (CommError, RuntimeError):
                break
            with self.changed:
                self.uncounted.append(comm.meter.payload_bytes - before)
            with suppress(CommError, ReferenceError):
                told(Ended(note, mean))
            with self.changed:
                self.ended = note.sum
                self.changed.notify_all()
        with self.changed:
            self.broken = True
            self.changed.notify_all()

    def _next(self, look: Look) -> Note | None:
        with self.changed:
            while not self.waiting:
                if not look(self.waiting):
                    return None
            return self.waiting.popleft()


def looking(r: Replica) -> Look:
    """Waits a while for something to come, without keeping a replica alive; False where nothing can come any more.

    An all-reduce needs all ranks, so that nothing can once any of them is lost or has closed its mailbox. Nor can it
    once the thread is over that trains.
    """
    home = threading.current_thread()
    owner, others = ref(r), [rank for rank in range(r.comm.size) if rank != r.comm.rank]

    def look(waiting: Collection[object]) -> bool:
        alive, looks = owner(), iter([others])
        if alive is None or not home.is_alive():
            return False
        try:
            box = alive.comm.mailbox(alive)
            del alive
            box.until(lambda: [] if waiting else next(looks, []), "an all-reduce")
        except (CommError, ConfigError):
            return False
        return True

    return look
