# SPDX-License-Identifier: Apache-2.0
"""`thinwire compare`: several strategies on one task."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.console import err, out, print_json
from thinwire.cli.options import default_folder, save_config, settings_as_options
from thinwire.cli.progress import Watch, show_summaries
from thinwire.errors import ConfigError
from thinwire.planning.units import workers

if TYPE_CHECKING:
    from thinwire.lab.runs import Comparison, Settings


_SINGLE_RUN_ONLY = (
    "strategy tensor_parallel coreset device save_every keep on_notice restarts timeline_steps tensorboard"
)


@dataclass(frozen=True, kw_only=True)
class Compare(settings_as_options(without=_SINGLE_RUN_ONLY.split())):
    """Run several strategies one after another, from the same parameters and on the same data in the same order.

    Example: thinwire compare --task text --strategies "ddp; LocalSGD(period=8); PushSum()" --workers 4 --link 100mbit

    All runs have the same settings. --steps, --seconds and --target-loss are the limits of each run, not of all
    together. Options that are not given take the task's defaults.

    With --model and --data, functions of your own take the place of the task: see docs/how-to/own-task.md.

    Args:
        strategies: recipes separated by semicolons; torch's own methods are ddp, ddp+bf16, ddp+powersgd and
            post-local-sgd.
        rounds: how many times each strategy is run; round i has the seed --seed plus i. With more than one, the table
            has the mean and the standard deviation of losses, and the median of other figures, over all rounds.
        out: the comparison's folder; runs/TASK-compare-TIME unless given.
        json: print the summaries as JSON.
    """

    strategies: str = (
        "ddp; LocalSGD(period=8); LocalSGD(period=8, codec=Quantize(4)); OverlapLocalSGD(period=8); PushSum()"
    )
    workers: int = 4
    rounds: int = 1
    out: Path | None = None
    json: bool = False

    def __call__(self) -> int:
        """Run every strategy; returns 0, or 1 where a run diverged."""
        from thinwire.lab.runs import resolve
        from thinwire.lab.runs.recipes import split_recipes
        from thinwire.lab.runs.settings import without_decided

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
            print_json(done.summaries)
            return int(bool(done.diverged))
        show(done)
        out.print(str(page or folder))
        return int(bool(done.diverged))


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
    from thinwire.lab.runs import compare

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
    """Return the comparison's title: how many strategies, the task, the workers and the links."""
    link = f" over {settings.link}" if settings.link else ""
    size = "" if settings.own_model is not None else f" ({settings.model})"
    return f"{count} strategies on {settings.task}{size}, {workers(settings.workers)}{link}"


def show(done: Comparison) -> None:
    """Print the table, which runs diverged, and what is known of the spread over rounds."""
    show_summaries(done.summaries)
    for recipe, number, words in done.diverged:
        which = f"{recipe}, round {number + 1}" if len(done.rounds[0]) > 1 else recipe
        err.print(f"{which} diverged: {words}")
    if len(done.rounds[0]) > 1:
        seeds = ", ".join(str(each["seed"]) for each in done.rounds[0] if "seed" in each)
        out.print(f"losses: mean ± standard deviation over seeds {seeds}; other figures: medians")
        paces = done.spread("seconds_per_step")
        for recipe, summaries, (least, most) in zip(done.strategies, done.rounds, paces, strict=True):
            if math.isfinite(least):
                timed = sum(each["seconds_per_step"] is not None for each in summaries)
                of = "" if timed == len(summaries) else f"{timed} of "
                out.print(f"{recipe}: {least:.3g} to {most:.3g} s/step over {of}{len(summaries)} rounds")


def report(folder: Path) -> Path | None:
    """Write the comparison's page and return its path; where it cannot be drawn, print the reason and return None."""
    from thinwire.lab.report import write_report

    try:
        return write_report(folder).report
    except ConfigError as error:
        err.print(f"no report: {error}")
        return None
