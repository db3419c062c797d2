"""Weights that a dtype holds exactly, so that what is sent and kept adds up to what there was."""

from functools import lru_cache

import torch

from thinwire.topology.base import Peers, Topology


def exact_weights(topology: Topology, rank: int, size: int, step: int, dtype: torch.dtype) -> Peers:
    """The peers of one step, with shares that `dtype` holds exactly and that add up to one at every sender.

    A third in fp32 is three hundred-millionths too much of a third. Vectors scaled by three of them would grow with
    every step, also against weights that are scaled in fp64. So every share that is sent is rounded to a multiple of
    half the dtype's epsilon, all of which the dtype has between zero and one, and the sender keeps exactly the rest.
    Half precision is scaled by fp32 numbers.
    """
    return _shares(topology, rank, size, step % topology.period(size), dtype)


@lru_cache(maxsize=4096)
def _shares(topology: Topology, rank: int, size: int, step: int, dtype: torch.dtype) -> Peers:
    grain = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
    peers = topology.peers(rank, size, step)
    given = [_share_of(rank, topology.peers(j, size, step)) for j in peers.dst]
    return peers._replace(
        own=1.0 - sum(round(share / grain) * grain for share in given),
        weights=tuple(round(share / grain) * grain for share in peers.weights),
    )


def _share_of(sender: int, receiver: Peers) -> float:
    return receiver.weights[receiver.src.index(sender)]
