# SPDX-License-Identifier: Apache-2.0
"""When a round of unequal workers closes, and how late work counts.

A worker contributes the displacement of its local steps, and says in which round it started them. A round closes when
enough contributions have arrived and a grace window is over. What arrives later belongs to a later round, with a weight
that falls with its age. With F fragments of the parameters rounds alternate between them: round n takes only work that
was started in round n, n - F, n - 2F and so on.

This is a state machine: its inputs are arrivals, losses, joins and times, and its output is a closing. It holds no
tensor, reads no clock and sends nothing. Each worker has one. For each round one worker, its owner, proposes a
closing; if the owner is lost, the next worker does. The owner is a worker whose contribution is in time, since it waits
for the closing, while a late one still computes. Proposals go to a write-once record, such as `Records.propose`, which
returns the first one, so that a round has one closing, whichever worker proposes it. `thinwire.elastic.late` trains
with it.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated, Any, Literal

from thinwire.asynchronous.quorum.rules import deadline
from thinwire.core.validation import Range, check_fields
from thinwire.errors import ConfigError

LateRule = Literal["off", "discounted", "full"]
_DURATIONS = 8  # of each worker, the latest
_LEAST_DURATIONS = 4  # of all workers
_REMEMBERED = 1000  # rounds for which taken contributions are kept
# The grace window adds at least this fraction of the median duration, and so many deviations of a worker's own
# durations up to another fraction. `python -m benchmarks.closing --slack` has chosen the first two.
SLACK, SPREADS, _MOST_SLACK = 0.02, 3.0, 0.5
_INTERVALS = 8
_LEAST_ROUND = 0.1  # of a period
_DISCOUNT = 0.5  # the exponent of the age, as in the paper's experiments


@dataclass(frozen=True)
class CloseRule:
    """When a round closes.

    `python -m benchmarks.closing` compares values, for 256 workers of heavy-tailed speeds. The default quorum lets one
    of four workers be late. Of up to three workers it is all of them; use 0.5 to let one of three be late.

    Args:
        quorum: the fraction of the present workers that a round needs, at least one worker.
        tokens: the tokens that a round needs; 0 for any number.
        deviations: the grace window: the round stays open until the median duration of a contribution plus so many
            median absolute deviations, since the last closing. Of the median it adds at least 2 %, and more if the
            rounds of single workers vary. It closes sooner when all workers have arrived that usually take no longer
            than this.

    Raises:
        ConfigError: a value is out of its range.
    """

    quorum: Annotated[float, Range("(0, 1]", "Use 1 to wait for all workers")] = 0.75
    tokens: Annotated[float, Range("[0, inf)", "Use 0 for no such rule")] = 0.0
    deviations: Annotated[float, Range("[0, inf)", "1 is usual")] = 1.0

    def __post_init__(self) -> None:
        """Check the values."""
        check_fields(self)


@dataclass(frozen=True, order=True)
class Contribution:
    """The work of one worker in one round.

    Attributes:
        started: the round in which the worker started it.
        worker: its id.
        tokens: the tokens or samples that it used.
        others: with fragments, the rounds in which the worker had started the other ones, in their order.
    """

    started: int
    worker: str
    tokens: float
    others: tuple[int, ...] = field(default=(), repr=False)

    def content(self) -> list[Any]:
        """Return it as JSON values."""
        return [self.started, self.worker, self.tokens, *self.others]

    @classmethod
    def read(cls, content: Sequence[Any]) -> Contribution:
        """Restore a contribution from its `content`."""
        started, worker, tokens, *others = content
        return cls(int(started), str(worker), float(tokens), tuple(map(int, others)))

    def age(self, round: int) -> int:
        """Return the number of rounds of its fragment that had closed without it before this one."""
        return (round - self.started) // (1 + len(self.others))


@dataclass(frozen=True)
class Closing:
    """The contributions that one round takes, the same on all workers.

    Attributes:
        round: its number.
        contributions: in one order, so that sums have the same bits on all workers.
    """

    round: int
    contributions: tuple[Contribution, ...]

    def content(self) -> list[list[Any]]:
        """Return the contributions as JSON values."""
        return [each.content() for each in self.contributions]

    @classmethod
    def read(cls, round: int, content: Iterable[Sequence[Any]]) -> Closing:
        """Restore a closing from its round and its `content`.

        Example:
            >>> closing = Closing(3, (Contribution(0, "slow", 8.0), Contribution(3, "fast", 12.0)))
            >>> Closing.read(3, closing.content()) == closing
            True
        """
        return cls(round, tuple(map(Contribution.read, content)))

    def weights(self, late: LateRule = "discounted") -> dict[Contribution, float]:
        """Return the weights of the contributions in the round's mean; they add up to one.

        A contribution weighs its tokens times $(1 + a)^{-1/2}$, with $a$ its age in rounds: the polynomial discount of
        Xie, Koyejo and Gupta, Asynchronous Federated Optimization, 2019, arXiv:1903.03934, Section 5.2.

        Args:
            late: "discounted"; "full" for tokens alone; "off" to leave out contributions of earlier rounds.

        Example:
            >>> closing = Closing(3, (Contribution(0, "slow", 8.0), Contribution(3, "fast", 12.0)))
            >>> [round(weight, 2) for weight in closing.weights().values()]
            [0.25, 0.75]
            >>> list(closing.weights("off").values())
            [0.0, 1.0]
        """
        found = {each: each.tokens * discount(each.age(self.round), late) for each in self.contributions}
        total = sum(found.values())
        return {each: weight / total if total else 0.0 for each, weight in found.items()}


def discount(age: int, late: LateRule) -> float:
    """Return the factor of a contribution's weight at an age in rounds."""
    if age == 0 or late == "full":
        return 1.0
    return 0.0 if late == "off" else (1 + age) ** -_DISCOUNT


def owner(number: int, workers: Iterable[str]) -> str:
    """Return the worker that closes a round: the first of the present ones, in an order of this round."""
    return min(workers, key=lambda worker: (hashlib.blake2b(f"{number}/{worker}".encode()).digest(), worker))


class Closer:
    """One worker's part in the closing of rounds.

    Args:
        rule: when a round closes.
        own: the id of this worker.
        workers: the ids of the present workers.
        now: the time in seconds.
        round: the number of the open round, for a worker that joins.
        fragments: the number of fragments.

    Attributes:
        round: the number of the open round.
        workers: the present workers.
        waiting: the contributions that have arrived and belong to no round yet.

    Example:
        >>> closer = Closer(CloseRule(quorum=0.5), "a", ["a", "b"], now=0.0)
        >>> closer.arrive(Contribution(0, "a", 4.0), seconds=1.0)
        >>> closing = closer.propose(now=1.0)
        >>> closing.contributions
        (Contribution(started=0, worker='a', tokens=4.0),)
        >>> closer.apply(closing, now=1.0)
        >>> closer.round, closer.propose(now=2.0)
        (1, None)
    """

    def __init__(
        self,
        rule: CloseRule,
        own: str,
        workers: Iterable[str],
        *,
        now: float,
        round: int = 0,
        fragments: int = 1,
    ) -> None:
        self.rule, self.own, self.workers, self.round = rule, own, set(workers), round
        self.waiting: dict[tuple[str, int], Contribution] = {}
        self._taken: set[tuple[str, int]] = set()
        self._durations: dict[str, deque[float]] = {}
        self._window: float | None = None
        self._slow: set[str] = set()
        # The last closing of each fragment, that of the open round first.
        self._opened = deque([now] * fragments, maxlen=fragments)

    def arrive(self, contribution: Contribution, seconds: float, now: float | None = None) -> None:
        """Record a contribution, in time or late; a repeated message changes nothing.

        Args:
            contribution: of any worker, also of one that was lost since.
            seconds: how long its worker took for it.
            now: the time; with it, what was started in the open round took at least the time since the last closing,
                and so the window has room for transfers too.
        """
        key = contribution.worker, contribution.started
        if key in self.waiting or key in self._taken or contribution.started <= self.round - _REMEMBERED:
            return
        self.waiting[key] = contribution
        if now is not None and contribution.started == self.round:
            seconds = max(seconds, self.seconds_open(now))
        self._durations.setdefault(contribution.worker, deque(maxlen=_DURATIONS)).append(seconds)

    def lose(self, worker: str) -> None:
        """Stop waiting for a worker; its contributions that have arrived still count."""
        self.workers.discard(worker)
        self._durations.pop(worker, None)

    def join(self, worker: str) -> None:
        """Wait for one more worker."""
        self.workers.add(worker)

    def _takes(self) -> list[Contribution]:
        """Return the contributions that have arrived for the fragment of the open round."""
        fragments = len(self._opened)
        return [each for each in self.waiting.values() if (self.round - each.started) % fragments == 0]

    def missing(self) -> list[str]:
        """Return the present workers whose contribution to the open round has not arrived."""
        return sorted(self.workers - {each.worker for each in self._takes()})

    def seconds_to_wait(self, now: float) -> float | None:
        """Return the seconds until the round may close: 0 now, None for an unknown time."""
        # Work that has arrived late counts for the tokens, but a quorum is one of present workers.
        takes = self._takes()
        arrived = {each.worker for each in takes}
        tokens = sum(each.tokens for each in takes)
        if self.workers <= arrived:
            return 0.0 if arrived else None
        present = len(arrived & self.workers)
        if present < max(1.0, self.rule.quorum * len(self.workers)) or tokens < self.rule.tokens:
            return None
        if self._window is None or self.workers <= arrived | self._slow:
            return 0.0
        return max(0.0, self._opened[0] + self._window - now)

    def seconds_open(self, now: float) -> float:
        """Return the seconds since the last closing of the open round's fragment."""
        return now - self._opened[0]

    @property
    def owner(self) -> str | None:
        """Return the present worker that closes the open round; None if no worker is present."""
        waits = {each.worker for each in self.waiting.values() if each.started == self.round} & self.workers
        return owner(self.round, waits or self.workers) if self.workers else None

    def propose(self, now: float) -> Closing | None:
        """Return a closing of the open round if it is due and this worker is its owner."""
        if self.seconds_to_wait(now) != 0.0 or self.owner != self.own:
            return None
        return Closing(self.round, tuple(sorted(self._takes())))

    def apply(self, closing: Closing, now: float) -> None:
        """Close the open round as the record says; contributions that it does not have wait for the next one.

        Raises:
            ConfigError: the closing belongs to another round.
        """
        if closing.round != self.round:
            raise ConfigError(
                f"a closing of round {closing.round} while round {self.round} is open: closings are applied in order. "
                "Apply those of the rounds between first"
            )
        for each in closing.contributions:
            self.waiting.pop((each.worker, each.started), None)
            self._taken.add((each.worker, each.started))
        self.round += 1
        self._opened.append(now)
        if self.round % _REMEMBERED == 0:
            self._taken = {each for each in self._taken if each[1] > self.round - _REMEMBERED}
        known = [seconds for each in self._durations.values() for seconds in each]
        if len(known) >= _LEAST_DURATIONS:
            usual = {worker: median(each) for worker, each in self._durations.items()}
            own = [
                abs(x - usual[worker]) / max(usual[worker], 1e-9)
                for worker, each in self._durations.items()
                for x in each
            ]
            slack = min(_MOST_SLACK, max(SLACK, SPREADS * median(own)))
            window = self._window = deadline(known, self.rule.deviations, slack=slack)
            self._slow = {worker for worker, seconds in usual.items() if seconds > window}


class Phase:
    """How far the open round is for the others, as one worker can tell by its own clock.

    A worker that was late once, since it was stopped or its link was cut, would start each round in the middle of the
    others' and be late in all of them. Its next round is shorter instead, and ends with theirs. A worker that is slow
    by itself takes whole rounds.

    Args:
        period: the local steps of a round.

    Example:
        >>> phase = Phase(16)
        >>> phase.record_step(1.0)
        >>> phase.end(seconds=20.0, rounds=1, in_time=True)
        0
        >>> phase.end(seconds=30.0, rounds=1, in_time=False)  # the others are in the middle of a round
        8
    """

    def __init__(self, period: int) -> None:
        self._period, self._elapsed = period, 0.0
        self._intervals, self._paces = deque[float](maxlen=_INTERVALS), deque[float](maxlen=_INTERVALS)

    @property
    def interval(self) -> float | None:
        """Return the seconds from closing to closing; None if this worker has never been in time."""
        return median(self._intervals) if self._intervals else None

    def record_step(self, seconds: float) -> None:
        """Record the mean time of a step in one round."""
        self._paces.append(seconds)

    def end(self, *, seconds: float, rounds: int, in_time: bool) -> int:
        """End a round; return how many steps of the next one to leave out.

        Args:
            seconds: since this worker has started it.
            rounds: that have closed since.
            in_time: whether its contribution is in the first of them.
        """
        if in_time:
            self._intervals.append(seconds)
        interval = self.interval
        self._elapsed = 0.0 if in_time or interval is None else max(0.0, self._elapsed + seconds - rounds * interval)
        return self._missed()

    def join(self, *, elapsed: float, interval: float | None) -> int:
        """Start in a round that others have begun; return how many steps of it to leave out.

        Args:
            elapsed: the seconds since the last closing.
            interval: that of another worker.
        """
        self._elapsed = elapsed
        self._intervals.extend([] if interval is None else [interval])
        return self._missed()

    def _missed(self) -> int:
        interval = self.interval
        if interval is None or min(self._paces, default=0.0) * self._period > interval:
            return 0
        number = int(self._period * self._elapsed / interval)
        return number if number <= (1 - _LEAST_ROUND) * self._period else 0
