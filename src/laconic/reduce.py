"""The one file where codecs, topologies and comms meet."""

from collections.abc import Callable

from torch import Tensor

from laconic.codecs.base import Codec, State
from laconic.comm.base import Comm, Work
from laconic.topology.base import Peers

Notice = Callable[[Tensor, list[Tensor]], None]


def mean_(comm: Comm, x: Tensor, *, count: int | None = None) -> Work[Tensor]:
    """Replace `x` on every rank by its mean over ranks: one all-reduce, 2 (n-1)/n of the vector sent per rank.

    Args:
        comm: the ranks.
        x: a vector; belongs to the wire until the wait.
        count: divide the sum by this instead of by the number of ranks (ranks without a contribution bring zeros).
    """
    divisor = count or comm.size
    work = comm.sum_(x)
    return work if divisor == 1 else work.then(lambda total: total.div_(divisor))


def coded_mean_(comm: Comm, x: Tensor, codec: Codec, state: State, *, count: int | None = None) -> Work[Tensor]:
    """`mean_` with payloads of a linear codec, which the wire adds up."""
    work = mean_(comm, codec.encode(x, state), count=count)
    return work.then(lambda payload: x.copy_(codec.decode(payload, x)))


def mix_(x: Tensor, received: list[Tensor], peers: Peers) -> Tensor:
    """Replace `x` by the weighted sum of itself and what its peers sent."""
    x.mul_(peers.own)
    for weight, y in zip(peers.weights, received, strict=True):
        x.add_(y, alpha=weight)
    return x


def gossip_(comm: Comm, x: Tensor, peers: Peers, notice: Notice | None = None) -> Work[Tensor]:
    """Send `x` to this step's peers and mix in what they send; len(peers.to) vectors sent per rank.

    Args:
        comm: the ranks.
        x: a vector; belongs to the wire until the wait.
        peers: of this step.
        notice: told of `x` and of what came, before they are mixed.
    """

    def mix(received: list[Tensor]) -> Tensor:
        if notice is not None:
            notice(x, received)
        return mix_(x, received, peers)

    return comm.exchange(x, peers.to, peers.frm).then(mix)
