"""The members of each step, kept with the replica's state; the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from thinwire.replica.replica import Replica

LOG, USED = "members", "used"
_FIRST_STEPS = 64


def begin_log(r: Replica) -> None:
    """Start an empty log: one bit for each rank and step, and how often each rank was a member."""
    width = -(-r.comm.size // 8)
    r.state[LOG] = torch.zeros(_FIRST_STEPS, width, dtype=torch.uint8)
    r.state[USED] = torch.zeros(r.comm.size, dtype=torch.int64)


def write_log(r: Replica, members: Sequence[int]) -> None:
    """Record the members of the step that has just ended."""
    log = r.state[LOG]
    if r.step > len(log):
        log = r.state[LOG] = torch.cat([log, torch.zeros_like(log)])
    bits = sum(1 << rank for rank in members)
    log[r.step - 1] = torch.tensor(list(bits.to_bytes(log.shape[1], "little")), dtype=torch.uint8)
    r.state[USED][list(members)] += 1


def memberships(r: Replica, first: int = 0) -> Iterator[tuple[int, ...]]:
    """The members of each step of a replica; all ranks where no log is kept.

    Args:
        r: a replica, under a strategy that works with a quorum for the log to be kept.
        first: the step to begin with.

    Example:
        >>> import torch
        >>> from thinwire import CountingComm, Replica
        >>> r = Replica(torch.zeros(1), torch.zeros(1), CountingComm(0, 4), lr=lambda: 0.1)
        >>> begin_log(r)
        >>> for members in [(0, 1, 3), (0, 2, 3)]:
        ...     r.step += 1
        ...     write_log(r, members)
        >>> list(memberships(r))
        [(0, 1, 3), (0, 2, 3)]
    """
    for step in range(first, r.step):
        if LOG not in r.state:
            yield tuple(range(r.comm.size))
            continue
        bits = int.from_bytes(bytes(r.state[LOG][step].tolist()), "little")
        yield tuple(rank for rank in range(r.comm.size) if bits >> rank & 1)
