# SPDX-License-Identifier: Apache-2.0
"""Send shares of the parameters along a directed graph, and add received shares as soon as they arrive."""

from collections.abc import Iterator
from typing import Annotated

from torch import Tensor

from thinwire.core.replica.point_to_point import open_mailbox
from thinwire.core.replica.replica import Replica
from thinwire.core.validation import Range
from thinwire.methods.strategies.base import Traits
from thinwire.methods.strategies.push_sum.mass import mix_mass_, numerator, weight
from thinwire.methods.strategies.push_sum.push_sum import MassStrategy
from thinwire.methods.topology.base import Peers
from thinwire.registry import registered


@registered
class EagerPushSum(MassStrategy):
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

    staleness: Annotated[int, Range("0..", "1 hides a step's transfer")] = 1

    waits = "each worker waits for neighbors that are more than `staleness` steps behind it"
    limits = (
        "results depend on timing; workers hold different parameters between averages of all; end training on all "
        "ranks together"
    )

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return Traits(topology=self.topology, timing_dependent=True, on_resize="start")

    def start(self, r: Replica) -> None:
        """Give every worker the weight one, and open the mailbox."""
        super().start(r)
        if r.comm.size > 1:
            # The staleness rule keeps a sender at most this many messages ahead of its receiver. So a send waits for
            # slow workers only, and no cycle of workers can wait for room in each other's mailboxes.
            open_mailbox(r, r.state["mass"], capacity=self.staleness + 2)

    def push_(self, r: Replica, mass: Tensor) -> None:
        """Send the mass, and add the messages that have arrived or are due."""
        if r.comm.size == 1:
            return
        box, now = r.comm.mailbox(r), self.shares(r, r.step - 1)
        for rank in now.dst:
            # Unscaled, so that all neighbors get the same vector; each multiplies it by its share.
            box.send(rank, mass)
        for rank in now.src:
            r.launch(_name(r.step - 1, rank), box.expect(rank, mass).then(lambda message: [message.content]))
        messages, shares, ages, waits = list[Tensor](), list[float](), [0], 0
        for name, age, share in list(self._messages(r)):
            arrived = r.inflight[name].ready
            if arrived or age >= self.staleness:
                messages += r.inflight.pop(name).wait()
                shares.append(share)
                ages.append(age)
                waits += not arrived
        weights = [weight(each) for each in (mass, *messages)]
        r.record_distance(numerator(mass), [numerator(message) for message in messages], weights)
        mix_mass_(mass, messages, Peers((), (), now.own, tuple(shares)))
        r.metrics["messages_waited_for"] = float(waits)
        r.metrics["message_age_steps"] = float(max(ages))

    def in_flight(self, r: Replica) -> Iterator[tuple[str, Peers]]:
        """Yield the messages in flight, oldest first, with weights that add one of them to the mass."""
        return ((name, Peers((), (), 1.0, (share,))) for name, _, share in self._messages(r))

    def _messages(self, r: Replica) -> Iterator[tuple[str, int, float]]:
        """Yield the name, the age in steps and the share of each message in flight, oldest first."""
        # Older messages cannot be in flight, because the worker has waited for them.
        for step in range(max(0, r.step - 1 - self.staleness), r.step):
            shares = self.shares(r, step)
            for rank, share in zip(shares.src, shares.weights, strict=True):
                if _name(step, rank) in r.inflight:
                    yield _name(step, rank), r.step - 1 - step, share


def _name(step: int, rank: int) -> str:
    return f"share of step {step} from rank {rank}"
