# SPDX-License-Identifier: Apache-2.0
"""The comm of real runs, over a torch.distributed process group: Gloo on CPU or NCCL on GPU."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import re
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from thinwire.core.comm.base import DIRECT_GATHER_BYTES, Comm, places
from thinwire.core.comm.forks import keep_forever, protect
from thinwire.core.comm.liveness import Processes, State, own_row
from thinwire.core.comm.mailbox.base import Mailbox
from thinwire.core.comm.rendezvous import (
    init_process_group,
    start_of_ranks,
    started_by_torchrun,
    store_outlives_workers,
)
from thinwire.core.comm.roll_call import Failure, Findings, RollCall, within
from thinwire.core.comm.runtime import complete
from thinwire.core.comm.send_times import SendTimes
from thinwire.core.comm.threads import single_worker
from thinwire.core.comm.work import Work
from thinwire.core.kernels.decisions import host_copy_later, to_device
from thinwire.core.torch_internals import default_store, process_groups, sequence_number
from thinwire.errors import CommTimeoutError, ConfigError, MismatchError, PeerLostError, ThinwireError, error_named

T = TypeVar("T")
Group = dist.ProcessGroup | DeviceMesh | None
Handles = list[dist.Work]
_TAGS = 1 << 13
_SIZES = 131_071  # a prime; times `_TAGS` it is less than 2**30
_LOGGER = logging.getLogger("thinwire")
_WAITED = 0.05  # a fraction of the timeout; a rank that has waited for less time was late
_LATE_SECONDS = 1.0  # after a timeout, so that a rank that waits for others can report which ones
_ENDED_SECONDS = 0.05  # for the kernel to report the end of a process whose connections are closed
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES, _CHUNKS = 1 << 15, 1 << 20, 16
# RuntimeErrors of torch that report a network failure; all others are mistakes in the call.
_NETWORK_ERROR = re.compile("gloo|connection|peer|timeout|timed out", re.IGNORECASE)


class GroupComm(Comm):
    """One rank's view of a process group.

    On Gloo it opens its own connections, separate from the group's. A failed call closes them at once, so that every
    other rank fails too instead of waiting for its timeout. Then each surviving rank sets a key in the rendezvous
    store, and the error names the ranks that did not. (A rank that is busy for several seconds counts as missing.)

    Ranks that make different collective calls, or use different sizes, may get wrong sums or end in Gloo's abort. Set
    TORCH_DISTRIBUTED_DEBUG=DETAIL to check every call first and to name the rank that differs.

    Args:
        group: a process group; None is the default one.
        timeout: how long one wait may last, in seconds; on NCCL the group's own timeout applies.

    Raises:
        ConfigError: this rank is not in the group.
        CommError: not all ranks of the group create their comm within the timeout, or the rendezvous store does not
            answer.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from thinwire import GroupComm
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> comm = GroupComm(timeout=10)
        >>> comm.all_reduce_(torch.ones(2)).wait().tolist(), comm.size
        ([1.0, 1.0], 1)
        >>> dist.destroy_process_group()
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float = 60.0) -> None:
        if dist.get_rank(group) < 0:
            raise _not_in_group()
        super().__init__(dist.get_rank(group), dist.get_world_size(group), timeout=timeout)
        members = dist.get_process_group_ranks(group or _world())
        self._group = group or _world()
        self._shared = _Connections(self._group, timed=False)
        backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        if "cpu" not in backends:
            self.check_device = torch.device(next(iter(backends)))
        devices = {device for device, backend in backends.items() if backend == "gloo"}
        self._connect(_own_store(members, timeout), members, devices)

    def _connect(self, store: Store, members: Sequence[int], gloo_devices: set[str]) -> None:
        """Open this comm's own connections if the group has Gloo."""
        self._roll_call = RollCall(store, members, self.rank)
        self._send_times = SendTimes()
        self._inflight: dict[int, Handles] = {}
        self._fault: ThinwireError | None = None
        self._launcher: _Launcher | None = None
        self._arrived: Callable[[], None] | None = None
        self._gloo_devices = gloo_devices | {"cpu"} if gloo_devices else gloo_devices
        self._tag = 0
        self.checks_calls = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"  # like torch's own groups
        # At most one entry: connections close with their last reference, so one call must be able to drop it.
        self._own: list[_Connections] = []
        self._finalizer = weakref.finalize(self, _let_go, self._own, self._inflight)
        protect(self)
        if self._gloo_devices and self.size > 1:
            start = time.monotonic()
            try:
                limit = timedelta(seconds=self.timeout)
                # Torch's own timeout does not apply if the process that hosts the store has stopped.
                backend = self._connected(lambda: dist.ProcessGroupGloo(store, self.rank, self.size, limit))
                # A backend has the methods of a group, but torch's stubs do not list them.
                self._own.append(_Connections(cast(dist.ProcessGroup, backend), timed=True))
                problem = None
            except RuntimeError as error:
                problem = first_sentence(error)
            except TimeoutError:
                problem = "timed out"
            # Raised outside the handler: a traceback would keep the half-opened group alive.
            if problem is not None:
                raise self._failed("connecting", problem, time.monotonic() - start)
            self._roll_call.processes = Processes(self._gather_rows(own_row()), self.rank)

    def _connected(self, connect: Callable[[], T]) -> T:
        """Return the group after all its ranks have connected."""
        return within(self.timeout, connect)

    def _gather_rows(self, row: bytes) -> list[bytes]:
        """All-gather a few bytes as a part of connecting."""
        own = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        rows = list(own.new_empty((self.size, own.numel())))
        self._start("connecting", own, lambda group: group.all_gather(own, rows), lambda: None).wait()
        return [bytes(each.tolist()) for each in rows]

    # Over Gloo a tensor of a GPU goes through pinned host memory. Gloo's own calls on GPUs do so too, but some send
    # before they receive; see `exchange`. The copy to the host is asynchronous: a thread waits for it and launches the
    # call, so the training thread waits in the call's `wait` only.

    def _through_host(self, x: Tensor) -> bool:
        return x.device.type != "cpu" and x.device.type in self._gloo_devices

    def _on_host(self, x: Tensor) -> Tensor:
        """Return a contiguous copy in host memory, whose arrival the next call awaits."""
        x, self._arrived = host_copy_later(x.contiguous())
        return x

    def _all_reduce_(self, x: Tensor) -> Work[Tensor]:
        if self._through_host(x):
            return self._all_reduce_(self._on_host(x)).then(lambda found: copied_back(x, found))
        return self._start("all_reduce", x, lambda group: group.all_reduce(x), lambda: x)

    def _all_reduce_min_(self, x: Tensor) -> Work[Tensor]:
        if self._through_host(x):
            return self._all_reduce_min_(self._on_host(x)).then(lambda found: copied_back(x, found))
        return self._start("all_reduce_min", x, lambda group: group.all_reduce_min(x), lambda: x)

    def _broadcast_(self, x: Tensor, src: int) -> Work[Tensor]:
        if self._through_host(x):
            return self._broadcast_(self._on_host(x), src).then(lambda found: copied_back(x, found))
        if not x.is_contiguous():  # chunks are views of the flat vector
            return self._broadcast_(x.contiguous(), src).then(x.copy_)

        def launch(group: _Connections) -> Handles:
            chained = self.size > 2 and x.nbytes > _MIN_CHUNK_BYTES
            if group.timed and chained:
                position = (self.rank - src) % self.size
                return group.chain_broadcast(x, position, self.rank, self.size, tag=self._next_tag())
            return group.broadcast(x, src)

        return self._start(f"broadcast from rank {src}", x, launch, lambda: x)

    def slowest_send(self) -> tuple[float, int, int]:
        """Return how long this process's busiest connection was busy since the last call."""
        return self._send_times.since_last()

    def _all_gather(self, x: Tensor) -> Work[list[Tensor]]:
        if self._through_host(x):
            return self._all_gather(self._on_host(x)).then(lambda found: _moved(found, x.device))
        flat, rows = x.contiguous().view(-1), list(x.new_empty((self.size, x.numel())))

        def launch(group: _Connections) -> Handles:
            direct = self.size == 2 or x.nbytes <= DIRECT_GATHER_BYTES
            if group.timed and direct:
                # Gloo's ring needs a hop for each rank, and each rank sends before it receives; see `exchange`.
                rows[self.rank].copy_(flat)
                return group.exchange([flat] * self.size, rows, self.rank, tag=self._next_tag())
            return group.all_gather(flat, rows)

        return self._start("all_gather", x, launch, lambda: [r.view(x.shape) for r in rows])

    def _all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]:
        if self._through_host(xs[0]):
            device, flat = xs[0].device, self._on_host(torch.cat(list(xs)))
            parts = flat.split([x.numel() for x in xs])
            return self._all_to_all(parts, sizes).then(lambda found: _moved(found, device))
        parts, received = [x.contiguous() for x in xs], xs[0].new_empty(sum(sizes))

        def launch(group: _Connections) -> Handles:
            if not group.timed:
                counts = [part.numel() for part in parts]
                return group.all_to_all(torch.cat(parts), counts, received, list(sizes))
            into = received.split(list(sizes))
            into[self.rank].copy_(parts[self.rank])
            return group.exchange(parts, into, self.rank, tag=self._next_tag())

        return self._start("all_to_all", received, launch, lambda: list(received.split(list(sizes))))

    def _next_tag(self) -> int:
        """Return a tag for one collective call, so that messages of concurrent calls are not mixed up."""
        # Odd, since the tags of `send_recv` are even.
        self._tag = (self._tag + 2) % _TAGS
        return self._tag + 1

    def _send_recv(self, x: Tensor, dst: Sequence[int], src: Sequence[int]) -> Work[list[Tensor]]:
        if self._through_host(x):
            # Gloo itself would pass the address to the network, and an address in GPU memory crashes the process.
            return self._send_recv(self._on_host(x), dst, src).then(lambda found: _moved(found, x.device))
        received = [torch.empty_like(x) for _ in src]
        peers = ", ".join(str(j) for j in sorted({*dst, *src}))
        # Messages of different steps never match, so that the wait for a rank out of step fails and names it.
        tag = 2 * self.step % _TAGS if self.in_step else 0
        return self._start(
            f"send_recv with ranks {peers}",
            x,
            lambda group: group.send_recv(x, dst, received, src, tag=tag),
            lambda: received,
        )

    def disconnect(self) -> None:
        """Close the connections that this comm has opened, and its mailboxes; later calls raise an error."""
        if self._fault is not None:
            return
        self._fault = ConfigError(f"{self.name(self.rank)}: this comm was disconnected. Attach the model again")
        for owner in list(self._mailboxes):
            self.close_mailbox(owner)
        self._close_connections()

    def after_fork(self) -> None:
        """Make this comm unusable in a fork; the parent's connections stay open."""
        self._finalizer.detach()
        # Gloo's threads do not exist here, and its destructors would wait for them.
        keep_forever([*self._own, *(handle for handles in self._inflight.values() for handle in handles)])
        self._fault = self._fault or ConfigError(
            f"process {os.getpid()} is a fork of {self.name(self.rank)}: only the process that attached the model can "
            "communicate. Train, evaluate and save there"
        )

    def _open_mailbox(self, epoch: int, like: Tensor, capacity: int) -> Mailbox:
        from thinwire.core.comm.mailbox.zeromq import ZeroMqMailbox  # optional dependency

        return ZeroMqMailbox(self, epoch, like, capacity)

    def _start(
        self, operation: str, x: Tensor, launch: Callable[[_Connections], Handles], result: Callable[[], T]
    ) -> Work[T]:
        if self._fault is not None:
            raise self._closed(self._fault)
        if self.calling:
            operation = self.calling
        timed = x.device.type in self._gloo_devices
        handles: Handles = []

        def begin() -> None:
            handles.extend(launch(self._own[0] if timed else self._shared))
            if self._fault is not None:
                handles.clear()  # closed meanwhile: they would keep the connections open

        problem, begun = "", _no_problem
        try:
            begun = self._begin(begin)
        except RuntimeError as error:
            problem = network_problem(error)
        # Raised outside the handler: a traceback would keep the group alive, and its connections open.
        if problem:
            raise self._failed(operation, problem, 0.0)
        # The same list as in `finish`, so that `_close_connections` can empty it.
        self._inflight[id(handles)] = handles

        def finish() -> T:
            start = time.monotonic()
            # On NCCL a wait with a timeout would block the host; NCCL's own watchdog ends the call instead.
            problem = begun() or self._wait_for(handles, self.timeout if timed else None)
            self._inflight.pop(id(handles), None)
            if problem or self._fault is not None:
                raise self._failed(operation, problem, time.monotonic() - start)
            return result()

        return Work(finish)

    def _begin(self, launch: Callable[[], None]) -> Callable[[], str]:
        """Launch a call, now or later; the result waits until it is launched, and returns the problem as text."""
        arrived, self._arrived = self._arrived, None
        if self._launcher is None:
            if arrived is None:
                launch()
                return _no_problem
            self._launcher = _Launcher(self.runtime.start_thread)
            weakref.finalize(self, self._launcher.end)
        # From here on all calls, so that their order stays the same on all workers.
        return self._launcher.launch(arrived, launch, self.timeout)

    def _wait_for(self, handles: Handles, seconds: float | None) -> str:
        """Wait for all handles; return the problem as text, empty if there is none."""
        return try_wait(handles, seconds)

    def raise_on_all(self, error: ThinwireError) -> NoReturn:
        """Raise an error on this rank and in the calls of all others."""
        if self.size == 1 or self._fault is not None:
            raise error
        own = Failure("error", self.rank, self.step, error=type(error).__name__, text=str(error))
        _LOGGER.error("%s", error)
        found = self._roll_call.run(own, self._close_connections)
        self._fault = error if found.first == own else self._fault_of(found, "raise_on_all", "")
        raise self._fault from (None if self._fault is error else error)

    def failure(self, call: str, problem: str, *, late: bool, closed: bool = False) -> ThinwireError:
        """Find the first failure of any rank, and close the connections; later calls repeat the error."""
        if self._fault is None and closed and not self._roll_call.has_begun():
            return PeerLostError(f"{self.name(self.rank)}, step {self.step}, {call}: {problem}")
        return self._failed(call, problem, self.timeout if late else 0.0)

    def count_other_calls(self) -> int:
        """Count the calls of torch's process groups with two or more of these ranks."""
        mine = set(dist.get_process_group_ranks(self._group))
        groups = [*process_groups(), self._group]
        count = 0
        for group in {id(group): group for group in groups}.values():
            # The table holds a number for groups that this rank is not a member of.
            if isinstance(group, dist.ProcessGroup) and len(mine.intersection(dist.get_process_group_ranks(group))) > 1:
                with suppress(RuntimeError):  # a backend that does not count
                    count += sequence_number(group)
        return count

    def name(self, rank: int) -> str:
        """Return a rank for an error message, with its rank in the job if that differs."""
        return self._roll_call.name(rank)

    @property
    def ranks_key(self) -> object:
        """Return the process group."""
        return self._group

    @property
    def wires_key(self) -> object:
        """Return the process group on NCCL, and this comm if it has its own connections."""
        return self if self._gloo_devices else self._group

    def has_failed(self) -> bool:
        """Return True if the connections are closed."""
        return self._fault is not None

    def has_ended(self, rank: int) -> bool:
        """Return True if a rank on this machine has ended."""
        return self._roll_call.processes.state(rank) is State.ENDED

    def _failed(self, operation: str, problem: str, waited: float) -> ThinwireError:
        """Close the connections, find the missing ranks, and make the error; later calls repeat the first error."""
        if self._fault is not None:
            return self._closed(self._fault)
        # Gloo's text does not always mention a timeout, so the waiting time is checked too.
        late = waited >= 0.95 * self.timeout or "timed out" in problem.lower()
        processes = self._roll_call.processes
        gone = processes.in_state(State.STOPPED, State.ENDED) if late else processes.ended(within=_ENDED_SECONDS)
        own = Failure("late" if late else "lost", self.rank, self.step, operation, waited, gone)

        def report(found: Findings) -> None:
            # Logged before the roll call: a launcher such as torchrun may end this process soon.
            _LOGGER.error("%s", self._fault_of(found, operation, problem))

        self._fault = self._fault_of(self._roll_call.run(own, self._close_connections, report), operation, problem)
        return self._fault

    def _fault_of(self, found: Findings, operation: str, problem: str) -> ThinwireError:
        """Make the error for the findings of the roll call."""
        if found.first.cause == "error":
            return error_named(found.first.error, found.first.text)
        if (mismatch := self._out_of_step(found)) is not None:
            return mismatch
        where, who = f"{self.name(self.rank)}, step {self.step}, {operation}", self._roll_call.names(found.missing)
        be, problem = "is" if len(found.missing) == 1 else "are", f" ({problem})" if problem else ""
        if found.first.cause == "late":
            names = f"; {who} {be} not answering" if found.missing else ""
            return CommTimeoutError(f"{where}: no answer within {self.timeout:g} s{names}{problem}")
        if not found.missing:
            return PeerLostError(f"{where}: a connection was closed{problem}")
        if all(self._roll_call.processes.state(rank) is State.RUNNING for rank in found.missing):
            return PeerLostError(f"{where}: a connection was closed; {who} {be} not answering{problem}")
        ended = f"; {self._roll_call.names(found.ended)} ended too" if found.ended else ""
        return PeerLostError(f"{where}: {who} {be} lost{ended}{problem}")

    def _out_of_step(self, found: Findings) -> MismatchError | None:
        """Make the error for ranks that waited for each other in different calls, if all of them did."""
        answers = [found.answers[rank] for rank in sorted(found.answers)]
        if found.first.cause != "late" or len(answers) < self.size:
            return None
        # A rank that has hardly waited was late. Neighbors of a late rank may be some steps apart.
        waited = all(answer.seconds >= _WAITED * self.timeout for answer in answers)
        kinds = {answer.call.partition(" with ")[0] for answer in answers}
        if not waited or len({(answer.call.partition(" with ")[0], answer.step) for answer in answers}) == 1:
            return None
        if kinds == {"send_recv"}:
            return None
        found_at = places([f"{answer.call} at step {answer.step}" for answer in answers], self.names)
        return MismatchError(
            f"ranks are out of step: {found_at}; all ranks must make the same calls after the same steps (no answer "
            f"within {self.timeout:g} s)"
        )

    @staticmethod
    def _closed(fault: ThinwireError) -> ThinwireError:
        if isinstance(fault, ConfigError):  # no failure: the comm was disconnected, or this process is a fork
            return fault
        return type(fault)(f"the connections are closed after an earlier failure: {fault}")

    def _close_connections(self) -> None:
        """Drop the last references to the group and to its handles, which closes the connections."""
        if self._launcher is not None:
            self._launcher.end()
        for handles in self._inflight.values():
            handles.clear()
        self._inflight.clear()
        self._own.clear()
        for box in list(self._mailboxes.values()):
            box.tell_failure()


class _Connections:
    """Torch's calls on one group: the caller's, or this comm's own, which it may close.

    Attributes:
        timed: whether waits accept a timeout, as on Gloo.
    """

    def __init__(self, group: dist.ProcessGroup, *, timed: bool) -> None:
        self._group = group
        self.timed = timed

    def all_reduce(self, x: Tensor) -> Handles:
        return [self._group.allreduce([x])]

    def all_reduce_min(self, x: Tensor) -> Handles:
        options = dist.AllreduceOptions()
        options.reduceOp = cast(dist.ReduceOp, dist.ReduceOp.MIN)
        return [self._group.allreduce([x], options)]

    def chain_broadcast(self, x: Tensor, position: int, rank: int, size: int, *, tag: int) -> Handles:
        """Broadcast along a chain of ranks, in chunks, so that no rank sends the vector twice.

        Gloo's own broadcast is a tree whose root sends the vector log2(size) times. Ranks in the middle of the chain
        forward chunks while they wait for them, so all ranks must wait for their broadcasts in the same order.
        """
        tag, nbytes = _of_size(tag, x), min(_MAX_CHUNK_BYTES, max(_MIN_CHUNK_BYTES, x.nbytes // _CHUNKS))
        chunks = list(x.view(-1).split(nbytes // x.element_size()))
        before, after = (rank - 1) % size, (rank + 1) % size
        if position == 0:
            return [self._group.send([chunk], after, tag) for chunk in chunks]
        received = [self._group.recv([chunk], before, tag) for chunk in chunks]
        if position == size - 1:
            return received
        sent: Handles = []
        forwards = [
            _Forward(work, chunk, self._group, after, tag, sent) for work, chunk in zip(received, chunks, strict=True)
        ]
        return [*cast(Handles, forwards), cast(dist.Work, _All(sent))]

    def broadcast(self, x: Tensor, src: int) -> Handles:
        options = dist.BroadcastOptions()
        options.rootRank = src
        return [self._group.broadcast([x], options)]

    def all_gather(self, x: Tensor, rows: list[Tensor]) -> Handles:
        return [self._group.allgather([rows], [x])]

    def exchange(self, parts: Sequence[Tensor], into: Sequence[Tensor], rank: int, *, tag: int) -> Handles:
        """Run an all-to-all on Gloo: send a part to each other rank, and receive one from each.

        Gloo's own all-to-all sends before it receives. The notice that a rank is ready to receive is then queued behind
        its data, so that the two directions of a link carry data one after the other.
        """
        # Ordered by when the others send to this rank. Empty parts are not sent.
        others = [(rank + offset) % len(parts) for offset in range(1, len(parts))]
        receives = [self._group.recv([into[j]], j, _of_size(tag, into[j])) for j in reversed(others) if into[j].numel()]
        sends = [self._group.send([parts[j]], j, _of_size(tag, parts[j])) for j in others if parts[j].numel()]
        return [*receives, *sends]

    def all_to_all(self, sent: Tensor, counts: list[int], received: Tensor, sizes: list[int]) -> Handles:
        return [self._group.alltoall_base(received, sent, sizes, counts)]

    def send_recv(
        self, x: Tensor, dst: Sequence[int], received: list[Tensor], src: Sequence[int], *, tag: int
    ) -> Handles:
        pairs = list(zip(src, received, strict=True))
        if self.timed:
            # Receives first: a send without a matching receive waits, which doubles the time of mutual exchanges.
            tag = _of_size(tag, x)
            receives = [self._group.recv([y], j, tag) for j, y in pairs]
            return [*receives, *(self._group.send([x], j, tag) for j in dst)]
        sends = [dist.P2POp(dist.isend, x, group=self._group, group_peer=j) for j in dst]
        receives = [dist.P2POp(dist.irecv, y, group=self._group, group_peer=j) for j, y in pairs]
        return list(dist.batch_isend_irecv(sends + receives))


class _Launcher:
    """Launches calls in order on a thread, each after its message has arrived in host memory."""

    def __init__(self, start_thread: Callable[[Callable[[], None]], object]) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        start_thread(self._run)

    def launch(
        self, arrived: Callable[[], None] | None, launch: Callable[[], None], seconds: float
    ) -> Callable[[], str]:
        """Add a call; the result waits until it is launched, and returns the problem as text."""
        launched: Future[None] = Future()

        def run() -> None:
            try:
                if arrived is not None:
                    arrived()
                launch()
            except Exception as error:
                raise error.with_traceback(None) from None  # its frames would keep the connections open

        def begun() -> str:
            try:
                error = launched.exception(seconds)
            except TimeoutError:
                return "timed out before the message had arrived from the GPU"
            if error is None:
                return ""
            if isinstance(error, IndexError):
                return "the connections were closed"
            if isinstance(error, RuntimeError):
                return network_problem(error)
            raise error

        self._calls.put(partial(complete, launched, run))
        return begun

    def end(self) -> None:
        """End the thread after the calls that it has got."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call


def copied_back(x: Tensor, found: Tensor) -> Tensor:
    return x.copy_(found, non_blocking=x.is_cuda)


def _moved(found: list[Tensor], device: torch.device) -> list[Tensor]:
    return [to_device(x, device) for x in found]


def _of_size(tag: int, x: Tensor) -> int:
    """Return a tag for messages of this size: Gloo aborts if a message is longer than the receive buffer."""
    # With different tags, the wait for a rank that makes another call fails and names it.
    return tag + _TAGS * (x.nbytes % _SIZES)


@dataclass
class _Forward:
    """A chunk that is forwarded to the next rank after the wait for its arrival."""

    received: dist.Work
    chunk: Tensor
    group: dist.ProcessGroup
    after: int
    tag: int
    sent: Handles

    def wait(self, timeout: timedelta) -> None:
        self.received.wait(timeout)
        self.sent.append(self.group.send([self.chunk], self.after, self.tag))


@dataclass
class _All:
    """The forwarded chunks; their sends must be awaited too."""

    sent: Handles

    def wait(self, timeout: timedelta) -> None:
        while self.sent:
            self.sent.pop(0).wait(timeout)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "the default group exists, since its rank is known"
    return world


_let_go_of: list[_Connections] = []


def _let_go(own: list[_Connections], inflight: dict[int, Handles]) -> None:
    """Close the connections of an unused comm, unless messages are in flight on them.

    Other ranks may still wait for messages of a model that was dropped without `detach()`. Closing would make their
    waits fail, and would itself wait for them. Such connections stay open until the process ends.
    """
    if inflight:
        _let_go_of.extend(own)
    own.clear()


def _not_in_group() -> ConfigError:
    return ConfigError(
        f"group: rank {dist.get_rank()} of the job is not in the group. Call attach on the group's ranks only"
    )


_starts: dict[str, str] = {}  # the name of this start of the ranks, by the name of the group


def _own_store(members: Sequence[int], timeout: float) -> Store:
    """Return a new part of the rendezvous store for one comm; all members must call equally often."""
    name = f"thinwire/{hashlib.sha256(repr(list(members)).encode()).hexdigest()[:16]}"
    if store_outlives_workers():
        if name not in _starts:
            store, rank = PrefixStore(f"{name}/starts", _store()), list(members).index(dist.get_rank())
            _starts[name] = _ask_store(lambda: start_of_ranks(store, rank, len(members), timeout), timeout)
        name = f"{name}/{_starts[name]}"
    # A store keeps its keys, so a second comm over the same ranks needs keys of its own.
    return PrefixStore(f"{name}/{count_in_store(f'{name}/calls/{dist.get_rank()}', timeout)}", _store())


def count_in_store(key: str, timeout: float) -> int:
    """Add one to a number in the default group's rendezvous store, and return it.

    PyTorch's `Store.add` waits forever if the process that hosts the store has stopped.

    Raises:
        CommTimeoutError: the store did not answer within `timeout` seconds.
        PeerLostError: the process that hosts the store has ended.
    """
    return _ask_store(lambda: _store().add(key, 1), timeout)


def _ask_store(ask: Callable[[], T], timeout: float) -> T:
    host = "the launcher" if store_outlives_workers() else "rank 0"
    where = f"rank {dist.get_rank()}, before step 0"
    try:
        return within(timeout + _LATE_SECONDS, ask)
    except TimeoutError as error:
        if str(error):
            raise CommTimeoutError(f"{where}: no answer within {timeout:g} s; {error}") from None
        problem = f"no answer within {timeout:g} s from the rendezvous store; {host}, which hosts it, is not answering"
        raise CommTimeoutError(f"{where}: {problem}") from None
    except RuntimeError as error:
        raise PeerLostError(
            f"{where}: the rendezvous store is gone, and so is {host}, which hosted it ({error})"
        ) from error


def _store() -> Store:
    return default_store()


def try_wait(handles: Handles, seconds: float | None) -> str:
    """Wait for all handles; return the problem as text, since a traceback would keep the group alive."""
    try:
        while handles:
            handle = handles.pop(0)
            handle.wait() if seconds is None else handle.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        if "Invalid scalar type" in str(error):
            raise  # a mistake in the call: the backend does not support this dtype
        handles.clear()
        return first_sentence(error)
    return ""


def network_problem(error: RuntimeError) -> str:
    """Return the text of a network failure; raise any other error, which is a mistake in the call."""
    if not isinstance(error, dist.DistError) and not _NETWORK_ERROR.search(str(error)):
        raise error
    return first_sentence(error)


def _no_problem() -> str:
    return ""


def first_sentence(error: RuntimeError) -> str:
    """Return the first sentence of a backend's error, without its source location."""
    line = re.sub(r"^\[[^]]*\.cc:\d+\] ", "", str(error).partition("\n")[0])
    return line.partition(". ")[0][:200]


def comm_for(group: Group = None, *, timeout: float = 60.0, device: torch.device | None = None) -> Comm:
    """Make the comm of a process group, of a one-dimensional `DeviceMesh`, or of a single worker.

    Args:
        group: None is the default group. If there is none, and torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR,
            MASTER_PORT) name several workers, it is created from them and destroyed when the process ends. Without
            these variables the comm has a single worker.
        timeout: how long one wait may last, in seconds; also how long the other workers may take to connect.
        device: the device of the tensors to send; a group that is created here uses NCCL for CUDA, otherwise Gloo.

    Raises:
        ConfigError: several workers were started without torchrun's variables, the mesh has several dimensions, or this
            rank is not in the group.
        CommTimeoutError: not all workers connected in time.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ConfigError(
                f"the mesh has shape {tuple(group.shape)}: it must have one dimension. Select one, as in "
                "mesh['replicate']"
            )
        if group.get_coordinate() is None:
            raise _not_in_group()
        group = group.get_group()
    if group is None and not dist.is_initialized():
        workers = int(os.environ.get("WORLD_SIZE", "1"))
        if workers <= 1:
            return single_worker()
        if not started_by_torchrun():
            raise ConfigError(
                f"WORLD_SIZE={workers} but no process group exists. Start with torchrun, which sets MASTER_ADDR and "
                "RANK too, or call torch.distributed.init_process_group() before attach"
            )
        init_process_group(device or torch.device("cpu"), timeout)
        atexit.register(_destroy, _world(), os.getpid())
    comm = GroupComm(group, timeout=timeout)
    if device is not None and device.type == comm.check_device.type:
        comm.check_device = device  # NCCL would otherwise use the current GPU, which may be another one
    return comm


def _destroy(made: dist.ProcessGroup, process: int) -> None:
    """Destroy the default group if it is still the one that this process has created."""
    if dist.group.WORLD is made and os.getpid() == process:
        dist.destroy_process_group()


__all__ = ["Group", "GroupComm", "comm_for", "count_in_store"]
