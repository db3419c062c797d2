"""The asynchronous methods once more, straight from their papers: all workers in one matrix, events one after another.

And hands that run the real strategies in a given order of steps, in one thread.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import Comm, Replica, Strategy, run_threads
from thinwire.comm.threads import Delay
from thinwire.topology.base import Peers, Topology

Gradient = Callable[[int, Tensor, int], Tensor]
"""One worker's gradient: of (rank, its parameters, its step)."""


@dataclass(frozen=True)
class TwoSides(Topology):
    """Everyone on one side with everyone on the other, odd ranks with even ones; one partner a step, in turn."""

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


def uneven(size: int, steps: int, seed: int, slow: Sequence[float] = ()) -> Iterator[int]:
    """Ranks in the order in which they end their steps: as many each, at speeds of their own."""
    draw = random.Random(seed)
    left = [steps] * size
    speeds = list(slow) or [draw.uniform(0.3, 3) for _ in range(size)]
    while any(left):
        (rank,) = draw.choices(range(size), [speed if n else 0 for speed, n in zip(speeds, left, strict=True)])
        left[rank] -= 1
        yield rank


def pair_averages(gradient: Gradient, x: Tensor, rate: float, order: Sequence[int], topology: Topology) -> Tensor:
    """AD-PSGD in its delta form, where messages take no time: event by event, each a matrix on all rows.

    Odd ranks ask. What a worker that answers reads for its next gradient is its row as its step ends; one that asks
    sees what an exchange has made of its row when its next step ends. Who is asked before it has ended a step answers
    then, and averages with what was sent. Returns all rows.

    Args:
        gradient: of one worker.
        x: a row for each worker.
        rate: the learning rate.
        order: ranks as they end their steps.
        topology: the partners.
    """
    size = len(x)
    x, read = x.clone(), x.clone()
    steps, waiting = [0] * size, dict[int, list[tuple[int, Tensor]]]()

    def average(i: int, j: int, sent: Tensor) -> None:
        to_and_from = torch.zeros(size, 1, dtype=x.dtype)
        to_and_from[i], to_and_from[j] = 0.5, -0.5
        x.add_(to_and_from @ (x[j] - sent)[None])

    for i in order:
        x[i] -= rate * gradient(i, read[i], steps[i])
        read[i] = x[i]
        steps[i] += 1
        for asker, sent in waiting.pop(i, []):
            average(asker, i, sent)
        if i % 2 == 0 or any(i == asker for queue in waiting.values() for asker, _ in queue):
            continue
        (j,) = topology.peers(i, size, steps[i] - 1).dst
        if steps[j]:
            average(i, j, x[i].clone())
        else:
            waiting.setdefault(j, []).append((i, x[i].clone()))
    return x


def eager_push_sum(
    gradient: Callable[[Tensor, int], Tensor],
    x: Tensor,
    rate: float,
    steps: int,
    *,
    mixing: Callable[[int], Tensor],
    staleness: int,
    delay: Delay,
) -> tuple[Tensor, Tensor, list[int]]:
    """Overlap SGP, Algorithm 2 with the wait rule by edges: absorb what has come, wait for what is too old.

    Args:
        gradient: all workers' at their rows.
        x: a row for each worker.
        rate: the learning rate.
        steps: how many.
        mixing: the columns are how each worker splits what is its own.
        staleness: steps that a message may be late.
        delay: steps that it is.

    Returns:
        The de-biased rows after each step, the weights after each step, and how many messages were waited for in each.
    """
    size = len(x)
    w, z = torch.ones(size, 1, dtype=x.dtype), x.clone()
    x, messages = x.clone(), list[tuple[int, int, int, Tensor, Tensor]]()
    seen_z, seen_w, waits = list[Tensor](), list[Tensor](), list[int]()
    for k in range(steps):
        x = x - rate * gradient(z, k)
        share = mixing(k)
        for i in range(size):
            for j in (j for j in range(size) if j != i and share[j, i] > 0):
                messages.append((k, i, j, share[j, i] * x[i], share[j, i] * w[i]))
        x, w = share.diagonal()[:, None] * x, share.diagonal()[:, None] * w
        come = [s + delay(i, j, s) <= k for s, i, j, _, _ in messages]
        due = [s + staleness <= k for s, *_ in messages]
        for here, must, (_, _, j, dx, dw) in zip(come, due, messages, strict=True):
            if here or must:
                x[j] += dx
                w[j] += dw
        waits.append(sum(must and not here for here, must in zip(come, due, strict=True)))
        messages = [each for each, here, must in zip(messages, come, due, strict=True) if not (here or must)]
        z = x / w
        seen_z.append(z)
        seen_w.append(w)
    return torch.stack(seen_z), torch.stack(seen_w), waits


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
