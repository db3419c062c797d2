# SPDX-License-Identifier: Apache-2.0
"""1-bit LAMB learns what LAMB learns from the same samples, sends far less, and is faster for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import fmean, median
from typing import Any

from reproductions.onebit_lamb.pictures import loss_picture, pace_picture
from reproductions.onebit_lamb.stages import Stages, stages_of, step_seconds, volume_by_formula
from reproductions.shared.claims import Attempt, Claim, Outcome, Result, at_least, at_most, judged
from reproductions.shared.curves import Curve, curves_of
from thinwire.lab.emulate import available
from thinwire.lab.report.statistics import ratios
from thinwire.lab.runs import Comparison, resolve

LAMB, OURS, FORGETFUL = "LAMB", "1-bit LAMB", "1-bit LAMB without error feedback"
ALONE, DDP, POWER = "no communication", "DDP", "DDP with PowerSGD"
_SHARE = 1 / 6
_LOSS, _VOLUME, _PACE, _GAIN = 1.01, 31.0, 1.3, 1.4
_SLOW, _FAST = "100mbit", "1gbit"


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Args:
        steps: of the runs whose loss counts.
        rounds: how often each of these is run, with a seed of its own.
        evaluations: on held-out data, of each.
        timed_model: the size of the model whose pace counts.
        timed_steps: of the runs whose pace counts.
        timed_rounds: how often each of these is run, taking turns.
        batch_size: of these, a step and worker.
        links: over which they run.
        baselines: torch's own methods beside them.
    """

    steps: int = 600
    rounds: int = 3
    evaluations: int = 12
    timed_model: str = "6m"
    timed_steps: int = 18
    timed_rounds: int = 3
    batch_size: int = 4
    links: tuple[str, ...] = (_SLOW, _FAST)
    baselines: tuple[str, ...] = (DDP, POWER)

    @property
    def timed(self) -> tuple[str, ...]:
        """What is timed, in order."""
        return (ALONE, *self.baselines, OURS)


# DDP's pace is judged on the fast link alone, and over the slow one its steps would take half of the time.
QUICK = Scale(steps=120, rounds=1, evaluations=6, timed_steps=8, timed_rounds=3, links=(_SLOW,), baselines=())


def warm_up(steps: int) -> int:
    """How many of a run's steps are its first stage."""
    return max(2, round(steps * _SHARE))


def measure(attempt: Attempt) -> Result:
    """Compare losses where nothing hinders messages, then pace over slow links."""
    scale = QUICK if attempt.quick else Scale()
    learned = _learned(attempt, scale)
    timed = {link: _timed(attempt, scale, link) for link in scale.links} if available() is None else {}
    curves, seconds = _curves(learned), {link: _seconds(done, scale) for link, done in timed.items()}
    return attempt.illustrated(
        judge(learned, timed, scale),
        lambda: [loss_picture(curves, warm_up(scale.steps)), *([pace_picture(seconds)] if seconds else [])],
    )


def _learned(attempt: Attempt, scale: Scale) -> Comparison:
    warm, every = warm_up(scale.steps), max(1, scale.steps // scale.evaluations)
    # The last is a control, and may diverge.
    ours = [f"CompressedMomentum(warmup_steps={warm}{more})" for more in ("", ", feedback=False")]
    asked = {"model": "0.5m", "steps": scale.steps, "batch_size": 8, "eval_every": every}
    return _compared(attempt, "learning", ["AllReduce()", *ours], asked, scale.rounds)


def _timed(attempt: Attempt, scale: Scale, link: str) -> Comparison:
    warm = warm_up(scale.timed_steps)
    texts = {
        ALONE: "Local()",
        DDP: "ddp",
        POWER: f"ddp+powersgd(start={warm})",
        OURS: f"CompressedMomentum(warmup_steps={warm}, overlap=True)",
    }
    recipes = [texts[name] for name in scale.timed]
    asked = {"model": scale.timed_model, "steps": scale.timed_steps, "batch_size": scale.batch_size, "link": link}
    more = {"eval_every": scale.timed_steps, "eval_limit": 16}
    return _compared(attempt, f"pace-{link}", recipes, {**asked, **more}, scale.timed_rounds)


def _compared(attempt: Attempt, name: str, recipes: Sequence[str], asked: Mapping[str, Any], rounds: int) -> Comparison:
    settings = resolve({"task": "text", "workers": 4, **asked})
    decayed: dict[str, Any] = {"schedule": "cosine", "warmup_steps": asked["steps"] // 12}
    lamb = replace(settings, optimizer="onebit-lamb", lr=0.02, weight_decay=0.01, **decayed)
    return attempt.compare(name, recipes, lamb, rounds=rounds, title=f"1-bit LAMB: {name}")


def _curves(learned: Comparison) -> dict[str, list[Curve]]:
    return dict(zip((LAMB, OURS, FORGETFUL), curves_of(learned), strict=True))


def judge(learned: Comparison, timed: Mapping[str, Comparison], scale: Scale) -> Result:
    """Whether the losses are alike, the bytes as few as promised, and steps as short."""
    curves = _curves(learned)
    losses = ratios(*([curve.last_loss for curve in curves[name]] for name in (OURS, LAMB)))
    stages = stages_of(learned, 1, warm_up(scale.steps))
    coded, whole = (min(getattr(each, name) for each in stages) for name in ("coded_volume", "volume"))
    seconds = {link: _seconds(done, scale) for link, done in timed.items()}
    every_pace = {link: ratios(each[OURS], each[ALONE]).values for link, each in seconds.items()}
    every_gain = {link: ratios(each[DDP], each[OURS]).values for link, each in seconds.items() if DDP in each}
    paces, gains = ({link: median(found) for link, found in each.items()} for each in (every_pace, every_gain))
    middle = {link: {name: median(found) for name, found in each.items()} for link, each in seconds.items()}
    return Result(
        parts={
            "loss": judged(losses.mean <= _LOSS),
            "payload": judged(coded >= _VOLUME),
            "slow link": at_most(every_pace[_SLOW], _PACE) if _SLOW in every_pace else Outcome.UNDECIDED,
            "fast link": at_least(every_gain[_FAST], _GAIN) if _FAST in every_gain else Outcome.UNDECIDED,
        },
        measured=f"held-out loss {_losses(curves, LAMB)} to {_losses(curves, OURS)}; {whole:.2f} times less payload "
        f"over the run, {coded:.2f} times less once the variance is frozen"
        + "".join(
            f"; over {link} a step takes {paces[link]:.2f} times one without communication"
            + (f", and {gains[link]:.2f} times less than DDP's" if link in gains else "")
            for link in seconds
        ),
        value=whole,
        least=whole,
        most=max(each.volume for each in stages),
        details={
            **{f"held-out loss, {name}": _losses(curves, name) for name in curves},
            "held-out loss over LAMB's, by round": ", ".join(f"{ratio:.4f}" for ratio in losses.values),
            "volume by formula": _formula(stages),
            "volume once frozen, against bf16": f"{coded / 2:.2f}",
            **{
                f"seconds per step over {link}, {name}": f"{s:.4f}"
                for link in middle
                for name, s in middle[link].items()
            },
            **{
                f"over {link}, by round: of a step without communication": _listed(every_pace[link]) for link in seconds
            },
            **{f"over {link}, by round: times faster than DDP": _listed(gain) for link, gain in every_gain.items()},
            **_with_warm_up(middle, timed, scale),
            "pace of": f"a model of {scale.timed_model} parameters, {scale.timed_rounds} rounds of {scale.timed_steps} "
            f"steps, methods taking turns, ratios within rounds, {scale.batch_size} passages a step and worker",
            "links": ", ".join(seconds) or "none: namespaces are not available here",
        },
    )


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _seconds(done: Comparison, scale: Scale) -> dict[str, list[float]]:
    """The time of each method's steps, round by round."""
    skipped = warm_up(scale.timed_steps) + 1
    return {name: step_seconds(done, place, skipped) for place, name in enumerate(scale.timed)}


def _with_warm_up(
    seconds: Mapping[str, Mapping[str, float]], timed: Mapping[str, Comparison], scale: Scale
) -> dict[str, str]:
    """How many times faster than DDP a run is whose first sixth sends gradients."""
    found: dict[str, str] = {}
    for link, each in seconds.items():
        if DDP not in each:
            continue
        stages = stages_of(timed[link], scale.timed.index(OURS), warm_up(scale.timed_steps))
        mean = _SHARE * median(one.warm_seconds for one in stages) + (1 - _SHARE) * each[OURS]
        found[f"times faster than DDP over {link}, warm-up counted"] = f"{each[DDP] / mean:.2f}"
    return found


def _formula(stages: Sequence[Stages]) -> str:
    coded = fmean(each.coded_volume for each in stages)
    return f"{volume_by_formula(_SHARE, coded):.2f}, counted {fmean(each.volume for each in stages):.2f}"


def _losses(curves: Mapping[str, Sequence[Curve]], name: str) -> str:
    """The mean of a method's last losses, of the runs that did not diverge; and how many did."""
    ended = [curve.last_loss for curve in curves[name] if isfinite(curve.last_loss)]
    mean, lost = f"{fmean(ended):.4f}" if ended else "", len(curves[name]) - len(ended)
    return ", ".join(filter(None, (mean, f"{lost} of {len(curves[name])} diverged" if lost else "")))


CLAIM = Claim.read(__file__, measure, globals())
