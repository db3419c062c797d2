# SPDX-License-Identifier: Apache-2.0
"""Compare strategies: run one after another on one task, from the same parameters and on the same batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from thinwire.errors import ConfigError, NonFiniteError
from thinwire.lab.report.folder import SCHEMA, rounds_of
from thinwire.lab.report.labels import as_folder, labels
from thinwire.lab.report.rounds import median_round, over_rounds
from thinwire.lab.report.runs import Totals
from thinwire.lab.runs.defaults import check_nonfinite, check_recipe, check_recipe_survives
from thinwire.lab.runs.folder import Fields, RunFolder
from thinwire.lab.runs.launcher import Listener, ignore_event, launch
from thinwire.lab.runs.optimizer import check_optimizer
from thinwire.lab.runs.recipes import parse_recipe
from thinwire.lab.runs.settings import Settings
from thinwire.lab.runs.switches import check_switches
from thinwire.lab.runs.writer import start_of_summary

Start = Callable[..., Fields]
"""Makes one run: from settings, a new folder and a listener, as `launch` has them, to its summary."""


@dataclass(frozen=True)
class Comparison:
    """The results of a comparison.

    Attributes:
        folder: holds comparison.json and a folder for each run.
        strategies: in the order they were given.
        rounds: for each strategy, the summary of every round.
    """

    folder: Path
    strategies: tuple[str, ...]
    rounds: tuple[tuple[Fields, ...], ...]

    @property
    def summaries(self) -> list[Fields]:
        """For each strategy its figures over all rounds, which have the same seeds for all strategies."""
        shown = median_round(self.rounds)
        return [over_rounds(summaries, summaries[shown]) for summaries in self.rounds]

    @property
    def folders(self) -> list[list[Path]]:
        """For each strategy, the run folders of its rounds."""
        return list((rounds_of(self.folder) or {}).values())

    @property
    def diverged(self) -> list[tuple[str, int, str]]:
        """The runs that diverged: strategy, round from 0, and what ended it."""
        return [
            (strategy, number, summary["diverged"])
            for strategy, summaries in zip(self.strategies, self.rounds, strict=True)
            for number, summary in enumerate(summaries)
            if "diverged" in summary
        ]

    def spread(self, key: str) -> list[tuple[float, float]]:
        """For each strategy, the minimum and maximum of a figure over its rounds that have it; NaN where none has."""
        values = [[float(s[key]) for s in each if s[key] is not None] or [float("nan")] for each in self.rounds]
        return [(min(each), max(each)) for each in values]


def compare(
    settings: Settings,
    strategies: Sequence[str],
    folder: Path,
    *,
    rounds: int = 1,
    title: str = "",
    listener: Listener = ignore_event,
    begin: Callable[[str, int], None] = lambda strategy, place: None,
    start: Start = launch,
) -> Comparison:
    """Run each strategy, once per round, in folders beneath one.

    In a round all strategies start from the same parameters and see the same batches in the same order; each round has
    its own seed. A run that diverges, whose loss or gradient is NaN or infinite, is a result too: its summary says
    under `diverged` what ended it, has no losses, and the next run follows.

    Args:
        settings: of all runs, except the strategy.
        strategies: recipes, or names of PyTorch's own methods.
        folder: a new one.
        rounds: how often each strategy is run.
        title: of the report.
        listener: called with each step and evaluation as they happen.
        begin: called before each run with its strategy and its number among all runs, from 0.
        start: makes one run; on processes of this machine unless given.

    Raises:
        ConfigError: a recipe cannot be read, or does not serve this number of workers or this optimizer; before any
            run.
        ThinwireError: a run failed, other than by diverging; the folders of earlier runs are kept.
    """
    if rounds < 1:
        raise ConfigError(f"rounds={rounds}: must be at least 1")
    recipes = [check_recipe(text, settings.workers) for text in strategies]
    # All of them before the first run: a later mistake would cost the time of the runs before it.
    for recipe in recipes:
        check_optimizer(parse_recipe(recipe), settings)
        check_nonfinite(recipe, settings.nonfinite)
        if settings.switch is not None:
            check_switches(settings.switch, recipe, settings.workers)
        if settings.elastic:
            check_recipe_survives(replace(settings, strategy=recipe))
    names = [as_folder(label) for label in labels(recipes)]
    home = RunFolder(folder)
    home.create()
    summaries: list[list[Fields]] = [[] for _ in recipes]
    for number in range(rounds):
        for place, (recipe, name) in enumerate(zip(recipes, names, strict=True)):
            begin(recipe, number * len(recipes) + place)
            own_settings = replace(settings, strategy=recipe, seed=settings.seed + number)
            own_folder = folder / _round_name(name, number)
            try:
                summary = start(own_settings, own_folder, listener=listener)
            except NonFiniteError as error:
                summary = _write_diverged(RunFolder(own_folder), own_settings, error)
            summaries[place].append(summary)
            # After every run: a comparison that is interrupted can still be reported.
            _write_comparison(home, names, summaries, title)
    return Comparison(folder, tuple(recipes), tuple(tuple(each) for each in summaries))


def _write_diverged(home: RunFolder, settings: Settings, error: NonFiniteError) -> Fields:
    """Write and return the summary of a run that diverged: its steps until then, and what ended it."""
    unknown = ("wire_bytes_per_worker_per_step", "train_loss", "eval_loss", "eval_metric", "seconds_to_target")
    summary = start_of_summary(settings, Totals(home.records())) | dict.fromkeys(unknown) | {"diverged": str(error)}
    home.write("summary.json", summary)
    return summary


def _write_comparison(home: RunFolder, names: Sequence[str], summaries: Sequence[Sequence[Fields]], title: str) -> None:
    """List the runs so far; a report shows the curves of one for each strategy, all with the same seed."""
    shown = median_round(summaries)
    chosen = [_round_name(name, shown) for name, each in zip(names, summaries, strict=True) if each]
    rounds = {
        name: [_round_name(name, number) for number in range(len(each))]
        for name, each in zip(names, summaries, strict=True)
    }
    home.write("comparison.json", {"schema": SCHEMA, "runs": chosen, "title": title, "rounds": rounds})


def _round_name(name: str, number: int) -> str:
    return name if number == 0 else f"{name}.{number + 1}"
