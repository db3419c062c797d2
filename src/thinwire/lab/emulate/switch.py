# SPDX-License-Identifier: Apache-2.0
"""A script, run by path without the package: a switch whose links have delays.

Many kernels can limit a rate but cannot delay a packet. So where a link has a delay, each worker's `eth0` is a tun
device, and this process carries the packets from one to another: it holds a packet for the sender's delay, then
forwards it at the receiver's rate. The sender's rate is limited by the kernel.

`switch.py QUEUE BURST PORT...`: the longest queue and the burst of a receiver in seconds, then for each worker
`DESCRIPTOR:BITS_PER_SECOND:DELAY_SECONDS`, where a rate of 0 is no limit. Ends when its standard input does.
"""

import heapq
import os
import select
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

HEADER = 10
NETWORK = bytes([10, 77, 0])
FIRST_HOST = 1
LARGEST_READ = (1 << 16) + HEADER
# Packets read from one worker before the others are looked at, so that a fast sender does not delay them.
READS_AT_ONCE = 32


@dataclass
class Port:
    """One worker's port of the switch; ``free`` is the time at which all packets queued for it will be delivered."""

    descriptor: int
    bits_per_second: float
    delay_seconds: float
    free: float = 0.0


class Switch:
    """The packets in flight, ordered by the time at which each is next due."""

    def __init__(self, queue_seconds: float, burst_seconds: float, ports: list[Port]) -> None:
        self.queue_seconds = queue_seconds
        self.burst_seconds = burst_seconds
        self.ports = ports
        self.in_flight: list[tuple[float, int, int, bytes, bool]] = []
        self.numbers = count()

    def run(self) -> None:
        """Carry packets until the standard input ends."""
        descriptors = {port.descriptor: port for port in self.ports}
        while True:
            wait = self.forward(time.monotonic())
            ready, _, _ = select.select([0, *descriptors], [], [], wait)
            if 0 in ready and not os.read(0, 1):
                return
            for descriptor in ready:
                if descriptor:
                    self.read_packets(descriptors[descriptor])

    def read_packets(self, port: Port) -> None:
        """Read the packets that a worker has sent."""
        for _ in range(READS_AT_ONCE):
            try:
                packet = os.read(port.descriptor, LARGEST_READ)
            except BlockingIOError:
                return
            target = receiver(packet)
            if 0 <= target < len(self.ports):
                self.hold(time.monotonic() + port.delay_seconds, target, packet, False)

    def hold(self, due: float, target: int, packet: bytes, queued: bool) -> None:
        """Hold a packet until ``due``: for its sender's delay, or ``queued`` for its receiver's rate."""
        # The number breaks ties, so that packets that are due together stay in order.
        heapq.heappush(self.in_flight, (due, next(self.numbers), target, packet, queued))

    def forward(self, now: float) -> float | None:
        """Forward the packets that are due; returns the seconds until the next one is, None when there is none."""
        while self.in_flight and self.in_flight[0][0] <= now:
            _, _, target, packet, queued = heapq.heappop(self.in_flight)
            if queued or not self.queue(now, target, packet):
                # The device refuses packets only while its worker's namespace is being taken down.
                with suppress(OSError):
                    os.write(self.ports[target].descriptor, packet)
        return max(0.0, self.in_flight[0][0] - now) if self.in_flight else None

    def queue(self, now: float, target: int, packet: bytes) -> bool:
        """Queue a packet if its receiver's rate requires it, drop it if the queue is full; False: deliver it now."""
        port = self.ports[target]
        if not port.bits_per_second:
            return False
        # An idle port has saved up at most one burst.
        free = max(port.free, now - self.burst_seconds)
        if free - now > self.queue_seconds:
            return True
        port.free = free + 8 * frame_nbytes(packet) / port.bits_per_second
        if port.free <= now:
            return False
        self.hold(port.free, target, packet, True)
        return True


def receiver(packet: bytes) -> int:
    """Return the rank of the worker that an IPv4 packet is for; negative for any other packet."""
    if len(packet) < HEADER + 20 or packet[HEADER + 16 : HEADER + 19] != NETWORK:
        return -1
    return packet[HEADER + 19] - FIRST_HOST


def frame_nbytes(packet: bytes) -> int:
    """Return the size of a packet in bytes once it is split into frames, each with its own headers."""
    # With segmentation offload the kernel hands over packets of up to 64 KiB; a real wire carries them as frames.
    nbytes = len(packet) - HEADER
    segment = int.from_bytes(packet[4:6], sys.byteorder)
    if not packet[1] or not segment:
        return nbytes
    header = 4 * (packet[HEADER] & 15)
    header += 4 * (packet[HEADER + header + 12] >> 4)
    return nbytes + header * ((nbytes - header - 1) // segment)


def read_port(text: str) -> Port:
    """Read `DESCRIPTOR:BITS_PER_SECOND:DELAY_SECONDS`."""
    descriptor, rate, delay = text.split(":")
    return Port(int(descriptor), float(rate), float(delay))


if __name__ == "__main__":
    # Packets are late when this process wakes up late. Without the right to a higher priority it runs as it is.
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    Switch(float(sys.argv[1]), float(sys.argv[2]), [read_port(text) for text in sys.argv[3:]]).run()
