# SPDX-License-Identifier: Apache-2.0
"""Send shares of the parameters along a directed graph, and divide by a weight to remove the bias."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.replica.replica import Replica
from thinwire.errors import ConfigError
from thinwire.methods.reduce.compressed_all_reduce import mean_, mix_
from thinwire.methods.reduce.leaving import hand_on
from thinwire.methods.strategies.base import At, Strategy
from thinwire.methods.strategies.push_sum.mass import debias_, inherit_mass_, mass_of, mix_mass_, numerator, weight
from thinwire.methods.strategies.traits import Rounds, Traits
from thinwire.methods.topology.base import Peers, Topology, check_edges, doubly_stochastic
from thinwire.methods.topology.exact_weights import exact_weights
from thinwire.methods.topology.exponential import OnePeerExponential
from thinwire.registry import registered

# The weights of all add up to their number, but for fp64's rounding.
_EXACT = 1e-9


@registered
class PushSum(Strategy):
    r"""Stochastic Gradient Push: send shares of parameters and of a weight, and train at their quotient.

    With $P^k$ column-stochastic (each worker decides only how to split its own vector), $w_i = 1$ at first and
    $z_i = x_i / w_i$ the de-biased parameters, which the model holds,

    $$x_i \leftarrow x_i - \gamma\, d_i(z_i), \qquad
      x_i \leftarrow P^k_{ii} x_i + \sum_{j \ne i} P^{k-\tau}_{ij} x_j^{k-\tau}, \qquad
      w_i \leftarrow P^k_{ii} w_i + \sum_{j \ne i} P^{k-\tau}_{ij} w_j^{k-\tau}, \qquad z_i \leftarrow x_i / w_i ,$$

    where $x_j^{k-\tau}$ is what $j$ sent in step $k - \tau$ and $d$ is the update of the worker's own optimizer, whose
    momentum stays local and whose weight decay acts on $z$. The sums over workers of $x$ and of $w$, messages in flight
    included, change only by the updates.

    Without staleness it is SGP: every worker waits for the shares of the current step. If the graph is doubly
    stochastic, $w$ is then always one, and neither sent nor stored. With staleness it is Overlap SGP: the shares of a
    step are in flight while later steps compute, and are added at the end of exactly the $\tau$-th step after, so that
    results do not depend on timing. The weights then differ from one on every graph.
    Traffic: one vector per neighbor and step; where $w$ is sent it is 8 bytes more, and in fp32 at least. State: none,
    or `mass`, the vector of $x$ and $w$ together, and `debiased`, $z$ before the step.

    Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019, arXiv:1811.10792, Algorithms 1
    and 2 (sending at every step).

    Args:
        topology: any graph, directed and time-varying ones too, that connects all workers over its period.
        staleness: $\tau$, steps that a message may be in flight; more hides longer transfers, delays agreement, and
            keeps as many messages in memory.
        biased: train at $x$ instead of $z$, without any weight. The paper's ablation, here to show what the weight is
            for; never better.

    Example:
        The mean of the workers moves by the mean of their updates, messages in flight included:

        >>> import torch
        >>> import thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     worker = thinwire.attach(model, optimizer, thinwire.PushSum(staleness=1), comm=comm)
        ...     for _ in range(4):
        ...         model.weight.grad = torch.full_like(model.weight, comm.rank)
        ...         optimizer.step()
        ...     with worker.consensus():
        ...         return round(model.weight.item(), 3)
        >>> thinwire.run_threads(3, train)
        [-4.0, -4.0, -4.0]
    """

    topology: Topology = OnePeerExponential()
    staleness: int = 0
    biased: bool = False

    paper = "Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019, arXiv:1811.10792"
    waits = "at every step each worker waits for the messages that its neighbours sent `staleness` steps before"
    limits = "workers hold different parameters between averages of all; evaluate at consensus"

    @cached_property
    def traits(self) -> Traits:
        """See `Traits`."""
        # Where weights do not stay one, `estimates` of outer_step.py sees it by the graph.
        rounds = Rounds(estimates=not self.staleness)
        return Traits(topology=self.topology, elementwise=True, rounds=rounds, on_resize="start")

    def __post_init__(self) -> None:
        """Check the types and the staleness."""
        if self.biased:
            object.__setattr__(self, "limits", f"{self.limits}; biased=True is an ablation")
        if self.staleness < 0:
            raise ConfigError(f"staleness={self.staleness}: must be at least 0 steps; 1 hides a step's transfer")

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Refuse graphs that do not exist, are not connected, or do not conserve mass."""
        check_edges(self.topology, size)

    def start(self, r: Replica) -> None:
        """Give every worker the weight one; no state where the weight stays one."""
        if not self._weightless(r.comm.size):
            r.state["mass"] = mass_of(r.x)
            r.state["debiased"] = r.x.clone()

    def after_step(self, r: Replica) -> None:
        """Apply the update to the mass, send shares of it, add the shares that are due, and de-bias."""
        if self._weightless(r.comm.size):
            self._push_(r, r.x)
            return
        mass, debiased = r.state["mass"], r.state["debiased"]
        # The optimizer changed z; x changes by the same amount, as in the paper.
        numerator(mass).sub_(debiased.sub_(r.x))
        self._push_(r, mass)
        debias_(r, mass)

    def average(self, r: Replica, at: At = "now") -> Tensor:
        """The total mass, messages in flight included, over the total weight, which is the number of workers."""
        if self._weightless(r.comm.size):
            # The biased form knows no mass: it trains at `x`, so it is `x` that is averaged.
            return Strategy.average(self, r, at)
        mass = r.state["mass"] if at == "outer" else r.state["mass"].clone()
        for name, shares in self._in_flight(r):
            mix_mass_(mass, r.inflight[name].wait(), shares)
        return mean_(r.comm, numerator(mass)).wait().to(r.x.dtype)

    def restart(self, r: Replica) -> None:
        """Every worker has the parameters with the weight one, and nothing is in flight: the sum of weights is kept."""
        # All messages, at whatever step they were sent: what is in them is mass of the parameters as they were.
        for name in list(r.inflight):
            r.collect(name)
        if not self._weightless(r.comm.size):
            r.state["mass"] = mass_of(r.x)
            r.state["debiased"].copy_(r.x)

    def before_leave(self, r: Replica, leaving: Sequence[int]) -> None:
        """Add the messages in flight; a leaving worker's mass goes to a neighbor, and all are scaled to the new size.

        So no mass is lost: the weights add up to the number of workers that stay, and the average stays what it is.
        Where weights stay one, all take the mean.
        """
        if self._weightless(r.comm.size):
            super().before_leave(r, leaving)
            return
        mass, scale = r.state["mass"], 1 - len(leaving) / r.comm.size
        for name, shares in self._in_flight(r):
            mix_mass_(mass, r.inflight.pop(name).wait(), shares)
        inherit_mass_(mass, hand_on(r.comm, mass, leaving), scale)
        debias_(r, mass)

    def change_view(self, r: Replica, before: int) -> Mapping[str, float]:
        """Continue from each survivor's own parameters with the weight one; return the lost weight.

        It is the weight of lost workers and of messages in flight. If nothing was lost, as after a graceful
        shutdown, all continue with their masses.
        """
        r.inflight.clear()
        if "mass" not in r.state:
            self.start(r)  # other numbers of workers may need weights
            return {}
        own = weight(r.state["mass"]) if before else weight(r.state["mass"]).zero_()
        held = r.comm.all_reduce_(own.view(1)).wait()
        if before == r.comm.size and abs(before - float(held)) < _EXACT * before:
            if self._weightless(before):
                r.x.copy_(mean_(r.comm, numerator(r.state.pop("mass"))).wait())
                del r.state["debiased"]
            return {"lost_weight": 0.0}
        del r.state["mass"], r.state["debiased"]  # one that is alone needs neither
        self.start(r)
        return {"lost_weight": before - float(held)} if before else {}

    def _push_(self, r: Replica, mass: Tensor) -> None:
        """Send the vector, keep this worker's own share, and add the shares sent `staleness` steps ago."""
        step, due = r.step - 1, r.step - 1 - self.staleness
        now = self._shares(r, step)
        if self.staleness:
            # Collect before the new message is sent: sharing the link, both would be late, and the link idle after.
            received = r.collect(_name(due))
            r.launch(_name(step), r.comm.send_recv(mass.clone(), now.dst, now.src))
        else:
            received = r.comm.send_recv(mass, now.dst, now.src).wait()
        # In the first `staleness` steps no message is due yet, and a worker keeps only its own share.
        shares = now._replace(weights=() if received is None else self._shares(r, due).weights)
        if mass is r.x:
            r.record_distance(mass, received or [])
        else:
            messages = [mass, *(received or [])]
            r.record_distance(numerator(mass), [numerator(y) for y in messages[1:]], [weight(y) for y in messages])
        (mix_ if mass is r.x else mix_mass_)(mass, received or [], shares)

    def _in_flight(self, r: Replica) -> Iterator[tuple[str, Peers]]:
        """The messages in flight, oldest first, with the shares by which they will be added."""
        for step in range(r.step - self.staleness, r.step):
            if _name(step) in r.inflight:
                yield _name(step), self._shares(r, step)._replace(own=1.0)

    def _shares(self, r: Replica, step: int) -> Peers:
        return exact_weights(self.topology, r.comm.rank, r.comm.size, step, r.x.dtype)

    def _weightless(self, size: int) -> bool:
        """Whether no weight is needed: it stays one forever, or the biased form was asked for."""
        return self.biased or size == 1 or (not self.staleness and doubly_stochastic(self.topology, size))


def _name(step: int) -> str:
    return f"shares of step {step}"
