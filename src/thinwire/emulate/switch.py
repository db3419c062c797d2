"""A script of its own, run by path without the package: a switch whose cables have a length.

The kernel of many machines can limit a rate but not delay a packet. So where a link has a delay, the workers' `eth0`
are tun devices instead of cables, and this process carries each packet from one to another: it keeps it for the
sender's delay, then sends it on at the receiver's rate. The sender's rate is kept by the kernel.

`switch.py QUEUE BURST PORT...`: the longest queue and the burst of a receiver in seconds, then for each worker
`DESCRIPTOR:BITS_PER_SECOND:DELAY_SECONDS`, a rate of 0 for no limit. Ends when its standard input does.
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
READS_AT_ONCE = 32


@dataclass
class Port:
    """One worker's place at the switch; ``free`` is when it has received all that was sent on to it."""

    descriptor: int
    bits_per_second: float
    delay_seconds: float
    free: float = 0.0


class Switch:
    """Packets under way, by the time at which something happens to them."""

    def __init__(self, queue_seconds: float, burst_seconds: float, ports: list[Port]) -> None:
        self.queue_seconds = queue_seconds
        self.burst_seconds = burst_seconds
        self.ports = ports
        self.under_way: list[tuple[float, int, int, bytes, bool]] = []
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
                    self.take(descriptors[descriptor])

    def take(self, port: Port) -> None:
        """Read what a worker has sent."""
        for _ in range(READS_AT_ONCE):
            try:
                packet = os.read(port.descriptor, LARGEST_READ)
            except BlockingIOError:
                return
            target = receiver(packet)
            if 0 <= target < len(self.ports):
                self.keep(time.monotonic() + port.delay_seconds, target, packet, False)

    def keep(self, due: float, target: int, packet: bytes, queued: bool) -> None:
        """Keep a packet until ``due``, on its way (or queued at its receiver)."""
        heapq.heappush(self.under_way, (due, next(self.numbers), target, packet, queued))

    def forward(self, now: float) -> float | None:
        """Send on what is due; returns the seconds until something else is, None when nothing is under way."""
        while self.under_way and self.under_way[0][0] <= now:
            _, _, target, packet, queued = heapq.heappop(self.under_way)
            if queued or not self.queue(now, target, packet):
                # The device refuses packets only while its worker's namespace is being taken down.
                with suppress(OSError):
                    os.write(self.ports[target].descriptor, packet)
        return max(0.0, self.under_way[0][0] - now) if self.under_way else None

    def queue(self, now: float, target: int, packet: bytes) -> bool:
        """Queue a packet where its receiver's rate asks for it, or drop it where the queue is too long."""
        port = self.ports[target]
        if not port.bits_per_second:
            return False
        free = max(port.free, now - self.burst_seconds)
        if free - now > self.queue_seconds:
            return True
        port.free = free + 8 * frame_nbytes(packet) / port.bits_per_second
        if port.free <= now:
            return False
        self.keep(port.free, target, packet, True)
        return True


def receiver(packet: bytes) -> int:
    """The worker that an IPv4 packet is for; negative for any other packet."""
    if len(packet) < HEADER + 20 or packet[HEADER + 16 : HEADER + 19] != NETWORK:
        return -1
    return packet[HEADER + 19] - FIRST_HOST


def frame_nbytes(packet: bytes) -> int:
    """Bytes of the packet once it is cut into frames that have headers of their own."""
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
    # A delay is only as exact as this process is soon awake; without the right to it, it goes on as it is.
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    Switch(float(sys.argv[1]), float(sys.argv[2]), [read_port(text) for text in sys.argv[3:]]).run()
