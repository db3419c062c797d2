# SPDX-License-Identifier: Apache-2.0
"""The figures of a simulated training run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from thinwire.core.comm.work import Interval
from thinwire.lab.runs.simulated_training import Outcome
from thinwire.planning.simulate.record import NETWORK
from thinwire.planning.simulate.running import Simulation

_MOST_PAIRS = 10


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
    """The figures of a run."""
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
    """What each worker did when, if the simulation was traced: as (rank, interval)."""
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
