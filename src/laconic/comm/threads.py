"""N workers as N threads of one process: the same strategies, without processes or sockets.

Sums are added in the order of ranks, so a run's values depend on nothing but its inputs.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from laconic.comm.base import Comm, Work
from laconic.errors import DeadlineError, MismatchError, PeerLostError

T = TypeVar("T")
U = TypeVar("U")


@dataclass
class Meeting:
    """One collective call: what each rank brought, and what they made of it together."""

    label: str
    first: int
    brought: dict[int, Any] = field(default_factory=dict[int, Any])
    result: Any = None


class Hub:
    """The room in which the threads of one run meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.meetings: dict[int, Meeting] = {}
        self.letters: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self.lost: tuple[int, BaseException] | None = None

    def lose(self, rank: int, reason: BaseException) -> None:
        """Tell everyone that `rank` has failed."""
        with self.changed:
            self.lost = self.lost or (rank, reason)
            self.changed.notify_all()

    def until(self, ready: Callable[[], bool], comm: ThreadComm, waiting_for: str) -> None:
        """Sleep until `ready()`; the condition's lock is held by the caller."""
        end = time.monotonic() + comm.deadline_seconds
        while not ready():
            if self.lost is not None:
                rank, reason = self.lost
                raise PeerLostError(f"rank {rank} was lost at step {comm.step} ({type(reason).__name__}: {reason})")
            if not self.changed.wait(end - time.monotonic()) and not ready():
                raise DeadlineError(
                    f"rank {comm.rank} waited {comm.deadline_seconds:g} s for {waiting_for} at step {comm.step}"
                )


class ThreadComm(Comm):
    """One thread's view of its `Hub`."""

    def __init__(self, hub: Hub, rank: int, *, deadline_seconds: float = 60.0) -> None:
        super().__init__(rank, hub.size, deadline_seconds=deadline_seconds)
        self._hub = hub
        self._calls = 0

    def _sum_(self, x: Tensor) -> Work[Tensor]:
        total = self._meet(f"sum of {describe(x)}", x, lambda xs: reduce(torch.add, xs))
        return total.then(x.copy_)

    def _broadcast_(self, x: Tensor, source: int) -> Work[Tensor]:
        chosen = self._meet(f"broadcast of {describe(x)} from {source}", x, lambda xs: xs[source].clone())
        return chosen.then(x.copy_)

    def _gather(self, x: Tensor) -> Work[list[Tensor]]:
        rows = self._meet(f"gather of {describe(x)}", x, lambda xs: [each.clone() for each in xs])
        return rows.then(lambda everyone: [row.clone() for row in everyone])

    def _scatter(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]:
        rows = self._meet("scatter", list(xs), lambda rows: [[x.clone() for x in row] for row in rows])
        return rows.then(lambda everyone: self._pick(everyone, sizes))

    def _pick(self, rows: list[list[Tensor]], sizes: Sequence[int]) -> list[Tensor]:
        mine = [row[self.rank] for row in rows]
        for peer, (x, size) in enumerate(zip(mine, sizes, strict=True)):
            if x.numel() != size:
                raise MismatchError(f"rank {peer} scatters {describe(x)} to rank {self.rank}, which expects {size}")
        return mine

    def _exchange(self, x: Tensor, to: Sequence[int], frm: Sequence[int]) -> Work[list[Tensor]]:
        with self._hub.changed:
            for peer in to:
                self._hub.letters[self.rank, peer].append(x.clone())
            self._hub.changed.notify_all()
        return Work(lambda: [self._letter(peer, x) for peer in frm])

    def _letter(self, peer: int, like: Tensor) -> Tensor:
        with self._hub.changed:
            box = self._hub.letters[peer, self.rank]
            self._hub.until(lambda: bool(box), self, f"a message from rank {peer}")
            letter = box.popleft()
        if letter.shape != like.shape or letter.dtype != like.dtype:
            raise MismatchError(f"rank {peer} sent {describe(letter)}, rank {self.rank} expects {describe(like)}")
        return letter

    def _meet(self, label: str, brought: T, together: Callable[[list[T]], U]) -> Work[U]:
        """Bring something to this rank's next round; the last to arrive computes the result for all."""
        hub, call = self._hub, self._calls
        self._calls += 1
        with hub.changed:
            meeting = hub.meetings.setdefault(call, Meeting(label, self.rank))
            if meeting.label != label:
                raise MismatchError(
                    f"call {call} is a {meeting.label} on rank {meeting.first} and a {label} on rank {self.rank}"
                )
            meeting.brought[self.rank] = brought
            if len(meeting.brought) == hub.size:
                meeting.result = together([meeting.brought[rank] for rank in range(hub.size)])
                del hub.meetings[call]
                hub.changed.notify_all()

        def finish() -> U:
            with hub.changed:
                hub.until(lambda: len(meeting.brought) == hub.size, self, f"everyone to join the {label}")
            return meeting.result

        return Work(finish)


def describe(x: Tensor) -> str:
    """The shape and dtype of a vector, in words."""
    return f"{x.numel()} x {str(x.dtype).removeprefix('torch.')}"


def alone() -> Comm:
    """A world of one worker."""
    return ThreadComm(Hub(1), 0)


def run_threads(size: int, work: Callable[[Comm], T], *, deadline_seconds: float = 60.0) -> list[T]:
    """Run `work(comm)` on `size` threads and return the results in the order of ranks.

    Raises:
        Exception: the first failure of any thread; the others are told and end too.
    """
    hub = Hub(size)

    def body(rank: int) -> T:
        try:
            return work(ThreadComm(hub, rank, deadline_seconds=deadline_seconds))
        except BaseException as error:
            hub.lose(rank, error)
            raise

    with ThreadPoolExecutor(size, thread_name_prefix="laconic-rank") as pool:
        futures = [pool.submit(body, rank) for rank in range(size)]
    if hub.lost is not None:
        raise hub.lost[1]
    return [future.result() for future in futures]
