# SPDX-License-Identifier: Apache-2.0
"""A comm whose ranks change from view to view, under one object that strategies and users keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from torch import Tensor

from thinwire.core.comm.base import Comm
from thinwire.core.comm.work import Work
from thinwire.errors import ConfigError, ThinwireError


class Connector(Protocol):
    """Opens the connections of a view."""

    def connect(self, name: int | str, rank: int, size: int, timeout: float, lost: Callable[[], bool]) -> Comm:
        """The comm of this worker among the members of a view, or some of them.

        Args:
            name: the number of the view; or a text, for some of its members.
            rank: this worker's.
            size: the number of workers that connect.
            timeout: for all to connect, and of later waits, in seconds.
            lost: whether a member is known to be gone or to have given up, so that there is nothing to wait for.

        Raises:
            CommTimeoutError: this worker does not reach all members.
            PeerLostError: a member is gone, or has given the view up, as one does that does not reach another.
        """
        ...

    def pair(self, name: str, rank: int, timeout: float, lost: Callable[[], bool]) -> Comm:
        """A comm of two workers, beside those of views; `name` is its own, and one of the two is rank 0.

        Raises:
            CommError: the other did not connect.
        """
        ...

    def disconnect(self, comm: Comm) -> None:
        """Close a comm's connections, so that the waits of all others fail at once."""
        ...


class ElasticComm(Comm):
    """The comm of the current view; `rank` and `size` change with the view, and the meter goes on.

    Args:
        timeout: how long one wait may last, in seconds.
    """

    def __init__(self, *, timeout: float = 60.0) -> None:
        super().__init__(0, 1, timeout=timeout)
        self._comm: Comm | None = None

    def use(self, comm: Comm) -> None:
        """Go on over another comm."""
        self.rank, self.size, self._comm = comm.rank, comm.size, comm
        self.check_device, self.runtime = comm.check_device, comm.runtime

    @property
    def comm(self) -> Comm:
        """The comm of the current view, as far along as this one."""
        assert self._comm is not None, "use() comes first"
        self._comm.step, self._comm.timeout = self.step, self.timeout
        self._comm.in_step, self._comm.calling = self.in_step, self.calling
        return self._comm

    def confirm(self, row: Tensor) -> Work[list[Tensor]]:
        """Every rank's few numbers at the end of a round, which count as the bytes of a check."""
        self.meter.check_bytes += (self.size - 1) * row.numel() * row.element_size()
        return self.comm._all_gather(row)

    def raise_on_all(self, error: ThinwireError) -> NoReturn:
        """Raise an error that this rank has found, here and in the calls of all others."""
        self.comm.raise_on_all(error)

    def failure(self, call: str, problem: str, *, late: bool, closed: bool = False) -> ThinwireError:
        """As the current comm."""
        return self.comm.failure(call, problem, late=late, closed=closed)

    def has_ended(self, rank: int) -> bool:
        """As the current comm."""
        return self.comm.has_ended(rank)

    def has_failed(self) -> bool:
        """As the current comm."""
        return self.comm.has_failed()

    def duplicate(self) -> Comm:
        """Refused: the second comm would not follow the views."""
        raise ConfigError("elastic=True: no thread beside the one that trains may have a comm of its own")

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
