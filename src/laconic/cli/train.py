"""`laconic train`: one run of a recipe on a task."""

from __future__ import annotations

import json as json_text
import shlex
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from laconic.cli.console import out
from laconic.cli.progress import Watch, show_summaries
from laconic.errors import ConfigError

_KEPT = (
    "task",
    "strategy",
    "tensor_parallel",
    "batch_size",
    "lr",
    "optimizer",
    "momentum",
    "weight_decay",
    "warmup_steps",
    "schedule",
    "split",
    "coreset",
    "seed",
)


@dataclass(frozen=True)
class Train:
    """Train a recipe on a task, with several workers on this machine, and keep what happened in a folder.

    Example: laconic train --task text --strategy "SlowMo(base=PushSum(), period=48)" --workers 4 --link 100mbit

    Under torchrun the same command is one of the workers, on however many machines. What is left open is filled in
    with what suits the task; without --steps, --seconds or --target-loss a run takes 200 steps.

    Args:
        task: text, digits, mnist, cifar10, shakespeare, wikitext2, agnews, multi30k or a9a.
        model_size: a named size of the task's model.
        strategy: a recipe such as "SlowMo(base=PushSum(), period=48)", or one of torch's own: ddp, ddp+bf16,
            ddp+powersgd, post-local-sgd.
        workers: how many; 4 unless torchrun says otherwise.
        tensor_parallel: rows and columns of workers that each copy of a language model is cut over, such as 2x2; with
            8 workers two copies train together.
        link: emulated links, [RANK:]RATE[+DELAY], several by commas, such as 100mbit or 1gbit+5ms,0:10mbit.
        slow: workers that compute slower, [RANK:]FACTORx, such as 2:3x.
        stall: workers that stall now and then, [RANK:]PROBABILITY:DURATION, such as 0.15:200ms.
        stop: workers whose process is stopped for a while, RANK:AFTER:DURATION, such as 2:3s:5s.
        steps: optimizer steps.
        seconds: a budget of training time; set-up and evaluation do not count.
        target_loss: end when the held-out loss of the consensus model, in nats, is no more than this.
        batch_size: examples a step and worker.
        lr: the peak learning rate.
        optimizer: sgd, adamw, lamb, those of CompressedMomentum, onebit-lamb and
            onebit-adam, or that of ZeroOne, zero-one-adam.
        momentum: of sgd.
        weight_decay: as the optimizer means it.
        warmup_steps: steps over which the learning rate rises.
        schedule: constant, or cosine down to a tenth at the last step.
        split: how data are dealt to workers: iid, dirichlet(ALPHA), label or group.
        coreset: the examples each worker trains on, such as "Craig(fraction=0.1, every=5)", or Random, Stratified,
            KCenter, El2n, Grand or Crest; choosing them counts as training time. All unless given.
        seed: of the first parameters, the deal and the order of data.
        out: the run's folder; runs/TASK-STRATEGY-TIME unless given.
        resume: the folder of a run that was saved, to go on with from its newest checkpoint.
        save_every: steps between checkpoints.
        eval_every: steps between evaluations; about ten over the run unless given.
        eval_limit: held-out examples looked at each time; 256 unless given.
        data: the folder of data files; LACONIC_DATA unless given.
        device: cpu or cuda.
        threads: threads of computation per worker; all cores are shared out unless given.
        deadline_seconds: how long a worker waits for the others.
        tensorboard: write TensorBoard events too.
        trace: write trace.json too, for ui.perfetto.dev.
        json: print the summary as JSON.
    """

    task: str | None = None
    model_size: str | None = None
    strategy: str | None = None
    workers: int | None = None
    tensor_parallel: str | None = None
    link: str | None = None
    slow: str | None = None
    stall: str | None = None
    stop: str | None = None
    steps: int | None = None
    seconds: float | None = None
    target_loss: float | None = None
    batch_size: int | None = None
    lr: float | None = None
    optimizer: Literal["sgd", "adamw", "lamb", "onebit-lamb", "onebit-adam", "zero-one-adam"] | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    warmup_steps: int | None = None
    schedule: Literal["constant", "cosine"] | None = None
    split: str | None = None
    coreset: str | None = None
    seed: int | None = None
    out: Path | None = None
    resume: Path | None = None
    save_every: int | None = None
    eval_every: int | None = None
    eval_limit: int | None = None
    data: Path | None = None
    device: Literal["cpu", "cuda"] | None = None
    threads: int | None = None
    deadline_seconds: float | None = None
    tensorboard: bool = False
    trace: bool = False
    json: bool = False

    def __call__(self) -> int:
        """Train; returns 0."""
        from laconic.runs import launch
        from laconic.runs.processes import started_by_torchrun

        if started_by_torchrun():
            return self._join()
        settings, folder = self._prepared(4 if self.workers is None else self.workers)
        with Watch(settings.strategy, settings.steps, settings.seconds) as watch:
            summary = launch(settings, folder, listener=watch, resume=self.resume is not None)
        return self._show(summary, folder)

    def _join(self) -> int:
        """Be one of torchrun's workers."""
        import os

        from laconic.runs import RunFolder, work

        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if self.workers not in (None, size):
            raise ConfigError(f"--workers {self.workers}: torchrun has started {size}; leave it out")
        if self.link is not None:
            raise ConfigError(f"--link {self.link}: under torchrun the links are real; leave it out")
        settings, folder = self._prepared(size)
        if rank == 0:
            home = RunFolder(folder)
            if self.resume is None:
                home.create()
            home.write_settings(settings)
        with Watch(settings.strategy, settings.steps, settings.seconds) as watch:
            summary = work(settings, folder, emit=watch, resume=self.resume is not None)
        return 0 if summary is None else self._show(summary, folder)

    def _prepared(self, workers: int) -> tuple[Any, Path]:
        """The settings of the run, and its folder."""
        from laconic.runs import resolve

        if self.resume is not None:
            return self._resumed(), self.resume
        settings = resolve({**self.asked(), "workers": workers})
        return settings, self.out or default_folder(settings.task, settings.strategy)

    def asked(self) -> dict[str, Any]:
        """What was typed, by the names that settings have for it."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("out", "resume", "trace", "json"):
            own.pop(name)
        own["model"] = own.pop("model_size")
        own["data"] = None if self.data is None else str(self.data)
        return {**own, "command": shlex.join(["laconic", *sys.argv[1:]])}

    def _resumed(self) -> Any:
        """The settings of the run to go on with; what decides its numbers cannot change, its end may."""
        from laconic.runs import RunFolder, resolve

        assert self.resume is not None
        if self.out is not None:
            raise ConfigError(f"--out {self.out}: a run goes on in its own folder, {self.resume}; leave it out")
        before = RunFolder(self.resume).settings()
        asked = {name: value for name, value in self.asked().items() if value is not None and value is not False}
        given = {**before.to_json(), **asked, "tensorboard": self.tensorboard or before.tensorboard}
        settings = resolve(given)
        for name in (*_KEPT, "model"):
            was, now = getattr(before, name), getattr(settings, name)
            if was != now:
                raise ConfigError(f"{name}={now!r}: the run to resume has {was!r}, which cannot change; leave it out")
        return replace(settings, command=before.command)

    def _show(self, summary: dict[str, Any], folder: Path) -> int:
        from laconic.report import write_trace

        if self.trace:
            write_trace(folder)
        if self.json:
            out.print(json_text.dumps(summary), markup=False)
            return 0
        show_summaries([summary])
        out.print(f"{folder}", markup=False)
        return 0


def default_folder(task: str, name: str) -> Path:
    """A new folder for a run, by its task, its strategy and the time."""
    from laconic.runs.comparison import short_name

    stem = f"{task}-{short_name(name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = Path("runs") / stem, 2
    while path.exists():
        path, number = Path("runs") / f"{stem}-{number}", number + 1
    return path
