# SPDX-License-Identifier: Apache-2.0
"""Keep a recommended strategy only if it is as fast as promised: measured on the first steps, decided together."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from thinwire.core.validation import check_range
from thinwire.errors import ConfigError
from thinwire.methods.strategies.base import Strategy
from thinwire.methods.strategies.recipe import parse
from thinwire.worker.worker import Worker, internals_of

_LEAST_STEPS = 8
_SKIPPED_STEPS = 2
_LOGGER = logging.getLogger("thinwire")


@dataclass(frozen=True)
class Verdict:
    """The decision of a guard, equal on all ranks.

    Attributes:
        step: optimizer steps done then.
        kept: whether the strategy continues; otherwise the fallback does.
        strategy: its recipe.
        seconds: of one of its steps, on the slowest rank.
        fallback: the recipe of the fallback.
        fallback_seconds: of one of its steps: as it was given, the least that it can take, or measured on the slowest
            rank.
    """

    step: int
    kept: bool
    strategy: str
    seconds: float
    fallback: str
    fallback_seconds: float


class Guard:
    """Measure a worker's steps, and switch to a fallback if it is faster; all ranks make one.

    Without `fallback_seconds` the fallback itself is measured first, so that training begins with it; with
    `fallback_least` the strategy is, and the fallback only if it could be faster. A step lasts from the end of the one
    before to its own end. The result is the median of `windows` means, each over whole periods of the strategy and at
    least 8 steps; the first 2 steps of each strategy are left out. Ranks then share their result, 8 bytes, and use the
    slowest. The guard logs its decision and removes its hook. If your code switches the worker meanwhile, that strategy
    continues, and the guard ends without a verdict.

    Attributes:
        worker: the measured one.
        verdict: None while it measures.

    Args:
        worker: with the strategy that is to be tried; between two of its steps.
        fallback: the strategy to use if that is too slow.
        fallback_seconds: the time of a step of the fallback on these machines and links, such as a prediction; None
            measures it.
        fallback_least: a lower bound of that time, such as the time of an all-reduce of all gradients: a strategy that
            is faster is kept without a step of the fallback. Not with `fallback_seconds`.
        tolerance: how much slower the strategy may be, as a share of the fallback's time.
        windows: how many means are taken.

    Raises:
        ConfigError: a value out of its range, or a fallback that cannot serve this worker.

    Example:
        >>> import torch, thinwire
        >>> from thinwire.planning.plan.guard import Guard
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     worker = thinwire.attach(model, optimizer, thinwire.LocalSGD(period=4), comm=comm)
        ...     guard = Guard(worker, fallback_seconds=1e-9)
        ...     for _ in range(30):
        ...         model(torch.ones(1, 1)).sum().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...     return guard.verdict.kept, guard.verdict.step, worker.strategy
        >>> thinwire.run_threads(2, train)[0]
        (False, 26, AllReduce(codec=None))
    """

    def __init__(
        self,
        worker: Worker,
        *,
        fallback: Strategy | str = "AllReduce()",
        fallback_seconds: float | None = None,
        fallback_least: float | None = None,
        tolerance: float = 0.02,
        windows: int = 3,
    ) -> None:
        for name, given in {"fallback_seconds": fallback_seconds, "fallback_least": fallback_least}.items():
            check_range(name, given, "(0, inf)", "None measures it")
        if fallback_seconds is not None and fallback_least is not None:
            raise ConfigError("fallback_least with fallback_seconds: what it takes is given. Use one of the two")
        check_range("tolerance", tolerance, "[0, inf)", "0.02 is two percent")
        check_range("windows", windows, "1..", "3 let one of them be disturbed")
        self.worker = worker
        self.verdict: Verdict | None = None
        self._tried = worker.strategy
        self._fallback = parse(fallback) if isinstance(fallback, str) else fallback
        self._seconds: float | None = None  # of the strategy that is tried
        self._fallback_seconds, self._fallback_least = fallback_seconds, fallback_least
        self._tolerance, self._windows = tolerance, windows
        if fallback_seconds is None and fallback_least is None:
            worker.switch(self._fallback)
        self._begin()
        self._seen = worker.step
        # Registered after the worker's own hook, and so called after it.
        self._handle = worker.optimizer.register_step_post_hook(self._after_step)
        internals_of(worker).undo.callback(self._handle.remove)

    def _begin(self) -> None:
        self._expected = self.worker.strategy
        period = self._expected.traits.period or 1
        self._window = period * -(-_LEAST_STEPS // period)
        self._steps, self._marks = -_SKIPPED_STEPS, list[float]()

    def _after_step(self, *_: Any) -> None:
        if self.worker.step == self._seen:
            return  # a step within another one, of a class that calls its base's
        self._seen = self.worker.step
        if self.worker.strategy is not self._expected:
            # The loop has switched, or has loaded a checkpoint of another strategy, which continues.
            self._handle.remove()
            return
        if self.worker.replicas[0].active < self.worker.comm.size:
            # Within join(), when the data of some ranks have ended: such a step is shorter, and none to switch at.
            self._begin()
            return
        self._steps += 1
        if self._steps < 0 or self._steps % self._window:
            return
        self._marks.append(self.worker.comm.runtime.clock())
        if len(self._marks) <= self._windows:
            return
        spans = [after - before for before, after in zip(self._marks, self._marks[1:], strict=False)]
        seconds = self._slowest(median(spans) / self._window)
        if self._expected is self._tried:
            self._seconds = seconds
        else:
            self._fallback_seconds = seconds
        if self._seconds is None:
            self._measure(self._tried)
        elif self._fallback_seconds is not None:
            self._decide(self._seconds, self._fallback_seconds)
        elif self._seconds <= (self._fallback_least or 0.0):
            self._decide(self._seconds, self._fallback_least or 0.0)
        else:
            self._measure(self._fallback)

    def _measure(self, strategy: Strategy) -> None:
        self.worker.switch(strategy)
        self._begin()

    def _decide(self, seconds: float, fallback: float) -> None:
        worker = self.worker
        self._handle.remove()
        kept = seconds <= (1 + self._tolerance) * fallback
        goes_on = self._tried if kept else self._fallback
        if worker.strategy is not goes_on:
            worker.switch(goes_on)
        self.verdict = Verdict(worker.step, kept, str(self._tried), seconds, str(self._fallback), fallback)
        if worker.comm.rank == 0:
            _LOGGER.log(
                logging.INFO if kept else logging.WARNING,
                "step %d: %s continues: a step of %s takes %.3g s on the slowest rank, and one of %s %.3g s",
                *(worker.step, str(goes_on), str(self._tried), seconds, str(self._fallback), fallback),
            )

    def _slowest(self, seconds: float) -> float:
        worker = self.worker
        internals_of(worker).wait_pending()
        own = torch.tensor([seconds], dtype=torch.float64, device=worker.replicas[0].x.device)
        return max(float(x) for x in worker.comm.all_gather(own).wait())
