# SPDX-License-Identifier: Apache-2.0
"""How long messages take: rates of interfaces and racks, shared by what goes through them, and latencies.

Each interface, in each direction, each rack's uplink and each link of a pair that differs carries one message after the
other; a message goes through all of them at once, as fast as the slowest (cut-through). So a worker that sends to two
others sends to each at half its rate, on average, and one that all send to is the bottleneck that it would be.
Collectives take the time of Gloo's algorithms on the same interfaces.

A network may also have the costs of connections and calls: a TCP window, which bounds a rate by the round trip, a slow
start after a pause, and a time per collective call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import ceil, inf, log2

import numpy as np
from numpy.typing import NDArray

from thinwire.core.comm.base import DIRECT_GATHER_BYTES
from thinwire.planning.simulate.network import Network, Pair

Times = NDArray[np.float64]

PAYLOAD_SHARE = 1448 / 1514
"""The part of a link's rate that carries payload.

Of an Ethernet frame of 1,514 bytes (as the kernel's shapers and counters see it) 14 are the frame's header, 20 the IP
header, and 32 the TCP header with timestamps. Acknowledgements and the payload's own headers are negligible.
"""

# As many ranks as a ring is followed hop by hop for, and pairs of an all-to-all one by one; more by a closed form.
_MOST_RANKS_OF_A_RING = 512
_MOST_RANKS_OF_ALL_TO_ALL = 64


SEGMENT_BYTES = 1 << 20
"""The longest segment of Gloo's ring, of which a rank has two in flight."""
_ITERATIONS = 192  # of Gloo's ring are followed one by one; the rest continue at the same pace
_IDLE_SECONDS = 0.2  # Linux's least retransmission timeout, after which a connection starts slowly again
_FIRST_WINDOW = 10 * 1448


class Lane:
    """What one direction of an interface, or of an uplink, is busy with: one message at a time."""

    __slots__ = ("_busy", "_past")

    def __init__(self) -> None:
        self._busy: list[list[float]] = []
        self._past = 0.0  # seconds of bookings that are no longer kept

    @property
    def free_from(self) -> float:
        """From when on nothing is booked."""
        return self._busy[-1][1] if self._busy else 0.0

    def busy_seconds(self, now: float) -> float:
        """Return for how long it has been busy until now."""
        return self._past + sum(min(end, now) - start for start, end in self._busy if start < now)

    def book(self, now: float, earliest: float, seconds: float) -> tuple[float, float]:
        """Book the first time that is free from `earliest` on; returns when it begins and ends.

        What was booked before keeps its time, and the rest goes around it: a message on a long way does not hold up one
        that comes before it.
        """
        busy = self._busy
        while busy and busy[0][1] <= now:
            self._past += busy[0][1] - busy[0][0]
            del busy[0]
        if not busy or busy[-1][1] <= earliest:
            busy.append([earliest, earliest + seconds])
            return earliest, earliest + seconds
        begin, at, left, place = -1.0, earliest, seconds, 0
        while True:
            start, end = busy[place] if place < len(busy) else (inf, inf)
            if end <= at:
                place += 1
                continue
            if start > at:
                piece = min(left, start - at)
                begin, left = at if begin < 0 else begin, left - piece
                if piece == start - at:
                    busy[place][0] = at  # up to what was booked
                elif place and busy[place - 1][1] == at:
                    busy[place - 1][1] = at + piece
                else:
                    busy.insert(place, [at, at + piece])
                if left <= 0:
                    return begin, at + piece
            at = max(at, end)
            place += 1


class Wires:
    """Every interface and rack of a network, and until when it is busy.

    Args:
        network: rates and latencies.
        workers: how many.

    Example:
        A message of a megabyte takes 8.4 ms at a gigabit per second, and 0.1 ms of latency. The next one to another
        worker waits for it.

        >>> from thinwire.planning.simulate import Network
        >>> from thinwire.planning.simulate.wires import Wires
        >>> wires = Wires(Network(bits_per_second=1e9, latency=1e-4), 3)
        >>> [f"{wires.send(0.0, 0, dst, 1_000_000)[1]:.4f}" for dst in (1, 2)]
        ['0.0085', '0.0168']
    """

    def __init__(self, network: Network, workers: int) -> None:
        self._workers = workers
        rates, extra = [network.bits_per_second] * workers, [0.0] * workers
        for special in network.specials:
            for rank in special.ranks:
                rates[rank] = special.bits_per_second or rates[rank]
                extra[rank] += special.latency
        self._rates = [rate * PAYLOAD_SHARE / 8 for rate in rates]  # bytes of payload in a second
        self._extra, self._latency = extra, network.latency
        self._racks = network.racks
        self._rack_rate = inf if self._racks is None else self._racks.bits_per_second * PAYLOAD_SHARE / 8
        self._pairs = {tuple(sorted(pair.between)): pair for pair in network.pairs}
        self._out = [Lane() for _ in range(workers)]
        self._in = [Lane() for _ in range(workers)]
        self._uplinks: defaultdict[tuple[str, int], Lane] = defaultdict(Lane)
        self._links: defaultdict[tuple[int, int], Lane] = defaultdict(Lane)
        self._rings: tuple[Times, Times] | None = None
        self._network = network
        self._used: dict[tuple[int, int], float] = {}  # until when a connection sent, where it starts slowly

    def busy_seconds(self, rank: int, now: float) -> float:
        """Return for how long a worker's interface has been busy until now, the mean of its two directions."""
        return (self._out[rank].busy_seconds(now) + self._in[rank].busy_seconds(now)) / 2

    def _pair(self, src: int, dst: int) -> Pair | None:
        return self._pairs.get((min(src, dst), max(src, dst))) if self._pairs else None

    def _rack(self, rank: int) -> int:
        assert self._racks is not None, "only of networks with racks"
        return rank // self._racks.size

    def latency(self, src: int, dst: int) -> float:
        """Seconds from one worker to another, without the transfer itself."""
        pair = self._pair(src, dst)
        base = self._latency if pair is None or pair.latency is None else pair.latency
        if self._racks is not None and self._rack(src) != self._rack(dst):
            base += self._racks.latency
        return base + self._extra[src] + self._extra[dst]

    def rate(self, src: int, dst: int) -> float:
        """Bytes of payload in a second from one worker to another, if nothing else is sent."""
        found = min(self._rates[src], self._rates[dst])
        if self._racks is not None and self._rack(src) != self._rack(dst):
            found = min(found, self._rack_rate)
        pair = self._pair(src, dst)
        if pair is not None:
            found = min(found, pair.bits_per_second * PAYLOAD_SHARE / 8)
        if self._network.window < inf and (round_trip := 2 * self.latency(src, dst)):
            found = min(found, self._network.window / round_trip)
        return found

    def _start_up(self, now: float, src: int, dst: int, nbytes: float) -> float:
        """Seconds that a connection loses, after a pause, until its window fills the link."""
        if not self._network.slow_start or now - self._used.get((src, dst), -inf) < _IDLE_SECONDS:
            return 0.0
        rate, round_trip = self.rate(src, dst), 2 * self.latency(src, dst)
        rounds = ceil(log2(max(1.0, min(rate * round_trip, nbytes) / _FIRST_WINDOW)))
        return max(0.0, rounds * round_trip - (2**rounds - 1) * _FIRST_WINDOW / rate)

    def _between(self, src: int, dst: int) -> Iterator[tuple[Lane, float]]:
        """What a message goes through between two interfaces: each with its rate, in bytes of payload in a second."""
        if self._racks is not None and self._rack(src) != self._rack(dst):
            for uplink in (("up", self._rack(src)), ("down", self._rack(dst))):
                yield self._uplinks[uplink], self._rack_rate
        pair = self._pair(src, dst)
        if pair is not None and pair.bits_per_second < inf:
            yield self._links[src, dst], pair.bits_per_second * PAYLOAD_SHARE / 8

    def send(self, now: float, src: int, dst: int, nbytes: float) -> tuple[float, float]:
        """Book a message.

        Returns:
            When it has left its sender, and when it has arrived.
        """
        nbytes *= self._network.magnified
        seconds = nbytes / self._rates[src]
        latency = self.latency(src, dst)
        if self._network.slow_start and latency:
            lost = self._start_up(now, src, dst, nbytes)
            now += lost
            self._used[src, dst] = now + seconds
        begin, left = self._out[src].book(now, now, seconds)
        head, tail = begin + latency, left + latency
        for lane, rate in self._between(src, dst):
            head, end = lane.book(now, head, nbytes / rate)
            tail = max(tail, end)
        if self._network.window < inf:
            left = max(left, begin + nbytes / self.rate(src, dst))
            tail = max(tail, left + latency)
        return left, max(tail, self._in[dst].book(now, head, nbytes / self._rates[dst])[1])

    # -- collectives ---------------------------------------------------------------------------------------------

    def all_reduce(self, launched: Sequence[float], nbytes: float) -> list[float]:
        """When each rank has the result of an all-reduce: of a ring, 2 (n-1) hops of an n-th of the vector."""
        nbytes *= self._network.magnified
        if self._is_gloo:
            return self._segmented(launched, nbytes / self._workers, rounds=2)
        if self._network.all_reduce == "tree" and self._workers > 1:
            return self._tree(launched, nbytes)
        return self._ring(launched, 2 * (self._workers - 1), nbytes / self._workers)

    def all_gather(self, launched: Sequence[float], nbytes: float) -> list[float]:
        """When each rank has all vectors: of short ones a message to each other rank, else n-1 hops around a ring."""
        alone, nbytes = nbytes, nbytes * self._network.magnified
        if nbytes <= DIRECT_GATHER_BYTES and self._workers <= _MOST_RANKS_OF_ALL_TO_ALL:
            return self.all_to_all(launched, [[alone] * self._workers] * self._workers)
        if nbytes <= DIRECT_GATHER_BYTES:
            sums, shape = np.full(self._workers, (self._workers - 1.0) * nbytes), (self._workers, self._workers)
            return self._at_once(launched, sums, sums, np.broadcast_to(np.array(float(nbytes)), shape))
        if self._is_gloo:
            return self._segmented(launched, nbytes, rounds=1)
        return self._ring(launched, self._workers - 1, nbytes)

    @property
    def _is_gloo(self) -> bool:
        """Whether a message is sent only after the receiver has told that it expects it."""
        return self._network.all_reduce == "gloo" and self._workers > 1

    def all_to_all(self, launched: Sequence[float], nbytes: Sequence[Sequence[float]] | Times) -> list[float]:
        """When each rank has its column; `nbytes[i][j]` is what rank i sends to rank j.

        Pairwise: rank i sends to i+1, i+2 and so on, as fast as its interface allows. With many ranks only the sums
        count: after the last rank has launched, each interface, uplink and link that differs carries its bytes at its
        rate.
        """
        ranks = range(self._workers)
        if self._workers <= _MOST_RANKS_OF_ALL_TO_ALL:
            launched = [time + self._network.per_call for time in launched]
            done = list(launched)
            for offset in range(1, self._workers):
                for src in ranks:
                    dst = (src + offset) % self._workers
                    told = launched[dst] + self.latency(dst, src) if self._is_gloo else 0.0
                    left, arrived = self.send(max(launched[src], told), src, dst, nbytes[src][dst])
                    done[src], done[dst] = max(done[src], left), max(done[dst], arrived)
            return done
        rows = np.asarray(nbytes, dtype=float) * self._network.magnified
        own = rows.diagonal()
        return self._at_once(launched, rows.sum(1) - own, rows.sum(0) - own, rows)

    def _at_once(self, launched: Sequence[float], out: Times, into: Times, nbytes: Times) -> list[float]:
        """When each rank has sent its row of bytes and received its column, whose sums are `out` and `into`."""
        begin, rates = float(self._ready(launched).max()), np.array(self._rates)
        sent, received, latency = out / rates, into / rates, float(self._latencies().max())
        taken = np.maximum(sent, received)
        for ranks, there, back in self._across(nbytes):
            for uplink, seconds in (("up", there), ("down", back)):
                self._uplinks[uplink, self._rack(ranks[0])].book(max(launched), begin, seconds)
            taken[ranks] = np.maximum(taken[ranks], max(there, back))
        for pair in self._pairs.values():
            a, b = pair.between
            seconds = max(nbytes[a, b], nbytes[b, a]) * 8 / (pair.bits_per_second * PAYLOAD_SHARE)
            taken[[a, b]] = np.maximum(taken[[a, b]], seconds)
            latency = max(latency, self.latency(a, b))
        self._occupy(sent, received, max(launched), begin)
        return (begin + (2 if self._is_gloo else 1) * latency + taken).tolist()

    def _across(self, nbytes: Times) -> Iterator[tuple[list[int], float, float]]:
        """Each rack's ranks, and the seconds for which its uplink carries what they send out of it and receive."""
        if self._racks is None:
            return
        racks: defaultdict[int, list[int]] = defaultdict(list)
        for rank in range(self._workers):
            racks[self._rack(rank)].append(rank)
        for ranks in racks.values():
            within = nbytes[np.ix_(ranks, ranks)].sum()
            there, back = nbytes[ranks].sum() - within, nbytes[:, ranks].sum() - within
            yield ranks, float(there / self._rack_rate), float(back / self._rack_rate)

    def _ring(self, launched: Sequence[float], hops: int, nbytes: float) -> list[float]:
        """Return a ring in which each rank passes on, in each hop, what it received in the one before."""
        rates, latencies = self._ring_links()
        occupied = nbytes / rates
        ready, uplinks = self._ready(launched), self._ring_uplinks()
        for lane, rank in uplinks:
            # Another ring may go through the same uplink.
            ready[rank] = max(ready[rank], lane.free_from)
        ready = self._start_of_ring(ready, nbytes)
        if self._workers <= _MOST_RANKS_OF_A_RING:
            done, free = ready, ready
            for _ in range(hops):
                free = np.maximum(done, free) + occupied
                done = np.maximum(np.roll(free + latencies, 1), done)
            # A rank is done when it has also sent its last part.
            done = np.maximum(done, free)
        else:
            # The last to launch, then the slower of the way around the ring and of the slowest link's own hops.
            laps = hops / self._workers * float((occupied + latencies).sum())
            done = np.full(self._workers, ready.max() + max(laps, hops * float(occupied.max())))
        self._book_ring(max(launched), float(ready.max()), hops * nbytes)
        return done.tolist()

    def _book_ring(self, now: float, begin: float, nbytes: float) -> None:
        """Keep interfaces and uplinks busy with what each rank of a ring sends to the next."""
        busy = nbytes / self._ring_links()[0]
        self._occupy(busy, np.roll(busy, 1), now, begin)
        for lane, _ in self._ring_uplinks():
            lane.book(now, begin, nbytes / self._rack_rate)

    def _segmented(self, launched: Sequence[float], nbytes: float, *, rounds: int) -> list[float]:
        """Gloo's ring: each part in segments, of which the third is posted when the first has been received.

        A segment is sent when the next rank has told that it expects it. So two segments take at least two latencies
        and a transfer, and a ring over a slow link with a delay does not fill it.

        Args:
            launched: by rank.
            nbytes: of a part, of which each rank sends all but one in a round.
            rounds: of the ring; two for an all-reduce, a reduce-scatter and an all-gather.
        """
        rates, latencies = self._ring_links()
        parts = max(2, ceil(nbytes / SEGMENT_BYTES))
        occupied = nbytes / parts / rates
        ready = self._ready(launched)
        done = self._start_of_ring(ready, nbytes)
        count = (self._workers - 1) * parts
        for _ in range(rounds):
            posted, free, paces = (done, done), done, list[Times]()
            for _ in range(min(count, _ITERATIONS)):
                free = np.maximum(np.maximum(posted[0], np.roll(posted[0], -1) + latencies), free) + occupied
                received = np.roll(free + latencies, 1)
                posted = posted[1], np.maximum(received + self._network.per_segment, free)
                paces.append(posted[1])
            rest = max(0, count - _ITERATIONS)
            pace = (paces[-1] - paces[_ITERATIONS // 2 - 1]) / (_ITERATIONS - _ITERATIONS // 2) if rest else 0.0
            done = np.maximum(*posted) + rest * pace
        self._book_ring(max(launched), float(ready.max()), rounds * (self._workers - 1) * nbytes)
        return done.tolist()

    def _start_of_ring(self, ready: Times, nbytes: float) -> Times:
        """When each rank's connection to the next fills the link."""
        if not self._network.slow_start:
            return ready
        following = [(rank, (rank + 1) % self._workers) for rank in range(self._workers)]
        return ready + [self._start_up(float(ready[src]), src, dst, nbytes) for src, dst in following]

    def _tree(self, launched: Sequence[float], nbytes: float) -> list[float]:
        """NCCL's double binary tree: a rank sends and receives the vector twice, and its depth adds latencies."""
        ready, rates = self._ready(launched), self._ring_links()[0]
        begin, seconds = float(ready.max()), 2 * nbytes / rates
        depth = 2 * ceil(log2(self._workers)) * float(self._latencies().max())
        self._book_ring(max(launched), begin, 2 * nbytes)
        return [begin + float(seconds.max()) + depth] * self._workers

    def _ring_links(self) -> tuple[Times, Times]:
        if self._rings is None:
            pairs = [(rank, (rank + 1) % self._workers) for rank in range(self._workers)]
            self._rings = np.array([self.rate(*each) for each in pairs]), self._latencies()
        return self._rings

    def _ring_uplinks(self) -> list[tuple[Lane, int]]:
        """Return the uplinks that a ring goes through, each with the rank that sends through it."""
        if self._racks is None:
            return []
        found: list[tuple[Lane, int]] = []
        for rank in range(self._workers):
            own, following = self._rack(rank), self._rack((rank + 1) % self._workers)
            if own != following:
                found += [(self._uplinks["up", own], rank), (self._uplinks["down", following], rank)]
        return found

    def _latencies(self) -> Times:
        return np.array([self.latency(rank, (rank + 1) % self._workers) for rank in range(self._workers)])

    def _occupy(self, sent: Times, received: Times, now: float, begin: float) -> None:
        """Keep interfaces busy for the bytes of a collective; its latencies leave them free.

        What is booked before the collective begins stays booked: a message that is sent meanwhile waits for it.
        """
        for rank, (out, into) in enumerate(zip(sent.tolist(), received.tolist(), strict=True)):
            self._out[rank].book(now, begin, out)
            self._in[rank].book(now, begin, into)

    def _ready(self, launched: Sequence[float]) -> Times:
        """When each rank has launched a collective, and its interface has nothing else to do."""
        free = [max(out.free_from, into.free_from) for out, into in zip(self._out, self._in, strict=True)]
        return np.maximum(np.array(launched), np.array(free)) + self._network.per_call
