# SPDX-License-Identifier: Apache-2.0
"""A whole sweep: arrays as large as fit into memory, one after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from thinwire.arrays.finetuning.capacity import capacity_of
from thinwire.arrays.fusion.autotune import without_autotuning
from thinwire.arrays.sweep.journal import Journal
from thinwire.arrays.sweep.plan import Plan
from thinwire.arrays.sweep.sampling import Sampler
from thinwire.arrays.sweep.training import StepCallback, TrialArray
from thinwire.arrays.sweep.trials import FUSIBLE, Outcome, Trial, partition
from thinwire.core.validation import check_range
from thinwire.errors import ConfigError

# The fraction of free memory that the tensors of an array may use.
_USABLE = 0.4
# Adapters train as one array unless a step of it takes longer than this fraction of separate steps allows.
_WORTH_IT = 0.95
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Progress:
    """The state of a sweep after a step.

    Args:
        array: number of the current array, from 1.
        members: trials with which it began.
        step: its steps so far.
        ended: the outcomes of the whole sweep that are known.
        current_losses: returns each trial of the current array with the loss of its last batch.
    """

    array: int
    members: int
    step: int
    ended: Sequence[Outcome]
    current_losses: Callable[[], list[tuple[Trial, float]]]


def sweep(
    plan: Plan,
    sampler: Sampler,
    trials: int,
    *,
    together: int | None = None,
    at_once: int | None = None,
    callback: Callable[[Progress], None] | None = None,
    journal: Journal | None = None,
) -> list[Outcome]:
    """Train a number of trials, in arrays of those that can be fused.

    Args:
        plan: what all trials have in common.
        sampler: proposes trials, and learns the outcomes of each batch of trials before it proposes the next.
        trials: number of trials in all.
        together: most trials in one array; None takes as many as fit into memory.
        at_once: most trials that are proposed at a time; None takes `together`, or all.
        callback: called after every step.
        journal: saves the sweep, or resumes one; None saves nothing.

    Returns:
        one outcome per trial, in the order of their numbers.

    Raises:
        ConfigError: fewer than one trial, or not even one fits into memory.
        CheckpointError: the journal has other trials.
    """
    check_counts(trials, together, at_once)
    journal = journal or Journal()
    ended, arrays = list[Outcome](), 0
    while len(ended) < trials:
        proposed = sampler.ask(min(trials - len(ended), at_once or together or trials))
        outcomes = list[Outcome]()
        for group in partition(proposed, FUSIBLE):
            most = together or journal.capacity(partial(array_size_for, plan, group))
            for begin in range(0, len(group), most):
                members, arrays = group[begin : begin + most], arrays + 1
                on_step = _on_step(callback, arrays, len(members), [*ended, *outcomes])
                outcomes += journal.train(plan, members, on_step)
        sampler.tell(outcomes)
        ended += outcomes
    journal.mark_complete()
    return sorted(ended, key=lambda each: each.trial.number)


def _on_step(
    callback: Callable[[Progress], None] | None, array: int, members: int, before: Sequence[Outcome]
) -> StepCallback | None:
    """Return the callback of one array, which adds the outcomes of the arrays before it."""
    if callback is None:
        return None
    return lambda run, ended: callback(Progress(array, members, run.step, [*before, *ended], run.current_losses))


def check_counts(trials: int, together: int | None, at_once: int | None = None) -> None:
    """Check the sizes of a sweep.

    Raises:
        ConfigError: fewer than one trial, or fewer than one in an array or at a time.
    """
    check_range("trials", trials, "1..", "64 are usual")
    check_range("together", together, "1..", "None takes as many as fit into memory")
    check_range("at_once", at_once, "1..", "None proposes the trials of an array at a time")


# -- how many trials fit into memory -----------------------------------------------------------------------------------


def capacity_for(plan: Plan, trials: Sequence[Trial]) -> int:
    """Return how many of these trials can be trained as one array, found by training two small arrays for two steps.

    Raises:
        ConfigError: not even one fits, or the system does not report how much memory is free.
    """
    # Members differ in shape by the ranks of adapters only.
    largest = max(trials, key=lambda each: plan.setting(each.hyperparameters).rank)

    def train(size: int) -> None:
        run = TrialArray(replace(plan, halving=None), [largest] * size)
        for _ in range(2):
            run.advance()

    limit = int(_USABLE * free_bytes())
    # Every size that is tried would have its kernels measured, which can take longer than the sweep; only the final
    # size needs that.
    with without_autotuning():
        found = capacity_of(train, limit=limit)
    if not found.members:
        raise ConfigError(
            f"not one trial fits into {limit} bytes: it needs {found.peak(1)}. Use a smaller model or batch"
        )
    return min(found.members, len(trials))


def array_size_for(plan: Plan, trials: Sequence[Trial]) -> int:
    """How many of these trials to train as one array: as many as fit, or 1 where adapters together are not faster.

    Raises:
        ConfigError: as `capacity_for`.
    """
    most = capacity_for(plan, trials)
    if plan.adapting is None or most == 1:
        return most
    with without_autotuning():
        together, alone = (
            _step_seconds(TrialArray(replace(plan, halving=None), trials[:count])) for count in (most, 1)
        )
    return most if together < most * alone / _WORTH_IT else 1


def _step_seconds(run: TrialArray) -> float:
    """Return the least CPU time of a step: the first ones allocate, and other processes disturb some."""
    found: list[float] = []
    for _ in range(4):
        start = time.process_time()
        run.advance()
        found.append(time.process_time() - start)
    return min(found[1:])


def free_bytes() -> int:
    """Bytes of free memory.

    Raises:
        ConfigError: the system does not report it.
    """
    if not _MEMINFO.exists():
        raise ConfigError(f"{_MEMINFO} is not there, so free memory is not known. Set the size of arrays by `together`")
    lines = dict(line.split(":") for line in _MEMINFO.read_text(encoding="ascii").splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0])
