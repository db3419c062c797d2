"""Average parameters with a few neighbours at every step."""

from dataclasses import dataclass
from typing import Literal

from laconic.errors import ConfigError
from laconic.kinds import check_kinds
from laconic.reduce import gossip_, mean_, mix_
from laconic.replica import Replica
from laconic.strategies.base import Strategy
from laconic.topology.base import Topology, check_edges, doubly_stochastic
from laconic.topology.graphs import Ring


@dataclass(frozen=True)
class Gossip(Strategy):
    r"""Mix the parameters with those of this step's neighbours (decentralised SGD, D-PSGD).

    With $W$ the doubly stochastic weights of the graph,

    $$x_i \leftarrow \sum_j W_{ij} x_j - \gamma\, g_i(x_i)  \quad\text{(combine while adapting)}, \qquad
      x_i \leftarrow \sum_j W_{ij} \bigl(x_j - \gamma\, g_j(x_j)\bigr) \quad\text{(adapt, then combine)}.$$

    The first is the paper's order: its messages travel during the forward and backward pass. The second mixes
    fresher values and waits for them. On the complete graph the second is AllReduce under plain SGD.
    Traffic: one vector per neighbour and step. State: none.

    Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NeurIPS 2017, arXiv:1705.09056,
    Algorithm 1.

    Args:
        topology: the graph; its weights must be doubly stochastic.
        order: "while" combines while adapting, "after" adapts, then combines.
    """

    topology: Topology = Ring()
    order: Literal["while", "after"] = "while"

    paper = "Lian et al., Can Decentralized Algorithms Outperform Centralized ...?, NeurIPS 2017, arXiv:1705.09056"
    waits = "every step, each worker waits for its neighbours of that step"
    limits = "workers differ by what has not yet spread; evaluate at consensus"

    def __post_init__(self) -> None:
        """Check the kinds."""
        check_kinds(self)

    def check(self, size: int) -> None:
        """Refuse graphs that do not exist, do not connect, or do not keep the average."""
        check_edges(self.topology, size)
        if not doubly_stochastic(self.topology, size):
            raise ConfigError(
                f"Gossip({self.topology}) with {size} workers: the weights are not doubly stochastic, so the average "
                "would drift; use PushSum, which corrects for it, or a regular graph"
            )

    def before_step(self, r: Replica) -> None:
        """Mix in what the neighbours sent before this step's gradient was known."""
        received = r.collect("neighbours")
        if received is not None:
            mix_(r.x, received, self.topology.peers(r.comm.rank, r.comm.size, r.step))

    def after_step(self, r: Replica) -> None:
        """Send, and in the order "after" wait and mix."""
        if self.order == "after":
            gossip_(r.comm, r.x, self.topology.peers(r.comm.rank, r.comm.size, r.step - 1)).wait()
            return
        peers = self.topology.peers(r.comm.rank, r.comm.size, r.step)
        r.launch("neighbours", r.comm.exchange(r.x, peers.to, peers.frm))

    def average_(self, r: Replica) -> None:
        """Mix in what is still in flight, then average."""
        self.before_step(r)
        mean_(r.comm, r.x).wait()
