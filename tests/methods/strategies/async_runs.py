# SPDX-License-Identifier: Apache-2.0
"""Real runs of asynchronous strategies in one thread: each worker's steps are taken one at a time, in any order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from thinwire import Comm, PushSum, Replica, Strategy, Topology, run_threads
from thinwire.core.comm.threads import Delay, Hub, ThreadComm
from thinwire.methods.topology import Peers


@dataclass(frozen=True)
class CompleteBipartite(Topology):
    """Every odd rank with every even one; one partner a step, in turn."""

    def peers(self, rank: int, size: int, step: int) -> Peers:
        others = [j for j in range(size) if (j - rank) % 2]
        if not others:
            return Peers((), (), 1.0, ())
        half = size // 2
        place = (rank // 2 + step) % half if rank % 2 else (rank // 2 - step) % half
        partner = (2 * place + 1 - rank % 2,)
        return Peers(partner, partner, 0.5, (0.5,))

    def period(self, size: int) -> int:
        return max(1, size // 2)


@dataclass(frozen=True)
class Lopsided(Topology):
    """Every rank sends to the next one, and rank 0 to all: worker 0 keeps the smallest share of its vector."""

    def peers(self, rank: int, size: int, step: int) -> Peers:
        return _lopsided(rank, size)


@lru_cache
def _lopsided(rank: int, size: int) -> Peers:
    targets = [sorted({(i + 1) % size} if i else set(range(1, size))) for i in range(size)]
    src = tuple(i for i in range(size) if rank in targets[i])
    weights = tuple(1 / (len(targets[i]) + 1) for i in src)
    return Peers(tuple(targets[rank]), src, 1 / (len(targets[rank]) + 1), weights)


def uneven(size: int, steps: int, seed: int, slow: Sequence[float] = ()) -> Iterator[int]:
    """Ranks in the order in which they end their steps: as many each, at speeds of their own."""
    draw = random.Random(seed)
    left = [steps] * size
    speeds = list(slow) or [draw.uniform(0.3, 3) for _ in range(size)]
    while any(left):
        (rank,) = draw.choices(range(size), [speed if n else 0 for speed, n in zip(speeds, left, strict=True)])
        left[rank] -= 1
        yield rank


def replicas(strategy: Strategy, x: Tensor, *, delay: Delay | None = None) -> list[Replica]:
    """All workers of one run, started, with their rows of `x`."""

    def begin(comm: Comm) -> Replica:
        r = Replica(x[comm.rank].clone(), x.new_empty(0), comm, lr=lambda: 0.0)
        strategy.check(comm.size)
        strategy.start(r)
        return r

    return run_threads(len(x), begin, delay=delay, timeout=20)


def end_step(strategy: Strategy, r: Replica, update: Tensor | None = None) -> None:
    """What the engine does around one step of the optimizer."""
    r.comm.step = r.step
    strategy.before_step(r)
    if update is not None:
        r.x.sub_(update)
    r.step += 1
    strategy.after_step(r)
    r.comm.step = r.step


class StepByStep:
    """All workers of a `PushSum`, one worker's step at a time.

    A worker may take a step when the messages that it will wait for have been sent; the order is otherwise free. Each
    order is one that a network and the workers' speeds may cause.
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

    def step(self, rank: int, update: Tensor | float = 0.0) -> None:
        """One step of one worker."""
        r = self.replicas[rank]
        r.x.add_(update)
        r.step += 1
        self.strategy.after_step(r)

    def ready(self, rank: int) -> bool:
        """Whether the messages that a worker's next step waits for have been sent."""
        due = self.replicas[rank].step - self.strategy.staleness
        sources = self.strategy.topology.peers(rank, len(self.replicas), due).src if due >= 0 else ()
        return all(self.replicas[j].step > due for j in sources)

    def run(
        self, steps: int, update: Callable[[int, Tensor], Tensor | float] | None = None, *, seed: int = 0
    ) -> Tensor:
        """Step workers in an order drawn from a seed, until all have done as many steps; returns their parameters.

        Args:
            steps: counted from the first.
            update: what a worker's optimizer adds, given the rank and the parameters; nothing when None.
            seed: of the order.
        """
        draw = random.Random(seed)
        while left := [rank for rank, r in enumerate(self.replicas) if r.step < steps and self.ready(rank)]:
            rank = draw.choice(left)
            self.step(rank, 0.0 if update is None else update(rank, self.replicas[rank].x))
        return torch.stack([r.x.clone() for r in self.replicas])
