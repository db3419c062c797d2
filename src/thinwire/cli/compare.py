# SPDX-License-Identifier: Apache-2.0
"""`thinwire compare`: several strategies on one task."""

from __future__ import annotations

import json as json_text
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.console import err, out
from thinwire.cli.options import default_folder, save_config, settings_as_options
from thinwire.cli.progress import Watch, show_summaries
from thinwire.errors import ConfigError

if TYPE_CHECKING:
    from thinwire.runs import Comparison, Settings


_SINGLE_RUN_ONLY = [
    "strategy",
    "tensor_parallel",
    "coreset",
    "device",
    "save_every",
    "keep",
    "timeline_steps",
    "tensorboard",
]


@dataclass(frozen=True)
class Compare(settings_as_options(without=_SINGLE_RUN_ONLY)):
    """Run several strategies one after another, from the same parameters and on the same data in the same order.

    Example: thinwire compare --task text --strategies "ddp; LocalSGD(period=8); PushSum()" --workers 4 --link 100mbit

    All runs have the same settings. --steps, --seconds and --target-loss are the limits of each run, not of all
    together. Options that are not given take the task's defaults.

    With --model and --data, functions of your own take the place of the task: see docs/how-to/own-task.md.

    Args:
        config: a file of options, such as run.toml in the folder of an earlier comparison, or that folder; options
            given here override it.
        strategies: recipes separated by semicolons; torch's own methods are ddp, ddp+bf16, ddp+powersgd and
            post-local-sgd.
        rounds: how many times each strategy is run; round i has the seed --seed plus i. With more than one, the table
            shows the round with the median time per step, and the spread is printed.
        out: the comparison's folder; runs/TASK-compare-TIME unless given.
        markdown: print the table as Markdown.
        json: print the summaries as JSON.
    """

    config: Path | None = None
    strategies: str = (
        "ddp; LocalSGD(period=8); LocalSGD(period=8, codec=Quantize(4)); OverlapLocalSGD(period=8); PushSum()"
    )
    workers: int = 4
    rounds: int = 1
    out: Path | None = None
    markdown: bool = False
    json: bool = False

    def __call__(self) -> int:
        """Run every strategy; returns 0."""
        from thinwire.runs import resolve
        from thinwire.runs.configuration import without_decided
        from thinwire.runs.recipes import split_recipes

        if self.rounds < 1:
            raise ConfigError(f"--rounds {self.rounds}: must be at least 1")
        recipes = split_recipes(self.strategies)
        settings = resolve({**self.given(), "strategy": recipes[0]})
        folder = self.out or default_folder(settings.task, "compare")
        values = {**without_decided(settings), "strategies": "; ".join(recipes), "rounds": self.rounds}
        done = run(
            settings,
            recipes,
            folder,
            rounds=self.rounds,
            title=title(settings, len(recipes)),
            save=lambda: save_config(folder, Compare, "compare", values),
        )
        page = report(folder)
        if self.json:
            out.print(json_text.dumps(done.summaries), markup=False)
            return 0
        show(done, markdown=self.markdown)
        out.print(str(page or folder), markup=False)
        return 0


def run(
    settings: Settings,
    recipes: Sequence[str],
    folder: Path,
    *,
    rounds: int,
    title: str,
    save: Callable[[], None] = lambda: None,
) -> Comparison:
    """Run a comparison and show its progress; `save` is called when the folder is there."""
    from thinwire.runs import compare

    with ExitStack() as contexts:
        watches: list[Watch] = []

        def begin(recipe: str, place: int) -> None:
            if place == 0:
                save()
            # Ends the progress line of the run before.
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
    """The comparison's title: how many strategies, the task, the workers and the links."""
    link = f" over {settings.link}" if settings.link else ""
    size = "" if settings.own_model is not None else f" ({settings.model})"
    return f"{count} strategies on {settings.task}{size}, {settings.workers} workers{link}"


def show(done: Comparison, *, markdown: bool = False) -> None:
    """Print the table, and the spread of the time per step over rounds."""
    from thinwire.report import markdown as as_markdown

    if markdown:
        out.print(as_markdown(done.summaries), markup=False, end="")
    else:
        show_summaries(done.summaries)
    if len(done.rounds[0]) > 1:
        for recipe, (least, most) in zip(done.strategies, done.spread("seconds_per_step"), strict=True):
            if math.isfinite(least):
                out.print(f"{recipe}: {least:.3g} to {most:.3g} s/step over {len(done.rounds[0])} rounds", markup=False)


def report(folder: Path) -> Path | None:
    """Write the comparison's page and return its path; where it cannot be drawn, print the reason and return None."""
    from thinwire.report import write_report

    try:
        return write_report(folder).report
    except ConfigError as error:
        err.print(f"no report: {error}", markup=False)
        return None
