# SPDX-License-Identifier: Apache-2.0
"""Small models, their data and a user's loop, for tests of the worker.

Threads share torch's global random generator, so everything here draws from generators of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import thinwire
from tests.problems import flat
from thinwire import Comm, OneBitAdam, Strategy, ThinwireError, Worker

Model = TypeVar("Model", bound=nn.Module)
Batch = tuple[Tensor, Tensor]


def drawn(model: Model, seed: int = 0) -> Model:
    """The model, with its parameters drawn from a seed."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) / 2)
    return model


def net(seed: int = 0) -> nn.Sequential:
    """3 inputs, 5 hidden units, 2 outputs: sizes that are no multiples of vector registers."""
    return drawn(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), seed)


class Mixed(nn.Module):
    """Two dtypes in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 5), nn.Linear(5, 4).double(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)).double())).float())


class Tiles(torch.autograd.Function):
    """A block on parts of its input, one after the other, and again in the backward pass, which has a pass for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module, count: int) -> Tensor:
        ctx.block, ctx.count = block, count
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([block(part) for part in x.chunk(count)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        found: list[Tensor] = []
        for part, own in zip(x.chunk(ctx.count), grad.chunk(ctx.count), strict=True):
            leaf = part.detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.block(leaf)
            torch.autograd.backward(y, own)
            assert leaf.grad is not None
            found.append(leaf.grad)
        return torch.cat(found), None, None


def batch(rank: int, step: int, *, rows: int = 4, width: int = 3, classes: int = 2) -> Batch:
    """One rank's data for one step."""
    draw = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(rows, width, generator=draw), torch.randn(rows, classes, generator=draw)


def batches(rank: int, count: int, first: int = 0) -> list[Batch]:
    return [batch(rank, step) for step in range(first, first + count)]


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def one_bit_adam(model: nn.Module) -> torch.optim.Optimizer:
    return OneBitAdam(model.parameters(), lr=0.02)


def attach(
    comm: Comm | None,
    strategy: Strategy | str,
    *,
    model: nn.Module | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = momentum,
    **settings: Any,
) -> Worker:
    """A small model under a strategy, in buckets of a few parameters."""
    model = net() if model is None else model
    return thinwire.attach(model, optimizer(model), strategy, comm=comm, **{"bucket_bytes": 48, **settings})


def steps(
    worker: Worker,
    data: Iterable[Batch],
    *,
    closed: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    factor: Callable[[int], float] = lambda place: 1.0,
) -> Worker:
    """A user's training loop.

    Args:
        worker: of this rank.
        data: a batch for each step.
        closed: whether the optimizer calls a closure.
        scaler: of the losses.
        factor: of the loss of a batch, by its place in the data.
    """
    for place, (x, y) in enumerate(data):

        def closure(x: Tensor = x, y: Tensor = y, place: int = place) -> Tensor:
            worker.optimizer.zero_grad()
            loss = factor(place) * (worker.model(x) - y).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            return loss

        if closed:
            worker.optimizer.step(closure)
            continue
        closure()
        if scaler is None:
            worker.optimizer.step()
        else:
            scaler.step(worker.optimizer)
            scaler.update()
    return worker


def squared_error(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    return (model(x) - y).square().mean()


def serial(
    count: int,
    model: nn.Module | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = momentum,
    *,
    size: int = 2,
    loss: Callable[[nn.Module, int, int], Tensor] = squared_error,
    before_step: Callable[[], object] = lambda: None,
) -> nn.Module:
    """One process that steps with the mean gradient of `size` ranks."""
    model = net() if model is None else model
    made = optimizer(model)
    for step in range(count):
        made.zero_grad()
        for rank in range(size):
            (loss(model, rank, step) / size).backward()
        before_step()
        made.step()
    return model


def endings(size: int, work: Callable[[Comm], object], *, timeout: float = 20.0) -> list[str]:
    """The class and the text of each thread's error; an empty text without one."""

    def body(comm: Comm) -> str:
        try:
            work(comm)
        except ThinwireError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return thinwire.run_threads(size, body, timeout=timeout)


def threads(size: int, strategy: Strategy, count: int = 6, **settings: Any) -> list[Tensor]:
    """The parameters of `size` threads after some steps."""

    def work(comm: Comm) -> Tensor:
        worker = steps(attach(comm, strategy, **settings), batches(comm.rank, count))
        worker.detach()
        return flat(worker.model)

    return thinwire.run_threads(size, work, timeout=20)
