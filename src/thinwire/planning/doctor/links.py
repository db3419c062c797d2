# SPDX-License-Identifier: Apache-2.0
"""The link between two ranks, measured over TCP: latency, bandwidth one way and both, clocks.

Every rank listens at the address that Gloo would use, on a port that the system chooses. A caller must send its rank,
and a token that rank 0 has drawn and sent over the rendezvous. Connections of others are closed.
"""

from __future__ import annotations

import hmac
import socket
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

from thinwire.planning.doctor.rendezvous import Rendezvous

PINGS = 40
STREAMS = 4
TOKEN_BYTES = 32
_CHUNK = 1 << 16
_HELLO = struct.Struct("!ii")  # the caller's rank, and which of its streams this is
_CLOCK = struct.Struct("!d")
_RESULT = struct.Struct("!dd")
_LOOK_SECONDS = 0.3  # between two looks whether the caller has given up
_CONNECT_SECONDS = 5.0
_MORE, _LAST = b"\1", b"\0"
Clock = Callable[[], float]


@dataclass(frozen=True)
class Pair:
    """The measured link between two ranks.

    Attributes:
        a: the rank that connected.
        b: the rank that was connected to.
        problem: why nothing could be measured; "" if all went well.
        seconds_per_round_trip: the median of some pings.
        there: bits per second from `a` to `b`, one stream.
        back: from `b` to `a`, one stream.
        both: in the slower direction, while both send.
        several: from `a` to `b`, with four streams together.
        clock_offset: by how many seconds `b`'s clock is ahead of `a`'s.
        connected: whether there was a connection; a problem then came later.
    """

    a: int
    b: int
    problem: str = ""
    seconds_per_round_trip: float = 0.0
    there: float = 0.0
    back: float = 0.0
    both: float = 0.0
    several: float = 0.0
    clock_offset: float = 0.0
    connected: bool = False

    @property
    def rate(self) -> float:
        """Bits per second in the slower direction, while nothing else is sent."""
        return min(self.there, self.back)


def schedule(ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Rounds in which every rank meets one other, until all pairs have met: a round-robin tournament.

    Example:
        >>> schedule([0, 1, 2, 3])
        [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    seats: list[int | None] = [*ranks] if len(ranks) % 2 == 0 else [*ranks, None]
    rounds: list[list[tuple[int, int]]] = []
    for _ in range(len(seats) - 1):
        pairs = [(a, b) for a, b in zip(seats, reversed(seats), strict=True) if a is not None and b is not None]
        rounds.append(sorted({(min(pair), max(pair)) for pair in pairs}))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


class Listener:
    """Where one rank listens for the others.

    Args:
        address: at which to listen.
        token: what a caller must send first.
        clock: of this machine, in seconds; `time.time` unless a test wants another.
    """

    def __init__(self, address: str, token: bytes, clock: Clock = time.time) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=16)
        self._token = token
        self._clock = clock
        self.port = int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def answer(
        self, caller: int, seconds: float, *, send_seconds: float, given_up: Callable[[], bool] = lambda: False
    ) -> str:
        """Take part in the measurements of one caller; returns what went wrong, or "".

        Args:
            caller: the rank that will connect; others are hung up on.
            seconds: how long to wait for it, and for each of its messages.
            send_seconds: how long to send in each direction.
            given_up: whether the caller has said, by another way, that it cannot connect.
        """
        with ThreadPoolExecutor(STREAMS) as threads, ExitStack() as stack:
            try:
                accepted = dict(self._accept(caller, seconds, given_up) for _ in range(STREAMS))
                lines = [stack.enter_context(accepted[stream]) for stream in sorted(accepted)]
                for _ in range(PINGS):
                    _receive(lines[0], 1)
                    lines[0].sendall(_CLOCK.pack(self._clock()))
                _receive_all(lines[0])
                _send_for(lines[0], send_seconds)
                other = threads.submit(_receive_all, lines[1])
                _send_for(lines[0], send_seconds)
                other.result()
                list(threads.map(_receive_all, lines))
            except OSError as error:
                return _words(error, seconds)
        return ""

    def _accept(self, caller: int, seconds: float, given_up: Callable[[], bool]) -> tuple[int, socket.socket]:
        """Return the next stream of the caller, and its number."""
        end = time.monotonic() + seconds
        while True:
            self._listener.settimeout(_LOOK_SECONDS)
            try:
                line, _ = self._listener.accept()
            except TimeoutError:
                if time.monotonic() > end or given_up():
                    raise
                continue
            try:
                line.settimeout(2.0)
                token = _receive(line, TOKEN_BYTES)
                who, stream = _HELLO.unpack(_receive(line, _HELLO.size))
                if hmac.compare_digest(token, self._token) and who == caller:
                    line.settimeout(seconds)
                    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return stream, line
            except OSError:
                pass
            line.close()


def call(
    rank: int,
    other: int,
    address: str,
    port: int,
    token: bytes,
    *,
    seconds: float,
    send_seconds: float,
    clock: Clock = time.time,
) -> Pair:
    """Measure the link to another rank, which answers at its `Listener` meanwhile."""
    connected = False
    with ThreadPoolExecutor(STREAMS) as threads, ExitStack() as stack:
        try:
            lines = [stack.enter_context(_connect(address, port, seconds)) for _ in range(STREAMS)]
            connected = True
            for stream, line in enumerate(lines):
                line.sendall(token + _HELLO.pack(rank, stream))
            trips, offsets = _ping(lines[0], clock)
            there = _send_for(lines[0], send_seconds)
            back = _receive_all(lines[0])
            other_way = threads.submit(_send_for, lines[1], send_seconds)
            both = min(_receive_all(lines[0]), other_way.result())
            several = sum(threads.map(lambda line: _send_for(line, send_seconds), lines))
        except OSError as error:
            words = _words(error, seconds, connecting=not connected)
            return Pair(rank, other, problem=f"{address}:{port}: {words}", connected=connected)
    # The offset of the fastest round trip is the least disturbed.
    offset = offsets[trips.index(min(trips))]
    return Pair(rank, other, "", median(trips), there, back, both, several, offset, True)


def measure(
    peers: Rendezvous,
    present: Sequence[int],
    addresses: dict[int, str],
    *,
    token: bytes,
    budget_seconds: float,
    seconds: float,
    clock: Clock = time.time,
) -> list[Pair]:
    """Measure the links of this rank to all others; each pair is reported by its lower rank.

    Args:
        peers: of all ranks.
        present: the ranks that came.
        addresses: at which each of them listens.
        token: that all of them know.
        budget_seconds: for all rounds together.
        seconds: how long to wait for one answer.
        clock: of this machine.
    """
    rounds = schedule(present)
    send_seconds = min(0.8, max(0.15, budget_seconds / (5 * max(1, len(rounds)))))
    try:
        listener = Listener(addresses[peers.rank], token, clock)
    except OSError as error:
        peers.put("listener", {"port": 0, "problem": f"cannot listen at {addresses[peers.rank]}: {error.strerror}"})
        listener = None
    else:
        peers.put("listener", {"port": listener.port, "problem": ""})
    listeners = peers.collect("listener", present, seconds=seconds)
    found: list[Pair] = []
    for number, pairs in enumerate(rounds):
        # All begin a round together, so that no link carries two measurements at once. Who waited for a caller that did
        # not come is later than the others by that wait.
        peers.put(f"round/{number}", 1)
        peers.collect(f"round/{number}", listeners, seconds=2 * seconds)
        pair = next((pair for pair in pairs if peers.rank in pair), None)
        if pair is None:
            continue
        a, b = pair
        problems = [_problem(rank, listeners.get(rank)) for rank in pair]
        if any(problems):
            if peers.rank == a:
                found.append(Pair(a, b, problem=next(filter(None, problems))))
        elif peers.rank == b:
            assert listener is not None, "it has no problem"

            def given_up(caller: int = a, name: str = f"failed/{number}") -> bool:
                return caller in peers.collect(name, [caller], seconds=0.0)

            listener.answer(a, seconds, send_seconds=send_seconds, given_up=given_up)
        else:
            args = (a, b, addresses[b], listeners[b]["port"], token)
            found.append(call(*args, seconds=seconds, send_seconds=send_seconds, clock=clock))
            if found[-1].problem:
                peers.put(f"failed/{number}", 1)
    if listener is not None:
        listener.close()
    return found


def _connect(address: str, port: int, seconds: float) -> socket.socket:
    line = socket.create_connection((address, port), timeout=min(seconds, _CONNECT_SECONDS))
    line.settimeout(seconds)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line


def _ping(line: socket.socket, clock: Clock) -> tuple[list[float], list[float]]:
    """Return the durations of some round trips, and by how much the other clock is ahead in each."""
    trips: list[float] = []
    offsets: list[float] = []
    for _ in range(PINGS):
        sent, start = clock(), time.perf_counter()
        line.sendall(_MORE)
        (theirs,) = _CLOCK.unpack(_receive(line, _CLOCK.size))
        trips.append(time.perf_counter() - start)
        offsets.append(theirs - (sent + trips[-1] / 2))
    return trips, offsets


def _send_for(line: socket.socket, seconds: float) -> float:
    """Send for so many seconds; returns the bits per second at which the receiver got it."""
    more, last = _MORE + bytes(_CHUNK - 1), _LAST + bytes(_CHUNK - 1)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        line.sendall(more)
    line.sendall(last)
    nbytes, duration = _RESULT.unpack(_receive(line, _RESULT.size))
    return 8 * nbytes / duration


def _receive_all(line: socket.socket) -> float:
    """Receive until the last chunk; sends bytes and seconds to the sender, and returns the rate.

    The first third is left out: a connection starts slowly, and buffers on the way fill at any speed.
    """
    buffer = bytearray(_CHUNK)
    arrivals: list[float] = []
    while True:
        _receive_into(line, buffer)
        arrivals.append(time.perf_counter())
        if buffer[0] == _LAST[0]:
            break
    skipped = len(arrivals) // 3
    # A link so slow that few chunks arrive is timed from the first one.
    start = arrivals[skipped]
    nbytes, seconds = float(_CHUNK * (len(arrivals) - 1 - skipped)), max(arrivals[-1] - start, 1e-9)
    if nbytes == 0:
        nbytes, seconds = float(_CHUNK), max(seconds, 1.0)
    line.sendall(_RESULT.pack(nbytes, seconds))
    return 8 * nbytes / seconds


def _receive(line: socket.socket, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    _receive_into(line, buffer)
    return bytes(buffer)


def _receive_into(line: socket.socket, buffer: bytearray) -> None:
    view = memoryview(buffer)
    while view:
        if not (count := line.recv_into(view)):
            raise ConnectionResetError("the other rank hung up")
        view = view[count:]


def _problem(rank: int, listener: dict[str, Any] | None) -> str:
    """Return why no rank can connect to this one, by its report of its listener; "" if others can."""
    if listener is None:
        return f"rank {rank} did not answer"
    return f"rank {rank} {listener['problem']}" if listener["problem"] else ""


def _words(error: OSError, seconds: float, *, connecting: bool = False) -> str:
    if isinstance(error, TimeoutError):
        limit = min(seconds, _CONNECT_SECONDS) if connecting else seconds
        return f"no answer within {limit:g} s" + "; a firewall may drop the packets" * connecting
    if connecting and isinstance(error, ConnectionRefusedError):
        return "refused: nothing listens there, or a firewall rejects it"
    return error.strerror or str(error)
