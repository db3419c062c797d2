# SPDX-License-Identifier: Apache-2.0
"""Means other than the plain one: weighted, over some of the ranks, or in two halves."""

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from thinwire.core.comm.base import Comm
from thinwire.core.comm.work import Work
from thinwire.core.replica.flat import copy_each_

_SMALLEST_WEIGHT = 2.0**-40


def ring_all_reduce_(comm: Comm, x: Tensor, members: Sequence[int]) -> Tensor:
    """Replace `x` on some ranks by its sum over them; the other ranks make no call.

    With m members each sends 2 (m-1) pieces of one m-th of the vector to the next: as little as an all-reduce.
    Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, JPDC 2009.

    Args:
        comm: all ranks.
        x: a vector.
        members: ranks, this one among them; all of them make the same call.
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

    Where all weights are zero it is the plain mean. The sum is computed in fp32 at least.

    Args:
        x: a vector.
        weight: this rank's, a number; not negative.
        all_reduce_: replaces a vector by its sum over the ranks.
    """
    total = all_reduce_(_weighted(x, weight))
    return x.copy_(total[:-1] / total[-1])


def weighted_mean(comm: Comm, x: Tensor, weight: Tensor) -> Work[Tensor]:
    """The weighted mean of `x` over ranks, a new vector; as `weighted_mean_`, of all ranks.

    Args:
        comm: the ranks.
        x: a vector, which may change before the wait.
        weight: this rank's, a number; not negative.
    """
    total = _weighted(x, weight)
    return comm.all_reduce_(total).then(lambda total: (total[:-1] / total[-1]).to(x.dtype))


def weight_share(comm: Comm, weight: Tensor, device: torch.device) -> float:
    """This rank's weight, divided by the mean of all; sends one number from that device, and waits for it."""
    mine = float(weight.clamp(min=_SMALLEST_WEIGHT))
    # In a dry run parameters have no data, and this number has.
    where = "cpu" if device.type == "meta" else device
    total = comm.all_reduce_(torch.tensor([mine], dtype=torch.float64, device=where)).wait()
    return mine * comm.size / float(total)


def _weighted(x: Tensor, weight: Tensor) -> Tensor:
    """The vector times its weight, and the weight, in fp32 at least."""
    exact = torch.promote_types(x.dtype, torch.float32)
    # A weight of zero becomes one that is too small to matter, so that the total is never zero.
    weight = weight.to(x.device, exact).clamp(min=_SMALLEST_WEIGHT)
    return torch.cat([x * weight, weight.view(1)])


def own_shard(comm: Comm, x: Tensor) -> Tensor:
    """This rank's even part of a vector, as a view; empty on some ranks where there are more ranks than elements."""
    return x.tensor_split(comm.size)[comm.rank]


def reduce_scatter(comm: Comm, x: Tensor) -> Work[Tensor]:
    """This rank's part of the mean over ranks, a new vector: the first half of an all-reduce.

    Args:
        comm: the ranks.
        x: a vector; must not change before the wait.
    """
    parts = x.tensor_split(comm.size)
    work = comm.all_to_all(parts, [parts[comm.rank].numel()] * comm.size)
    return work.then(lambda received: reduce(torch.add, received) / comm.size)


def all_gather_(comm: Comm, part: Tensor, x: Tensor) -> Tensor:
    """Put every rank's part in its place in `x`, on all ranks: the second half of an all-reduce."""
    parts = list(x.tensor_split(comm.size))
    received = comm.all_to_all([part] * comm.size, [each.numel() for each in parts]).wait()
    copy_each_(parts, received)
    return x
