"""`laconic compare`: several strategies on one task, side by side."""

from __future__ import annotations

import json as json_text
import math
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from laconic.cli.console import err, out
from laconic.cli.progress import Watch, show_summaries
from laconic.cli.train import default_folder
from laconic.errors import ConfigError

if TYPE_CHECKING:
    from laconic.runs import Comparison, Settings


@dataclass(frozen=True)
class Compare:
    """Run several strategies one after another, from the same parameters and on the same data in the same order.

    Example: laconic compare --task text --strategies "AllReduce(); PushSum(); ddp" --workers 4 --link 100mbit

    Args:
        strategies: recipes separated by semicolons; torch's own are ddp, ddp+bf16, ddp+powersgd, post-local-sgd.
        task: text, digits, mnist, cifar10, shakespeare, wikitext2, agnews, multi30k or a9a.
        model_size: a named size of the task's model.
        workers: how many.
        link: emulated links, [RANK:]RATE[+DELAY], several by commas, such as 100mbit or 1gbit+5ms,0:10mbit.
        slow: workers that compute slower, [RANK:]FACTORx, such as 2:3x.
        stall: workers that stall now and then, [RANK:]PROBABILITY:DURATION, such as 0.15:200ms.
        stop: workers whose process is stopped for a while, RANK:AFTER:DURATION, such as 2:3s:5s.
        steps: optimizer steps of each run.
        seconds: a budget of training time for each run; set-up and evaluation do not count.
        target_loss: end each run when the held-out loss of its consensus model, in nats, is no more than this.
        rounds: how often each is run; the table then shows the round of median speed, and the spread is printed.
        batch_size: examples a step and worker.
        lr: the peak learning rate.
        optimizer: sgd, adamw, lamb, those of CompressedMomentum, onebit-lamb and
            onebit-adam, or that of ZeroOne, zero-one-adam.
        momentum: of sgd.
        weight_decay: as the optimizer means it.
        warmup_steps: steps over which the learning rate rises.
        schedule: constant, or cosine down to a tenth at the last step.
        split: how data are dealt to workers: iid, dirichlet(ALPHA), label or group.
        seed: of the first round; each has its own.
        out: the comparison's folder; runs/TASK-compare-TIME unless given.
        eval_every: steps between evaluations; about ten over a run unless given.
        eval_limit: held-out examples looked at each time; 256 unless given.
        data: the folder of data files; LACONIC_DATA unless given.
        threads: threads of computation per worker; all cores are shared out unless given.
        deadline_seconds: how long a worker waits for the others.
        markdown: print the table as Markdown.
        json: print the summaries as JSON.
    """

    strategies: str = "ddp; AllReduce(); LocalSGD(period=8); SlowMo(); PushSum()"
    task: str | None = None
    model_size: str | None = None
    workers: int = 4
    link: str | None = None
    slow: str | None = None
    stall: str | None = None
    stop: str | None = None
    steps: int | None = None
    seconds: float | None = None
    target_loss: float | None = None
    rounds: int = 1
    batch_size: int | None = None
    lr: float | None = None
    optimizer: Literal["sgd", "adamw", "lamb", "onebit-lamb", "onebit-adam", "zero-one-adam"] | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    warmup_steps: int | None = None
    schedule: Literal["constant", "cosine"] | None = None
    split: str | None = None
    seed: int | None = None
    out: Path | None = None
    eval_every: int | None = None
    eval_limit: int | None = None
    data: Path | None = None
    threads: int | None = None
    deadline_seconds: float | None = None
    markdown: bool = False
    json: bool = False

    def __call__(self) -> int:
        """Run them all; returns 0."""
        from laconic.runs import resolve
        from laconic.runs.recipes import split_recipes

        if self.rounds < 1:
            raise ConfigError(f"--rounds {self.rounds}: must be at least 1")
        recipes = split_recipes(self.strategies)
        settings = resolve({**self._asked(), "strategy": recipes[0]})
        folder = self.out or default_folder(settings.task, "compare")
        done = run(settings, recipes, folder, rounds=self.rounds, title=title(settings, len(recipes)))
        page = report(folder)
        if self.json:
            out.print(json_text.dumps(done.summaries), markup=False)
            return 0
        show(done, markdown=self.markdown)
        out.print(str(page or folder), markup=False)
        return 0

    def _asked(self) -> dict[str, Any]:
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("strategies", "rounds", "out", "markdown", "json"):
            own.pop(name)
        own["model"] = own.pop("model_size")
        own["data"] = None if self.data is None else str(self.data)
        return {**own, "command": shlex.join(["laconic", *sys.argv[1:]])}


def run(settings: Settings, recipes: Sequence[str], folder: Path, *, rounds: int, title: str) -> Comparison:
    """Run a comparison and show how it gets on."""
    from laconic.runs import compare

    with ExitStack() as contexts:
        watches: list[Watch] = []

        def begin(recipe: str, place: int) -> None:
            contexts.close()
            label = f"[{place + 1}/{rounds * len(recipes)}] {recipe}"
            watches[:] = [contexts.enter_context(Watch(label, settings.steps, settings.seconds))]

        return compare(
            settings,
            recipes,
            folder,
            rounds=rounds,
            title=title,
            listener=lambda event: watches[0](event),
            begin=begin,
        )


def title(settings: Settings, count: int) -> str:
    """What is compared, in words."""
    link = f" over {settings.link}" if settings.link else ""
    return f"{count} strategies on {settings.task} ({settings.model}), {settings.workers} workers{link}"


def show(done: Comparison, *, markdown: bool = False) -> None:
    """Print the table, and what differed between rounds."""
    from laconic.report import markdown as as_markdown

    if markdown:
        out.print(as_markdown(done.summaries), markup=False, end="")
    else:
        show_summaries(done.summaries)
    if len(done.rounds[0]) > 1:
        for recipe, (least, most) in zip(done.strategies, done.spread("seconds_per_step"), strict=True):
            if math.isfinite(least):
                out.print(f"{recipe}: {least:.3g} to {most:.3g} s/step over {len(done.rounds[0])} rounds", markup=False)


def report(folder: Path) -> Path | None:
    """The comparison's page; None, and a word on it, where it cannot be drawn."""
    from laconic.report import write_report

    try:
        return write_report(folder).report
    except ConfigError as error:
        err.print(f"no report: {error}", markup=False)
        return None
