# SPDX-License-Identifier: Apache-2.0
"""`thinwire train`: one run of one strategy on a task."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli.console import out, print_json
from thinwire.cli.options import as_typed, check_folder, check_saved, default_folder, settings_as_options
from thinwire.cli.progress import Watch, notice_in_words, show_summaries
from thinwire.errors import ConfigError

if TYPE_CHECKING:
    from thinwire.lab.runs import Settings

# Settings that a resumed run cannot change, because they decide its numbers.
_FIXED = (
    "task strategy switch tensor_parallel batch_size lr optimizer momentum weight_decay warmup_steps schedule split "
    "coreset seed model own_model own_loss"
)


@dataclass(frozen=True, kw_only=True)
class Train(settings_as_options(without=["timeline_steps"])):
    """Train a task with one strategy, on several workers of this machine, and write the run's record to a folder.

    Example: thinwire train --task text --strategy "LocalSGD(period=8, codec=Quantize(4))" --workers 4 --link 100mbit

    Starts 4 workers unless --workers is given. Under torchrun, on one machine or several, the same command is one of
    torchrun's workers instead. With --rendezvous it is one of so many workers, each on a machine of its own. Options
    that are not given take the task's defaults. A run ends after 200 steps unless --steps, --seconds or --target-loss
    is given.

    With --model and --data, functions of your own take the place of the task: see docs/how-to/own-task.md.

    Args:
        out: the run's folder; runs/TASK-STRATEGY-TIME unless given.
        resume: the folder of a saved run, to continue from its newest checkpoint.
        rendezvous: the URL of an object store or a shared folder over which the workers train, such as s3://bucket/run;
            that of the environment variable THINWIRE_RENDEZVOUS unless given. Run the same command on every machine,
            with the same THINWIRE_KEY.
        json: print the summary as JSON.
    """

    out: Path | None = None
    resume: Path | None = None
    rendezvous: str | None = None
    json: bool = False

    def __call__(self) -> int:
        """Train; returns 0, or 75 for a run that has saved and ended since a worker was asked to leave."""
        from thinwire.core.comm.rendezvous import started_by_torchrun
        from thinwire.lab.runs import launch

        if url := self.rendezvous or os.environ.get("THINWIRE_RENDEZVOUS"):
            return self._work_over_bucket(url)
        if started_by_torchrun():
            return self._work()
        settings, folder = self._prepare(4)
        with self._watch(settings) as watch:
            summary = launch(settings, folder, listener=watch, resume=self.resume is not None)
        return self._show(summary, folder)

    def _work(self) -> int:
        """Train as one of torchrun's workers."""
        from thinwire.lab.runs import work

        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        given = self.given()
        if given["workers"] not in (None, size):
            raise ConfigError(f"--workers {given['workers']}: torchrun has started {size}. Leave it out")
        _refuse_emulation(given, "under torchrun")
        if given["elastic"]:
            raise ConfigError("--elastic under torchrun: its agent ends all workers with one. Leave out torchrun")
        settings, folder = self._prepare(size)
        self._prepare_rank(settings, folder, rank)
        with self._watch(settings) as watch:
            summary = work(settings, folder, emit=watch, resume=self.resume is not None)
        return 0 if summary is None else self._show(summary, folder)

    def _work_over_bucket(self, url: str) -> int:
        """Train as one of the workers that meet in a bucket."""
        from thinwire.lab.runs import work
        from thinwire.lab.runs.defaults import default_threads
        from thinwire.lab.runs.worker import in_bucket

        given = self.given()
        _refuse_emulation(given, "over a bucket")
        for name in ("elastic", "tensor_parallel"):
            if given[name]:
                raise ConfigError(
                    f"--{name.replace('_', '-')} with --rendezvous: this command trains whole models on a fixed number "
                    "of workers over a bucket. Leave it out, or call attach(elastic=True, rendezvous=...) in a script"
                )
        count = os.environ.get("THINWIRE_WORKERS", "")
        size = given["workers"] or (int(count) if count.isdecimal() else None)
        if size is None and self.resume is None:
            raise ConfigError(f"--rendezvous {url}: needs --workers, the number of machines that train together")
        os.environ.setdefault("LOCAL_WORLD_SIZE", "1")  # one worker on this machine
        settings, folder = self._prepare(size or 0, threads=default_threads(1))
        with in_bucket(settings, url) as ranks:
            self._prepare_rank(settings, folder, ranks.comm.rank)
            with self._watch(settings) as watch:
                summary = work(settings, folder, emit=watch, resume=self.resume is not None, ranks=ranks)
        return 0 if summary is None else self._show(summary, folder)

    def _prepare_rank(self, settings: Settings, folder: Path, rank: int) -> None:
        """Slow this worker down if the settings say so; rank 0 makes the folder."""
        from thinwire.lab.emulate import straggler_environment
        from thinwire.lab.runs import RunFolder

        if settings.slow is not None or settings.stall is not None:
            # As launched workers get it.
            os.environ.update(straggler_environment(settings.slow, settings.stall, seed=settings.seed))
        if rank == 0:
            home = RunFolder(folder)
            if self.resume is None:
                home.create()
            home.write_settings(settings)

    def _watch(self, settings: Settings) -> Watch:
        """Return the progress, headed by the recipe as it was typed."""
        typed = self.given()["strategy"]
        return Watch(settings.strategy if typed is None else as_typed(typed), settings.steps, settings.seconds)

    def _prepare(self, default_workers: int, *, threads: int | None = None) -> tuple[Settings, Path]:
        """Return the settings of the run, and its folder."""
        from thinwire.lab.runs import resolve

        given = self.given()
        given["threads"] = given["threads"] or threads
        if self.resume is not None:
            return self._resumed(self.resume, given), self.resume
        settings = resolve({**given, "workers": default_workers if given["workers"] is None else given["workers"]})
        return settings, self.out or default_folder(settings.task, settings.strategy)

    def _resumed(self, folder: Path, given: dict[str, Any]) -> Settings:
        """Return the settings of the run to continue, with the given ones in place of its own where that is allowed.

        Raises:
            ConfigError: a setting was given that decides the run's numbers, or --out; or there is nothing to continue.
        """
        from thinwire.lab.runs import RunFolder, parse_recipe, resolve
        from thinwire.lab.runs.settings import without_decided
        from thinwire.lab.runs.switches import parse_switches

        if self.out is not None:
            raise ConfigError(f"--out {self.out}: a resumed run keeps its own folder, {folder}. Leave it out")
        fix = "Give that of a run that was trained with --save-every"
        check_folder(folder, f"--resume {folder}", fix)
        if not (folder / "settings.json").exists():
            raise ConfigError(f"--resume {folder}: holds no run, because it has no settings.json. {fix}")
        before = RunFolder(folder).settings()
        if given["strategy"] is not None:
            parse_recipe(given["strategy"])
        parse_switches(given["switch"])
        # The folder may come from another user: only the command line may name modules to import.
        parse_recipe(before.strategy, imports=False)
        if before.own_model is not None and given["own_model"] is None:
            loss = "" if before.own_loss is None else f" --loss {before.own_loss}"
            raise ConfigError(
                f"--resume {folder}: its model and data are functions, and files import nothing; if you trust them, "
                f"add --model {before.own_model} --data {before.data}{loss}"
            )
        parse_switches(before.switch, imports=False)
        # A flag cannot be given as off, so False means that the run keeps its own value.
        changes = {name: value for name, value in given.items() if value is not None and value is not False}
        settings = resolve({**without_decided(before), **changes})
        for name in _FIXED.split():
            was, now = getattr(before, name), getattr(settings, name)
            if was != now:
                raise ConfigError(f"{name}={now!r}: the run to resume has {was!r}, which cannot change. Leave it out")
        # Other elastic runs are refused with their own reason.
        if not settings.elastic or settings.late is not None:
            check_saved(folder, f"--resume {folder}")
        return replace(settings, command=before.command)

    def _show(self, summary: dict[str, Any], folder: Path) -> int:
        from thinwire.elastic.notice import LEFT_WITH_NOTICE

        code = 0 if "notice" not in summary else LEFT_WITH_NOTICE
        if self.json:
            print_json(summary)
            return code
        show_summaries([summary])
        if code:
            words = notice_in_words(summary["notice"])
            out.print(f"saved after {words}; resume with: thinwire train --resume {folder}")
        else:
            out.print(f"{folder}")
        return code


def _refuse_emulation(given: dict[str, Any], where: str) -> None:
    """Refuse options that only workers have which this command starts."""
    if given["link"] is not None:
        raise ConfigError(f"--link {given['link']}: {where} the links are real. Leave it out")
