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
    """A step that this rank has contributed to and not ended.

    Attributes:
        step: of training.
        gradient: this rank's, on the CPU.
        ready: the message that says so.
        began: when it was contributed.
        notified: when READY was last sent.
        started: when the latest attempt with this rank as a member started here.
        attempt: the latest attempt that this rank is a member of; 0 before the first.
        reduction: of that attempt; None where it is an all-reduce.
        early: chunks of attempts that have not started here, each with its sender.
        outcome: COMMIT or LATE once the step is decided; None before.
        all_reduced: the number of the latest all-reduce of this step, and its mean.
        lent: whether an all-reduce reads the gradient, which must not change meanwhile.
        has_mean: whether the gradient was replaced by the mean of the members.
        refused: two ranks whose optimizers are set differently.
    """

    step: int
    gradient: Tensor
    ready: ControlMessage
    began: float
    notified: float = 0.0
    started: float = 0.0
    attempt: int = 0
    reduction: MessageReduction | None = None
    early: list[tuple[int, GradientChunk]] = field(default_factory=list[tuple[int, GradientChunk]])
    outcome: ControlMessage | None = None
    all_reduced: tuple[int, Tensor] | None = None
    lent: bool = False
    has_mean: bool = False
    refused: tuple[int, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether the step is decided, and nobody reads the gradient any more."""
        return self.outcome is not None and not self.lent

    @property
    def has_work(self) -> bool:
        """Whether this rank has something to compute or to send for the step."""
        return self.outcome is None and self.reduction is not None and self.reduction.has_work

    def start(self, attempt: int, reduction: MessageReduction | None, now: float) -> None:
        """Start an attempt."""
        self.attempt, self.reduction, self.started = attempt, reduction, now
        # Another member may have learned of this attempt first, so that its chunks are here before START.
        for src, chunk in self.early:
            if chunk.attempt == attempt and reduction is not None:
                reduction.receive(src, chunk)
        self.early = [(src, chunk) for src, chunk in self.early if chunk.attempt > attempt]

    def receive(self, src: int, chunk: GradientChunk) -> None:
        """Take in a chunk of this attempt or a later one."""
        if chunk.attempt > self.attempt:
            self.early.append((src, chunk))
        elif chunk.attempt == self.attempt and self.reduction is not None:
            self.reduction.receive(src, chunk)


@dataclass
class StateTransfer:
    """A late rank's requests for a state, and the chunks that it has received.

    Attributes:
        wanted: the step whose state is wanted, or that of a later one.
        donors: the ranks that have it.
        next_request: when to ask again.
        requests: how often it was asked for.
        chunks: by the rank that sent them and the step whose state it is, then by number.
    """

    wanted: int
    donors: Sequence[int]
    next_request: float
    requests: int = 0
    chunks: dict[tuple[int, int], dict[int, StateChunk]] = field(
        default_factory=dict[tuple[int, int], dict[int, StateChunk]]
    )

    def receive(self, src: int, chunk: StateChunk) -> None:
        """Take in a chunk; one of an earlier state is dropped."""
        if chunk.step >= self.wanted:
            self.chunks.setdefault((src, chunk.step), {})[chunk.number] = chunk

    @property
    def complete(self) -> list[StateChunk]:
        """The chunks of a state that is all here, in order; empty if there is none."""
        whole = (each for each in self.chunks.values() if len(each) == next(iter(each.values())).chunks)
        return [chunk for _, chunk in sorted(next(whole, {}).items())]
