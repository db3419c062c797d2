# SPDX-License-Identifier: Apache-2.0
"""One comm object whose ranks change with each view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from thinwire.core.comm.base import Comm
from thinwire.core.comm.work import Work
from thinwire.errors import ThinwireError


class Connector(Protocol):
    """Opens the connections of a view."""

    def connect(self, name: int | str, rank: int, size: int, timeout: float, lost: Callable[[], bool]) -> Comm:
        """Connect this worker to the members of a view, or to some of them.

        Args:
            name: the number of the view, or a text for some of its members.
            rank: this worker's rank.
            size: the number of workers that connect.
            timeout: the limit for connecting and for later waits, in seconds.
            lost: returns whether a member is known to be gone or to have abandoned the view.

        Raises:
            CommTimeoutError: this worker does not reach all members.
            PeerLostError: a member is gone or has abandoned the view, for example because it does not reach another.
        """
        ...

    def pair(self, name: str, rank: int, timeout: float, lost: Callable[[], bool]) -> Comm:
        """Connect two workers, in addition to views; `name` is unique, and one of the two is rank 0.

        Raises:
            CommError: the other worker did not connect.
        """
        ...

    def disconnect(self, comm: Comm) -> None:
        """Close a comm's connections, so that the waits of all other workers fail at once."""
        ...


class ElasticComm(Comm):
    """The comm of the current view; `rank` and `size` change with the view, the meter continues.

    Args:
        timeout: how long one wait may last, in seconds.
    """

    def __init__(self, *, timeout: float = 60.0) -> None:
        super().__init__(0, 1, timeout=timeout)
        self._comm: Comm | None = None

    def use(self, comm: Comm) -> None:
        """Continue with another comm."""
        self.rank, self.size, self._comm = comm.rank, comm.size, comm
        self.check_device, self.runtime = comm.check_device, comm.runtime
        self.request_seconds, self.traffic = comm.request_seconds, comm.traffic

    @property
    def comm(self) -> Comm:
        """Return the comm of the current view, with this comm's step."""
        assert self._comm is not None, "use() comes first"
        self._comm.step, self._comm.timeout = self.step, self.timeout
        self._comm.in_step, self._comm.calling = self.in_step, self.calling
        return self._comm

    def confirm(self, *numbers: int) -> list[list[int]]:
        """Return a few numbers of every rank, which all call at the end of a round; counted as check bytes."""
        if self.size == 1:
            return [list(numbers)]
        row = torch.tensor(numbers, dtype=torch.int64, device=self.check_device)
        self.meter.check_bytes += (self.size - 1) * row.nbytes
        return [each.tolist() for each in self.comm._all_gather(row).wait()]

    def _attach_check(self, call: str) -> bool:
        return self.comm._attach_check(call)

    def raise_on_all(self, error: ThinwireError) -> NoReturn:
        """Raise an error on this rank and in the calls of all others."""
        self.comm.raise_on_all(error)

    def failure(self, call: str, problem: str, *, late: bool, closed: bool = False) -> ThinwireError:
        """Make the error of the current comm."""
        return self.comm.failure(call, problem, late=late, closed=closed)

    def has_ended(self, rank: int) -> bool:
        """Return the answer of the current comm."""
        return self.comm.has_ended(rank)

    def has_failed(self) -> bool:
        """Return the answer of the current comm."""
        return self.comm.has_failed()

    def slowest_send(self) -> tuple[float, int, int]:
        """Return the answer of the current comm."""
        return self.comm.slowest_send()

    def awaited(self) -> list[int]:
        """Return the answer of the current comm."""
        return [] if self._comm is None else self._comm.awaited()

    def _all_reduce_(self, x: Tensor) -> Work[Tensor]:
        return self.comm._all_reduce_(x)

    def _all_reduce_min_(self, x: Tensor) -> Work[Tensor]:
        return self.comm._all_reduce_min_(x)

    def _broadcast_(self, x: Tensor, src: int) -> Work[Tensor]:
        return self.comm._broadcast_(x, src)

    def _all_gather(self, x: Tensor) -> Work[list[Tensor]]:
        return self.comm._all_gather(x)

    def _all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]:
        return self.comm._all_to_all(xs, sizes)

    def _send_recv(self, x: Tensor, dst: Sequence[int], src: Sequence[int]) -> Work[list[Tensor]]:
        return self.comm._send_recv(x, dst, src)
