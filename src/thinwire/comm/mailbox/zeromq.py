"""Messages over ZeroMQ: queues, reconnection and one thread of input and output are its; numbers and sums are ours.

Each rank has one socket on which it receives, and one to each rank it has written to. A thread of this process waits on
the former, checks what comes, and hands it over or answers it. Vectors are received without a copy.
"""

from __future__ import annotations

import secrets
import threading
import time
import weakref
import zlib
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.comm.mailbox.address import endpoint, own_address
from thinwire.comm.mailbox.base import Mailbox, Message
from thinwire.comm.mailbox.frame import DamagedError, Header, Kind, bytes_of, dtype_number, parse
from thinwire.comm.work import nbytes_of
from thinwire.errors import CommError, ConfigError, PeerLostError

if TYPE_CHECKING:
    import zmq

_NOTHING = torch.empty(0)
_ROW_BYTES = 96  # of a rank's address, in the messages by which all learn of it
_LISTEN_MILLISECONDS = 100
_LINGER_MILLISECONDS = 1000
_GONE_SECONDS = 1.0  # how long a connection may be away and come back
_HEADROOM_BYTES = 4096


class Sockets:
    """Everything that must be let go of again.

    Attributes:
        inlet: where messages for this rank arrive.
        port: of the inlet.
        lost: since when a rank's connection has been gone, in seconds of `time.monotonic`.
    """

    def __init__(self, address: str, *, largest_bytes: int, queue: int) -> None:
        self._zmq = _library()
        self._context = self._zmq.Context(io_threads=1)
        self._queue = queue
        self._links: dict[int, zmq.Socket[bytes]] = {}
        self._watches: dict[zmq.Socket[bytes], int] = {}
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self.lost: dict[int, float] = {}
        self.inlet = self._open(self._zmq.PULL)
        self.inlet.setsockopt(self._zmq.MAXMSGSIZE, largest_bytes + _HEADROOM_BYTES)
        self.port = self.inlet.bind_to_random_port(endpoint(address, 0).rpartition(":")[0])

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(self._zmq.IPV6, 1)
        socket.set_hwm(self._queue)
        return socket

    @property
    def linked(self) -> list[int]:
        """The ranks that were written to."""
        return list(self._links)

    def link(self, rank: int, address: str) -> None:
        """Connect to a rank, and watch the connection."""
        if rank in self._links or self._stopped.is_set():
            return
        zmq, link = self._zmq, self._open(self._zmq.PUSH)
        watch = link.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        link.connect(address)
        self._links[rank], self._watches[watch] = link, rank

    def send(self, rank: int, parts: Sequence[bytes | memoryview]) -> bool:
        """Put a frame into the queue to a rank; False where it is full, or closed."""
        if self._stopped.is_set():
            return False
        try:
            self._links[rank].send_multipart(parts, flags=self._zmq.NOBLOCK, copy=True)
        except self._zmq.Again:
            return False
        return True

    def listen(self, mailbox: weakref.ref[ZeroMqMailbox]) -> None:
        """Start the thread in which messages come; it ends with the mailbox."""
        self._thread = threading.Thread(target=self._run, args=(mailbox,), daemon=True, name="thinwire-mailbox")
        self._thread.start()

    def _run(self, mailbox: weakref.ref[ZeroMqMailbox]) -> None:
        while not self._stopped.is_set():
            waiting = [self.inlet, *list(self._watches)]
            ready = self._zmq.select(waiting, [], [], _LISTEN_MILLISECONDS / 1000)[0]
            box = mailbox()
            if box is None:
                return
            if self.inlet in ready:
                self._receive(box)
            for watch in ready:
                self._note(watch)
            del box

    def _receive(self, box: ZeroMqMailbox) -> None:
        with suppress(self._zmq.Again):
            while not self._stopped.is_set():
                frames = self.inlet.recv_multipart(flags=self._zmq.NOBLOCK, copy=False)
                box.receive([frame.buffer for frame in frames])

    def _note(self, watch: zmq.Socket[bytes]) -> None:
        rank = self._watches.get(watch)
        if rank is None:
            return
        from zmq.utils.monitor import recv_monitor_message

        event = recv_monitor_message(watch)["event"]
        if event == self._zmq.EVENT_DISCONNECTED:
            self.lost.setdefault(rank, time.monotonic())
        else:
            self.lost.pop(rank, None)

    def shut(self) -> None:
        """Close every socket, after what was sent has had a second to leave."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for rank, link in self._links.items():
            link.disable_monitor()
            link.close(linger=0 if rank in self.lost else _LINGER_MILLISECONDS)
        for watch in self._watches:
            watch.close(linger=0)
        self.inlet.close(linger=0)
        self._context.term()


class ZeroMqMailbox(Mailbox):
    """A mailbox between processes; all ranks of the comm open theirs together.

    Args:
        comm: the ranks, who tell each other their addresses over it.
        epoch: which mailbox of the comm this is.
        like: a vector on the comm's device, as long as the longest message.
        capacity: messages that may be under way on one edge.

    Attributes:
        strangers: frames that were not meant for this mailbox, and were dropped.

    Raises:
        ConfigError: pyzmq is not installed, or the ranks have no common network.
    """

    def __init__(self, comm: Comm, epoch: int, like: Tensor, capacity: int) -> None:
        super().__init__(comm, like, capacity, threading.Condition())
        self.strangers = 0
        self._epoch = epoch
        self._left: set[int] = set()
        # A message takes two parts, and each has an answer that says there is room again.
        self._sockets = Sockets(own_address(), largest_bytes=nbytes_of(like), queue=4 * capacity + 16)
        shut = weakref.finalize(self, self._sockets.shut)
        try:
            self._run, self._addresses = _introduce(comm, self._sockets.port, like.device)
        except Exception:
            shut()
            raise
        self._sockets.listen(weakref.ref(self))

    def close(self) -> None:
        """Say goodbye and close the sockets."""
        with self.changed:
            if self._closed:
                return
            self._closed = True
            for dst in self._sockets.linked:
                self._say(Kind.GOODBYE, dst, 0)
            self.changed.notify_all()
        self._sockets.shut()

    def receive(self, parts: Sequence[memoryview]) -> None:
        """A frame has come, from whomever; called by the thread that listens."""
        try:
            found = parse(parts, run=self._run, epoch=self._epoch, dst=self._rank)
        except DamagedError as error:
            self._fail(CommError(f"rank {self._rank}: {error}; a wire or a program between the ranks changes bytes"))
            return
        if found is None or found[0].src not in self._edges:
            self.strangers += 1
            return
        header, content = found
        if header.kind is Kind.ROOM:
            self._room_was_made(header.src, header.number)
        elif header.kind is Kind.GOODBYE:
            with self.changed:
                self._left.add(header.src)
                self.changed.notify_all()
        else:
            self._deliver(Message(header.src, header.step, header.topic, content), header.number)

    def _carry(self, dst: int, message: Message, number: int) -> None:
        if not self._say(Kind.MESSAGE, dst, number, message):
            raise CommError(f"rank {self._rank}: the queue of messages to rank {dst} is full beyond its capacity")

    def _make_room(self, src: int, taken: int) -> None:
        self._say(Kind.ROOM, src, taken)

    def _say(self, kind: Kind, dst: int, number: int, message: Message | None = None) -> bool:
        content = _NOTHING if message is None else message.content
        data = bytes_of(content)
        header = Header(
            kind=kind,
            dtype=dtype_number(content),
            run=self._run,
            epoch=self._epoch,
            src=self._rank,
            dst=dst,
            topic=0 if message is None else message.topic,
            step=0 if message is None else message.step,
            number=number,
            nbytes=data.nbytes,
            checksum=zlib.crc32(data),
        )
        self._sockets.link(dst, self._addresses[dst])
        return self._sockets.send(dst, [header.pack(), data] if data.nbytes else [header.pack()])

    def _complain(self, src: Sequence[int]) -> None:
        super()._complain(src)
        for rank in src:
            self._sockets.link(rank, self._addresses[rank])
            if rank in self._left:
                raise PeerLostError(f"rank {self._rank}: rank {rank} has closed its mailbox; end training together")
            if time.monotonic() - self._sockets.lost.get(rank, float("inf")) > _GONE_SECONDS:
                raise PeerLostError(
                    f"rank {self._rank}, step {self._comm.step}: rank {rank} is lost (its connection was closed)"
                )


def _introduce(comm: Comm, port: int, device: torch.device) -> tuple[int, list[str]]:
    """The run's secret number, which is rank 0's, and where each rank receives."""
    mine = secrets.token_bytes(8) + endpoint(own_address(), port).encode()
    row = torch.frombuffer(bytearray(mine.ljust(_ROW_BYTES, b"\0")), dtype=torch.uint8)
    rows = [bytes(each.tolist()) for each in comm.all_gather(row.to(device)).wait()]
    addresses = [row[8:].rstrip(b"\0").decode() for row in rows]
    local = [rank for rank, address in enumerate(addresses) if "//127." in address or "//[::1]" in address]
    if 0 < len(local) < len(rows):
        raise ConfigError(
            f"rank {local[0]} is reached at {addresses[local[0]]}, which is its own machine only; set "
            "GLOO_SOCKET_IFNAME to the interface on which the ranks reach each other"
        )
    return int.from_bytes(rows[0][:8], "big"), addresses


def _library() -> ModuleType:
    """ZeroMQ for Python.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import zmq
    except ImportError as error:
        raise ConfigError("messages between processes need pyzmq; pip install 'thinwire[async]'") from error
    return zmq
