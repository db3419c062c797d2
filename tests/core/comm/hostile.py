# SPDX-License-Identifier: Apache-2.0
"""Hostile inputs to a mailbox's port, drawn from a seed.

As a program: `python -m tests.core.comm.hostile HOST PORT [COUNT [SEED]]`.
"""

from __future__ import annotations

import random
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress

import torch

from tests.core.comm.test_mailbox_frames import framed

_MAX_OPEN = 200
_SECONDS = 0.5


def greeting(mechanism: bytes, as_server: int = 0) -> bytes:
    """The first 64 bytes of ZMTP 3.1."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes([as_server]) + bytes(31)


def zmtp_frame(content: bytes, *, more: bool = False, command: bool = False, length: int | None = None) -> bytes:
    """One frame of ZMTP in its long form; `length` is what it says of itself."""
    return struct.pack("!BQ", 2 | more | 4 * command, len(content) if length is None else length) + content


class Attacker:
    """A stranger who can reach a port, and has none of the group's keys.

    Args:
        host: of the port.
        port: of a mailbox.
        server_key: the mailbox's public key, if the stranger has overheard it.
        recorded: bytes of a rank's connection, if the stranger has recorded one.
        seed: of all draws.
    """

    def __init__(self, host: str, port: int, *, server_key: bytes = b"", recorded: bytes = b"", seed: int = 0) -> None:
        self._address = host, port
        self._server_key = server_key
        self._recorded = recorded
        self._random = random.Random(seed)
        self._open: list[socket.socket] = []
        self.kinds: list[Callable[[], None]] = [
            self.noise, self.http, self.silence, self.plain_messages, self.bad_hello, self.huge_length,
            self.endless_parts, self.broken_greeting, self.hello_as_server,
        ]  # fmt: skip
        self.kinds += [self.foreign_key] if server_key else []
        self.kinds += [self.replay, self.flipped_replay] if recorded else []

    def attack(self, count: int) -> None:
        """Send so many hostile inputs, each of a kind that is drawn."""
        for _ in range(count):
            # A refusal is what the attacked must do.
            with suppress(OSError):
                self._random.choice(self.kinds)()

    def close(self) -> None:
        """Close what was left open."""
        for each in self._open:
            each.close()

    def noise(self) -> None:
        """Bytes that mean nothing."""
        self._send(self._random.randbytes(self._random.randrange(1, 5000)))

    def http(self) -> None:
        """A web browser."""
        self._send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")

    def silence(self) -> None:
        """A connection that says nothing and stays open."""
        self._send(b"", keep=True)

    def plain_messages(self) -> None:
        """Frames as an unauthenticated ZeroMQ socket sends them, of a run's layout."""
        ready = b"\x05READY\x0bSocket-Type" + struct.pack("!I", 4) + b"PUSH"
        parts = framed(torch.full((100,), 7.0), run=self._random.randrange(2**64), epoch=1, dst=0, src=1, number=0)
        frames = b"".join(zmtp_frame(bytes(part), more=i == 0) for i, part in enumerate(parts))
        self._send(greeting(b"NULL") + zmtp_frame(ready, command=True) + frames)

    def bad_hello(self) -> None:
        """CURVE's first command, of the right length and with a box that nobody made."""
        hello = b"\x05HELLO\x01\x00" + bytes(72) + self._random.randbytes(32 + 8 + 80)
        self._send(greeting(b"CURVE") + zmtp_frame(hello, command=True))

    def huge_length(self) -> None:
        """A frame that says it is longer than memory, and begins."""
        length = self._random.choice([2**63, 2**40, 2**31, 2**20])
        self._send(greeting(b"CURVE") + zmtp_frame(bytes(1 << 20), command=True, length=length))

    def endless_parts(self) -> None:
        """Parts that are each short enough, without end; the frame that would be the last never comes."""
        part = zmtp_frame(bytes(200_000), more=True)
        self._send(greeting(self._random.choice([b"CURVE", b"NULL"])), *[part] * 50)

    def broken_greeting(self) -> None:
        """A greeting with one wrong bit, or cut off."""
        data = bytearray(greeting(b"CURVE"))
        data[self._random.randrange(64)] ^= 1 << self._random.randrange(8)
        self._send(bytes(data[: self._random.randrange(1, 65)]), keep=self._random.random() < 0.3)

    def hello_as_server(self) -> None:
        """A peer that claims to be the server."""
        self._send(greeting(b"CURVE", 1) + zmtp_frame(b"\x07WELCOME" + self._random.randbytes(160), command=True))

    def foreign_key(self) -> None:
        """A socket that has overheard the server's public key, with a key pair of its own."""
        import zmq

        context = zmq.Context()
        sender = context.socket(zmq.PUSH)
        sender.curve_publickey, sender.curve_secretkey = zmq.curve_keypair()
        sender.curve_serverkey = self._server_key
        sender.connect("tcp://{}:{}".format(*self._address))
        sender.send_multipart(framed(torch.full((100,), 7.0), run=0, epoch=1, dst=0, src=1, number=0), copy=True)
        context.destroy(linger=20)

    def replay(self) -> None:
        """What a rank sent over an earlier connection."""
        self._send(self._recorded)

    def flipped_replay(self) -> None:
        """The same with one bit changed."""
        data = bytearray(self._recorded)
        data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        self._send(bytes(data))

    def _send(self, *chunks: bytes, keep: bool = False) -> None:
        connection = socket.create_connection(self._address, timeout=_SECONDS)
        try:
            for chunk in chunks:
                connection.sendall(chunk)
        finally:
            if keep and len(self._open) < _MAX_OPEN:
                self._open.append(connection)
            else:
                connection.close()


if __name__ == "__main__":
    attacker = Attacker(sys.argv[1], int(sys.argv[2]), seed=int(sys.argv[4]) if len(sys.argv) > 4 else 0)
    attacker.attack(int(sys.argv[3]) if len(sys.argv) > 3 else 1000)
    attacker.close()
