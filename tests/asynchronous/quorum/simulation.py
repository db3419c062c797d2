# SPDX-License-Identifier: Apache-2.0
"""Ranks that become ready, reduce and stop at random, and a coordinator among them, without threads or a clock."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from thinwire.asynchronous.quorum.coordinator import Coordinator
from thinwire.asynchronous.quorum.messages import ControlMessage, Kind

Inbox = list[ControlMessage]


@dataclass
class Simulation:
    """A coordinator and its ranks; messages between two ranks arrive in the order in which they were sent.

    Attributes:
        committed: the members of each step, as each rank has learned them.
        steps: the step that each rank is at.
        attempts: the attempt and members that each rank averages with, if it does.
        inboxes: messages on their way to each rank.
        reduced: steps, attempts and members of which the mean was computed.
    """

    coordinator: Coordinator
    rng: random.Random
    stopped: set[int] = field(default_factory=set[int])
    committed: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict[int, dict[int, tuple[int, ...]]])
    steps: dict[int, int] = field(default_factory=dict[int, int])
    attempts: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict[int, tuple[int, tuple[int, ...]]])
    inboxes: dict[int, Inbox] = field(default_factory=dict[int, Inbox])
    reduced: set[tuple[int, int, tuple[int, ...]]] = field(default_factory=set[tuple[int, int, tuple[int, ...]]])

    def act(self, rank: int, now: float) -> None:
        """One rank does one thing: reads a message, sends READY, or acknowledges the mean if no member is stopped."""
        if rank in self.stopped:
            return
        inbox = self.inboxes.setdefault(rank, [])
        if inbox:
            self._read(rank, inbox.pop(0))
            return
        step = self.steps.setdefault(rank, 0)
        attempt, members = self.attempts.get(rank, (0, ()))
        if attempt and not self.stopped & set(members) and self.rng.random() < 0.9:
            self.reduced.add((step, attempt, members))
            self._send(rank, ControlMessage(Kind.ACK, step, attempt), now)
        elif not attempt or self.rng.random() < 0.2:
            self._send(rank, ControlMessage(Kind.READY, step, attempt), now)

    def _send(self, rank: int, message: ControlMessage, now: float) -> None:
        for dst, answer in self.coordinator.receive(rank, message, now):
            self.inboxes.setdefault(dst, []).append(answer)

    def _read(self, rank: int, message: ControlMessage) -> None:
        step = self.steps.setdefault(rank, 0)
        if message.kind is Kind.LATE and message.answers == step:
            self.steps[rank] = message.step
        elif message.step != step:
            return
        elif message.kind is Kind.START:
            if rank in message.members:
                self.attempts[rank] = (message.attempt, message.members)
            return
        elif message.kind is Kind.COMMIT:
            self.committed.setdefault(rank, {})[step] = message.members
            self.steps[rank] = step + 1
        self.attempts.pop(rank, None)
