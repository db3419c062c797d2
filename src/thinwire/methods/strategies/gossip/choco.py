# SPDX-License-Identifier: Apache-2.0
"""Gossip with compressed messages: neighbors keep copies, and workers send compressed changes to these."""

from typing import Annotated

import torch
from torch.optim import Optimizer

from thinwire.core.replica.replica import Replica
from thinwire.core.validation import Range
from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec, check_payloads, check_sizes, draw_key
from thinwire.methods.codecs.feedback import ErrorFeedback
from thinwire.methods.codecs.one_bit import OneBit
from thinwire.methods.reduce.compressed_all_reduce import compressed_exchange
from thinwire.methods.strategies.base import Strategy, Traits
from thinwire.methods.topology.base import Topology
from thinwire.methods.topology.certificate import check_average_kept
from thinwire.methods.topology.exact_weights import exact_weights
from thinwire.methods.topology.graphs import Ring
from thinwire.registry import registered


@registered
class Choco(Strategy):
    r"""Every worker has a public copy of its parameters, equal at its neighbors, and sends compressed changes to it.

    With $W$ the doubly stochastic weights of the graph and $\hat x_j$ the public copy of $j$'s parameters,

    $$x_i \leftarrow x_i - \gamma\, d_i(x_i), \qquad q_i = C(x_i - \hat x_i), \qquad
      \hat x_j \leftarrow \hat x_j + q_j \;\text{(on every worker that keeps it)}, \qquad
      x_i \leftarrow x_i + \kappa \sum_j W_{ij} (\hat x_j - \hat x_i),$$

    where $d$ is the update of the worker's own optimizer. The error of a codec stays in $x_i - \hat x_i$ and is encoded
    again at the next step, so the codec may be biased and needs no error feedback, if its error is smaller than its
    input. The mean of workers changes by their updates only, whatever the codec. Public copies start as the parameters,
    which are sent once uncompressed. With an exact codec and $\kappa = 1$ this is `Gossip(order="after")`.
    Traffic: one payload and 16 bytes per neighbor and step. State: `public` ($\hat x_i$) and `mixed`
    ($\sum_j W_{ij} \hat x_j$), each like the parameters in fp32, for any number of neighbors.

    Koloskova, Stich and Jaggi, Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
    Communication, ICML 2019, arXiv:1902.00340, Algorithm 2 (its memory-efficient form); for networks that are not
    convex: Koloskova et al., ICLR 2020, arXiv:1907.09356.

    Args:
        topology: a static graph with doubly stochastic weights.
        codec: any whose error is smaller than its input, such as `OneBit()` or `TopK()`.
        step_size: $\kappa$, in (0, 1]; more mixes faster, and too much for a coarse codec diverges.

    Example:
        With one bit per element, the mean of the workers still changes by the mean of their updates:

        >>> import torch
        >>> import thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(2, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     worker = thinwire.attach(model, optimizer, thinwire.Choco(thinwire.Ring()), comm=comm)
        ...     for _ in range(4):
        ...         model.weight.grad = torch.full_like(model.weight, comm.rank)
        ...         optimizer.step()
        ...     with worker.consensus():
        ...         return [round(weight, 3) for weight in model.weight[0].tolist()]
        >>> thinwire.run_threads(3, train)
        [[-4.0, -4.0], [-4.0, -4.0], [-4.0, -4.0]]
    """

    topology: Topology = Ring()
    codec: Codec = OneBit()
    step_size: Annotated[float, Range("(0, 1]", "0.3 is a start for OneBit()")] = 0.3

    paper = "Koloskova, Stich and Jaggi, Decentralized ... with Compressed Communication, ICML 2019, arXiv:1902.00340"
    waits = "at every step each worker waits for the messages of its neighbors"
    limits = (
        "tune the step size: coarse codecs need a small one; workers hold different parameters between averages of all"
    )

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return Traits(topology=self.topology, on_resize="start", feeds_back=True)

    def __post_init__(self) -> None:
        check_payloads(self.codec)
        check_sizes(self.codec)
        if isinstance(self.codec, ErrorFeedback):
            raise ConfigError(f"codec={self.codec}: public copies keep the residual already. Use {self.codec.codec}")
        if self.codec.traits.error_bound >= 1 or self.codec.traits.residual_after_sum:
            raise ConfigError(
                f"codec={self.codec}: its error can be larger than its input, so copies would diverge. Use "
                "OneBit(), TopK(), or more bits in smaller blocks"
            )

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Check that the graph is static and connected, and keeps the average."""
        check_average_kept(self, self.topology, size)
        if self.topology.period(size) > 1:
            raise ConfigError(
                f"topology={self.topology} with {size} workers: it changes from step to step, but public copies need "
                "fixed neighbors. Use a static graph, such as Ring()"
            )

    def start(self, r: Replica) -> None:
        """Send the parameters, uncompressed, as the first public copies."""
        peers = exact_weights(self.topology, r.comm.rank, r.comm.size, 0, torch.float32)
        public = r.x.to(torch.float32, copy=True)
        received = r.comm.send_recv(public, peers.dst, peers.src).wait()
        mixed = public * peers.own
        # Only the weighted sum of the neighbors' copies is kept, not each copy: memory does not grow with the graph.
        for weight, theirs in zip(peers.weights, received, strict=True):
            mixed.add_(theirs, alpha=weight)
        r.state["public"], r.state["mixed"] = public, mixed

    def restart(self, r: Replica) -> None:
        """Set the public copies to the new parameters, which all workers have, without a message."""
        # The weights of a worker's neighbors and its own sum to one, so the weighted sum of equal copies is that copy.
        for name in ("public", "mixed"):
            r.state[name].copy_(r.x)

    def after_step(self, r: Replica) -> None:
        """Send the compressed change of the public copy, and move towards the neighbors' copies."""
        peers = exact_weights(self.topology, r.comm.rank, r.comm.size, 0, torch.float32)
        public, mixed, x = r.state["public"], r.state["mixed"], r.x.to(torch.float32)
        exchange = compressed_exchange(r.comm, x - public, self.codec, peers, key=draw_key(r.seed, r.step))
        # This worker adds the decoded change too: its copy must stay equal to the ones that its neighbors keep.
        mine, theirs = exchange.wait()
        public.add_(mine)
        mixed.add_(mine, alpha=peers.own)
        for weight, step in zip(peers.weights, theirs, strict=True):
            mixed.add_(step, alpha=weight)
        r.x.add_((mixed - public).to(r.x.dtype), alpha=self.step_size)
