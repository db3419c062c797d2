"""A wire that carries nothing and counts everything."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.comm.mailbox.base import Mailbox, Message
from thinwire.comm.work import Work, completed


class CountingComm(Comm):
    """Any number of ranks, seen by one of them, without a message being sent.

    On meta tensors a strategy runs at any size in microseconds, and the meter holds the exact bytes of the run.
    Values of ordinary tensors are left as they are: every peer is taken to hold the same.
    """

    def _all_reduce_(self, x: Tensor) -> Work[Tensor]:
        return completed(x.mul_(self.size))

    def _all_reduce_min_(self, x: Tensor) -> Work[Tensor]:
        return completed(x)

    def _broadcast_(self, x: Tensor, src: int) -> Work[Tensor]:
        return completed(x)

    def _all_gather(self, x: Tensor) -> Work[list[Tensor]]:
        return completed([x.clone() for _ in range(self.size)])

    def _all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]:
        return completed([torch.zeros(n, dtype=xs[0].dtype, device=xs[0].device) for n in sizes])

    def _send_recv(self, x: Tensor, dst: Sequence[int], src: Sequence[int]) -> Work[list[Tensor]]:
        return completed([x.clone() for _ in src])

    def _open_mailbox(self, epoch: int, like: Tensor, capacity: int) -> Mailbox:
        return CountingMailbox(self, like, capacity)


class CountingMailbox(Mailbox):
    """Messages that are counted, and dropped.

    Whatever is expected is here at once. Where messages are answered, each `retry` brings one on the topic that was
    announced first, from those who may write on it in turn.
    """

    def __init__(self, comm: Comm, like: Tensor, capacity: int) -> None:
        super().__init__(comm, like, capacity, threading.Condition())
        self._wire = comm
        self._turn = 0

    def expect(self, src: int, like: Tensor) -> Work[Message]:
        """What the other rank is taken to hold."""
        step = self._comm.step

        def take() -> Message:
            return Message(src, step, 0, self._wire.send_recv(like, [], [src]).wait()[0])

        return Work(take, lambda: True)

    def retry(self) -> None:
        """Be written to."""
        for topic, entry in list(self._handlers.items())[:1]:
            src = entry.src[self._turn % len(entry.src)]
            self._handle(Message(src, self._comm.step, topic, self._wire.send_recv(entry.like, [], [src]).wait()[0]))
        self._turn += 1
        super().retry()

    def close(self) -> None:
        """There is nothing to let go of."""
        self._closed = True

    def _carry(self, dst: int, message: Message, number: int) -> None:
        self._wire.send_recv(message.content, [dst], [])
        self._edges[dst].room_made += 1

    def _count(self, nbytes: int) -> None:
        """The exchange has counted it."""

    def _make_room(self, src: int, taken: int) -> None:
        """Nobody waits for room."""
