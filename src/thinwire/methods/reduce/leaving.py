# SPDX-License-Identifier: Apache-2.0
"""Pass the residuals of workers that leave gracefully to other workers, so that no mean misses them."""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableMapping, Sequence

from torch import Tensor

from thinwire.core.comm.base import Comm
from thinwire.methods.codecs.feedback import merge_server_residuals, of_worker


def heir(rank: int, leaving: Collection[int], size: int) -> int:
    """Return the rank that inherits from a leaving one: the next rank that stays.

    Example:
        >>> heir(1, {1, 2}, 4), heir(3, {3}, 4)
        (3, 0)
    """
    return next(other % size for other in range(rank + 1, rank + size) if other % size not in leaving)


def hand_on(comm: Comm, x: Tensor, leaving: Sequence[int]) -> list[Tensor]:
    """Send a leaving rank's vector to its heir, and return the inherited vectors; a collective call."""
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
    """Preserve sums of state vectors over workers, times `scale`, among the ranks that stay.

    Args:
        comm: the comm, including the leaving ranks.
        state: the state of this rank.
        leaving: the leaving ranks.
        chosen: returns True for the names of vectors to pass on.
        scale: the factor of the sum.
    """
    # In one order on all ranks, whatever the order of their names.
    for name in sorted(filter(chosen, state)):
        for inherited in hand_on(comm, state[name], leaving):
            state[name].add_(inherited)
        if scale != 1:
            state[name].copy_(state[name].double().mul_(scale))


def hand_on_residuals(comm: Comm, state: MutableMapping[str, Tensor], leaving: Sequence[int]) -> None:
    """Preserve the effect of all residuals on the mean of the ranks that stay.

    A worker's residual is divided by the number of workers before it enters the mean. If `k` of `n` workers leave, the
    sum of residuals is therefore scaled by `(n - k) / n`.

    Args:
        comm: the comm, including the leaving ranks.
        state: the state of this rank; residuals are `error` and `server_error/START-STOP`, with any prefix.
        leaving: the leaving ranks.

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
