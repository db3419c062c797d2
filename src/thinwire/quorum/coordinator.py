"""The keeper of arrivals: decides who is a member of which step, exactly once.

It holds no tensor and sends nothing itself: notes go in, and notes with their addresses come out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf

from thinwire.quorum.control_messages import Kind, Note
from thinwire.quorum.reduction_selector import Planes
from thinwire.quorum.rules import Rule

_COMPLAINTS = 2  # of one rank, where most members have not complained
Mail = list[tuple[int, Note]]


@dataclass
class Keeper:
    """Decides one step after the other.

    A step is *open* until enough ranks have arrived, then *under way* among its members until all of them hold the
    mean, then closed for good. Of members that wait in vain some have been told to wait for one that says nothing: as
    soon as most members wait or hold the mean, an attempt without the silent ones follows. No member uses a mean before
    the step is closed, and a member of an attempt that was given up has used none, so that all ranks use the same mean
    or none, and a member that was merely slow costs an attempt.

    In an all-reduce everyone takes part, so that anyone may hold it up: where most members wait in vain for it, the
    next attempt is by messages among those that are heard. The next all-reduce is announced when all have ended the
    last one.

    Args:
        rule: how long to wait for whom.
        planes: by which way members add up.
        step: to be decided first.
        sums: all-reduces so far.
        sum: the number of the one that is under way, or 0.
        last_sum: of the one that added up the step before this one, or 0.
        busy: ranks that have not ended the latest all-reduce.
        went: when the attempt began, in seconds.
        opened: when the first of those who are here began to compute, in seconds.
    """

    rule: Rule
    planes: Planes = field(default_factory=Planes)
    step: int = 0
    attempt: int = 0
    members: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    opened: float = 0.0
    sums: int = 0
    sum: int = 0
    last_sum: int = 0
    went: float = 0.0
    busy: set[int] = field(default_factory=set[int])
    here: dict[int, Note] = field(default_factory=dict[int, Note])
    holding: set[int] = field(default_factory=set[int])
    complaints: Counter[int] = field(default_factory=Counter[int])
    timed: dict[int, int] = field(default_factory=dict[int, int])

    def begin(self, step: int) -> None:
        """Decide this step next, whatever was before."""
        self.step, self.attempt = step, 0
        self.here.clear()
        self._give_up()

    def hear(self, src: int, note: Note, now: float) -> Mail:
        """Take in a note of kind HERE or HELD.

        Args:
            src: the rank that says so.
            note: what it says; a rank that waits says that it is here again and again.
            now: in seconds.
        """
        if note.kind is Kind.HELD:
            return self._held(src, note, now)
        self._time(src, note)
        if note.step < self.step:
            coming = note.step == self.step - 1 and src in self.last
            late = Note(Kind.LATE, self.step, note.step, sum=self.last_sum, members=self.last)
            return [] if coming else [(src, late)]
        if note.step > self.step:
            self.begin(note.step)
        if src in self.here:
            return self._again(src, note, now)
        began = now - note.microseconds / 1e6
        self.opened = min(self.opened, began) if self.here else began
        self.here[src] = note
        odd = self._odd()
        if odd:
            return [(rank, Note(Kind.REFUSED, self.step, members=odd)) for rank in self.here]
        return self.look(now)

    def look(self, now: float) -> Mail:
        """Begin an attempt if enough has been waited."""
        if self.members or self.rule.patience(len(self.here), now - self.opened) != 0.0:
            return []
        arrived = list(self.here)
        if self.rule.choice == "fixed":
            arrived = arrived[: self.rule.least]
        self.attempt, self.members, self.went = self.attempt + 1, tuple(sorted(arrived)), now
        told = self.members
        if self.attempt == 1 and self.planes.sums and not self.busy:
            told = range(self.rule.size)
            self.sum = self.sums = self.sums + 1
            self.busy = set(told)
        return [(rank, Note(Kind.GO, self.step, self.attempt, sum=self.sum, members=self.members)) for rank in told]

    def rest(self, now: float) -> float | None:
        """Seconds after which to `look` again; None where only another arrival matters."""
        return None if self.members else self.rule.patience(len(self.here), now - self.opened)

    def _time(self, src: int, note: Note) -> None:
        """Take note of how long a gradient took, in time or not."""
        if self.timed.get(src) != note.step:
            self.timed[src] = note.step
            self.rule.note(src, note.microseconds / 1e6)

    def _odd(self) -> tuple[int, ...]:
        """Two ranks whose optimizers differ."""
        first = next(iter(self.here))
        return next(((first, rank) for rank, n in self.here.items() if n.digest != self.here[first].digest), ())

    def _again(self, src: int, note: Note, now: float) -> Mail:
        """A rank that waits says so; members that are not heard of are left out of the next attempt."""
        if not self._complains(src, note):
            return []
        self.complaints[src] += 1
        heard = self.holding | (self.complaints.keys() & set(self.members))
        silent = set(self.members) - heard
        by_most = src in self.members and len(heard) > len(silent)
        if not silent:
            # Messages are under way then; a sum waits for somebody who is no member.
            by_most = bool(self.sum) and src in self.members and self.complaints[src] >= _COMPLAINTS
        if not by_most and (not silent or self.complaints[src] < self._enough(src, heard)):
            return []
        for rank in silent:
            del self.here[rank]
        self.planes.given_up += bool(self.sum)
        self._give_up()
        return self.look(now)

    def _complains(self, src: int, note: Note) -> bool:
        """Whether a rank waits for members of the attempt under way, and knows of it if it is one."""
        knows = src not in self.members or note.attempt == self.attempt
        return bool(self.members) and src not in self.holding and knows

    def _enough(self, src: int, heard: set[int]) -> float:
        """How often one rank must complain alone; whoever is no member only where none of them says anything."""
        if src in self.members:
            return _COMPLAINTS
        return _COMPLAINTS * (1 + self.attempt) if not heard else inf

    def _held(self, src: int, note: Note, now: float) -> Mail:
        if note.sum and note.sum == self.sums:
            self.busy.discard(src)
        if (note.step, note.attempt, note.sum) != (self.step, self.attempt, self.sum) or src not in self.members:
            return []
        self.holding.add(src)
        if len(self.holding) < len(self.members):
            return []
        closed = Note(Kind.CLOSED, self.step, self.attempt, sum=self.sum, members=self.members)
        told = [(rank, closed) for rank in self.here]
        self.last, self.last_sum = self.members, self.sum
        if self.attempt == 1:
            self.planes.note(now - self.went, summed=bool(self.sum))
        self.begin(self.step + 1)
        return told

    def _give_up(self) -> None:
        self.members, self.sum = (), 0
        self.holding.clear()
        self.complaints.clear()
