# SPDX-License-Identifier: Apache-2.0
"""Emulated stragglers: workers that are slower than the others."""

import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from thinwire.errors import ConfigError
from thinwire.planning.quantities import entries_by_rank, parse_duration

SLOW = "THINWIRE_SLOW"
STALL = "THINWIRE_STALL"
SEED = "THINWIRE_STALL_SEED"


@dataclass(frozen=True)
class Straggler:
    """How much one worker is slowed down.

    Nothing slows a worker from outside: its training loop calls `pause` after each step's computation, as thinwire's
    own does.

    Args:
        factor: how many times as long its computation takes, 1 to 1000.
        stall_probability: the probability that a step stalls, 0 to 1.
        stall_seconds: how long a stall takes.
        seed: random seed, the same on all workers.
        rank: of this worker; workers stall at different steps.

    Raises:
        ConfigError: when a value is out of its range.

    Example:
        >>> straggler = Straggler(stall_probability=0.25, stall_seconds=0.2)
        >>> [straggler.stall(step) for step in range(8)]
        [0.0, 0.0, 0.2, 0.0, 0.0, 0.0, 0.2, 0.0]
    """

    factor: float = 1.0
    stall_probability: float = 0.0
    stall_seconds: float = 0.0
    seed: int = 0
    rank: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.factor <= 1000:
            raise ConfigError(f"factor={self.factor}: must lie between 1 and 1000. A worker can only be made slower")
        if not 0 <= self.stall_probability <= 1:
            raise ConfigError(f"stall_probability={self.stall_probability}: must lie between 0 and 1")
        if not 0 <= self.stall_seconds <= 3600:
            raise ConfigError(f"stall_seconds={self.stall_seconds}: must lie between 0 and 3600")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Read what `thinwire emulate` or `thinwire train` has set for this worker; without it there is no delay.

        Args:
            environment: variables THINWIRE_SLOW, THINWIRE_STALL, THINWIRE_STALL_SEED, RANK and WORLD_SIZE; None means
                those of this process.

        Raises:
            ConfigError: when they cannot be read.
        """
        names = os.environ if environment is None else environment
        rank, size = (_whole_number(names, name, default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
        every = parse_stragglers(
            names.get(SLOW), names.get(STALL), workers=max(size, rank + 1), seed=_whole_number(names, SEED, 0)
        )
        chosen = every[rank]
        return cls(chosen.factor, chosen.stall_probability, chosen.stall_seconds, chosen.seed, chosen.rank)

    def stall(self, step: int) -> float:
        """Return the seconds that ``step`` stalls: a function of the seed, the rank and the step alone."""
        # A hash rather than a generator, so that a resumed run stalls in the same steps.
        key = f"{self.seed} {self.rank} {step}".encode()
        uniform = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) / 2**64
        return self.stall_seconds if uniform < self.stall_probability else 0.0

    def pause(self, step: int, compute_seconds: float) -> float:
        """Sleep for as long as this step is to be slowed down.

        Args:
            step: the number of the step.
            compute_seconds: how long its computation took.

        Returns:
            The seconds slept.
        """
        seconds = (self.factor - 1) * compute_seconds + self.stall(step)
        if seconds > 0:
            time.sleep(seconds)
        return seconds


def parse_stragglers(slow: str | None, stall: str | None, *, workers: int, seed: int = 0) -> tuple[Straggler, ...]:
    """Read one straggler per worker.

    Args:
        slow: entries `[RANK:]FACTORx` separated by commas, such as `2:3x`; an entry without a rank is for all workers
            that have no entry of their own.
        stall: entries `[RANK:]PROBABILITY:DURATION`, such as `0.15:200ms`.
        workers: how many stragglers to return.
        seed: random seed.

    Raises:
        ConfigError: when an entry cannot be read.
    """
    every = [Straggler(seed=seed, rank=rank) for rank in range(workers)]
    for name, given, parts, read in (("slow", slow, 1, _parse_factor), ("stall", stall, 2, _parse_stall)):
        if given is not None:
            argument = f"{name} {given!r}"
            entries = entries_by_rank(given, workers, partial(read, argument=argument), argument=argument, parts=parts)
            every = [replace(each, **(entry or {})) for each, entry in zip(every, entries, strict=True)]
    return tuple(every)


def straggler_environment(slow: str | None, stall: str | None, *, seed: int = 0) -> dict[str, str]:
    """Return the environment variables that `Straggler.from_environment` reads, the same for all workers."""
    texts = {SLOW: slow, STALL: stall, SEED: str(seed)}
    return {name: text for name, text in texts.items() if text is not None}


def _parse_factor(text: str, *, argument: str) -> dict[str, float]:
    number = _number(text.strip().lower().removesuffix("x"))
    if number is None or not text.strip().lower().endswith("x") or not 1 <= number <= 1000:
        raise ConfigError(
            f"{argument}: {text!r} cannot be read. A slow worker is RANK:FACTORx, such as 2:3x, FACTOR >= 1"
        )
    return {"factor": number}


def _parse_stall(text: str, *, argument: str) -> dict[str, float]:
    probability, _, duration = text.partition(":")
    number = _number(probability)
    if number is None or not 0 <= number <= 1:
        raise ConfigError(
            f"{argument}: {text!r} cannot be read. A stall is PROBABILITY:DURATION, such as 0.15:200ms, "
            "PROBABILITY 0 to 1"
        )
    return {"stall_probability": number, "stall_seconds": parse_duration(duration, argument=argument)}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _whole_number(names: Mapping[str, str], name: str, default: int) -> int:
    text = names.get(name, str(default))
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r}: must be a whole number")
    return int(text)
