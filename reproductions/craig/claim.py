# SPDX-License-Identifier: Apache-2.0
"""Weighted coresets against random points and all the data, by gradients of single samples and by the clock."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from reproductions.craig import pictures as plots
from reproductions.craig.deep import POINTS, Deep, DeepFound, measure_network
from reproductions.craig.incremental import KINDS, METHODS, NOISE, SPACING, Method, percent
from reproductions.craig.logistic import TARGET, Convex, Found, Runs, measure_convex
from reproductions.shared.claims import Attempt, Claim, Earlier, Outcome, Result, at_least

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
    """Tune and run every arm, draw the curves, and judge."""
    convex, deep = _plans(attempt.quick, _present())
    details: dict[str, Any] = {} if _present() else {"data": "no THINWIRE_DATA: scikit-learn's digits instead"}
    found: dict[tuple[str, int], Found] = {}
    for place, plan in enumerate(convex):
        attempt.begin(f"logistic regression on {plan.task}, {plan.copies} near-duplicates", place)
        found[plan.task, plan.copies] = measure_convex(plan)
        details |= _convex_details(plan, found[plan.task, plan.copies])
        if plots.available():
            _draw_convex(attempt, plan, found[plan.task, plan.copies])
    networks: dict[str, DeepFound] = {}
    for place, network in enumerate(deep, len(convex)):
        attempt.begin(f"network on {network.task}", place)
        networks[network.task] = measure_network(network)
        details |= _deep_details(network, networks[network.task])
        if plots.available():
            first = {arm: runs.courses[0] for arm, runs in networks[network.task].runs.items() if runs.courses}
            plots.draw_accuracies(attempt.folder / f"{network.task}-accuracy.png", network.task, first)
    return judge(found, networks, details)


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


def _draw_convex(attempt: Attempt, plan: Convex, found: Found) -> None:
    stem = f"{plan.task}-{plan.copies}"
    title = f"{plan.task}, {plan.copies} near-duplicates"
    first = {method: {arm: each.courses[0] for arm, each in arms.items()} for method, arms in found.runs.items()}
    plots.draw_residuals(attempt.folder / f"{stem}-residual.png", title, first, TARGET)
    floors = {kind: [median(found.floors[f"{kind} {percent(f)}"]) for f in plan.fractions] for kind in KINDS}
    plots.draw_floors(attempt.folder / f"{stem}-floors.png", title, plan.fractions, floors)


def _deep_details(plan: Deep, found: DeepFound) -> dict[str, Any]:
    rows: dict[str, Any] = {f"{plan.task} network: accuracy to reach": f"{found.wanted:.4f}"}
    for arm, runs in found.runs.items():
        each = [
            f"{plots.in_words(course.first(found.wanted, course.seconds))} ({course.selection_seconds:.3g} s choosing, "
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


def _present() -> set[str]:
    """The tasks of this claim whose files are here."""
    return {"a9a", "mnist", "cifar10"} if os.environ.get("THINWIRE_DATA") else set()


CLAIM = Claim(
    name="craig",
    sentence="On a weighted coreset an incremental gradient method gets as near to the optimum several times "
    "sooner than on all the data, the selection included.",
    paper="Mirzasoleiman, Bilmes and Leskovec, Coresets for Data-efficient Training of Machine Learning Models, "
    "ICML 2020, arXiv:1906.01827",
    published="up to 6 times for logistic regression, up to 3 times for networks",
    protocol="logistic regression (even or odd digits of scikit-learn's digits and MNIST; a9a) of 1,000 samples "
    f"(MNIST: 500) as they are, and with 5 and {REDUNDANT} near-duplicates of each (Gaussian noise of {NOISE:g} "
    "standard deviations of each feature), weight decay 1e-3, of the intercept too; incremental gradient, SAGA and "
    "SVRG over single samples with rates that fall with the epoch; arms are all the data, coresets, random points, and "
    "random points weighed by "
    "the samples nearest to them, in three sizes, random points drawn anew by each seed; for each arm, rate and decay "
    "are the best of the same grid of 18 with a seed apart, and the size of each kind the best of three by the median "
    f"of three seeds apart; 3 judged seeds; looks {100 * (SPACING - 1):.0f}% apart in gradients, the logarithm of the "
    "residual a line between them; at most 60, 16 and 6 passes over the data with 1, 5 and 20 copies; seconds are "
    "those gradients times the seconds of a gradient on the arm's own samples, in 3 rounds in which all the data, the "
    "coreset and its selection take turns; networks: MNIST (two layers, 120,000 points) and CIFAR-10 (ResNet-8, 12,800 "
    "points), at constant rates so that no horizon decides, to the accuracy of all the data at the end, less "
    f"{100 * POINTS:g} point; selected anew in each epoch, its time counted; random and weighted random points are "
    "rivals that are told; rate (of three) and size chosen with a seed apart, 3 judged seeds, arms in turns (quick: "
    "digits and a9a with 450 samples, incremental gradient alone, and the first network with "
    "24,000 points, two rates and one size)",
    parts={
        "redundant data, gradients": f"with {REDUNDANT} near-duplicates, with every seed, incremental gradient on the "
        f"best-sized coreset needs at least {SPEEDUP:g} times fewer gradients of single samples to a loss within "
        f"{TARGET:g} of the gap between start and optimum than on all the data; within noise where seeds differ or are "
        "within one look of the limit. Each data set is judged; one on which all the data are not there with most "
        "seeds is undecided; one that fails decides, and most must be decided",
        "redundant data, seconds": f"and at least {SPEEDUP:g} times fewer seconds, selection included, with every "
        "seed and its round of the clock; within noise where they differ",
        "redundant data, beside random": "and fewer gradients, by more than one look and with every seed, than on the "
        "better of random points of both kinds, at their best sizes; within noise where seeds differ",
        "data as they are, gradients": f"the first part with every sample once: at least {SPEEDUP:g} times fewer "
        "gradients",
        "networks": f"seconds to {100 * POINTS:g} point below all the data's accuracy at least {NETWORK_SPEEDUP:g} "
        "times fewer on the best-sized coreset, selection included, with every seed; within noise where seeds differ; "
        "over data sets as in the first part",
    },
    costs="data without near-duplicates: a coreset's own optimum is further from that of all the data than random "
    "points' is at small sizes, and selection takes longer than the epochs that it saves",
    minutes=(57, 3),
    run=measure,
    earlier=(
        Earlier(
            f"with {REDUNDANT} near-duplicates, on every data set, incremental gradient on the best-sized coreset "
            f"needs at least {SPEEDUP:g} times fewer gradients to {TARGET:g} of the gap than on all the data (median "
            "of seeds), as many times fewer seconds, and fewer gradients than on random points of either kind; the "
            f"first with every sample once; networks at least {NETWORK_SPEEDUP:g} times sooner",
            "not run",
            "counts were known to a sixtieth of a run, random points were drawn once, sizes were chosen with the "
            "judged seeds, seconds were timed once, networks had one seed and one horizon for all arms, and one data "
            "set could leave all undecided",
        ),
        Earlier(
            "as now, with weight decay 1e-5, 3 passes over the data, a grid of 8 rates and decays, and no word on what "
            "follows where all the data do not come to the target",
            "nothing was decided: in the quick form no arm came to the target, all the data included",
            "so few passes at so little weight decay end far from the optimum; the new ones were chosen with all the "
            "data alone, without a coreset",
        ),
        Earlier(
            "logistic regression: at least 3 times less time to a loss within 0.01 of the gap between start and "
            "optimum, and less than a random subset of the same size takes, each arm at its best of the same rates",
            "does not hold: no coreset reached 0.01 of the gap before a random subset of its size",
            "steps took 16 samples at a constant rate on data without redundancy; the paper's take one sample at "
            "falling rates, and its first quantity is gradients",
        ),
    ),
)
