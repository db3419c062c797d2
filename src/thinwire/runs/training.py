"""The loop of one rank, measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.emulate import Straggler
from thinwire.errors import NonFiniteError
from thinwire.runs.coreset import ChosenData
from thinwire.runs.engine import Engine, ThinwireEngine
from thinwire.runs.measure import Record, left_out, share
from thinwire.runs.schedule import Agenda
from thinwire.runs.settings import Settings
from thinwire.runs.tensor import Cut
from thinwire.runs.timeline import Timeline
from thinwire.runs.traffic import Carried, Tap
from thinwire.runs.writer import Writer
from thinwire.tasks import Evaluation, Shard, Task

_PROGRESS_SECONDS = 0.5
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class RunContext:
    """What one rank trains with.

    Attributes:
        settings: of the run.
        task: what is learned.
        shard: this rank's part of the data.
        engine: the model under its method.
        control: the ranks once more, over connections of their own, for everything that is not training.
        straggler: how this rank is held up on purpose.
        interface: the network interface that is this worker's alone; None where there is none.
        checkpoints: where this rank's checkpoints go.
        writer: keeps the run folder; None on all ranks but 0.
        emit: tells the launcher how it goes.
        coreset: what of the shard is trained on, and with which weights; None is all of it.
        cut: how the model is cut over a mesh of workers; None is a whole model here.
    """

    settings: Settings
    task: Task
    shard: Shard
    engine: Engine
    control: Comm
    straggler: Straggler
    interface: str | None
    checkpoints: Path
    writer: Writer | None
    emit: Callable[[dict[str, Any]], None]
    coreset: ChosenData | None = None
    cut: Cut | None = None

    @property
    def number(self) -> int:
        """Of this worker's data: its rank, or that of its copy of the model."""
        return self.control.rank if self.cut is None else self.cut.copy


class Training:
    """One rank's run, from its first step or its checkpoint to its end.

    The training clock runs from one meeting of the workers to the next. It starts for all at once, and stands while
    they share what they noted, evaluate and save. So do the counters of payload and of wire bytes.
    """

    def __init__(self, place: RunContext, extra: dict[str, Any] | None = None) -> None:
        kept = extra or {"seconds": 0.0, "payload_bytes": 0.0, "carried": None}
        if place.coreset is not None and "coreset" in kept:
            place.coreset.load_state_dict(kept["coreset"])
        self.place = place
        self.engine = place.engine
        self.seconds: float = kept["seconds"]
        self.payload_bytes: float = kept["payload_bytes"]
        self.seconds_to_target: float | None = None
        self.evaluation: Evaluation | None = None
        self._before = Carried(*kept["carried"]) if kept["carried"] else None
        self._tap = Tap(place.interface)
        self._agenda = Agenda(place.settings, self.engine.step, self.seconds)
        self._timeline = Timeline(self.engine, place.control.rank, self.engine.step, place.settings.timeline_steps)
        self._mine: list[Record] = []
        self._mean_payload = self.payload_bytes
        self._compute_seconds = 0.0
        self._evaluated = -1
        self._opened = self._ended = 0.0
        self._told = 0.0

    @property
    def carried(self) -> Carried | None:
        """What this rank's interface carried while training; None where that was not measured."""
        now = self._tap.carried
        return now if now is None or self._before is None else now + self._before

    def run(self) -> None:
        """Train to the end.

        Raises:
            NonFiniteError: this rank's loss is NaN or infinite.
            CommError: another rank is lost, or does not answer.
        """
        self._barrier()
        self._timeline.origin = time.perf_counter()
        over = self._agenda.is_over(self.engine.step, self.seconds)
        self._evaluate()
        while not over:
            until = self._agenda.next_meeting(self.engine.step, self.seconds)
            self._open()
            while self.engine.step < until:
                self._take_step()
            over = self._meet()

    # -- steps ---------------------------------------------------------------------------------------------------

    def _take_step(self) -> None:
        engine, step = self.engine, self.engine.step
        self._timeline.begin(step)
        sent, exposed, start = engine.payload_bytes, engine.exposed_seconds, self._ended
        chosen = self._choosing_seconds
        paused, loss = self._move(step)
        if self.place.settings.device == "cuda":
            torch.cuda.synchronize()
        end = self._ended = time.perf_counter()
        exposed = engine.exposed_seconds - exposed
        self.payload_bytes += engine.payload_bytes - sent
        self._compute_seconds = end - start - exposed - paused - (self._choosing_seconds - chosen)
        self._timeline.end(step, start, end)
        seconds = self.seconds + end - self._opened
        self._mine += [left_out(done) for done in range(step + 1, engine.step)]
        self._mine.append(
            Record(engine.step, seconds, loss, self.payload_bytes, end - start, exposed, engine.metrics())
        )
        self._tell(self._mine[-1], end)

    def _move(self, step: int) -> tuple[float, float]:
        """One optimizer step; returns the seconds slept on purpose, and the loss."""
        place, engine = self.place, self.engine
        settings = place.settings
        engine.set_lr(settings.lr_at(step))
        loss = self._loss(step)
        value = loss.item()
        if not math.isfinite(value):
            raise _not_finite(place.control.rank, step, value, settings)
        # A worker that computes slowly is late with its gradients too, so the pause comes before they travel.
        paused = place.straggler.pause(step, self._compute_seconds)
        engine.backward(loss)
        if isinstance(engine, ThinwireEngine):
            engine.worker.record_batch(loss=loss)
        engine.update()
        return paused, value

    def _loss(self, step: int) -> Tensor:
        place, settings = self.place, self.place.settings
        if place.coreset is not None:
            return place.coreset.loss(self.engine.network, step)
        batch = place.task.batch(
            place.shard, step, batch_size=settings.batch_size, seed=settings.seed, rank=place.number
        )
        if place.cut is not None:
            return place.cut.loss(self.engine.network, batch)
        return place.task.loss(self.engine.network, batch)

    @property
    def _choosing_seconds(self) -> float:
        return 0.0 if self.place.coreset is None else self.place.coreset.seconds

    def _tell(self, record: Record, now: float) -> None:
        if self.place.control.rank == 0 and now - self._told >= _PROGRESS_SECONDS:
            self._told = now
            self.place.emit({"event": "step", **record.line()})

    # -- meetings ------------------------------------------------------------------------------------------------

    def _barrier(self) -> None:
        self.place.control.all_reduce_(torch.zeros(1)).wait()

    def _open(self) -> None:
        self._barrier()
        self._tap.open()
        self._opened = self._ended = time.perf_counter()

    def _meet(self) -> bool:
        """Stop the clock, do what is due, and say whether the run is over."""
        self._settle()
        self._barrier()
        self._tap.close()
        records = share(self.place.control, self._mine, _CPU)
        self._mine = []
        self.seconds, self._mean_payload = records[-1].seconds, records[-1].payload_bytes
        if self.place.writer is not None:
            self.place.writer.add(records)
        return self._do_what_is_due()

    def _settle(self) -> None:
        """Wait for what is in flight while the clock runs: nobody's transfer is to be had for nothing."""
        exposed, start = self.engine.exposed_seconds, time.perf_counter()
        self.engine.wait_pending()
        taken, exposed = time.perf_counter() - start, self.engine.exposed_seconds - exposed
        last = self._mine[-1]
        self._mine[-1] = replace(
            last,
            seconds=last.seconds + taken,
            step_seconds=last.step_seconds + taken,
            exposed_seconds=last.exposed_seconds + exposed,
        )

    def _do_what_is_due(self) -> bool:
        step, schedule = self.engine.step, self._agenda
        over = schedule.is_over(step, self.seconds)
        if schedule.evaluation_is_due(step, self.seconds) or over:
            self._evaluate()
        over = over or self.seconds_to_target is not None
        spans = self._timeline.gather(self.place.control, step, last=over)
        if self.place.writer is not None:
            self.place.writer.add_spans(spans)
        if schedule.save_is_due(step) or (over and self.place.settings.save_every is not None):
            self._save()
        return over

    def _evaluate(self) -> None:
        """Measure the consensus model, on rank 0 and whoever holds a part of its copy, and tell all what came of it."""
        place, step = self.place, self.engine.step
        if self._evaluated == step:
            return
        figures = torch.zeros(3, dtype=torch.float64)
        with self.engine.consensus() as model:
            if place.number == 0:
                answering = model if place.cut is None else place.cut.whole(model)
                found = place.task.evaluate(answering, limit=place.settings.eval_limit)
                figures = torch.tensor([found.loss, found.metric, found.targets], dtype=torch.float64)
            loss, metric, targets = place.control.broadcast_(figures, 0).wait().tolist()
        self._evaluated, self.evaluation = step, Evaluation(loss, metric, int(targets))
        target = place.settings.target_loss
        if target is not None and loss <= target and self.seconds_to_target is None:
            self.seconds_to_target = self.seconds
        if place.writer is not None:
            line = {"step": step, "seconds": self.seconds, "payload_bytes": self._mean_payload}
            place.writer.add_evaluation({**line, "eval_loss": loss, "eval_metric": metric})
            place.emit({"event": "evaluation", **line, "eval_loss": loss, "eval_metric": metric})

    def _save(self) -> None:
        carried, coreset = self.carried, self.place.coreset
        self.engine.save(
            self.place.checkpoints,
            {
                **({} if coreset is None else {"coreset": coreset.state_dict()}),
                "seconds": self.seconds,
                "payload_bytes": self.payload_bytes,
                "carried": None if carried is None else [carried.sent, carried.received],
            },
        )


def _not_finite(rank: int, step: int, value: float, settings: Settings) -> NonFiniteError:
    warm = "a longer --warmup-steps" if settings.warmup_steps else "--warmup-steps 100"
    return NonFiniteError(
        f"rank {rank}, step {step}: the loss is {value}; the optimizer's steps are too long. "
        f"Use a lower --lr (it is {settings.lr:g}), {warm}, or less momentum"
    )
