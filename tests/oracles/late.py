# SPDX-License-Identifier: Apache-2.0
"""Rounds that late work joins, replayed from the order of arrivals: one loop over all workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

Arrival = tuple[int, int, float]
"""The worker, the round in which it started, and its tokens."""


def replay(
    displacement: Callable[[int, int, Tensor], Tensor],
    start: Tensor,
    rounds: Sequence[Sequence[Arrival]],
    *,
    rate: float,
    exponent: float | None,
    code: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Each round takes what has arrived; the point moves by `rate` along the weighted mean.

    Args:
        displacement: of a worker that starts in a round at a point.
        start: the first point.
        rounds: what arrives in each.
        rate: of the outer step.
        exponent: of one plus the age, in the discount; None drops late work.
        code: of messages, whose errors each worker adds to its next one.
    """
    points, errors = [start], dict[int, Tensor]()
    for number, arrivals in enumerate(rounds):
        total, weight = torch.zeros_like(start), 0.0
        for worker, started, tokens in sorted(arrivals, key=lambda each: (each[1], each[0])):
            message = displacement(worker, started, points[started]) + errors.get(worker, torch.zeros_like(start))
            if code is not None:
                sent = code(message)
                errors[worker], message = message - sent, sent
            age = number - started
            share = tokens * (0.0 if age and exponent is None else (1 + age) ** -(exponent or 0.0))
            total, weight = total + share * message, weight + share
        points.append(points[-1] + rate * total / weight if weight else points[-1])
    return points[-1]


Gradient = Callable[[int, int, Tensor], Tensor]
"""Of a worker, at its own number of steps, at its parameters."""


def train(
    gradient: Gradient,
    start: Tensor,
    log: Sequence[Sequence[Arrival]],
    *,
    samples: Callable[[int], float],
    rate: float,
    outer: Callable[[Tensor, Tensor], Tensor],
    exponent: float | None,
    code: Callable[[Tensor], Tensor] | None = None,
    delay: int = 0,
    carry: str = "off",
    turned: Sequence[slice] = (),
) -> Tensor:
    """Workers that take local steps of SGD, from the order in which their work arrives.

    Args:
        gradient: of a worker.
        start: the first point.
        log: what each round takes.
        samples: of one step of a worker.
        rate: of the local steps.
        outer: the next point from a point and the mean displacement of its round.
        exponent: of one plus the age, in the discount; None drops late work.
        code: of messages, whose errors each worker adds to its next one.
        delay: the steps between a message and the end of its round.
        carry: what becomes of them.
        turned: tensors of which norms and directions are averaged apart.
    """
    points, errors = [start], dict[int, Tensor]()
    steps, after = dict[int, int](), dict[int, tuple[int, Tensor]]()

    def descend(worker: int, x: Tensor, count: int) -> Tensor:
        for _ in range(count):
            x = x - rate * gradient(worker, steps.get(worker, 0), x)
            steps[worker] = steps.get(worker, 0) + 1
        return x

    def message(worker: int, started: int, tokens: float) -> Tensor:
        x, count = points[started], round(tokens / samples(worker))
        if carry != "off" and worker in after:
            before, kept = after[worker]
            change = points[started] - points[before]
            if carry == "adaptive":
                kept = kept * torch.nn.functional.cosine_similarity(kept, change, dim=0).clamp(min=0)
            x, count = x + kept, count - delay
        sent = descend(worker, x, count)
        after[worker] = started, descend(worker, sent, delay) - sent
        found = sent - points[started] + errors.get(worker, torch.zeros_like(start))
        if code is None:
            return found
        errors[worker] = found - code(found)
        return code(found)

    for number, arrivals in enumerate(log):
        changes, shares = list[Tensor](), list[float]()
        for worker, started, tokens in sorted(arrivals, key=lambda each: (each[1], each[0])):
            age = number - started
            changes.append(message(worker, started, tokens))
            shares.append(tokens * (0.0 if age and exponent is None else (1 + age) ** -(exponent or 0.0)))
        points.append(outer(points[-1], merge(changes, shares, turned)))
    return points[-1]


def merge(changes: Sequence[Tensor], shares: Sequence[float], turned: Sequence[slice]) -> Tensor:
    """The weighted mean; radial-directional merging of these tensors: the mean norm along the mean direction."""
    if not any(shares):
        return torch.zeros_like(changes[0])
    weights = torch.tensor(shares, dtype=changes[0].dtype) / sum(shares)
    stacked = torch.stack(list(changes))
    result = weights @ stacked
    for where in turned:
        norms = stacked[:, where].norm(dim=1)
        direction = weights @ (stacked[:, where] / norms[:, None])
        result[where] = (weights @ norms) * direction / direction.norm()
    return result


FragmentArrival = tuple[int, int, float, tuple[int, ...]]
"""The worker, the round in which it started the fragment, its tokens, and the rounds in which it started each."""


def train_fragments(
    gradient: Gradient,
    start: Tensor,
    log: Sequence[Sequence[FragmentArrival]],
    *,
    period: int,
    rate: float,
    cuts: Sequence[slice],
    ends: Sequence[int],
    outers: Sequence[Callable[[Tensor, Tensor], Tensor]],
    exponent: float | None,
    code: Callable[[Tensor], Tensor] | None = None,
    delay: int = 0,
    carry: str = "off",
    turned: Sequence[Sequence[slice]] = (),
) -> Tensor:
    """As `train`, with rounds that merge one fragment after the other.

    Args:
        gradient: of a worker.
        start: the first point.
        log: what each round takes.
        period: steps of a worker between two messages of a fragment.
        rate: of the local steps.
        cuts: the fragments.
        ends: the first step after which each ends a round.
        outers: of each fragment, the next point from a point and the mean displacement of its round.
        exponent: of one plus the age, in the discount; None drops late work.
        code: of messages, whose errors each worker adds to its next one of the same fragment.
        delay: the steps between a message and the end of its round.
        carry: what becomes of them.
        turned: of each fragment, tensors of which norms and directions are averaged apart.
    """
    count = len(cuts)
    points = [[start[cut]] for cut in cuts]  # of each fragment, after so many of its rounds

    def messages(worker: int) -> Iterator[tuple[int, Tensor]]:
        x, at, launched, errors = start.clone(), list(range(count)), dict[int, Tensor](), dict[int, Tensor]()
        known = [starts for arrivals in log for name, _, _, starts in arrivals if name == worker]
        for step in itertools.count():
            x = x - rate * gradient(worker, step, x)
            for f, cut in enumerate(cuts):
                left = (ends[f] - step - 1) % period
                if left == delay:
                    sent = x[cut] - points[f][at[f] // count] + errors.get(f, 0.0)
                    if code is not None:
                        errors[f], sent = sent - code(sent), code(sent)
                    launched[f] = x[cut].clone()
                    yield at[f], sent
                if left == 0:
                    before, at[f] = at[f], min(starts[f] for starts in known if starts[f] > at[f])
                    old, new, kept = points[f][before // count], points[f][at[f] // count], x[cut] - launched[f]
                    if carry == "off":
                        kept = torch.zeros_like(kept)
                    elif carry == "adaptive":
                        kept = kept * torch.nn.functional.cosine_similarity(kept, new - old, dim=0).clamp(min=0)
                    x[cut] = new + kept

    workers = {worker: messages(worker) for arrivals in log for worker, *_ in arrivals}
    made: dict[tuple[int, int], Tensor] = {}
    for number, arrivals in enumerate(log):
        changes, shares = list[Tensor](), list[float]()
        for worker, started, tokens, _ in sorted(arrivals, key=lambda each: (each[1], each[0])):
            while (worker, started) not in made:
                at, message = next(workers[worker])
                made[worker, at] = message
            age = (number - started) // count
            changes.append(made[worker, started])
            shares.append(tokens * (0.0 if age and exponent is None else (1 + age) ** -(exponent or 0.0)))
        found = points[number % count]
        merged = merge(changes, shares, turned[number % count] if turned else ())
        found.append(outers[number % count](found[-1], merged))
    result = start.clone()
    for cut, found in zip(cuts, points, strict=True):
        result[cut] = found[-1]
    return result
