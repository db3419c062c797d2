"""`laconic sweep`: many trials of a task's hyperparameters for the price of few."""

from __future__ import annotations

import json as json_text
import math
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from laconic.cli.console import err, out
from laconic.cli.train import default_folder
from laconic.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from laconic.sweep.journal import Journal
    from laconic.sweep.space import Space
    from laconic.sweep.sweeping import News
    from laconic.sweep.training import Plan
    from laconic.sweep.trials import Outcome

_KNOBS = ("lr", "momentum", "weight_decay", "beta1", "beta2", "eps", "optimizer", "batch_size", "model_size")
# What may change when a sweep goes on: where things are, how much is told, and how it is checked.
_FREE = ("data", "out", "resume", "json", "check", "threads")
_JOURNAL = "journal"
_PLAIN_SECONDS = 10.0
Fields = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """Search the hyperparameters of a task: many trials trained as one array, for the price of few.

    Example: laconic sweep --task digits --trials 64 --lr log:1e-4:1e-1 --momentum 0:0.95

    A knob is given as a range (log:1e-4:1e-1, 0:0.95, whole:8:64), as a list (16,32,64) or as a value. Trials that
    differ only in learning rate, momentum, weight decay, betas and eps share an array; others get one each. Without
    --lr it is log:1e-4:1e-1. Writes trials.json, summary.json and report.html with a picture of every knob.

    Args:
        task: text, digits, mnist, cifar10, shakespeare, wikitext2, agnews, multi30k or a9a.
        trials: how many.
        steps: optimizer steps of a trial that is not given up.
        lr: learning rates.
        momentum: of sgd.
        weight_decay: as the optimizer means it.
        beta1: of adamw.
        beta2: of adamw.
        eps: of adamw.
        optimizer: sgd, adamw, or both by a comma.
        batch_size: examples a step.
        model_size: named sizes of the task's model.
        schedule: constant, or cosine down to a tenth at the last step.
        sampler: random, or optuna, which learns from the arrays that have ended.
        halving: give trials up, for the first time after so many steps; at each rung the best go on.
        keep: with halving, of so many trials one goes on.
        together: the most trials in one array; as many as fit unless given.
        check: train the trials one after another too, and compare losses and time.
        seed: of the draws, the first parameters and the order of data.
        eval_limit: held-out examples looked at; all unless given.
        threads: threads of computation; all cores unless given.
        data: the folder of data files; LACONIC_DATA unless given.
        out: the folder; runs/TASK-sweep-TIME unless given.
        resume: the folder of a sweep that was interrupted, to go on with; all else is as it was begun.
        json: print everything as JSON.
    """

    task: str = "digits"
    trials: int = 16
    steps: int = 300
    lr: str | None = None
    momentum: str | None = None
    weight_decay: str | None = None
    beta1: str | None = None
    beta2: str | None = None
    eps: str | None = None
    optimizer: str | None = None
    batch_size: str | None = None
    model_size: str | None = None
    schedule: Literal["constant", "cosine"] = "constant"
    sampler: Literal["random", "optuna"] = "random"
    halving: int | None = None
    keep: int = 3
    together: int | None = None
    check: bool = False
    seed: int = 0
    eval_limit: int | None = None
    threads: int | None = None
    data: Path | None = None
    out: Path | None = None
    resume: Path | None = None
    json: bool = False

    def __call__(self) -> int:
        """Sweep, write and show; returns 0."""
        if self.resume is not None:
            return self._resumed(self.resume)._run(self.resume, resume=True)
        return self._run(self.out or default_folder(self.task, "sweep"))

    def _run(self, folder: Path, *, resume: bool = False) -> int:
        from laconic.sweep.sampling import sampler_of
        from laconic.sweep.sweeping import check_counts, sweep
        from laconic.sweep.trials import ranked

        check_counts(self.trials, self.together)
        plan, space = self._plan(), self._space()
        for knobs in space.corners():
            plan.setting(knobs)
        sampler = sampler_of(self.sampler, space, seed=self.seed)
        journal = self._journal(folder, resume)
        with _watched(self.trials, self.steps) as told:
            outcomes = sweep(plan, sampler, self.trials, together=self.together, told=told, journal=journal)
        seconds = journal.seconds
        best = ranked(outcomes)
        summary = self._summary(best, seconds) | (self._checked(plan, outcomes, seconds) if self.check else {})
        report = self._write(folder, space, best, summary)
        if self.json:
            out.print(json_text.dumps(summary | {"trials": _lines(best), "folder": str(folder)}), markup=False)
            return 0
        _show(self._title(), _headings(space), _rows(space, best[:10], plan.task.metric))
        out.print(_words(summary), markup=False)
        out.print(str(report or folder), markup=False)
        return 0

    def _facts(self) -> Fields:
        """What decides a sweep's results, as JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _FREE}

    def _resumed(self, folder: Path) -> Sweep:
        """The sweep as it was begun; refuse what was asked for otherwise."""
        from laconic.sweep.journal import facts_in

        if self.out is not None:
            raise ConfigError(f"--out {self.out}: a sweep goes on in its own folder, {folder}; leave it out")
        before, now, usual = facts_in(folder / _JOURNAL), self._facts(), Sweep()._facts()
        for name, value in now.items():
            if value not in (usual[name], before[name]):
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} {value}: the sweep was begun with {before[name]}; leave it out")
        return replace(self, **before)

    def _journal(self, folder: Path, resume: bool) -> Journal:
        from laconic.sweep.journal import Journal

        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written to ({error.strerror}); use another --out") from None
        return Journal(folder / _JOURNAL, self._facts(), resume=resume)

    def _plan(self) -> Plan:
        import torch

        from laconic.sweep.training import Plan
        from laconic.sweep.trials import Halving
        from laconic.tasks import load

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        halving = None if self.halving is None else Halving(self.halving, self.keep)
        return Plan(load(self.task, data=self.data), self.steps, self.seed, self.schedule, halving, self.eval_limit)

    def _space(self) -> Space:
        from laconic.sweep.space import Space, parse_domain

        told = {name: text for name in _KNOBS if (text := getattr(self, name)) is not None}
        return Space({name: parse_domain(text) for name, text in ({"lr": "log:1e-4:1e-1"} | told).items()})

    def _title(self) -> str:
        return f"{self.trials} trials of {self.task}, {self.steps} steps each"

    def _summary(self, best: Sequence[Outcome], seconds: float) -> Fields:
        return {
            "task": self.task,
            "trials": len(best),
            "steps": self.steps,
            "seconds": seconds,
            "best": best[0].trial.number,
            "best_loss": best[0].loss,
            "best_metric": best[0].metric,
            "best_knobs": dict(best[0].trial.knobs),
            "given_up": sum(each.stopped for each in best),
            "diverged": sum(not math.isfinite(each.loss) for each in best),
            "command": shlex.join(["laconic", *sys.argv[1:]]),
        }

    def _checked(self, plan: Plan, outcomes: Sequence[Outcome], seconds: float) -> Fields:
        """The same trials one after another: how long they take, and how far their losses are away."""
        from rich.progress import track

        from laconic.sweep.training import train_alone
        from laconic.sweep.trials import ranked

        start = time.perf_counter()
        alone = [train_alone(plan, each.trial) for each in track(outcomes, "one after another", console=err)]
        taken = time.perf_counter() - start
        pairs = [(a.loss, b.loss) for a, b in zip(outcomes, alone, strict=True) if not a.stopped]
        return {
            "alone_seconds": taken,
            "times_as_fast": taken / seconds,
            "same_best": ranked(alone)[0].trial.number == ranked(outcomes)[0].trial.number,
            "largest_difference": max((abs(a - b) for a, b in pairs if math.isfinite(a + b)), default=0.0),
        }

    def _write(self, folder: Path, space: Space, best: Sequence[Outcome], summary: Fields) -> Path | None:
        from laconic.files import write_atomically

        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / "trials.json", json_text.dumps(_lines(best), indent=2).encode())
            write_atomically(folder / "summary.json", json_text.dumps(summary, indent=2).encode())
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written to ({error.strerror}); use another --out") from None
        try:
            from laconic.report.sweep import write_sweep
        except ModuleNotFoundError:
            return None
        return write_sweep(
            folder,
            {name: [each.trial.knobs[name] for each in best] for name in space.domains},
            [each.loss for each in best],
            [each.stopped for each in best],
            logarithmic=[name for name, domain in space.domains.items() if getattr(domain, "scale", "") == "log"],
            title=self._title(),
            headings=_headings(space),
            rows=_rows(space, best, "metric"),
        )


def _lines(best: Sequence[Outcome]) -> list[Fields]:
    return [
        {
            "trial": each.trial.number,
            "loss": each.loss if math.isfinite(each.loss) else None,
            "metric": each.metric if math.isfinite(each.metric) else None,
            "steps": each.steps,
            "given_up": each.stopped,
            "knobs": dict(each.trial.knobs),
        }
        for each in best
    ]


def _headings(space: Space) -> list[str]:
    return ["trial", *space.domains, "held-out loss", "metric", "steps"]


def _rows(space: Space, best: Sequence[Outcome], metric: str) -> list[list[str]]:
    return [
        [
            str(each.trial.number),
            *(_short(each.trial.knobs[name]) for name in space.domains),
            f"{each.loss:.4f}",
            f"{each.metric:.4f}",
            f"{each.steps}{', given up' if each.stopped else ''}",
        ]
        for each in best
    ]


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _show(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    table = Table(*headings, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    out.print(table)


def _words(summary: Fields) -> str:
    words = [f"{summary['seconds']:.1f} s, {summary['given_up']} given up, {summary['diverged']} diverged"]
    if "alone_seconds" in summary:
        same = "the same best trial" if summary["same_best"] else "another best trial"
        words.append(
            f"one after another {summary['alone_seconds']:.1f} s, {summary['times_as_fast']:.1f} times as long; "
            f"{same}, losses at most {summary['largest_difference']:.1e} apart"
        )
    return "\n".join(words)


@contextmanager
def _watched(trials: int, steps: int) -> Generator[Callable[[News], None]]:
    """A live bar and the best trials on a terminal, a line every ten seconds elsewhere."""
    from rich.live import Live
    from rich.progress import Progress
    from rich.table import Table

    from laconic.sweep.trials import ranked

    bar = Progress(console=err)
    place, told = bar.add_task("sweep", total=trials * steps), [time.monotonic()]

    def seen(news: News) -> None:
        done = sum(each.steps for each in news.ended) + news.members * news.step
        words = f"array {news.array}, {news.members} trials, step {news.step}/{steps}"
        if err.is_terminal:
            bar.update(place, completed=min(done, trials * steps), description=words)
        elif time.monotonic() - told[0] > _PLAIN_SECONDS:
            told[0] = time.monotonic()
            best = ranked(news.ended)[:1]
            err.print(f"{words}{f', best loss {best[0].loss:.4f}' if best else ''}", markup=False)
        if err.is_terminal and news.ended and time.monotonic() - told[0] > 0.5:
            told[0] = time.monotonic()
            table = Table("trial", "held-out loss", "steps", "knobs")
            for each in ranked(news.ended)[:5]:
                knobs = ", ".join(f"{name} {_short(value)}" for name, value in each.trial.knobs.items())
                table.add_row(str(each.trial.number), f"{each.loss:.4f}", str(each.steps), knobs)
            grid = Table.grid()
            grid.add_row(bar)
            grid.add_row(table)
            live.update(grid)

    with Live(bar, console=err, transient=True, refresh_per_second=4) as live:
        yield seen
