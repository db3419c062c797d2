# SPDX-License-Identifier: Apache-2.0
"""A comm over an object store or a shared folder, for machines that cannot connect to each other.

A collective call is one object of each rank, written at the launch and read by all others:

    PLACE/CALL/FROM       a vector for all ranks: all-gather, broadcast, and all-reduce of small vectors
    PLACE/CALL/FROM-TO    a part for one rank: all-to-all, and the first stage of an all-reduce of large vectors
    PLACE/p/FROM-TO/N     the N-th message of `send_recv` between two ranks
    PLACE/error           an error that one rank reports to all

An object starts with a header: the call and its step, so that ranks that are out of step are detected without messages
of their own; and which objects its writer has read. A rank deletes its objects when the headers of their readers show
that they have been read. Sums are added in rank order, as by threads, so that all ranks get equal bits.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import reduce
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from thinwire.core.comm.base import Comm
from thinwire.core.comm.forks import protect
from thinwire.core.comm.work import Work, describe
from thinwire.core.storage.bucket import Bucket, loop
from thinwire.core.validation import printable
from thinwire.errors import (
    CommError,
    CommTimeoutError,
    ConfigError,
    MismatchError,
    PeerLostError,
    ThinwireError,
    error_named,
)

T = TypeVar("T")
SCATTER_BYTES = 1 << 20
"""An all-reduce takes two stages if this saves each rank so many bytes of downloads; a stage takes a round trip."""
_MOST_CALL = 200  # bytes of the description of a call
_MOST_ERROR = 20_000
_POLL_SECONDS, _LONGEST_POLL, _POLL_SHARE = 0.02, 2.0, 0.1  # a share of the time waited so far
_LOOK_SECONDS, _LONGEST_LOOK = 0.5, 5.0  # between looks for lost ranks and reported errors
AWAITED_SECONDS = 1.0  # of a wait, after which `awaited` names the missing ranks


def in_two_stages(nbytes: int, size: int) -> bool:
    """Return True if an all-reduce of so many bytes among `size` ranks takes two stages."""
    return nbytes * (size - 1) * (size - 2) // size >= SCATTER_BYTES


def header_bytes(size: int) -> int:
    """Return the bytes of an object's header among `size` ranks, without the description of its call."""
    return struct.calcsize(f"!H{size}Q")


class _Header(NamedTuple):
    """The start of an object.

    Attributes:
        call: the call and its step.
        read: for each rank, the number of the first message of `send_recv` from it that the writer has not received;
            and for the writer itself, that of its first collective call that is not complete.
    """

    call: str
    read: Sequence[int]

    def pack(self) -> bytes:
        """Return the header as bytes."""
        call = self.call.encode()[:_MOST_CALL]
        return struct.pack(f"!H{len(self.read)}Q", len(call), *self.read) + call

    @classmethod
    def unpack(cls, content: bytes, size: int) -> tuple[_Header, bytes]:
        """Split an object into its header and its data."""
        length, *read = struct.unpack_from(f"!H{size}Q", content)
        start = header_bytes(size)
        call = content[start : start + length].decode(errors="replace")
        return cls(printable(call, _MOST_CALL), read), content[start + length :]


class _Call:
    """A call in flight: its number, if it is collective, and the ranks that it waits for."""

    def __init__(self, text: str, number: int = -1) -> None:
        self.text, self.number = text, number
        self.missing: set[int] = set()
        self.looks: Counter[int] = Counter()  # at objects that did not exist, by rank
        self.problem = ""
        self.future: Future[Any] = Future()


class BucketComm(Comm):
    """One rank's comm over a bucket. `attach(..., rendezvous=URL)` creates it.

    Args:
        bucket: carries the objects.
        place: the first part of their names; the same on all ranks, and used by this comm only.
        rank: this worker's rank.
        size: the number of workers.
        timeout: how long one wait may last, in seconds.
        lost: returns whether one of these ranks is known to be gone, so that no call can complete.
        on_close: called once when the comm is disconnected.

    Example:
        >>> import torch
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from thinwire.core.comm.bucket import BucketComm
        >>> from thinwire.core.storage.bucket import Bucket
        >>> def work(rank: int) -> list[float]:
        ...     comm = BucketComm(Bucket.open("memory://comm"), "0", rank, 2)
        ...     return comm.all_reduce_(torch.tensor([1.0, float(rank)])).wait().tolist()
        >>> with ThreadPoolExecutor() as pool:
        ...     list(pool.map(work, range(2)))
        [[2.0, 1.0], [2.0, 1.0]]
    """

    def __init__(
        self,
        bucket: Bucket,
        place: str,
        rank: int,
        size: int,
        *,
        timeout: float = 60.0,
        lost: Callable[[Collection[int]], bool] = lambda _: False,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(rank, size, timeout=timeout)
        self.bucket = bucket
        self.request_seconds, self.traffic = bucket.seconds, bucket.traffic
        self._place = place
        self._lost = lost
        self._on_close = on_close
        self._fault: ThinwireError | None = None
        self._label = ""  # a check that the next collective call carries
        self._duplicates: list[BucketComm] = []
        # By rank, of the messages of `send_recv` from it, and for the own rank, of collective calls: the number of the
        # next one, and those in flight.
        self._next, self._open = [0] * size, [set[int]() for _ in range(size)]
        self._sent = [0] * size
        self._blocked: tuple[_Call, float] | None = None  # the call that training waits for, and since when
        self._tasks: set[asyncio.Task[Any]] = set()
        # Used by the thread of requests only.
        self._seen = [[0] * size for _ in range(size)]  # `_Header.read` of each rank
        self._written: list[tuple[str, int | None, int]] = []  # name, receiver (None for all), number
        protect(self)

    # -- the calls -------------------------------------------------------------------------------------------------

    def _all_gather(self, x: Tensor) -> Work[list[Tensor]]:
        return self._gathered("all_gather", x).then(lambda rows: [_tensor(row, x) for row in rows])

    def _all_reduce_(self, x: Tensor) -> Work[Tensor]:
        if not in_two_stages(x.nbytes, self.size):
            rows = self._gathered("all_reduce", x)
            return rows.then(lambda rows: x.copy_(reduce(torch.add, [_tensor(row, x) for row in rows])))
        split = x.view(-1).tensor_split(self.size)
        parts, like = [_bytes(part) for part in split], torch.empty_like(split[self.rank], device="cpu")
        sizes = [len(part) for part in parts]

        async def run(call: _Call) -> bytes:
            rows = await self._scatter(call, parts, [sizes[self.rank]] * self.size)

            def add() -> bytes:
                return _bytes(reduce(torch.add, [_tensor(row, like) for row in rows]))

            return b"".join(await self._gather(call, await asyncio.to_thread(add), sizes))

        return self._start(f"all_reduce of {describe(x)}", run).then(lambda total: x.copy_(_tensor(total, x)))

    def _broadcast_(self, x: Tensor, src: int) -> Work[Tensor]:
        own = _bytes(x)
        return self._start(
            f"broadcast from rank {src} of {describe(x)}", lambda call: self._share(call, src, own, len(own))
        ).then(lambda found: x if self.rank == src else x.copy_(_tensor(found, x)))

    def _all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]:
        parts, width = [_bytes(x) for x in xs], xs[0].element_size()
        rows = self._start("all_to_all", lambda call: self._scatter(call, parts, [size * width for size in sizes]))
        return rows.then(lambda rows: [_tensor(row, xs[0], size) for row, size in zip(rows, sizes, strict=True)])

    def _send_recv(self, x: Tensor, dst: Sequence[int], src: Sequence[int]) -> Work[list[Tensor]]:
        # Numbered at the call, so that messages match in any order of the waits.
        receives = [(peer, self._number(peer)) for peer in src]
        sends = [(peer, self._sent[peer]) for peer in dst]
        for peer in dst:
            self._sent[peer] += 1
        own = _bytes(x) if dst else b""
        call = _Call(f"send_recv of {describe(x)}{f' at step {self.step}' if self.in_step else ''}")

        async def receive(peer: int, number: int) -> bytes:
            found = await self._read(call, f"p/{peer}-{self.rank}/{number}", peer, x.nbytes)
            self._open[peer].discard(number)
            return found

        async def run() -> list[bytes]:
            writes = [self._write(call, f"p/{self.rank}-{peer}/{n}", own, peer, n) for peer, n in sends]
            _, found = await _all([_all(writes), _all([receive(peer, n) for peer, n in receives])])
            self._sweep()
            return found

        return self._launch(call, run()).then(lambda rows: [_tensor(row, x) for row in rows])

    def duplicate(self) -> Comm:
        """Open a second comm in the same bucket; all ranks call it together."""
        made = BucketComm(
            self.bucket,
            f"{self._place}/d{len(self._duplicates)}",
            self.rank,
            self.size,
            timeout=self.timeout,
            lost=self._lost,
        )
        self._duplicates.append(made)
        return made

    # -- one call --------------------------------------------------------------------------------------------------

    def _attach_check(self, call: str) -> bool:
        """Let the next collective call carry a check that all ranks make it at the same step."""
        self._label = f"{call} at step {self.step}" if self.in_step else call
        return True

    def _number(self, stream: int) -> int:
        """Number the next message from a rank, or for the own rank the next collective call."""
        number = self._next[stream]
        self._open[stream].add(number)
        self._next[stream] += 1  # only now, since another thread takes those before it that are not open as read
        return number

    def _gathered(self, operation: str, x: Tensor) -> Work[list[bytes]]:
        own = _bytes(x)
        sizes = [len(own)] * self.size
        return self._start(f"{operation} of {describe(x)}", lambda call: self._gather(call, own, sizes))

    def _start(self, text: str, run: Callable[[_Call], Coroutine[Any, Any, T]]) -> Work[T]:
        """Launch the next collective call."""
        # What a check compares is in its rows: all ranks read them, and raise the same error.
        text, self._label = f"{self._label}: {text}" if self._label else text, ""
        call = _Call(text, self._number(self.rank))

        async def body() -> T:
            found = await run(call)
            self._open[self.rank].discard(call.number)
            self._sweep()
            return found

        return self._launch(call, body())

    def _launch(self, call: _Call, body: Coroutine[Any, Any, T]) -> Work[T]:
        if self._fault is not None:
            body.close()
            raise self._closed(self._fault)

        async def run() -> T:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                if self._fault is not None:  # since the launch: `_cancel` has not seen this task
                    body.close()
                    raise self._closed(self._fault)
                return await body
            finally:
                self._tasks.discard(task)

        call.future = asyncio.run_coroutine_threadsafe(run(), loop())
        step = self.step
        return Work(lambda: self._block(call, step))

    def _block(self, call: _Call, step: int) -> Any:
        self._blocked = call, time.monotonic()
        try:
            return self._wait(call, step)
        finally:
            self._blocked = None

    def awaited(self) -> list[int]:
        """Return the ranks whose messages this rank has awaited for a second or more."""
        call, begin = self._blocked or (None, 0.0)
        waits = call is not None and time.monotonic() - begin >= AWAITED_SECONDS
        return sorted(call.missing.copy()) if call is not None and waits else []

    def _wait(self, call: _Call, step: int) -> Any:
        """Wait for a call, and look for lost ranks and reported errors meanwhile."""
        begin, look = time.monotonic(), _LOOK_SECONDS
        looks: dict[int, int] | None = None
        while True:
            if self._fault is not None:
                raise self._closed(self._fault)
            left = begin + self.timeout - time.monotonic()
            where = f"{self.name(self.rank)}, step {step}, {call.text}"
            if wait([call.future], max(0.0, min(look, left))).done:
                return self._result(call, where)
            self._raise_reported()
            missing = sorted(call.missing)
            if left <= 0:
                raise self._fail(self._late(call, where, timed_out=True))
            look = min(2 * look, _LONGEST_LOOK)
            if looks is not None:
                # A rank may have written its object before it ended, so only looks since then count.
                if any(call.looks[rank] > looks.get(rank, 0) + 1 for rank in missing):
                    raise self._fail(self._late(call, where, timed_out=False))
                look = _LOOK_SECONDS
            elif self._lost(missing):
                looks, look = dict(call.looks), _LOOK_SECONDS

    def _result(self, call: _Call, where: str) -> Any:
        """Return the result of a call that has ended, or raise its error."""
        if call.future.cancelled():
            raise self._closed(self._fault or PeerLostError(f"{where}: the call was canceled"))
        error = call.future.exception()
        if error is None:
            return call.future.result()
        if isinstance(error, MismatchError):
            self.raise_on_all(error)
        if isinstance(error, ConnectionError) and not isinstance(error, CommError):
            error = CommTimeoutError(
                f"{where}: the store has not accepted a message within {self.timeout:g} s ({error})"
            )
        raise self._fail(error) if isinstance(error, ThinwireError) else error

    def _late(self, call: _Call, where: str, *, timed_out: bool) -> CommError:
        missing = sorted(call.missing)
        who = f"{self.names(missing)} {'has' if len(missing) == 1 else 'have'} not written" if missing else ""
        problem = (
            "; ".join(each for each in (who, call.problem) if each) or "the store has not accepted the own message"
        )
        if timed_out:
            return CommTimeoutError(f"{where}: no answer within {self.timeout:g} s; {problem}")
        return PeerLostError(f"{where}: a worker is gone, or continues without this one; {problem}")

    async def _share(self, call: _Call, src: int, own: bytes, nbytes: int) -> bytes:
        """Write this rank's object for all ranks, or read another rank's."""
        if src != self.rank:
            return await self._read(call, f"{call.number}/{src}", src, nbytes)
        await self._write(call, f"{call.number}/{src}", own)
        return own

    async def _gather(self, call: _Call, own: bytes, sizes: Sequence[int]) -> list[bytes]:
        """Write one object for all ranks, and read theirs."""
        return await _all([self._share(call, peer, own, size) for peer, size in enumerate(sizes)])

    async def _scatter(self, call: _Call, parts: Sequence[bytes], sizes: Sequence[int]) -> list[bytes]:
        """Write one object for each rank, and read theirs for this one."""

        async def of(peer: int) -> bytes:
            if peer == self.rank:
                if len(parts[peer]) != sizes[peer]:
                    raise MismatchError(
                        f"ranks are out of step: {self.name(peer)} sends itself a vector of another size"
                    )
                return parts[peer]
            write = self._write(call, f"{call.number}/{self.rank}-{peer}", parts[peer])
            return (await _all([write, self._read(call, f"{call.number}/{peer}-{self.rank}", peer, sizes[peer])]))[1]

        return await _all([of(peer) for peer in range(self.size)])

    async def _write(
        self, call: _Call, name: str, content: bytes, dst: int | None = None, number: int | None = None
    ) -> None:
        name = f"{self._place}/{name}"
        # The next number is read first, since another thread may launch a call meanwhile.
        read = [min([following, *flying]) for following, flying in zip(self._next, self._open, strict=True)]
        # Recorded first: an object is swept although its write was canceled.
        self._written.append((name, dst, call.number if number is None else number))
        if not await self.bucket.create(name, _Header(call.text, read).pack() + content, seconds=self.timeout):
            raise CommError(
                f"{self.bucket.url}/{name}: exists already. Two workers have {self.name(self.rank)}, or another run "
                "uses this path. Use a separate path for each run"
            )

    async def _read(self, call: _Call, name: str, peer: int, nbytes: int) -> bytes:
        """Return the data of another rank's object, once it exists."""
        call.missing.add(peer)
        name, begin = f"{self._place}/{name}", time.monotonic()
        most = header_bytes(self.size) + _MOST_CALL + nbytes
        while True:
            try:
                if (found := await self.bucket.get(name, most)) is not None:
                    break
                call.looks[peer] += 1
            except ConnectionError as error:
                call.problem = f"the last request failed ({error})"
            waited = time.monotonic() - begin
            await asyncio.sleep(min(_LONGEST_POLL, _POLL_SECONDS + _POLL_SHARE * waited))
        header, data = _Header.unpack(found, self.size)
        if header.call != call.text[:_MOST_CALL] or len(data) != nbytes:
            calls = {self.rank: call.text, peer: header.call}
            if header.call == call.text[:_MOST_CALL]:
                calls = {self.rank: f"{call.text} with {nbytes} bytes", peer: f"{header.call} with {len(data)}"}
            different = ", ".join(f"{self.name(rank)} is in {calls[rank]}" for rank in sorted(calls))
            raise MismatchError(f"ranks are out of step: {different}; {self.rule}")
        self._seen[peer] = [max(pair) for pair in zip(self._seen[peer], header.read, strict=True)]
        call.missing.discard(peer)
        return data

    def _sweep(self) -> None:
        """Delete own objects that all their readers have read."""
        complete = min(read[rank] for rank, read in enumerate(self._seen) if rank != self.rank)
        limits = [complete if dst is None else self._seen[dst][self.rank] for _, dst, _ in self._written]
        gone = [name for (name, _, number), limit in zip(self._written, limits, strict=True) if number < limit]
        if gone:
            names = set(gone)
            self._written = [each for each in self._written if each[0] not in names]
            asyncio.run_coroutine_threadsafe(self._delete(gone), loop())

    def delete_own(self) -> None:
        """Delete the objects that this rank has written, and that no rank reads any more."""
        names = [name for name, _, _ in self._written]
        self._written = []
        asyncio.run_coroutine_threadsafe(self._delete(names), loop())
        for each in self._duplicates:
            each.delete_own()

    async def _delete(self, names: list[str]) -> None:
        with suppress(ConnectionError):  # `thinwire bucket clean` deletes what is left
            await self.bucket.delete(names)

    # -- failures --------------------------------------------------------------------------------------------------

    def raise_on_all(self, error: ThinwireError) -> NoReturn:
        """Raise an error on this rank and in the calls of all others."""
        if self.size == 1 or self._fault is not None:
            raise error
        own = json.dumps({"error": type(error).__name__, "text": str(error)[: _MOST_ERROR // 8]}).encode()
        with suppress(ConnectionError, TimeoutError):
            limit = min(self.timeout, _LONGEST_LOOK)
            if not self.bucket.wait(self.bucket.create(f"{self._place}/error", own, seconds=limit), 2 * limit):
                self._raise_reported()
        raise self._fail(error)

    def _raise_reported(self) -> None:
        """Raise the error that another rank has reported, if there is one."""
        try:
            found = self.bucket.wait(self.bucket.get(f"{self._place}/error", _MOST_ERROR), self.timeout)
            if found is None:
                return
            told = json.loads(found)
            error = error_named(str(told["error"]), str(told["text"]))
        except (ConnectionError, TimeoutError, ValueError, KeyError, TypeError):
            return
        raise self._fail(error)

    def _fail(self, error: ThinwireError) -> ThinwireError:
        self._fault = error
        self._cancel()
        return error

    @staticmethod
    def _closed(fault: ThinwireError) -> ThinwireError:
        if isinstance(fault, ConfigError):  # no failure: the comm was disconnected, or this process is a fork
            return fault
        return type(fault)(f"the comm is closed after an earlier failure: {fault}")

    def _cancel(self) -> None:
        """End the calls in flight."""

        def cancel() -> None:
            for task in list(self._tasks):
                task.cancel()

        loop().call_soon_threadsafe(cancel)

    def has_failed(self) -> bool:
        """Return True after a failure."""
        return self._fault is not None

    def disconnect(self) -> None:
        """End the calls in flight; later calls raise an error."""
        if self._fault is None:
            self._fault = ConfigError(f"{self.name(self.rank)}: this comm was disconnected. Attach the model again")
        self._cancel()
        self._on_close()
        self._on_close = lambda: None
        for each in self._duplicates:
            each.disconnect()

    def after_fork(self) -> None:
        """Make this comm unusable in a fork."""
        self._fault = self._fault or ConfigError(
            f"this process is a fork of {self.name(self.rank)}: only the process that attached the model can "
            "communicate. Train, evaluate and save there"
        )


async def _all(bodies: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Return the results of coroutines that run at the same time; if one fails, the others end too."""
    tasks = [asyncio.ensure_future(each) for each in bodies]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for each in tasks:
            each.cancel()


def _bytes(x: Tensor) -> bytes:
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _tensor(data: bytes, like: Tensor, length: int | None = None) -> Tensor:
    """Return bytes as a tensor like another one, or as a vector of its dtype."""
    shape = like.shape if length is None else (length,)
    if not data:
        return like.new_empty(shape)
    return torch.frombuffer(bytearray(data), dtype=like.dtype).view(shape).to(like.device)


class BucketConnector:
    """Opens a comm for each view of an elastic run; nothing is sent to connect.

    Args:
        bucket: carries the objects.
        place: the first part of their names.
        members: returns the ids of the members of the current view, which names of its objects contain.
    """

    def __init__(self, bucket: Bucket, place: str, members: Callable[[], str]) -> None:
        self._bucket, self._place, self._members = bucket, place, members
        self._closed: list[BucketComm] = []

    def connect(self, name: int | str, rank: int, size: int, timeout: float, lost: Callable[[], bool]) -> Comm:
        """Open the comm of a view, or of some of its members."""
        # All members have left the earlier views, since they have agreed on this one.
        while self._closed:
            self._closed.pop().delete_own()
        return self._open(self._of_view(name), rank, size, timeout=timeout, lost=lambda _: lost())

    def connect_fixed(self, name: int, rank: int, size: int, **settings: Any) -> BucketComm:
        """Open the comm of workers that are the same from start to end; its end is theirs.

        Args:
            name: the number of their view.
            rank: this worker's rank.
            size: the number of workers.
            settings: `timeout`, `lost` and `on_close` of `BucketComm`.
        """
        return self._open(self._of_view(name), rank, size, **settings)

    def pair(self, name: str, rank: int, timeout: float, lost: Callable[[], bool]) -> Comm:
        """Open a comm of two workers; `name` contains an id, and one of the two is in no view yet."""
        return self._open(f"pair/{name}", rank, 2, timeout=timeout, lost=lambda _: lost())

    def _open(self, name: str, rank: int, size: int, **settings: Any) -> BucketComm:
        return BucketComm(self._bucket, f"{self._place}/{name}", rank, size, **settings)

    def _of_view(self, name: int | str) -> str:
        return f"{name}-{hashlib.sha256(self._members().encode()).hexdigest()[:16]}"

    def disconnect(self, comm: Comm) -> None:
        """Close a comm; the others learn of it from the membership."""
        assert isinstance(comm, BucketComm)
        comm.disconnect()
        self._closed.append(comm)
