# SPDX-License-Identifier: Apache-2.0
"""Elastic workers as threads of one process, for tests and experiments."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from thinwire.core.comm.base import Comm
from thinwire.core.comm.liveness import State, own_row
from thinwire.core.comm.rendezvous import memory_store
from thinwire.core.comm.threads import Hub, ThreadComm
from thinwire.elastic.fleet import Fleet
from thinwire.elastic.late import LateMerging
from thinwire.elastic.membership import Membership
from thinwire.elastic.objects import StoreObjects
from thinwire.elastic.ranks import Ranks
from thinwire.errors import PeerLostError


class ThreadNetwork:
    """The memory that elastic threads share: a store, and a hub for each view.

    Attributes:
        store: the store of the views.
        token: the secret of the run.
        ended: the ids of workers whose thread has ended.
    """

    def __init__(self) -> None:
        self.store = memory_store()
        self.token = secrets.token_bytes(16)
        self.ended: set[str] = set()
        self._lock = threading.Lock()
        self._hubs: dict[int | str, Hub] = {}

    def state(self, worker: str) -> State:
        """Return the state of a worker's thread."""
        return State.ENDED if worker in self.ended else State.RUNNING

    def fleet(
        self,
        worker: str,
        rank: int,
        size: int,
        *,
        late: LateMerging | None = None,
        timeout: float = 10.0,
        group: Comm | None = None,
    ) -> Fleet:
        """Make one thread's entry into the run.

        Args:
            worker: the worker's id.
            rank: the rank, if the run starts.
            size: the number of threads at the start.
            late: how rounds close without late workers; None for rounds that all workers end together.
            timeout: the limit for other workers to arrive, in seconds.
            group: the ranks of this worker, if it is a group.
        """
        membership = Membership(
            self.store,
            worker,
            timeout=timeout,
            state=self.state,
            beat_seconds=0.02,
            token=self.token,
            kind="elastic" if late is None else "late",
            rank=None if group is None else group.rank,
            row=own_row().hex() * (1 if group is None else group.size),
        )
        objects = StoreObjects(self.store, self.token)
        part = "" if group is None else f"{group.rank}/"
        ranks = None if group is None else Ranks(group, worker)
        connector = ThreadConnector(self, worker, part)
        return Fleet(membership, connector, rank, size, objects=objects, late=late, ranks=ranks)

    def hub(self, name: int | str, size: int) -> Hub:
        """Return the hub of the threads of one view, or of a pair."""
        with self._lock:
            return self._hubs.setdefault(name, Hub(size))


class ThreadConnector:
    """Connects one thread to the threads of each view.

    Args:
        network: shared by all threads.
        worker: the id of this thread's worker.
        part: the beginning of the names of hubs, where workers are groups.
    """

    def __init__(self, network: ThreadNetwork, worker: str, part: str = "") -> None:
        self.worker = worker
        self._part = part
        self._network = network
        self._comms: list[ThreadComm] = []

    def connect(self, name: int | str, rank: int, size: int, timeout: float, lost: Callable[[], bool]) -> Comm:
        """Make this worker's comm in the hub of the view, or of some of its members."""
        comm = ThreadComm(self._network.hub(f"{self._part}{name}", size), rank, timeout=timeout)
        self._comms.append(comm)
        if lost() or self.worker in self._network.ended:
            self.disconnect(comm)
        return comm

    def pair(self, name: str, rank: int, timeout: float, lost: Callable[[], bool]) -> Comm:
        """Make this worker's comm in the hub of two workers."""
        return self.connect(f"pair/{name}", rank, 2, timeout, lost)

    def disconnect(self, comm: Comm) -> None:
        """Make the waits of all others in this view fail."""
        assert isinstance(comm, ThreadComm)
        comm.close(PeerLostError("its connections are closed"))

    def end(self) -> None:
        """Record the end of this worker's thread."""
        self._network.ended.add(self.worker)
        for comm in self._comms:
            self.disconnect(comm)
