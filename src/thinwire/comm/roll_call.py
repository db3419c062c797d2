"""Who is still there? Asked on the rendezvous store once something has failed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

T = TypeVar("T")
_STORE_SECONDS = 2.0
_ROLL_CALL_SECONDS = 2.5
_LINGER_SECONDS = 1.0


class Store(Protocol):
    """What is asked of a rendezvous store: words by key, for all ranks of the job."""

    def set(self, key: str, value: str, /) -> None:
        """Keep a word."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys have a word."""
        ...

    def compare_set(self, key: str, expected_value: str, desired_value: str, /) -> bytes:
        """Keep a word unless there is one ("" expects none); the word that stays."""
        ...


class RollCall:
    """The survivors of a failure answer; those who do not are lost.

    Args:
        store: this group's part of the rendezvous store.
        members: the ranks of the group by their rank in the whole job.
        rank: this rank in the group.
    """

    def __init__(self, store: Store, members: Sequence[int], rank: int) -> None:
        self._store = store
        self._members = members
        self._rank = rank

    def hold(self, late: bool, hang_up: Callable[[], None]) -> tuple[bool, list[str]]:
        """Agree on the reason, hang up, and learn who is missing.

        Args:
            late: whether this rank has met its deadline, rather than a closed connection.
            hang_up: called as soon as those who fail because of it can read the reason.

        Returns:
            Whether the first failure of all was a deadline, and the missing ranks in words.
        """
        try:
            late = _within(_STORE_SECONDS, lambda: self._agree(late))
            hang_up()
            return late, _within(_ROLL_CALL_SECONDS + 2 * _LINGER_SECONDS, self._missing)
        except TimeoutError:
            late = True  # the process that hosts the store is there, and does not answer
        except (RuntimeError, OSError):
            pass  # the store is gone, and its host with it
        hang_up()
        return late, [self._name(rank) for rank in self._host()]

    def _host(self) -> list[int]:
        """The rank that hosts the store, where it is another one of this group."""
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        return [0] if hosted and self._members[0] == 0 and self._rank != 0 else []

    def _agree(self, late: bool) -> bool:
        return self._store.compare_set("reason", "", "late" if late else "lost") == b"late"

    def _missing(self) -> list[str]:
        others = [rank for rank in range(len(self._members)) if rank != self._rank]
        self._store.set(f"here/{self._rank}", "1")
        missing = self._await("here", others, _ROLL_CALL_SECONDS)
        with suppress(RuntimeError, OSError):
            self._store.set(f"done/{self._rank}", "1")
        if self._members[self._rank] == 0:
            # This process hosts the store that the others may still be reading.
            self._await("done", [rank for rank in others if rank not in missing], _LINGER_SECONDS)
        return [self._name(rank) for rank in missing]

    def _await(self, word: str, ranks: list[int], seconds: float) -> list[int]:
        """The ranks that have not given the word in time, or before the store was gone."""
        end = time.monotonic() + seconds
        try:
            while ranks := [rank for rank in ranks if not self._store.check([f"{word}/{rank}"])]:
                if time.monotonic() >= end:
                    break
                time.sleep(0.02)
        except (RuntimeError, OSError):
            return [rank for rank in self._host() if rank in ranks] or ranks
        return ranks

    def _name(self, rank: int) -> str:
        member = self._members[rank]
        return f"rank {rank}" if member == rank else f"rank {rank} (rank {member} of the whole job)"


def _within(seconds: float, ask: Callable[[], T]) -> T:
    """The answer of a call that may never return."""
    answers: list[T] = []
    errors: list[Exception] = []

    def call() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True, name="thinwire-roll-call")
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError
    return answers[0]
