"""Sending to one neighbour per step learns as much per step as synchronous SGD and more per second, stragglers or
not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from statistics import fmean
from typing import Any

from reproductions.shared.claims import Attempt, Claim, Result
from reproductions.shared.curves import Curve, curves_of
from thinwire.emulate import available
from thinwire.registry import recipe_classes
from thinwire.runs.comparison import compare
from thinwire.runs.defaults import resolve

LINK = "100mbit"
SLOWED = "1:3x"
NOISE = 0.03
REFERENCE, SGP, OVERLAP = "AllReduce", "SGP", "Overlap SGP"
CONDITIONS: Mapping[str, str | None] = {"all workers alike": None, "one worker 3x slower": SLOWED}
RECIPES: Mapping[str, str] = {
    REFERENCE: "AllReduce()",
    "D-PSGD": "Gossip()",
    "AD-PSGD": "ADPSGD()",
    SGP: "PushSum()",
    OVERLAP: "PushSum(staleness=1)",
}

# By condition and method: the held-out loss as each round went.
Curves = dict[tuple[str, str], list[Curve]]


def measure(attempt: Attempt) -> Result:
    """Train every method under both conditions, judge, and draw."""
    link = None if available() else LINK
    steps, rounds = (40, 1) if attempt.quick else (200, 3)
    settings = resolve(
        {
            "task": "text",
            "model": "0.5m",
            "workers": 4,
            "link": link,
            "steps": steps,
            "batch_size": 2,
            "eval_every": steps // 5,
            "eval_limit": 32 if attempt.quick else 128,
        }
    )
    known = {name: recipe for name, recipe in RECIPES.items() if recipe.partition("(")[0] in recipe_classes()}
    curves, places = Curves(), count()
    for condition, slow in CONDITIONS.items():
        done = compare(
            replace(settings, slow=slow),
            list(known.values()),
            attempt.folder / "runs" / ("slowed" if slow else "alike"),
            rounds=rounds,
            title=f"Stochastic gradient push and other methods, {condition}",
            listener=attempt.listener,
            begin=lambda recipe, _, condition=condition: attempt.begin(f"{recipe}, {condition}", next(places)),
        )
        curves |= {(condition, name): each for name, each in zip(known, curves_of(done), strict=True)}
    return judge(curves, link, _drawn(attempt, curves))


def judge(curves: Curves, link: str | None, pictures: Sequence[str]) -> Result:
    """Whether both forms of SGP keep up per step and get ahead per second, whatever the workers' paces."""
    verdicts = {
        (condition, name): (_level(curves, condition, name), _ahead(curves, condition, name))
        for condition in CONDITIONS
        for name in (SGP, OVERLAP)
    }
    times = {key: _time_ratios(curves, *key) for key in verdicts}
    shown = times[next(iter(CONDITIONS)), OVERLAP]
    return Result(
        holds=all(level and ahead for level, ahead in verdicts.values()),
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
            **{
                f"{name}, {condition}": f"{'level' if level else 'NOT level'} per step, "
                f"{'ahead' if ahead else 'NOT ahead'} per second"
                for (condition, name), (level, ahead) in verdicts.items()
            },
            "better than Overlap SGP after the same steps": _better(curves) or "none",
            "link": link or "the machine's own (no namespaces here)",
            "pictures": " ".join(f"![{name}]({name})" for name in pictures) or "none: matplotlib is missing",
        },
    )


def _level(curves: Curves, condition: str, name: str) -> bool:
    """Whether the last losses lie within noise of AllReduce's: a fixed part of it, or how much its rounds differ."""
    reference = [curve.last_loss for curve in curves[condition, REFERENCE]]
    noise = max(NOISE * fmean(reference), max(reference) - min(reference))
    return _mean_loss(curves, condition, name) - fmean(reference) <= noise


def _ahead(curves: Curves, condition: str, name: str) -> bool:
    """Whether the last loss is lower than AllReduce's at the same second, in every round."""
    pairs = zip(curves[condition, name], curves[condition, REFERENCE], strict=True)
    return all(ours.last_loss < theirs.loss_at(ours.last_second) for ours, theirs in pairs)


def _loss_meanwhile(curves: Curves, condition: str, name: str) -> float:
    """AllReduce's loss at the second at which the other method was done, the mean over rounds."""
    pairs = zip(curves[condition, name], curves[condition, REFERENCE], strict=True)
    return fmean(theirs.loss_at(ours.last_second) for ours, theirs in pairs)


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
            f"held-out loss {fmean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})"
        )
    return rows


def _better(curves: Curves) -> str:
    """The methods, with their conditions, whose mean loss is lower than Overlap SGP's."""
    return ", ".join(
        f"{name} ({condition})"
        for condition, name in curves
        if _mean_loss(curves, condition, name) < _mean_loss(curves, condition, OVERLAP)
    )


def _drawn(attempt: Attempt, curves: Curves) -> list[str]:
    """The names of the pictures; none where matplotlib is not installed."""
    try:
        from reproductions.sgp.pictures import loss_picture, pace_picture
    except ModuleNotFoundError:
        return []
    return [picture.png(attempt.folder).name for picture in (loss_picture(curves), pace_picture(curves))]


CLAIM = Claim(
    name="sgp",
    sentence="Stochastic gradient push, and overlapped with computation even more so, learns as much per step as "
    "synchronous SGD and more per second over a thin link, also with a straggler among the workers.",
    paper="Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019, arXiv:1811.10792",
    published="ImageNet, ResNet-50, 32 nodes, 10 Gbit/s: about 1.6 hours against over 5 with AllReduce, accuracy "
    "within 1.2 points",
    rule=f"with all workers alike and with one 3x slower, for SGP and for Overlap SGP: mean held-out loss after the "
    f"same steps at most {NOISE:.0%}, or the spread of AllReduce's rounds, above AllReduce's; and in every round lower "
    "than AllReduce's at the second at which they were done",
    run=measure,
)
