# SPDX-License-Identifier: Apache-2.0
"""One worker of `thinwire train --elastic`: trains with the other workers, and reports its steps to the launcher."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from thinwire.core.view import View
from thinwire.elastic.late_rounds import LateRounds
from thinwire.elastic.notice import Notice
from thinwire.elastic.sampler import ElasticSampler
from thinwire.errors import NonFiniteError
from thinwire.lab.emulate import Straggler
from thinwire.lab.runs.engine import ThinwireEngine
from thinwire.lab.runs.folder import Fields, RunFolder
from thinwire.lab.runs.measure import peak_memory
from thinwire.lab.runs.optimizer import make_optimizer
from thinwire.lab.runs.own_functions import load_task
from thinwire.lab.runs.recipes import parse_late, parse_recipe
from thinwire.lab.runs.settings import Settings
from thinwire.lab.runs.training import NOTICE_STEPS, take_step
from thinwire.lab.tasks import Shard, Task
from thinwire.methods.codecs.base import draw_key
from thinwire.methods.strategies.base import Strategy
from thinwire.worker.attach import attach
from thinwire.worker.worker import Worker

_REPORT_SECONDS = 0.25


class _OwnOrder:
    """The order in which one worker takes the batches: a permutation of all of them in each epoch.

    Attributes:
        taken: the number of batches that it has taken.
    """

    def __init__(self, batches: int, *, seed: int, worker: int) -> None:
        self._batches, self._seed, self._worker = batches, seed, worker
        self.taken = 0

    def next(self) -> int:
        """Return the number of the next batch, from 0."""
        epoch, at = divmod(self.taken, self._batches)
        self.taken += 1
        draws = torch.Generator("cpu").manual_seed(draw_key(self._seed, epoch, rank=self._worker))
        return int(torch.randperm(self._batches, generator=draws, device="cpu")[at])


def _passes(every: int | None, before: int, step: int) -> bool:
    """Return True if a multiple of `every` lies after one step and not after another."""
    return every is not None and step // every > before // every


class ElasticTraining:
    """One worker's part in an elastic run.

    The launcher, which outlives every worker, writes the record of the run. Each worker reports its steps to it a few
    times a second, so that little is lost with a worker.

    Args:
        settings: equal on all workers.
        emit: sends an event to the launcher.
        folder: of the run.
        resume: continue from its checkpoints, which only workers save whose rounds close without late ones.
    """

    def __init__(
        self, settings: Settings, emit: Callable[[Fields], None], folder: RunFolder, *, resume: bool = False
    ) -> None:
        recipe = parse_recipe(settings.strategy, imports=False)
        assert isinstance(recipe, Strategy), "resolve() refuses torch's own methods"
        self._settings, self._emit = settings, emit
        self._task: Task = load_task(settings)
        with torch.device("cpu"):  # where the batches are
            model = self._task.model(settings.model, seed=settings.seed)
        self._parameters = sum(p.numel() for p in model.parameters())
        optimizer = make_optimizer(model, settings)
        self.worker: Worker = attach(
            model,
            optimizer,
            recipe,
            elastic=True if settings.late is None else parse_late(settings.late, imports=False),
            seed=settings.seed,
            nonfinite=settings.nonfinite,
            timeout=settings.timeout,
        )
        assert self.worker.elastic is not None
        self._views = self.worker.elastic
        self._engine = ThinwireEngine(self.worker, optimizer)
        self._straggler = Straggler.from_environment()
        self._shard: Shard = self._task.shards(1, split="iid", seed=settings.seed)[0]
        # A batch is named by its number in the epoch, and always holds the same examples.
        batches = self._task.steps_per_epoch(self._shard, settings.batch_size)
        self._sampler = ElasticSampler(batches, seed=settings.seed)
        # Workers that take steps at their own pace each have an order of their own.
        self._own = None
        if isinstance(self._views, LateRounds):
            self._own = _OwnOrder(batches, seed=settings.seed, worker=self._views.number)
            extra = self.worker.load(folder.checkpoints) if resume else {}
            self._own.taken = int(extra.get("batches", 0))
        self._folder = folder
        self._rows: list[Fields] = []
        self._told_at = 0.0
        self._evaluated, self._saved = -1, self.worker.step

    def run(self) -> None:
        """Train to the last step.

        Raises:
            NonFiniteError: this worker's loss is NaN or infinite, and `nonfinite` is "raise".
            CommError: the store is gone, or the others continued without this worker.
        """
        worker, settings = self.worker, self._settings
        self._views.on_view.append(self._tell_view)
        self._emit({"event": "start", "parameters": self._parameters, "step": worker.step})
        self._tell_view(worker.view)
        notice = Notice(worker, every=NOTICE_STEPS) if settings.on_notice is not None else None
        # The others have evaluated after the step at whose end this worker joined.
        steps, self._evaluated = settings.steps or 0, worker.step if self._views.has_just_joined else -1
        while True:
            if worker.step != self._evaluated and self._evaluation_is_due(steps):
                self._evaluated = worker.step
                self._evaluate()
            if worker.step >= steps:
                break
            self._take_step()
            self._save_if_due()
            if notice is not None and notice.leave():
                self._tell_rows()
                self._emit({"event": "left", "step": worker.step, "worker": self._views.worker_id})
                return
        if notice is not None:
            notice.close()
        self._tell_rows()
        self._emit({"event": "end", "step": worker.step, "memory": peak_memory("cpu"), "costs": self._views.costs})

    def _evaluation_is_due(self, steps: int) -> bool:
        step, every = self.worker.step, self._settings.eval_every
        if self._own is not None:  # its step may skip some
            return step == 0 or step >= steps or _passes(every, max(self._evaluated, 0), step)
        return step in (0, steps) or (every is not None and step % every == 0)

    def _save_if_due(self) -> None:
        if self._own is not None and _passes(self._settings.save_every, self._saved, self.worker.step):
            self._saved = self.worker.step
            self.worker.save(self._folder.checkpoints, extra={"batches": self._own.taken}, keep=self._settings.keep)

    def _take_step(self) -> None:
        worker, engine, settings = self.worker, self._engine, self._settings
        step, start = worker.step, time.perf_counter()

        def loss() -> Tensor:
            number = self._sampler.share(worker) if self._own is None else self._own.next()
            batch = self._task.batch(self._shard, number, batch_size=settings.batch_size, seed=settings.seed, rank=0)
            return self._task.loss(engine.network, batch)

        def refuse(value: float) -> NoReturn:
            raise NonFiniteError(f"worker {self._views.worker_id}, step {step}: the loss is {value}. Use a lower --lr")

        slow = (self._straggler, loss, lambda: time.perf_counter() - start)
        taken = take_step(engine, settings, *slow, refuse)
        times = {"step": worker.step, "step_seconds": taken.end - start}
        self._rows.append({**times, **taken._asdict(), "metrics": engine.metrics()})
        if taken.end - self._told_at >= _REPORT_SECONDS:
            self._tell_rows()

    def _tell_rows(self) -> None:
        self._told_at = time.perf_counter()
        if self._rows:
            self._emit({"event": "rows", "worker": self._views.worker_id, "rows": self._rows})
            self._rows = []

    def _tell_view(self, view: View) -> None:
        self._emit(
            {
                "event": "view",
                "epoch": view.epoch,
                "members": list(view.members),
                "joined": list(view.joined),
                "lost": list(view.lost),
                "left": dict(view.left),
                "step": self.worker.step,
                "at": time.perf_counter(),
            }
        )

    def _evaluate(self) -> None:
        # All workers do: any of them may be lost meanwhile, and the others have the result.
        self._tell_rows()
        with self.worker.consensus() as model, torch.no_grad():
            found = self._task.evaluate(model, limit=self._settings.eval_limit)
        figures: dict[str, Any] = {"eval_loss": found.loss, "eval_metric": found.metric, "targets": found.targets}
        self._emit({"event": "evaluation", "step": self.worker.step, "at": time.perf_counter(), **figures})
