"""A sweep from its first trial to its last: arrays as large as fit, one after another."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from thinwire.errors import ConfigError
from thinwire.fusion.autotune import guessing
from thinwire.sweep.capacity import largest
from thinwire.sweep.journal import Journal
from thinwire.sweep.plan import Plan
from thinwire.sweep.sampling import Sampler
from thinwire.sweep.training import Seen, Together
from thinwire.sweep.trials import FUSIBLE, Outcome, Trial, partition

_SHARE = 0.8
# All are tried at once where there is so many times the room that a single trial takes, for each.
_AMPLE = 8
_MEMORY = Path("/proc/meminfo")


@dataclass(frozen=True)
class News:
    """How far a sweep has got.

    Args:
        array: which array is being trained, from 1.
        members: trials that it began with.
        step: its steps so far.
        ended: outcomes of the whole sweep that are known.
        running: asks for the loss of each trial under way in its last batch, by trial.
    """

    array: int
    members: int
    step: int
    ended: Sequence[Outcome]
    running: Callable[[], list[tuple[Trial, float]]]


def sweep(
    plan: Plan,
    sampler: Sampler,
    trials: int,
    *,
    together: int | None = None,
    at_once: int | None = None,
    told: Callable[[News], None] | None = None,
    journal: Journal | None = None,
) -> list[Outcome]:
    """Train as many trials as are wanted, in arrays of those that can be fused.

    Args:
        plan: of every trial.
        sampler: proposes trials, and is told what has come of them before it is asked for more.
        trials: in all.
        together: the most in one array; None takes as many as memory has room for.
        at_once: the most that are proposed at a time; None takes `together`, or else all.
        told: called after every step.
        journal: keeps what has been done, or goes on from what was; None keeps nothing.

    Returns:
        one outcome per trial, in the order of their numbers.

    Raises:
        ConfigError: fewer than one trial, or not even one fits.
        CheckpointError: the journal is of other trials.
    """
    check_counts(trials, together, at_once)
    book = journal or Journal()
    ended, arrays = list[Outcome](), 0
    while len(ended) < trials:
        asked = sampler.ask(min(trials - len(ended), at_once or together or trials))
        found = list[Outcome]()
        for group in partition(asked, FUSIBLE):
            most = together or book.room(partial(room_for, plan, group))
            for begin in range(0, len(group), most):
                members, arrays = group[begin : begin + most], arrays + 1
                found += book.train(plan, members, _teller(told, arrays, len(members), [*ended, *found]))
        sampler.tell(found)
        ended += found
    book.end()
    return sorted(ended, key=lambda each: each.trial.number)


def check_counts(trials: int, together: int | None, at_once: int | None = None) -> None:
    """Refuse a sweep of nothing.

    Raises:
        ConfigError: fewer than one trial, or fewer than one in an array or at a time.
    """
    if trials < 1:
        raise ConfigError(f"trials={trials}: a sweep has at least 1")
    if together is not None and together < 1:
        raise ConfigError(f"together={together}: an array has at least 1 model")
    if at_once is not None and at_once < 1:
        raise ConfigError(f"at_once={at_once}: at least 1 trial is proposed at a time")


def _teller(told: Callable[[News], None] | None, array: int, members: int, before: Sequence[Outcome]) -> Seen | None:
    if told is None:
        return None
    return lambda run, ended: told(News(array, members, run.step, [*before, *ended], run.running))


def room_for(plan: Plan, trials: Sequence[Trial]) -> int:
    """How many of these trials can be trained at once: one step is tried with 1, then with all or with 2, 4 and so on.

    Raises:
        ConfigError: not even one fits, or the system does not say how much memory is free.
    """
    room = _SHARE * free_bytes(torch.device("cpu"))
    taken = 0

    def fits(count: int) -> bool:
        nonlocal taken
        before = resident_bytes()
        try:
            Together(replace(plan, halving=None), trials[:count]).advance()
        except (torch.OutOfMemoryError, MemoryError):
            return False
        taken = resident_bytes() - before
        # Doubling may take as much again as what this one took.
        return 2 * taken < room

    # Every size that is tried has its kernels measured, which takes longer than many a sweep; that of all is needed.
    with guessing():
        # The second one loads nothing that stays for all.
        ample = fits(1) and fits(1) and _AMPLE * taken * len(trials) < room
    if ample and fits(len(trials)):
        return len(trials)
    found = largest(fits, len(trials))
    if not found:
        raise ConfigError("not one trial fits into memory; take a smaller model or batch")
    return found


def free_bytes(device: torch.device) -> int:
    """Bytes of memory that nobody uses.

    Raises:
        ConfigError: the system does not say.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if not _MEMORY.exists():
        raise ConfigError(
            "this system does not say how much memory is free; say how many share an array, by `together`"
        )
    lines = dict(line.split(":") for line in _MEMORY.read_text(encoding="ascii").splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0])


def resident_bytes() -> int:
    """Bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return os.sysconf("SC_PAGE_SIZE") * pages
