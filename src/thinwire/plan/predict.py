"""How long a recipe's training step takes on a given network: the real strategy, simulated on meta tensors.

No formula describes a method here. `attach` makes every worker of a simulation, a backward pass of autograd hands the
gradients over one after the other, as fast as the model's own does, and the simulated network carries what is sent.
What the strategy computes itself (codes, averages, its own updates) is timed once, on real tensors without a network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm.counting import CountingComm
from thinwire.comm.work import Work, completed
from thinwire.errors import ConfigError
from thinwire.plan.traffic import MakeOptimizer, cycle, default_optimizer
from thinwire.simulate import Network, SimulatedComm, simulate
from thinwire.simulate.durations import Duration
from thinwire.strategies.base import Strategy
from thinwire.strategies.local.local_sgd import Local
from thinwire.worker.worker import Worker, attach

_FEWEST_STEPS, _MOST_STEPS = 8, 256
_BUCKET_BYTES = 8 << 20


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
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name}={value}: must be seconds, not negative")
        if any(not 0 <= share <= 1 for share in self.ready):
            raise ConfigError(f"ready={self.ready}: must be shares of the backward pass, from 0 to 1")

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.forward + self.backward + self.update


@dataclass(frozen=True)
class Prediction:
    """What a recipe costs in each training step, on average.

    Attributes:
        strategy: the recipe.
        seconds: of a step.
        alone: of a step without any communication, on the same workers.
        own_seconds: what the strategy computes itself, codes among it; part of `seconds`.
        payload_bytes: sent by one worker, the mean over workers.
    """

    strategy: Strategy
    seconds: float
    alone: float
    own_seconds: float
    payload_bytes: float

    @property
    def exposed(self) -> float:
        """Seconds of a step that are only waiting."""
        return max(0.0, self.seconds - self.alone - self.own_seconds)

    @property
    def efficiency(self) -> float:
        """The speed over that of workers which do not communicate; 1 is the best."""
        return self.alone / self.seconds


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

    Raises:
        ConfigError: the recipe cannot serve this number of workers, or a value is out of its range.

    Example:
        A million parameters, a step of 50 ms and four workers at 100 Mbit/s. Gradients at every step are six megabytes
        on the wire, which take half a second.

        >>> from thinwire import AllReduce, LocalSGD
        >>> from thinwire.plan.predict import ModelTime, predict
        >>> from thinwire.simulate import Network
        >>> given = dict(parameters=[(1000, 1000)], workers=4, network=Network(bits_per_second=1e8),
        ...              model_time=ModelTime(0.02, 0.03))
        >>> [round(predict(recipe, **given).seconds, 3) for recipe in (AllReduce(), LocalSGD(period=50))]
        [0.552, 0.06]
    """
    shapes, dtype = _shapes_of(parameters, dtype)
    ready = _order(shapes, model_time)
    length = min(max(1, cycle(strategy, workers)), _MOST_STEPS)
    counted = length * -(-_FEWEST_STEPS // length)
    warm_up = max(length, 2)
    own = list(own_seconds or [0.0])
    sent = [0.0] * workers

    def work(comm: SimulatedComm) -> None:
        worker, parameter_list = _meta_worker(strategy, shapes, comm, optimizer, bucket_bytes, dtype)
        speed, before = comm.slowdown, 0.0
        # A chain is passed back from its end: what is final last comes first.
        links = [(parameter_list[place], share * model_time.backward * speed) for place, share in reversed(ready)]
        for step in range(warm_up + counted):
            if step == warm_up:
                before = comm.meter.payload_bytes
            comm.compute(model_time.forward)
            chain = torch.zeros((), device="meta", requires_grad=True)
            for parameter, pause in links:
                chain = _Final.apply(chain, parameter, lambda pause=pause: comm.sleep(pause))  # pyright: ignore
            chain.backward()
            comm.sleep((own[step % len(own)] + model_time.update) * speed)
            worker.record_batch(1, loss=0.0)
            worker.optimizer.step()
        sent[comm.rank] = comm.meter.payload_bytes - before
        # The last counted step ends here; what is in flight is of later ones.
        comm.compute(0.0)
        worker.wait_pending()

    ended = simulate(workers, work, network=network, compute_time=Duration())
    for failure in ended.failures.values():
        raise failure
    starts = [[each.start for each in ended.record.steps if each.rank == rank] for rank in range(workers)]
    # From the last rank's start to the last rank's end: ranks come out of the first broadcast one after the other.
    span = max(each[-1] for each in starts) - max(each[warm_up] for each in starts)
    slowest = max(comm.slowdown for comm in ended.comms)
    return Prediction(
        strategy=strategy,
        seconds=span / counted,
        alone=model_time.seconds * slowest,
        own_seconds=sum(own) / len(own) * slowest,
        payload_bytes=sum(sent) / workers / counted,
    )


def own_work(
    strategy: Strategy,
    *,
    parameters: nn.Module | Sequence[Sequence[int]],
    workers: int,
    optimizer: MakeOptimizer | None = None,
    rounds: int = 3,
    bucket_bytes: int = _BUCKET_BYTES,
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    """Seconds that a strategy computes itself in each step of a period: its real code, without network or model.

    A step without any strategy is timed besides, and taken off.

    Args:
        strategy: the recipe.
        parameters: as for `predict`; tensors of this size are made, filled with small random numbers.
        workers: number of workers.
        optimizer: makes the optimizer.
        rounds: periods to time; the median counts.
        bucket_bytes: as for `attach`.
        dtype: as for `predict`.
    """
    shapes, dtype = _shapes_of(parameters, dtype)
    length = min(max(1, cycle(strategy, workers)), _MOST_STEPS)
    timed = _timed_steps(strategy, shapes, workers, optimizer, (rounds + 1) * length, bucket_bytes, dtype)
    bare = median(_timed_steps(Local(), shapes, 1, optimizer, rounds + 3, bucket_bytes, dtype)[2:])
    steps = [timed[length + step :: length] for step in range(length)]
    return [max(0.0, median(each) - bare) for each in steps]


def _timed_steps(
    strategy: Strategy,
    shapes: Sequence[Sequence[int]],
    workers: int,
    optimizer: MakeOptimizer | None,
    steps: int,
    bucket_bytes: int,
    dtype: torch.dtype,
) -> list[float]:
    """Steps on real tensors with a comm that sends nothing."""
    model = nn.ParameterList([torch.randn(*shape, dtype=dtype) * 0.02 for shape in shapes])
    made = default_optimizer(strategy, model) if optimizer is None else optimizer(list(model))
    worker = attach(model, made, strategy, comm=EchoComm(0, workers), bucket_bytes=bucket_bytes)
    gradients = [torch.randn_like(parameter) * 1e-3 for parameter in model]
    found: list[float] = []
    for _ in range(steps):
        for parameter, gradient in zip(model, gradients, strict=True):
            parameter.grad = gradient.clone()
        start = time.perf_counter()
        if worker.backward is not None:
            worker.backward.flush()
        worker.record_batch(1, loss=0.0)
        made.step()
        found.append(time.perf_counter() - start)
    worker.detach()
    return found


def _meta_worker(
    strategy: Strategy,
    shapes: Sequence[Sequence[int]],
    comm: SimulatedComm,
    optimizer: MakeOptimizer | None,
    bucket_bytes: int,
    dtype: torch.dtype,
) -> tuple[Worker, list[nn.Parameter]]:
    model = nn.ParameterList([torch.empty(*shape, device="meta", dtype=dtype) for shape in shapes])
    made = default_optimizer(strategy, model) if optimizer is None else optimizer(list(model))
    worker = attach(model, made, strategy, comm=comm, bucket_bytes=bucket_bytes)
    started = False

    def drop(*_: object) -> None:
        # Arithmetic on meta tensors is slow; optimizers of torch have all of their state after one step.
        nonlocal started
        if started and type(made).__module__.startswith("torch.optim."):
            for parameter in model:
                parameter.grad = None
        started = True

    made.register_step_pre_hook(drop)
    return worker, list(model)


def _shapes_of(
    parameters: nn.Module | Sequence[Sequence[int]], dtype: torch.dtype
) -> tuple[list[tuple[int, ...]], torch.dtype]:
    """The shapes of the trained tensors, and their dtype.

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
        raise ConfigError(f"ready has {len(ready)} shares for {len(shapes)} parameter tensors; give one each")
    places = sorted(range(len(shapes)), key=lambda place: (ready[place], -place))
    before = [0.0, *(ready[place] for place in places)]
    return [(place, ready[place] - start) for place, start in zip(places, before, strict=False)]
