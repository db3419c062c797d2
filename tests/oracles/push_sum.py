"""Overlap SGP once more, straight from its paper, and a hand that runs all its workers in one thread, in any order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tests.oracles.common import Descent, Gradient, Mixing
from tests.problems import Irregular
from thinwire import PushSum, Replica, Topology
from thinwire.comm.threads import Hub, ThreadComm
from thinwire.topology import Peers


def overlap_push_sum(
    gradient: Gradient,
    x: Tensor,
    descend: Descent,
    steps: int,
    *,
    mixing: Mixing,
    staleness: int,
    biased: bool = False,
    averaged: Sequence[int] = (),
) -> Tensor:
    """Overlap SGP, Algorithm 2: what is sent in step k arrives at the end of step k + staleness; returns z.

    Args:
        gradient: all workers' at their rows of the parameters.
        x: a row for each worker.
        descend: their SGD.
        steps: how many.
        mixing: the columns are how each worker splits what is its own.
        staleness: steps on the way.
        biased: the weights are left out.
        averaged: after these steps everything, in flight too, is taken in and averaged.
    """
    w, z, sent = torch.ones(len(x), 1, dtype=x.dtype), x, list[tuple[Tensor, Tensor]]()
    for k in range(steps):
        x = x + descend(z, gradient(z, k), k)
        share = mixing(k)
        kept = share.diagonal()[:, None]
        away = share - torch.diag(share.diagonal())
        sent.append((away @ x, away @ w))
        x, w = kept * x, kept * w
        if len(sent) > staleness:
            x, w = (mine + theirs for mine, theirs in zip((x, w), sent.pop(0), strict=True))
        if k + 1 in averaged:
            x = (x.sum(0) + sum(away_x.sum(0) for away_x, _ in sent)).expand_as(x) / len(x)
            w, sent = torch.ones_like(w), []
        z = x if biased else x / w
    return z


@dataclass(frozen=True)
class Lopsided(Topology):
    """Everyone sends to the next rank, and rank 0 to all: worker 0 gives most of itself away."""

    def peers(self, rank: int, size: int, step: int) -> Peers:
        return _lopsided(rank, size)


@lru_cache
def _lopsided(rank: int, size: int) -> Peers:
    targets = [sorted({(i + 1) % size} if i else set(range(1, size))) for i in range(size)]
    src = tuple(i for i in range(size) if rank in targets[i])
    weights = tuple(1 / (len(targets[i]) + 1) for i in src)
    return Peers(tuple(targets[rank]), src, 1 / (len(targets[rank]) + 1), weights)


@dataclass(frozen=True)
class Tabled(Topology):
    """`Irregular`, looked up."""

    def peers(self, rank: int, size: int, step: int) -> Peers:
        return _tabled(rank, size, step % 2)

    def period(self, size: int) -> int:
        return 2


@lru_cache
def _tabled(rank: int, size: int, step: int) -> Peers:
    return Irregular().peers(rank, size, step)


class Hand:
    """All workers of one strategy, moved one step at a time, by hand.

    A worker may be moved when what it will wait for has been sent, and the order is otherwise free: each order is one
    way in which a network and the workers' paces may let a run go.
    """

    def __init__(self, strategy: PushSum, starts: Tensor, *, timeout: float = 5.0) -> None:
        self.strategy, hub = strategy, Hub(len(starts))
        self.replicas = [
            Replica(
                x.clone(),
                torch.empty(0),
                ThreadComm(hub, rank, timeout=timeout),
                lr=lambda: 0.0,
            )
            for rank, x in enumerate(starts)
        ]
        for r in self.replicas:
            strategy.start(r)

    def move(self, rank: int, update: Tensor | float = 0.0) -> None:
        """One step of one worker."""
        r = self.replicas[rank]
        r.x.add_(update)
        r.step += 1
        self.strategy.after_step(r)

    def ready(self, rank: int) -> bool:
        """Whether a worker's next step would find all that it waits for."""
        due = self.replicas[rank].step - self.strategy.staleness
        sources = self.strategy.topology.peers(rank, len(self.replicas), due).src if due >= 0 else ()
        return all(self.replicas[j].step > due for j in sources)

    def run(
        self, steps: int, update: Callable[[int, Tensor], Tensor | float] | None = None, *, seed: int = 0
    ) -> Tensor:
        """Move workers in an order drawn from a seed, until all have done as many steps; returns where they are.

        Args:
            steps: counted from the first.
            update: what a worker's optimizer adds, given the rank and the parameters; nothing when None.
            seed: of the order.
        """
        draw = random.Random(seed)
        while left := [rank for rank, r in enumerate(self.replicas) if r.step < steps and self.ready(rank)]:
            rank = draw.choice(left)
            self.move(rank, 0.0 if update is None else update(rank, self.replicas[rank].x))
        return torch.stack([r.x.clone() for r in self.replicas])
