# SPDX-License-Identifier: Apache-2.0
"""Weighted means, means over some of the ranks, and means in two halves."""

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from thinwire.core.comm.base import Comm
from thinwire.core.comm.work import Work
from thinwire.core.replica.flat import copy_each_

_SMALLEST_WEIGHT = 2.0**-40


def ring_all_reduce_(comm: Comm, x: Tensor, members: Sequence[int]) -> Tensor:
    """Replace `x` on some ranks by its sum over them; the other ranks do not call this.

    Each of m members sends 2 (m-1)/m of the vector, as in an all-reduce.
    Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, JPDC 2009.

    Args:
        comm: the comm of all ranks.
        x: a vector.
        members: the ranks that make this call, including this one.
    """
    count, me = len(members), members.index(comm.rank)
    pieces = x.new_zeros(count, -(-x.numel() // count))
    pieces.view(-1)[: x.numel()].copy_(x)
    dst, src = (members[(me + 1) % count],), (members[me - 1],)
    # Reduce-scatter: after the first loop this rank holds the whole sum of piece me + 1. Then all-gather.
    for hop in range(count - 1):
        (received,) = comm.send_recv(pieces[(me - hop) % count], dst, src).wait()
        pieces[(me - hop - 1) % count].add_(received)
    for hop in range(count - 1):
        (received,) = comm.send_recv(pieces[(me + 1 - hop) % count], dst, src).wait()
        pieces[(me - hop) % count].copy_(received)
    return x.copy_(pieces.view(-1)[: x.numel()])


def weighted_mean_(x: Tensor, weight: Tensor, all_reduce_: Callable[[Tensor], Tensor]) -> Tensor:
    """Replace `x` by its weighted mean over ranks; the weight is sent as one more element.

    If all weights are zero, it is the mean with equal weights. The sum is computed in fp32 at least.

    Args:
        x: a vector.
        weight: this rank's weight, not negative.
        all_reduce_: replaces a vector by its sum over the ranks.
    """
    total = all_reduce_(_weighted(x, weight))
    return x.copy_(total[:-1] / total[-1])


def weighted_mean(comm: Comm, x: Tensor, weight: Tensor) -> Work[Tensor]:
    """Compute the weighted mean of `x` over all ranks, as `weighted_mean_`, in a new vector.

    Args:
        comm: the ranks.
        x: a vector, which may change before the wait.
        weight: this rank's weight, not negative.
    """
    total = _weighted(x, weight)
    return comm.all_reduce_(total).then(lambda total: (total[:-1] / total[-1]).to(x.dtype))


def weight_share(comm: Comm, weight: Tensor, device: torch.device) -> float:
    """Return this rank's weight divided by the mean weight; all-reduces one number on that device."""
    mine = float(weight.clamp(min=_SMALLEST_WEIGHT))
    # In a dry run parameters have no data, but this number does.
    where = "cpu" if device.type == "meta" else device
    total = comm.all_reduce_(torch.tensor([mine], dtype=torch.float64, device=where)).wait()
    return mine * comm.size / float(total)


def _weighted(x: Tensor, weight: Tensor) -> Tensor:
    """Append the weight to the weighted vector, in fp32 at least."""
    exact = torch.promote_types(x.dtype, torch.float32)
    # A weight of zero is replaced with a negligible one, so that the total is never zero.
    weight = weight.to(x.device, exact).clamp(min=_SMALLEST_WEIGHT)
    return torch.cat([x * weight, weight.view(1)])


def own_shard(comm: Comm, x: Tensor) -> Tensor:
    """Return this rank's part of a vector split evenly, as a view; it may be empty."""
    return x.tensor_split(comm.size)[comm.rank]


def reduce_scatter(comm: Comm, x: Tensor) -> Work[Tensor]:
    """Compute this rank's part of the mean over ranks, in a new vector: the first half of an all-reduce.

    Args:
        comm: the ranks.
        x: a vector; must not change before the wait.
    """
    parts = x.tensor_split(comm.size)
    work = comm.all_to_all(parts, [parts[comm.rank].numel()] * comm.size)
    return work.then(lambda received: reduce(torch.add, received) / comm.size)


def all_gather_(comm: Comm, part: Tensor, x: Tensor) -> Tensor:
    """Gather every rank's part into `x` on all ranks: the second half of an all-reduce."""
    parts = list(x.tensor_split(comm.size))
    received = comm.all_to_all([part] * comm.size, [each.numel() for each in parts]).wait()
    copy_each_(parts, received)
    return x
