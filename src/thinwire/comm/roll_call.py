"""Finds out which ranks are missing after a failure, over the rendezvous store."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

T = TypeVar("T")
_STORE_SECONDS = 2.0
_ROLL_CALL_SECONDS = 2.5  # longer than `_STORE_SECONDS`, which another rank may spend before it sets its key
_LINGER_SECONDS = 1.0


class Store(Protocol):
    """The calls of a rendezvous store that are used: a table of keys and values, shared by all ranks of the job."""

    def set(self, key: str, value: str, /) -> None:
        """Store a value."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys have a value."""
        ...

    def compare_set(self, key: str, expected_value: str, desired_value: str, /) -> bytes:
        """Store a value if the key has the expected one ("" for none), and return the value that it has then."""
        ...


class RollCall:
    """After a failure every rank that is still alive sets a key; ranks whose key stays unset are missing.

    Args:
        store: this group's part of the rendezvous store.
        members: the group's ranks, each as its rank in the whole job.
        rank: this rank in the group.
    """

    def __init__(self, store: Store, members: Sequence[int], rank: int) -> None:
        self._store = store
        self._members = members
        self._rank = rank

    def run(self, timed_out: bool, close_connections: Callable[[], None]) -> tuple[bool, list[str]]:
        """Agree on the cause of the failure, close the connections, and find the missing ranks.

        Args:
            timed_out: whether this rank's failure was a timeout, rather than a closed connection.
            close_connections: called once the cause is in the store. The others' calls then fail at once, and they
                must read that cause and not take the closed connection for one.

        Returns:
            Whether the first failure of any rank was a timeout, and the missing ranks, for the error.
        """
        try:
            # The first rank to fail sets the cause for all; "late" and "lost" are the stored words.
            cause = "late" if timed_out else "lost"
            timed_out = within(_STORE_SECONDS, lambda: self._store.compare_set("reason", "", cause) == b"late")
            close_connections()
            return timed_out, within(_ROLL_CALL_SECONDS + 2 * _LINGER_SECONDS, self._missing)
        except TimeoutError:
            timed_out = True  # the process that hosts the store is alive, and does not answer
        except (RuntimeError, OSError):
            pass  # the process that hosts the store has ended
        close_connections()
        return timed_out, [self._name(rank) for rank in self._host()]

    def _host(self) -> list[int]:
        """The rank that hosts the store, if it is another one of this group."""
        # Under torchrun the launcher's agent hosts the store, else rank 0 of the job.
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        return [0] if hosted and self._members[0] == 0 and self._rank != 0 else []

    def _missing(self) -> list[str]:
        others = [rank for rank in range(len(self._members)) if rank != self._rank]
        self._store.set(f"here/{self._rank}", "1")
        missing = self._unset("here", others, _ROLL_CALL_SECONDS)
        with suppress(RuntimeError, OSError):
            self._store.set(f"done/{self._rank}", "1")
        if self._members[self._rank] == 0:
            # This process hosts the store, which the others may still be reading.
            self._unset("done", [rank for rank in others if rank not in missing], _LINGER_SECONDS)
        return [self._name(rank) for rank in missing]

    def _unset(self, prefix: str, ranks: list[int], seconds: float) -> list[int]:
        """Wait for the ranks' keys; the ranks that have not set theirs in time, or before the store was gone."""
        end = time.monotonic() + seconds
        try:
            while ranks := [rank for rank in ranks if not self._store.check([f"{prefix}/{rank}"])]:
                if time.monotonic() >= end:
                    break
                time.sleep(0.02)
        except (RuntimeError, OSError):
            return [rank for rank in self._host() if rank in ranks] or ranks
        return ranks

    def _name(self, rank: int) -> str:
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
