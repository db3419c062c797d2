# SPDX-License-Identifier: Apache-2.0
"""A mean that is plain within nodes and compressed between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from thinwire.core.comm.base import Comm
from thinwire.core.comm.members import Members, node_and_peers
from thinwire.core.comm.pending import Stages
from thinwire.core.kernels import Flag, as_fp32, decisions


def mean_between_nodes(
    comm: Comm,
    x: Tensor,
    node_size: int,
    cuts: Sequence[slice],
    compressed_mean: Callable[[Comm, Tensor, slice], Stages],
    *,
    count: int,
) -> Stages:
    """Compute a mean in stages, for `PendingMeans`.

    Args:
        comm: the comm of all ranks.
        x: a vector.
        node_size: ranks per node.
        cuts: the part of the vector for each rank of a node, end to end.
        compressed_mean: averages a part of the vector, given by a slice, over the ranks of a comm.
        count: the divisor of the sum over all ranks.
    """
    node, peers = node_and_peers(comm, node_size)
    single = as_fp32(x)
    own = cuts[node.rank]
    parts = [single[cut] for cut in cuts]

    # Within the node: each rank adds one part.
    scattered = node.all_to_all(parts, [own.stop - own.start] * node.size)
    yield

    # Between nodes: the mean over nodes of this part, by the codec.
    total = reduce(torch.add, scattered.wait()).mul_(peers.size / count)
    mean = compressed_mean(peers, total, own)
    next(mean)
    next(mean)
    yield

    # All ranks must agree whether every part is finite.
    finite = yield _all_agree(node, single, next(mean))
    mean.send(finite)
    try:
        next(mean)
    except StopIteration as end:
        total = end.value

    # Within the node: gather the parts.
    gathered = node.all_to_all([total] * node.size, [cut.stop - cut.start for cut in cuts]).wait()
    for part, found in zip(parts, gathered, strict=True):
        part.copy_(found)
    if single.data_ptr() != x.data_ptr():
        x.copy_(single)
    yield
    return x


def _all_agree(node: Members, like: Tensor, finite: Flag | None) -> Flag:
    """Return whether the flag holds on all ranks of the node."""
    flag = torch.zeros(1, dtype=torch.float32, device=like.device)
    flag += False if finite is None else finite
    agreed = torch.stack(node.all_gather(flag).wait()).amin() > 0
    return agreed if like.device.type not in ("cpu", "meta") else decisions.holds(agreed)
