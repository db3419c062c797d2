# SPDX-License-Identifier: Apache-2.0
"""Training runs of simulated workers: a quadratic with known gradients, or no numbers at all; and their figures."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import SGD

from thinwire.core.validation import check_ranges
from thinwire.lab.runs.optimizer import set_lr
from thinwire.methods.strategies.base import Strategy
from thinwire.planning.plan.traffic import default_optimizer, spare_arithmetic, step_with_gradients
from thinwire.planning.simulate.comm import SimulatedComm
from thinwire.planning.simulate.record import NETWORK
from thinwire.planning.simulate.running import Simulation
from thinwire.worker.attach import attach
from thinwire.worker.worker import internals_of

_LARGEST_TENSOR = 1 << 20
_MOST_PAIRS = 10
_LR = 0.1  # of SGD


@dataclass(frozen=True)
class Outcome:
    """One worker's figures of a run.

    Attributes:
        loss: of the model that all workers agree on: the mean over workers of half the mean square of the distance to a
            worker's own minimum. None where there are no numbers, and on ranks other than 0.
        payload_bytes: sent in all steps.
        messages: calls in which it sent anything.
    """

    loss: float | None
    payload_bytes: float
    messages: int


@dataclass(frozen=True)
class Training:
    """The training of a quadratic, the same on each simulated worker: `simulate(workers, Training(...))`.

    Args:
        strategy: the recipe.
        steps: how many.
        parameters: of the quadratic; each worker has a minimum of its own, drawn from the seed.
        meta: whether tensors have no data, for the times and bytes of many workers.
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
    parameters: int = 10_000
    meta: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(self, steps=("1..", "100 is usual"), parameters=("1..", "10000 is usual"))

    def __call__(self, comm: SimulatedComm) -> Outcome:
        """Train on one worker."""
        device = "meta" if self.meta else "cpu"
        sizes = [min(_LARGEST_TENSOR, self.parameters - start) for start in range(0, self.parameters, _LARGEST_TENSOR)]
        model = nn.ParameterList([torch.zeros(size, dtype=torch.float32, device=device) for size in sizes])
        minimum = None if self.meta else self._minimum(comm.rank)
        centres = [torch.empty_like(p) for p in model] if minimum is None else list(minimum.split(sizes))
        optimizer = default_optimizer(self.strategy, model, comm.size)
        if isinstance(optimizer, SGD):
            set_lr(optimizer, _LR)
        worker = attach(model, optimizer, self.strategy, comm=comm, seed=self.seed)
        if minimum is None:
            spare_arithmetic(optimizer, model, None)
        # The messages that attach the model do not count.
        nbytes, messages = comm.meter.payload_bytes, comm.meter.messages
        # A worker that was late may continue at a later step.
        while worker.step < self.steps:
            comm.compute()
            for parameter, centre in zip(model, centres, strict=True):
                parameter.grad = centre if minimum is None else torch.sub(parameter.detach(), centre)
            step_with_gradients(worker)
        internals_of(worker).wait_pending()
        comm.end_step()
        sent, messages = comm.meter.payload_bytes - nbytes, comm.meter.messages - messages
        with worker.consensus():
            loss = None if minimum is None or comm.rank else self._loss(model, comm.size)
        worker.detach()
        return Outcome(loss, sent, messages)

    def _loss(self, model: nn.ParameterList, size: int) -> float:
        agreed = torch.cat([parameter.detach() for parameter in model])
        return sum(float((agreed - self._minimum(rank)).square().mean()) / 2 for rank in range(size)) / size

    def _minimum(self, rank: int) -> Tensor:
        draw = torch.Generator().manual_seed(1_000_003 * self.seed + rank)
        return torch.randn(self.parameters, generator=draw, dtype=torch.float32, device="cpu")


# -- figures -----------------------------------------------------------------------------------------------------------


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
        steps: training steps.
        seconds: from when all workers had begun their first step to when the last one had ended its last.
        seconds_per_step: mean; what comes before the first step, the broadcast of the parameters, is no part of it.
        median_seconds_per_step: of all workers and steps.
        longest: the longest step of a worker, as in the record; None without any.
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
    steps: int
    seconds: float
    seconds_per_step: float
    median_seconds_per_step: float
    longest: dict[str, float] | None
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
    record, count = ended.record, len({each.step for each in ended.record.steps})
    outcomes = [outcome for outcome in ended.results if outcome is not None]
    # Rank 0 has sent its parameters before the others have them.
    first = min((each.step for each in record.steps), default=0)
    begun = max((each.start for each in record.steps if each.step == first), default=0.0)
    seconds = max((each.end for each in record.steps), default=0.0) - begun
    own = [each.end - each.start for each in record.steps]
    waited = record.waited
    total, on = sum(waited.values()), defaultdict[int, float](float)
    for (_, other), length in waited.items():
        on[other] += length
    transfers = on.pop(NETWORK, 0.0)
    named = sorted(on.items(), key=lambda item: (-item[1], item[0]))
    longest = sorted(waited.items(), key=lambda item: (-item[1], item[0]))[:_MOST_PAIRS]
    return Summary(
        workers=len(ended.results),
        steps=count,
        seconds=seconds,
        seconds_per_step=seconds / max(1, count),
        median_seconds_per_step=median(own) if own else 0.0,
        longest=record.steps[own.index(max(own))]._asdict() if own else None,
        computed_seconds_per_step=_mean([each.computed for each in record.steps]),
        payload_bytes_per_worker_per_step=_mean([each.payload_bytes for each in outcomes]) / max(1, count),
        messages_per_worker_per_step=_mean([each.messages for each in outcomes]) / max(1, count),
        loss=next((each.loss for each in outcomes if each.loss is not None), None),
        waits=tuple(Wait(rank, None if other == NETWORK else other, each) for (rank, other), each in longest),
        waited_for_transfers=transfers / total if total else 0.0,
        waited_on=dict(named[:_MOST_PAIRS]),
        late_messages=record.late_messages,
        died=ended.died,
        failures={rank: f"{type(error).__name__}: {error}" for rank, error in ended.failures.items()},
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
