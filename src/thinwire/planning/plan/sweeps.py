# SPDX-License-Identifier: Apache-2.0
"""Step times of a few recipes against link rate, latency and number of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from thinwire.planning.plan.candidates import DENSE
from thinwire.planning.plan.predict import slower
from thinwire.planning.plan.search import Option, Planner
from thinwire.planning.simulate import Network

RATES = tuple(10 ** (7 + place / 2) for place in range(9))
LATENCIES = tuple(10 ** (-4 + place / 2) for place in range(7))
WORKERS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_MOST_RECIPES = 6


def recipes_to_draw(options: Sequence[Option], chosen: str) -> list[str]:
    """AllReduce(), the recommended one and the best of the others, one of each class, in the order of options."""
    found: dict[str, str] = {}
    for each in [*[each for each in options if each.recipe in (DENSE, chosen)], *options]:
        kind = each.recipe if each.recipe in (DENSE, chosen) else each.recipe.partition("(")[0]
        if not each.refused and len(found) < _MOST_RECIPES:
            found.setdefault(kind, each.recipe)
    return list(dict.fromkeys(found.values()))


def by_rate(planner: Planner, recipes: Sequence[str]) -> dict[str, list[float]]:
    """Seconds of a step for each of `RATES`."""
    network = planner.job.network

    def at(rate: float) -> Network:
        return slower(network, network.bits_per_second / rate)

    return _rows(recipes, RATES, lambda recipe, rate: planner.at(recipe, at(rate)))


def by_latency(planner: Planner, recipes: Sequence[str]) -> dict[str, list[float]]:
    """Seconds of a step for each of `LATENCIES`."""
    network = planner.job.network
    return _rows(recipes, LATENCIES, lambda recipe, latency: planner.at(recipe, replace(network, latency=latency)))


def by_workers(planner: Planner, recipes: Sequence[str], most: int) -> tuple[list[int], dict[str, list[float]]]:
    """The numbers of workers, up to a limit, and the seconds of a step for each; all links are alike."""
    network = replace(planner.job.network, specials=(), pairs=())
    counts = [count for count in WORKERS if count <= most]
    return counts, _rows(recipes, counts, lambda recipe, count: planner.at(recipe, network, int(count)))


def _rows(
    recipes: Sequence[str], values: Sequence[float], option: Callable[[str, float], Option]
) -> dict[str, list[float]]:
    rows = {recipe: [option(recipe, value).seconds for value in values] for recipe in recipes}
    # Drawn as a gap.
    return {recipe: [each if each < inf else float("nan") for each in row] for recipe, row in rows.items()}
