# SPDX-License-Identifier: Apache-2.0
"""Messages between processes over ZeroMQ, which queues, reconnects and transfers in a thread of its own.

Each rank has one socket on which it receives, and one for each rank that it has sent to. A thread of this process reads
the former, checks what arrives, and delivers it or calls its handler.

Anyone may reach the port. Connections are therefore authenticated and encrypted (ZeroMQ's CURVE): each mailbox has a
key pair, the ranks exchange their public keys over the comm, and only connections with one of those keys are admitted.
What was recorded earlier is refused, as each connection has keys of its own. Until it is admitted a connection can make
this process hold one part of a message (`PART_BYTES`), for `_HANDSHAKE_MILLISECONDS` at most, and no more than
`max_connections` are open: beside its vectors a mailbox of n ranks holds less than (32 + 4 n) * 0.4 MB.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from thinwire.core.comm.base import Comm
from thinwire.core.comm.forks import protect
from thinwire.core.comm.mailbox.base import Loss, Mailbox, Message
from thinwire.core.comm.mailbox.frame import PART_BYTES, Header, Kind, bytes_of, dtype_number, parse, split
from thinwire.errors import CommError, ConfigError

if TYPE_CHECKING:
    import zmq

_LOGGER = logging.getLogger("thinwire")
_EMPTY = torch.empty(0, dtype=torch.float32, device="cpu")
_SIOCGIFADDR = 0x8915
_KEY_BYTES = 40  # of a public key in ZeroMQ's text form
_ROW_BYTES = 136  # of a rank's key and address, when all ranks exchange them
_POLL_SECONDS = 0.1
_LINGER_MILLISECONDS = 1000
_RECONNECT_SECONDS = 1.0  # how long a connection may be gone before its rank counts as lost
_NOTICE_SECONDS, _DOUBT_SECONDS = 0.02, 0.01  # until what a closed connection means is asked, and asked again
_HEADROOM_BYTES = 4096
_HANDSHAKE_MILLISECONDS = 10_000  # how long a connection may take until it is admitted


def own_address() -> str:
    """This process's address on the network that the ranks share.

    That of the interface in `GLOO_SOCKET_IFNAME`, else of the interface that routes to `MASTER_ADDR`, else the
    loopback's.

    Raises:
        ConfigError: there is no route to `MASTER_ADDR`.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    # `fcntl` is missing on some systems, and an interface may have no IPv4 address; then the route decides.
    with suppress(ImportError, OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        import fcntl

        found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(found[20:24])
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, _, _, _, destination = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(destination)  # of a datagram socket: chooses the route, and sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR={host!r}: there is no route to it ({error}); set GLOO_SOCKET_IFNAME to the interface "
            "on which the ranks reach each other"
        ) from error


def endpoint(address: str, port: int) -> str:
    """An address and a port in ZeroMQ's notation."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def max_connections(ranks: int) -> int:
    """How many connections may be open at a rank's port; each rank needs one, and a second while it reconnects."""
    return 32 + 4 * ranks


class Directory(NamedTuple):
    """How a mailbox's ranks are reached and recognised.

    Attributes:
        run: the secret number of the run, rank 0's.
        addresses: of each rank's receiving socket.
        keys: each rank's public key.
    """

    run: int
    addresses: list[str]
    keys: list[bytes]


class Sockets:
    """The sockets and the receiving thread of one mailbox.

    They are apart from the mailbox so that its finalizer can close them without keeping it alive.

    Attributes:
        receiver: the socket on which messages for this rank arrive.
        port: the receiver's port.
        public_key: by which other ranks recognise this one.
        disconnected: ranks whose connection is gone, with the time of `time.monotonic` since when.
        reached: ranks to which there has been a connection.
        farewells: for each rank connected to, the frame that says that this process ends.
        refused_connections: connections to the port that were closed because they were not a rank's, or too many.
    """

    def __init__(self, address: str, *, ranks: int, queue: int) -> None:
        self._zmq = import_zmq()
        self._context = self._zmq.Context(io_threads=1)
        self._queue = queue
        self._max_connections = max_connections(ranks)
        self._keys: list[bytes] = []
        self._open_connections: set[int] = set()
        self._senders: dict[int, zmq.Socket[bytes]] = {}
        self._monitors: dict[zmq.Socket[bytes], int] = {}
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self.disconnected: dict[int, float] = {}
        self.reached: set[int] = set()
        self.farewells: dict[int, list[bytes | memoryview]] = {}
        self.refused_connections = 0
        # ZeroMQ asks here, before the first byte of a message, whether a connection's key is one of a rank.
        self._admission = self._context.socket(self._zmq.REP)
        self._admission.bind("inproc://zeromq.zap.01")
        self.public_key, self._secret_key = self._zmq.curve_keypair()
        self.receiver = self._open(self._zmq.PULL)
        self.receiver.setsockopt(self._zmq.CURVE_SERVER, 1)
        self.receiver.setsockopt(self._zmq.ZAP_DOMAIN, b"thinwire")
        self.receiver.setsockopt(self._zmq.MAXMSGSIZE, PART_BYTES + _HEADROOM_BYTES)
        self.receiver.setsockopt(self._zmq.HANDSHAKE_IVL, _HANDSHAKE_MILLISECONDS)
        self._acceptances = self.receiver.get_monitor_socket(self._zmq.EVENT_ACCEPTED | self._zmq.EVENT_DISCONNECTED)
        self.port = self.receiver.bind_to_random_port(endpoint(address, 0).rpartition(":")[0])

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        opened = self._context.socket(kind)
        opened.setsockopt(self._zmq.IPV6, 1)
        opened.setsockopt(self._zmq.CURVE_PUBLICKEY, self.public_key)
        opened.setsockopt(self._zmq.CURVE_SECRETKEY, self._secret_key)
        opened.set_hwm(self._queue)
        return opened

    @property
    def connected(self) -> list[int]:
        """The ranks that this one has connected to."""
        return list(self._senders)

    def connect(self, rank: int, address: str) -> None:
        """Connect to a rank, and monitor the connection; does nothing the second time."""
        if rank in self._senders or self._stopped.is_set():
            return
        zmq, sender = self._zmq, self._open(self._zmq.PUSH)
        sender.setsockopt(zmq.CURVE_SERVERKEY, self._keys[rank])
        monitor = sender.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        sender.connect(address)
        self._senders[rank], self._monitors[monitor] = sender, rank

    def send(self, rank: int, parts: Sequence[bytes | memoryview]) -> bool:
        """Queue a frame for a rank; False if the queue is full, or the sockets are closed."""
        if self._stopped.is_set():
            return False
        try:
            # A copy, since the caller may change the vector as soon as `send` returns.
            self._senders[rank].send_multipart(parts, flags=self._zmq.NOBLOCK, copy=True)
        except self._zmq.Again:
            return False
        return True

    def start(self, mailbox: weakref.ref[ZeroMqMailbox], keys: Sequence[bytes]) -> None:
        """Admit connections with these public keys, by rank, and start the receiving thread; it ends with the mailbox.

        Connections that came earlier wait until then.
        """
        self._keys = list(keys)
        self._thread = threading.Thread(target=self._run, args=(mailbox,), daemon=True, name="thinwire-mailbox")
        self._thread.start()

    def _run(self, mailbox: weakref.ref[ZeroMqMailbox]) -> None:
        own, doubtful = [self._acceptances, self._admission, self.receiver], False
        while not self._stopped.is_set():
            # `list` copies in one step: `connect` adds monitors from another thread.
            seconds = _DOUBT_SECONDS if doubtful else _POLL_SECONDS
            ready = self._zmq.select([*own, *list(self._monitors)], [], [], seconds)[0]
            box = mailbox()
            if box is None:
                return
            if self._acceptances in ready:
                self._limit_connections()
            if self._admission in ready:
                self._admit_ranks()
            if self.receiver in ready:
                with suppress(self._zmq.Again):
                    while not self._stopped.is_set():
                        frames = self.receiver.recv_multipart(flags=self._zmq.NOBLOCK, copy=False)
                        box.receive(int(str(frames[0].get("User-Id"))), [frame.buffer for frame in frames])
            for monitor in ready:
                self._read_event(monitor)
            doubtful = box.report_ended(dict(self.disconnected))
            # Without this the thread would hold the mailbox while it waits, and the mailbox could never end.
            del box

    def _limit_connections(self) -> None:
        """Close connections above the limit as soon as they are accepted; ranks among them connect again."""
        from zmq.utils.monitor import recv_monitor_message

        with suppress(self._zmq.Again):
            while True:
                event = recv_monitor_message(self._acceptances, self._zmq.NOBLOCK)
                connection = int(event["value"])
                if event["event"] == self._zmq.EVENT_DISCONNECTED:
                    self._open_connections.discard(connection)
                    continue
                self._open_connections.add(connection)
                if len(self._open_connections) > self._max_connections:
                    self.refused_connections += 1
                    self._shut_down(connection)

    def _shut_down(self, connection: int) -> None:
        """Shut down one of ZeroMQ's connections, which it then closes itself."""
        # ZeroMQ may have closed it meanwhile, and its number may stand for something else by now.
        with suppress(OSError), socket.fromfd(connection, socket.AF_INET, socket.SOCK_STREAM) as duplicate:
            if duplicate.getsockname()[1] == self.port:
                duplicate.shutdown(socket.SHUT_RDWR)

    def _admit_ranks(self) -> None:
        """Answer ZeroMQ whether a connection may be used: its key must be one of the ranks'."""
        from zmq.utils.z85 import encode

        with suppress(self._zmq.Again):
            while True:
                # RFC 27: version, request, domain, address, identity, mechanism, and CURVE's 32 bytes of public key.
                version, request, *_, key = self._admission.recv_multipart(flags=self._zmq.NOBLOCK)
                rank = self._keys.index(encode(key)) if encode(key) in self._keys else None
                self.refused_connections += rank is None
                status, user = (b"400", b"") if rank is None else (b"200", str(rank).encode())
                self._admission.send_multipart([version, request, status, b"", user, b""])

    def _read_event(self, monitor: zmq.Socket[bytes]) -> None:
        rank = self._monitors.get(monitor)
        if rank is None:
            return
        from zmq.utils.monitor import recv_monitor_message

        if recv_monitor_message(monitor)["event"] == self._zmq.EVENT_DISCONNECTED:
            self.disconnected.setdefault(rank, time.monotonic())
        else:
            self.reached.add(rank)
            self.disconnected.pop(rank, None)

    def leave(self) -> None:
        """Tell the other ranks that this process ends in order, and close every socket."""
        for rank, frame in self.farewells.items():
            if rank not in self.disconnected:
                self.send(rank, frame)
        self.close()

    def close(self) -> None:
        """Close every socket; frames that are still queued get a second to leave."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        # The last reference to the mailbox may be dropped in the receiving thread, which cannot join itself.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for rank, sender in self._senders.items():
            sender.disable_monitor()
            sender.close(linger=0 if rank in self.disconnected else _LINGER_MILLISECONDS)
        for monitor in self._monitors:
            monitor.close(linger=0)
        self.receiver.disable_monitor()
        for each in (self._acceptances, self._admission, self.receiver):
            each.close(linger=0)
        self._context.term()


class ZeroMqMailbox(Mailbox):
    """A mailbox between processes; all ranks of the comm open theirs together.

    Args:
        comm: the ranks; they exchange their addresses over it.
        epoch: the number of the mailbox within the comm.
        like: a vector on the comm's device, as long as the longest message.
        capacity: unconsumed messages allowed on one edge.

    Attributes:
        foreign_frames: frames that were not meant for this mailbox, and were dropped.

    Raises:
        ConfigError: pyzmq is not installed or was built without CURVE, or the ranks have no common network.
    """

    def __init__(self, comm: Comm, epoch: int, like: Tensor, capacity: int) -> None:
        super().__init__(comm, like, capacity, threading.Condition())
        self.foreign_frames = 0
        self._epoch = epoch
        self._closed_peers: set[int] = set()
        self._failed_peers: set[int] = set()
        self._ended_peers: set[int] = set()
        # Each message may be followed by an acknowledgement.
        self._sockets = Sockets(own_address(), ranks=comm.size, queue=4 * capacity + 16)
        self._finalizer = weakref.finalize(self, self._sockets.leave)
        protect(self)
        try:
            directory = _exchange_addresses(comm, self._sockets.port, self._sockets.public_key, like.device)
        except Exception:
            self._finalizer()
            raise
        self._run, self._addresses = directory.run, directory.addresses
        self._sockets.start(weakref.ref(self), directory.keys)

    @property
    def refused_connections(self) -> int:
        """Connections to this rank's port that were refused because they were no rank's, or too many."""
        return self._sockets.refused_connections

    def close(self) -> None:
        """Tell the other ranks, and close the sockets."""
        with self.changed:
            if self._closed:
                return
            self._closed = True
            for dst in self._sockets.connected:
                self._send_frame(Kind.CLOSE, dst, 0)
            self.changed.notify_all()
        # Outside the lock, which the receiving thread may need to end.
        self._sockets.close()

    def after_fork(self) -> None:
        """Become closed in a fork of the process that made the sockets, which stay open there."""
        self._finalizer.detach()
        self._closed = True
        self.changed = self._comm.runtime.condition()  # the parent's receiving thread may have held the lock

    def tell_failure(self) -> None:
        """Tell all other ranks, also those that wait for others or for nobody."""
        with self.changed:
            if not self._closed:
                for dst in self._edges:
                    self._send_frame(Kind.FAILURE, dst, 0)

    def receive(self, src: int, parts: Sequence[memoryview]) -> None:
        """Handle a frame of a rank; called by the receiving thread, which no frame may end."""
        try:
            found = parse(parts, run=self._run, epoch=self._epoch, dst=self._rank)
        except Exception as error:
            self._fail(
                CommError(
                    f"{self._name(self._rank)}, from {self._name(src)}: {error}; all ranks must run the same version"
                )
            )
            return
        # Nobody sends in the name of another rank.
        if found is None or found[0].src != src or src == self._rank or not 0 <= src < self._size:
            self.foreign_frames += 1
            return
        header, content = found
        if header.kind is Kind.ACKNOWLEDGEMENT:
            self._on_acknowledgement(header.src, header.number)
        elif header.kind in (Kind.CLOSE, Kind.FAILURE):
            with self.changed:
                (self._closed_peers if header.kind is Kind.CLOSE else self._failed_peers).add(header.src)
                self.changed.notify_all()
        elif header.kind is Kind.LEAVING:
            self._ended_peers.add(header.src)  # and so not to be reported
        else:
            self._deliver(Message(header.src, header.step, header.topic, content), header.number)

    def report_ended(self, disconnected: Mapping[int, float]) -> bool:
        """Log which processes have ended without a word, once each; called by the receiving thread.

        At once, and also where no call needs them: a launcher such as torchrun ends this process a moment later.

        Returns:
            Whether it is not known yet of some rank, and is to be asked again soon.
        """
        doubtful = False
        for rank, since in disconnected.items():
            if rank in self._closed_peers or rank in self._failed_peers or rank in self._ended_peers:
                continue
            # Its last frames may have come just now, and a process counts as ended after its connections are closed.
            recent = since + _NOTICE_SECONDS > time.monotonic()
            doubtful |= recent
            if not recent and not self._closed and self._comm.has_ended(rank):
                self._ended_peers.add(rank)
                _LOGGER.error(
                    "rank %d, step %d: rank %d is lost (its process has ended)", self._rank, self._comm.step, rank
                )
                with self.changed:
                    self.changed.notify_all()
        return doubtful

    def _transmit(self, dst: int, message: Message, number: int) -> None:
        if not self._send_frame(Kind.MESSAGE, dst, number, message):
            raise CommError(
                f"{self._name(self._rank)}: the queue of messages to {self._name(dst)} is full beyond its capacity"
            )

    def _acknowledge(self, src: int, consumed: int) -> None:
        self._send_frame(Kind.ACKNOWLEDGEMENT, src, consumed)

    def _send_frame(self, kind: Kind, dst: int, number: int, message: Message | None = None) -> bool:
        content = _EMPTY if message is None else message.content
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
        )
        self._connect(dst)
        return self._sockets.send(dst, [header.pack(), *split(data)])

    def _connect(self, dst: int) -> None:
        if dst not in self._sockets.farewells:
            leaving = Header(
                kind=Kind.LEAVING,
                dtype=dtype_number(_EMPTY),
                run=self._run,
                epoch=self._epoch,
                src=self._rank,
                dst=dst,
                topic=0,
                step=0,
                number=0,
                nbytes=0,
            )
            self._sockets.farewells[dst] = [leaving.pack()]
        self._sockets.connect(dst, self._addresses[dst])

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's process is known to have ended, or has said so."""
        return rank in self._closed_peers or rank in self._ended_peers or super().has_ended(rank)

    def _check_usable(self) -> None:
        super()._check_usable()
        if failed := self._failed_peers - self._dismissed:
            raise self._lost_error(f"{self._name(min(failed))} reports a failure")

    def _loss_of(self, rank: int) -> Loss | None:
        # A rank that only receives must connect too: only a connection shows that the other process has ended.
        self._connect(rank)
        if rank in self._closed_peers:
            return Loss(f"{self._name(rank)} has closed its mailbox; end training together", closed=True)
        since = self._sockets.disconnected.get(rank)
        if since is None and rank in self._sockets.reached:
            return None
        # What has never been connected is not closed either, where the other process ended early.
        if (since or inf) + _RECONNECT_SECONDS < time.monotonic() or self._comm.has_ended(rank):
            return Loss(f"the connection to {self._name(rank)} was closed")
        return None


def _exchange_addresses(comm: Comm, port: int, public_key: bytes, device: torch.device) -> Directory:
    """All-gather where each rank receives, and its public key; secret keys stay where they were made."""
    row_bytes = secrets.token_bytes(8) + public_key + endpoint(own_address(), port).encode()
    row = torch.frombuffer(bytearray(row_bytes.ljust(_ROW_BYTES, b"\0")), dtype=torch.uint8)
    rows = [bytes(each.tolist()) for each in comm.all_gather(row.to(device)).wait()]
    keys = [row[8 : 8 + _KEY_BYTES] for row in rows]
    addresses = [row[8 + _KEY_BYTES :].rstrip(b"\0").decode() for row in rows]
    # The loopback is right if all ranks are on one machine, and a mistake if only some report it.
    local = [rank for rank, address in enumerate(addresses) if "//127." in address or "//[::1]" in address]
    if 0 < len(local) < len(rows):
        raise ConfigError(
            f"{comm.name(local[0])} is reached at {addresses[local[0]]}, which is its own machine only; set "
            "GLOO_SOCKET_IFNAME to the interface on which the ranks reach each other"
        )
    return Directory(int.from_bytes(rows[0][:8], "big"), addresses, keys)


def import_zmq() -> ModuleType:
    """ZeroMQ for Python.

    Raises:
        ConfigError: it is not installed, or cannot encrypt.
    """
    try:
        import zmq
    except ImportError as error:
        raise ConfigError("messages between processes need pyzmq; pip install 'thinwire[async]'") from error
    if not zmq.has("curve"):
        raise ConfigError("this pyzmq was built without CURVE (libsodium); pip install --force-reinstall pyzmq")
    return zmq
