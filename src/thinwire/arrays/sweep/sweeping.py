# SPDX-License-Identifier: Apache-2.0
"""A whole sweep: arrays as large as fit into memory, one after another."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from thinwire.arrays.fusion.autotune import without_autotuning
from thinwire.arrays.sweep.journal import Journal
from thinwire.arrays.sweep.plan import Plan
from thinwire.arrays.sweep.sampling import Sampler
from thinwire.arrays.sweep.training import StepCallback, TrialArray
from thinwire.arrays.sweep.trials import FUSIBLE, Outcome, Trial, partition
from thinwire.core.validation import check_range
from thinwire.errors import ConfigError

# The fraction of free memory that arrays may use.
_USABLE = 0.8
# With so many times the memory that all trials need by the figure of one, all are tried at once.
_AMPLE = 8
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
    """Return how many of these trials can be trained as one array, found by training arrays for one step.

    Raises:
        ConfigError: not even one fits, or the system does not report how much memory is free.
    """
    usable = _USABLE * free_bytes(torch.device("cpu"))
    taken = 0

    def fits(count: int) -> bool:
        nonlocal taken
        before = resident_bytes()
        try:
            TrialArray(replace(plan, halving=None), trials[:count]).advance()
        except (torch.OutOfMemoryError, MemoryError):
            return False
        taken = resident_bytes() - before
        # The next array tried may be twice as large, so this one may use half of the memory at most.
        return 2 * taken < usable

    # Every size that is tried would have its kernels measured, which can take longer than the sweep; only the final
    # size needs that.
    with without_autotuning():
        # The second array of one trial allocates nothing that is shared by all arrays, so its size is that of a trial.
        ample = fits(1) and fits(1) and _AMPLE * taken * len(trials) < usable
    if ample and fits(len(trials)):
        return len(trials)
    found = largest_that_fits(fits, len(trials))
    if not found:
        raise ConfigError("not one trial fits into memory. Use a smaller model or batch")
    return found


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


def largest_that_fits(fits: Callable[[int], bool], most: int) -> int:
    r"""The largest number up to `most` that fits, 0 if not even one does, by doubling and bisection.

    Calls `fits` at most about $2\log_2$ of the result times, and not above twice the largest number that fits.

    Args:
        fits: whether a number fits; if it does, all smaller ones do.
        most: the largest number of interest.
    """
    if most < 1 or not fits(1):
        return 0
    low = 1
    while low < most and fits(min(2 * low, most)):
        low = min(2 * low, most)
    high = min(2 * low, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def free_bytes(device: torch.device) -> int:
    """Bytes of free memory.

    Raises:
        ConfigError: the system does not report it.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if not _MEMINFO.exists():
        raise ConfigError(f"{_MEMINFO} is not there, so free memory is not known. Set the size of arrays by `together`")
    lines = dict(line.split(":") for line in _MEMINFO.read_text(encoding="ascii").splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0])


def resident_bytes() -> int:
    """Bytes of physical memory that this process uses."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return os.sysconf("SC_PAGE_SIZE") * pages
