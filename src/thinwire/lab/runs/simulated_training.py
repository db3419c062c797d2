# SPDX-License-Identifier: Apache-2.0
"""Training runs of simulated workers: a quadratic with known gradients, or no numbers at all; and their figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from thinwire.core.comm.work import Interval
from thinwire.core.validation import check_ranges
from thinwire.lab.runs.optimizer import set_lr
from thinwire.methods.strategies.base import Strategy
from thinwire.planning.simulate.comm import SimulatedComm
from thinwire.planning.simulate.record import NETWORK
from thinwire.planning.simulate.running import Simulation
from thinwire.worker.attach import attach
from thinwire.worker.worker import Worker, internals_of

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
_LARGEST_TENSOR = 1 << 20
_MOST_PAIRS = 10
_LR = 0.1  # of SGD


@dataclass(frozen=True)
class Outcome:
    """One worker's figures of a run.

    Attributes:
        loss: of the model that all workers agree on: the mean over workers of half the mean square of the distance to a
            worker's own minimum. None where there are no numbers, and on ranks other than 0.
        seconds: virtual time at the end of the last step.
        payload_bytes: sent in all steps.
        messages: calls in which it sent anything.
    """

    loss: float | None
    seconds: float
    payload_bytes: float
    messages: int


@dataclass(frozen=True)
class Training:
    """The training of a quadratic, the same on each simulated worker: `simulate(workers, Training(...))`.

    Args:
        strategy: the recipe.
        steps: how many.
        make_optimizer: makes the optimizer from the parameters; plain SGD unless given.
        parameters: of the quadratic; each worker has a minimum of its own, drawn from the seed.
        numbers: "real"; or "meta", where tensors have no data, for the times and bytes of many workers.
        seed: of the data, the model and the strategy's draws.

    Raises:
        ConfigError: fewer than one step or parameter.

    Example:
        >>> from thinwire import PushSum
        >>> from thinwire.planning.simulate import simulate
        >>> from thinwire.lab.runs.simulated_training import Training
        >>> ended = simulate(8, Training(PushSum(), steps=40, parameters=10))
        >>> ended.results[0].payload_bytes
        1600.0
    """

    strategy: Strategy
    steps: int = 100
    make_optimizer: MakeOptimizer | None = None
    parameters: int = 10_000
    numbers: Literal["real", "meta"] = "real"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(self, steps=("1..", "100 is usual"), parameters=("1..", "10000 is usual"))

    def __call__(self, comm: SimulatedComm) -> Outcome:
        """Train on one worker."""
        device = "meta" if self.numbers == "meta" else "cpu"
        sizes = [min(_LARGEST_TENSOR, self.parameters - start) for start in range(0, self.parameters, _LARGEST_TENSOR)]
        model = nn.ParameterList([torch.zeros(size, dtype=torch.float32, device=device) for size in sizes])
        minimum = None if self.numbers == "meta" else self._minimum(comm.rank)
        centres = [torch.empty_like(p) for p in model] if minimum is None else list(minimum.split(sizes))
        optimizer = self._optimizer(model)
        worker = attach(model, optimizer, self.strategy, comm=comm, seed=self.seed)
        if minimum is None:
            _spare_arithmetic(optimizer, worker)
        # The messages that attach the model do not count.
        nbytes, messages = comm.meter.payload_bytes, comm.meter.messages
        # A worker that was late may continue at a later step.
        while worker.step < self.steps:
            comm.compute()
            for parameter, centre in zip(model, centres, strict=True):
                parameter.grad = centre if minimum is None else torch.sub(parameter.detach(), centre)
            if (backward := internals_of(worker).backward) is not None:
                backward.flush()
            worker.record_batch(1, loss=0.0)
            optimizer.step()
        internals_of(worker).wait_pending()
        comm.end_step()
        sent, seconds = comm.meter.payload_bytes - nbytes, comm.now
        messages = comm.meter.messages - messages
        with worker.consensus():
            loss = None if minimum is None or comm.rank else self._loss(model, comm.size)
        worker.detach()
        return Outcome(loss, seconds, sent, messages)

    def _loss(self, model: nn.ParameterList, size: int) -> float:
        agreed = torch.cat([parameter.detach() for parameter in model])
        return sum(float((agreed - self._minimum(rank)).square().mean()) / 2 for rank in range(size)) / size

    def _minimum(self, rank: int) -> Tensor:
        draw = torch.Generator().manual_seed(1_000_003 * self.seed + rank)
        return torch.randn(self.parameters, generator=draw, dtype=torch.float32, device="cpu")

    def _optimizer(self, model: nn.Module) -> Optimizer:
        parameters = list(model.parameters())
        if self.make_optimizer is None:
            return SGD(parameters, lr=_LR)
        optimizer = self.make_optimizer(parameters)
        if isinstance(optimizer, SGD):
            set_lr(optimizer, _LR)
        return optimizer


def _spare_arithmetic(optimizer: Optimizer, worker: Worker) -> None:
    """Let an optimizer of torch do nothing from its second step on, when it has its state: meta tensors are slow."""

    def drop_gradients(*_: object) -> None:
        if worker.step:
            optimizer.zero_grad()

    if type(optimizer).__module__.startswith("torch.optim"):
        optimizer.register_step_pre_hook(drop_gradients)


# -- figures -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTime:
    """One training step of all workers.

    Attributes:
        step: its number, from 0.
        median_seconds: of the workers' own times for it.
        longest_seconds: of the slowest worker.
        longest_rank: that worker.
        computed_seconds: mean over workers of what they computed.
        end: when the last worker had ended it.
    """

    step: int
    median_seconds: float
    longest_seconds: float
    longest_rank: int
    computed_seconds: float
    end: float


@dataclass(frozen=True)
class Wait:
    """How long one worker has waited for another.

    Attributes:
        rank: who waited.
        on: for whom; None for the transfers themselves.
        seconds: how long, in the whole run.
    """

    rank: int
    on: int | None
    seconds: float


@dataclass(frozen=True)
class Summary:
    """A simulated training run in figures; times are virtual.

    Attributes:
        workers: how many.
        steps: each training step.
        seconds: from when all workers had begun their first step to when the last one had ended its last.
        seconds_per_step: mean; what comes before the first step, the broadcast of the parameters, is no part of it.
        median_seconds_per_step: of all workers and steps.
        computed_seconds_per_step: mean over workers and steps.
        payload_bytes_per_worker_per_step: mean.
        messages_per_worker_per_step: mean.
        loss: of the model that all agree on; None where it is not known.
        waits: the longest, by worker and by whom it waited for.
        waited_for_transfers: share of all waits that were for transfers, and for no late worker.
        waited_on: the ranks that others have waited for longest, with the sum of seconds.
        late_messages: that the network has delayed.
        died: when workers have died, by rank.
        failures: what ended other workers, by rank.
    """

    workers: int
    steps: tuple[StepTime, ...]
    seconds: float
    seconds_per_step: float
    median_seconds_per_step: float
    computed_seconds_per_step: float
    payload_bytes_per_worker_per_step: float
    messages_per_worker_per_step: float
    loss: float | None
    waits: tuple[Wait, ...]
    waited_for_transfers: float
    waited_on: dict[int, float]
    late_messages: int
    died: dict[int, float]
    failures: dict[int, str]


def summarise(ended: Simulation[Outcome]) -> Summary:
    """Return the figures of a run."""
    by_step: defaultdict[int, list[Any]] = defaultdict(list)
    for each in ended.record.steps:
        by_step[each.step].append(each)
    steps = tuple(_step_time(step, rows) for step, rows in sorted(by_step.items()))
    outcomes = [outcome for outcome in ended.results if outcome is not None]
    own = [each.end - each.start for each in ended.record.steps]
    # Rank 0 has sent its parameters before the others have them.
    begun = max([each.start for each in by_step[min(by_step)]]) if by_step else 0.0
    seconds = max([each.end for each in ended.record.steps], default=0.0) - begun
    count = max(1, len(steps))
    waited = ended.record.waited
    total, on = sum(waited.values()), defaultdict[int, float](float)
    for (_, other), length in waited.items():
        on[other] += length
    transfers = on.pop(NETWORK, 0.0)
    named = sorted(on.items(), key=lambda item: (-item[1], item[0]))
    longest = sorted(waited.items(), key=lambda item: (-item[1], item[0]))[:_MOST_PAIRS]
    return Summary(
        workers=len(ended.results),
        steps=steps,
        seconds=seconds,
        seconds_per_step=seconds / count,
        median_seconds_per_step=median(own) if own else 0.0,
        computed_seconds_per_step=_mean([each.computed for each in ended.record.steps]),
        payload_bytes_per_worker_per_step=_mean([each.payload_bytes for each in outcomes]) / count,
        messages_per_worker_per_step=_mean([each.messages for each in outcomes]) / count,
        loss=next((each.loss for each in outcomes if each.loss is not None), None),
        waits=tuple(Wait(rank, None if other == NETWORK else other, each) for (rank, other), each in longest),
        waited_for_transfers=transfers / total if total else 0.0,
        waited_on=dict(named[:_MOST_PAIRS]),
        late_messages=ended.record.late_messages,
        died=ended.died,
        failures={rank: f"{type(error).__name__}: {error}" for rank, error in ended.failures.items()},
    )


def intervals(ended: Simulation[Any]) -> Iterator[tuple[int, Interval]]:
    """Yield what each worker did when, if the simulation was traced: as (rank, interval)."""
    for rank, comm in enumerate(ended.comms):
        for interval in [*ended.record.computing[rank], *comm.meter.intervals]:
            yield rank, interval


def _step_time(step: int, rows: list[Any]) -> StepTime:
    slowest = max(rows, key=lambda each: each.end - each.start)
    return StepTime(
        step=step,
        median_seconds=median(each.end - each.start for each in rows),
        longest_seconds=slowest.end - slowest.start,
        longest_rank=slowest.rank,
        computed_seconds=_mean([each.computed for each in rows]),
        end=max(each.end for each in rows),
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
