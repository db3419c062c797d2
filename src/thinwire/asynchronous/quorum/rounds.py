# SPDX-License-Identifier: Apache-2.0
"""A step that one rank has contributed to, and a state that a late rank waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from thinwire.asynchronous.quorum.messages import ControlMessage, GradientChunk, StateChunk
from thinwire.asynchronous.quorum.reductions import MessageReduction


@dataclass
class Round:
    """A step that this rank has contributed to and has not ended.

    Attributes:
        step: the training step.
        gradient: this rank's gradient, on the CPU.
        ready: the READY message.
        notified: the time of the last READY.
        started: the time at which the latest attempt with this rank as a member started.
        attempt: the latest attempt with this rank as a member; 0 before the first.
        reduction: the reduction of that attempt; None before the first.
        early: chunks of attempts that have not started on this rank, with their senders.
        outcome: COMMIT or LATE after the decision; None before it.
        refused: two ranks whose optimizers have different settings.
    """

    step: int
    gradient: Tensor
    ready: ControlMessage
    notified: float = 0.0
    started: float = 0.0
    attempt: int = 0
    reduction: MessageReduction | None = None
    early: list[tuple[int, GradientChunk]] = field(default_factory=list[tuple[int, GradientChunk]])
    outcome: ControlMessage | None = None
    refused: tuple[int, ...] = ()

    @property
    def has_work(self) -> bool:
        """Return True if this rank has something to compute or to send for the step."""
        return self.outcome is None and self.reduction is not None and self.reduction.has_work

    def start(self, attempt: int, reduction: MessageReduction, now: float) -> None:
        """Start an attempt."""
        self.attempt, self.reduction, self.started = attempt, reduction, now
        # Another member may have started this attempt earlier, so that its chunks arrive before START.
        for src, chunk in self.early:
            if chunk.attempt == attempt:
                reduction.receive(src, chunk)
        self.early = [(src, chunk) for src, chunk in self.early if chunk.attempt > attempt]

    def receive(self, src: int, chunk: GradientChunk) -> None:
        """Handle a chunk of this attempt or a later one."""
        if chunk.attempt > self.attempt:
            self.early.append((src, chunk))
        elif chunk.attempt == self.attempt and self.reduction is not None:
            self.reduction.receive(src, chunk)


@dataclass
class StateTransfer:
    """A late rank's requests for a state, and the received chunks.

    Attributes:
        wanted: the first step whose state is acceptable.
        donors: the ranks that have the state.
        next_request: the time of the next request.
        requests: the number of requests.
        chunks: the chunks by sender and step of the state, then by number.
    """

    wanted: int
    donors: Sequence[int]
    next_request: float
    requests: int = 0
    chunks: dict[tuple[int, int], dict[int, StateChunk]] = field(
        default_factory=dict[tuple[int, int], dict[int, StateChunk]]
    )

    def receive(self, src: int, chunk: StateChunk) -> None:
        """Handle a chunk; one of an earlier state is dropped."""
        if chunk.step >= self.wanted:
            self.chunks.setdefault((src, chunk.step), {})[chunk.number] = chunk

    @property
    def complete(self) -> list[StateChunk]:
        """Return the chunks of a complete state, in order; empty if none is complete."""
        whole = (each for each in self.chunks.values() if len(each) == next(iter(each.values())).chunks)
        return [chunk for _, chunk in sorted(next(whole, {}).items())]
