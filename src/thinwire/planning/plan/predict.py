# SPDX-License-Identifier: Apache-2.0
"""How long a recipe's training step takes on a given network: the real strategy, simulated on meta tensors.

No formula describes a method here. `attach` makes every worker of a simulation, a backward pass of autograd hands the
gradients over one after the other, as fast as the model's own does, and the simulated network carries what is sent.
The strategy's own computation (codecs, averages, updates) is timed once, on real tensors without a network.

A strategy that decides by the numbers what it sends to whom, such as one with a leader, cannot run on meta tensors. It
is simulated with numbers, on smaller tensors, of whose messages each byte counts as many.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.comm.counting import CountingComm
from thinwire.core.comm.work import Work, completed, synchronize
from thinwire.core.validation import check_range
from thinwire.errors import ConfigError, MismatchError
from thinwire.methods.strategies.base import Strategy
from thinwire.methods.strategies.local.local_sgd import Local
from thinwire.planning.plan.traffic import (
    MakeOptimizer,
    cycle,
    default_optimizer,
    spare_arithmetic,
    step_with_gradients,
)
from thinwire.planning.simulate import DeadlockError, Network, SimulatedComm, UnlikeError, simulate
from thinwire.planning.simulate.durations import Duration
from thinwire.worker.attach import attach
from thinwire.worker.worker import Worker, internals_of

_FEWEST_STEPS, _MOST_STEPS = 8, 256
_BUCKET_BYTES = 8 << 20
PATIENCE = 1e9  # virtual seconds: a slow link is to be predicted, and not to time out
_MOST_NUMBERS = 1 << 16
"""Elements of all tensors in a simulation with numbers."""
MOST_WORKERS = 64
"""As many workers are simulated each on its own, unless `predict` is told otherwise."""


class EchoComm(CountingComm):
    """Sends nothing, and receives from every rank what this one has sent: payloads that can be decoded."""

    def _all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]:
        return completed([xs[self.rank].clone() for _ in sizes])


@dataclass(frozen=True)
class ModelTime:
    """A model's training step on one worker without communication; `thinwire doctor` measures it.

    Attributes:
        forward: seconds of the forward pass and of all else before the backward pass.
        backward: seconds of the backward pass.
        update: seconds of the optimizer's step.
        ready: for each parameter tensor in the model's order, the share of the backward pass that has passed when its
            gradient is final; empty if it is not known: then tensors take their time by their elements, the last first.
    """

    forward: float
    backward: float
    update: float = 0.0
    ready: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: a duration is negative, or a share is not within 0 and 1.
        """
        for name in ("forward", "backward", "update"):
            check_range(name, getattr(self, name), "[0, inf)", "0.01 is 10 ms")
        if any(not 0 <= share <= 1 for share in self.ready):
            raise ConfigError(f"ready={self.ready}: must be shares of the backward pass, from 0 to 1")

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.forward + self.backward + self.update


@dataclass(frozen=True)
class Prediction:
    """The mean costs of a training step of a recipe.

    Attributes:
        strategy: the recipe.
        seconds: of a step.
        alone: of a step without any communication, on the same workers.
        own_seconds: of the strategy's own computation, codecs included; part of `seconds`.
        payload_bytes: sent by one worker, the mean over workers.
        busiest_bytes: sent by the worker that sends most.
        memory_bytes: that one worker keeps in vectors of parameters, gradients and the strategy's state, without the
            optimizer's state and activations.
    """

    strategy: Strategy
    seconds: float
    alone: float
    own_seconds: float
    payload_bytes: float
    busiest_bytes: float
    memory_bytes: float

    def larger(self, factor: int) -> Prediction:
        """Return the same for tensors that are so many times as large."""
        sizes = {name: factor * getattr(self, name) for name in ("payload_bytes", "busiest_bytes", "memory_bytes")}
        return replace(self, **sizes)

    @property
    def exposed(self) -> float:
        """Seconds of a step that are only waiting, or lost to messages that need the processor."""
        return max(0.0, self.seconds - self.alone - self.own_seconds)

    @property
    def efficiency(self) -> float:
        """The speed divided by that of workers that do not communicate; at most 1."""
        return self.alone / self.seconds


@dataclass(frozen=True)
class Simulated:
    """The simulated work of a prediction; see `predict`.

    Attributes:
        order: parameter tensors in the order in which gradients are final, with the share of the backward pass of each.
    """

    strategy: Strategy
    workers: int
    shapes: Sequence[tuple[int, ...]]
    dtype: torch.dtype
    order: Sequence[tuple[int, float]]
    model_time: ModelTime
    own: Sequence[float]
    optimizer: MakeOptimizer | None
    bucket_bytes: int

    def smaller(self, factor: int) -> Simulated:
        """With tensors that are so many times smaller; buckets too, so that as many messages are sent."""
        shapes = [(max(1, prod(shape) // factor),) for shape in self.shapes]
        return replace(self, shapes=shapes, bucket_bytes=max(self.dtype.itemsize, self.bucket_bytes // factor))

    def run(self, network: Network, *, meta: bool, alike: bool = False) -> Prediction:
        """Simulate.

        Args:
            network: rates, latencies, slow workers.
            meta: whether tensors have no numbers.
            alike: whether one worker stands for all.
        """
        length = min(max(1, cycle(self.strategy, self.workers)), _MOST_STEPS)
        counted, warm_up = length * -(-_FEWEST_STEPS // length), max(length, 2)
        sent, held = [0.0] * self.workers, [0.0] * self.workers
        # A codec encodes each message of gradients before it is sent, while earlier ones are on their way, and decodes
        # the means after the backward pass.
        encoding = 0.5 if self.strategy.traits.sends_gradients else 0.0
        elements = sum(prod(shape) for shape in self.shapes)

        def work(comm: SimulatedComm) -> None:
            worker, parameters = self._worker(comm, meta=meta)
            speed, before = comm.slowdown, 0.0
            draw = random.Random(comm.rank)
            # A chain is passed back from its end: what is final last comes first.
            links = [(parameters[place], share) for place, share in reversed(self.order)]

            def backward_takes(share: float, part: float, own: float) -> None:
                comm.sleep((share * self.model_time.backward + part * own) * speed * comm.variation)

            # A worker that was late may continue at a later step.
            while worker.step < warm_up + counted:
                step = worker.step
                if step >= warm_up and not before:
                    before = comm.meter.payload_bytes
                comm.compute(self.model_time.forward)
                chain = torch.zeros((), dtype=torch.float32, device="meta" if meta else "cpu", requires_grad=True)
                own = self.own[step % len(self.own)]
                for parameter, share in links:
                    takes = partial(backward_takes, share, parameter.numel() / elements, encoding * own)
                    chain = _Final.apply(chain, parameter, takes)  # pyright: ignore
                chain.backward()
                comm.sleep(((1 - encoding) * own + self.model_time.update) * speed * comm.variation)
                worker.record_batch(1, loss=0.0 if meta else draw.random())
                worker.optimizer.step()
            sent[comm.rank] = comm.meter.payload_bytes - before
            held[comm.rank] = _held(worker)
            # The last counted step ends here; what is in flight is of later ones.
            comm.compute(0.0)
            internals_of(worker).wait_pending()

        ended = simulate(self.workers, work, network=network, compute_time=Duration(), timeout=PATIENCE, alike=alike)
        for failure in ended.failures.values():
            raise failure
        ranks = range(len(ended.comms))
        rows = [[each for each in ended.record.steps if each.rank == rank] for rank in ranks]
        # From the last rank's start to the last rank's end: ranks come out of the first broadcast one after the other.
        begin = max(next(each.start for each in row if each.step >= warm_up) for row in rows)
        span = max(row[-1].start for row in rows) - begin
        slowest = max(comm.slowdown for comm in ended.comms)
        return Prediction(
            strategy=self.strategy,
            seconds=span / counted,
            alone=self.model_time.seconds * slowest,
            own_seconds=sum(self.own) / len(self.own) * slowest,
            payload_bytes=sum(sent) / len(ranks) / counted,
            busiest_bytes=max(sent) / counted,
            memory_bytes=max(held),
        )

    def _worker(self, comm: SimulatedComm, *, meta: bool) -> tuple[Worker, list[nn.Parameter]]:
        device = "meta" if meta else "cpu"
        model = nn.ParameterList([torch.zeros(*shape, device=device, dtype=self.dtype) for shape in self.shapes])
        made = default_optimizer(self.strategy, model, comm.size, make=self.optimizer)
        worker = attach(model, made, self.strategy, comm=comm, bucket_bytes=self.bucket_bytes)
        if meta:
            spare_arithmetic(made, model, self.optimizer)
        return worker, list(model)


def _held(worker: Worker) -> float:
    """Bytes of a worker's vectors."""
    tensors = [x for r in worker.replicas for x in (r.x, r.g, *(x for x in r.state.values() if x.dim()))]
    return float(sum(x.nbytes for x in tensors))


def slower(network: Network, factor: float) -> Network:
    """Return the same network with all its rates divided."""
    racks = network.racks
    return replace(
        network,
        bits_per_second=network.bits_per_second / factor,
        racks=None if racks is None else replace(racks, bits_per_second=racks.bits_per_second / factor),
        specials=tuple(
            each if each.bits_per_second is None else replace(each, bits_per_second=each.bits_per_second / factor)
            for each in network.specials
        ),
        pairs=tuple(replace(each, bits_per_second=each.bits_per_second / factor) for each in network.pairs),
    )


class _Final(torch.autograd.Function):
    """A link of a chain through all parameters, whose backward pass takes a while and makes one gradient."""

    @staticmethod
    def forward(ctx: Any, chain: Tensor, parameter: Tensor, wait: Callable[[], None]) -> Tensor:
        ctx.save_for_backward(parameter)
        ctx.wait = wait
        return chain.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore
        ctx.wait()
        (parameter,) = ctx.saved_tensors
        return gradients[0], torch.zeros_like(parameter), None


def predict(
    strategy: Strategy,
    *,
    parameters: nn.Module | Sequence[Sequence[int]],
    workers: int,
    network: Network,
    model_time: ModelTime,
    optimizer: MakeOptimizer | None = None,
    own_seconds: Sequence[float] | None = None,
    bucket_bytes: int = _BUCKET_BYTES,
    dtype: torch.dtype = torch.float32,
    most_workers: int = MOST_WORKERS,
) -> Prediction:
    """Simulate a recipe until its communication repeats, and average its steps.

    Args:
        strategy: the recipe.
        parameters: the model, of which only shapes are read; or the shape of each parameter tensor.
        workers: number of workers.
        network: rates and latencies, slow workers.
        model_time: of the model's step on one worker.
        optimizer: makes the optimizer from the parameters; unless given, one that the strategy takes.
        own_seconds: what the strategy computes itself in each step of a period (see `own_work`); nothing unless given.
        bucket_bytes: bytes of gradient per message, as for `attach`.
        dtype: of the parameters, where only their shapes are given; a model's is its own.
        most_workers: of more, one stands for all where all do the same; its bytes are then its own and not the mean of
            all, which differs by what one part of a message may be longer than another.

    Raises:
        ConfigError: the recipe cannot serve this number of workers, or a value is out of its range.

    Example:
        A million parameters, a step of 50 ms and four workers at 100 Mbit/s. Gradients at every step are six megabytes
        on the wire, which take half a second.

        >>> from thinwire import AllReduce, LocalSGD
        >>> from thinwire.planning.plan.predict import ModelTime, predict
        >>> from thinwire.planning.simulate import Network
        >>> given = dict(parameters=[(1000, 1000)], workers=4, network=Network(bits_per_second=1e8),
        ...              model_time=ModelTime(0.02, 0.03))
        >>> [round(predict(recipe, **given).seconds, 3) for recipe in (AllReduce(), LocalSGD(period=50))]
        [0.552, 0.06]
    """
    shapes, dtype = _shapes_of(parameters, dtype)
    order = _order(shapes, model_time)
    own = list(own_seconds or [0.0])
    given = Simulated(strategy, workers, shapes, dtype, order, model_time, own, optimizer, bucket_bytes)
    if workers > most_workers:
        with suppress(UnlikeError, RuntimeError, MismatchError):
            return given.run(network, meta=True, alike=True)
    try:
        return given.run(network, meta=True)
    except (RuntimeError, MismatchError, DeadlockError):
        # It reads numbers, which meta tensors do not have; or its ranks, each by its own, decided differently.
        pass
    factor = max(1, -(-sum(prod(shape) for shape in shapes) // _MOST_NUMBERS))
    return given.smaller(factor).run(replace(network, magnified=factor), meta=False).larger(factor)


def own_work(
    strategy: Strategy,
    *,
    parameters: nn.Module | Sequence[Sequence[int]],
    workers: int,
    optimizer: MakeOptimizer | None = None,
    rounds: int = 3,
    bucket_bytes: int = _BUCKET_BYTES,
    dtype: torch.dtype = torch.float32,
    device: str = "",
    most_elements: int | None = None,
) -> list[float]:
    """Seconds that a strategy computes itself in each step of a period: its real code, without network or model.

    A step without any strategy is timed besides, and taken off.

    Args:
        strategy: the recipe.
        parameters: as for `predict`; tensors of this size are made, filled with small random numbers.
        workers: number of workers.
        optimizer: makes the optimizer.
        rounds: periods to time; of each step the least counts, since other programs only make it longer.
        bucket_bytes: as for `attach`.
        dtype: as for `predict`.
        device: on which the tensors are; the CPU unless given.
        most_elements: of a larger model, a vector of so many is timed, and the time extrapolated: codecs and averages
            take time by the element.

    Raises:
        ConfigError: torch cannot use the device here.
    """
    shapes, dtype = _shapes_of(parameters, dtype)
    place, elements = usable_device(device), sum(map(prod, shapes))
    share = 1.0
    if most_elements is not None and elements > most_elements:
        shapes, share = [(most_elements,)], most_elements / elements
    length = min(max(1, cycle(strategy, workers)), _MOST_STEPS)
    timed = _timed_steps(strategy, shapes, workers, optimizer, (rounds + 1) * length, bucket_bytes, dtype, place)
    bare = min(_timed_steps(Local(), shapes, 1, optimizer, rounds + 3, bucket_bytes, dtype, place)[2:])
    return [max(0.0, min(timed[length + step :: length]) - bare) / share for step in range(length)]


def usable_device(device: str) -> torch.device:
    """Return a device on which torch can compute here; the CPU unless named.

    Raises:
        ConfigError: it cannot.
    """
    try:
        found = torch.device(device or "cpu")
        torch.zeros(1, dtype=torch.float32, device=found).item()
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA asserts
        raise ConfigError(
            f"device={device!r}: torch cannot use it here. What strategies compute is timed on it. Plan on a machine "
            'that has it, or name "cpu"'
        ) from error
    return found


def _timed_steps(
    strategy: Strategy,
    shapes: Sequence[Sequence[int]],
    workers: int,
    optimizer: MakeOptimizer | None,
    steps: int,
    bucket_bytes: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[float]:
    """Steps on real tensors with a comm that sends nothing."""
    model = nn.ParameterList([torch.randn(*shape, dtype=dtype, device=device) * 0.02 for shape in shapes])
    made = default_optimizer(strategy, model, workers, make=optimizer)
    worker = attach(model, made, strategy, comm=EchoComm(0, workers), bucket_bytes=bucket_bytes)
    gradients = [torch.randn_like(parameter) * 1e-3 for parameter in model]
    found: list[float] = []
    for _ in range(steps):
        for parameter, gradient in zip(model, gradients, strict=True):
            parameter.grad = gradient.clone()
        synchronize(device)
        start = time.perf_counter()
        step_with_gradients(worker)
        synchronize(device)
        found.append(time.perf_counter() - start)
    worker.detach()
    return found


def _shapes_of(
    parameters: nn.Module | Sequence[Sequence[int]], dtype: torch.dtype
) -> tuple[list[tuple[int, ...]], torch.dtype]:
    """Return the shapes of the trained tensors, and their dtype.

    Raises:
        ConfigError: a model whose trained parameters have several dtypes, or without any.
    """
    if not isinstance(parameters, nn.Module):
        return [tuple(shape) for shape in parameters], dtype
    trained = [p for p in parameters.parameters() if p.requires_grad]
    dtypes = list(dict.fromkeys(p.dtype for p in trained))
    if len(dtypes) != 1:
        raise ConfigError(f"trained parameters of {len(dtypes)} dtypes: a prediction is made for those of one")
    return [tuple(p.shape) for p in trained], dtypes[0]


def _order(shapes: Sequence[Sequence[int]], model_time: ModelTime) -> list[tuple[int, float]]:
    """Parameter tensors in the order in which gradients are final, each with its share of the backward pass."""
    if not model_time.ready:
        sizes = [prod(shape) for shape in shapes]
        return [(place, sizes[place] / sum(sizes)) for place in reversed(range(len(shapes)))]
    ready = model_time.ready
    if len(ready) != len(shapes):
        raise ConfigError(f"ready has {len(ready)} shares for {len(shapes)} parameter tensors. Give one each")
    places = sorted(range(len(shapes)), key=lambda place: (ready[place], -place))
    before = [0.0, *(ready[place] for place in places)]
    return [(place, ready[place] - start) for place, start in zip(places, before, strict=False)]
