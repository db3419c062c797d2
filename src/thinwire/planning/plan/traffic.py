# SPDX-License-Identifier: Apache-2.0
"""The messages of one worker in each step: the real strategy, run on meta tensors.

No method is described a second time here: `attach` makes the worker, with a Comm that records messages instead of
sending them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from thinwire.core.comm.counting import CountingComm
from thinwire.core.comm.work import Meter, Work
from thinwire.errors import ConfigError
from thinwire.methods.optimizers.one_bit_adam import OneBitAdam
from thinwire.methods.optimizers.one_bit_lamb import OneBitLamb
from thinwire.methods.optimizers.zero_one_adam import ZeroOneAdam
from thinwire.methods.strategies.base import Strategy
from thinwire.methods.topology.base import Topology
from thinwire.planning.plan.objects import Objects
from thinwire.worker.attach import attach
from thinwire.worker.compatibility import evaluates_several_gradients
from thinwire.worker.worker import Worker, internals_of

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]

MAX_STEPS = 10_000
"""Steps of a dry run after which it stops looking for traffic that repeats."""

# Several times a usual period, so that a strategy whose period is not in a field of that name is counted right too; and
# for one that sends something at every step.
_MIN_STEPS, _FEW_STEPS = 128, 16
# So many rounds, and so many steps, without a repetition: there is none.
_ROUNDS, _STEPS = 4, 2048
# For a rank beside one whose period is known.
_FEWEST_STEPS = 4


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
    """The traffic of one worker in one step.

    Attributes:
        collectives: bytes sent in each collective call.
        exchanges: messages to and from named ranks.
        surplus: bytes received in collectives beyond those sent; negative where more are sent.
        objects: written and read where the run is over a bucket.
    """

    collectives: tuple[float, ...]
    exchanges: tuple[Exchange, ...]
    surplus: float = 0.0
    objects: Objects = Objects()

    @property
    def sent(self) -> float:
        """Bytes of payload sent."""
        return sum(self.collectives) + sum(len(each.dst) * each.nbytes for each in self.exchanges)

    @property
    def received(self) -> float:
        """Bytes of payload received."""
        return sum(self.collectives) + self.surplus + self.received_from_named

    @property
    def received_from_named(self) -> float:
        """Bytes of payload received in messages from named ranks."""
        return sum(len(each.src) * each.nbytes for each in self.exchanges)

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
        self.exchanges, self._surplus, self._objects = list[Exchange](), 0, Objects()
        self.forget()

    def forget(self) -> None:
        """Drop everything recorded so far."""
        self.meter = self._traffic = Traffic()
        self.take()

    def take(self) -> StepTraffic:
        """Return everything recorded since the last call."""
        step = StepTraffic(tuple(self._traffic.collectives), tuple(self.exchanges), self._surplus, self._objects)
        self._traffic.collectives.clear()
        self.exchanges, self._surplus, self._objects = list[Exchange](), 0, Objects()
        return step

    def _all_reduce_(self, x: Tensor) -> Work[Tensor]:
        self._objects = self._objects.plus(Objects.of_all_reduce(x.nbytes, self.size))
        return super()._all_reduce_(x)

    def _all_reduce_min_(self, x: Tensor) -> Work[Tensor]:
        self._objects = self._objects.plus(Objects.of_gather(x.nbytes, self.size))
        return super()._all_reduce_min_(x)

    def _all_gather(self, x: Tensor) -> Work[list[Tensor]]:
        if not self.calling:  # over a bucket, calls carry their checks
            self._objects = self._objects.plus(Objects.of_gather(x.nbytes, self.size))
        return super()._all_gather(x)

    def _broadcast_(self, x: Tensor, src: int) -> Work[Tensor]:
        own = int(src == self.rank)
        objects = Objects.of(own, 1 - own, own * x.nbytes, (1 - own) * x.nbytes, self.size)
        self._objects = self._objects.plus(objects)
        return super()._broadcast_(x, src)

    def _all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]:
        # The one collective in which a rank may receive more or less than it sends.
        others = [rank for rank in range(self.size) if rank != self.rank]
        up, down = sum(xs[r].nbytes for r in others), sum(sizes[r] * xs[0].element_size() for r in others)
        self._surplus += down - up
        self._objects = self._objects.plus(Objects.of(len(others), len(others), up, down, self.size))
        return super()._all_to_all(xs, sizes)

    def _send_recv(self, x: Tensor, dst: Sequence[int], src: Sequence[int]) -> Work[list[Tensor]]:
        self.exchanges.append(Exchange(x.nbytes, tuple(dst), tuple(src)))
        up, down = len(dst) * x.nbytes, len(src) * x.nbytes
        self._objects = self._objects.plus(Objects.of(len(dst), len(src), up, down, self.size))
        return super()._send_recv(x, dst, src)


class DryRun:
    """One rank's run of a strategy, without data and without other ranks.

    `attach` makes its worker as it makes any other, from parameters on the meta device; a step is a flush of all
    gradient buckets, `record_batch` and a step of a real optimizer.

    Args:
        strategy: the recipe.
        parameters: the shape of each parameter tensor, in the model's order; a number is the size of a vector.
        workers: number of workers.
        rank: this worker.
        dtype: of the parameters; or of each of them.
        bucket_bytes: bytes of gradient per message, as for `attach`.
        optimizer: makes the optimizer; unless given, the first of SGD, 1-bit Adam, 1-bit LAMB and 0/1 Adam that the
            strategy takes.

    Attributes:
        worker: the worker, whose replicas hold the strategy's state.
        comm: what the worker sends through.
        repeats: whether `period` has found that the traffic repeats.

    Raises:
        ConfigError: the recipe cannot serve this number of workers, or this optimizer.

    Example:
        >>> import torch, thinwire
        >>> from thinwire.planning.plan.traffic import DryRun
        >>> settings = dict(workers=4, rank=0, dtype=torch.float32, bucket_bytes=1 << 20)
        >>> run = DryRun(thinwire.AllReduce(), [(100, 10), 100], **settings)
        >>> run.step().sent
        6600.0
    """

    def __init__(
        self,
        strategy: Strategy,
        parameters: Sequence[int | Sequence[int]],
        *,
        workers: int,
        rank: int,
        dtype: torch.dtype | Sequence[torch.dtype],
        bucket_bytes: int,
        optimizer: MakeOptimizer | None = None,
    ) -> None:
        dtypes = [dtype] * len(parameters) if isinstance(dtype, torch.dtype) else dtype
        shapes = [(shape,) if isinstance(shape, int) else tuple(shape) for shape in parameters]
        empty = [torch.empty(shape, dtype=each, device="meta") for shape, each in zip(shapes, dtypes, strict=True)]
        model = nn.ParameterList(empty)
        self.comm = RecordingComm(rank, workers)
        made = default_optimizer(strategy, model, workers, make=optimizer)
        self.worker = attach(model, made, strategy, comm=self.comm, bucket_bytes=bucket_bytes)
        self._gradients = [(parameter, torch.empty_like(parameter)) for parameter in model]
        spare_arithmetic(made, model, optimizer)
        self.repeats = True
        self.comm.forget()
        if strategy.traits.steady_from > 1:
            # The first step is real, so that the optimizer has its state; then the clock is put forward.
            self.step()
            for replica in self.worker.replicas:
                replica.step = strategy.traits.steady_from - 1
            self.step()
            self.comm.forget()

    def step(self) -> StepTraffic:
        """Return one training step, as a loop takes it."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        step_with_gradients(self.worker)
        return self.comm.take()

    def period(self, *, max_steps: int = MAX_STEPS) -> tuple[StepTraffic, ...]:
        """Return the traffic of the shortest sequence of steps after which it repeats.

        Where it does not repeat, `repeats` is False, and the steps are the later half of those that were run: of four
        times the recipe's own periods or 2048, whichever are more, and of `max_steps` at most.
        """
        declared = cycle(self.worker.strategy, self.comm.size)
        steps: list[StepTraffic] = []
        for least in (_FEW_STEPS, _MIN_STEPS):
            length = min(declared * -(-least // declared), max_steps // 2)
            # The first round may differ, as messages of an earlier step are in flight only from some step on: look for
            # two equal rounds in a row.
            while len(steps) + length <= min(max_steps, max(_ROUNDS * length, _STEPS)):
                steps += [self.step() for _ in range(length)]
                now, before = steps[-length:], steps[-2 * length : -length]
                if now == before:
                    # A step without a message may belong to a period that no field tells; look longer then.
                    if least == _FEW_STEPS and not all(step.messages for step in now):
                        break
                    return next(tuple(now[:n]) for n in range(1, length + 1) if now[:n] * (length // n) == now)
                # A period that no field tells: what was sent in the later half of the steps repeats several times.
                if (found := _repeating(steps[len(steps) // 2 :])) is not None and len(steps) >= 2 * _MIN_STEPS:
                    return found
        self.repeats = False
        return tuple(steps[len(steps) // 2 :])

    def period_like(self, steps: int) -> tuple[StepTraffic, ...]:
        """`period`, sooner: where another rank's is known to have so many steps."""
        length = steps * -(-_FEWEST_STEPS // steps)
        # The first round may differ, as there.
        _, before, now = ([self.step() for _ in range(length)] for _ in range(3))
        return tuple(now[:steps]) if now == before else self.period()


def _repeating(steps: Sequence[StepTraffic]) -> tuple[StepTraffic, ...] | None:
    """Return the shortest sequence that makes up these steps, at least three times; None if there is none."""
    for n in range(1, len(steps) // 3 + 1):
        if steps[n:] == steps[:-n]:
            return tuple(steps[:n])
    return None


def reads_numbers(make: MakeOptimizer, model: nn.ParameterList) -> bool:
    """Return True if an optimizer's step reads numbers, such as norms, so that it cannot run on meta tensors.

    Without gradients it can.

    Args:
        make: makes the optimizer.
        model: parameters on the meta device; not changed.

    Raises:
        ConfigError: its step needs a closure, and how many gradients that evaluates depends on numbers.
    """
    parameters = [nn.Parameter(torch.empty_like(p)) for p in model]
    tried = make(parameters)
    if evaluates_several_gradients(tried):
        raise ConfigError(
            f"optimizer={type(tried).__name__}: the number of gradients that a step evaluates depends on data. Use "
            "an optimizer that evaluates one gradient in a step, such as SGD. Each evaluation sends as much as its step"
        )
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    try:
        tried.step()
    except RuntimeError:
        return True
    return False


def step_with_gradients(worker: Worker) -> None:
    """Take a step with the gradients that the parameters have."""
    if (backward := internals_of(worker).backward) is not None:
        backward.flush()
    worker.record_batch(1, loss=0.0)
    worker.optimizer.step()


def spare_arithmetic(optimizer: Optimizer, model: nn.ParameterList, make: MakeOptimizer | None) -> None:
    """Drop gradients on the meta device, where arithmetic is slow, before each step in which none are needed.

    Optimizers of torch have all of their state after one step. One that reads numbers cannot step with gradients at
    all; those of `default_optimizer` do not.
    """
    without, started = make is not None and reads_numbers(make, model), False

    def drop(*_: object) -> None:
        nonlocal started
        if without or (started and type(optimizer).__module__.startswith("torch.optim")):
            for parameter in model:
                parameter.grad = None
        started = True

    optimizer.register_step_pre_hook(drop)


def default_optimizer(
    strategy: Strategy, model: nn.Module, workers: int, *, make: MakeOptimizer | None = None
) -> Optimizer:
    """Return the first of plain SGD and the optimizers of the 1-bit family that a strategy takes, unless one is made.

    Raises:
        ConfigError: it takes none of them.
    """
    if make is not None:
        return make(list(model.parameters()))
    refusal = ConfigError(f"{strategy}: give the optimizer that it works with")
    for kind in (SGD, OneBitAdam, OneBitLamb, ZeroOneAdam):
        optimizer = kind(model.parameters(), lr=1.0)
        try:
            strategy.check(workers, optimizer)
        except ConfigError as error:
            refusal = error
        else:
            return optimizer
    raise refusal


def cycle(strategy: Strategy, workers: int) -> int:
    """Return the least common multiple of all periods in a recipe: fields of that name, and those of its topologies."""
    periods = [value for name, value in parts_of(strategy) if name.endswith("period") and isinstance(value, int)]
    return lcm(*periods, *(topology.period(workers) for topology in topologies(strategy)))


def topologies(recipe: object) -> list[Topology]:
    """Return all topologies in a recipe."""
    return [part for _, part in parts_of(recipe) if isinstance(part, Topology)]


def sizes_of_nodes(recipe: object) -> list[int]:
    """Ranks per node, of all parts of a recipe that treat the ranks of a node apart."""
    return [value for name, value in parts_of(recipe) if name == "node_size" and isinstance(value, int)]


def parts_of(recipe: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a recipe and all values of its fields, nested ones too, each with the name of its field."""
    yield name, recipe
    for each in fields(recipe) if is_dataclass(recipe) else ():
        yield from parts_of(getattr(recipe, each.name), each.name)
