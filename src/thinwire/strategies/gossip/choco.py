"""Gossip in a codec's words: neighbours remember what was said, and only what is new is coded."""

from dataclasses import dataclass

import torch

from thinwire.codecs.base import Codec, draw_key
from thinwire.codecs.feedback import ErrorFeedback
from thinwire.codecs.one_bit import OneBit
from thinwire.errors import ConfigError
from thinwire.reduce.compressed_all_reduce import coded_exchange
from thinwire.replica.replica import Replica
from thinwire.strategies.base import Strategy
from thinwire.topology.base import Topology
from thinwire.topology.certificate import check_average_kept
from thinwire.topology.exact_weights import exact_weights
from thinwire.topology.graphs import Ring
from thinwire.validation import check_kinds


@dataclass(frozen=True)
class Choco(Strategy):
    r"""Every worker keeps a public copy of its parameters that its neighbours know, and codes how far it is off.

    With $W$ the doubly stochastic weights of the graph and $\hat x_j$ the public copy of $j$'s parameters,

    $$x_i \leftarrow x_i - \gamma\, d_i(x_i), \qquad q_i = C(x_i - \hat x_i), \qquad
      \hat x_j \leftarrow \hat x_j + q_j \;\text{(all who know it)}, \qquad
      x_i \leftarrow x_i + \kappa \sum_j W_{ij} (\hat x_j - \hat x_i),$$

    where $d$ is the update of the worker's own optimizer. What a code leaves unsaid stays in $x_i - \hat x_i$ and is
    coded again, so the codec may be biased and needs no error feedback; it must only leave less than there was. The
    mean of workers moves by their updates alone, whatever is coded. Public copies begin at the parameters, which are
    sent once as they are. On exact codes with $\kappa = 1$ this is `Gossip(order="after")`.
    Traffic: one payload and 16 bytes per neighbour and step. State: `public` ($\hat x_i$) and `mixed`
    ($\sum_j W_{ij} \hat x_j$), each like the parameters in fp32, whatever the number of neighbours.

    Koloskova, Stich and Jaggi, Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
    Communication, ICML 2019, arXiv:1902.00340, Algorithm 2 (its memory-efficient form); for networks that are not
    convex: Koloskova et al., ICLR 2020, arXiv:1907.09356.

    Args:
        topology: a graph that does not change, with doubly stochastic weights.
        codec: any that leaves less unsaid than it was given, such as `OneBit()` or `TopK()`.
        step_size: $\kappa$, in (0, 1]; more mixes faster, and too much for a coarse codec diverges.
    """

    topology: Topology = Ring()
    codec: Codec = OneBit()
    step_size: float = 0.3

    paper = "Koloskova, Stich and Jaggi, Decentralized ... with Compressed Communication, ICML 2019, arXiv:1902.00340"
    waits = "every step, each worker waits for its neighbours' codes"
    limits = "tune the step size: coarse codecs bear little; workers differ by what has not yet spread"

    def __post_init__(self) -> None:
        """Check the kinds, the step size and the codec."""
        check_kinds(self)
        if not 0 < self.step_size <= 1:
            raise ConfigError(f"step_size={self.step_size}: must lie in (0, 1]; 0.3 is a start for OneBit()")
        if isinstance(self.codec, ErrorFeedback):
            raise ConfigError(f"codec={self.codec}: public copies remember what is unsaid; use {self.codec.codec}")
        if self.codec.expansion >= 1 or self.codec.residual_after_sum:
            raise ConfigError(
                f"codec={self.codec}: it can leave more unsaid than it was given, so copies would run away; use "
                "OneBit(), TopK(), or more bits in smaller blocks"
            )

    def check(self, size: int) -> None:
        """Refuse graphs that change, do not connect, or do not keep the average."""
        check_average_kept(self, self.topology, size)
        if self.topology.period(size) > 1:
            raise ConfigError(
                f"topology={self.topology} with {size} workers: changes from step to step, while public copies are of "
                "one set of neighbours; use a graph that stays, such as Ring()"
            )

    def start(self, r: Replica) -> None:
        """Make the parameters public."""
        peers = exact_weights(self.topology, r.comm.rank, r.comm.size, 0, torch.float32)
        public = r.x.to(torch.float32, copy=True)
        received = r.comm.send_recv(public, peers.dst, peers.src).wait()
        mixed = public * peers.own
        for weight, theirs in zip(peers.weights, received, strict=True):
            mixed.add_(theirs, alpha=weight)
        r.state["public"], r.state["mixed"] = public, mixed

    def after_step(self, r: Replica) -> None:
        """Say how far the parameters are from what is known of them, and move towards the neighbours' copies."""
        peers = exact_weights(self.topology, r.comm.rank, r.comm.size, 0, torch.float32)
        public, mixed, news = r.state["public"], r.state["mixed"], r.x.to(torch.float32)
        exchange = coded_exchange(r.comm, news - public, self.codec, peers, key=draw_key(r.seed, r.step))
        mine, theirs = exchange.wait()
        public.add_(mine)
        mixed.add_(mine, alpha=peers.own)
        for weight, step in zip(peers.weights, theirs, strict=True):
            mixed.add_(step, alpha=weight)
        r.x.add_((mixed - public).to(r.x.dtype), alpha=self.step_size)
