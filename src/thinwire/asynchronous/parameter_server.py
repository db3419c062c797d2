# SPDX-License-Identifier: Apache-2.0
"""Asynchronous SGD: every worker updates shared parameters when it is ready, however stale its gradient is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from thinwire.core.comm.mailbox.base import Mailbox, Message
from thinwire.core.comm.work import Work
from thinwire.core.replica.point_to_point import on_message, open_mailbox, others
from thinwire.core.replica.replica import Replica
from thinwire.core.replica.rounds import Barrier
from thinwire.methods.strategies.base import At, Strategy, Traits
from thinwire.registry import registered

_PUSH = 1  # topic of the mailbox; answers are of topic 0, which `Mailbox.expect` receives
_BARRIER = Barrier("barriers", topic=2, until="to end their steps")


@registered
class ParameterServer(Strategy):
    r"""Asynchronous SGD: workers push updates to shared parameters and pull the result, each at its own pace.

    An update that worker $i$ computed from version $t - \tau$ of the parameters is applied to the current version $t$:

    $$x_{t+1} \leftarrow x_t - \gamma\, s(\tau)\, g_i(x_{t - \tau}) .$$

    $\tau$ is the staleness: how many other updates were applied in between, about n - 1 if all n workers are equally
    fast. $\gamma$ is the learning rate, and $s$ the scaling. On a quadratic of curvature $a$ with constant staleness
    this converges if $\gamma a < 2 \sin\big(\pi / (2 (2 \tau + 1))\big)$, which is 2 for $\tau = 0$, 1 for $\tau = 1$
    and 0.35 for $\tau = 4$. Each worker computes its updates with its own optimizer, momentum included.

    There is no server process: each of the n workers holds 1/n of the shared parameters, and answers the other workers'
    pushes to this part while it computes. With one worker, training is that of the optimizer alone. Results depend on
    timing.
    Traffic per worker and step: for its own pushes a worker sends $\frac{n-1}{n}$ of the parameters and receives as
    much; for the pushes that it answers, it sends and receives as much again. State: `published`, its part of the
    parameters; `snapshot`, the parameters that it read last; and a few counters.

    Chen et al., Revisiting Distributed Synchronous SGD, 2016, arXiv:1604.00981, Algorithms 1 and 2 (Async-Opt). Scaling
    by staleness: Zhang, Gupta, Lian and Liu, Staleness-aware Async-SGD, IJCAI 2016, arXiv:1511.05950.

    Args:
        scaling: $s$: "none" is 1; "staleness" is $1 / \max(1, \tau)$, which keeps stale gradients from overshooting.

    Example:
        >>> import torch, thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        ...     worker = thinwire.attach(model, optimizer, ParameterServer(), comm=comm)
        ...     for _ in range(2):
        ...         optimizer.zero_grad()
        ...         model(torch.ones(1)).sum().backward()  # the gradient is 1 wherever the parameters are
        ...         optimizer.step()
        ...     with worker.consensus() as final:  # all 3 x 2 updates of -0.5 are applied, in whatever order
        ...         return final.weight.item()
        >>> thinwire.run_threads(3, train)
        [-3.0, -3.0, -3.0]
    """

    scaling: Literal["none", "staleness"] = "none"

    paper = "Chen et al., Revisiting Distributed Synchronous SGD, 2016, arXiv:1604.00981"
    waits = "at every step each worker waits for all others' answers, sent while they compute; not for their steps"
    limits = "gradients are stale, by about as many updates as there are other workers; results depend on timing"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return Traits(
            timing_dependent=True,
            lr_factor=None,  # every worker's updates count in full, scaled or not: it depends on how many there are
            needs_equal_start=True,
            on_resize="start",
        )

    def start(self, r: Replica) -> None:
        """Copy this worker's part of the parameters, and open the mailbox that receives the other workers' pushes."""
        if r.comm.size == 1:
            return
        size = r.comm.size
        r.state["snapshot"] = r.x.clone()
        r.state["published"] = _split(r.x, size)[r.comm.rank].clone()
        r.state["version"] = torch.zeros(1, dtype=torch.int64, device="cpu")
        r.state["version_read"] = torch.zeros(size, dtype=torch.int64, device="cpu")
        r.state["barriers_at_step"] = torch.full((1,), -1, dtype=torch.int64, device="cpu")
        r.state["staleness"] = torch.zeros(2, dtype=torch.int64, device="cpu")
        open_mailbox(r, r.state["published"])
        _BARRIER.open(r, others(r))
        on_message(r, _PUSH, self._on_push, like=r.state["published"], src=others(r))

    def after_step(self, r: Replica) -> None:
        """Push this step's update to all workers, and continue from the shared parameters that they answer with."""
        if r.comm.size == 1:
            return
        box, size, rank = r.comm.mailbox(r), r.comm.size, r.comm.rank
        r.inflight.pop("barrier", None)
        with box.changed:
            r.state["barriers_at_step"].fill_(r.state["barriers"][rank])
        updates = _split(r.x - r.state["snapshot"], size)
        for other in others(r):
            box.send(other, updates[other], topic=_PUSH)
            # Answers pushes that were put aside, so that others do not wait for this worker's own step. A comm that
            # only counts answers one push for each call.
            box.process_deferred()
        parts = dict[int, Tensor]()
        with box.changed:
            parts[rank] = self._apply(r, rank, updates[rank]).clone()
        for other in others(r):
            parts[other] = box.expect(other, updates[other]).wait().content
        r.x.copy_(torch.cat([parts[each] for each in range(size)])[: r.x.numel()])
        r.state["snapshot"].copy_(r.x)
        with box.changed:
            total, count = r.state["staleness"].tolist()
            r.state["staleness"].zero_()
        r.metrics["staleness_steps"] = total / max(1, count)
        # Waited for only by consensus(), save() and detach().
        r.launch("barrier", Work(lambda: _barrier(r)))

    def restart(self, r: Replica) -> None:
        """The parameters become the shared ones; each worker keeps its part of them."""
        if r.comm.size == 1:
            return
        r.wait_pending()
        # After the barrier pushes are put aside until this worker's next step, so none is applied to the old part.
        with r.comm.mailbox(r).changed:
            r.state["published"].copy_(_split(r.x, r.comm.size)[r.comm.rank])
            r.state["snapshot"].copy_(r.x)

    def average(self, r: Replica, at: At = "now") -> Tensor:
        """Return the shared parameters, after all workers have pushed their updates."""
        if r.comm.size == 1:
            return r.x
        r.wait_pending()
        return torch.cat(r.comm.all_gather(r.state["published"]).wait())[: r.x.numel()]

    def _on_push(self, r: Replica, box: Mailbox, message: Message) -> bool:
        """Apply another worker's update, in whatever thread it arrives, and answer with the new parameters.

        An update that was sent after a barrier is put aside until this worker has taken a step after it too: between
        the two, this worker may be evaluating or saving the parameters.
        """
        if _BARRIER.reached(r, message.src, int(r.state["barriers_at_step"]) + 1):
            return False
        box.send(message.src, self._apply(r, message.src, message.content))
        return True

    def _apply(self, r: Replica, src: int, update: Tensor) -> Tensor:
        """Apply a worker's update to this worker's part, which reads the result."""
        version, read = r.state["version"], r.state["version_read"]
        staleness = int(version[0] - read[src])
        scale = 1 / max(1, staleness) if self.scaling == "staleness" else 1.0
        version.add_(1)
        read[src] = version[0]
        r.state["staleness"].add_(torch.tensor([staleness, 1], dtype=torch.int64, device="cpu"))
        return r.state["published"].add_(update, alpha=scale)


def _split(x: Tensor, size: int) -> Sequence[Tensor]:
    """Return a vector in `size` parts of one length; the last ones are padded with zeros."""
    length = -(-x.numel() // size)
    padded = torch.cat([x, x.new_zeros(size * length - x.numel())])
    return padded.split(length)


def _barrier(r: Replica) -> list[Tensor]:
    """Wait until all workers are here; their updates are answered meanwhile."""
    with r.comm.mailbox(r).changed:
        count = r.state["barriers"][r.comm.rank].add_(1)
    _BARRIER.reach(r, int(count), dst=others(r))
    _BARRIER.wait(r, int(count), src=others(r))
    return []
