# SPDX-License-Identifier: Apache-2.0
"""Finds out after a failure what went wrong first and which ranks are missing, over the rendezvous store."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

from thinwire.core.comm.liveness import Processes, State
from thinwire.core.validation import printable

T = TypeVar("T")
_STORE_SECONDS = 2.0
_ROLL_CALL_SECONDS = 2.5  # longer than `_STORE_SECONDS`, which another rank may spend before it sets its key
_LINGER_SECONDS = 1.0
_MOST_CALL, _MOST_TEXT = 200, 10_000  # characters
_NAMED_SECONDS = 10.0  # for ranks that are known to be alive, but may compute for a while before they call


class Store(Protocol):
    """The calls of a rendezvous store that are used: a table of keys and values, shared by all ranks of the job."""

    def set(self, key: str, value: str, /) -> None:
        """Store a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """The value of a key that has one."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys have a value."""
        ...

    def compare_set(self, key: str, expected_value: str, desired_value: str, /) -> bytes:
        """Store a value if the key has the expected one ("" for none), and return the value that it has then."""
        ...


@dataclass(frozen=True)
class Failure:
    """How one rank's training ended.

    Attributes:
        cause: "lost", a closed connection; "late", no answer within the timeout; or "error", which this rank has found
            by itself and tells the others.
        rank: in the group.
        step: the training step.
        call: what the rank was doing, such as "all_reduce".
        seconds: how long it had waited in that call.
        gone: the ranks that it knew to be gone; only the first of all failures says more than that they end too.
        error: the class of an error that the rank tells the others.
        text: of that error.
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
        """What another rank has stored.

        Raises:
            ValueError: it is not of this form.
        """
        try:
            found = cls(**json.loads(stored))
        except (TypeError, RecursionError) as error:
            raise ValueError(f"{stored[:100]!r}: not a rank's failure ({error})") from error
        fields: list[Any] = [found.rank, found.step, found.seconds, *found.gone]
        texts: list[Any] = [found.call, found.error, found.text]
        known = found.cause in ("lost", "late", "error") and all(isinstance(each, str) for each in texts)
        if not known or not all(isinstance(each, int | float) for each in fields):
            raise ValueError(f"{stored[:100]!r}: not a rank's failure")
        # What another process has written may come to a terminal.
        return replace(
            found,
            call=printable(found.call, _MOST_CALL),
            error=printable(found.error, _MOST_CALL),
            text="\n".join(printable(line) for line in found.text[:_MOST_TEXT].split("\n")),
        )


@dataclass(frozen=True)
class Findings:
    """What a roll call has found.

    Attributes:
        first: the first failure of any rank, the cause of all others.
        missing: the ranks that did not answer; without those that are only busy, where others are known to be gone.
        answers: how the ranks that did answer have ended, by rank.
        ended: other ranks that had ended when this one failed, where no store can tell whether they were lost first.
    """

    first: Failure
    missing: Sequence[int]
    answers: dict[int, Failure]
    ended: Sequence[int] = ()


class RollCall:
    """After a failure every rank that is still alive sets a key; ranks whose key stays unset are missing.

    Args:
        store: this group's part of the rendezvous store.
        members: the group's ranks, each as its rank in the whole job.
        rank: this rank in the group.

    Attributes:
        processes: of the group's ranks, once they are known.
    """

    def __init__(self, store: Store, members: Sequence[int], rank: int) -> None:
        self.processes = Processes([], rank)
        self._store = store
        self._members = members
        self._rank = rank

    def names(self, ranks: Sequence[int]) -> str:
        """Ranks by their number in the group, and in the whole job where that is another one."""
        return ", ".join(self.name(rank) for rank in ranks)

    def run(
        self, own: Failure, close_connections: Callable[[], None], report: Callable[[Findings], None] = lambda _: None
    ) -> Findings:
        """Agree on the first failure, close the connections, and find the missing ranks.

        Args:
            own: how this rank has failed.
            close_connections: called once the first failure is in the store. The others' calls then fail at once, and
                they must read it and not take the closed connection for the cause.
            report: called before that with what is known already.
        """
        first, answers, reported = own, {self._rank: own}, False
        try:
            # The first rank to fail sets the cause for all.
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
            late = True  # the process that hosts the store is alive, and does not answer
        except (RuntimeError, OSError):
            late = False  # the process that hosts the store has ended
        if late and first.cause == "lost":
            first = replace(first, cause="late")
        # Other processes may have ended because of the same failure, without a store that would say so.
        host = [] if first.cause == "error" else self._host()
        found = Findings(first, host, answers, [rank for rank in own.gone if host and rank not in host])
        if not reported:
            report(found)
            close_connections()
        if host and not late:
            # Others that notice now see which ranks had ended before, and this one is not among them.
            time.sleep(_LINGER_SECONDS)
        return found

    def has_begun(self) -> bool:
        """Whether a rank has failed already, as far as the store can be asked."""
        try:
            return within(_STORE_SECONDS, lambda: self._store.check(["first"]))
        except (RuntimeError, OSError):  # TimeoutError too
            return False

    def _host(self) -> list[int]:
        """The rank that hosts the store, if it is another one of this group."""
        # Under torchrun the launcher's agent hosts the store, else rank 0 of the job.
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        return [0] if hosted and self._members[0] == 0 and self._rank != 0 else []

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(len(self._members)) if rank != self._rank]

    def _let_all_read(self) -> None:
        """All ranks are alive: the process that hosts the store waits until they have read the first failure."""
        with suppress(RuntimeError, OSError):
            self._store.set(f"done/{self._rank}", "1")
            if self._members[self._rank] == 0:
                self._unset("done", self._others, _NAMED_SECONDS)

    def _missing(self, own: Failure, first: Failure, answers: dict[int, Failure]) -> list[int]:
        self._store.set(f"here/{self._rank}", json.dumps(asdict(own)))
        missing = self._unset("here", self._others, _ROLL_CALL_SECONDS)
        # A rank that computes for longer than the roll call lasts is not to blame for one that is gone.
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
        """This process hosts the store, and would be taken for the cause if it ended before the others have read it."""
        answered = [rank for rank in self._others if rank not in missing]
        # Those that compute, or wait for a processor, come later.
        busy = [rank for rank in missing if self.processes.state(rank) is State.RUNNING]
        if left := self._unset("done", answered, _LINGER_SECONDS):
            busy += [rank for rank in left if self.processes.state(rank) is State.RUNNING]
        self._unset("done", busy, _NAMED_SECONDS)

    def _unset(self, prefix: str, ranks: list[int], seconds: float) -> list[int]:
        """Wait for the ranks' keys; the ranks that have not set theirs in time, or before the store was gone."""
        end = time.monotonic() + seconds
        try:
            while ranks := [rank for rank in ranks if not self._store.check([f"{prefix}/{rank}"])]:
                # What a process has not set before it ended it will never set.
                ended = [rank for rank in ranks if self.processes.state(rank) is State.ENDED]
                if len(ended) == len(ranks) or time.monotonic() >= end:
                    # It may have set its key and ended just now.
                    return [rank for rank in ranks if not self._store.check([f"{prefix}/{rank}"])]
                time.sleep(0.02)
        except (RuntimeError, OSError):
            return [rank for rank in self._host() if rank in ranks] or ranks
        return ranks

    def name(self, rank: int) -> str:
        """A rank by its number in the group, and in the whole job where that is another one."""
        member = self._members[rank]
        return f"rank {rank}" if member == rank else f"rank {rank} (rank {member} of the whole job)"


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of a call that may never return.

    Raises:
        TimeoutError: it did not return in time; its thread is left behind.
    """
    # A daemon thread, so that a call that never returns does not keep the process alive.
    results: list[T] = []
    errors: list[Exception] = []

    def body() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=body, daemon=True, name="thinwire-store")
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]
