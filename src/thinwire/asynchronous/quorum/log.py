# SPDX-License-Identifier: Apache-2.0
"""The members of each step, kept with the replica's state; the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from thinwire.core.replica.replica import Replica

LOG, USED = "members", "used"
_FIRST_STEPS = 64


def begin_log(r: Replica) -> None:
    """Start an empty log: one bit for each rank and step, and how often each rank was a member."""
    width = -(-r.comm.size // 8)
    r.state[LOG] = torch.zeros(_FIRST_STEPS, width, dtype=torch.uint8, device="cpu")
    r.state[USED] = torch.zeros(r.comm.size, dtype=torch.int64, device="cpu")


def write_log(r: Replica, members: Sequence[int]) -> None:
    """Record the members of the step that has just ended."""
    log = r.state[LOG]
    if r.step > len(log):
        log = r.state[LOG] = torch.cat([log, torch.zeros_like(log)])
    bits = sum(1 << rank for rank in members)
    log[r.step - 1] = torch.tensor(list(bits.to_bytes(log.shape[1], "little")), dtype=torch.uint8, device="cpu")
    r.state[USED][list(members)] += 1


def resize_log(state: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """Resize the log: new ranks were never members, and removed ranks are dropped.

    Args:
        state: the state with the log.
        size: the number of ranks.

    Example:
        >>> import torch
        >>> state = {LOG: torch.tensor([[0b101], [0b110]], dtype=torch.uint8), USED: torch.tensor([1, 1, 2])}
        >>> {name: x.tolist() for name, x in resize_log(state, 2).items()}
        {'members': [[1], [2]], 'used': [1, 1]}
        >>> {name: list(x.shape) for name, x in resize_log(state, 9).items()}
        {'members': [2, 2], 'used': [9]}
    """
    used = torch.zeros(size, dtype=torch.int64, device="cpu")
    kept = min(size, len(state[USED]))
    used[:kept] = state[USED][:kept]
    log = torch.zeros(len(state[LOG]), -(-size // 8), dtype=torch.uint8, device="cpu")
    width = min(log.shape[1], state[LOG].shape[1])
    log[:, :width] = state[LOG][:, :width]
    if size % 8:
        log[:, -1] &= (1 << size % 8) - 1
    return {LOG: log, USED: used}


def memberships(r: Replica, first: int = 0) -> Iterator[tuple[int, ...]]:
    """Yield the members of each step of a replica; all ranks if no log is kept.

    Args:
        r: a replica; its log is kept under a strategy with a quorum.
        first: the first step.

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
