# SPDX-License-Identifier: Apache-2.0
"""The coordinator decides once for each step which ranks are its members.

It is a state machine: its inputs are control messages and times, its outputs control messages with destinations. It
holds no tensor, reads no clock and sends nothing itself.

A step goes through three phases. It *waits* until enough ranks are ready. It is *in progress* while its members average
their gradients. It is *committed* when every member has acknowledged that it holds the mean; only then does any rank
use that mean, so that all ranks use the same one or none.

A member may stop in between. The others then send READY again. When most members have done so, or have the mean, the
attempt is abandoned, and another one starts without the members that sent nothing. A merely slow member costs one
attempt, and may be a member of a later one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from thinwire.asynchronous.quorum.messages import ControlMessage, Kind
from thinwire.asynchronous.quorum.rules import QuorumRule

_ENOUGH_REMINDERS = 2  # reminders of one rank that suffice if most members have sent none
Outbox = list[tuple[int, ControlMessage]]
"""Messages, each with its destination."""


@dataclass
class Coordinator:
    """Decides one step after the other.

    Attributes:
        rule: how long to wait for how many ranks.
        step: the step to be decided next.
        attempt: the number of the latest attempt at this step, from 1; 0 before the first.
        members: the members of the attempt in progress; empty if none is in progress.
        last: members of the latest committed step.
        opened: when the first of the ready ranks began to compute, in seconds.
        ready: ranks that are ready in the order of arrival, each with its first READY message.
        acknowledged: members that hold the mean.
        reminders: how often each rank has sent READY again during this attempt.
        timed: the latest step of each rank whose time was recorded.
    """

    rule: QuorumRule
    step: int = 0
    attempt: int = 0
    members: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    opened: float = 0.0
    ready: dict[int, ControlMessage] = field(default_factory=dict[int, ControlMessage])
    acknowledged: set[int] = field(default_factory=set[int])
    reminders: Counter[int] = field(default_factory=Counter[int])
    timed: dict[int, int] = field(default_factory=dict[int, int])

    def begin(self, step: int) -> None:
        """Decide this step next, and drop any step in progress."""
        self.step, self.attempt = step, 0
        self.ready.clear()
        self._end_attempt()

    def lose(self, ranks: Collection[int], now: float) -> Outbox:
        """Stop waiting for these ranks; an attempt with one of them as a member is abandoned."""
        self.rule.lose(ranks)
        for rank in ranks:
            self.ready.pop(rank, None)
        if set(ranks).isdisjoint(self.members):
            return []
        self._end_attempt()
        return self.start_if_due(now)

    def receive(self, src: int, message: ControlMessage, now: float) -> Outbox:
        """Handle a READY or ACK message.

        Args:
            src: the rank that sent it.
            message: the message; a waiting rank sends READY repeatedly.
            now: the time in seconds.

        Returns:
            The messages to send.
        """
        if message.kind is Kind.ACK:
            return self._acknowledge(src, message)
        if self.timed.get(src) != message.step:
            # Late gradients are timed too: otherwise the rule would not learn that a rank is slow.
            self.timed[src] = message.step
            self.rule.record(src, message.microseconds / 1e6)
        if message.step < self.step:
            if message.step == self.step - 1 and src in self.last:
                return []  # its COMMIT is on its way
            late = ControlMessage(Kind.LATE, self.step, answers=message.step, members=self.last)
            return [(src, late)]
        if message.step > self.step:
            self.begin(message.step)  # all ranks have loaded the checkpoint of a later step
        if src in self.ready:
            return self._remind(src, message, now)
        began = now - message.microseconds / 1e6
        self.opened = min(self.opened, began) if self.ready else began
        self.ready[src] = message
        first = next(iter(self.ready))
        for rank, each in self.ready.items():
            if each.digest != self.ready[first].digest:
                refusal = ControlMessage(Kind.REFUSED, self.step, members=(first, rank))
                return [(dst, refusal) for dst in self.ready]
        return self.start_if_due(now)

    def start_if_due(self, now: float) -> Outbox:
        """Start an attempt if enough ranks are ready and none is in progress."""
        if self.seconds_to_wait(now) != 0.0:
            return []
        members = list(self.ready)
        if self.rule.choice == "fixed":
            members = members[: self.rule.least]
        self.attempt, self.members = self.attempt + 1, tuple(sorted(members))
        start = ControlMessage(Kind.START, self.step, self.attempt, members=self.members)
        return [(dst, start) for dst in self.members]

    def seconds_to_wait(self, now: float) -> float | None:
        """Return the seconds until the next call of `start_if_due`; None to wait for a message."""
        return None if self.members else self.rule.seconds_to_wait(len(self.ready), now - self.opened)

    def _remind(self, src: int, message: ControlMessage, now: float) -> Outbox:
        """Handle a repeated READY: abandon the attempt if enough ranks wait in vain."""
        is_member = src in self.members
        # A member that does not know of the attempt yet does not wait for it.
        if not self.members or (is_member and message.attempt != self.attempt):
            return []
        self.reminders[src] += 1
        responded = self.acknowledged | (self.reminders.keys() & set(self.members))
        missing = set(self.members) - responded
        if not missing:
            return []  # all members wait for messages that are on the way
        if is_member and src not in self.acknowledged:
            abandon = len(responded) > len(missing) or self.reminders[src] >= _ENOUGH_REMINDERS
        else:
            # With every attempt, members that have the mean count less: a member that has sent its whole part may have
            # stopped before its acknowledgement, or be slow. Other ranks count only if no member has responded.
            counts = is_member or not responded
            abandon = counts and self.reminders[src] >= _ENOUGH_REMINDERS * (1 + self.attempt)
        if not abandon:
            return []
        for rank in missing:
            del self.ready[rank]
        self._end_attempt()
        return self.start_if_due(now)

    def _acknowledge(self, src: int, message: ControlMessage) -> Outbox:
        """Handle an acknowledgement: commit the step if all members have the mean."""
        if (message.step, message.attempt) != (self.step, self.attempt) or src not in self.members:
            return []
        self.acknowledged.add(src)
        if len(self.acknowledged) < len(self.members):
            return []
        commit = ControlMessage(Kind.COMMIT, self.step, self.attempt, members=self.members)
        outbox = [(dst, commit) for dst in self.ready]
        self.last = self.members
        self.begin(self.step + 1)
        return outbox

    def _end_attempt(self) -> None:
        self.members = ()
        self.acknowledged.clear()
        self.reminders.clear()
