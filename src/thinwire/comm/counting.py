"""A wire that carries nothing and counts everything."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.comm.mailbox.base import Letter, Mailbox
from thinwire.comm.work import Work, arrived


class CountingComm(Comm):
    """Any number of ranks, seen by one of them, without a message being sent.

    On meta tensors a strategy runs at any size in microseconds, and the meter holds the exact bytes of the run.
    Values of ordinary tensors are left as they are: every peer is taken to hold the same.
    """

    def _sum_(self, x: Tensor) -> Work[Tensor]:
        return arrived(x.mul_(self.size))

    def _min_(self, x: Tensor) -> Work[Tensor]:
        return arrived(x)

    def _broadcast_(self, x: Tensor, source: int) -> Work[Tensor]:
        return arrived(x)

    def _gather(self, x: Tensor) -> Work[list[Tensor]]:
        return arrived([x.clone() for _ in range(self.size)])

    def _scatter(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]:
        return arrived([torch.zeros(n, dtype=xs[0].dtype, device=xs[0].device) for n in sizes])

    def _exchange(self, x: Tensor, to: Sequence[int], frm: Sequence[int]) -> Work[list[Tensor]]:
        return arrived([x.clone() for _ in frm])

    def _open_mailbox(self, epoch: int, like: Tensor, capacity: int) -> Mailbox:
        return CountingMailbox(self, like, capacity)


class CountingMailbox(Mailbox):
    """Letters that are counted, and dropped.

    Whatever is expected is here at once. Where letters are answered, each `retry` brings one on the topic that was
    announced first, from those who may write on it in turn.
    """

    def __init__(self, comm: Comm, like: Tensor, capacity: int) -> None:
        super().__init__(comm, like, capacity, threading.Condition())
        self._wire = comm
        self._turn = 0

    def expect(self, frm: int, like: Tensor) -> Work[Letter]:
        """What the other rank is taken to hold."""
        step = self._comm.step

        def take() -> Letter:
            return Letter(frm, step, 0, self._wire.exchange(like, [], [frm]).wait()[0])

        return Work(take, lambda: True)

    def retry(self) -> None:
        """Be written to."""
        for topic, desk in list(self._desks.items())[:1]:
            frm = desk.frm[self._turn % len(desk.frm)]
            self._handle(Letter(frm, self._comm.step, topic, self._wire.exchange(desk.like, [], [frm]).wait()[0]))
        self._turn += 1
        super().retry()

    def close(self) -> None:
        """There is nothing to let go of."""
        self._closed = True

    def _carry(self, to: int, letter: Letter, number: int) -> None:
        self._wire.exchange(letter.content, [to], [])
        self._edges[to].room_made += 1

    def _count(self, nbytes: int) -> None:
        """The exchange has counted it."""

    def _make_room(self, frm: int, taken: int) -> None:
        """Nobody waits for room."""
