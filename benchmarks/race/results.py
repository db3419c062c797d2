# SPDX-License-Identifier: Apache-2.0
"""The results, and what follows from them by the rule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.race.racers import AVERAGED, BUDGET, OUTER_RATES, Racer, ddp_of
from reproductions.shared.committed import Fields, Records

RESULTS = Records(Path(__file__).parents[1] / "results" / "race")
"""A file for each work."""


PAIRED = "times/none-4-paired"
"""`AllReduce()` and DDP in turns, without a link."""


def result(name: str) -> Fields | None:
    """A result, such as that of "losses/ddp-0"; None where it has not been run."""
    return RESULTS.get(name)


# -- rates -------------------------------------------------------------------------------------------------------------


def tune_names(racer: Racer) -> list[str]:
    """The names of a racer's tries."""
    own = racer.tuned_as
    if own.inner is None:
        return [f"tune/{own.name}-{rate:g}" for rate in own.work.rates]
    return [f"tune/{own.name}-outer-{outer:g}" for outer in OUTER_RATES]


def tries(racer: Racer) -> list[Fields]:
    """The tries that were run."""
    return [found for name in tune_names(racer) if (found := result(name)) is not None]


def best_try(racer: Racer) -> Fields | None:
    """The one with the lowest held-out loss; None before all were run."""
    found = tries(racer)
    return min(found, key=final_of_try) if len(found) == len(tune_names(racer)) else None


def final_of_try(found: Fields) -> float:
    """The mean of the last evaluations of a try; infinite where training failed."""
    return float("inf") if "failed" in found or not found["losses"] else fmean(found["losses"][-AVERAGED:])


# -- curves ------------------------------------------------------------------------------------------------------------


def curve_of(racer: Racer, seed: int) -> Fields | None:
    """The curve of a seed; None where it has not been run."""
    return result(f"losses/{racer.curve_of.name}-{seed}")


def final(found: Fields, key: str = "losses") -> float:
    """The loss after the budget; infinite where training did not get there."""
    if BUDGET not in found["steps"]:
        return float("inf")
    end = found["steps"].index(BUDGET) + 1
    return fmean(found["losses"][end - AVERAGED : end]) if key == "losses" else found[key][end - 1]


def steps_to(found: Fields, target: float, key: str = "losses") -> int | None:
    """Steps after which the loss first is no more than the target; None where it never is."""
    for place, step in enumerate(found["steps"]):
        if key == "training" and found[key][place] <= target:
            return step
        if key == "losses" and place + 1 >= AVERAGED and fmean(found[key][place + 1 - AVERAGED : place + 1]) <= target:
            return step
    return None


def targets(task: str, seed: int) -> dict[str, float] | None:
    """DDP's losses after its budget, held-out and in training; None before it was run."""
    found = curve_of(ddp_of(task), seed)
    return None if found is None else {key: final(found, key) for key in ("losses", "training")}


def is_enough(found: Fields, task: str, seed: int) -> bool:
    """Whether a curve has spent the budget and reached both targets."""
    goals = targets(task, seed)
    spent = bool(found["steps"]) and found["steps"][-1] >= BUDGET
    return spent and goals is not None and all(steps_to(found, goals[key], key) is not None for key in goals)


def loss_until(found: Fields, values: Sequence[float], limit: float) -> float | None:
    """The mean of the last evaluations at which a running value is no more than a limit; None where there is none.

    A curve may go on beyond the budget, until the target; those evaluations do not count.
    """
    every = zip(found["losses"], values, found["steps"], strict=True)
    within = [loss for loss, value, step in every if value <= limit and step <= BUDGET]
    return fmean(within[-AVERAGED:]) if within else None
