"""Who was a member of which step: kept with the replica's state, the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from thinwire.replica.replica import Replica

LOG, USED = "members", "used"
_FIRST_STEPS = 64


def begin_log(r: Replica) -> None:
    """Before the first step."""
    width = -(-r.comm.size // 8)
    r.state[LOG] = torch.zeros(_FIRST_STEPS, width, dtype=torch.uint8)
    r.state[USED] = torch.zeros(r.comm.size, dtype=torch.int64)


def write_log(r: Replica, members: Sequence[int]) -> None:
    """The step that has just ended had these members."""
    log = r.state[LOG]
    if r.step > len(log):
        log = r.state[LOG] = torch.cat([log, torch.zeros_like(log)])
    bits = sum(1 << rank for rank in members)
    log[r.step - 1] = torch.tensor(list(bits.to_bytes(log.shape[1], "little")), dtype=torch.uint8)
    r.state[USED][list(members)] += 1


def memberships(r: Replica, first: int = 0) -> Iterator[tuple[int, ...]]:
    """The members of each step of a replica, from a step on; everyone's where nothing is kept.

    Args:
        r: a replica, under `BackupWorkers` for the log to be kept.
        first: the step to begin with.
    """
    for step in range(first, r.step):
        if LOG not in r.state:
            yield tuple(range(r.comm.size))
            continue
        bits = int.from_bytes(bytes(r.state[LOG][step].tolist()), "little")
        yield tuple(rank for rank in range(r.comm.size) if bits >> rank & 1)
