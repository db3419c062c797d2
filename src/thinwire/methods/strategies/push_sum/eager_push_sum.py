# SPDX-License-Identifier: Apache-2.0
"""Send shares of the parameters along a directed graph, and add received shares as soon as they arrive."""

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated

from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.replica.point_to_point import open_mailbox
from thinwire.core.replica.replica import Replica
from thinwire.core.validation import Range
from thinwire.methods.reduce.compressed_all_reduce import mean_
from thinwire.methods.strategies.base import At, Strategy
from thinwire.methods.strategies.push_sum.mass import debias_, mass_of, mix_mass_, numerator, weight
from thinwire.methods.strategies.traits import Traits
from thinwire.methods.topology.base import Peers, Topology, check_edges
from thinwire.methods.topology.exact_weights import exact_weights
from thinwire.methods.topology.exponential import OnePeerExponential
from thinwire.registry import registered


@registered
class EagerPushSum(Strategy):
    r"""Overlap SGP without a schedule: at every step add the messages that have arrived, and wait only for old ones.

    With $P^k$ column-stochastic, $w_i = 1$ at first and $z_i = x_i / w_i$ the de-biased parameters, which the model
    holds, worker $i$ at the end of its step $k$

    $$x_i \leftarrow x_i - \gamma\, d_i(z_i), \qquad \text{sends } (x_i, w_i), \qquad
      (x_i, w_i) \leftarrow P^k_{ii} (x_i, w_i) + \sum_{(j, s)} P^s_{ij} (x_j^s, w_j^s), \qquad
      z_i \leftarrow x_i / w_i ,$$

    where the sum is over all messages that have arrived since the last step. Before step $k$ ends, the worker waits
    only for messages that were sent at steps $s \le k - \tau$. A slow worker therefore delays its receivers only when
    it is more than $\tau$ of their steps behind. Messages are unscaled; the receiver knows the sender's shares. The
    sums over workers of $x$ and of $w$, messages in flight included, change by updates only.

    `staleness=0` is `PushSum` with weights. Otherwise results depend on timing, and a resumed run keeps all mass, but
    does not give the same bits; `PushSum(staleness=...)` is the same method on a fixed schedule.
    Traffic: one vector and 8 bytes per neighbor and step. State: `mass`, the vector of $x$ and $w$ together, and
    `debiased`, $z$ before the step; messages in flight, at most $\tau + 2$ from each neighbor.

    Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019, arXiv:1811.10792, Algorithm 2.

    Args:
        topology: any graph that connects all workers over its period; it may be directed, and may change.
        staleness: $\tau$, steps that a message may be late before its receiver waits; more tolerates slower workers and
            links, and delays agreement.

    Example:
        In any order of messages, the mean of the workers changes by the mean of their updates:

        >>> import torch
        >>> import thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     worker = thinwire.attach(model, optimizer, thinwire.EagerPushSum(staleness=2), comm=comm)
        ...     for _ in range(4):
        ...         model.weight.grad = torch.full_like(model.weight, comm.rank)
        ...         optimizer.step()
        ...     with worker.consensus():
        ...         return round(model.weight.item(), 3)
        >>> thinwire.run_threads(3, train)
        [-4.0, -4.0, -4.0]
    """

    topology: Topology = OnePeerExponential()
    staleness: Annotated[int, Range("0..", "1 hides a step's transfer")] = 1

    paper = "Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019, arXiv:1811.10792"
    waits = "each worker waits for neighbors that are more than `staleness` steps behind it"
    limits = (
        "results depend on timing; workers hold different parameters between averages of all; end training on all "
        "ranks together"
    )

    @cached_property
    def traits(self) -> Traits:
        """See `Traits`."""
        return Traits(topology=self.topology, timing_dependent=True, on_resize="start")

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Check that the graph exists for this number of workers, is connected, and conserves mass."""
        check_edges(self.topology, size)

    def start(self, r: Replica) -> None:
        """Give every worker the weight one, and open the mailbox."""
        if r.comm.size == 1:
            return
        r.state["mass"] = mass_of(r.x)
        r.state["debiased"] = r.x.clone()
        # The staleness rule keeps a sender at most this many messages ahead of its receiver. So a send waits for slow
        # workers only, and no cycle of workers can wait for room in each other's mailboxes.
        open_mailbox(r, r.state["mass"], capacity=self.staleness + 2)

    def after_step(self, r: Replica) -> None:
        """Apply the update to the mass, send it, add the messages that have arrived, and de-bias."""
        if r.comm.size == 1:
            return
        mass, debiased, box = r.state["mass"], r.state["debiased"], r.comm.mailbox(r)
        # The optimizer changed z; x changes by the same amount, as in the paper.
        numerator(mass).sub_(debiased.sub_(r.x))
        now = self._shares(r, r.step - 1)
        for rank in now.dst:
            # Unscaled, so that all neighbors get the same vector; each multiplies it by its share.
            box.send(rank, mass)
        for rank in now.src:
            r.launch(_name(r.step - 1, rank), box.expect(rank, mass).then(lambda message: [message.content]))
        self._absorb_(r, mass, now.own)
        debias_(r, mass)

    def restart(self, r: Replica) -> None:
        """Give every worker the parameters with the weight one, and drop messages in flight."""
        # Awaited, so that a receiver cannot mistake them for messages of the new round.
        for name in list(r.inflight):
            r.collect(name)
        if r.comm.size > 1:
            r.state["mass"] = mass_of(r.x)
            r.state["debiased"].copy_(r.x)

    def average(self, r: Replica, at: At = "now") -> Tensor:
        """Return the total mass, messages in flight included, divided by the total weight, the number of workers."""
        if r.comm.size == 1:
            return r.x
        mass = r.state["mass"] if at == "outer" else r.state["mass"].clone()
        for name, _, share in self._in_flight(r):
            mix_mass_(mass, r.inflight[name].wait(), _only(share))
        return mean_(r.comm, numerator(mass)).wait().to(r.x.dtype)

    def _absorb_(self, r: Replica, mass: Tensor, own: float) -> None:
        """Keep this worker's own share, and add the messages that have arrived or are due."""
        messages, shares, ages, waits = list[Tensor](), list[float](), [0], 0
        for name, age, share in list(self._in_flight(r)):
            arrived = r.inflight[name].ready
            if arrived or age >= self.staleness:
                messages += r.inflight.pop(name).wait()
                shares.append(share)
                ages.append(age)
                waits += not arrived
        weights = [weight(each) for each in (mass, *messages)]
        r.record_distance(numerator(mass), [numerator(message) for message in messages], weights)
        mix_mass_(mass, messages, Peers((), (), own, tuple(shares)))
        r.metrics["messages_waited_for"] = float(waits)
        r.metrics["message_age_steps"] = float(max(ages))

    def _in_flight(self, r: Replica) -> Iterator[tuple[str, int, float]]:
        """Yield the name, the age in steps and the share of each message in flight, oldest first."""
        # Older messages cannot be in flight, because the worker has waited for them.
        for step in range(max(0, r.step - 1 - self.staleness), r.step):
            shares = self._shares(r, step)
            for rank, share in zip(shares.src, shares.weights, strict=True):
                if _name(step, rank) in r.inflight:
                    yield _name(step, rank), r.step - 1 - step, share

    def _shares(self, r: Replica, step: int) -> Peers:
        return exact_weights(self.topology, r.comm.rank, r.comm.size, step, r.x.dtype)


def _name(step: int, rank: int) -> str:
    return f"share of step {step} from rank {rank}"


def _only(share: float) -> Peers:
    """Return weights that add one message to the own vector."""
    return Peers((), (), 1.0, (share,))
