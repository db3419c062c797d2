# SPDX-License-Identifier: Apache-2.0
"""Small problems for real runs and for oracles alike, and the loop of the real runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

import thinwire
from tests.oracles.common import irregular_targets
from thinwire import Comm, Replica, Strategy, Topology, Worker
from thinwire.core.comm.group import comm_for
from thinwire.methods.topology import Peers


@dataclass(frozen=True)
class Irregular(Topology):
    """Directed, time-varying, with different numbers of neighbours; every worker splits evenly among its own."""

    def peers(self, rank: int, size: int, step: int) -> Peers:
        targets = [irregular_targets(i, size, step) for i in range(size)]
        src = tuple(i for i in range(size) if rank in targets[i])
        weights = tuple(1 / (len(targets[i]) + 1) for i in src)
        return Peers(tuple(sorted(targets[rank])), src, 1 / (len(targets[rank]) + 1), weights)

    def period(self, size: int) -> int:
        return 2


@dataclass(frozen=True)
class Breathing(Topology):
    """A ring whose weights change from step to step."""

    def peers(self, rank: int, size: int, step: int) -> Peers:
        neighbours = tuple({(rank - 1) % size, (rank + 1) % size} - {rank})
        share = 0.3 if step % 2 else 0.2
        return Peers(neighbours, neighbours, 1 - share * len(neighbours), (share,) * len(neighbours))

    def period(self, size: int) -> int:
        return 2


class Problem(Protocol):
    """What each worker minimises, as a module and as a function of all workers' stacked parameters."""

    start: Tensor

    def model(self) -> nn.Module: ...

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor: ...

    def gradient(self, x: Tensor, step: int) -> Tensor: ...


class Vector(nn.Module):
    """One parameter vector, split into parameters of the given sizes."""

    def __init__(self, start: Tensor, sizes: Sequence[int]) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(part.clone()) for part in start.split(list(sizes))])

    def forward(self) -> Tensor:
        return torch.cat(list(self.parts))


@dataclass(frozen=True)
class Quadratic:
    """Worker i minimises curvature_i |x - centre_i|^2 / 2."""

    curvature: Tensor
    centre: Tensor

    @property
    def start(self) -> Tensor:
        return torch.ones_like(self.centre[0])

    def model(self) -> nn.Module:
        return Vector(self.start, [1, len(self.start) - 1])

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        return self.curvature[rank] * (model() - self.centre[rank]).square().sum() / 2

    def gradient(self, x: Tensor, step: int) -> Tensor:
        return self.curvature[:, None] * (x - self.centre)


def quadratic(n: int, dtype: torch.dtype, *, width: int = 3) -> Quadratic:
    """Workers that disagree, in both curvature and centre."""
    draw = torch.Generator().manual_seed(n)
    curvature = 0.2 + torch.rand(n, generator=draw, dtype=torch.float64)
    centre = torch.randn(n, width, generator=draw, dtype=torch.float64)
    return Quadratic(curvature.to(dtype), centre.to(dtype))


class Perceptron(nn.Module):
    """5 inputs, 4 hidden units, 2 outputs."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        w1, b1, w2, b2 = (part.clone() for part in start.split([20, 4, 8, 2]))
        self.w1, self.b1 = nn.Parameter(w1.view(5, 4)), nn.Parameter(b1)
        self.w2, self.b2 = nn.Parameter(w2.view(4, 2)), nn.Parameter(b2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.w1 + self.b1) @ self.w2 + self.b2


@dataclass(frozen=True)
class Regression:
    """Noisy mini-batches for a perceptron; each worker's targets lie elsewhere."""

    size: int
    steps: int
    dtype: torch.dtype

    @cached_property
    def start(self) -> Tensor:
        return 0.5 * torch.randn(34, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(self.dtype)

    @cached_property
    def batches(self) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(2)
        x = torch.randn(self.steps, self.size, 4, 5, generator=draw, dtype=torch.float64)
        y = torch.randn(self.steps, self.size, 4, 2, generator=draw, dtype=torch.float64)
        shift = torch.arange(self.size, dtype=torch.float64)[:, None, None]
        return x.to(self.dtype), (y + shift / self.size).to(self.dtype)

    def model(self) -> nn.Module:
        return Perceptron(self.start)

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        x, y = self.batches
        return (model(x[step, rank]) - y[step, rank]).square().mean()

    def gradient(self, x: Tensor, step: int) -> Tensor:
        x = x.detach().clone().requires_grad_()
        inputs, targets = (each[step] for each in self.batches)
        w1, b1, w2, b2 = x.split([20, 4, 8, 2], dim=1)
        hidden = torch.tanh(inputs @ w1.view(-1, 5, 4) + b1[:, None])
        outputs = hidden @ w2.view(-1, 4, 2) + b2[:, None]
        (g,) = torch.autograd.grad((outputs - targets).square().mean((1, 2)).sum(), x)
        return g


def flat(model: nn.Module) -> Tensor:
    """All parameters, copied into one vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


Reported = Callable[[int, int, Tensor], Tensor | float | None]
"""From rank, step and loss to the loss that is reported."""


def begin(
    comm: Comm | None,
    strategy: Strategy,
    problem: Problem,
    starts: Tensor | None = None,
    factors: Sequence[float] = (1.0,),
    **settings: Any,
) -> Worker:
    """Attach a problem's model and SGD.

    Args:
        comm: of this rank; None for that of its process.
        strategy: the recipe.
        problem: what is trained.
        starts: a row of parameters for each rank; otherwise all start from the problem's.
        factors: of the learning rates of parameter groups; parameters are assigned to the groups in turn.
        settings: momentum and the like.
    """
    model, comm = problem.model(), comm or comm_for()
    init: Literal["broadcast", "own"] = "broadcast"
    if starts is not None:
        init = "own"
        nn.utils.vector_to_parameters(starts[comm.rank].clone(), model.parameters())
    parameters = list(model.parameters())
    groups = [{"params": parameters[i :: len(factors)], "factor": factor} for i, factor in enumerate(factors)]
    optimizer = torch.optim.SGD(groups, lr=settings.pop("lr", 1.0), **settings)
    return thinwire.attach(model, optimizer, strategy, comm=comm, init=init, bucket_bytes=40)


def go_on(
    worker: Worker,
    problem: Problem,
    rates: Sequence[float],
    first: int = 0,
    *,
    reported: Reported = lambda rank, step, loss: loss,
    after_step: Callable[[Worker], None] | None = None,
) -> Worker:
    """The loop of any user, with a learning rate for each step; `after_step` is called with the worker."""
    for step, rate in enumerate(rates, first):
        for group in worker.optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        worker.optimizer.zero_grad()
        loss = problem.loss(worker.model, worker.comm.rank, step)
        loss.backward()
        worker.record_batch(loss=reported(worker.comm.rank, step, loss.detach()))
        worker.optimizer.step()
        if after_step is not None:
            after_step(worker)
    return worker


def train(
    comm: Comm | None,
    strategy: Strategy,
    problem: Problem,
    rates: Sequence[float],
    *,
    reported: Reported = lambda rank, step, loss: loss,
    after_step: Callable[[Worker], None] | None = None,
    **settings: Any,
) -> Worker:
    """One rank's whole run, with the settings of `begin`."""
    worker = begin(comm, strategy, problem, **settings)
    go_on(worker, problem, rates, reported=reported, after_step=after_step)
    worker.detach()
    return worker


def together(n: int, strategy: Strategy, problem: Problem, rates: Sequence[float], **settings: Any) -> Tensor:
    """The parameters of n threads after training, stacked."""
    return torch.stack(
        thinwire.run_threads(n, lambda c: flat(train(c, strategy, problem, rates, **settings).model), timeout=20)
    )


def watched(
    n: int,
    strategy: Strategy,
    problem: Problem,
    rates: Sequence[float],
    see: Callable[[Replica], Tensor] = lambda r: r.x,
    **settings: Any,
) -> Tensor:
    """What `see` returns for n threads' replicas after every step: (steps, n, ...)."""

    def body(comm: Comm) -> Tensor:
        seen: list[Tensor] = []
        train(comm, strategy, problem, rates, after_step=lambda a: seen.append(see(a.replicas[0]).clone()), **settings)
        return torch.stack(seen)

    return torch.stack(thinwire.run_threads(n, body), dim=1)


def normal(n: int, seed: int = 0) -> Tensor:
    """Normal numbers, drawn from a seed."""
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def scattered(n: int, width: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    """Different parameters for each of n workers."""
    return torch.randn(n, width, generator=torch.Generator().manual_seed(n), dtype=torch.float64).to(dtype)


def distance(x: Tensor, y: Tensor) -> float:
    """The largest difference, relative to the largest entry of the second."""
    return float((x - y).abs().max() / y.abs().max())


def average_outside(strategy: Strategy, r: Replica) -> None:
    """End the round as a strategy around this one does: set all parameters to the average, and restart."""
    r.x.copy_(strategy.average(r, "outer"))
    strategy.restart(r)
