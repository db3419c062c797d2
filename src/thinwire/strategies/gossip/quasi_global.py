"""Mix parameters with neighbours, and take the momentum from where the mixed parameters went."""

from collections.abc import Callable
from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.reduce.compressed_all_reduce import gossip_
from thinwire.replica.displacement import accumulate_, descend_
from thinwire.replica.replica import Replica
from thinwire.strategies.gossip.base import DecentralisedMomentum
from thinwire.topology.base import Topology
from thinwire.topology.certificate import Disagreement, quasi_global
from thinwire.topology.graphs import OnePeerExponential


@dataclass(frozen=True)
class QuasiGlobal(DecentralisedMomentum):
    r"""Step along a momentum that follows the displacement of the mixed parameters (QG-DmSGD).

    With $W$ the doubly stochastic weights of the graph and $\gamma g$ what the worker's optimizer subtracts,

    $$u_i = g_i + \beta m_i, \qquad x_i' = \sum_j W_{ij} (x_j - \gamma u_j), \qquad
      m_i \leftarrow \mu m_i + \tfrac{1-\mu}{\gamma} (x_i - x_i') .$$

    After mixing, the displacement is nearly everyone's, so that $m$ estimates the global direction without a message
    of its own. The bias on heterogeneous data is D-PSGD's, at any momentum; Nesterov's form rests where D-PSGD
    does at the learning rate $(1+\beta)\gamma$. `momentum=0` is `Gossip(order="after")`.
    It stays stable on directed and changing graphs, where DecentLaM does not. A step whose learning rate is zero mixes,
    and lets $m$ decay.
    Traffic: one vector per neighbour and step. State: `anchor` ($x$ before the step) and `momentum` ($m$).

    Lin et al., Quasi-Global Momentum: Accelerating Decentralized Deep Learning on Heterogeneous Data, ICML 2021,
    arXiv:2102.04761.

    Args:
        topology: any graph whose weights are doubly stochastic, changing ones too.
        momentum: $\beta$, in [0, 1); the optimizer must have none of its own.
        nesterov: look ahead, $u_i = g_i + \beta (g_i + \beta m_i)$.
        memory: $\mu$ in [0, 1), how much of $m$ is kept at each step; more smooths more. None is the momentum.
    """

    topology: Topology = OnePeerExponential()
    momentum: float = 0.9
    nesterov: bool = False
    memory: float | None = None

    paper = (
        "Lin et al., Quasi-Global Momentum: Accelerating Decentralized Deep Learning ..., ICML 2021, arXiv:2102.04761"
    )
    waits = "every step, each worker waits for its neighbours of that step"
    limits = "bears a smaller learning rate than heavy-ball momentum does; workers differ by what has not yet spread"

    def __post_init__(self) -> None:
        """Check the kinds and the ranges."""
        DecentralisedMomentum.__post_init__(self)
        if self.memory is not None and not 0 <= self.memory < 1:
            raise ConfigError(f"memory={self.memory}: must lie in [0, 1); None takes the momentum's value")

    @property
    def kept(self) -> float:
        r"""$\mu$, in numbers."""
        return self.momentum if self.memory is None else self.memory

    @property
    def differences(self) -> Callable[[float], Disagreement]:
        """Of either form, with the memory that goes with a momentum."""
        return lambda b: quasi_global(b, memory=b if self.memory is None else self.memory, nesterov=self.nesterov)

    def after_step(self, r: Replica) -> None:
        """Add the momentum to the optimizer's step, mix, and see where that led."""
        displacement, momentum = r.state["anchor"], r.state["momentum"]
        if self.nesterov:
            # Away from where the step began: (1 + beta) times the optimizer's step.
            r.x.lerp_(displacement, -self.momentum)
        descend_(r.x, momentum, r.lr, self.momentum**2 if self.nesterov else self.momentum)
        gossip_(r.comm, r.x, self.peers(r), r.notice_distance).wait()
        accumulate_(momentum, displacement.sub_(r.x), r.lr, keep=self.kept, add=1 - self.kept)
