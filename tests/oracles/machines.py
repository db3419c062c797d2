# SPDX-License-Identifier: Apache-2.0
"""Methods as machines that another method can drive: all workers in one tensor, a worker in each row.

A machine is given where its workers' parameters are, `x`, and what their optimizers add to them there, `move`; it knows
the method's equations, from the paper, and what beginning anew at a common point means. `path` drives one by itself,
`SlowMomentum` drives any of them, and `Fragments` one for each part of the vector. Nothing in here knows thinwire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.oracles.common import Gradient, Mixing

Losses = Callable[[], Tensor]
"""Every worker's loss at its parameters."""


def path(
    machine: Machine,
    gradient: Gradient,
    x: Tensor,
    update: Callable[[Tensor, Tensor, int], Tensor],
    rates: Sequence[float | Tensor],
    losses: Callable[[Tensor, int], Tensor] = lambda x, k: x.new_zeros(len(x)),
) -> Tensor:
    """All workers' parameters after every step: (steps, workers, n).

    Args:
        machine: the method.
        gradient: of all workers at a step.
        x: where they begin, a row for each.
        update: what their optimizers add to parameters, given the gradients and the step.
        rates: a learning rate for each step.
        losses: of all workers at a step.
    """
    machine.start(x)
    seen: list[Tensor] = []
    for k, rate in enumerate(rates):
        move = update(x, machine.exchanged(gradient(x, k)), k)
        x = machine.step(x, move, rate, partial(losses, x, k))
        seen.append(x)
    return torch.stack(seen)


Agree = Callable[[Tensor, Tensor, int], Tensor]
"""The mean of the rows, from a point that all workers have in common, as agreed on in the message of a step."""


def exact(rows: Tensor, common: Tensor, k: int) -> Tensor:
    """The mean itself."""
    return rows.mean(0)


def best_of(scores: Tensor, among: Sequence[int]) -> int:
    """The lowest rank of those with the least score."""
    return min(among, key=lambda i: (float(scores[i]), i))


class Machine:
    """Every worker by itself.

    Args:
        ahead: steps that the machine's schedule is ahead.
    """

    def __init__(self, ahead: int = 0) -> None:
        self.k = ahead

    def start(self, x: Tensor) -> None:
        """The parameters with which training begins."""
        self.restart(x)

    def exchanged(self, g: Tensor) -> Tensor:
        """The gradients that the optimizers are given."""
        return g

    def step(self, x: Tensor, move: Tensor, rate: float | Tensor, losses: Losses) -> Tensor:
        """One step from `x`, to where the next gradient is taken."""
        self.k += 1
        return self.moved(x, move, rate, losses)

    def moved(self, x: Tensor, move: Tensor, rate: float | Tensor, losses: Losses) -> Tensor:
        """`step`, with `k` the number of this step, from 1."""
        return x + move

    def average(self, x: Tensor) -> Tensor:
        """The exact average, in every row."""
        return x.mean(0).expand_as(x)

    def restart(self, x: Tensor) -> None:
        """Begin anew at a point that all workers have in common; momenta stay."""


class MeanGradient(Machine):
    """All-reduce: every worker's optimizer is given the mean of all gradients."""

    def exchanged(self, g: Tensor) -> Tensor:
        return g.mean(0).expand_as(g)


class Shared(Machine):
    """Asynchronous SGD (Chen et al., 2016): the shared parameters move by every worker's update, one after another."""

    def moved(self, x: Tensor, move: Tensor, rate: float | Tensor, losses: Losses) -> Tensor:
        return x + move.sum(0)


class Means(Machine):
    """Local SGD (Stich, 2019)."""

    def __init__(self, period: int, ahead: int = 0, *, warmup: int = 0, agree: Agree = exact) -> None:
        super().__init__(ahead)
        self.period, self.warmup, self.agree = period, warmup, agree

    def moved(self, x: Tensor, move: Tensor, rate: float | Tensor, losses: Losses) -> Tensor:
        x = x + move
        if self.k % self.period and self.k > self.warmup:
            return x
        self.point = self.agree(x, self.point, self.k)
        return self.point.expand_as(x)

    def restart(self, x: Tensor) -> None:
        self.point = x.mean(0)


class Decoupled(Machine):
    """CoCoD-SGD (Shen et al., 2019): the mean of where a round began, plus each worker's own round."""

    def __init__(self, period: int, ahead: int = 0, *, agree: Agree = exact) -> None:
        super().__init__(ahead)
        self.period, self.agree = period, agree

    def moved(self, x: Tensor, move: Tensor, rate: float | Tensor, losses: Losses) -> Tensor:
        x = x + move
        if self.k % self.period == 0:
            self.begun = x = self.sent + (x - self.begun)
            self.sent = self.agree(x, self.sent, self.k)
        return x

    def restart(self, x: Tensor) -> None:
        self.begun, self.sent = x, x.mean(0)


class Overlap(Machine):
    """Overlap Local-SGD (Wang, Liang and Joshi, 2020); the first mean that arrives is where the round begins."""

    def __init__(
        self,
        period: int,
        ahead: int = 0,
        *,
        pull: float = 0.6,
        momentum: float = 0.7,
        lr: float = 1.0,
        nesterov: bool = False,
        delay: int | None = None,
        agree: Agree = exact,
    ) -> None:
        super().__init__(ahead)
        self.period, self.delay, self.agree = period, delay or period, agree
        self.pull, self.momentum, self.lr, self.nesterov = pull, momentum, lr, nesterov

    def moved(self, x: Tensor, move: Tensor, rate: float | Tensor, losses: Losses) -> Tensor:
        x = x + move
        if (self.k - self.delay) % self.period == 0:
            gap = self.sent - self.anchor
            self.velocity = self.momentum * self.velocity + gap
            step = gap + self.momentum * self.velocity if self.nesterov else self.velocity
            self.anchor = self.anchor + self.lr * step
            x = (1 - self.pull) * x + self.pull * self.anchor
        if self.k % self.period == 0:
            self.sent = self.agree(x, self.anchor, self.k)
        return x

    def restart(self, x: Tensor) -> None:
        self.anchor = self.sent = x.mean(0)
        self.velocity = torch.zeros_like(self.anchor)


class Pairs(Machine):
    """NoLoCo (Kolehmainen et al., 2025): at the end of a period an outer step with the neighbours of that round."""

    def __init__(
        self, mixing: Mixing, period: int, ahead: int = 0, *, lr: float, momentum: float, pull: float | None = None
    ) -> None:
        super().__init__(ahead)
        self.mixing, self.period, self.lr, self.momentum = mixing, period, lr, momentum
        self.pull = lr if pull is None else pull
        self.velocity: Tensor | float = 0.0

    def moved(self, x: Tensor, move: Tensor, rate: float | Tensor, losses: Losses) -> Tensor:
        x = x + move
        if self.k % self.period == 0:
            share = self.mixing(self.k // self.period - 1)
            way = self.lr * (share @ (x - self.point)) - self.pull * (self.point - share @ self.point)
            self.velocity = self.momentum * self.velocity + way
            self.point = x = self.point + self.velocity
        return x

    def restart(self, x: Tensor) -> None:
        self.point = x


class Elastic(Machine):
    """EASGD and EAMSGD (Zhang, Choromanska and LeCun, 2015), Algorithms 1 and 2: `x` is where gradients are taken."""

    def __init__(
        self,
        period: int,
        ahead: int = 0,
        *,
        centre_pull: float = 0.9,
        momentum: float = 0.0,
        pull: float | None = None,
        agree: Agree = exact,
    ) -> None:
        super().__init__(ahead)
        self.period, self.centre_pull, self.momentum, self.pull = period, centre_pull, momentum, pull
        self.agree = agree

    def moved(self, x: Tensor, move: Tensor, rate: float | Tensor, losses: Losses) -> Tensor:
        position, centre = self.position, self.centre
        self.velocity = self.momentum * self.velocity + move
        if (self.k - 1) % self.period == 0:
            pull = self.centre_pull / len(x) if self.pull is None else self.pull
            self.position = position - pull * (position - centre)
            self.centre = (1 - self.centre_pull) * centre + self.centre_pull * self.agree(position, centre, self.k - 1)
        self.position = self.position + self.velocity
        return self.position + self.momentum * self.velocity

    def average(self, x: Tensor) -> Tensor:
        return self.position.mean(0).expand_as(x)

    def restart(self, x: Tensor) -> None:
        self.position, self.centre, self.velocity = x, x.mean(0), torch.zeros_like(x)


class TwoRates(Machine):
    """Inner and outer rates (Woodworth, Patel and Srebro, 2020); an average ends the round where it is."""

    def __init__(self, period: int, ahead: int = 0, *, inner: float = 0.5, agree: Agree = exact) -> None:
        super().__init__(ahead)
        self.period, self.inner, self.agree = period, inner, agree
        self.unit: float | Tensor = 1.0

    def moved(self, x: Tensor, move: Tensor, rate: float | Tensor, losses: Losses) -> Tensor:
        if self.agree is not exact and (self.k - 1) % self.period == 0:
            self.unit = rate  # of what is coded
        # The mean over the workers that have data.
        share = len(x) / max(1, int((move != 0).any(1).sum()))
        self.total = self.total - share * move / self.unit
        x = x + self.inner * move
        if self.k % self.period == 0:
            x = self.average(x)
            self.restart(x)
        return x

    def average(self, x: Tensor) -> Tensor:
        return self.begun - self.unit * self.agree(self.total, torch.zeros_like(x[0]), self.k)

    def restart(self, x: Tensor) -> None:
        self.begun, self.total = x, torch.zeros_like(x)


class Mixed(Machine):
    """D-PSGD (Lian et al., 2017): mix while adapting, or adapt, then mix."""

    def __init__(self, mixing: Mixing, *, after: bool = False) -> None:
        super().__init__()
        self.mixing, self.after = mixing, after

    def moved(self, x: Tensor, move: Tensor, rate: float | Tensor, losses: Losses) -> Tensor:
        weights = self.mixing(self.k - 1)
        return weights @ (x + move) if self.after else weights @ x + move


class Pushed(Machine):
    """SGP and Overlap SGP (Assran et al., 2019), Algorithms 1 and 2; `x` is the quotient z.

    Args:
        biased: the weights are left out.
    """

    def __init__(self, mixing: Mixing, ahead: int = 0, *, staleness: int = 0, biased: bool = False) -> None:
        super().__init__(ahead)
        self.mixing, self.staleness, self.biased = mixing, staleness, biased

    def moved(self, x: Tensor, move: Tensor, rate: float | Tensor, losses: Losses) -> Tensor:
        share, mass = self.mixing(self.k - 1), self.mass + move
        own = share.diagonal()[:, None]
        away = share - torch.diag(share.diagonal())
        self.flying.append((away @ mass, away @ self.weight))
        self.mass, self.weight = own * mass, own * self.weight
        if len(self.flying) > self.staleness:
            arrived, arrived_weight = self.flying.pop(0)
            self.mass, self.weight = self.mass + arrived, self.weight + arrived_weight
        return self.mass if self.biased else self.mass / self.weight

    def average(self, x: Tensor) -> Tensor:
        return (self.mass.sum(0) + sum(mass.sum(0) for mass, _ in self.flying)).expand_as(x) / len(x)

    def restart(self, x: Tensor) -> None:
        self.mass, self.weight, self.flying = x, torch.ones(len(x), 1, dtype=x.dtype), list[tuple[Tensor, Tensor]]()


class Momentum(Machine):
    """Decentralised momentum methods; `rule` maps (x, g, rate, m, W) to the next x and m."""

    def __init__(self, mixing: Mixing, rule: Callable[..., tuple[Tensor, Tensor]], **settings: Any) -> None:
        super().__init__()
        self.mixing, self.rule = mixing, partial(rule, **settings)

    def start(self, x: Tensor) -> None:
        self.m = torch.zeros_like(x)

    def moved(self, x: Tensor, move: Tensor, rate: float | Tensor, losses: Losses) -> Tensor:
        x, self.m = self.rule(x, -move / rate, rate, self.m, self.mixing(self.k - 1))
        return x


def decentlam(
    x: Tensor,
    g: Tensor,
    rate: float | Tensor,
    m: Tensor,
    weights: Tensor,
    *,
    momentum: float,
    nesterov: bool = False,
) -> tuple[Tensor, Tensor]:
    """Yuan et al., 2021: heavy-ball momentum on the gradient (x - W(x - rate * g)) / rate."""
    whole = (x - weights @ (x - rate * g)) / rate
    m = momentum * m + whole
    return x - rate * (whole + momentum * m if nesterov else m), m


def quasi_global(
    x: Tensor,
    g: Tensor,
    rate: float | Tensor,
    m: Tensor,
    weights: Tensor,
    *,
    momentum: float,
    memory: float | None = None,
    nesterov: bool = False,
) -> tuple[Tensor, Tensor]:
    """Lin et al., 2021: the momentum smooths (x - x_new) / rate, after mixing."""
    kept = momentum if memory is None else memory
    u = g + momentum * m
    new = weights @ (x - rate * (g + momentum * u if nesterov else u))
    return new, kept * m + (1 - kept) * (x - new) / rate


def double_averaging(
    x: Tensor, g: Tensor, rate: float | Tensor, m: Tensor, weights: Tensor, *, momentum: float
) -> tuple[Tensor, Tensor]:
    """Yu, Jin and Yang, 2019: parameters and momentum are both mixed."""
    u = momentum * m + g
    return weights @ (x - rate * u), weights @ u


class ExactDiffusion(Machine):
    """EDM (Hu et al., 2025); what mixing has corrected is kept, so that its sum stays zero."""

    def __init__(self, mixing: Mixing, momentum: float) -> None:
        super().__init__()
        self.mixing, self.momentum = mixing, momentum

    def start(self, x: Tensor) -> None:
        self.m = self.correction = torch.zeros_like(x)

    def moved(self, x: Tensor, move: Tensor, rate: float | Tensor, losses: Losses) -> Tensor:
        self.m = self.momentum * self.m + (1 - self.momentum) * (-move / rate)
        adapted = x - rate * self.m
        corrected = adapted + self.correction
        x = (corrected + self.mixing(self.k - 1) @ corrected) / 2
        self.correction = x - adapted
        return x


class PublicCopies(Machine):
    """CHOCO-SGD (Koloskova et al., 2019), Algorithm 2.

    Args:
        code: of one worker's difference to its public copy.
    """

    def __init__(self, mixing: Mixing, step_size: float, code: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.mixing, self.step_size, self.code = mixing, step_size, code

    def start(self, x: Tensor) -> None:
        self.public = x

    def moved(self, x: Tensor, move: Tensor, rate: float | Tensor, losses: Losses) -> Tensor:
        x = x + move
        self.public = self.public + torch.stack([self.code(row) for row in x - self.public])
        return x + self.step_size * (self.mixing(self.k - 1) @ self.public - self.public)


class Leader(Machine):
    """LSGD (Teng et al., 2019); with nodes, the pull to the node's leader and then, less often, to that of all.

    Attributes:
        led: who led all workers in each round that had such a leader.
    """

    def __init__(
        self,
        period: int,
        ahead: int = 0,
        *,
        pull: float = 0.3,
        node_size: int = 0,
        global_period: int = 0,
        global_pull: float = 0.0,
    ) -> None:
        super().__init__(ahead)
        self.period, self.pull, self.seen, self.led = period, pull, list[Tensor](), list[int]()
        self.node_size, self.global_period, self.global_pull = node_size, global_period, global_pull

    def moved(self, x: Tensor, move: Tensor, rate: float | Tensor, losses: Losses) -> Tensor:
        self.seen.append(losses().float())
        x = x + move
        if self.k % self.period:
            return x
        scores, size = torch.stack(self.seen[-self.period :]).mean(0), self.node_size
        if size:
            nodes = [range(first, first + size) for first in range(0, len(x), size)]
            x = x + self.pull * (x[[best_of(scores, node) for node in nodes for _ in node]] - x)
        if not size or self.k % self.global_period == 0:
            self.led.append(best_of(scores, range(len(x))))
            x = x + (self.global_pull if size else self.pull) * (x[self.led[-1]] - x)
        return x


class LeaderGradient(Machine):
    """LGD (Teng et al., 2019): the pull belongs to the parameters that the gradient was taken at."""

    def __init__(self, pull: float) -> None:
        super().__init__()
        self.pull = pull

    def moved(self, x: Tensor, move: Tensor, rate: float | Tensor, losses: Losses) -> Tensor:
        return x + move - rate * self.pull * (x - x[best_of(losses().float(), range(len(x)))])


# -- around a machine --------------------------------------------------------------------------------------------------


class SlowMomentum(Machine):
    """SlowMo (Wang et al., 2020), Algorithm 1, around any machine; the rate is the mean of the round's rates.

    Args:
        base: the machine between slow steps.
        exact: False leaves out the average of line 6.
    """

    def __init__(
        self, base: Machine, period: int, *, momentum: float = 0.5, lr: float = 0.9, exact: bool = True
    ) -> None:
        super().__init__(base.k)
        self.base, self.period, self.momentum, self.lr, self.exact = base, period, momentum, lr, exact

    def start(self, x: Tensor) -> None:
        self.base.start(x)
        self.begun = x.mean(0).expand_as(x) if self.exact else x
        self.slow, self.rates = torch.zeros_like(x), list[float | Tensor]()

    def exchanged(self, g: Tensor) -> Tensor:
        return self.base.exchanged(g)

    def moved(self, x: Tensor, move: Tensor, rate: float | Tensor, losses: Losses) -> Tensor:
        x = self.base.step(x, move, rate, losses)
        self.rates.append(rate)
        if self.k % self.period:
            return x
        reached = self.base.average(x) if self.exact else x
        gamma = sum(self.rates) / len(self.rates)
        self.slow = self.momentum * self.slow + (self.begun - reached) / gamma
        x = self.begun - self.lr * gamma * self.slow
        self.restart(x)
        return x

    def average(self, x: Tensor) -> Tensor:
        return self.base.average(x)

    def restart(self, x: Tensor) -> None:
        self.base.restart(x)
        self.begun, self.rates = x, []


class Nodes(Machine):
    """Hierarchical local SGD (Lin et al., 2020): nodes of consecutive workers average at steps at which not all do.

    Args:
        base: averages over all workers every `all_every` steps.
        size: workers of a node.
    """

    def __init__(self, base: Machine, period: int, all_every: int, size: int) -> None:
        super().__init__(base.k)
        self.base, self.period, self.all_every, self.size = base, period, all_every, size

    def start(self, x: Tensor) -> None:
        self.base.start(x)

    def moved(self, x: Tensor, move: Tensor, rate: float | Tensor, losses: Losses) -> Tensor:
        x = self.base.step(x, move, rate, losses)
        if self.k % self.period or self.k % self.all_every == 0:
            return x
        nodes = x.view(-1, self.size, x.shape[1])
        return nodes.mean(1, keepdim=True).expand_as(nodes).reshape(x.shape)


class Fragments(Machine):
    """Streaming (Douillard et al., 2025): one machine for each even part of the vector, ahead of the one before."""

    def __init__(self, machine: Callable[[int], Machine], period: int, count: int) -> None:
        super().__init__()
        self.machines = [machine(f * period // count) for f in range(count)]

    def parts(self, x: Tensor) -> list[Tensor]:
        """The columns of each fragment."""
        edges = [f * x.shape[1] // len(self.machines) for f in range(len(self.machines) + 1)]
        return [x[:, start:stop] for start, stop in pairwise(edges)]

    def start(self, x: Tensor) -> None:
        for machine, part in zip(self.machines, self.parts(x), strict=True):
            machine.start(part)

    def moved(self, x: Tensor, move: Tensor, rate: float | Tensor, losses: Losses) -> Tensor:
        each = zip(self.machines, self.parts(x), self.parts(move), strict=True)
        return torch.cat([machine.step(part, of_it, rate, losses) for machine, part, of_it in each], 1)

    def average(self, x: Tensor) -> Tensor:
        return torch.cat([machine.average(part) for machine, part in zip(self.machines, self.parts(x), strict=True)], 1)

    def restart(self, x: Tensor) -> None:
        for machine, part in zip(self.machines, self.parts(x), strict=True):
            machine.restart(part)
