# SPDX-License-Identifier: Apache-2.0
"""Weights that a dtype represents exactly, so that a rank's shares add up to its vector.

Only this file of the package imports torch; without it the command line starts quickly.
"""

from functools import lru_cache

import torch

from thinwire.methods.topology.base import Peers, Topology


def exact_weights(topology: Topology, rank: int, size: int, step: int, dtype: torch.dtype) -> Peers:
    """Return the peers of one step, with exact shares in `dtype` that add up to one at every sender.

    A third in fp32 is too large by a relative 3e-8. Three vectors scaled by it would grow at every step, even relative
    to weights that are scaled in fp64. Therefore every sent share is rounded to a multiple of half the dtype's epsilon,
    which the dtype represents exactly between zero and one, and the sender keeps the exact rest. Vectors in half
    precision are scaled by fp32 numbers.
    """
    return _shares(topology, rank, size, step % topology.period(size), dtype)


@lru_cache(maxsize=1 << 16)  # thousands of simulated workers, each at every step of a period
def _shares(topology: Topology, rank: int, size: int, step: int, dtype: torch.dtype) -> Peers:
    unit = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
    peers = topology.peers(rank, size, step)
    # A rank's weights belong to the vectors that it receives; its receivers compute the shares that it sends.
    receivers = [topology.peers(j, size, step) for j in peers.dst]
    sent = [receiver.weights[receiver.src.index(rank)] for receiver in receivers]
    return peers._replace(
        own=1.0 - sum(round(share / unit) * unit for share in sent),
        weights=tuple(round(share / unit) * unit for share in peers.weights),
    )
