# SPDX-License-Identifier: Apache-2.0
"""Weighted coresets against random points and all the data, by gradients of single samples and by the clock."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from reproductions.craig.deep import POINTS, Deep, DeepFound, measure_network
from reproductions.craig.incremental import KINDS, METHODS, NOISE, SPACING, Method, percent
from reproductions.craig.logistic import TARGET, Convex, Found, Runs, measure_convex
from reproductions.craig.pictures import accuracy_picture, floor_picture, residual_picture
from reproductions.shared.claims import Attempt, Claim, Outcome, Result, at_least

if TYPE_CHECKING:
    from thinwire.lab.report.picture import Picture

SPEEDUP, NETWORK_SPEEDUP = 3.0, 2.0
REDUNDANT = 20


def _plans(quick: bool, real: set[str]) -> tuple[list[Convex], list[Deep]]:
    """What is measured: all of it, or what three minutes bear; where files are missing, on digits."""
    rates = (0.1, 0.3, 1.0)
    if not real:
        methods: tuple[Method, ...] = ("ig",) if quick else METHODS
        convex = [
            Convex("digits", copies, 1000, methods) for copies in ((1, REDUNDANT) if quick else (1, 5, REDUNDANT))
        ]
        return convex, [Deep("digits", None, (0.1, 0.4), rates, 30_000 if quick else 100_000)]
    if quick:
        plans = [Convex(task, copies, 450, ("ig",)) for task in ("digits", "a9a") for copies in (1, REDUNDANT)]
        return plans, [Deep("mnist", None, (0.2,), rates[1:], 24_000)]
    # Fewer of MNIST, whose many features take most of the time.
    originals = {"digits": 1000, "mnist": 500, "a9a": 1000}
    convex = [Convex(task, copies, most) for task, most in originals.items() for copies in (1, 5, REDUNDANT)]
    residual = Deep(
        "cifar10",
        "resnet8",
        (0.1,),
        (0.01, 0.03, 0.1),
        12_800,
        batch_size=64,
        momentum=0.9,
        weight_decay=5e-4,
        looks=16,
        eval_limit=1000,
    )
    return convex, [Deep("mnist", None, (0.2, 0.4), rates, 120_000), residual]


def measure(attempt: Attempt) -> Result:
    """Tune and run every arm, judge, and draw the curves."""
    convex, deep = _plans(attempt.quick, _present())
    details: dict[str, Any] = {} if _present() else {"data": "no THINWIRE_DATA: scikit-learn's digits instead"}
    found: dict[tuple[str, int], Found] = {}
    for plan in convex:
        attempt.begin(f"logistic regression on {plan.task}, {plan.copies} near-duplicates")
        found[plan.task, plan.copies] = measure_convex(plan)
        details |= _convex_details(plan, found[plan.task, plan.copies])
    networks: dict[str, DeepFound] = {}
    for network in deep:
        attempt.begin(f"network on {network.task}")
        networks[network.task] = measure_network(network)
        details |= _deep_details(network, networks[network.task])

    def pictures() -> Iterator[Picture]:
        for plan in convex:
            yield from _pictures_of(plan, found[plan.task, plan.copies])
        for task, each in networks.items():
            first = {arm: runs.courses[0] for arm, runs in each.runs.items() if runs.courses}
            yield accuracy_picture(task, first)

    return attempt.illustrated(judge(found, networks, details), pictures)


def judge(found: Mapping[tuple[str, int], Found], networks: Mapping[str, DeepFound], details: dict[str, Any]) -> Result:
    """By incremental gradient, whether coresets need fewer gradients and less time, and less than random points do."""
    copied = {task: each for (task, copies), each in found.items() if copies == REDUNDANT}
    single = {task: each for (task, copies), each in found.items() if copies == 1}

    def of(data: Mapping[str, Found], judged: Callable[[Found], Outcome]) -> dict[str, Outcome]:
        return {task: judged(each) if each.arrives("ig") else Outcome.UNDECIDED for task, each in data.items()}

    by_data = {
        "redundant data, gradients": of(copied, lambda each: beyond(each.fewer("ig"), SPEEDUP)),
        "redundant data, seconds": of(copied, lambda each: at_least(each.sooner(), SPEEDUP)),
        "redundant data, beside random": of(copied, lambda each: beyond(each.beside_random("ig"), 1.0)),
        "data as they are, gradients": of(single, lambda each: beyond(each.fewer("ig"), SPEEDUP)),
        "networks": {
            task: at_least(each.sooner("craig"), NETWORK_SPEEDUP) if each.arrives() else Outcome.UNDECIDED
            for task, each in networks.items()
        },
    }
    told = {
        f"{part}: by data set": "; ".join(f"{task}: {outcome}" for task, outcome in each.items())
        for part, each in by_data.items()
    }
    decided = {task: each for task, each in copied.items() if each.arrives("ig")} or copied
    worst = min((each.fewer("ig") for each in decided.values()), key=median)
    parts = {part: over_data(each) for part, each in by_data.items()}
    return Result(parts, _words(copied, single, networks), median(worst), min(worst), max(worst), told | details)


def beyond(figures: Sequence[float], limit: float) -> Outcome:
    """The outcome of a rule about paired counts of gradients: each seed's figure must exceed the limit.

    Counts are known to one look, so a figure that is no further from the limit is on neither side. Where seeds do not
    all lie on one side, their spread can turn the rule, and it is not decided.

    Example:
        >>> [beyond(figures, 3.0).value for figures in ([3.2, 4.0], [3.1, 4.0], [2.0, 2.5], [1.0, 4.0])]
        ['holds', 'within noise', 'does not hold', 'within noise']
    """
    if all(figure > limit * SPACING for figure in figures):
        return Outcome.HOLDS
    return Outcome.FAILS if all(figure < limit / SPACING for figure in figures) else Outcome.NOISE


def over_data(outcomes: Mapping[str, Outcome]) -> Outcome:
    """The outcome over data sets: of those that are decided, if these are most of them; one that fails decides.

    Example:
        >>> over_data({"a": Outcome.HOLDS, "b": Outcome.HOLDS, "c": Outcome.UNDECIDED}).value
        'holds'
        >>> over_data({"a": Outcome.HOLDS, "b": Outcome.UNDECIDED}).value
        'cannot be decided here'
    """
    decided = [outcome for outcome in outcomes.values() if outcome is not Outcome.UNDECIDED]
    if Outcome.FAILS in decided:
        return Outcome.FAILS
    if 2 * len(decided) <= len(outcomes):
        return Outcome.UNDECIDED
    return Outcome.NOISE if Outcome.NOISE in decided else Outcome.HOLDS


def _words(copied: Mapping[str, Found], single: Mapping[str, Found], networks: Mapping[str, DeepFound]) -> str:
    def named(task: str, arrives: bool) -> str:
        return task if arrives else f"{task} (all the data are never there)"

    told = ", ".join(
        f"{named(task, each.arrives('ig'))} {median(each.fewer('ig')):.2g} ({median(each.sooner()):.2g} in seconds, "
        f"{median(each.beside_random('ig')):.2g} beside random points)"
        for task, each in copied.items()
    )
    alone = ", ".join(
        f"{named(task, each.arrives('ig'))} {median(each.fewer('ig')):.2g}" for task, each in single.items()
    )
    deep = ", ".join(
        f"{named(task, each.arrives())} {median(each.sooner('craig')):.2g} times sooner"
        for task, each in networks.items()
    )
    return (
        f"times fewer gradients than all the data, medians of seeds, with {REDUNDANT} near-duplicates: {told}; of data "
        f"as they are: {alone}; networks: {deep} (0: never there)"
    )


def _convex_details(plan: Convex, found: Found) -> dict[str, Any]:
    named = f"{plan.task}, {plan.copies} near-duplicates"
    rows: dict[str, Any] = {}
    for arm, floors in found.floors.items():
        spent = f", chosen in {found.spent[arm]:.3g} s" if arm in found.spent else ""
        rows[f"{named}, {arm}: optimum of the subset"] = f"{_list(floors)} of the gap above that of all the data{spent}"
    for method, arms in found.runs.items():
        for arm, runs in arms.items():
            rows[f"{named}, {method.upper()}, {arm}: gradients to {TARGET:g}"] = _told(plan, runs)
        best = {kind: found.best(method, kind) for kind in KINDS}
        rows[f"{named}, {method.upper()}: times fewer gradients than all the data, by seed"] = "; ".join(
            f"{best[kind]}: {_list(found.fewer(method, kind))}" for kind in KINDS
        )
        beside = _list(found.beside_random(method))
        rows[f"{named}, {method.upper()}: {best['craig']}, times fewer than random points, by seed"] = beside
    rows[f"{named}, IG: rounds of the clock"] = "; ".join(
        f"{1e6 * each.full:.2f} us a gradient on all the data, {1e6 * each.coreset:.2f} us on "
        f"{found.best('ig', 'craig')}, chosen in {each.selection:.3g} s: {times:.3g} times sooner"
        for each, times in zip(found.rounds, found.sooner(), strict=True)
    )
    return rows


def _told(plan: Convex, runs: Runs) -> str:
    """Where each seed was at the target, and what was chosen for the arm."""
    counts = ", ".join("never" if math.isinf(count) else f"{count:,.0f}" for count in runs.gradients())
    least = median(min(course.residuals) for course in runs.courses)
    return (
        f"{counts}; least residual {least:.3g}; rate {runs.rate:g}{_edge(runs.rate, plan.rates)}, "
        f"decay {runs.decay:g}{_edge(runs.decay, plan.decays)}"
    )


def _edge(value: float, grid: Sequence[float]) -> str:
    return " (edge of the grid)" if value in (min(grid), max(grid)) else ""


def _list(figures: Sequence[float]) -> str:
    return ", ".join(f"{figure:.3g}" for figure in figures)


def _pictures_of(plan: Convex, found: Found) -> tuple[Picture, Picture]:
    stem, title = f"{plan.task}-{plan.copies}", f"{plan.task}, {plan.copies} near-duplicates"
    first = {method: {arm: each.courses[0] for arm, each in arms.items()} for method, arms in found.runs.items()}
    floors = {kind: [median(found.floors[f"{kind} {percent(f)}"]) for f in plan.fractions] for kind in KINDS}
    return (
        residual_picture(stem, title, first, TARGET),
        floor_picture(stem, title, plan.fractions, floors, TARGET),
    )


def _deep_details(plan: Deep, found: DeepFound) -> dict[str, Any]:
    rows: dict[str, Any] = {f"{plan.task} network: accuracy to reach": f"{found.wanted:.4f}"}
    for arm, runs in found.runs.items():
        each = [
            f"{_in_words(course.first(found.wanted, course.seconds))} ({course.selection_seconds:.3g} s choosing, "
            f"{course.points[-1]:,} points, {course.accuracies[-1]:.4f} at the end)"
            for course in (*runs.courses, *(() if runs.courses else (runs.apart,)))
        ]
        seeds = "" if runs.courses else "not the best size; with the seed apart "
        rows[f"{plan.task} network, {arm}"] = (
            f"{seeds}{', '.join(each)}; rate {runs.rate:g}{_edge(runs.rate, plan.rates)}"
        )
    rows[f"{plan.task} network: times sooner than all the data, by seed"] = "; ".join(
        f"{found.judged(kind)}: {_list(found.sooner(kind))}" for kind in KINDS
    )
    return rows


def _in_words(seconds: float) -> str:
    return f"{seconds:.3g} s" if math.isfinite(seconds) else "never"


def _present() -> set[str]:
    """The tasks of this claim whose files are here."""
    return {"a9a", "mnist", "cifar10"} if os.environ.get("THINWIRE_DATA") else set()


CLAIM = Claim.read(
    __file__, measure, {**globals(), "NOISE": NOISE, "points": 100 * POINTS, "apart": 100 * (SPACING - 1)}
)
