# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of an examination meet: the rendezvous store, with a deadline for every answer."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from thinwire.core.comm.base import Comm
from thinwire.core.comm.group import GroupComm
from thinwire.core.comm.rendezvous import open_store, started_by_torchrun
from thinwire.core.comm.roll_call import within
from thinwire.core.validation import printable
from thinwire.errors import CommError, CommTimeoutError

_POLL_SECONDS = 0.02
_STORE_SECONDS = 10.0


class Rendezvous:
    """The ranks' notes to each other, as JSON in the rendezvous store; no rank waits for one that does not come.

    Unlike a process group it works with some of the ranks: it reports the ranks that came, and those that did not.

    Args:
        rank: of this process.
        size: how many ranks were started.
        store: None for one process alone.

    Example:
        >>> from torch.distributed import HashStore
        >>> peers = Rendezvous(0, 2, HashStore())
        >>> peers.put("host", {"name": "a"})
        >>> peers.collect("host", range(2), seconds=0.1)
        {0: {'name': 'a'}}
    """

    def __init__(self, rank: int, size: int, store: Store | None) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._own: dict[str, Any] = {}

    @contextmanager
    def group(self, *, seconds: float) -> Generator[Comm]:
        """A comm over a Gloo group of all ranks; every rank must come.

        Raises:
            CommError: the connections cannot be made, or a call fails.
        """
        assert self._store is not None, "one process alone has no group"
        limit = timedelta(seconds=seconds)
        try:
            dist.init_process_group("gloo", store=self._store, rank=self.rank, world_size=self.size, timeout=limit)
            yield GroupComm(timeout=seconds)
        except (RuntimeError, OSError) as error:
            raise CommError(str(error).splitlines()[0][:200]) from error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def put(self, name: str, value: Any) -> None:
        """Leave a value for the others."""
        self._own[name] = value
        if self._store is not None:
            store, text = self._store, json.dumps(value)
            within(_STORE_SECONDS, lambda: store.set(f"{name}/{self.rank}", text))

    def collect(self, name: str, ranks: Iterable[int], *, seconds: float) -> dict[int, Any]:
        """Return the values that ranks put under a name within so many seconds, by rank; others are left out."""
        wanted = list(ranks)
        found: dict[int, Any] = {self.rank: self._own[name]} if name in self._own and self.rank in wanted else {}
        end = time.monotonic() + seconds
        while missing := [rank for rank in wanted if rank not in found]:
            found |= {rank: value for rank in missing if (value := self._get(f"{name}/{rank}")) is not None}
            if self._store is None or time.monotonic() > end:
                break
            if len(found) < len(wanted):
                time.sleep(_POLL_SECONDS)
        return dict(sorted(found.items()))

    def _get(self, key: str) -> Any:
        """Return the value of a key; None if it has none yet."""
        store = self._store
        if store is None or not within(_STORE_SECONDS, lambda: store.check([key])):
            return None
        with suppress(ValueError, RecursionError):  # what another program has written is no rank's note
            return _without_controls(json.loads(within(_STORE_SECONDS, lambda: store.get(key))))
        return None


def _without_controls(value: Any) -> Any:
    """Return a JSON value whose texts cannot control a terminal."""
    if isinstance(value, str):
        return "\n".join(printable(line) for line in value.split("\n"))
    if isinstance(value, list):
        return [_without_controls(each) for each in cast(list[Any], value)]
    if isinstance(value, dict):
        return {_without_controls(name): _without_controls(each) for name, each in cast(dict[str, Any], value).items()}
    return value


def join(*, seconds: float) -> Rendezvous:
    """Go to the others of the ranks that were started together, or be alone.

    Args:
        seconds: how long to try to reach the rendezvous.

    Raises:
        CommTimeoutError: it cannot be reached; says from where, and why.
    """
    if not started_by_torchrun():
        return Rendezvous(0, 1, None)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if size == 1:
        return Rendezvous(rank, size, None)
    try:
        store = within(seconds + 5.0, lambda: open_store(timedelta(seconds=seconds)))
    except TimeoutError:
        problem = "timed out"
    except (RuntimeError, OSError) as error:
        problem = str(error).splitlines()[0][:200]
    else:
        # torchrun starts a failed job again with the same store.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return Rendezvous(rank, size, PrefixStore(f"thinwire/doctor/{attempt}", store))
    who = "start the doctor on the rank that hosts it (rank 0)" if rank else "choose a free port"
    raise CommTimeoutError(
        f"rank {rank}: the rendezvous at {host}:{port} (MASTER_ADDR, MASTER_PORT) cannot be reached within "
        f"{seconds:g} s: {problem}. Check the name and that a firewall lets the port through, and {who}"
    )
