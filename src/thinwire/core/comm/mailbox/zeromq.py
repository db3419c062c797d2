# SPDX-License-Identifier: Apache-2.0
"""Messages between processes over ZeroMQ, which queues, reconnects and transfers in its own thread.

Each rank has one socket for receiving, and one for each rank that it has sent to. A thread of this process reads from
the former, checks the messages, and delivers them or calls their handlers.

Anyone may reach the port, so connections are authenticated and encrypted (ZeroMQ's CURVE). Each mailbox has a key pair,
the ranks exchange their public keys over the comm, and only connections with one of those keys are admitted. Each
connection has its own session keys, so recorded messages are refused. Before its admission a connection can make this
process hold one part of a message (`PART_BYTES`), for at most `_HANDSHAKE_MILLISECONDS`, and at most `max_connections`
are open: in addition to its vectors, a mailbox of n ranks holds less than (32 + 4 n) * 0.4 MB.
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
_EMPTY = Message(0, 0, 0, torch.empty(0, dtype=torch.float32, device="cpu"))
_SIOCGIFADDR = 0x8915
_KEY_BYTES = 40  # a public key in ZeroMQ's text form
_ROW_BYTES = 136  # a rank's key and address, as the ranks exchange them
_POLL_SECONDS = 0.1
_LINGER_MILLISECONDS = 1000
_RECONNECT_SECONDS = 1.0  # a connection may be gone for this long before its rank counts as lost
_NOTICE_SECONDS, _DOUBT_SECONDS = 0.02, 0.01  # before a closed connection is checked, and again
_HEADROOM_BYTES = 4096
_HANDSHAKE_MILLISECONDS = 10_000  # the limit for the admission of a connection


def own_address() -> str:
    """Return this process's address on the network that the ranks share.

    It is the address of the interface in `GLOO_SOCKET_IFNAME`, else of the interface that routes to `MASTER_ADDR`, else
    of the loopback.

    Raises:
        ConfigError: no route to `MASTER_ADDR` exists.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    # Without `fcntl` (on some systems), or without an IPv4 address of the interface, the route decides.
    with suppress(ImportError, OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        import fcntl

        found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(found[20:24])
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, _, _, _, destination = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(destination)  # on a datagram socket this chooses the route and sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR={host!r}: no route exists ({error}). Set GLOO_SOCKET_IFNAME to the interface "
            "on which the ranks reach each other"
        ) from error


def endpoint(address: str, port: int) -> str:
    """Format an address and a port in ZeroMQ's notation."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def max_connections(ranks: int) -> int:
    """Return the connection limit of a rank's port; each rank needs one, and two during a reconnect."""
    return 32 + 4 * ranks


class Directory(NamedTuple):
    """The addresses and keys of a mailbox's ranks.

    Attributes:
        run: the secret number of the run, chosen by rank 0.
        addresses: the address of each rank's receiving socket.
        keys: each rank's public key.
    """

    run: int
    addresses: list[str]
    keys: list[bytes]


class Sockets:
    """The sockets and the receiving thread of one mailbox.

    They are separate from the mailbox so that its finalizer can close them without keeping it alive.

    Attributes:
        receiver: the socket on which messages for this rank arrive.
        port: the receiver's port.
        public_key: the key by which other ranks recognize this one.
        disconnected: ranks whose connection is gone, with the time of the loss by `time.monotonic`.
        reached: ranks to which a connection has existed.
        farewells: for each connected rank, the frame that announces the end of this process.
        refused_connections: connections that were closed because they did not belong to a rank, or were too many.
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
        # ZeroMQ checks here, before the first byte of a message, that a connection's key belongs to a rank.
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
        """Return the ranks that this one has connected to."""
        return list(self._senders)

    def connect(self, rank: int, address: str) -> None:
        """Connect to a rank, and monitor the connection; a second call has no effect."""
        if rank in self._senders or self._stopped.is_set():
            return
        zmq, sender = self._zmq, self._open(self._zmq.PUSH)
        sender.setsockopt(zmq.CURVE_SERVERKEY, self._keys[rank])
        monitor = sender.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        sender.connect(address)
        self._senders[rank], self._monitors[monitor] = sender, rank

    def send(self, rank: int, parts: Sequence[bytes | memoryview]) -> bool:
        """Queue a frame for a rank; return False if the queue is full or the sockets are closed."""
        if self._stopped.is_set():
            return False
        try:
            # A copy, since the caller may change the vector as soon as `send` returns.
            self._senders[rank].send_multipart(parts, flags=self._zmq.NOBLOCK, copy=True)
        except self._zmq.Again:
            return False
        return True

    def start(self, mailbox: weakref.ref[ZeroMqMailbox], keys: Sequence[bytes]) -> None:
        """Admit connections with these public keys, by rank, and start the receiving thread.

        The thread ends with the mailbox. Earlier connections wait for this call.
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
            # Otherwise the thread would hold the mailbox while it waits, and the mailbox could never end.
            del box

    def _limit_connections(self) -> None:
        """Close connections above the limit as soon as they are accepted; ranks will reconnect."""
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
        """Shut down one of ZeroMQ's connections, which ZeroMQ then closes."""
        # ZeroMQ may have closed it already, and its number may belong to another file by now.
        with suppress(OSError), socket.fromfd(connection, socket.AF_INET, socket.SOCK_STREAM) as duplicate:
            if duplicate.getsockname()[1] == self.port:
                duplicate.shutdown(socket.SHUT_RDWR)

    def _admit_ranks(self) -> None:
        """Admit or refuse a connection for ZeroMQ: its key must belong to a rank."""
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
        """Announce the normal end of this process to the other ranks, and close every socket."""
        for rank, frame in self.farewells.items():
            if rank not in self.disconnected:
                self.send(rank, frame)
        self.close()

    def close(self) -> None:
        """Close every socket; queued frames have one second to leave."""
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
    """A mailbox between processes; all ranks of the comm open it together.

    Args:
        comm: the comm of the ranks; they exchange their addresses over it.
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
        # An acknowledgement may follow each message.
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
        """Return the number of connections that were refused as foreign or too many."""
        return self._sockets.refused_connections

    def close(self) -> None:
        """Notify the other ranks and close the sockets."""
        with self.changed:
            if self._closed:
                return
            self._closed = True
            for dst in self._sockets.connected:
                self._send_frame(Kind.CLOSE, dst, 0)
            self.changed.notify_all()
        # Outside the lock: the receiving thread may need it to end.
        self._sockets.close()

    def after_fork(self) -> None:
        """Mark the mailbox as closed in a fork; the parent's sockets stay open."""
        self._finalizer.detach()
        self._closed = True
        self.changed = self._comm.runtime.condition()  # the parent's receiving thread may have held the lock

    def tell_failure(self) -> None:
        """Notify all other ranks, even those that do not wait for this one."""
        with self.changed:
            if not self._closed:
                for dst in self._edges:
                    self._send_frame(Kind.FAILURE, dst, 0)

    def receive(self, src: int, parts: Sequence[memoryview]) -> None:
        """Handle a frame of a rank; called by the receiving thread, which must survive any frame."""
        try:
            found = parse(parts, run=self._run, epoch=self._epoch, dst=self._rank)
        except Exception as error:
            self._fail(
                CommError(
                    f"{self._name(self._rank)}, from {self._name(src)}: {error}. All ranks must run the same version"
                )
            )
            return
        # A rank cannot send in the name of another one.
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
            self._ended_peers.add(header.src)  # an announced end is not reported
        else:
            self._deliver(Message(header.src, header.step, header.topic, content), header.number)

    def report_ended(self, disconnected: Mapping[int, float]) -> bool:
        """Log the processes that ended without notice, once each; called by the receiving thread.

        This happens at once, even if no call needs them: a launcher such as torchrun may end this process soon.

        Returns:
            True if the state of some rank is unknown, and must be checked again soon.
        """
        doubtful = False
        for rank, since in disconnected.items():
            if rank in self._closed_peers or rank in self._failed_peers or rank in self._ended_peers:
                continue
            # Its last frames may just have arrived, and a process counts as ended only after its connections are
            # closed.
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

    def _send_frame(self, kind: Kind, dst: int, number: int, message: Message = _EMPTY) -> bool:
        self._connect(dst)
        return self._sockets.send(dst, self._frame(kind, dst, number, message))

    def _frame(self, kind: Kind, dst: int, number: int, message: Message = _EMPTY) -> list[bytes | memoryview]:
        data = bytes_of(message.content)
        header = Header(
            kind=kind,
            dtype=dtype_number(message.content),
            run=self._run,
            epoch=self._epoch,
            src=self._rank,
            dst=dst,
            topic=message.topic,
            step=message.step,
            number=number,
            nbytes=data.nbytes,
        )
        return [header.pack(), *split(data)]

    def _connect(self, dst: int) -> None:
        if dst not in self._sockets.farewells:
            self._sockets.farewells[dst] = self._frame(Kind.LEAVING, dst, 0)
        self._sockets.connect(dst, self._addresses[dst])

    def has_ended(self, rank: int) -> bool:
        """Return True if a rank's process is known to have ended, or has announced its end."""
        return rank in self._closed_peers or rank in self._ended_peers or super().has_ended(rank)

    def _check_usable(self) -> None:
        super()._check_usable()
        if failed := self._failed_peers - self._dismissed:
            raise self._lost_error(f"{self._name(min(failed))} reports a failure")

    def _loss_of(self, rank: int) -> Loss | None:
        # A rank that only receives must connect too: only the connection shows the end of the other process.
        self._connect(rank)
        if rank in self._closed_peers:
            return Loss(f"{self._name(rank)} has closed its mailbox. End training on all ranks together", closed=True)
        since = self._sockets.disconnected.get(rank)
        if since is None and rank in self._sockets.reached:
            return None
        # If the other process ended early, no connection was opened, and so none was closed.
        if (since or inf) + _RECONNECT_SECONDS < time.monotonic() or self._comm.has_ended(rank):
            return Loss(f"the connection to {self._name(rank)} was closed")
        return None


def _exchange_addresses(comm: Comm, port: int, public_key: bytes, device: torch.device) -> Directory:
    """All-gather each rank's receiving address and public key; secret keys stay on their rank."""
    row_bytes = secrets.token_bytes(8) + public_key + endpoint(own_address(), port).encode()
    row = torch.frombuffer(bytearray(row_bytes.ljust(_ROW_BYTES, b"\0")), dtype=torch.uint8)
    rows = [bytes(each.tolist()) for each in comm.all_gather(row.to(device)).wait()]
    keys = [row[8 : 8 + _KEY_BYTES] for row in rows]
    addresses = [row[8 + _KEY_BYTES :].rstrip(b"\0").decode() for row in rows]
    # The loopback is valid if all ranks report it, because they are on one machine.
    local = [rank for rank, address in enumerate(addresses) if "//127." in address or "//[::1]" in address]
    if 0 < len(local) < len(rows):
        raise ConfigError(
            f"{comm.name(local[0])} is reached at {addresses[local[0]]}, which is valid on its own machine only. Set "
            "GLOO_SOCKET_IFNAME to the interface on which the ranks reach each other"
        )
    return Directory(int.from_bytes(rows[0][:8], "big"), addresses, keys)


def import_zmq() -> ModuleType:
    """Import ZeroMQ for Python.

    Raises:
        ConfigError: pyzmq is not installed, or cannot encrypt.
    """
    try:
        import zmq
    except ImportError as error:
        raise ConfigError(
            "messages between processes need pyzmq. Install it with pip install 'thinwire[async]'"
        ) from error
    if not zmq.has("curve"):
        raise ConfigError("this pyzmq was built without CURVE (libsodium). Run pip install --force-reinstall pyzmq")
    return zmq
