# SPDX-License-Identifier: Apache-2.0
"""Sending to one neighbour per step learns as much per step as synchronous SGD and more per second, stragglers or
not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from reproductions.sgp.pictures import loss_picture, pace_picture
from reproductions.sgp.trials import UNLIKE, UNLIKE_WORKERS, Unlike, race_loss, unlike
from reproductions.shared.claims import Attempt, Claim, Outcome, Result, at_most, emulated, weakest
from reproductions.shared.curves import Choice, Curve, curves_of
from thinwire.lab.report.statistics import spread
from thinwire.lab.runs import Settings, resolve
from thinwire.registry import recipe_classes

LINK = "100mbit"
SLOWED = "1:3x"
NOISE = 0.02
REFERENCE, SGP, OVERLAP, SILENT = "AllReduce", "SGP", "Overlap SGP", "no messages"
CONDITIONS: Mapping[str, str | None] = {"all workers alike": None, "one worker 3x slower": SLOWED}
RECIPES: Mapping[str, str] = {
    REFERENCE: "AllReduce()",
    "D-PSGD": "Gossip()",
    "AD-PSGD": "ADPSGD()",
    SGP: "PushSum()",
    OVERLAP: "PushSum(staleness=1)",
    # The control: what it reaches as well says nothing about messages.
    SILENT: "Local()",
}
WORKERS, SPLIT = 4, "group"
_TOLD = ("D-PSGD", "AD-PSGD")

POINTS, CLEARLY = 0.012, 0.03

# By condition and method: the held-out loss as each round went.
Curves = dict[tuple[str, str], list[Curve]]


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Args:
        steps: of the race.
        evaluate_every: so many of them.
        eval_limit: held-out windows of text in each evaluation.
        rounds: of the race, each with its own seed.
        told: methods that run beside those that are judged, in one round.
        trial_steps: of the short runs that choose a method's learning rate for the race.
        rates: tried for every method in the race.
        trial_seed: of the short runs.
        unlike: methods on data that differ between workers.
        unlike_rates: tried for each of them.
        unlike_trial_seeds: with which these are chosen.
        unlike_seeds: with which the methods are judged.
    """

    steps: int = 256
    evaluate_every: int = 8
    eval_limit: int = 64
    rounds: int = 3
    told: tuple[str, ...] = _TOLD
    trial_steps: int = 80
    rates: tuple[float, ...] = (0.0015, 0.003, 0.006)
    trial_seed: int = 1000
    unlike: tuple[str, ...] = (REFERENCE, SGP, OVERLAP, SILENT, "D-PSGD")
    unlike_rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)
    unlike_trial_seeds: tuple[int, ...] = (1000, 1001)
    unlike_seeds: tuple[int, ...] = tuple(range(8))


QUICK = Scale(
    steps=20,
    evaluate_every=2,
    eval_limit=16,
    rounds=1,
    told=(),
    trial_steps=10,
    rates=(0.003, 0.006),
    unlike=(REFERENCE, SGP, OVERLAP, SILENT),
    unlike_rates=(0.1, 0.3),
    unlike_trial_seeds=(1000,),
    unlike_seeds=(0, 1),
)


def measure(attempt: Attempt) -> Result:
    """Choose rates, race every method under both conditions, train on unlike data, judge, and draw."""
    scale, link = QUICK if attempt.quick else Scale(), emulated(LINK)
    # Seed 0 is the one with which the race was tried out.
    asked = {"task": "text", "seed": 1, "model": "0.5m", "split": SPLIT, "workers": WORKERS, "link": link}
    evaluations = {"eval_every": scale.evaluate_every, "eval_limit": scale.eval_limit}
    settings = resolve({**asked, **evaluations, "steps": scale.steps, "batch_size": 2})
    recipes = {
        name: recipe
        for name, recipe in RECIPES.items()
        if recipe.partition("(")[0] in recipe_classes() and (name not in _TOLD or name in scale.told)
    }
    choices = _chosen(settings, scale, recipes, attempt)
    curves = _raced(attempt, settings, scale.rounds, recipes, choices)
    trials: dict[str, Unlike] = {}
    for name in scale.unlike:
        attempt.begin(f"{RECIPES[name]}, unlike data: {UNLIKE}")
        trials[name] = unlike(RECIPES[name], scale.unlike_rates, scale.unlike_trial_seeds, scale.unlike_seeds)
    result = judge(curves, choices, trials, link)
    return attempt.illustrated(result, lambda: (loss_picture(curves), pace_picture(curves)))


def _chosen(settings: Settings, scale: Scale, recipes: Mapping[str, str], attempt: Attempt) -> dict[str, Choice]:
    """The learning rate of every method for the race."""
    found: dict[str, Choice] = {}
    for name, recipe in recipes.items():
        attempt.begin(f"{recipe}, learning rates")
        short = replace(settings, steps=scale.trial_steps, seed=scale.trial_seed)
        found[name] = Choice({rate: race_loss(replace(short, lr=rate), recipe) for rate in scale.rates})
    return found


def _raced(
    attempt: Attempt, settings: Settings, rounds: int, recipes: Mapping[str, str], choices: Mapping[str, Choice]
) -> Curves:
    """The curves of every method at its own rate; those that are only told have one round."""
    curves = Curves()
    for condition, slow in CONDITIONS.items():
        for told in (False, True):
            names = [name for name in recipes if (name in _TOLD) is told]
            if not names:
                continue
            done = attempt.compare(
                f"runs/{'slowed' if slow else 'alike'}{'-told' if told else ''}",
                [recipes[name] for name in names],
                replace(settings, slow=slow),
                rounds=1 if told else rounds,
                title=f"Stochastic gradient push and other methods, {condition}",
                rates={recipes[name]: choices[name].rate for name in names},
            )
            curves |= {(condition, name): each for name, each in zip(names, curves_of(done), strict=True)}
    return curves


def judge(curves: Curves, choices: Mapping[str, Choice], trials: Mapping[str, Unlike], link: str | None) -> Result:
    """Whether both forms of SGP keep up per step and get ahead per second, whatever the workers' paces."""
    verdicts = [(condition, name) for condition in CONDITIONS for name in (SGP, OVERLAP)]
    times = {key: _time_ratios(curves, *key) for key in verdicts}
    shown = times[next(iter(CONDITIONS)), OVERLAP]
    return Result(
        parts={
            **{f"{name}: per step": _per_step(curves, name) for name in (SGP, OVERLAP)},
            **{f"{name}: per second": _per_second(curves, name) for name in (SGP, OVERLAP)},
            **{f"{name}: unlike data": _on_unlike(trials, name) for name in (SGP, OVERLAP)},
        },
        measured="; ".join(
            f"{name}, {condition}: the same steps in {fmean(times[condition, name]):.2f}x AllReduce's time, loss "
            f"{_mean_loss(curves, condition, name):.3f} against {_mean_loss(curves, condition, REFERENCE):.3f} after "
            f"them and {_loss_meanwhile(curves, condition, name):.3f} in that time"
            for condition, name in verdicts
        ),
        value=fmean(shown),
        least=min(shown),
        most=max(shown),
        details={
            **_rows(curves),
            **{f"{name}: learning rate in the race": str(choice) for name, choice in choices.items()},
            **{
                f"{name}, {condition}": f"{_range(_losses_over(curves, condition, name))} of AllReduce's loss above "
                f"it after the same steps; {_range(_leads(curves, condition, name))} nats below what it had reached in "
                "the same time (the least and the greatest of the rounds)"
                for condition in CONDITIONS
                for name in (SGP, OVERLAP, SILENT)
            },
            **_unlike_rows(trials),
            "better than Overlap SGP after the same steps": _better(curves) or "none",
            "link": link or "the machine's own (no namespaces here)",
        },
    )


def _losses_over(curves: Curves, condition: str, name: str) -> list[float]:
    """How far the last loss lies above AllReduce's with the same seed, as a part of it, in each round."""
    pairs = zip(curves[condition, name], curves[condition, REFERENCE], strict=True)
    return [ours.last_loss / theirs.last_loss - 1 for ours, theirs in pairs]


def _leads(curves: Curves, condition: str, name: str) -> list[float]:
    """How far the last loss lies below what AllReduce had reached by that second, in each round."""
    pairs = zip(curves[condition, name], curves[condition, REFERENCE], strict=True)
    return [theirs.loss_by(ours.last_second) - ours.last_loss for ours, theirs in pairs]


def _messages_matter(curves: Curves) -> bool:
    """Whether workers without messages exceed what is allowed, in every round of both conditions."""
    return all(over > NOISE for condition in CONDITIONS for over in _losses_over(curves, condition, SILENT))


def _per_step(curves: Curves, name: str) -> Outcome:
    """Whether little of the loss is lost, and of what silence loses at most half, in every round."""
    if not _messages_matter(curves):
        return Outcome.UNDECIDED
    found: list[Outcome] = []
    for condition in CONDITIONS:
        pairs = zip(_losses_over(curves, condition, name), _losses_over(curves, condition, SILENT), strict=True)
        found.append(at_most([over - min(NOISE, silent / 2) for over, silent in pairs], 0.0))
    return weakest(found)


def _per_second(curves: Curves, name: str) -> Outcome:
    """Whether it is ahead in every round under every condition, where messages are needed."""
    if not _messages_matter(curves):
        return Outcome.UNDECIDED
    # Ahead is more than level: a difference of nothing does not count.
    leads = [_leads(curves, condition, name) for condition in CONDITIONS]
    return weakest([at_most([0.0 if lead > 0 else 1.0 for lead in each], 0.0) for each in leads])


def _behind(trials: Mapping[str, Unlike], name: str) -> list[float]:
    """How far its accuracy lies below AllReduce's with the same seed."""
    pairs = zip(trials[REFERENCE].accuracies, trials[name].accuracies, strict=True)
    return [theirs - ours for theirs, ours in pairs]


def _on_unlike(trials: Mapping[str, Unlike], name: str) -> Outcome:
    """Whether it is as accurate as AllReduce, which can only be told where workers without messages are not."""
    if min(_behind(trials, SILENT)) < CLEARLY:
        return Outcome.UNDECIDED
    behind = spread(_behind(trials, name))
    return at_most([behind.mean - behind.error, behind.mean + behind.error], POINTS)


def _unlike_rows(trials: Mapping[str, Unlike]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, trial in trials.items():
        behind = spread(_behind(trials, name))
        rows[f"unlike data, {name}: accuracy"] = (
            f"{spread(trial.accuracies).words('.2%', of='mean')}, {100 * behind.mean:.2f} points below "
            f"AllReduce's (standard error {100 * behind.error:.2f}, {len(behind.values)} seeds); "
            f"learning rate {trial.choice}"
        )
    return rows


def _range(figures: Sequence[float]) -> str:
    return f"{min(figures):+.3f} to {max(figures):+.3f}"


def _loss_meanwhile(curves: Curves, condition: str, name: str) -> float:
    """What AllReduce had reached by the second at which the other method was done, the mean over rounds."""
    pairs = zip(curves[condition, name], curves[condition, REFERENCE], strict=True)
    return fmean(theirs.loss_by(ours.last_second) for ours, theirs in pairs)


def _time_ratios(curves: Curves, condition: str, name: str) -> list[float]:
    """The time of all steps over AllReduce's, in each round."""
    pairs = zip(curves[condition, name], curves[condition, REFERENCE], strict=True)
    return [ours.last_second / theirs.last_second for ours, theirs in pairs]


def _mean_loss(curves: Curves, condition: str, name: str) -> float:
    return fmean(curve.last_loss for curve in curves[condition, name])


def _rows(curves: Curves) -> dict[str, Any]:
    """What every method needed and reached, under each condition."""
    rows: dict[str, Any] = {}
    for (condition, name), found in curves.items():
        losses = [curve.last_loss for curve in found]
        rows[f"{condition}: {name}"] = (
            f"{1000 * fmean(curve.seconds_per_step for curve in found):.0f} ms a step, of which "
            f"{1000 * fmean(curve.exposed_seconds_per_step for curve in found):.0f} ms waiting; "
            f"{fmean(curve.bytes_per_step for curve in found) / 1e6:.2f} MB sent; "
            f"held-out loss {spread(losses).words('.4f', of='mean')}"
        )
    return rows


def _better(curves: Curves) -> str:
    """The methods, with their conditions, whose mean loss is lower than Overlap SGP's with the same seeds."""
    found: list[str] = []
    for (condition, name), rounds in curves.items():
        # Some methods have fewer rounds.
        pairs = zip(rounds, curves[condition, OVERLAP], strict=False)
        if fmean(theirs.last_loss - ours.last_loss for ours, theirs in pairs) > 0:
            found.append(f"{name} ({condition})")
    return ", ".join(found)


CLAIM = Claim.read(
    __file__, measure, {**globals(), "points": 100 * POINTS, "clearly": 100 * CLEARLY, "workers": UNLIKE_WORKERS}
)
