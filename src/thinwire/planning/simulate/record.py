# SPDX-License-Identifier: Apache-2.0
"""The record of a simulation: steps, bytes, and which worker has waited for which."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from thinwire.core.comm.work import Interval

NETWORK = -1
"""In place of a rank, where a wait was for the transfer itself."""


class Step(NamedTuple):
    """One worker's training step, in virtual seconds since the start."""

    rank: int
    step: int
    start: float
    end: float
    computed: float


@dataclass
class Record:
    """The events of a simulation.

    Attributes:
        waited: seconds that a rank has waited for another one, by (rank, other); the other is `NETWORK` if no worker
            was late.
        late_messages: messages that the network has delayed.
        lost_messages: messages to workers that had died.
        steps: where the work calls `SimulatedComm.compute`, one for each call, until the next one.
        computing: intervals of computation, if they are recorded.
        tracing: whether they are.
    """

    waited: defaultdict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    late_messages: int = 0
    lost_messages: int = 0
    steps: list[Step] = field(default_factory=list[Step])
    computing: defaultdict[int, list[Interval]] = field(default_factory=lambda: defaultdict(list))
    tracing: bool = False

    def wait(self, rank: int, cause: int, start: float, came: float, end: float) -> None:
        """Count a wait from `start` to `end` that another rank, which came at `came`, has made longer."""
        late = min(max(came - start, 0.0), end - start)
        for other, seconds in ((cause, late), (NETWORK, end - start - late)):
            if seconds > 0:
                self.waited[rank, other] += seconds
