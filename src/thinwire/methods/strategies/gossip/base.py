# SPDX-License-Identifier: Apache-2.0
"""The base class of decentralized momentum methods: gossip with a momentum that the strategy keeps."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch.optim import Optimizer

from thinwire.core.replica.displacement import Momentum, refuse_momentum
from thinwire.core.replica.replica import Replica
from thinwire.errors import ConfigError
from thinwire.methods.strategies.base import Rounds, Strategy, Traits
from thinwire.methods.topology.base import Peers, Topology
from thinwire.methods.topology.certificate import Disagreement, check_average_kept, check_stable
from thinwire.methods.topology.exact_weights import exact_weights


@dataclass(frozen=True)
class DecentralisedMomentum(Strategy):
    r"""Gossip with a momentum that the strategy computes from the displacement of the parameters.

    The optimizer takes its step without momentum. Afterwards `r.state["anchor"]` has $x$ before the step, so that
    $\gamma g$ is `anchor - r.x`. `r.state["momentum"]` is $m$, initially zero. Subclasses define `after_step`.

    Args:
        topology: the graph; its weights must be doubly stochastic.
        momentum: $\beta$, in [0, 1).
    """

    topology: Topology
    momentum: Momentum

    def make_traits(self) -> Traits:
        """See `Traits`."""
        # Each worker mixes before its step ends, and nothing is in flight after it.
        rounds = Rounds(estimates=True)
        return Traits(topology=self.topology, rounds=rounds, lr_factor=1 / (1 - self.momentum))

    @property
    def differences(self) -> Callable[[float], Disagreement] | None:
        """The evolution of differences between workers, given a momentum; None if they vanish on all allowed graphs."""
        return None

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Check that the graph keeps the average, that the momentum is stable on it, and that it is applied once."""
        check_average_kept(self, self.topology, size)
        if self.differences is not None:
            check_stable(self, self.topology, size, self.differences, self.momentum)
        if optimizer is not None:
            refuse_momentum(optimizer, self, "Gossip(order='after')")

    def start(self, r: Replica) -> None:
        """Allocate the state; parameters must be exact enough for small differences."""
        if r.x.element_size() < 4:
            raise ConfigError(
                f"{self} with parameters of {r.x.dtype}: it divides small differences of parameters by the learning "
                "rate. Keep the parameters in float32 and compute under torch.autocast, or use Gossip(order='after')"
            )
        r.zeros_state("anchor")
        r.zeros_state("momentum")

    def before_step(self, r: Replica) -> None:
        """Save the parameters before the step."""
        # Weight decay and clipping act in the optimizer, so that the displacement from here includes them.
        r.state["anchor"].copy_(r.x)

    # `restart` does nothing: the anchor is saved again before each step. The momentum is in units of a gradient, so it
    # does not refer to the parameters and is kept, like the optimizer's.

    @abstractmethod
    def after_step(self, r: Replica) -> None:
        """Mix parameters with those of the neighbors, and update the momentum."""

    def peers(self, r: Replica) -> Peers:
        """Return the neighbors for the step that the optimizer has just taken, which is `r.step - 1`."""
        return exact_weights(self.topology, r.comm.rank, r.comm.size, r.step - 1, r.x.dtype)
