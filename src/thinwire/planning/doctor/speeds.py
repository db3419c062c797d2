# SPDX-License-Identifier: Apache-2.0
"""Measurements besides single links: all-reduces over the real process group, and a training step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from statistics import fmean, median

import torch
from torch import Tensor, nn

from thinwire.core.comm.base import Comm
from thinwire.errors import ConfigError
from thinwire.planning.plan.predict import ModelTime
from thinwire.planning.plan.search import Job
from thinwire.planning.plan.traffic import MakeOptimizer
from thinwire.planning.simulate import Network

STEPS = 24
_FEWEST_STEPS = 3
_LEAST_SECONDS = 0.5  # for as long short steps are repeated: single ones are as long as a thread's turn
_LEAST_BYTES, _MOST_BYTES = 64 << 10, 8 << 20
_IN_FLIGHT = 4
_ROUND_SECONDS = 0.1
_MOST_BUDGETS = 4


@dataclass(frozen=True)
class StepTime:
    """A training step without communication.

    Attributes:
        name: of the model, for the report.
        shapes: of the trained parameter tensors.
        dtype: of the first of them, such as "float32".
        nbytes: of their gradients.
        forward: mean seconds of the forward pass and of all else before the backward pass.
        backward: of the backward pass.
        update: of the optimizer's step.
        ready: for each tensor, the share of the backward pass that has passed when its gradient is final.
    """

    name: str
    shapes: list[list[int]]
    dtype: str
    nbytes: int
    forward: float
    backward: float
    update: float
    ready: list[float]

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.forward + self.backward + self.update

    @property
    def parameters(self) -> int:
        """Return how many numbers are trained."""
        return sum(prod(shape) for shape in self.shapes)

    def job(
        self, workers: int, network: Network, optimizer: MakeOptimizer | None = None, *, sharing: float = 1.0
    ) -> Job:
        """Return the job of training with this step, for `thinwire.planning.plan.decision.decide`.

        Args:
            workers: number of workers.
            network: their links.
            optimizer: makes the optimizer of the run; unless given, one that each strategy takes.
            sharing: how many times as long a strategy computes in training as alone.
        """
        time = ModelTime(self.forward, self.backward, self.update, tuple(self.ready))
        shapes = [tuple(shape) for shape in self.shapes]
        return Job(shapes, workers, network, time, getattr(torch, self.dtype), optimizer, sharing)


@dataclass(frozen=True)
class LoadedStep:
    """A training step while messages pass through the links in both directions.

    Attributes:
        seconds: of the whole step, the mean.
        bytes_per_second: that the rank sent meanwhile.
    """

    seconds: float
    bytes_per_second: float


Loss = Callable[[], Tensor]
"""Computes the loss of one batch."""
TimeStep = Callable[[float], StepTime]
"""Times a step within a budget of seconds."""


def time_steps(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, *, budget: float) -> StepTime:
    """Time steps of a model on this rank alone; the first one is a warm-up.

    Args:
        name: of the model.
        model: its parameters are counted, and changed.
        optimizer: over its parameters.
        loss: computes the loss of one batch.
        budget: seconds to spend; three steps are taken in any case, and no more than 24 that last half a second.

    Raises:
        ConfigError: nothing in the model is trained.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ConfigError(f"{name}: the model has no parameters that are trained. Set requires_grad")
    final = [0.0] * len(trained)
    rows: list[list[float]] = []

    device = trained[0].device

    def now() -> float:
        # A GPU works on after its kernels were launched.
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    def looks(number: int) -> bool:
        """Whether gradients are timed in a step; on a GPU in every other one, whose backward pass waits for each."""
        return device.type == "cpu" or number % 2 == 1

    def note(place: int) -> None:
        if looks(len(rows)):
            final[place] = now()

    handles = [
        p.register_post_accumulate_grad_hook(lambda _, place=place: note(place)) for place, p in enumerate(trained)
    ]
    start = time.perf_counter()
    while True:
        spent = time.perf_counter() - start
        enough = len(rows) > STEPS and spent > _LEAST_SECONDS
        if len(rows) > _FEWEST_STEPS and (enough or spent > budget):
            break
        begin = now()
        optimizer.zero_grad()
        value = loss()
        middle = now()
        value.backward()
        after = now()
        optimizer.step()
        # A parameter without a gradient is ready at the end.
        ready = [(at - middle) / (after - middle) if at >= middle else 1.0 for at in final]
        rows.append([middle - begin, after - middle, now() - after, *ready])
    for handle in handles:
        handle.remove()
    # Means, as a median leaves out the steps in which another process had the core, and training does not.
    undisturbed = rows[1:] if device.type == "cpu" else rows[2::2]
    forward, backward, update = (fmean(row[place] for row in undisturbed) for place in range(3))
    watched = [row[3:] for number, row in enumerate(rows) if number and looks(number)]
    ready = [median(column) for column in zip(*watched, strict=True)]
    nbytes = sum(p.numel() * p.element_size() for p in trained)
    shapes, dtype = [list(p.shape) for p in trained], str(trained[0].dtype).removeprefix("torch.")
    return StepTime(name, shapes, dtype, nbytes, forward, backward, update, ready)


def time_loaded_step(comm: Comm, time_step: TimeStep, *, budget: float) -> LoadedStep:
    """Time a training step while every rank sends to the next one as much as the links carry; every rank must call.

    Args:
        comm: of all ranks; its calls are made by another thread meanwhile.
        time_step: times steps.
        budget: seconds to spend on the steps; after four times as many, no rank sends.

    Raises:
        CommError: a call fails.
    """
    following, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    under_way, ended, problems = threading.Event(), threading.Event(), list[Exception]()
    sent, start = [0.0], time.perf_counter()

    def keep_sending() -> None:
        nbytes, going = _LEAST_BYTES, True
        while going:
            x, begin = torch.zeros(nbytes // 4, dtype=torch.float32, device=comm.check_device), time.perf_counter()
            for work in [comm.send_recv(x, [following], [before]) for _ in range(_IN_FLIGHT)]:
                work.wait()
            sent[0] += _IN_FLIGHT * nbytes
            under_way.set()
            now = time.perf_counter()
            wanted = not ended.is_set() and now - start < _MOST_BUDGETS * budget
            # All continue until the last rank has its steps, with messages of the same length.
            told = torch.tensor([wanted, now - begin > _ROUND_SECONDS], dtype=torch.float32, device=comm.check_device)
            rows = [row.tolist() for row in comm.all_gather(told).wait()]
            going = any(row[0] for row in rows)
            nbytes = nbytes if any(row[1] for row in rows) else min(2 * nbytes, _MOST_BYTES)

    def body() -> None:
        try:
            keep_sending()
        except Exception as error:  # of whatever kind, it is raised where the others are
            problems.append(error)
        finally:
            under_way.set()

    thread = threading.Thread(target=body, daemon=True, name="thinwire-doctor-messages")
    thread.start()
    try:
        # Its waits have the comm's timeout.
        under_way.wait()
        step = time_step(budget)
    finally:
        ended.set()
        thread.join()
    if problems:
        raise problems[0]
    return LoadedStep(step.seconds, sent[0] / (time.perf_counter() - start))
