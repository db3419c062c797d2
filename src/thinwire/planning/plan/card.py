# SPDX-License-Identifier: Apache-2.0
"""The messages, memory and waits of a recipe, computed before any run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from thinwire.core.kernels.decisions import assume_least
from thinwire.elastic.late import LateMerging
from thinwire.errors import ConfigError
from thinwire.methods.codecs.cast import Bf16
from thinwire.methods.strategies.base import Strategy, check_workers, nested
from thinwire.methods.strategies.gradients.all_reduce import AllReduce
from thinwire.methods.topology.base import check_size
from thinwire.planning.plan.bucket import BucketCost, Store, bucket_cost
from thinwire.planning.plan.late import LateCost, late_cost, late_objects
from thinwire.planning.plan.objects import Objects
from thinwire.planning.plan.peak_memory import PeakMemory
from thinwire.planning.plan.ranks import Look, Looks, look_at_ranks
from thinwire.planning.plan.traffic import DryRun, MakeOptimizer, StepTraffic, cycle, topologies
from thinwire.planning.simulate.wires import PAYLOAD_SHARE
from thinwire.registry import canonical

# Of a model of which only the number of parameters is known. More elements would not be counted in 64 bits.
_MOST_TENSORS = 512
_MOST_PARAMETERS = 10**15
_MOST_WORKERS = 10**12
_BUCKET_BYTES = 8 << 20
_MOST_PEAK_STEPS = 128


@dataclass(frozen=True)
class Link:
    """The traffic of the worker to one other rank.

    Attributes:
        dst: the rank it is sent to.
        bytes_per_step: payload, mean over a period.
    """

    dst: int
    bytes_per_step: float


@dataclass(frozen=True)
class Method:
    """One of the strategies that a recipe is composed of.

    Attributes:
        name: the strategy with its arguments, as in a recipe.
        paper: its source.
        waits: which workers wait for which, and when.
        limits: what it assumes, and when not to use it.
    """

    name: str
    paper: str
    waits: str
    limits: str


@dataclass(frozen=True)
class Card:
    """The cost of a recipe for one worker. Bytes are payload; transports add about 5 % of headers.

    Attributes:
        recipe: without arguments at their defaults.
        workers: number of workers.
        parameters: elements of the model.
        dtype: of the parameters.
        optimizer: its class.
        rank: the worker that the figures are for: the one that sends most, or receives most from named ranks.
        period: steps after which the traffic repeats; means are over this many.
        repeats: whether it does; if not, `period` is the number of steps that the means are over.
        sent_bytes_per_step: bytes sent, mean; where it depends on data, the most that can be. All other figures are of
            the same case.
        least_sent_bytes_per_step: the least that can be; the same where nothing depends on data.
        mean_sent_bytes_per_step: the mean over all workers too, which a run reports; the same where all send alike.
            None in a large graph whose ranks are of many kinds.
        received_bytes_per_step: bytes received, mean.
        messages_per_step: messages sent, mean; a collective call counts as one.
        largest_message_bytes: bytes of the largest message; for a collective, what this worker sends in it.
        largest_step_bytes: bytes sent in the step that sends most.
        collective_bytes_per_step: the part sent in collectives; the transport decides to which ranks.
        links: the part sent to named ranks.
        memory_bytes_per_parameter: memory that thinwire adds, by name, on the worker where it adds most; without the
            optimizer's state and activations.
        peak_bytes: the most bytes that thinwire holds at a time, temporary vectors included, beyond the parameters,
            their gradients and the optimizer's state; on the worker of the other figures.
        lr_factor: the effective learning rate in the long run, as a multiple of the optimizer's; None if not known.
        methods: the strategies of the recipe, outermost first.
        all_reduce_bytes_per_step: what AllReduce() would send.
        bf16_all_reduce_bytes_per_step: what AllReduce(codec=Bf16()) would send.
        bits_per_second: rate of each worker's link; None if none was given.
        seconds_per_step: transfer time on that link, mean, for the worker whose transfers take longest; includes those
            that overlap with computation.
        largest_step_seconds: the same for the step with the longest transfer.
        bucket: the cost over a bucket; None if none was given.
        late: the bytes and the rule of rounds that close without late workers, in place of the traffic of rounds that
            all workers end together; None if all do.
    """

    recipe: str
    workers: int
    parameters: int
    dtype: str
    optimizer: str
    rank: int
    period: int
    repeats: bool
    sent_bytes_per_step: float
    least_sent_bytes_per_step: float
    mean_sent_bytes_per_step: float | None
    received_bytes_per_step: float
    messages_per_step: float
    largest_message_bytes: float
    largest_step_bytes: float
    collective_bytes_per_step: float
    links: tuple[Link, ...]
    memory_bytes_per_parameter: dict[str, float]
    peak_bytes: float
    lr_factor: float | None
    methods: tuple[Method, ...]
    all_reduce_bytes_per_step: float
    bf16_all_reduce_bytes_per_step: float
    bits_per_second: float | None
    seconds_per_step: float | None
    largest_step_seconds: float | None
    bucket: BucketCost | None = None
    late: LateCost | None = None


def explain(
    strategy: Strategy,
    *,
    parameters: int | Sequence[int] | nn.Module,
    workers: int,
    dtype: torch.dtype | None = None,
    optimizer: MakeOptimizer | None = None,
    bits_per_second: float | None = None,
    bucket_bytes: int = _BUCKET_BYTES,
    store: Store | None = None,
    step_seconds: float = 0.2,
    late: LateMerging | None = None,
) -> Card:
    """Run a strategy on meta tensors until its traffic repeats, and add up bytes, messages and memory.

    Args:
        strategy: the recipe.
        parameters: the model, of which only the shapes are read; or its number of elements, or those of each of its
            parameter tensors in the model's order. Messages of gradients are cut between tensors, and some methods send
            small tensors otherwise than large ones; a plain number is taken as tensors as large as a message, or
            as 512 tensors where these would be more.
        workers: number of workers.
        dtype: of the parameters; unless given the model's own, or torch.float32.
        optimizer: makes the optimizer from the parameters, as `torch.optim.AdamW` does; unless given, plain SGD, or one
            that the strategy needs.
        bits_per_second: rate of each worker's link in each direction, to predict seconds.
        bucket_bytes: bytes of gradient per message, as for `attach`.
        store: a bucket over which the workers train, to predict requests, seconds and prices.
        step_seconds: of a step without communication, for the figures of a day.
        late: how rounds close without late workers.

    Raises:
        ConfigError: the recipe cannot serve this number of workers or cannot be late, or a value is out of its range.

    Example:
        Averaging every 8 steps sends an eighth of what an all-reduce at every step does.

        >>> from thinwire import LocalSGD
        >>> from thinwire.planning.plan import explain
        >>> card = explain(LocalSGD(period=8), parameters=1_000_000, workers=4)
        >>> card.sent_bytes_per_step, card.all_reduce_bytes_per_step, card.messages_per_step
        (750000.0, 6000000.0, 0.125)
    """
    shapes, dtypes, found, dry = _run_dry(strategy, parameters, workers, dtype, optimizer, bucket_bytes)
    if bits_per_second is not None and not 0 < bits_per_second < float("inf"):
        raise ConfigError(f"bits_per_second={bits_per_second}: must be positive and finite, such as 1e8")
    rank, run = found.busiest.rank, found.busiest.run
    objects, merging = [step.objects for step in found.busiest.steps], None
    if late is not None:
        late.check(strategy, run.worker.optimizer, init="broadcast", global_batch=None)
        vectors = Counter[torch.dtype]()
        for shape, own in zip(shapes, dtypes, strict=True):
            vectors[own] += prod(shape)
        sizes = [(numel, own.itemsize) for own, numel in vectors.items()]
        fragments = strategy.traits.rounds.fragments
        merging = late_cost(late, sizes, workers, fragments=fragments)
        objects = late_objects(merging, strategy.traits.period or 1, workers, fragments=fragments)
    steps = least = found.busiest.steps
    if strategy.traits.data_dependent_bytes:
        with assume_least():
            least = dry(strategy, rank, optimizer).period()
    seconds = None if bits_per_second is None else _slowest(found.looks, bits_per_second)
    return Card(
        recipe=canonical(strategy),
        workers=workers,
        parameters=sum(prod(shape) for shape in shapes),
        dtype=", ".join(str(each).removeprefix("torch.") for each in dict.fromkeys(dtypes)),
        optimizer=type(run.worker.optimizer).__name__,
        rank=rank,
        period=len(steps),
        repeats=run.repeats,
        sent_bytes_per_step=_mean([step.sent for step in steps]),
        least_sent_bytes_per_step=_mean([step.sent for step in least]),
        mean_sent_bytes_per_step=found.mean_sent,
        received_bytes_per_step=_mean([step.received for step in steps]),
        messages_per_step=_mean([step.messages for step in steps]),
        largest_message_bytes=max(step.largest for step in steps),
        largest_step_bytes=max(step.sent for step in steps),
        collective_bytes_per_step=_mean([sum(step.collectives) for step in steps]),
        links=_links(steps),
        memory_bytes_per_parameter=max((_memory(look.run, look.steps) for look in found.looks), key=_total),
        peak_bytes=_peak_bytes(lambda: dry(strategy, rank, optimizer)),
        lr_factor=strategy.traits.lr_factor,
        methods=tuple(Method(canonical(m), m.paper, m.waits, m.limits) for m in nested(strategy)),
        all_reduce_bytes_per_step=dry(AllReduce(), 0).step().sent,
        bf16_all_reduce_bytes_per_step=dry(AllReduce(Bf16()), 0).step().sent,
        bits_per_second=bits_per_second,
        seconds_per_step=None if seconds is None else _mean(seconds),
        largest_step_seconds=None if seconds is None else max(seconds),
        bucket=None if store is None else bucket_cost(strategy, objects, store, workers, step_seconds),
        late=merging,
    )


def bucket_objects(
    strategy: Strategy,
    *,
    parameters: int | Sequence[int] | nn.Module,
    workers: int,
    optimizer: MakeOptimizer | None = None,
) -> list[Objects]:
    """Return the objects of a bucket that the busiest worker writes and reads in each step of a period.

    Raises:
        ConfigError: the recipe cannot serve this number of workers.
    """
    *_, found, _ = _run_dry(strategy, parameters, workers, None, optimizer, _BUCKET_BYTES)
    return [step.objects for step in found.busiest.steps]


def _run_dry(
    strategy: Strategy,
    parameters: int | Sequence[int] | nn.Module,
    workers: int,
    dtype: torch.dtype | None,
    optimizer: MakeOptimizer | None,
    bucket_bytes: int,
) -> tuple[list[tuple[int, ...]], list[torch.dtype], Looks, Callable[..., DryRun]]:
    """Return the shapes and dtypes of the parameters, the dry runs, and the function that makes one."""
    shapes, dtypes = _tensors_of(parameters, dtype, bucket_bytes)
    if workers < 1:
        raise ConfigError(f"workers={workers}: must be at least 1")
    if workers > _MOST_WORKERS:
        raise ConfigError(f"workers={workers:.3g}: must be at most {_MOST_WORKERS:g}")
    for topology in topologies(strategy):
        check_size(topology, workers)
    check_workers(strategy, workers)

    def dry(recipe: Strategy, rank: int, optimizer: MakeOptimizer | None = None) -> DryRun:
        return DryRun(
            recipe,
            shapes,
            workers=workers,
            rank=rank,
            dtype=dtypes,
            bucket_bytes=bucket_bytes,
            optimizer=optimizer,
        )

    # Where ranks differ, the one with most to carry sets the pace.
    found = look_at_ranks(lambda rank: dry(strategy, rank, optimizer), strategy, workers)
    return shapes, dtypes, found, dry


def _tensors_of(
    parameters: int | Sequence[int] | nn.Module, dtype: torch.dtype | None, bucket_bytes: int
) -> tuple[list[tuple[int, ...]], list[torch.dtype]]:
    """Return the shapes and dtypes of the trained parameters.

    Raises:
        ConfigError: there are none, too many, or they are no floating-point numbers.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"dtype={dtype}: parameters are trained in a floating dtype, such as torch.float32")
    if isinstance(parameters, nn.Module):
        trained = [p for p in parameters.parameters() if p.requires_grad]
        if not trained:
            raise ConfigError("the model has no parameters that are trained. Set requires_grad")
        return [tuple(p.shape) for p in trained], [dtype or p.dtype for p in trained]
    dtype = dtype or torch.float32
    if isinstance(parameters, int):
        if parameters > _MOST_PARAMETERS:
            raise ConfigError(f"parameters={parameters:.3g}: at most {_MOST_PARAMETERS:g}. Give those of one model")
        # Many small tensors fill each bucket exactly to its limit.
        piece = max(1, bucket_bytes // dtype.itemsize)
        # A dry run takes time for each tensor; and models as large have tensors that fill a message by themselves.
        piece *= -(-parameters // (_MOST_TENSORS * piece)) or 1
        whole, rest = divmod(max(0, parameters), piece)
        parameters = [rest] * bool(rest) + [piece] * whole
    shapes = [(size,) for size in parameters if size]
    if not shapes:
        raise ConfigError("parameters=0: a model has at least 1. Give its number, such as 6_500_000")
    return shapes, [dtype] * len(shapes)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _seconds(step: StepTraffic, bits_per_second: float) -> float:
    """Transfer time of one step: a link is full-duplex, so the direction with more bytes counts."""
    return 8 * max(step.sent, step.received) / (bits_per_second * PAYLOAD_SHARE)


def _slowest(looks: Sequence[Look], bits_per_second: float) -> list[float]:
    """Transfer times of the steps of the worker for which they are longest."""
    return max(([_seconds(step, bits_per_second) for step in look.steps] for look in looks), key=_mean)


def _total(memory: dict[str, float]) -> float:
    return sum(memory.values())


def _links(steps: Sequence[StepTraffic]) -> tuple[Link, ...]:
    total: dict[int, float] = {}
    for exchange in (exchange for step in steps for exchange in step.exchanges):
        for rank in exchange.dst:
            total[rank] = total.get(rank, 0.0) + exchange.nbytes
    return tuple(Link(rank, total[rank] / len(steps)) for rank in sorted(total))


def _peak_bytes(dry: Callable[[], DryRun]) -> float:
    """Return the most bytes of all tensors in the steps of a dry run, without those that training alone has."""
    with PeakMemory(meta=True) as memory:
        run = dry()
        steps = min(cycle(run.worker.strategy, run.comm.size), _MOST_PEAK_STEPS)
        for _ in range(steps):
            run.step()
        memory.peak = memory.now  # `attach` is over
        for _ in range(2 * steps):
            run.step()
        state = [x for each in run.worker.optimizer.state.values() for x in each.values()]
        alone = 2 * sum(r.x.nbytes for r in run.worker.replicas)
        return memory.peak - alone - sum(x.nbytes for x in state if isinstance(x, Tensor) and x.is_meta)


def _memory(run: DryRun, steps: Sequence[StepTraffic]) -> dict[str, float]:
    """Bytes per parameter, by name; `received` is the buffer for the largest exchange."""
    held: dict[str, float] = {}

    def add(name: str, x: Tensor) -> None:
        held[name] = held.get(name, 0) + x.nbytes

    for r in run.worker.replicas:
        add("parameters", r.x)
        if r.g.numel():
            add("gradient", r.g)
        for name, tensor in r.state.items():
            if tensor.dim():
                add(name, tensor)
    received = [len(exchange.src) * exchange.nbytes for step in steps for exchange in step.exchanges]
    if received and max(received):
        held["received"] = max(received)
    elements = sum(r.x.numel() for r in run.worker.replicas)
    return {name: nbytes / elements for name, nbytes in held.items()}
