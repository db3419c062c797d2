# SPDX-License-Identifier: Apache-2.0
"""A comm that sends nothing and counts the bytes that a real one would send."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.core.comm.base import CHECK_BYTES, Comm
from thinwire.core.comm.mailbox.base import Mailbox, Message
from thinwire.core.comm.work import Work, completed


class CountingComm(Comm):
    """Simulate one rank of a group of any size: calls return at once and send nothing; `meter` counts the bytes.

    With tensors on the meta device, a strategy runs in microseconds for a model of any size, and `meter` holds the
    exact bytes that this rank would send. On ordinary tensors every other rank is assumed to hold the same values as
    this one.

    Example:
        >>> import torch
        >>> from thinwire import CountingComm
        >>> comm = CountingComm(rank=0, size=8)
        >>> x = torch.empty(1_000_000_000, device="meta")
        >>> _ = comm.all_reduce_(x).wait()
        >>> comm.meter.payload_bytes
        7000000000.0
    """

    checks_first_steps = False

    def check_in_step(self, call: str, *, fingerprint: int = 0) -> Work[list[int]]:
        """Count the bytes; no rank differs. No list of ranks is built, since there may be very many."""
        self.round = ""
        self.meter.check_bytes += (self.size - 1) * CHECK_BYTES
        return completed(list[int]())

    def gather_in_step(self, call: str, number: int) -> Work[list[int]]:
        """Count the bytes; all ranks are assumed to have the same number."""
        self.round = ""
        self.meter.check_bytes += (self.size - 1) * CHECK_BYTES
        return completed([number] * self.size)

    def _check_call(self, operation: str, like: Tensor | None) -> Work[list[int]]:
        return self.check_in_step(operation)

    def _all_reduce_(self, x: Tensor) -> Work[Tensor]:
        return completed(x.mul_(self.size))

    def _all_reduce_min_(self, x: Tensor) -> Work[Tensor]:
        return completed(x)

    def _broadcast_(self, x: Tensor, src: int) -> Work[Tensor]:
        return completed(x)

    def _all_gather(self, x: Tensor) -> Work[list[Tensor]]:
        return completed([x.clone() for _ in range(self.size)])

    def _all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]:
        # Other ranks may send other sizes than this one, so the results are not copies of its own.
        return completed([torch.zeros(n, dtype=xs[0].dtype, device=xs[0].device) for n in sizes])

    def _send_recv(self, x: Tensor, dst: Sequence[int], src: Sequence[int]) -> Work[list[Tensor]]:
        return completed([x.clone() for _ in src])

    def _open_mailbox(self, epoch: int, like: Tensor, capacity: int) -> Mailbox:
        return CountingMailbox(self, like, capacity)


class CountingMailbox(Mailbox):
    """A mailbox that counts messages and drops them.

    Every expected message is ready at once. Each `process_deferred` delivers one message on the lowest topic, taking
    the ranks that may send on it in turn.
    """

    def __init__(self, comm: Comm, like: Tensor, capacity: int) -> None:
        super().__init__(comm, like, capacity, threading.Condition())
        self._counting_comm = comm
        self._delivered = 0

    def expect(self, src: int, like: Tensor) -> Work[Message]:
        """Return a message with the content of `like`, as if the other rank held the same."""
        step = self._comm.step

        def receive() -> Message:
            return Message(src, step, 0, self._counting_comm.send_recv(like, [], [src]).wait()[0])

        return Work(receive, lambda: True)

    def process_deferred(self) -> None:
        """Deliver one message on the lowest topic."""
        for topic, entry in sorted(self._handlers.items())[:1]:
            src = entry.src[self._delivered % len(entry.src)]
            content = self._counting_comm.send_recv(entry.like, [], [src]).wait()[0]
            self._handle(Message(src, self._comm.step, topic, content))
        self._delivered += 1
        super().process_deferred()

    def close(self) -> None:
        """Mark the mailbox as closed; there are no connections."""
        self._closed = True

    def _transmit(self, dst: int, message: Message, number: int) -> None:
        self._counting_comm.send_recv(message.content, [dst], [])
        # The message counts as consumed at once, so a sender never waits for capacity.
        self._edges[dst].acknowledged += 1

    def _count(self, nbytes: int) -> None:
        """Do nothing: `send_recv` has counted the bytes."""

    def _acknowledge(self, src: int, consumed: int) -> None:
        """Do nothing: no sender waits for capacity."""
