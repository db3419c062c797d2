# SPDX-License-Identifier: Apache-2.0
"""How long this process's TCP connections have had data to send, as the kernel counts it."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
import time
import zlib
from collections.abc import Callable

_BUSY_OFFSET = 168  # of `tcpi_busy_time` in the kernel's struct tcp_info (Linux 4.10), in microseconds
_RESCAN_SECONDS = 5.0
_ESTABLISHED = b"\x01"
_BUSY = struct.Struct("=QQ")
_INET = struct.Struct("=H2x4s")
_INET6 = struct.Struct("=H6x16s")


class SendTimes:
    """Measure the busiest TCP connection of this process between two calls.

    A connection counts as busy while sent data wait for an acknowledgement, unless the receiver does not read them. A
    slow link therefore shows on the worker behind it, although all workers of an all-reduce take equally long. Only
    Linux counts this; elsewhere nothing is measured.
    """

    def __init__(self) -> None:
        self._getsockopt = _libc_call("getsockopt")
        self._names = [_libc_call(name) for name in ("getsockname", "getpeername")]
        self._buffer, self._length = ctypes.create_string_buffer(_BUSY_OFFSET + 16), ctypes.c_uint32()
        self._busy: dict[int, float] = {}
        self._scanned = -_RESCAN_SECONDS

    def since_last(self) -> tuple[float, int, int]:
        """Return the busy seconds of the busiest connection since the last call, and hashes of both its addresses."""
        if self._getsockopt is None:
            return 0.0, 0, 0
        now = time.monotonic()
        if now - self._scanned >= _RESCAN_SECONDS:
            self._scanned = now
            known = {int(name) for name in os.listdir("/proc/self/fd") if name.isdecimal()}  # noqa: PTH208 - is faster
            self._busy = {descriptor: self._busy.get(descriptor, 0.0) for descriptor in known}
        busiest, most = -1, 0.0
        for descriptor, before in list(self._busy.items()):
            total = self._total(descriptor)
            if total is None:
                del self._busy[descriptor]
                continue
            self._busy[descriptor] = total
            # A descriptor may belong to a newer connection, whose count starts at zero.
            seconds = total - before if total >= before else total
            if seconds > most:
                busiest, most = descriptor, seconds
        if busiest < 0:
            return 0.0, 0, 0
        own, peer = (self._address(call, busiest) for call in self._names)
        return most, own, peer

    def _total(self, descriptor: int) -> float | None:
        assert self._getsockopt is not None
        buffer, length = self._buffer, self._length
        length.value = _BUSY_OFFSET + 16
        found = self._getsockopt(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, buffer, ctypes.byref(length))
        if found != 0 or length.value < _BUSY_OFFSET + 16 or buffer[0] != _ESTABLISHED:
            return None
        busy, unread = _BUSY.unpack_from(buffer, _BUSY_OFFSET)
        return max(0, busy - unread) / 1e6

    @staticmethod
    def _address(call: Callable[..., int] | None, descriptor: int) -> int:
        buffer, length = ctypes.create_string_buffer(128), ctypes.c_uint32(128)
        if call is None or call(descriptor, buffer, ctypes.byref(length)) != 0:
            return 0
        (family,) = struct.unpack_from("=H", buffer.raw)
        host = (_INET6 if family == socket.AF_INET6 else _INET).unpack_from(buffer.raw)[1]
        if host[:12] == b"\0" * 10 + b"\xff\xff":
            host = host[12:]  # an IPv4 address of an IPv6 socket
        return zlib.crc32(host) >> 1


def _libc_call(name: str) -> Callable[..., int] | None:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), name)
