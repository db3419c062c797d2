# SPDX-License-Identifier: Apache-2.0
"""The comm of a simulated worker: its values are those of threads, its times those of a network."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from thinwire.core.comm.base import Comm
from thinwire.core.comm.mailbox.base import Mailbox
from thinwire.core.comm.work import Work, describe
from thinwire.errors import MismatchError, ThinwireError, error_named
from thinwire.planning.simulate.mailbox import SimulatedMailbox
from thinwire.planning.simulate.wires import Wires
from thinwire.planning.simulate.world import Connections, Pending, World

T = TypeVar("T")
U = TypeVar("U")

_CHAIN_BYTES = 1 << 15
"""Longer vectors are broadcast along a chain of ranks, as `GroupComm` does, in chunks of at least this size."""
_CHUNKS, _MOST_CHUNK_BYTES = 16, 1 << 20
_CONTROL_BYTES = 64


@dataclass
class Collective:
    """One collective call: the inputs of the ranks that have joined it, when they did, and the result.

    Attributes:
        label: the operation, for errors.
        first_rank: the rank that joined first.
        inputs: by rank.
        launched: when each rank joined.
        parts: each joined rank's part.
        result: known when all that it depends on have joined.
        solved: of a broadcast, when the first and the last chunk are at a position, and which rank was last before it.
    """

    label: str
    first_rank: int
    inputs: dict[int, Any] = field(default_factory=dict[int, Any])
    launched: dict[int, float] = field(default_factory=dict[int, float])
    parts: dict[int, Pending] = field(default_factory=dict[int, Pending])
    result: Any = None
    solved: dict[int, tuple[float, float, int]] = field(default_factory=dict[int, tuple[float, float, int]])


@dataclass(eq=False)
class Exchange:
    """A message of `send_recv`, sent and expected.

    As with Gloo, the transfer begins when both are so far.
    """

    sent_at: float | None = None
    expected_at: float | None = None
    content: Tensor | None = None
    sender: Pending | None = None
    receiver: Pending | None = None


@dataclass
class SimulatedGroup(Connections):
    """The connections of one comm, and what is under way on them.

    Attributes:
        wires: between its ranks.
        ended: by rank, when its last collective call ends, where calls follow one another on one stream.
    """

    wires: Wires = field(kw_only=True)
    ended: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    collectives: dict[int, Collective] = field(default_factory=dict[int, Collective])
    exchanges: dict[tuple[int, int, int], Exchange] = field(default_factory=dict[tuple[int, int, int], Exchange])


class SimulatedComm(Comm):
    """One simulated worker's comm; `simulate.run` makes them.

    Args:
        world: shared by the workers.
        group: its connections, shared too.
        rank: this worker's.
        timeout: how long one wait may last, in virtual seconds.

    Attributes:
        variation: a factor of what this worker computes in its present step, from the network's spread.

    Example:
        >>> import torch
        >>> from thinwire.planning import simulate
        >>> def work(comm):
        ...     comm.compute(0.1 * comm.rank)
        ...     comm.all_reduce_(torch.ones(1000)).wait()
        ...     return round(comm.now, 4)
        >>> simulate.run(3, work)
        [0.2004, 0.2002, 0.2003]
    """

    checks_first_steps = False

    def __init__(self, world: World, group: SimulatedGroup, rank: int, *, timeout: float = 60.0) -> None:
        super().__init__(rank, world.size, timeout=timeout)
        self.runtime = world.times.runtime(self.rank)
        self._world, self._group, self._wires = world, group, group.wires
        self.variation = 1.0
        self._calls = 0
        self._sent: Counter[int] = Counter()
        self._expected: Counter[int] = Counter()
        self._step_began: tuple[int, float, float] | None = None

    @property
    def now(self) -> float:
        """Return the virtual seconds since the start."""
        return self._world.times.now

    @property
    def slowdown(self) -> float:
        """Return how many times as long this worker computes as others."""
        return self._world.draws.slowdown(self.rank)

    def compute(self, seconds: float | None = None) -> None:
        """Let this worker compute for a while: what the work itself does takes no virtual time.

        A training step begins here: the record's steps are from one call to the next.

        Args:
            seconds: of this worker if it is as fast as the others; a slow one takes a multiple. Unless given, it is
                drawn from the compute time of the simulation.
        """
        self._world.check_step(self.rank, self.step)
        self.end_step()
        start = self.now
        draws = self._world.draws
        self.variation = draws.variation(self.rank)
        own = draws.compute_seconds(self.rank) if seconds is None else seconds * draws.slowdown(self.rank)
        own *= self.variation
        self._world.compute(self.rank, self.step, own)
        self._step_began = self.step, start, self.now - start

    def sleep(self, seconds: float) -> None:
        """Let this worker do something for a while that is no step of its own; pauses come on top."""
        self._world.take(self.rank, seconds)

    def end_step(self) -> None:
        """Write down the training step that the last call of `compute` has begun, if there is one."""
        if self._step_began is not None:
            step, start, computed = self._step_began
            self._world.ends_step(self.rank, step, start, computed)
            self._step_began = None

    # -- collectives ---------------------------------------------------------------------------------------------

    def _all_reduce_(self, x: Tensor) -> Work[Tensor]:
        return self._reduce_("all_reduce", x, _total)

    def _all_reduce_min_(self, x: Tensor) -> Work[Tensor]:
        return self._reduce_("all_reduce_min", x, _least)

    def _reduce_(self, operation: str, x: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Work[Tensor]:
        label, nbytes, combine = f"{operation} of {describe(x)}", x.nbytes, _first if x.is_meta else combine
        reduced = self._join(label, x, combine, lambda times: self._wires.all_reduce(times, nbytes))
        return reduced.then(lambda reduced: x if x.is_meta else x.copy_(reduced))

    def _broadcast_(self, x: Tensor, src: int) -> Work[Tensor]:
        self._world.check_step(self.rank, self.step)
        label = f"broadcast of {describe(x)} from {src}"
        collective, pending = self._enter(label, x)
        if self.rank == src:
            collective.result = x if x.is_meta else x.clone()
        # On one stream it waits for this rank's earlier calls, whose ends are known when all ranks have joined them.
        if not self._world.network.one_stream or len(collective.launched) == self.size:
            self._solve_broadcast(collective, src, x.nbytes)
        done = Work(lambda: self._finish(collective, pending))
        return done.then(lambda chosen: x if x.is_meta or self.rank == src else x.copy_(chosen))

    def _all_gather(self, x: Tensor) -> Work[list[Tensor]]:
        return self._all_gather_rows(x).then(lambda rows: list(rows.clone().unbind()))

    def _all_gather_rows(self, x: Tensor) -> Work[Tensor]:
        # All ranks read one tensor: copies for each would take time that grows with the square of their number.
        nbytes = x.nbytes

        def stacked(xs: list[Tensor]) -> Tensor:
            return x.new_empty((self.size, *x.shape)) if x.is_meta else torch.stack(xs)

        label = f"all_gather of {describe(x)}"
        return self._join(label, x, stacked, lambda times: self._wires.all_gather(times, nbytes))

    def _all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]:
        def own_column(rows: list[list[Tensor]]) -> list[Tensor]:
            column = [row[self.rank] for row in rows]
            for peer, (x, size) in enumerate(zip(column, sizes, strict=True)):
                if x.numel() != size:
                    raise MismatchError(f"rank {peer} scatters {describe(x)} to rank {self.rank}, which expects {size}")
            return column

        collective_rows: list[list[Tensor]] = []

        def copied(rows: list[list[Tensor]]) -> list[list[Tensor]]:
            collective_rows[:] = [[x if x.is_meta else x.clone() for x in row] for row in rows]
            return collective_rows

        def timing(times: Sequence[float]) -> list[float]:
            nbytes = [[x.nbytes for x in row] for row in collective_rows]
            return self._wires.all_to_all(times, nbytes)

        return self._join("all_to_all", list(xs), copied, timing).then(own_column)

    def _join(
        self, label: str, own: T, combine: Callable[[list[T]], U], timing: Callable[[Sequence[float]], Sequence[float]]
    ) -> Work[U]:
        """Join this rank's next collective call; the last rank to join computes the result, and when each has it."""
        self._world.check_step(self.rank, self.step)
        collective, pending = self._enter(label, own)
        if len(collective.inputs) == self.size:
            collective.result = combine([collective.inputs[rank] for rank in range(self.size)])
            done = self._after_last([collective.launched[rank] for rank in range(self.size)], timing)
            last = max(range(self.size), key=lambda rank: collective.launched[rank])
            came = collective.launched[last]
            for rank, part in collective.parts.items():
                part.know(self._world.times, done[rank], last, came)
            # Drops the vectors of ranks that have continued.
            collective.inputs.clear()
        return Work(lambda: self._finish(collective, pending))

    def _after_last(
        self, launched: Sequence[float], timing: Callable[[Sequence[float]], Sequence[float]]
    ) -> Sequence[float]:
        """Return when each rank's part of a collective ends; on one stream, it begins after the one before."""
        if not self._world.network.one_stream:
            return timing(launched)
        ended = self._group.ended
        done = timing([max(time, ended[rank]) for rank, time in enumerate(launched)])
        ended.update(enumerate(done))
        return done

    def _enter(self, label: str, own: Any) -> tuple[Collective, Pending]:
        self._check_open(lambda: self._where(label))
        group, call = self._group, self._calls
        self._calls += 1
        collective = group.collectives.setdefault(call, Collective(label, self.rank))
        if collective.label != label:
            raise MismatchError(
                f"call {call} is {collective.label} on rank {collective.first_rank} and {label} on rank {self.rank}"
            )
        collective.inputs[self.rank], collective.launched[self.rank] = own, self.now

        def late() -> list[int]:
            return [rank for rank in range(self.size) if rank not in collective.launched]

        pending = collective.parts[self.rank] = Pending(self.rank, 1, late)
        if len(collective.launched) == self.size:
            del group.collectives[call]
        return collective, pending

    def _finish(self, collective: Collective, pending: Pending) -> Any:
        self._world.wait(self._group, pending, lambda: self._where(collective.label), self.timeout)
        return collective.result

    def _solve_broadcast(self, collective: Collective, src: int, nbytes: float) -> None:
        """When a broadcast reaches each rank: along a chain, or down Gloo's tree; ranks before it must have joined."""
        size, wires = self.size, self._wires
        vector = nbytes * self._world.network.magnified
        chain = size > 2 and vector > _CHAIN_BYTES
        chunk = min(_MOST_CHUNK_BYTES, max(_CHAIN_BYTES, vector / _CHUNKS)) if chain else vector
        ahead = [0 if self._world.network.one_stream else (self.rank - src) % size]
        while ahead:
            place = ahead.pop()
            rank = (src + place) % size
            parent = None if not place else place - 1 if chain else place & ~(1 << (place.bit_length() - 1))
            if place in collective.solved or rank not in collective.launched:
                continue
            launched = max(collective.launched[rank], self._group.ended[rank])
            if parent is None:
                head = tail = launched + self._world.network.per_call
                last = rank
            elif parent not in collective.solved:
                continue
            else:
                before, (head, tail, last) = (src + parent) % size, collective.solved[parent]
                if launched > tail:
                    last = rank
                begin = max(head, launched) if chain else max(tail, launched)
                arrived = wires.send(begin, before, rank, nbytes)[1]
                head = begin + wires.latency(before, rank) + chunk / wires.rate(before, rank)
                tail = max(arrived, tail + wires.latency(before, rank) + chunk / wires.rate(before, rank))
            collective.solved[place] = head, tail, last
            if self._world.network.one_stream:
                self._group.ended[rank] = tail
            collective.parts[rank].know(self._world.times, tail, last, collective.launched[last])
            ahead += (
                [place + 1] if chain else [place | 1 << bit for bit in range(place.bit_length(), size.bit_length())]
            )
            ahead[:] = [each for each in ahead if each < size]

    # -- messages ------------------------------------------------------------------------------------------------

    def _send_recv(self, x: Tensor, dst: Sequence[int], src: Sequence[int]) -> Work[list[Tensor]]:
        def where() -> str:
            return self._where(f"send_recv with ranks {', '.join(map(str, sorted({*dst, *src})))}")

        self._check_open(where)
        self._world.check_step(self.rank, self.step)
        pending = Pending(self.rank, len(dst) + len(src), list)
        unmatched: list[tuple[int, Exchange]] = []
        for peer in dst:
            exchange = self._exchange(self.rank, peer, self._sent)
            exchange.sent_at, exchange.content = self.now, x if x.is_meta else x.clone()
            exchange.sender = pending
            self._match(self.rank, peer, exchange)
            unmatched.append((peer, exchange))
        received: list[Exchange] = []
        for peer in src:
            exchange = self._exchange(peer, self.rank, self._expected)
            exchange.expected_at, exchange.receiver = self.now, pending
            self._match(peer, self.rank, exchange)
            received.append(exchange)
            unmatched.append((peer, exchange))
        pending.late = lambda: sorted(
            {peer for peer, each in unmatched if each.sent_at is None or each.expected_at is None}
        )

        def finish() -> list[Tensor]:
            self._world.wait(self._group, pending, where, self.timeout)
            return [_checked(self.rank, peer, each.content, x) for peer, each in zip(src, received, strict=True)]

        return Work(finish)

    def _exchange(self, src: int, dst: int, counts: Counter[int]) -> Exchange:
        """The next message from one rank to another; numbered, so that messages match whatever the order of waits."""
        peer = dst if src == self.rank else src
        key = (src, dst, counts[peer])
        counts[peer] += 1
        if key in self._group.exchanges:
            return self._group.exchanges.pop(key)
        return self._group.exchanges.setdefault(key, Exchange())

    def _match(self, src: int, dst: int, exchange: Exchange) -> None:
        """Begin the transfer as soon as the sender knows that the receiver expects it."""
        if exchange.sent_at is None or exchange.expected_at is None:
            return
        world, content = self._world, exchange.content
        sender, receiver = exchange.sender, exchange.receiver
        assert content is not None and sender is not None and receiver is not None, "both sides have come"
        sent_at, expected_at = exchange.sent_at, exchange.expected_at
        begin = max(sent_at, expected_at + self._wires.latency(dst, src))

        def transfer() -> None:
            left, arrived = self._wires.send(world.times.now, src, dst, content.nbytes)
            if delay := world.draws.message_delay(src):
                world.record.late_messages += 1
            sender.know(world.times, left, dst, expected_at)
            receiver.know(world.times, arrived + delay, src, sent_at)

        world.times.at(begin, transfer)

    # -- the rest ------------------------------------------------------------------------------------------------

    def raise_on_all(self, error: ThinwireError) -> NoReturn:
        """Raise an error that this rank has found, here and in the waits of all others."""
        first = self._world.share(error)
        if first is error:
            raise error
        raise error_named(type(first).__name__, str(first)) from error

    def _open_mailbox(self, epoch: int, like: Tensor, capacity: int) -> Mailbox:
        box = SimulatedMailbox(self, self._world, epoch, like, capacity)
        if self.size > 1:
            # A barrier, as with the exchange of addresses: no rank may send before all mailboxes are open.
            label, wires = f"opening of mailbox {epoch}", self._wires
            self._join(label, None, lambda _: None, lambda times: wires.all_gather(times, _CONTROL_BYTES)).wait()
        return box

    def _check_open(self, where: Callable[[], str]) -> None:
        self._world.check_heard()
        if (fault := self._group.fault) is not None:
            raise type(fault)(f"{where()}: {fault}")

    def _where(self, operation: str) -> str:
        return f"rank {self.rank}, step {self.step}, {operation}"


def _first(xs: list[Tensor]) -> Tensor:
    return xs[0]


def _total(xs: list[Tensor]) -> Tensor:
    return reduce(torch.Tensor.add_, xs[1:], xs[0].clone())


def _least(xs: list[Tensor]) -> Tensor:
    return reduce(torch.minimum, xs).clone()


def _checked(rank: int, peer: int, message: Tensor | None, like: Tensor) -> Tensor:
    assert message is not None, "it has arrived"
    if message.shape != like.shape or message.dtype != like.dtype:
        raise MismatchError(f"rank {peer} sent {describe(message)}, rank {rank} expects {describe(like)}")
    return message
