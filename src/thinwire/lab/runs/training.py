# SPDX-License-Identifier: Apache-2.0
"""The training loop of one rank, with measurements."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from thinwire.core.comm.base import Comm
from thinwire.elastic.notice import Notice
from thinwire.errors import NonFiniteError, ThinwireError
from thinwire.lab.emulate import Straggler, Traffic
from thinwire.lab.report.runs import Step
from thinwire.lab.runs.baselines import Engine
from thinwire.lab.runs.coreset import ChosenData
from thinwire.lab.runs.engine import ThinwireEngine
from thinwire.lab.runs.measure import InterfaceCounter, Timeline, share, skipped_step
from thinwire.lab.runs.optimizer import set_lr
from thinwire.lab.runs.recipes import parse_recipe
from thinwire.lab.runs.settings import Settings
from thinwire.lab.runs.switches import parse_switches
from thinwire.lab.runs.tensor import TensorParallel
from thinwire.lab.runs.writer import Writer
from thinwire.lab.tasks import Evaluation, Shard, Task
from thinwire.methods.strategies.base import Strategy

_PROGRESS_SECONDS = 0.5
NOTICE_STEPS = 10  # between two messages about signals
_EVALUATION_SECONDS = 5.0
_SHARE_SECONDS = 20.0
_TARGET_SECONDS = 2.0
_TARGET_SHARE = 0.05
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class RunContext:
    """The model, data and strategy of one rank.

    Attributes:
        settings: of the run.
        task: the model's task.
        shard: this rank's part of the data.
        engine: the model under its method.
        control: the same ranks over connections of their own, for everything that is not training.
        straggler: slows this rank down on purpose.
        interface: the network interface that only this worker uses; None where there is none.
        checkpoints: the folder of checkpoints.
        writer: writes the run folder; None on all ranks but 0.
        emit: sends events to the launcher.
        coreset: selects and weights examples of the shard; None trains on all of them.
        tensor_parallel: how the model is split over a mesh of workers; None if it is not.
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
    tensor_parallel: TensorParallel | None = None

    @property
    def data_rank(self) -> int:
        """The number of this worker's shard: its rank, or that of its copy of the model."""
        return self.control.rank if self.tensor_parallel is None else self.tensor_parallel.copy


class SyncSchedule:
    """The steps at which workers synchronise: to share figures, to evaluate, to save and to stop.

    Between them only the strategy sends messages. Everything here follows from figures that are equal on all ranks, so
    all ranks decide the same without a vote.

    Args:
        settings: of the run.
        step: steps done at the start.
        seconds: training time spent at the start.
    """

    def __init__(self, settings: Settings, step: int, seconds: float) -> None:
        self._settings = settings
        self._first_step = step
        self._first_seconds = seconds
        self._evaluation_seconds = seconds + self._evaluation_interval(seconds)
        # Of all strategies of the run, so that a switch finds the workers together.
        recipe = parse_recipe(settings.strategy, imports=False)
        self._switches = parse_switches(settings.switch, imports=False)
        strategies = [each for each in (recipe, *self._switches.values()) if isinstance(each, Strategy)]
        self._meets_every = math.lcm(*(each.traits.meets_every for each in strategies))
        self._eval_every, self._save_every = self._met(settings.eval_every), self._met(settings.save_every)

    def _met(self, every: int | None) -> int | None:
        """Return the next number of steps after which all workers are at the same one."""
        return None if every is None else -(-every // self._meets_every) * self._meets_every

    def next_sync(self, step: int, seconds: float) -> int:
        """Return the step after which the workers synchronise next."""
        settings = self._settings
        candidates = [(step // every + 1) * every for every in (self._eval_every, self._save_every) if every]
        candidates += [settings.steps] if settings.steps is not None else []
        candidates += [at for at in self._switches if at > step]
        # Only where something depends on the time that steps take: a synchronisation costs strategies that keep
        # messages in flight their overlap.
        if settings.steps is None or settings.eval_every is None or settings.seconds is not None:
            # After 1, 3, 7, 15, ... steps: the pace is not known yet, and the first steps are slow.
            candidates.append(2 * (step - self._first_step) + 1 + self._first_step)
            if step > self._first_step:
                waits = [_SHARE_SECONDS]
                if settings.eval_every is None:
                    waits.append(self._evaluation_seconds - seconds)
                if settings.seconds is not None:
                    waits.append(settings.seconds - seconds)
                for wait in waits:
                    steps = wait / max(self._pace(step, seconds), 1e-9)
                    # Far off the pace may still change: go most of the way, then look again.
                    candidates.append(step + (round(steps) if steps < 5 else int(0.8 * steps)))
        return self._met(max(step + 1, min(candidates))) or 0

    def evaluation_is_due(self, step: int, seconds: float) -> bool:
        """Return True if to evaluate at this synchronisation."""
        if self._eval_every is not None:
            return step % self._eval_every == 0
        if seconds + 0.5 * self._pace(step, seconds) < self._evaluation_seconds:
            return False
        self._evaluation_seconds = seconds + self._evaluation_interval(seconds)
        return True

    def save_is_due(self, step: int) -> bool:
        """Return True if to save at this synchronisation."""
        every, last = self._save_every, self._settings.steps
        return every is not None and (step % every == 0 or (last is not None and step >= last))

    def takes_over(self, step: int) -> Strategy | None:
        """Return the strategy that replaces the current one after this step; None if none does."""
        return self._switches.get(step)

    def is_over(self, step: int, seconds: float) -> bool:
        """Return True if the steps or the seconds are used up, to the nearest whole step."""
        settings = self._settings
        if settings.steps is not None and step >= settings.steps:
            return True
        return settings.seconds is not None and seconds + 0.5 * self._pace(step, seconds) >= settings.seconds

    def _pace(self, step: int, seconds: float) -> float:
        """Seconds per step so far."""
        return (seconds - self._first_seconds) / max(1, step - self._first_step)

    def _evaluation_interval(self, seconds: float) -> float:
        # With a target, the time to reach it is known to one interval only; more often would cost too much.
        if self._settings.target_loss is not None:
            return _TARGET_SECONDS + _TARGET_SHARE * seconds
        return (self._settings.seconds or 10 * _EVALUATION_SECONDS) / 10


class Taken(NamedTuple):
    """A training step: its loss, when it ended, bytes sent, and the seconds that it waited and was slowed down."""

    loss: float
    end: float
    sent: float
    exposed_seconds: float
    paused: float


def take_step(
    engine: Engine,
    settings: Settings,
    straggler: Straggler,
    compute: Callable[[], Tensor],
    computed: Callable[[], float],
    refuse: Callable[[float], NoReturn],
) -> Taken:
    """Take one training step.

    Args:
        engine: the model under its method.
        settings: of the run.
        straggler: slows this rank down on purpose.
        compute: computes the loss of the step's batch.
        computed: how long computation takes, for the straggler.
        refuse: called with a loss that is NaN or infinite, if the settings do not allow one.
    """
    step, sent, exposed = engine.step, engine.payload_bytes, engine.exposed_seconds
    set_lr(engine.optimizer, settings.lr_at(step))
    loss = compute()
    value = loss.item()
    if not math.isfinite(value) and settings.nonfinite == "raise":
        refuse(value)
    # A slow worker's gradients are late too, so it pauses before they are sent.
    paused = straggler.pause(step, computed())
    engine.backward(loss)
    if isinstance(engine, ThinwireEngine):
        engine.worker.record_batch(loss=loss)
    engine.update()
    if settings.device == "cuda":
        torch.cuda.synchronize()
    return Taken(value, time.perf_counter(), engine.payload_bytes - sent, engine.exposed_seconds - exposed, paused)


class Training:
    """One rank's run, from its first step or its checkpoint to its end.

    The training clock runs from one synchronisation of the workers to the next. All workers start it together, and
    stop it while they share figures, evaluate and save; the counters of payload, of wire bytes and of CPU time stop
    with it.
    """

    def __init__(self, context: RunContext, extra: dict[str, Any] | None = None) -> None:
        resumed = extra or {"seconds": 0.0, "payload_bytes": 0.0, "carried": None}
        if context.coreset is not None and "coreset" in resumed:
            context.coreset.load_state_dict(resumed["coreset"])
        self.context = context
        self.engine = context.engine
        self.seconds: float = resumed["seconds"]
        self.payload_bytes: float = resumed["payload_bytes"]
        self.cpu_seconds: float = resumed.get("cpu_seconds", 0.0)
        self.seconds_to_target: float | None = None
        self.evaluation: Evaluation | None = None
        self._wire_before = Traffic(*resumed["carried"]) if resumed["carried"] else None
        self._counter = InterfaceCounter(context.interface)
        self._schedule = SyncSchedule(context.settings, self.engine.step, self.seconds)
        self._timeline = Timeline(self.engine, context.control.rank, self.engine.step, context.settings.timeline_steps)
        self._records: list[Step] = []  # of this rank, since the last synchronisation
        self._mean_payload = self.payload_bytes
        self._compute_seconds = self._data_seconds = 0.0
        self._evaluated_step = -1
        self._clock_start = self._step_end = self._cpu_start = 0.0
        self._last_event = 0.0
        self.notice: dict[str, str] = {}
        """Why ranks were asked to leave, by rank; empty where none was."""

    @property
    def wire_bytes(self) -> Traffic | None:
        """Bytes of this rank's interface while training; None where they were not measured."""
        now = self._counter.total
        return now if now is None or self._wire_before is None else now + self._wire_before

    def run(self) -> None:
        """Train to the end, or until a rank is asked to leave.

        Raises:
            NonFiniteError: a rank's loss is NaN or infinite; all ranks raise it under a strategy of thinwire's.
            CommError: another rank was lost, or does not answer.
        """
        with self._listening() as notice:
            self._run(notice)

    @contextmanager
    def _listening(self) -> Generator[Notice | None]:
        """Inform the ranks of signals inside the block."""
        engine = self.engine
        if self.context.settings.on_notice is None or not isinstance(engine, ThinwireEngine):
            yield None
            return
        notice = Notice(engine.worker, every=NOTICE_STEPS)
        try:
            yield notice
        finally:
            notice.close()

    def _run(self, notice: Notice | None) -> None:
        self._barrier()
        self._timeline.origin = time.perf_counter()
        over = self._schedule.is_over(self.engine.step, self.seconds)
        self._evaluate()
        while not over:
            next_sync = self._schedule.next_sync(self.engine.step, self.seconds)
            # The barrier comes first, so that no worker's clock counts another's evaluation or saving.
            self._barrier()
            self._counter.start()
            self._cpu_start = time.process_time()
            self._clock_start = self._step_end = time.perf_counter()
            self._switch()
            while self.engine.step < next_sync and not self.notice:
                self._take_step()
                if notice is not None and notice.agreed():
                    self.notice = {str(rank): reason for rank, reason in notice.reasons.items()}
            over = self._synchronise()

    def _switch(self) -> None:
        """Switch to another strategy, if one is due; its time and bytes are those of the next step."""
        engine, new = self.engine, self._schedule.takes_over(self.engine.step)
        if new is None or not isinstance(engine, ThinwireEngine):
            return
        sent = engine.payload_bytes
        done = engine.worker.switch(new)
        self.payload_bytes += engine.payload_bytes - sent
        if self.context.control.rank == 0:
            self.context.emit({"event": "switch", **asdict(done)})

    def _barrier(self) -> None:
        self.context.control.all_reduce_(torch.zeros(1, dtype=torch.float32, device="cpu")).wait()

    def _take_step(self) -> None:
        context, engine, step = self.context, self.engine, self.engine.step
        self._timeline.begin(step)
        start, selection = self._step_end, self._selection_seconds

        def refuse(value: float) -> NoReturn:
            self._raise_on_all(_not_finite(context.control.rank, step, value, context.settings))

        slow = (context.straggler, lambda: self._loss(step), lambda: self._compute_seconds)
        taken = take_step(engine, context.settings, *slow, refuse)
        # A step begins where the one before it ended, so that their times add up to the training time.
        end = self._step_end = taken.end
        self.payload_bytes += taken.sent
        choosing = self._selection_seconds - selection
        self._compute_seconds = end - start - taken.exposed_seconds - taken.paused - choosing
        self._timeline.end(step, start, end)
        seconds = self.seconds + end - self._clock_start
        # A late worker may have skipped steps within the call.
        self._records += [skipped_step(done) for done in range(step + 1, engine.step)]
        times, metrics = (end - start, taken.exposed_seconds), engine.metrics()
        record = Step(engine.step, seconds, taken.loss, self.payload_bytes, *times, metrics, self._data_seconds)
        self._records.append(record)
        if context.control.rank == 0 and end - self._last_event >= _PROGRESS_SECONDS:
            self._last_event = end
            context.emit({"event": "step", **record.line()})

    def _raise_on_all(self, error: ThinwireError) -> NoReturn:
        """Raise an error that this rank has found; under PyTorch's own methods the others cannot be informed."""
        if not isinstance(self.engine, ThinwireEngine):
            raise error
        try:
            self.engine.worker.comm.raise_on_all(error)
        except ThinwireError as first:
            # Some ranks may be sharing figures already.
            self.context.control.raise_on_all(first)

    def _loss(self, step: int) -> Tensor:
        context, settings = self.context, self.context.settings
        if context.coreset is not None:
            return context.coreset.loss(self.engine.network, step)
        start = time.perf_counter()
        batch = context.task.batch(
            context.shard, step, batch_size=settings.batch_size, seed=settings.seed, rank=context.data_rank
        )
        self._data_seconds = time.perf_counter() - start
        if context.tensor_parallel is not None:
            return context.tensor_parallel.loss(self.engine.network, batch)
        return context.task.loss(self.engine.network, batch)

    @property
    def _selection_seconds(self) -> float:
        return 0.0 if self.context.coreset is None else self.context.coreset.seconds

    def _synchronise(self) -> bool:
        """Stop the clock, share figures, and do what is due; returns whether the run is over."""
        self._wait_pending()
        self.cpu_seconds += time.process_time() - self._cpu_start
        self._barrier()
        self._counter.stop()
        records, times = share(self.context.control, self._records, _CPU)
        self._records = []
        self.seconds, self._mean_payload = records[-1].seconds, records[-1].payload_bytes
        writer, step = self.context.writer, self.engine.step
        if writer is not None:
            writer.add(records)
            writer.add_workers(step, times)
            if isinstance(self.engine, ThinwireEngine):
                writer.add_slow_worker(self.engine.worker.stats().slow_worker)
        over = self._schedule.is_over(step, self.seconds)
        if self._schedule.evaluation_is_due(step, self.seconds) or over:
            self._evaluate()
        over = over or self.seconds_to_target is not None or bool(self.notice)
        spans = self._timeline.gather(self.context.control, step, last=over)
        if writer is not None:
            writer.add_spans(spans)
        if self._schedule.save_is_due(step) or (over and self._saves):
            self._save()
        if self.notice and writer is not None:
            self.context.emit({"event": "notice", "step": step, "reasons": self.notice})
        return over

    @property
    def _saves(self) -> bool:
        """Return True if the end of the run is saved."""
        return self.context.settings.save_every is not None or bool(self.notice)

    def _wait_pending(self) -> None:
        """Wait for messages in flight while the clock still runs: their time belongs to the last step."""
        exposed, start = self.engine.exposed_seconds, time.perf_counter()
        self.engine.wait_pending()
        taken, exposed = time.perf_counter() - start, self.engine.exposed_seconds - exposed
        last = self._records[-1]
        self._records[-1] = replace(
            last,
            seconds=last.seconds + taken,
            step_seconds=last.step_seconds + taken,
            exposed_seconds=last.exposed_seconds + exposed,
        )

    def _evaluate(self) -> None:
        """Evaluate the consensus model on the ranks that hold the first copy, and broadcast the result."""
        context, step = self.context, self.engine.step
        if self._evaluated_step == step:
            return
        figures = torch.zeros(3, dtype=torch.float64, device="cpu")
        sent = self.engine.payload_bytes
        with self.engine.consensus() as model:
            sent = self.engine.payload_bytes - sent
            if context.data_rank == 0:
                whole = model if context.tensor_parallel is None else context.tensor_parallel.whole(model)
                found = context.task.evaluate(whole, limit=context.settings.eval_limit)
                figures = torch.tensor([found.loss, found.metric, found.targets], dtype=torch.float64, device="cpu")
            loss, metric, targets = context.control.broadcast_(figures, 0).wait().tolist()
        self._evaluated_step, self.evaluation = step, Evaluation(loss, metric, int(targets))
        target = context.settings.target_loss
        if target is not None and loss <= target and self.seconds_to_target is None:
            self.seconds_to_target = self.seconds
        if context.writer is not None:
            line = {"step": step, "seconds": self.seconds, "payload_bytes": self._mean_payload}
            line |= {"eval_loss": loss, "eval_metric": metric, "eval_payload_bytes": sent}
            context.writer.add_evaluation(line)
            context.emit({"event": "evaluation", **line})

    def _save(self) -> None:
        wire, coreset = self.wire_bytes, self.context.coreset
        self.engine.save(
            self.context.checkpoints,
            {
                **({} if coreset is None else {"coreset": coreset.state_dict()}),
                "seconds": self.seconds,
                "payload_bytes": self.payload_bytes,
                "cpu_seconds": self.cpu_seconds,
                "carried": None if wire is None else [wire.sent_bytes, wire.received_bytes],
            },
            keep=self.context.settings.keep,
        )


def _not_finite(rank: int, step: int, value: float, settings: Settings) -> NonFiniteError:
    warm = "a longer --warmup-steps" if settings.warmup_steps else "--warmup-steps 100"
    return NonFiniteError(
        f"rank {rank}, step {step}: the loss is {value}; the optimizer's steps are too long. "
        f"Use a lower --lr (it is {settings.lr:g}), {warm}, or less momentum"
    )
