"""Several strategies on one task, one after another, from the same parameters and the same order of data."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.runs.defaults import check_recipe
from thinwire.runs.folder import Fields, RunFolder
from thinwire.runs.launcher import Listener, launch, unheard
from thinwire.runs.optimizer import check_optimizer
from thinwire.runs.recipes import parse_recipe
from thinwire.runs.settings import Settings


@dataclass(frozen=True)
class Comparison:
    """What came of a comparison.

    Attributes:
        folder: holds comparison.json and a folder for each run.
        strategies: in the order they were asked for.
        rounds: for each strategy, the summary of every round.
    """

    folder: Path
    strategies: tuple[str, ...]
    rounds: tuple[tuple[Fields, ...], ...]

    @property
    def summaries(self) -> list[Fields]:
        """For each strategy, the round whose steps took the median time."""
        return [_middle(summaries) for summaries in self.rounds]

    def spread(self, key: str) -> list[tuple[float, float]]:
        """For each strategy, the least and the greatest of a figure over its rounds; NaN where it is missing."""
        values = [[float(s[key]) if s[key] is not None else float("nan") for s in each] for each in self.rounds]
        return [(min(each), max(each)) for each in values]


def compare(
    settings: Settings,
    strategies: Sequence[str],
    folder: Path,
    *,
    rounds: int = 1,
    title: str = "",
    listener: Listener = unheard,
    begin: Callable[[str, int], None] = lambda strategy, place: None,
) -> Comparison:
    """Run each strategy, in rounds, and keep their folders beneath one.

    In a round all strategies start from the same parameters and see the same data in the same order; each round has
    a seed of its own.

    Args:
        settings: of all runs, but for the strategy.
        strategies: recipes or names of torch's own methods.
        folder: a new one.
        rounds: how often each is run.
        title: of the report.
        listener: told of steps and evaluations as they happen.
        begin: told of each run before it starts: its strategy, and its place among all runs, from 0.

    Raises:
        ConfigError: a recipe that cannot be, or not with so many workers or this optimizer, before anything is run.
        ThinwireError: what ended a run; those before it keep their folders.
    """
    if rounds < 1:
        raise ConfigError(f"rounds={rounds}: must be at least 1")
    recipes = [check_recipe(text, settings.workers) for text in strategies]
    for recipe in recipes:
        check_optimizer(parse_recipe(recipe), settings)
    names = _folder_names(recipes)
    home = RunFolder(folder)
    if (folder / "comparison.json").exists():
        raise ConfigError(f"{folder} holds a comparison already; name another folder with --out")
    home.create()
    summaries: list[list[Fields]] = [[] for _ in recipes]
    for number in range(rounds):
        for place, (recipe, name) in enumerate(zip(recipes, names, strict=True)):
            begin(recipe, number * len(recipes) + place)
            asked = replace(settings, strategy=recipe, seed=settings.seed + number)
            summaries[place].append(launch(asked, folder / _round_name(name, number), listener=listener))
            _note(home, names, summaries, title)
    return Comparison(folder, tuple(recipes), tuple(tuple(each) for each in summaries))


def _note(home: RunFolder, names: Sequence[str], summaries: Sequence[Sequence[Fields]], title: str) -> None:
    """Say which runs there are so far; a report shows one for each strategy."""
    chosen = [_round_name(name, each.index(_middle(each))) for name, each in zip(names, summaries, strict=True) if each]
    rounds = {
        name: [_round_name(name, number) for number in range(len(each))]
        for name, each in zip(names, summaries, strict=True)
    }
    home.write("comparison.json", {"runs": chosen, "title": title, "rounds": rounds})


def _middle(summaries: Sequence[Fields]) -> Fields:
    ordered = sorted(summaries, key=lambda summary: summary["seconds_per_step"] or 0.0)
    return ordered[(len(ordered) - 1) // 2]


def _round_name(name: str, number: int) -> str:
    return name if number == 0 else f"{name}.{number + 1}"


def _folder_names(recipes: Sequence[str]) -> list[str]:
    """Short names, all different, that any file system takes."""
    names: list[str] = []
    for recipe in recipes:
        plain = short_name(recipe)
        taken = sum(name == plain or name.rpartition("-")[0] == plain for name in names)
        names.append(f"{plain}-{taken + 1}" if taken else plain)
    return names


def short_name(recipe: str) -> str:
    """The names in a recipe without its arguments: `SlowMo-PushSum` for `SlowMo(base=PushSum(...), ...)`."""
    words = re.findall(r"[A-Za-z][\w+]*(?:-[\w+]+)*(?=\(|$)", recipe.replace("codec=None", ""))
    silent = {"Local", "OnePeerExponential", "Ring"}
    kept = [word for word in words if word not in silent] or ["run"]
    return re.sub(r"[^\w+.-]", "-", "-".join(kept)).replace("+", "-")
