# SPDX-License-Identifier: Apache-2.0
"""Average parameters with a few neighbors at every step."""

from typing import Literal

from torch.optim import Optimizer

from thinwire.core.replica.replica import Replica
from thinwire.methods.reduce.compressed_all_reduce import gossip_, mix_
from thinwire.methods.strategies.base import Rounds, Strategy, Traits
from thinwire.methods.topology.base import Topology
from thinwire.methods.topology.certificate import check_average_kept
from thinwire.methods.topology.exact_weights import exact_weights
from thinwire.methods.topology.graphs import Ring
from thinwire.registry import registered


@registered
class Gossip(Strategy):
    r"""Mix the parameters with those of this step's neighbors (decentralized SGD, D-PSGD).

    With $W$ the doubly stochastic weights of the graph,

    $$x_i \leftarrow \sum_j W_{ij} x_j - \gamma\, g_i(x_i)  \quad\text{(combine while adapting)}, \qquad
      x_i \leftarrow \sum_j W_{ij} \bigl(x_j - \gamma\, g_j(x_j)\bigr) \quad\text{(adapt, then combine)}.$$

    The first is the paper's order, whose messages are sent during the forward and backward pass. The second mixes newer
    values and waits for them; on the complete graph it is AllReduce under plain SGD. With momentum in the optimizer,
    which stays local, the first is AWC-DmSGD and the second DmSGD. Both are stable on every graph, and on heterogeneous
    data their bias is D-PSGD's at the learning rate $\gamma/(1-\beta)$, which `DecentLaM`, `QuasiGlobal` and
    `ExactDiffusion` avoid.
    Traffic: one vector per neighbor and step. State: none between steps.

    Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NeurIPS 2017, arXiv:1705.09056,
    Algorithm 1.

    Args:
        topology: the graph; its weights must be doubly stochastic.
        order: "while" combines while adapting, "after" adapts, then combines.

    Example:
        On a ring of four, the parameters of one worker reach its two neighbors first:

        >>> import torch
        >>> import thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     thinwire.attach(model, optimizer, thinwire.Gossip(thinwire.Ring(), order="after"), comm=comm)
        ...     model.weight.grad = torch.full_like(model.weight, -9.0 if comm.rank == 0 else 0.0)
        ...     optimizer.step()
        ...     return round(model.weight.item(), 3)
        >>> thinwire.run_threads(4, train)
        [3.0, 3.0, 0.0, 3.0]
    """

    topology: Topology = Ring()
    order: Literal["while", "after"] = "while"

    paper = "Lian et al., Can Decentralized Algorithms Outperform Centralized ...?, NeurIPS 2017, arXiv:1705.09056"
    waits = "at every step each worker waits for its neighbors of that step"
    limits = "workers hold different parameters between averages of all; evaluate at consensus"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        # In the order "while", messages in flight are still to be mixed in.
        rounds = Rounds(estimates=self.order == "after")
        return Traits(topology=self.topology, rounds=rounds, on_resize="start")

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Check that the graph exists for this number of workers, is connected, and keeps the average."""
        check_average_kept(self, self.topology, size)

    def start(self, r: Replica) -> None:
        """Send the parameters unless all workers start equal, when mixing would not change them."""
        if self.order == "while" and not r.equal_start:
            self._launch(r)

    def before_step(self, r: Replica) -> None:
        """In the order "while", compute the move towards the parameters that the neighbors have sent."""
        received = r.collect("neighbours")
        if received is not None:
            r.record_distance(r.x, received)
            # The messages were launched at the end of the last step, for this step's weights.
            peers = exact_weights(self.topology, r.comm.rank, r.comm.size, r.step, r.x.dtype)
            # The move follows the optimizer's step: gradient and weight decay belong to the parameters before it.
            r.state["pull"] = mix_(r.x.clone(), received, peers).sub_(r.x)

    def after_step(self, r: Replica) -> None:
        """Send the parameters; in the order "after" also wait for those of the neighbors, and mix."""
        if self.order == "after":
            peers = exact_weights(self.topology, r.comm.rank, r.comm.size, r.step - 1, r.x.dtype)
            gossip_(r.comm, r.x, peers, r.record_distance).wait()
            return
        if (pull := r.state.pop("pull", None)) is not None:
            r.x.add_(pull)
        self._launch(r)

    def restart(self, r: Replica) -> None:
        """Drop the messages in flight, which have older parameters; mixing equal ones changes nothing."""
        r.collect("neighbours")

    def _launch(self, r: Replica) -> None:
        peers = exact_weights(self.topology, r.comm.rank, r.comm.size, r.step, r.x.dtype)
        # Without a copy: the parameters do not change until `before_step` has collected the messages.
        r.launch("neighbours", r.comm.send_recv(r.x, peers.dst, peers.src))
