# SPDX-License-Identifier: Apache-2.0
"""After a failure, find the first failure and the missing ranks through the rendezvous store."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

from thinwire.core.comm.liveness import Processes, State
from thinwire.core.comm.runtime import REAL
from thinwire.core.validation import printable

T = TypeVar("T")
_STORE_SECONDS = 2.0
_ROLL_CALL_SECONDS = 2.5  # longer than `_STORE_SECONDS`, which another rank may spend before it sets its key
_LINGER_SECONDS = 1.0
_MOST_CALL, _MOST_TEXT = 200, 10_000  # characters
_NAMED_SECONDS = 10.0  # for live ranks, which may compute for a while before they make a call


class Store(Protocol):
    """The used methods of a store: a `torch.distributed.Store`, or a `thinwire.core.storage.bucket.BucketStore`.

    A key is written either by `set` or by `compare_set`, never by both.
    """

    def set(self, key: str, value: str, /) -> None:
        """Store a value of a key that one worker writes, or whose readers need not see the latest value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that exists."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Return True if all keys have a value."""
        ...

    def compare_set(self, key: str, expected_value: str, desired_value: str, /) -> bytes:
        """Store a value if the key has the expected one ("" for none); return the resulting value."""
        ...


@dataclass(frozen=True)
class Failure:
    """How one rank's training ended.

    Attributes:
        cause: "lost", a closed connection; "late", no answer within the timeout; or "error", which only this rank has
            detected and reports to the others.
        rank: the rank in the group.
        step: the training step.
        call: the call that failed, such as "all_reduce".
        seconds: how long the rank had waited in that call.
        gone: the ranks known to be gone; only the first of all failures lists more than its consequences.
        error: the class of an error that the rank reports to the others.
        text: the text of that error.
    """

    cause: Literal["lost", "late", "error"]
    rank: int
    step: int
    call: str = ""
    seconds: float = 0.0
    gone: Sequence[int] = ()
    error: str = ""
    text: str = ""

    @classmethod
    def read(cls, stored: bytes) -> Failure:
        """Parse the failure that another rank has stored.

        Raises:
            ValueError: the bytes are not a failure.
        """
        try:
            found = cls(**json.loads(stored))
        except (TypeError, RecursionError) as error:
            raise ValueError(f"{stored[:100]!r}: is not a rank's failure ({error})") from error
        fields: list[Any] = [found.rank, found.step, found.seconds, *found.gone]
        texts: list[Any] = [found.call, found.error, found.text]
        known = found.cause in ("lost", "late", "error") and all(isinstance(each, str) for each in texts)
        if not known or not all(isinstance(each, int | float) for each in fields):
            raise ValueError(f"{stored[:100]!r}: is not a rank's failure")
        # Text of another process may be printed on a terminal.
        return replace(
            found,
            call=printable(found.call, _MOST_CALL),
            error=printable(found.error, _MOST_CALL),
            text="\n".join(printable(line) for line in found.text[:_MOST_TEXT].split("\n")),
        )


@dataclass(frozen=True)
class Findings:
    """The findings of a roll call.

    Attributes:
        first: the first failure of any rank, the cause of all others.
        missing: the ranks that did not answer; if some are known to be gone, without those that are only busy.
        answers: the failures of the ranks that did answer, by rank.
        ended: other ranks that had ended when this one failed, if no store can tell the order.
    """

    first: Failure
    missing: Sequence[int]
    answers: dict[int, Failure]
    ended: Sequence[int] = ()


class RollCall:
    """After a failure every rank that is still alive sets a key; ranks whose key stays unset are missing.

    Args:
        store: this group's part of the rendezvous store.
        members: the group's ranks, as ranks of the whole job.
        rank: this rank in the group.

    Attributes:
        processes: the processes of the group's ranks, once they are known.
    """

    def __init__(self, store: Store, members: Sequence[int], rank: int) -> None:
        self.processes = Processes([], rank)
        self._store = store
        self._members = members
        self._rank = rank

    def names(self, ranks: Sequence[int]) -> str:
        """Return ranks for an error message, with their ranks in the job if these differ."""
        return ", ".join(self.name(rank) for rank in ranks)

    def run(
        self, own: Failure, close_connections: Callable[[], None], report: Callable[[Findings], None] = lambda _: None
    ) -> Findings:
        """Agree on the first failure, close the connections, and find the missing ranks.

        Args:
            own: this rank's failure.
            close_connections: called when the first failure is in the store. Calls of the other ranks then fail at
                once, and they must read this failure instead of blaming the closed connection.
            report: called before that with what is known so far.
        """
        first, answers, reported = own, {self._rank: own}, False
        try:
            # The first rank that fails sets the cause for all.
            mine = json.dumps(asdict(own))
            stored = within(_STORE_SECONDS, lambda: self._store.compare_set("first", "", mine))
            with suppress(ValueError):
                first = Failure.read(stored)
            reported = True
            report(Findings(first, first.gone, answers))
            close_connections()
            if first.cause == "error":
                within(_NAMED_SECONDS + 2 * _LINGER_SECONDS, self._let_all_read)
                return Findings(first, [], answers)
            limit = _ROLL_CALL_SECONDS + 2 * _LINGER_SECONDS + _NAMED_SECONDS
            missing = within(limit, lambda: self._missing(own, first, answers))
            return Findings(first, missing, answers)
        except TimeoutError:
            late = True  # the process that hosts the store is alive but does not answer
        except (RuntimeError, OSError):
            late = False  # the process that hosts the store has ended
        if late and first.cause == "lost":
            first = replace(first, cause="late")
        # Other processes may have ended because of the same failure; without a store the order is unknown.
        host = [] if first.cause == "error" else self._host()
        found = Findings(first, host, answers, [rank for rank in own.gone if host and rank not in host])
        if not reported:
            report(found)
            close_connections()
        if host and not late:
            # Ranks that notice now see which ranks had ended before, without this one.
            time.sleep(_LINGER_SECONDS)
        return found

    def has_begun(self) -> bool:
        """Return True if the store shows that a rank has failed."""
        try:
            return within(_STORE_SECONDS, lambda: self._store.check(["first"]))
        except (RuntimeError, OSError):  # TimeoutError too
            return False

    def _host(self) -> list[int]:
        """Return the rank that hosts the store, if it is another one of this group."""
        # Under torchrun the launcher's agent hosts the store, else rank 0 of the job.
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        return [0] if hosted and self._members[0] == 0 and self._rank != 0 else []

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(len(self._members)) if rank != self._rank]

    def _let_all_read(self) -> None:
        """Keep the store alive, where all ranks are alive, until they have read the first failure."""
        with suppress(RuntimeError, OSError):
            self._store.set(f"done/{self._rank}", "1")
            if self._members[self._rank] == 0:
                self._unset("done", self._others, _NAMED_SECONDS)

    def _missing(self, own: Failure, first: Failure, answers: dict[int, Failure]) -> list[int]:
        self._store.set(f"here/{self._rank}", json.dumps(asdict(own)))
        missing = self._unset("here", self._others, _ROLL_CALL_SECONDS)
        # A rank that computes for longer than the roll call is not to blame for one that is gone.
        ended = [rank for rank in missing if rank in first.gone or self.processes.state(rank) is State.ENDED]
        stopped = [rank for rank in missing if self.processes.state(rank) is State.STOPPED]
        with suppress(RuntimeError, OSError):
            for rank in self._others:
                if rank not in missing:
                    with suppress(ValueError):
                        answers[rank] = Failure.read(self._store.get(f"here/{rank}"))
            self._store.set(f"done/{self._rank}", "1")
        if self._members[self._rank] == 0:
            self._let_others_read(missing)
        return ended or stopped or missing

    def _let_others_read(self, missing: Sequence[int]) -> None:
        """Keep the store alive until the others have read it; they would blame this rank if it ended earlier."""
        answered = [rank for rank in self._others if rank not in missing]
        # Ranks that compute, or wait for a processor, arrive later.
        busy = [rank for rank in missing if self.processes.state(rank) is State.RUNNING]
        if left := self._unset("done", answered, _LINGER_SECONDS):
            busy += [rank for rank in left if self.processes.state(rank) is State.RUNNING]
        self._unset("done", busy, _NAMED_SECONDS)

    def _unset(self, prefix: str, ranks: list[int], seconds: float) -> list[int]:
        """Wait for the ranks' keys; return the ranks that did not set theirs in time."""
        end = time.monotonic() + seconds
        try:
            while ranks := [rank for rank in ranks if not self._store.check([f"{prefix}/{rank}"])]:
                # A process that has ended will not set its key any more.
                ended = [rank for rank in ranks if self.processes.state(rank) is State.ENDED]
                if len(ended) == len(ranks) or time.monotonic() >= end:
                    # It may have set its key just before it ended.
                    return [rank for rank in ranks if not self._store.check([f"{prefix}/{rank}"])]
                time.sleep(0.02)
        except (RuntimeError, OSError):
            return [rank for rank in self._host() if rank in ranks] or ranks
        return ranks

    def name(self, rank: int) -> str:
        """Return a rank for an error message, with its rank in the job if that differs."""
        member = self._members[rank]
        return f"rank {rank}" if member == rank else f"rank {rank} (rank {member} of the whole job)"


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of a call that may never return.

    Raises:
        TimeoutError: the call did not return in time; its thread is left behind.
    """
    return REAL.start(call).result(seconds)
