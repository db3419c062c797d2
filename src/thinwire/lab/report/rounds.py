# SPDX-License-Identifier: Apache-2.0
"""One row of figures for several rounds of one strategy, each with a seed of its own."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from thinwire.lab.report.files import Facts, number, text
from thinwire.lab.report.statistics import spread

LOSSES = ("train_loss", "eval_loss", "eval_metric")
_DEVIATION = "_deviation"


def over_rounds(rounds: Sequence[Facts], shown: Facts | None = None) -> dict[str, Any]:
    """Summarize the rounds of one strategy.

    Losses and the metric are means over all rounds, with the standard deviation under `eval_loss_deviation` and so on.
    They are None if a round has none: rows of a comparison are means over the same seeds, or nothing. Other numbers
    are medians over the rounds that have not diverged.

    Args:
        rounds: the summary of each round; one round is returned unchanged.
        shown: the round that everything else is taken from; the first unless given.

    Example:
        >>> rounds = [{"seed": seed, "eval_loss": loss, "steps": 8} for seed, loss in ((0, 2.0), (1, 2.5), (2, 3.0))]
        >>> over_rounds(rounds)
        {'seed': None, 'eval_loss': 2.5, 'steps': 8, 'eval_loss_deviation': 0.5, 'seeds': [0, 1, 2]}
    """
    if len(rounds) == 1:
        return dict(rounds[0])
    found: dict[str, Any] = dict(rounds[0] if shown is None else shown)
    ended = [each for each in rounds if not text(each, "diverged")]
    for key in found:
        if key in LOSSES:
            values = [value for each in rounds if (value := number(each, key)) is not None]
            found[key] = spread(values).mean if len(values) == len(rounds) else None
        elif key == "seconds_to_target":
            # A round that did not reach the target would have taken longer than all that did.
            reached = spread(inf if (value := number(each, key)) is None else value for each in rounds).median
            found[key] = reached if reached < inf else None
        elif key != "target_loss":
            known: list[Any] = [each[key] for each in ended or rounds if number(each, key) is not None]
            found[key] = spread(known).median if known else found[key]
    for key in LOSSES:
        if found.get(key) is not None:
            found[key + _DEVIATION] = spread(number(each, key) or 0.0 for each in rounds).deviation
    diverged = [str(each["diverged"]) for each in rounds if text(each, "diverged")]
    if diverged:
        found["diverged"] = f"in {len(diverged)} of {len(rounds)} rounds: {diverged[0]}"
    if all("seed" in each for each in rounds):
        found |= {"seed": None, "seeds": [each["seed"] for each in rounds]}
    return found


def deviation(summary: Facts, key: str) -> float | None:
    """Return the standard deviation over rounds of a figure; None where it is of one run."""
    return number(summary, key + _DEVIATION)


def of_same_seeds(strategies: Sequence[Sequence[Facts]]) -> list[tuple[Facts, ...]]:
    """Leave out the rounds whose seed some strategy has not been run with, as after an interruption.

    All are kept if no seed is common.
    """
    seeds = [{each.get("seed") for each in rounds} for rounds in strategies]
    common = set.intersection(*seeds) if seeds else set()
    return [tuple(each for each in rounds if not common or each.get("seed") in common) for rounds in strategies]


def median_round(strategies: Sequence[Sequence[Facts]]) -> int:
    """Return the round that stands for all of them in curves and timelines, the same for every strategy.

    It is the one whose time per step, of all strategies together, is the median; of an even number the lower of the
    two in the middle, because a report shows a run that took place. Rounds in which a run diverged count only if there
    are no others.
    """
    complete = range(min((len(each) for each in strategies), default=0))
    if not complete:
        return 0
    rounds = [[each[place] for each in strategies] for place in complete]
    ended = [place for place in complete if not any(text(each, "diverged") for each in rounds[place])] or list(complete)
    ordered = sorted(ended, key=lambda place: sum(number(each, "seconds_per_step") or 0.0 for each in rounds[place]))
    return ordered[(len(ordered) - 1) // 2]
