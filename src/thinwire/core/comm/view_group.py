# SPDX-License-Identifier: Apache-2.0
"""The comm of one view of an elastic run: Gloo connections of its workers, without a default group."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from thinwire.core.comm.base import Comm
from thinwire.core.comm.group import GroupComm, Handles, copied_back, first_sentence, try_wait
from thinwire.core.comm.roll_call import Failure, within
from thinwire.core.comm.work import Work
from thinwire.core.torch_internals import operation_of
from thinwire.errors import CommTimeoutError, PeerLostError, ThinwireError, error_named

T = TypeVar("T")
_STORE_SECONDS = 2.0
_POLL_SECONDS = 0.01
_LOOK_SECONDS = 0.25
_CLOSE_SECONDS = 0.5
_TELL_SECONDS = 2.0  # the time in which a worker that did not connect reports it
_PAUSE_SECONDS = 1.0  # after a refused connection, so that views do not follow each other too fast
_CLOSED = re.compile("closed by peer|reset by peer|broken pipe", re.IGNORECASE)
_GONE = "a worker of this view is gone, or has abandoned the view"
_COLLECTIVES = (0, 1)  # broadcast and all-reduce, whose waits may be repeated; torch does not name them in Python


class ViewComm(GroupComm):
    """One worker's comm in a view.

    A failed call closes all connections and returns at once; the workers find the lost ones through the store of views.

    Args:
        store: a store for this view only.
        rank: the rank of this worker.
        size: the number of workers in the view.
        timeout: the limit for connecting and for later waits, in seconds.
        lost: returns whether a member is known to be gone or to have abandoned the view.

    Raises:
        CommError: not all workers of the view connected.
    """

    def __init__(self, store: Store, rank: int, size: int, *, timeout: float, lost: Callable[[], bool]) -> None:
        Comm.__init__(self, rank, size, timeout=timeout)
        self._lost = lost
        self._first = store
        self._connect(_with_own_connection(store), range(size), {"cpu"})

    def _connected(self, connect: Callable[[], T]) -> T:
        connected, end = self.runtime.start(connect), time.monotonic() + self.timeout
        while not connected.done():
            if time.monotonic() > end:
                raise TimeoutError
            if self._lost():
                raise RuntimeError(_GONE)
            time.sleep(_POLL_SECONDS)
        return connected.result()

    def _gather_rows(self, row: bytes) -> list[bytes]:
        # A worker that gets here reaches all others, and may be waiting for two that do not reach each other. They
        # started to wait earlier, so they have abandoned the view or soon will.
        try:
            return super()._gather_rows(row)
        except CommTimeoutError as error:
            problem = str(error)
        # Outside the handler: a traceback would keep the connections open.
        if not self._told_within(_TELL_SECONDS):
            raise CommTimeoutError(problem)
        self._fault = PeerLostError(problem)
        raise self._fault

    def _told_within(self, seconds: float) -> bool:
        """Return True if another worker abandons this view within `seconds`."""
        end = time.monotonic() + seconds
        while not (told := self._lost()) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        return told

    # Messages are received into separate memory, and copied to the caller's after a successful wait. An abandoned call
    # continues, and may end when a frozen worker wakes up. It would overwrite parameters or gradients that have been
    # restored and trained on. It also sends from that memory, whose content does not change. For tensors of a GPU that
    # memory is the host's, so an abandoned call holds no memory of the GPU.

    def _all_reduce_(self, x: Tensor) -> Work[Tensor]:
        return super()._all_reduce_(self._copied(x)).then(lambda found: copied_back(x, found))

    def _all_reduce_min_(self, x: Tensor) -> Work[Tensor]:
        return super()._all_reduce_min_(self._copied(x)).then(lambda found: copied_back(x, found))

    def _broadcast_(self, x: Tensor, src: int) -> Work[Tensor]:
        return super()._broadcast_(self._copied(x), src).then(lambda found: copied_back(x, found))

    def _copied(self, x: Tensor) -> Tensor:
        """Return a contiguous copy in host memory."""
        return x.clone(memory_format=torch.contiguous_format) if x.device.type == "cpu" else self._on_host(x)

    def _through_host(self, x: Tensor) -> bool:
        return x.device.type != "cpu"

    def _wait_for(self, handles: Handles, seconds: float | None) -> str:
        """Wait, and check regularly that the awaited workers still run.

        The kernel of a lost worker closes its connections, but reports this only once for connections with unread data.
        On a busy link that report may be lost, and a worker that only receives never learns of it.
        """
        end = time.monotonic() + self.timeout
        while handles and not _is_message(handles[0]):
            if problem := self._wait_for_collective(handles.pop(0), end):
                handles.clear()
                return problem
        return self._wait_for_messages(handles, end) if handles else ""

    def _wait_for_collective(self, handle: dist.Work, end: float) -> str:
        while True:
            begin = time.monotonic()
            try:
                handle.wait(timedelta(seconds=max(_POLL_SECONDS, min(_LOOK_SECONDS, end - begin))))
                return ""
            except RuntimeError as error:
                if "Invalid scalar type" in str(error):
                    raise
                problem = first_sentence(error)
            now = time.monotonic()
            # A wait for a collective that timed out early may be repeated.
            if "timed out" not in problem.lower() or now >= end or now - begin < 0.9 * _LOOK_SECONDS:
                return problem
            if self._lost():
                return _GONE

    def _wait_for_messages(self, handles: Handles, end: float) -> str:
        # After a timeout in a wait for a message, Gloo closes the connection. So a thread waits without a timeout, and
        # is left behind if the other worker is gone.
        waiting = list(handles)
        handles.clear()
        ended = self.runtime.start(lambda: try_wait(waiting, max(_POLL_SECONDS, end - time.monotonic())))
        while not wait([ended], _LOOK_SECONDS).done:
            if self._lost():
                waiting.clear()
                return _GONE
        return ended.result()

    def _failed(self, operation: str, problem: str, waited: float) -> ThinwireError:
        if self._fault is not None:
            return self._closed(self._fault)
        where = f"rank {self.rank}, step {self.step}, {operation}"
        late = waited >= 0.95 * self.timeout or "timed out" in problem.lower()
        if late:
            self._fault = CommTimeoutError(f"{where}: no answer within {self.timeout:g} s ({problem})")
        elif problem == _GONE:
            self._fault = PeerLostError(f"{where}: {problem}")
        elif operation == "connecting" and not self._own:
            # A connection closed by another worker means that it abandons this view. A refused one means that this
            # worker does not reach another, whose process runs.
            told = self._told_within(_TELL_SECONDS if _CLOSED.search(problem) else _PAUSE_SECONDS)
            kind = PeerLostError if told else CommTimeoutError
            self._fault = kind(f"{where}: this worker did not reach all others ({problem})")
        else:
            self._fault = PeerLostError(f"{where}: a connection was closed ({problem})")
        # An error that another rank reports is in the store before its connections are closed.
        with suppress(RuntimeError, OSError, ValueError):  # TimeoutError too
            if within(_STORE_SECONDS, lambda: self._first.check(["first"])):
                told = Failure.read(within(_STORE_SECONDS, lambda: self._first.get("first")))
                self._fault = error_named(told.error, told.text)
        self._close_connections()
        return self._fault

    def _close_connections(self) -> None:
        """Drop the last references to the group, which waits for collectives that have not ended.

        A collective that waits for a silently lost worker ends at the timeout; no caller waits that long.
        """
        held: list[Any] = [*self._own, *(handle for handles in self._inflight.values() for handle in handles)]
        super()._close_connections()
        if held:
            wait([self.runtime.start(held.clear)], _CLOSE_SECONDS)

    def raise_on_all(self, error: ThinwireError) -> NoReturn:
        """Raise an error on this rank and in the calls of all others."""
        if self.size == 1 or self._fault is not None:
            raise error
        own = Failure("error", self.rank, self.step, error=type(error).__name__, text=str(error))
        with suppress(RuntimeError, OSError, ValueError):
            stored = within(_STORE_SECONDS, lambda: self._first.compare_set("first", "", json.dumps(asdict(own))))
            told = Failure.read(stored)
            error = error if told == own else error_named(told.error, told.text)
        self._fault = error
        self._close_connections()
        raise error

    def disconnect(self) -> None:
        """Close all connections, so that the waits of all other workers fail."""
        self._fault = self._fault or PeerLostError("this view has ended")
        self._close_connections()


class GlooConnector:
    """Connects the workers of a view with Gloo, through a part of their store.

    Args:
        store: the store of the views.
        named: turns the name of a group into one that strangers cannot guess, as they could write to its keys.
    """

    def __init__(self, store: Store, named: Callable[[str], str] = str) -> None:
        self._store = store
        self._named = named

    def connect(self, name: int | str, rank: int, size: int, timeout: float, lost: Callable[[], bool]) -> Comm:
        """Connect this worker to the members of a view, or to some of them."""
        return ViewComm(PrefixStore(self._named(f"group/{name}"), self._store), rank, size, timeout=timeout, lost=lost)

    def pair(self, name: str, rank: int, timeout: float, lost: Callable[[], bool]) -> Comm:
        """Connect two workers, in addition to the comms of views."""
        return ViewComm(PrefixStore(self._named(f"pair/{name}"), self._store), rank, 2, timeout=timeout, lost=lost)

    def disconnect(self, comm: Comm) -> None:
        """Close the connections of a comm."""
        assert isinstance(comm, ViewComm)
        comm.disconnect()


def _is_message(handle: Any) -> bool:
    # The forwarding of a broadcast's chunks is not torch's, and waits for messages.
    return not isinstance(handle, dist.Work) or operation_of(handle) not in _COLLECTIVES


def _with_own_connection(store: Store) -> Store:
    """Return the same store over a new connection, whose calls do not wait for those of the given one.

    A worker that connects waits for the keys of all others. If one of them never arrives, that wait cannot be ended.
    All calls over the same connection wait with it, although this worker has abandoned the view long before.
    """
    # A user's store may have no `clone`; the next call of an unreachable one reports it.
    with suppress(RuntimeError, OSError, AttributeError):  # TimeoutError too
        return within(_STORE_SECONDS, cast(Any, store).clone)
    return store
