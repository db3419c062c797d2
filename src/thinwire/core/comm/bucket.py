# SPDX-License-Identifier: Apache-2.0
"""A comm over an object store or a shared folder, for machines that cannot connect to each other.

A collective call is one object of each rank, written at the launch and read by all others:

    PLACE/CALL/FROM       a vector for all ranks: all-gather, broadcast, and all-reduce of small vectors
    PLACE/CALL/FROM-TO    a part for one rank: all-to-all, and the first stage of an all-reduce of large vectors
    PLACE/p/FROM-TO/N     the N-th message of `send_recv` between two ranks
    PLACE/error           an error that one rank reports to all

An object starts with a header: the call and its step, so that ranks that are out of step are detected without messages
of their own; and which objects its writer has read. A rank deletes its objects when the headers of all other ranks show
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
    return struct.calcsize(f"!HQ{size}Q")


class _Header(NamedTuple):
    """The start of an object.

    Attributes:
        call: the call and its step.
        finished: all collective calls before this number are complete on the writer.
        received: how many messages of `send_recv` the writer has received from each rank.
    """

    call: str
    finished: int
    received: Sequence[int]

    def pack(self) -> bytes:
        """Return the header as bytes."""
        call = self.call.encode()[:_MOST_CALL]
        return struct.pack(f"!HQ{len(self.received)}Q", len(call), self.finished, *self.received) + call

    @classmethod
    def unpack(cls, content: bytes, size: int) -> tuple[_Header, memoryview]:
        """Split an object into its header and its data.

        Raises:
            ValueError: it is too short.
        """
        layout = struct.Struct(f"!HQ{size}Q")
        try:
            length, finished, *received = layout.unpack_from(content)
        except struct.error as error:
            raise ValueError(str(error)) from None
        end = layout.size + length
        call = printable(content[layout.size : end].decode(errors="replace"), _MOST_CALL)
        return cls(call, finished, received), memoryview(content)[end:]


class _Call:
    """A call in flight: its result, and the ranks that it waits for."""

    def __init__(self, text: str) -> None:
        self.text = text
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
        self._calls = 0
        self._duplicates: list[BucketComm] = []
        self._sent: Counter[int] = Counter()
        self._expected: Counter[int] = Counter()
        self._open: dict[int, _Call] = {}  # collective calls in flight
        self._blocked: tuple[_Call, float] | None = None  # the call that training waits for, and since when
        self._tasks: set[asyncio.Task[Any]] = set()
        # Used by the thread of requests only.
        self._received = [0] * size
        self._seen = [_Header("", 0, [0] * size) for _ in range(size)]
        self._written: list[tuple[str, int | None, int]] = []  # name, receiver (None for all), number
        protect(self)

    # -- the calls -------------------------------------------------------------------------------------------------

    def _all_gather(self, x: Tensor) -> Work[list[Tensor]]:
        return self._start("all_gather", x, lambda call, own: self._gather(call, own)).then(
            lambda rows: [_tensor(row, x) for row in rows]
        )

    def _all_reduce_(self, x: Tensor) -> Work[Tensor]:
        if not in_two_stages(x.nbytes, self.size):
            rows = self._start("all_reduce", x, lambda call, own: self._gather(call, own))
            return rows.then(lambda rows: x.copy_(reduce(torch.add, [_tensor(row, x) for row in rows])))
        like = torch.empty(0, dtype=x.dtype, device="cpu")
        lengths = [len(part) for part in x.view(-1).tensor_split(self.size)]

        async def run(call: int, own: bytes) -> bytes:
            parts = _cut(own, [length * x.element_size() for length in lengths])
            rows = await self._scatter(call, parts, len(parts[self.rank]))

            def add() -> bytes:
                return _bytes(reduce(torch.add, [_tensor(row, like, lengths[self.rank]) for row in rows]))

            return b"".join(await self._gather(call, await asyncio.to_thread(add), [len(part) for part in parts]))

        return self._start("all_reduce", x, run).then(lambda total: x.copy_(_tensor(total, x)))

    def _broadcast_(self, x: Tensor, src: int) -> Work[Tensor]:
        async def run(call: int, own: bytes) -> bytes:
            if self.rank == src:
                await self._write(f"{call}/{src}", own, None, call)
                return own
            return await self._read(f"{call}/{src}", src, self._open[call], x.nbytes)

        return self._start(f"broadcast from rank {src}", x, run).then(
            lambda found: x if self.rank == src else x.copy_(_tensor(found, x))
        )

    def _all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]:
        parts, width = [_bytes(x) for x in xs], xs[0].element_size()

        async def run(call: int, _: bytes) -> list[bytes]:
            return await self._scatter(call, parts, [size * width for size in sizes])

        rows = self._start("all_to_all", None, run)
        return rows.then(lambda rows: [_tensor(row, xs[0], size) for row, size in zip(rows, sizes, strict=True)])

    def _send_recv(self, x: Tensor, dst: Sequence[int], src: Sequence[int]) -> Work[list[Tensor]]:
        # Numbered at the call, so that messages match in any order of the waits.
        sends = [(peer, self._sent[peer]) for peer in dst]
        self._sent.update(dst)
        receives = [(peer, self._expected[peer]) for peer in src]
        self._expected.update(src)
        own = _bytes(x) if dst else b""
        call = _Call(f"send_recv of {describe(x)}{f' at step {self.step}' if self.in_step else ''}")

        async def receive(peer: int, number: int) -> bytes:
            found = await self._read(f"p/{peer}-{self.rank}/{number}", peer, call, x.nbytes)
            self._received[peer] = max(self._received[peer], number + 1)
            return found

        async def run() -> list[bytes]:
            writes = [self._write(f"p/{self.rank}-{peer}/{n}", own, peer, n, call.text) for peer, n in sends]
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

    def _start(self, operation: str, x: Tensor | None, run: Callable[[int, bytes], Coroutine[Any, Any, T]]) -> Work[T]:
        """Launch the next collective call."""
        number = self._calls
        # What a check compares is in its rows: all ranks read them, and raise the same error.
        text = operation if x is None else f"{operation} of {describe(x)}"
        text, self._label = f"{self._label}: {text}" if self._label else text, ""
        call = self._open[number] = _Call(text)
        self._calls += 1  # only now, since another thread takes calls before it that are not open as complete
        own = b"" if x is None else _bytes(x)

        async def body() -> T:
            found = await run(number, own)
            del self._open[number]
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

    async def _gather(self, call: int, own: bytes, sizes: Sequence[int] | None = None) -> list[bytes]:
        """Write one object for all ranks, and read theirs."""

        async def of(peer: int) -> bytes:
            if peer == self.rank:
                await self._write(f"{call}/{peer}", own, None, call)
                return own
            return await self._read(
                f"{call}/{peer}", peer, self._open[call], len(own) if sizes is None else sizes[peer]
            )

        return await _all([of(peer) for peer in range(self.size)])

    async def _scatter(self, call: int, parts: Sequence[bytes], sizes: int | Sequence[int]) -> list[bytes]:
        """Write one object for each rank, and read theirs for this one."""

        async def of(peer: int) -> bytes:
            size = sizes if isinstance(sizes, int) else sizes[peer]
            if peer == self.rank:
                if len(parts[peer]) != size:
                    raise MismatchError(
                        f"ranks are out of step: {self.name(peer)} sends itself a vector of another size"
                    )
                return parts[peer]
            write = self._write(f"{call}/{self.rank}-{peer}", parts[peer], None, call)
            return (await _all([write, self._read(f"{call}/{peer}-{self.rank}", peer, self._open[call], size)]))[1]

        return await _all([of(peer) for peer in range(self.size)])

    async def _write(self, name: str, content: bytes, dst: int | None, number: int, text: str = "") -> None:
        name, text = f"{self._place}/{name}", text or self._open[number].text
        finished = min(list(self._open), default=self._calls)
        header = _Header(text, finished, self._received).pack()
        # Recorded first: an object is swept although its write was canceled.
        self._written.append((name, dst, number))
        if not await self.bucket.create(name, header + content, seconds=self.timeout):
            raise CommError(
                f"{self.bucket.url}/{name}: exists already. Two workers have {self.name(self.rank)}, or another run "
                "uses this path. Use a separate path for each run"
            )

    async def _read(self, name: str, peer: int, call: _Call, nbytes: int) -> bytes:
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
            calls = [(self.rank, call.text), (peer, header.call)]
            if header.call == call.text[:_MOST_CALL]:
                calls = [(self.rank, f"{call.text} with {nbytes} bytes"), (peer, f"{header.call} with {len(data)}")]
            raise MismatchError(f"ranks are out of step: {_different(calls, self.names)}; {self.rule}")
        seen = self._seen[peer]
        received = [max(pair) for pair in zip(seen.received, header.received, strict=True)]
        self._seen[peer] = _Header("", max(seen.finished, header.finished), received)
        call.missing.discard(peer)
        return bytes(data)

    def _sweep(self) -> None:
        """Delete own objects that all their readers have read."""
        others = [header for rank, header in enumerate(self._seen) if rank != self.rank]
        finished = min(header.finished for header in others)
        read = [
            name
            for name, dst, number in self._written
            if (number < finished if dst is None else number < self._seen[dst].received[self.rank])
        ]
        if read:
            gone = set(read)
            self._written = [each for each in self._written if each[0] not in gone]
            self._in_background(self._delete(read))

    def delete_own(self) -> None:
        """Delete the objects that this rank has written, and that no rank reads any more."""
        names = [name for name, _, _ in self._written]
        self._written = []
        loop().call_soon_threadsafe(lambda: self._in_background(self._delete(names)))
        for each in self._duplicates:
            each.delete_own()

    async def _delete(self, names: list[str]) -> None:
        with suppress(ConnectionError):  # `thinwire bucket clean` deletes what is left
            await self.bucket.delete(names)

    def _in_background(self, body: Coroutine[Any, Any, object]) -> None:
        task = loop().create_task(body)
        _background.add(task)
        task.add_done_callback(_background.discard)

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


_background: set[asyncio.Task[Any]] = set()


async def _all(bodies: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Return the results of coroutines that run at the same time; if one fails, the others end too."""
    tasks = [asyncio.ensure_future(each) for each in bodies]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for each in tasks:
            each.cancel()


def _different(calls: Sequence[tuple[int, str]], names: Callable[[Sequence[int]], str]) -> str:
    (a, one), (b, other) = sorted(calls)
    return f"{names([a])} is in {one}, {names([b])} is in {other}"


def _bytes(x: Tensor) -> bytes:
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _tensor(data: bytes, like: Tensor, length: int | None = None) -> Tensor:
    """Return bytes as a tensor like another one, or as a vector of its dtype."""
    shape = like.shape if length is None else (length,)
    if not data:
        return like.new_empty(shape)
    return torch.frombuffer(bytearray(data), dtype=like.dtype).view(shape).to(like.device)


def _cut(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    parts, start = list[bytes](), 0
    for size in sizes:
        parts.append(data[start : start + size])
        start += size
    return parts


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
        return BucketComm(self._bucket, self._of_view(name), rank, size, timeout=timeout, lost=lambda _: lost())

    def _of_view(self, name: int | str) -> str:
        return f"{self._place}/{name}-{hashlib.sha256(self._members().encode()).hexdigest()[:16]}"

    def connect_fixed(
        self,
        name: int,
        rank: int,
        size: int,
        timeout: float,
        *,
        lost: Callable[[Collection[int]], bool],
        on_close: Callable[[], None],
    ) -> Comm:
        """Open the comm of workers that are the same from start to end; its end is theirs."""
        place = self._of_view(name)
        return BucketComm(self._bucket, place, rank, size, timeout=timeout, lost=lost, on_close=on_close)

    def pair(self, name: str, rank: int, timeout: float, lost: Callable[[], bool]) -> Comm:
        """Open a comm of two workers; `name` contains an id, and one of the two is in no view yet."""
        return BucketComm(self._bucket, f"{self._place}/pair/{name}", rank, 2, timeout=timeout, lost=lambda _: lost())

    def disconnect(self, comm: Comm) -> None:
        """Close a comm; the others learn of it from the membership."""
        assert isinstance(comm, BucketComm)
        comm.disconnect()
        self._closed.append(comm)
