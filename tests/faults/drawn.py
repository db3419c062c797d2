# SPDX-License-Identifier: Apache-2.0
"""Faults that are drawn from a seed: what happens, to which rank, at which moment, under which strategy."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

import torch

from tests.battery.cases import STRATEGIES
from tests.battery.runs import Case, Setting

Kind = Literal["kill", "stop", "raise", "skipped batch", "repeated batch", "left out", "nan"]
Phase = Literal["start", "attach", "forward", "backward", "before step", "after step", "consensus", "save", "end"]

STEPS = 11  # rounds of three and of four steps end several times, and the last one does not
LOOK = 5  # the step after which the workers evaluate and save, in the middle of a round
CALLS: tuple[Phase, ...] = ("attach", "backward", "before step", "after step", "consensus", "save", "end")
"""Phases in which ranks talk to each other; a fault in one of them strikes at the first, second or third call."""
OF_THE_USER: tuple[Phase, ...] = ("forward", "backward", "before step")
"""Phases in which a loop's own code runs, and a batch can be given up."""
PLACES: dict[Kind, tuple[Phase, ...]] = {
    "kill": ("start", "forward", *CALLS),
    "stop": ("start", "forward", *CALLS),
    "raise": ("start", "forward", "backward", "before step", "after step", "consensus", "end"),
    "skipped batch": OF_THE_USER,
    "repeated batch": OF_THE_USER,
    "left out": ("forward",),
    "nan": ("forward",),
}


@dataclass(frozen=True)
class Fault:
    """One run and what goes wrong in it.

    Attributes:
        seed: of the draw.
        case: the strategy, of the battery's table.
        size: the number of workers.
        processes: real ones on Gloo; otherwise threads, whose "kill" is an exception and whose "stop" is a long sleep.
        kind: what happens. "raise" is an exception that nobody catches. After a "skipped batch" the loop catches it and
            goes on with the next batch, after a "repeated batch" with the same. "left out" is a batch without a step.
        phase: when, in `step` where it is part of a step.
        step: of the victim's loop.
        call: how many messages the victim starts in the phase before it happens; at the phase's end if it starts fewer.
        victims: the ranks that it happens to.
    """

    seed: int
    case: Case
    size: int
    processes: bool
    kind: Kind
    phase: Phase
    step: int
    call: int
    victims: tuple[int, ...]

    @cached_property
    def setting(self) -> Setting:
        """What is trained."""
        return Setting(self.case, size=self.size, dtype=torch.float32, steps=STEPS)

    @property
    def timeout(self) -> float:
        """How long one wait may last, in seconds; short where it may be what ends the run."""
        return 20.0 if self.kind in ("kill", "raise") else 3.0

    @property
    def is_fatal(self) -> bool:
        """Whether the victims train no further."""
        return self.kind in ("kill", "stop", "raise")

    def __reduce__(self) -> tuple[Any, ...]:
        number = next(i for i, each in enumerate(STRATEGIES) if each is self.case)  # a case cannot be sent to a process
        return _sent, (number, self.seed, *(getattr(self, each.name) for each in fields(self)[2:]))

    def __str__(self) -> str:
        wire = "processes" if self.processes else "threads"
        at = f"{self.phase}, step {self.step}, call {self.call}"
        return f"seed {self.seed}: {self.kind} of {list(self.victims)} of {self.size} {wire} at {at}: {self.case}"


def _sent(number: int, seed: int, *others: Any) -> Fault:
    return Fault(seed, STRATEGIES[number], *others)


def sizes_of(each: Case) -> list[int]:
    """The numbers of workers that are drawn."""
    return [size for size in (2, 3, 4) if size not in each.refuses]


def fault(seed: int) -> Fault:
    """The fault of a seed. As many seeds as there are cases, one after another, have every case once."""
    draw = random.Random(seed)
    each = STRATEGIES[seed % len(STRATEGIES)]
    processes = draw.random() < 0.3
    kind: Kind = draw.choice(tuple(PLACES))
    size = draw.choice(sizes_of(each))
    phase = draw.choice(PLACES[kind])
    step = LOOK if phase in ("consensus", "save") else draw.randrange(STEPS)
    victims = draw.sample(range(size), 2 if size == 4 and draw.random() < 0.15 else 1)
    return Fault(seed, each, size, processes, kind, phase, step, draw.randrange(3), tuple(sorted(victims)))
