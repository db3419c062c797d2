# SPDX-License-Identifier: Apache-2.0
"""What workers that leave with notice hold back goes to their neighbours, so that no mean misses it."""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableMapping, Sequence

from torch import Tensor

from thinwire.core.comm.base import Comm
from thinwire.methods.codecs.feedback import merge_server_residuals, of_worker


def heir(rank: int, leaving: Collection[int], size: int) -> int:
    """The rank that a leaving one hands to: the next one that stays.

    Example:
        >>> heir(1, {1, 2}, 4), heir(3, {3}, 4)
        (3, 0)
    """
    return next(other % size for other in range(rank + 1, rank + size) if other % size not in leaving)


def hand_on(comm: Comm, x: Tensor, leaving: Sequence[int]) -> list[Tensor]:
    """Send a leaving rank's vector to its heir; returns what this rank inherits. All ranks call it together."""
    leaves = comm.rank in leaving
    dst = [heir(comm.rank, leaving, comm.size)] if leaves else []
    src = [] if leaves else [rank for rank in leaving if heir(rank, leaving, comm.size) == comm.rank]
    return comm.send_recv(x, dst, src).wait() if dst or src else []


def hand_on_sums_(
    comm: Comm,
    state: MutableMapping[str, Tensor],
    leaving: Sequence[int],
    chosen: Callable[[str], bool],
    *,
    scale: float,
) -> None:
    """Let vectors of the state keep their sum over workers, times `scale`, among those that stay.

    Args:
        comm: with the leaving ranks.
        state: of this rank.
        leaving: ranks.
        chosen: whether the vector of that name is meant.
        scale: of the sum.
    """
    # In one order on all ranks, however they came to have these names.
    for name in sorted(filter(chosen, state)):
        for inherited in hand_on(comm, state[name], leaving):
            state[name].add_(inherited)
        if scale != 1:
            state[name].copy_(state[name].double().mul_(scale))


def hand_on_residuals(comm: Comm, state: MutableMapping[str, Tensor], leaving: Sequence[int]) -> None:
    """Let what error feedback holds back in all have the same effect on the mean of those that stay.

    A worker's residual is divided by the number of workers on its way into the mean. So with `n` workers, of which `k`
    leave, the sum of residuals becomes `(n - k) / n` of what it was.

    Args:
        comm: with the leaving ranks.
        state: of this rank, where residuals are `error` and `server_error/START-STOP`, whatever stands before.
        leaving: ranks.

    Example:
        >>> import torch, thinwire
        >>> def leave(comm):
        ...     state = {"error": torch.tensor([1.0 + comm.rank])}
        ...     hand_on_residuals(comm, state, [2])
        ...     return state["error"].item()
        >>> [round(each, 6) for each in thinwire.run_threads(3, leave)[:2]]  # their mean is 2, as that of 1, 2 and 3
        [2.666667, 1.333333]
    """
    if comm.rank in leaving:
        merge_server_residuals(state, comm.size)
    hand_on_sums_(comm, state, leaving, of_worker, scale=(comm.size - len(leaving)) / comm.size)
