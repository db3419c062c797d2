# SPDX-License-Identifier: Apache-2.0
"""The base of decentralized momentum methods: gossip, with a momentum in gradient units that the strategy keeps."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch.optim import Optimizer

from thinwire.core.replica.displacement import check_momentum, refuse_momentum
from thinwire.core.replica.replica import Replica
from thinwire.core.validation import check_field_types
from thinwire.errors import ConfigError
from thinwire.methods.strategies.base import Strategy
from thinwire.methods.strategies.traits import Rounds, Traits
from thinwire.methods.topology.base import Peers, Topology
from thinwire.methods.topology.certificate import Disagreement, check_average_kept, check_stable
from thinwire.methods.topology.exact_weights import exact_weights


@dataclass(frozen=True)
class DecentralisedMomentum(Strategy):
    r"""Gossip with a momentum that the strategy computes from the displacement of the parameters.

    The optimizer takes its step without momentum. After it `r.state["anchor"]` still holds $x$ before the step, so
    that $\gamma g$ is `anchor - r.x`; `r.state["momentum"]` is $m$, zero at first. Methods differ in `after_step`.

    Args:
        topology: the graph; its weights must be doubly stochastic.
        momentum: $\beta$, in [0, 1).
    """

    topology: Topology
    momentum: float

    @cached_property
    def traits(self) -> Traits:
        """See `Traits`."""
        # Each worker mixes before its step ends, and nothing is in flight after it.
        rounds = Rounds(estimates=True)
        return Traits(topology=self.topology, rounds=rounds, lr_factor=1 / (1 - self.momentum))

    def __post_init__(self) -> None:
        """Check the types and the momentum."""
        check_field_types(self)
        check_momentum(self.momentum)

    @property
    def differences(self) -> Callable[[float], Disagreement] | None:
        """How differences between workers evolve, given a momentum; None where they vanish on every allowed graph."""
        return None

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Refuse graphs that do not keep the average or on which this momentum diverges, and a second momentum."""
        check_average_kept(self, self.topology, size)
        if self.differences is not None:
            check_stable(self, self.topology, size, self.differences, self.momentum)
        if optimizer is not None:
            refuse_momentum(optimizer, self, "Gossip(order='after')")

    def start(self, r: Replica) -> None:
        """Allocate the state; refuse parameters in which small differences are lost to rounding."""
        if r.x.element_size() < 4:
            raise ConfigError(
                f"{self} on parameters of {r.x.dtype}: it divides small differences of parameters by the learning "
                "rate; keep the parameters in float32 and compute under torch.autocast, or use Gossip(order='after')"
            )
        r.zeros_state("anchor")
        r.zeros_state("momentum")

    def before_step(self, r: Replica) -> None:
        """Save the parameters before the step."""
        # Weight decay and clipping act in the optimizer, so that the displacement from here includes them.
        r.state["anchor"].copy_(r.x)

    # `restart` does nothing: the anchor is saved again before each step. The momentum stays, as the optimizer's does;
    # it is in units of a gradient, and does not refer to the parameters.

    @abstractmethod
    def after_step(self, r: Replica) -> None:
        """Mix parameters with the neighbors', and update the momentum."""

    def peers(self, r: Replica) -> Peers:
        """The neighbors of the step that the optimizer has just taken; `r.step` includes it already."""
        return exact_weights(self.topology, r.comm.rank, r.comm.size, r.step - 1, r.x.dtype)
