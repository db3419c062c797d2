# SPDX-License-Identifier: Apache-2.0
"""One run of the grid by real strategies, a machine a thread."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import SGD, Optimizer

from reproductions.local_vs_minibatch.even_odd import MACHINES, EvenOdd
from reproductions.local_vs_minibatch.rounds import accelerated, inner_outer, minibatch, rounds_of
from thinwire import AllReduce, Comm, LocalSGD, MinibatchLocalSGD, Strategy, Worker, attach, run_threads
from thinwire.methods.optimizers.acsa import AcSA

_PERIOD, _ROUNDS, _RATE, _INNER = 4, 5, 2.0, 0.3


class _Linear(nn.Module):
    """A product with one vector, zero at first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, dtype=torch.float64))

    def forward(self, features: Tensor) -> Tensor:
        return features @ self.weight


def largest_difference(problem: EvenOdd) -> float:
    """Between the tensors of the grid and real strategies on as many threads as machines, over four methods."""
    draws = problem.draws(1.0, _PERIOD * _ROUNDS, seed=0)
    ours, theirs = _on_threads(problem, draws), _in_tensors(problem, draws[None])
    return max(float((x - y).abs().max()) for x, y in zip(ours, theirs, strict=True))


def _in_tensors(problem: EvenOdd, draws: Tensor) -> list[Tensor]:
    def rate(value: float) -> Tensor:
        return torch.tensor([value], dtype=torch.float64)

    def found(run: Callable[..., list[Tensor]], *told: Tensor) -> Tensor:
        return run(rounds_of(problem, draws, _PERIOD), *told, {_ROUNDS})[0][0, 0]

    return [
        found(minibatch, rate(_RATE * _PERIOD)),
        found(inner_outer, rate(_RATE), rate(1.0)),
        found(inner_outer, rate(_RATE), rate(_INNER)),
        found(accelerated, rate(_RATE)),
    ]


def _on_threads(problem: EvenOdd, draws: Tensor) -> list[Tensor]:
    stepping: tuple[Strategy, ...] = (
        MinibatchLocalSGD(_PERIOD, 0.0),
        LocalSGD(_PERIOD),
        MinibatchLocalSGD(_PERIOD, _INNER),
    )

    def body(comm: Comm) -> list[Tensor]:
        mine = draws[:, comm.rank]
        found = [_ended(comm, problem, mine, strategy, lambda model: SGD(model, _RATE)) for strategy in stepping]
        return [*found, _ended(comm, problem, mine, AllReduce(), lambda model: AcSA(model, _RATE))]

    return run_threads(MACHINES, body)[0]


def _ended(
    comm: Comm, problem: EvenOdd, rows: Tensor, strategy: Strategy, make: Callable[[list[nn.Parameter]], Optimizer]
) -> Tensor:
    """Where one machine's model ends; gradients are accumulated over a round where the strategy exchanges them."""
    model = _Linear(problem.features.shape[1])
    worker = attach(model, make(list(model.parameters())), strategy, comm=comm)
    passes = _PERIOD if strategy.traits.sends_gradients else 1
    for few in rows.split(passes):
        worker.optimizer.zero_grad()
        with worker.no_sync():
            for row in few[:-1]:
                _backward(problem, worker, int(row), passes)
        _backward(problem, worker, int(few[-1]), passes)
        worker.optimizer.step()
    with worker.consensus():
        found = model.weight.detach().clone()
    worker.detach()
    return found


def _backward(problem: EvenOdd, worker: Worker, row: int, passes: int) -> None:
    loss = binary_cross_entropy_with_logits(worker.model(problem.features[row]), problem.even[row])
    (loss / passes).backward()
