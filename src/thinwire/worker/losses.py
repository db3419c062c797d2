# SPDX-License-Identifier: Apache-2.0
"""What workers can still do together where a strategy has gone on without lost ranks."""

from __future__ import annotations

from thinwire.errors import PeerLostError
from thinwire.worker.state import WorkerState


def lost_ranks(worker: WorkerState) -> list[int]:
    """The ranks that are lost, and that the strategy goes on without."""
    return sorted({rank for replica in worker.replicas for rank in worker.strategy.lost(replica)})


def check_all_there(worker: WorkerState, call: str) -> None:
    """Refuse a call that needs all ranks, where some are lost.

    Raises:
        PeerLostError: with the ranks and what can be done.
    """
    if lost := lost_ranks(worker):
        comm, be = worker.comm, "is" if len(lost) == 1 else "are"
        raise PeerLostError(
            f"{comm.name(comm.rank)}, step {worker.step}, {call}: {comm.names(lost)} {be} lost, and this needs all "
            "ranks. All others hold the same parameters after detach() and at consensus(): write "
            "model.state_dict() on one of them, and start anew from it"
        )
