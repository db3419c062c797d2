# SPDX-License-Identifier: Apache-2.0
"""Which recipe and which period suit a bucket, by the requests and bytes that `explain` counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import ceil, inf
from typing import Any, cast

from torch import nn

from thinwire.errors import ConfigError
from thinwire.methods.strategies.base import Strategy
from thinwire.methods.strategies.recipe import parse
from thinwire.planning.plan.bucket import BucketCost, Store, bucket_cost
from thinwire.planning.plan.candidates import CANDIDATES, Accuracy, measured
from thinwire.planning.plan.card import bucket_objects
from thinwire.planning.plan.objects import Objects
from thinwire.planning.plan.traffic import MakeOptimizer
from thinwire.registry import canonical
from thinwire.worker.compatibility import check_carried

BUCKET_CANDIDATES = (*CANDIDATES, "NoLoCo(period=32)")
_LONGEST_PERIOD = 100_000


@dataclass(frozen=True)
class BucketOption:
    """A recipe over a bucket.

    Attributes:
        recipe: as text.
        cost: the requests, the time and the price; None if it cannot be used.
        slowdown: how many times as long a step takes as one without communication.
        accuracy: what was measured of it; None if nothing was, such as for a longer period.
        refused: why it cannot be used; "" if it can.
    """

    recipe: str
    cost: BucketCost | None
    slowdown: float
    accuracy: Accuracy | None
    refused: str = ""

    @property
    def to_loss(self) -> float:
        """The time to the loss of AllReduce(), in steps of AllReduce() without communication."""
        return inf if self.accuracy is None else self.slowdown * max(1.0, self.accuracy.factor)

    def as_json(self) -> dict[str, Any]:
        """Return the option as plain values; `slowdown` is infinite where the recipe is refused."""
        return {
            "recipe": self.recipe,
            "refused": self.refused,
            "slowdown": self.slowdown,
            "relative_steps": self.accuracy and asdict(self.accuracy),
            "cost": self.cost and asdict(self.cost),
        }


def plan_bucket(
    store: Store,
    *,
    parameters: int | Sequence[int] | nn.Module,
    workers: int,
    step_seconds: float,
    within: float = 1.05,
    recipes: Sequence[str] = BUCKET_CANDIDATES,
    optimizer: MakeOptimizer | None = None,
) -> list[BucketOption]:
    """Return the recipes that a bucket carries, the recommended one first.

    Each recipe has its own period, or a longer one with which a step takes at most `within` times as long as one
    without communication. Recipes whose accuracy was measured come first, from the least time to the loss of
    AllReduce(). Then the others, from the shortest period.

    Args:
        store: the bucket.
        parameters: the model, or its size, as for `explain`.
        workers: number of workers.
        step_seconds: of a step without communication.
        within: the limit.
        recipes: what is looked at.
        optimizer: as for `explain`.

    Raises:
        ConfigError: a value is out of its range.

    Example:
        >>> from thinwire.planning.plan import parse_store, plan_bucket
        >>> found = plan_bucket(parse_store("40ms,20mbit,50mbit"), parameters=6_500_000, workers=3, step_seconds=0.2,
        ...                     recipes=["LocalSGD(period=8)", "AllReduce()"])
        >>> [(each.recipe, round(each.slowdown, 2), bool(each.refused)) for each in found]
        [('LocalSGD(period=1700)', 1.05, False), ('AllReduce()', inf, True)]
    """
    if not 1 < within < inf:
        raise ConfigError(f"within={within} is invalid: it must be more than 1. Use 1.05 for at most 5 % of waiting")

    table, found = measured(), dict[str, BucketOption]()
    for recipe in recipes:
        strategy = parse(recipe)
        try:
            check_carried(strategy, 2 * store.latency)
            steps = bucket_objects(strategy, parameters=parameters, workers=workers, optimizer=optimizer)
            chosen, cost = _with_period(strategy, steps, store, workers, step_seconds, within)
        except ConfigError as error:
            found[recipe] = BucketOption(recipe, None, inf, None, str(error))
            continue
        slowdown = 1 + cost.exposed_seconds_per_step / step_seconds
        # As it was typed, with its period, unless that has changed. Two recipes may have become one.
        key = canonical(chosen)
        name = recipe if chosen == strategy else key
        found.setdefault(key, BucketOption(name, cost, slowdown, table.of(name)))

    def order(each: BucketOption) -> tuple[bool, float, int]:
        return bool(each.refused), each.to_loss, parse(each.recipe).traits.period or 0

    return sorted(found.values(), key=order)


def _with_period(
    strategy: Strategy, steps: Sequence[Objects], store: Store, workers: int, step_seconds: float, within: float
) -> tuple[Strategy, BucketCost]:
    """Return the strategy with the shortest period from its own on that keeps to the limit, and its cost.

    Raises:
        ConfigError: no period does.
    """
    cost = bucket_cost(strategy, steps, store, workers, step_seconds)
    share, first = cost.exposed_seconds_per_step / step_seconds, strategy.traits.period
    if share <= within - 1:
        return strategy, cost
    if (
        first is not None
        and any(each.name == "period" for each in fields(cast(Any, strategy)))
        and first * share / (within - 1) <= _LONGEST_PERIOD
    ):
        # With a longer period a round has the same objects, and more steps.
        period = _rounded(ceil(first * share / (within - 1)), strategy.traits.rounds.fragments)
        changed: Any = replace(cast(Any, strategy), period=period)
        idle = [Objects()] * (len(steps) * period // first - len(steps))
        cost = bucket_cost(changed, [*steps, *idle], store, workers, step_seconds)
        if cost.exposed_seconds_per_step <= (within - 1) * step_seconds:
            return changed, cost
    raise ConfigError(
        f"with period={first}, waits are {share:.2f} of a step without communication, and no longer period lowers them "
        f"to {within - 1:.2f}. Use a codec, or a faster link"
    )


def _rounded(period: int, fragments: int) -> int:
    """Two digits, rounded up, and a multiple of the fragments."""
    unit = max(1, 10 ** (len(str(period)) - 2))
    period = -(-period // unit) * unit
    return -(-period // fragments) * fragments
