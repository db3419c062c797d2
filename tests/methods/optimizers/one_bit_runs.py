# SPDX-License-Identifier: Apache-2.0
"""Real runs of 1-bit methods, for tests: the loop of any user, and what can be seen of it after every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import thinwire
from tests.oracles import one_bit as oracles
from tests.problems import Regression, flat
from thinwire import Comm, Strategy, Worker
from thinwire.methods.optimizers.freezing import FreezingOptimizer
from thinwire.methods.optimizers.one_bit_adam import OneBitAdam
from thinwire.methods.optimizers.one_bit_lamb import OneBitLamb

SIZES = [20, 4, 8, 2]
Kind = type[OneBitLamb] | type[OneBitAdam]
See = Callable[[Worker], Tensor]


def parameters_of(worker: Worker) -> Tensor:
    return flat(worker.model)


def begun(comm: Comm | None, strategy: Strategy, model: nn.Module, kind: Any = OneBitLamb, **settings: Any) -> Worker:
    """A model under a strategy, in buckets of few parameters."""
    return thinwire.attach(model, kind(model.parameters(), **settings), strategy, comm=comm, bucket_bytes=40)


def stepped(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step of any user's loop."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def taken(worker: Worker, problem: Regression, first: int, last: int, see: See = parameters_of) -> list[Tensor]:
    """What `see` shows after each of the steps from the first up to the last."""
    seen: list[Tensor] = []
    for step in range(first, last):
        stepped(worker.optimizer, problem.loss(worker.model, worker.comm.rank, step))
        seen.append(see(worker).clone())
    return seen


def path(
    size: int,
    strategy: Strategy,
    problem: Regression,
    steps: int,
    kind: Any = OneBitLamb,
    see: See = parameters_of,
    **settings: Any,
) -> Tensor:
    """What `see` shows on every thread after every step: (steps, size, ...)."""

    def body(comm: Comm) -> Tensor:
        worker = begun(comm, strategy, problem.model(), kind, **settings)
        seen = taken(worker, problem, 0, steps, see)
        worker.detach()
        return torch.stack(seen)

    return torch.stack(thinwire.run_threads(size, body, timeout=20), dim=1)


def oracle(
    problem: Regression,
    size: int,
    steps: int,
    *,
    warmup: int,
    code: oracles.Code,
    hyperparameters: oracles.Hyperparameters,
    **more: Any,
) -> oracles.OneBit:
    """The stacked run of the same."""
    run = oracles.OneBit(SIZES, hyperparameters, warmup, oracles.TwoStages(code, more.pop("server", code)), **more)
    run.run(problem.gradient, problem.start.expand(size, -1), steps)
    return run


def freezing(worker: Worker) -> FreezingOptimizer:
    assert isinstance(worker.optimizer, FreezingOptimizer)
    return worker.optimizer


def kept(worker: Worker, name: str) -> Tensor:
    """One thing that the optimizer keeps, of all parameters in the model's order, as one vector."""
    return torch.cat([worker.optimizer.state[p][name].reshape(-1) for p in worker.model.parameters()])
