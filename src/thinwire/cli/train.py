"""`thinwire train`: one run of a recipe on a task."""

from __future__ import annotations

import json as json_text
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli.console import out
from thinwire.cli.options import default_folder, settings_as_options
from thinwire.cli.progress import Watch, show_summaries
from thinwire.errors import ConfigError

if TYPE_CHECKING:
    from thinwire.runs import Settings

# Settings that a resumed run cannot change.
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
    "model",
)


@dataclass(frozen=True)
class Train(settings_as_options(without=["timeline_steps"])):
    """Train a recipe on a task, with several workers on this machine, and write the run's record to a folder.

    Example: thinwire train --task text --strategy "SlowMo(base=PushSum(), period=48)" --workers 4 --link 100mbit

    Under torchrun the same command is one of the workers, on however many machines; otherwise it starts 4 workers
    unless told how many. What is left open is filled in with what suits the task; a run takes 200 steps unless it is
    given --steps, --seconds or --target-loss.

    Args:
        out: the run's folder; runs/TASK-STRATEGY-TIME unless given.
        resume: the folder of a saved run, to continue from its newest checkpoint.
        trace: write trace.json too, for ui.perfetto.dev.
        json: print the summary as JSON.
    """

    out: Path | None = None
    resume: Path | None = None
    trace: bool = False
    json: bool = False

    def __call__(self) -> int:
        """Train; returns 0."""
        from thinwire.runs import launch
        from thinwire.runs.processes import started_by_torchrun

        if started_by_torchrun():
            return self._join()
        settings, folder = self._prepared(4)
        with Watch(settings.strategy, settings.steps, settings.seconds) as watch:
            summary = launch(settings, folder, listener=watch, resume=self.resume is not None)
        return self._show(summary, folder)

    def _join(self) -> int:
        """Be one of torchrun's workers."""
        import os

        from thinwire.runs import RunFolder, work

        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        asked = self.asked()
        if asked["workers"] not in (None, size):
            raise ConfigError(f"--workers {asked['workers']}: torchrun has started {size}; leave it out")
        if asked["link"] is not None:
            raise ConfigError(f"--link {asked['link']}: under torchrun the links are real; leave it out")
        settings, folder = self._prepared(size)
        if rank == 0:
            home = RunFolder(folder)
            if self.resume is None:
                home.create()
            home.write_settings(settings)
        with Watch(settings.strategy, settings.steps, settings.seconds) as watch:
            summary = work(settings, folder, emit=watch, resume=self.resume is not None)
        return 0 if summary is None else self._show(summary, folder)

    def _prepared(self, default_workers: int) -> tuple[Settings, Path]:
        """The settings of the run, and its folder."""
        from thinwire.runs import resolve

        asked = self.asked()
        if self.resume is not None:
            return self._resumed(self.resume, asked), self.resume
        settings = resolve({**asked, "workers": default_workers if asked["workers"] is None else asked["workers"]})
        return settings, self.out or default_folder(settings.task, settings.strategy)

    def _resumed(self, folder: Path, asked: dict[str, Any]) -> Settings:
        """The settings of the run to continue; what decides its numbers cannot change, its end may."""
        from thinwire.runs import RunFolder, resolve

        if self.out is not None:
            raise ConfigError(f"--out {self.out}: a run goes on in its own folder, {folder}; leave it out")
        before = RunFolder(folder).settings()
        # A flag that is not given leaves the run's own as it was.
        given = {name: value for name, value in asked.items() if value is not None and value is not False}
        settings = resolve({**before.to_json(), **given})
        for name in _KEPT:
            was, now = getattr(before, name), getattr(settings, name)
            if was != now:
                raise ConfigError(f"{name}={now!r}: the run to resume has {was!r}, which cannot change; leave it out")
        return replace(settings, command=before.command)

    def _show(self, summary: dict[str, Any], folder: Path) -> int:
        from thinwire.report import write_trace

        if self.trace:
            write_trace(folder)
        if self.json:
            out.print(json_text.dumps(summary), markup=False)
            return 0
        show_summaries([summary])
        out.print(f"{folder}", markup=False)
        return 0
