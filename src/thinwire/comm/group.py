"""The wire of real runs: a torch.distributed process group, Gloo on CPU or NCCL on GPU."""

from __future__ import annotations

import hashlib
import os
import re
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from thinwire.comm.base import Comm
from thinwire.comm.mailbox.base import Mailbox
from thinwire.comm.roll_call import RollCall
from thinwire.comm.threads import alone
from thinwire.comm.work import Work, nbytes_of
from thinwire.errors import CommError, CommTimeoutError, ConfigError, PeerLostError

T = TypeVar("T")
Group = dist.ProcessGroup | DeviceMesh | None
Handles = list[dist.Work]
_LEAST_CHUNK_BYTES, _MOST_CHUNK_BYTES, _CHUNKS = 1 << 15, 1 << 20, 16
_WIRE_WORDS = re.compile("gloo|connection|peer|timeout|timed out", re.IGNORECASE)


class GroupComm(Comm):
    """One rank's view of a process group.

    On Gloo it opens connections of its own beside the group's. A failed call closes them at once, so that every other
    rank fails too instead of waiting for its deadline; then the survivors answer a roll call on the rendezvous store,
    and the error names who did not. (A rank that is busy elsewhere for seconds more counts as missing.)

    Args:
        group: a process group; the default one when None.
        timeout: how long one wait may last (on NCCL the group's own timeout holds).

    Raises:
        CommError: not all ranks of the group came to make theirs.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float = 60.0) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), timeout=timeout)
        members = dist.get_process_group_ranks(group or _world())
        store = _own_store(members)
        self._roll_call = RollCall(store, members, self.rank)
        self._inflight: dict[int, Handles] = {}
        self._fault: CommError | None = None
        self._group = group or _world()
        self._shared = _Wire(self._group, timed=False)
        backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        self._gloo_devices = {device for device, backend in backends.items() if backend == "gloo"}
        self._chains = 0
        self._own: list[_Wire] = []  # at most one, in a list that can be emptied
        if self._gloo_devices and self.size > 1:
            self._open(store)

    def _open(self, store: Store) -> None:
        start = time.monotonic()
        try:
            self._own.append(_connect(store, self.rank, self.size, self.timeout))
        except RuntimeError as error:
            problem = _first_sentence(error)
        else:
            weakref.finalize(self, self._own.clear)
            return
        raise self._failed("connecting", problem, time.monotonic() - start)

    def _all_reduce_(self, x: Tensor) -> Work[Tensor]:
        return self._start("all_reduce", x, lambda wire: wire.sum(x), lambda: x)

    def _all_reduce_min_(self, x: Tensor) -> Work[Tensor]:
        return self._start("all_reduce_min", x, lambda wire: wire.min(x), lambda: x)

    def _broadcast_(self, x: Tensor, src: int) -> Work[Tensor]:
        if not x.is_contiguous():
            return self._broadcast_(x.contiguous(), src).then(x.copy_)

        def launch(wire: _Wire) -> Handles:
            if wire.timed and self.size > 2 and nbytes_of(x) > _LEAST_CHUNK_BYTES:
                self._chains += 1
                return wire.chain(x, (self.rank - src) % self.size, self.rank, self.size, tag=self._chains)
            return wire.broadcast(x, src)

        return self._start(f"broadcast from rank {src}", x, launch, lambda: x)

    def _all_gather(self, x: Tensor) -> Work[list[Tensor]]:
        flat, rows = x.contiguous().view(-1), list(x.new_empty((self.size, x.numel())))
        return self._start(
            "all_gather", x, lambda wire: wire.all_gather(flat, rows), lambda: [r.view(x.shape) for r in rows]
        )

    def _all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]:
        sent, received = torch.cat(list(xs)), xs[0].new_empty(sum(sizes))
        counts = [x.numel() for x in xs]
        return self._start(
            "all_to_all",
            sent,
            lambda wire: wire.all_to_all(sent, counts, received, list(sizes)),
            lambda: list(received.split(list(sizes))),
        )

    def _send_recv(self, x: Tensor, dst: Sequence[int], src: Sequence[int]) -> Work[list[Tensor]]:
        received = [torch.empty_like(x) for _ in src]
        peers = ", ".join(str(j) for j in sorted({*dst, *src}))
        return self._start(
            f"send_recv with ranks {peers}", x, lambda wire: wire.send_recv(x, dst, received, src), lambda: received
        )

    def duplicate(self) -> Comm:
        """Another view of the group, with Gloo's connections of its own."""
        if torch.device("cpu").type not in self._gloo_devices:
            return super().duplicate()
        return GroupComm(self._group, timeout=self.timeout)

    def _open_mailbox(self, epoch: int, like: Tensor, capacity: int) -> Mailbox:
        from thinwire.comm.mailbox.zeromq import ZeroMqMailbox

        return ZeroMqMailbox(self, epoch, like, capacity)

    def _start(self, operation: str, x: Tensor, launch: Callable[[_Wire], Handles], result: Callable[[], T]) -> Work[T]:
        if self._fault is not None:
            raise self._closed(self._fault)
        timed = x.device.type in self._gloo_devices
        handles, problem = _try_launch(launch, self._own[0] if timed else self._shared)
        if problem:
            raise self._failed(operation, problem, 0.0)
        self._inflight[id(handles)] = handles

        def finish() -> T:
            start = time.monotonic()
            # On NCCL a timeout makes the wait block the host; its own watchdog keeps the deadline instead.
            problem = _try_wait(handles, self.timeout if timed else None)
            self._inflight.pop(id(handles), None)
            if problem or self._fault is not None:
                raise self._failed(operation, problem, time.monotonic() - start)
            return result()

        return Work(finish)

    def _failed(self, operation: str, problem: str, waited: float) -> CommError:
        """Hang up, call the roll, and say what happened; once."""
        if self._fault is not None:
            return self._closed(self._fault)
        late = waited >= 0.95 * self.timeout or "timed out" in problem.lower()
        late, missing = self._roll_call.hold(late, self._hang_up)
        where, who = f"rank {self.rank}, step {self.step}, {operation}", ", ".join(missing)
        be = "is" if len(missing) == 1 else "are"
        if late:
            names = f"; {who} {be} not answering" if missing else ""
            self._fault = CommTimeoutError(f"{where}: no answer within {self.timeout:g} s{names} ({problem})")
        else:
            names = f"{who} {be} lost" if missing else "a connection was closed"
            self._fault = PeerLostError(f"{where}: {names} ({problem})")
        return self._fault

    @staticmethod
    def _closed(fault: CommError) -> CommError:
        return type(fault)(f"these ranks' connections are closed since an earlier failure: {fault}")

    def _hang_up(self) -> None:
        """Close the connections: they end with the last reference to the group and to its handles."""
        for handles in self._inflight.values():
            handles.clear()
        self._inflight.clear()
        self._own.clear()


class _Wire:
    """Torch's calls on one group: the caller's, or connections of our own, which are ours to close."""

    def __init__(self, group: dist.ProcessGroup, *, timed: bool) -> None:
        self._group = group
        self.timed = timed

    def sum(self, x: Tensor) -> Handles:
        return [self._group.allreduce([x])]

    def min(self, x: Tensor) -> Handles:
        options = dist.AllreduceOptions()
        options.reduceOp = cast(dist.ReduceOp, dist.ReduceOp.MIN)
        return [self._group.allreduce([x], options)]

    def chain(self, x: Tensor, place: int, rank: int, size: int, *, tag: int) -> Handles:
        """A broadcast from rank to rank in pieces, so that nobody sends the vector twice.

        Gloo's own is a tree whose root sends it as often as 2 goes into `size` by doubling. Whoever is in the middle
        passes pieces on while it waits for them: ranks must wait for their broadcasts in the same order.
        """
        nbytes = min(_MOST_CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, nbytes_of(x) // _CHUNKS))
        pieces = list(x.view(-1).split(nbytes // x.element_size()))
        before, after = (rank - 1) % size, (rank + 1) % size
        if place == 0:
            return [self._group.send([piece], after, tag) for piece in pieces]
        received = [self._group.recv([piece], before, tag) for piece in pieces]
        if place == size - 1:
            return received
        sent: Handles = []
        relays = [
            _Relay(work, piece, self._group, after, tag, sent) for work, piece in zip(received, pieces, strict=True)
        ]
        return [*cast(Handles, relays), cast(dist.Work, _All(sent))]

    def broadcast(self, x: Tensor, src: int) -> Handles:
        options = dist.BroadcastOptions()
        options.rootRank = src
        return [self._group.broadcast([x], options)]

    def all_gather(self, x: Tensor, rows: list[Tensor]) -> Handles:
        return [self._group.allgather([rows], [x])]

    def all_to_all(self, sent: Tensor, counts: list[int], received: Tensor, sizes: list[int]) -> Handles:
        return [self._group.alltoall_base(received, sent, sizes, counts)]

    def send_recv(self, x: Tensor, dst: Sequence[int], received: list[Tensor], src: Sequence[int]) -> Handles:
        pairs = list(zip(src, received, strict=True))
        if self.timed:
            # Receives first: a send that meets no receive waits for it, which doubles the time of mutual exchanges.
            receives = [self._group.recv([y], j, 0) for j, y in pairs]
            return [*receives, *(self._group.send([x], j, 0) for j in dst)]
        sends = [dist.P2POp(dist.isend, x, group=self._group, group_peer=j) for j in dst]
        receives = [dist.P2POp(dist.irecv, y, group=self._group, group_peer=j) for j, y in pairs]
        return list(dist.batch_isend_irecv(sends + receives))


@dataclass
class _Relay:
    """A piece that is sent on as soon as it has come and is waited for."""

    received: dist.Work
    piece: Tensor
    group: dist.ProcessGroup
    after: int
    tag: int
    sent: Handles

    def wait(self, timeout: timedelta) -> None:
        self.received.wait(timeout)
        self.sent.append(self.group.send([self.piece], self.after, self.tag))


@dataclass
class _All:
    """Pieces that are on their way."""

    sent: Handles

    def wait(self, timeout: timedelta) -> None:
        while self.sent:
            self.sent.pop(0).wait(timeout)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "the default group exists: its rank was asked for"
    return world


def _connect(store: Store, rank: int, size: int, timeout: float) -> _Wire:
    """New connections among the same ranks, with a deadline that no other user of their group will meet."""
    group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
    # A backend has the calls of a group, which torch's stubs do not tell.
    return _Wire(cast(dist.ProcessGroup, group), timed=True)


def _own_store(members: Sequence[int]) -> Store:
    """A part of the rendezvous store for one group's connections, new at every call; all members call equally often."""
    store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    name = f"thinwire/{hashlib.sha256(repr(list(members)).encode()).hexdigest()[:16]}"
    try:
        calls = store.add(f"{name}/calls/{dist.get_rank()}", 1)
    except RuntimeError as error:
        raise PeerLostError(f"the rendezvous store is gone, and the process that hosts it ({error})") from error
    return PrefixStore(f"{name}/{calls}", store)


def _try_launch(launch: Callable[[_Wire], Handles], wire: _Wire) -> tuple[Handles, str]:
    """The handles of a call, or what went wrong, in words."""
    try:
        return launch(wire), ""
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not _WIRE_WORDS.search(str(error)):
            raise
        return [], _first_sentence(error)


def _try_wait(handles: Handles, seconds: float | None) -> str:
    """Wait for all handles; what went wrong, in words (a traceback would keep handle and group alive)."""
    try:
        while handles:
            handle = handles.pop(0)
            handle.wait() if seconds is None else handle.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        if "Invalid scalar type" in str(error):
            raise  # no wire carries this dtype
        handles.clear()
        return _first_sentence(error)
    return ""


def _first_sentence(error: RuntimeError) -> str:
    """What a wire says, without its place in the src and its advice."""
    line = re.sub(r"^\[[^]]*\.cc:\d+\] ", "", str(error).partition("\n")[0])
    return line.partition(". ")[0][:200]


def comm_for(group: Group = None, *, timeout: float = 60.0) -> Comm:
    """The comm of a process group, of a one-dimensional `DeviceMesh`, or of a world of one.

    Args:
        group: None is the default group where one exists, and one worker alone where none does.
        timeout: how long one wait may last.

    Raises:
        ConfigError: several workers were started but no process group exists, or the mesh has several dimensions.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ConfigError(f"a mesh of shape {tuple(group.shape)}: name one dimension, as in mesh['replicate']")
        group = group.get_group()
    if group is not None or dist.is_initialized():
        return GroupComm(group, timeout=timeout)
    workers = int(os.environ.get("WORLD_SIZE", "1"))
    if workers > 1:
        raise ConfigError(
            f"WORLD_SIZE={workers} but no process group: call torch.distributed.init_process_group() before attach"
        )
    return alone()


__all__ = ["Group", "GroupComm", "comm_for"]
