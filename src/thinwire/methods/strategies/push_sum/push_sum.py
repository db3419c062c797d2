# SPDX-License-Identifier: Apache-2.0
"""Send shares of the parameters along a directed graph, and divide by a weight to remove the bias."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.replica.replica import Replica
from thinwire.core.validation import Range
from thinwire.methods.reduce.compressed_all_reduce import mean_, mix_
from thinwire.methods.reduce.leaving import hand_on
from thinwire.methods.strategies.base import At, Rounds, Strategy, Traits
from thinwire.methods.strategies.push_sum.mass import debias_, inherit_mass_, mass_of, mix_mass_, numerator, weight
from thinwire.methods.topology.base import Peers, Topology, check_edges, doubly_stochastic
from thinwire.methods.topology.exact_weights import exact_weights
from thinwire.methods.topology.exponential import OnePeerExponential
from thinwire.registry import registered

# The weights of all workers sum to their number, up to rounding in fp64.
_EXACT = 1e-9


@dataclass(frozen=True)
class MassStrategy(Strategy):
    """Share parameters and a weight with neighbors, and train at their quotient.

    `r.state["mass"]` has both, and `r.state["debiased"]` the quotient before the step.
    """

    topology: Topology = OnePeerExponential()
    staleness: Annotated[int, Range("0..", "1 hides a step's transfer")] = 0

    paper = "Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019, arXiv:1811.10792"

    @abstractmethod
    def push_(self, r: Replica, mass: Tensor) -> None:
        """Send the mass, keep this worker's own share, and add the shares of others that are due."""

    @abstractmethod
    def in_flight(self, r: Replica) -> Iterable[tuple[str, Peers]]:
        """Return the names of the messages in flight, oldest first, and the weights that add them to the mass."""

    def weightless(self, size: int) -> bool:
        """Return True if weights are not used, so that no state is needed."""
        return size == 1

    def shares(self, r: Replica, step: int) -> Peers:
        """Return the neighbors of a step and their shares."""
        return exact_weights(self.topology, r.comm.rank, r.comm.size, step, r.x.dtype)

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Check that the graph exists for this number of workers, is connected, and conserves mass."""
        check_edges(self.topology, size)

    def start(self, r: Replica) -> None:
        """Give every worker the weight one."""
        if not self.weightless(r.comm.size):
            r.state["mass"] = mass_of(r.x)
            r.state["debiased"] = r.x.clone()

    def after_step(self, r: Replica) -> None:
        """Apply the update to the mass, exchange shares, and de-bias."""
        if self.weightless(r.comm.size):
            self.push_(r, r.x)
            return
        mass, debiased = r.state["mass"], r.state["debiased"]
        # The optimizer changed z; x changes by the same amount, as in the paper.
        numerator(mass).sub_(debiased.sub_(r.x))
        self.push_(r, mass)
        debias_(r, mass)

    def average(self, r: Replica, at: At = "now") -> Tensor:
        """Return the total mass, messages in flight included, divided by the total weight, the number of workers."""
        if self.weightless(r.comm.size):
            return Strategy.average(self, r, at)
        mass = r.state["mass"] if at == "outer" else r.state["mass"].clone()
        for name, shares in self.in_flight(r):
            mix_mass_(mass, r.inflight[name].wait(), shares)
        return mean_(r.comm, numerator(mass)).wait().to(r.x.dtype)

    def restart(self, r: Replica) -> None:
        """Give every worker the parameters with the weight one, and drop messages in flight."""
        # Awaited, so that a receiver cannot mistake them for messages of the new round.
        for name in list(r.inflight):
            r.collect(name)
        MassStrategy.start(self, r)


@registered
class PushSum(MassStrategy):
    r"""Stochastic Gradient Push: send shares of parameters and of a weight, and train at their quotient.

    With $P^k$ column-stochastic (each worker decides only how to split its own vector), $w_i = 1$ at first and
    $z_i = x_i / w_i$ the de-biased parameters, which the model holds,

    $$x_i \leftarrow x_i - \gamma\, d_i(z_i), \qquad
      x_i \leftarrow P^k_{ii} x_i + \sum_{j \ne i} P^{k-\tau}_{ij} x_j^{k-\tau}, \qquad
      w_i \leftarrow P^k_{ii} w_i + \sum_{j \ne i} P^{k-\tau}_{ij} w_j^{k-\tau}, \qquad z_i \leftarrow x_i / w_i ,$$

    where $j$ sent $x_j^{k-\tau}$ in step $k - \tau$ and $d$ is the update of the worker's own optimizer, whose momentum
    stays local and whose weight decay acts on $z$. The sums over workers of $x$ and of $w$, messages in flight
    included, change only by the updates.

    Without staleness it is SGP: every worker waits for the shares of the current step. If the graph is doubly
    stochastic, $w$ is then always one, and neither sent nor stored. With staleness it is Overlap SGP: the shares of a
    step are in flight while later steps compute, and are added at the end of the $\tau$-th step after, even if they
    arrive earlier, so results do not depend on timing. The weights then differ from one on every graph.
    Traffic: one vector per neighbor and step, with $w$ 8 bytes more and in fp32 at least. State: none, or with $w$
    `mass`, the vector of $x$ and $w$ together, and `debiased`, $z$ before the step.

    Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019, arXiv:1811.10792, Algorithms 1
    and 2 (sending at every step).

    Args:
        topology: any graph that connects all workers over its period; it may be directed, and may change.
        staleness: $\tau$, steps that a message may be in flight; more hides longer transfers, delays agreement, and
            keeps as many messages in memory.
        biased: train at $x$ instead of $z$, without weights: the paper's ablation, which shows the effect of weights.

    Example:
        The mean of the workers, messages in flight included, changes by the mean of their updates:

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

    biased: bool = False

    waits = "at every step each worker waits for the messages that its neighbors sent `staleness` steps before"
    limits = "workers hold different parameters between averages of all; evaluate at consensus"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        # Whether weights stay one depends on the graph, which `estimates` of outer_step.py checks.
        rounds = Rounds(estimates=not self.staleness)
        return Traits(topology=self.topology, rounds=rounds, on_resize="start")

    def __post_init__(self) -> None:
        if self.biased:
            object.__setattr__(self, "limits", f"{self.limits}; biased=True is an ablation")

    def before_leave(self, r: Replica, leaving: Sequence[int]) -> None:
        """Pass a leaving worker's mass, messages in flight included, to a neighbor, and scale all to the new size.

        The weights then sum to the number of workers that stay, and the average is unchanged. Without weights, all
        restart at the mean.
        """
        if self.weightless(r.comm.size):
            super().before_leave(r, leaving)
            return
        mass, scale = r.state["mass"], 1 - len(leaving) / r.comm.size
        for name, shares in self.in_flight(r):
            mix_mass_(mass, r.inflight.pop(name).wait(), shares)
        inherit_mass_(mass, hand_on(r.comm, mass, leaving), scale)
        debias_(r, mass)

    def change_view(self, r: Replica, before: int) -> Mapping[str, float]:
        """Continue from each survivor's own parameters with the weight one; return the lost weight.

        The lost weight is that of lost workers and of messages in flight. If it is zero, as after a graceful shutdown,
        all continue with their masses.
        """
        r.inflight.clear()
        if "mass" not in r.state:
            self.start(r)  # another number of workers may need weights
            return {}
        own = weight(r.state["mass"]) if before else weight(r.state["mass"]).zero_()
        held = r.comm.all_reduce_(own.view(1)).wait()
        if before == r.comm.size and abs(before - float(held)) < _EXACT * before:
            if self.weightless(before):
                r.x.copy_(mean_(r.comm, numerator(r.state.pop("mass"))).wait())
                del r.state["debiased"]
            return {"lost_weight": 0.0}
        del r.state["mass"], r.state["debiased"]  # a single worker needs neither
        self.start(r)
        return {"lost_weight": before - float(held)} if before else {}

    def push_(self, r: Replica, mass: Tensor) -> None:
        """Send the vector, keep this worker's own share, and add the shares sent `staleness` steps ago."""
        step, due = r.step - 1, r.step - 1 - self.staleness
        now = self.shares(r, step)
        if self.staleness:
            # Collected before the new message is sent: otherwise the two would share the link and both be late.
            received = r.collect(_name(due))
            r.launch(_name(step), r.comm.send_recv(mass.clone(), now.dst, now.src))
        else:
            received = r.comm.send_recv(mass, now.dst, now.src).wait()
        # In the first `staleness` steps no message is due yet, and a worker keeps only its own share.
        then = now if due == step else self.shares(r, due)
        shares = now._replace(weights=() if received is None else then.weights)
        if mass is r.x:
            r.record_distance(mass, received or [])
        else:
            messages = [mass, *(received or [])]
            r.record_distance(numerator(mass), [numerator(y) for y in messages[1:]], [weight(y) for y in messages])
        (mix_ if mass is r.x else mix_mass_)(mass, received or [], shares)

    def in_flight(self, r: Replica) -> Iterator[tuple[str, Peers]]:
        """Yield the messages in flight, oldest first, with their shares."""
        for step in range(r.step - self.staleness, r.step):
            if _name(step) in r.inflight:
                yield _name(step), self.shares(r, step)._replace(own=1.0)

    def weightless(self, size: int) -> bool:
        """Return True if weights are not used: they always stay one, or `biased` is set."""
        return self.biased or size == 1 or (not self.staleness and doubly_stochastic(self.topology, size))


def _name(step: int) -> str:
    return f"shares of step {step}"
