"""What one worker would send, step by step: the real strategy, run on meta tensors.

No method is described a second time here: its hooks are called as `attach` calls them, with a Comm that records
messages instead of sending them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from math import lcm
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.counting import CountingComm
from thinwire.comm.work import Meter, Work, nbytes_of
from thinwire.replica.flat import lay_out
from thinwire.replica.replica import Replica
from thinwire.strategies.base import Strategy
from thinwire.topology.base import Topology
from thinwire.worker.buckets import cut

MAX_STEPS = 10_000
"""Steps of a dry run after which it stops looking for traffic that repeats."""

# Several times a usual period, so that a strategy whose period is not in a field of that name is counted right too.
_MIN_STEPS = 128


@dataclass(frozen=True)
class Exchange:
    """One message, sent to some ranks and received from others.

    Attributes:
        nbytes: of one copy.
        dst: the ranks it is sent to.
        src: the ranks that send one like it.
    """

    nbytes: int
    dst: tuple[int, ...]
    src: tuple[int, ...]


@dataclass(frozen=True)
class StepTraffic:
    """What one worker sends and receives in one step.

    Attributes:
        collectives: bytes sent in each collective call; as many are received.
        exchanges: messages to and from named ranks.
    """

    collectives: tuple[float, ...]
    exchanges: tuple[Exchange, ...]

    @property
    def sent(self) -> float:
        """Bytes of payload sent."""
        return sum(self.collectives) + sum(len(each.dst) * each.nbytes for each in self.exchanges)

    @property
    def received(self) -> float:
        """Bytes of payload received."""
        return sum(self.collectives) + sum(len(each.src) * each.nbytes for each in self.exchanges)

    @property
    def messages(self) -> int:
        """Calls in which it sends anything."""
        return len(self.collectives) + sum(len(each.dst) for each in self.exchanges)

    @property
    def largest(self) -> float:
        """Bytes of the largest message; for a collective, what this worker sends in it."""
        return max([*self.collectives, *(each.nbytes for each in self.exchanges if each.dst)], default=0)


@dataclass
class Traffic(Meter):
    """A meter that also lists the bytes of each collective call."""

    collectives: list[float] = field(default_factory=list[float])

    def sent(self, operation: str, nbytes: float) -> None:
        """Count one call."""
        super().sent(operation, nbytes)
        if operation != "send_recv":
            self.collectives.append(nbytes)


class RecordingComm(CountingComm):
    """Sends nothing and records what would have been sent.

    Attributes:
        exchanges: messages since the last `take`.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.meter = self._traffic = Traffic()
        self.exchanges: list[Exchange] = []

    def take(self) -> StepTraffic:
        """Return everything recorded since the last call."""
        step = StepTraffic(tuple(self._traffic.collectives), tuple(self.exchanges))
        self._traffic.collectives.clear()
        self.exchanges.clear()
        return step

    def _send_recv(self, x: Tensor, dst: Sequence[int], src: Sequence[int]) -> Work[list[Tensor]]:
        self.exchanges.append(Exchange(nbytes_of(x), tuple(dst), tuple(src)))
        return super()._send_recv(x, dst, src)


class DryRun:
    """One rank's run of a strategy, without data, gradients or other ranks.

    Args:
        strategy: the recipe.
        sizes: elements of each parameter tensor, in the model's order.
        workers: number of workers.
        rank: this worker.
        dtype: of the parameters.
        bucket_bytes: bytes of gradient per message, as for `attach`.

    Raises:
        ConfigError: the recipe cannot serve this number of workers.
    """

    def __init__(
        self,
        strategy: Strategy,
        sizes: Sequence[int],
        *,
        workers: int,
        rank: int,
        dtype: torch.dtype,
        bucket_bytes: int,
    ) -> None:
        strategy.check(workers)
        self.strategy = strategy
        self.comm = RecordingComm(rank, workers)
        x = torch.empty(sum(sizes), dtype=dtype, device="meta")
        self.replica = Replica(x, strategy.gradient_buffer(x), self.comm, lr=lambda: 1.0)
        self._parts: list[slice] = []
        if strategy.sends_gradients and workers > 1:
            tensors = [torch.empty(size, dtype=dtype, device="meta") for size in sizes]
            layout = lay_out([("", tensor) for tensor in tensors])
            self._parts = [bucket.part for bucket in cut(self.replica, tensors, layout, bucket_bytes)]
        strategy.start(self.replica)

    def step(self) -> StepTraffic:
        """Call the hooks of one training step, in the order in which a `Worker` calls them."""
        r = self.replica
        r.comm.step = r.step
        for work in [self.strategy.on_gradient(r, part) for part in self._parts]:
            if work is not None:
                work.wait()
        self.strategy.before_step(r)
        r.step += 1
        self.strategy.after_step(r)
        return self.comm.take()

    def period(self, *, max_steps: int = MAX_STEPS) -> tuple[StepTraffic, ...]:
        """The traffic of the shortest sequence of steps after which it repeats.

        Where it does not repeat within `max_steps`, that of the last steps that were run.
        """
        length = cycle(self.strategy, self.comm.size)
        length = min(length * -(-_MIN_STEPS // length), max_steps // 2)
        # The first round may differ, as it includes what `start` sent: look for two equal rounds in a row.
        before: tuple[StepTraffic, ...] = ()
        for _ in range(max_steps // length):
            now = tuple(self.step() for _ in range(length))
            if now == before:
                break
            before = now
        return next(before[:n] for n in range(1, length + 1) if before[:n] * (length // n) == before)


def cycle(strategy: Strategy, workers: int) -> int:
    """The least common multiple of all periods in a recipe: fields of that name, and those of its topologies."""
    return lcm(*_periods(strategy, workers))


def _periods(recipe: object, workers: int) -> Iterator[int]:
    if isinstance(recipe, Topology):
        yield recipe.period(workers)
    for name, value in _fields(recipe):
        if name.endswith("period") and isinstance(value, int):
            yield value
        yield from _periods(value, workers)


def topologies(recipe: object) -> Iterator[Topology]:
    """All topologies in a recipe."""
    if isinstance(recipe, Topology):
        yield recipe
    for _, value in _fields(recipe):
        yield from topologies(value)


def _fields(recipe: object) -> list[tuple[str, Any]]:
    if not is_dataclass(recipe):
        return []
    return [(each.name, getattr(recipe, each.name)) for each in fields(recipe)]


def busiest(strategy: Strategy, workers: int) -> int:
    """The rank that sends or receives most in a recipe's topologies; rank 0 where all are alike."""
    loads = [0] * workers
    for topology in topologies(strategy):
        for rank in range(workers):
            peers = [topology.peers(rank, workers, step) for step in range(topology.period(workers))]
            loads[rank] += max(sum(len(each.dst) for each in peers), sum(len(each.src) for each in peers))
    return loads.index(max(loads))
