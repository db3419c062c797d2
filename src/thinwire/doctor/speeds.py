"""What a rank measures beside single links: all-reduce by size over the real process group, and a training step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from thinwire.comm.base import Comm

SIZES = (4 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
STEPS = 8
_FEWEST_STEPS = 3
_REPEATS = 6


@dataclass(frozen=True)
class StepTime:
    """A training step without communication.

    Attributes:
        name: of the model, for the report.
        parameters: how many it has.
        nbytes: of its gradients.
        seconds: the median step, with forward pass, backward pass and optimizer.
        backward_seconds: the part of it that the backward pass takes.
    """

    name: str
    parameters: int
    nbytes: int
    seconds: float
    backward_seconds: float


Step = Callable[[], Tensor]
"""Computes the loss of one batch."""


def time_steps(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Step, *, budget: float) -> StepTime:
    """Time steps of a model on this rank alone; the first one is a warm-up.

    Args:
        name: of the model.
        model: its parameters are counted, and changed.
        optimizer: over its parameters.
        loss: computes the loss of one batch.
        budget: seconds to spend; three steps are taken in any case.
    """
    whole: list[float] = []
    backward: list[float] = []
    start = time.perf_counter()
    while len(whole) < _FEWEST_STEPS + 1 or (len(whole) < STEPS + 1 and time.perf_counter() - start < budget):
        begin = time.perf_counter()
        optimizer.zero_grad()
        value = loss()
        middle = time.perf_counter()
        value.backward()
        after = time.perf_counter()
        optimizer.step()
        whole.append(time.perf_counter() - begin)
        backward.append(after - middle)
    trained = [p for p in model.parameters() if p.requires_grad]
    count = sum(p.numel() for p in trained)
    nbytes = sum(p.numel() * p.element_size() for p in trained)
    return StepTime(name, count, nbytes, median(whole[1:]), median(backward[1:]))


def time_all_reduces(comm: Comm, *, budget: float, sizes: Sequence[int] = SIZES) -> dict[int, float]:
    """The median seconds of an all-reduce by its bytes, until the budget of seconds is spent; every rank must call.

    Raises:
        CommError: a call fails.
    """
    found: dict[int, float] = {}
    start = time.perf_counter()
    for nbytes in sizes:
        x = torch.zeros(nbytes // 4)
        times: list[float] = []
        spent = 0.0
        while len(times) < _REPEATS and (spent < budget or len(times) < 2):
            begin = time.perf_counter()
            comm.all_reduce_(x).wait()
            times.append(time.perf_counter() - begin)
            # The slowest rank's clock decides for all, or they would not take equally many turns.
            clocks = comm.all_gather(torch.tensor([time.perf_counter() - start], dtype=torch.float64)).wait()
            spent = max(float(clock) for clock in clocks)
        found[nbytes] = median(times[1:])
        if spent > budget:
            break
    return found
