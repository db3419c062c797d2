"""Let every worker move shared parameters when it is ready, however old what it started from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal
from weakref import proxy

import torch
from torch import Tensor

from thinwire.comm.mailbox.base import Mailbox, Message
from thinwire.comm.work import Work
from thinwire.replica.point_to_point import open_mailbox
from thinwire.replica.replica import Replica
from thinwire.strategies.base import Strategy
from thinwire.validation import check_kinds

_PUSH, _STILL = 1, 2


@dataclass(frozen=True)
class ParameterServer(Strategy):
    r"""Asynchronous SGD: workers push updates to shared parameters and pull what these have become, at their own pace.

    A worker that has read the parameters as of version $t - \tau$ and comes back when they are at version $t$ moves
    them all the same:

    $$x_{t+1} \leftarrow x_t - \gamma\, s(\tau)\, g_i(x_{t - \tau}) .$$

    $\tau$ is its staleness: how many others came in between, about n - 1 among equals. On a quadratic of curvature $a$
    with constant staleness this converges where $\gamma a < 2 \sin\big(\pi / (2 (2 \tau + 1))\big)$: 2 without, 1 at
    one, 0.35 at four. Workers' optimizers make the updates, with momentum of their own where they have one.

    There is no server process: each of the n workers keeps an n-th of the parameters, and answers for it while it
    computes. One worker alone is its optimizer. Results depend on timing.
    Traffic: $\frac{n-1}{n}$ of the parameters out and as much in per worker and step for its own pushes, and as much
    again for those that it answers. State: `published`, its part of the parameters; `snapshot`, what it read last; and
    a few counters.

    Chen et al., Revisiting Distributed Synchronous SGD, 2016, arXiv:1604.00981, Algorithms 1 and 2 (Async-Opt). Scaling
    by staleness: Zhang, Gupta, Lian and Liu, Staleness-aware Async-SGD, IJCAI 2016, arXiv:1511.05950.

    Args:
        scaling: $s$: "none" is 1; "staleness" is $1 / \max(1, \tau)$, which keeps old gradients from overshooting.
    """

    scaling: Literal["none", "staleness"] = "none"

    paper = "Chen et al., Revisiting Distributed Synchronous SGD, 2016, arXiv:1604.00981"
    waits = "each worker waits at every step for answers of all, who answer while they compute; nobody waits for steps"
    limits = "gradients are stale, about as many steps as there are other workers; results depend on timing"

    def __post_init__(self) -> None:
        """Check the kinds."""
        check_kinds(self)

    def start(self, r: Replica) -> None:
        """Take one's part of the parameters, and open the mailbox."""
        if r.comm.size == 1:
            return
        size, others = r.comm.size, [rank for rank in range(r.comm.size) if rank != r.comm.rank]
        r.state["snapshot"] = r.x.clone()
        r.state["published"] = _parts(r.x, size)[r.comm.rank].clone()
        r.state["version"] = torch.zeros(1, dtype=torch.int64)
        r.state["read"] = torch.zeros(size, dtype=torch.int64)
        r.state["stood"] = torch.zeros(size, dtype=torch.int64)
        r.state["moved"] = torch.full((1,), -1, dtype=torch.int64)
        r.state["staleness"] = torch.zeros(2, dtype=torch.int64)
        box, me = open_mailbox(r, r.state["published"]), proxy(r)
        box.answer(_PUSH, partial(self._answer, me, proxy(box)), like=r.state["published"], src=others)
        box.answer(_STILL, partial(_note, me), like=torch.zeros(1, dtype=torch.int64), src=others)

    def after_step(self, r: Replica) -> None:
        """Push the update, and go on from what the parameters have become."""
        if r.comm.size == 1:
            return
        box, size, rank = r.comm.mailbox(r), r.comm.size, r.comm.rank
        r.inflight.pop("still", None)
        with box.changed:
            r.state["moved"].fill_(r.state["stood"][rank])
        updates = _parts(r.x - r.state["snapshot"], size)
        others = [(rank + turn) % size for turn in range(1, size)]
        for other in others:
            box.send(other, updates[other], topic=_PUSH)
            # Each look answers what was put aside; a wire that only counts is written to once a look.
            box.retry()
        parts = dict[int, Tensor]()
        with box.changed:
            parts[rank] = self._move(r, rank, updates[rank]).clone()
        for other in others:
            parts[other] = box.expect(other, updates[other]).wait().content
        r.x.copy_(torch.cat([parts[each] for each in range(size)])[: r.x.numel()])
        r.state["snapshot"].copy_(r.x)
        self._notice(r, box)
        r.launch("still", Work(lambda: _stand_still(r)))

    def average_(self, r: Replica) -> None:
        """Everyone reads the shared parameters."""
        r.x.copy_(self.consensus(r))
        if r.comm.size > 1:
            r.state["snapshot"].copy_(r.x)

    def consensus(self, r: Replica) -> Tensor:
        """The shared parameters, when all have pushed what they had."""
        if r.comm.size == 1:
            return r.x
        r.wait_pending()
        return torch.cat(r.comm.all_gather(r.state["published"]).wait())[: r.x.numel()]

    def _answer(self, r: Replica, box: Mailbox, message: Message) -> bool:
        """Take in an update, in whatever thread, and say what has become of the parameters.

        Where its worker stood still and this one has not moved since, it waits: it belongs to what comes after.
        """
        if r.state["stood"][message.src] > r.state["moved"][0]:
            return False
        box.send(message.src, self._move(r, message.src, message.content))
        return True

    def _move(self, r: Replica, src: int, update: Tensor) -> Tensor:
        """Apply a worker's update to the own part, which it reads now."""
        version, read = r.state["version"], r.state["read"]
        staleness = int(version[0] - read[src])
        scale = 1 / max(1, staleness) if self.scaling == "staleness" else 1.0
        version.add_(1)
        read[src] = version[0]
        r.state["staleness"].add_(torch.tensor([staleness, 1]))
        return r.state["published"].add_(update, alpha=scale)

    def _notice(self, r: Replica, box: Mailbox) -> None:
        with box.changed:
            total, count = r.state["staleness"].tolist()
            r.state["staleness"].zero_()
        r.metrics["staleness_steps"] = total / max(1, count)


def _parts(x: Tensor, size: int) -> Sequence[Tensor]:
    """A vector in so many parts of one length; the last ones are filled up with zeros."""
    length = -(-x.numel() // size)
    filled = torch.cat([x, x.new_zeros(size * length - x.numel())])
    return filled.split(length)


def _note(r: Replica, message: Message) -> bool:
    """A worker stands still once more."""
    r.state["stood"][message.src] += 1
    return True


def _stand_still(r: Replica) -> list[Tensor]:
    """Wait until all do; their updates are answered meanwhile."""
    box, rank, stood = r.comm.mailbox(r), r.comm.rank, r.state["stood"]
    with box.changed:
        stood[rank] += 1
        for other in range(r.comm.size):
            if other != rank:
                box.send(other, stood[rank].view(1), topic=_STILL)
        box.until(
            lambda: [other for other in range(r.comm.size) if stood[other] < stood[rank]],
            "all workers to end their steps",
        )
    return []
