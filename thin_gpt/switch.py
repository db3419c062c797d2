# SPDX-License-Identifier: Apache-2.0
"""A script, run by path: carry packets between tun devices, each after a delay and at the receiver's rate.

`switch.py BITS_PER_SECOND DELAY_SECONDS PID...` makes `eth0` in the network namespace of each process, prints `ready`,
and ends when its standard input does.
"""

import ctypes
import fcntl
import heapq
import os
import select
import struct
import sys
import time
from contextlib import suppress
from itertools import count

CLONE_NEWNET, TUNSETIFF, TUNSETOFFLOAD = 0x40000000, 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR, TUN_F_CSUM, TUN_F_TSO4 = 0x1, 0x1000, 0x4000, 0x1, 0x2
HEADER, QUEUE_SECONDS, BURST_SECONDS, READS_AT_ONCE = 10, 0.2, 0.002, 32


def open_tunnel(pid: str) -> int:
    """Make `eth0` in the namespace of a process; packets have headers that allow sizes of up to 64 KiB."""
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(descriptor, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return descriptor


def frame_bytes(packet: bytes) -> int:
    """The size of a packet once it is split into frames, each with headers of its own."""
    size, segment = len(packet) - HEADER, int.from_bytes(packet[4:6], sys.byteorder)
    if not packet[1] or not segment:
        return size
    header = 4 * (packet[HEADER] & 15)
    header += 4 * (packet[HEADER + header + 12] >> 4)
    return size + header * ((size - header - 1) // segment)


def carry(rate: float, delay: float, tunnels: list[int]) -> None:
    """Carry packets until the standard input ends."""
    numbers, free = count(), [0.0] * len(tunnels)
    in_flight: list[tuple[float, int, int, bytes, bool]] = []  # due, order, receiver, packet, queued for the rate
    while True:
        now = time.monotonic()
        while in_flight and in_flight[0][0] <= now:
            _, _, target, packet, queued = heapq.heappop(in_flight)
            if rate and not queued:
                begin = max(free[target], now - BURST_SECONDS)
                if begin - now > QUEUE_SECONDS:
                    continue  # the queue is full
                free[target] = begin + 8 * frame_bytes(packet) / rate
                if free[target] > now:
                    heapq.heappush(in_flight, (free[target], next(numbers), target, packet, True))
                    continue
            with suppress(OSError):
                os.write(tunnels[target], packet)
        wait = max(0.0, in_flight[0][0] - time.monotonic()) if in_flight else None
        ready, _, _ = select.select([0, *tunnels], [], [], wait)
        if 0 in ready and not os.read(0, 1):
            return
        for descriptor in ready:
            with suppress(BlockingIOError):
                for _ in range(READS_AT_ONCE if descriptor else 0):
                    packet = os.read(descriptor, (1 << 16) + HEADER)
                    if len(packet) >= HEADER + 20 and packet[HEADER + 16 : HEADER + 19] == bytes([10, 77, 0]):
                        target = packet[HEADER + 19] - 1
                        if 0 <= target < len(tunnels):
                            heapq.heappush(in_flight, (time.monotonic() + delay, next(numbers), target, packet, False))


if __name__ == "__main__":
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)  # packets are late when this process is
    opened = [open_tunnel(pid) for pid in sys.argv[3:]]
    print("ready", flush=True)
    carry(float(sys.argv[1]), float(sys.argv[2]), opened)
