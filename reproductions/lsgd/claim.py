# SPDX-License-Identifier: Apache-2.0
"""Leaders learn more than springs in the same time, and leave basins in which springs are held."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from reproductions.lsgd.landscapes import Completion, Descent, double_well, go_down
from reproductions.lsgd.pictures import completion_picture, leaders_picture, loss_picture, well_picture
from reproductions.shared.claims import Attempt, Claim, Outcome, Result, at_most, emulated, judged
from reproductions.shared.curves import Curve, curves_of
from thinwire import EASGD, LeaderGradientDescent, LeaderSGD
from thinwire.lab.report.statistics import spread
from thinwire.lab.runs import load

PERIOD = 8
WORKERS = 4
_LINK = "20mbit"
_LR = 0.1
METHODS = {
    "AllReduce": "AllReduce()",
    "periodic averaging": f"LocalSGD(period={PERIOD})",
    "EASGD": f"EASGD(period={PERIOD})",
    # As in the paper, the mean of all workers is evaluated, which is the default; and once their leader.
    "LSGD": f"LeaderSGD(period={PERIOD})",
    "LSGD, two nodes": f"MultiLeaderSGD(period={PERIOD}, node_size=2, global_period={4 * PERIOD})",
    "LSGD, its leader": f"LeaderSGD(period={PERIOD}, result='leader')",
}
LEADER, NODES = "LSGD", "LSGD, two nodes"
# By part: whose loss is over whose, and must be no higher.
_PAIRS = {
    **{f"than {name}": (LEADER, name) for name in ("AllReduce", "periodic averaging", "EASGD")},
    **{f"two nodes, than {name}": (NODES, name) for name in ("AllReduce", "EASGD")},
}
# The paper has two nodes for more workers than these, over links that are slower between nodes: told, not judged.
_TOLD = ((NODES, "periodic averaging"), (NODES, LEADER))
# In a double well, the spring over the learning rate and the pull beside what each theory calls its threshold.
_WELLS = {
    "EASGD, spring 0.6": (EASGD(period=1, pull=0.06, centre_pull=0.12), True),
    "EASGD, spring 0.7": (EASGD(period=1, pull=0.07, centre_pull=0.14), False),
    "LGD, pull 0.24": (LeaderGradientDescent(pull=0.24), True),
    "LGD, pull 0.26": (LeaderGradientDescent(pull=0.26), False),
}
_HILL, _WELL_STEPS = 0.25, 600
# Of springs and leaders at matrix completion: one that holds, and one strong enough to bring all together at once.
_PULLS = (0.01, 0.1)
_SEARCH_SEED = 100


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Args:
        rates: learning rates tried for every method, with a seed apart; where there is one, it is not tried.
        methods: that are raced, by name.
        seconds: of training, of each run.
        rounds: in which all methods take turns at their rates, with another seed each time.
        matrices: completed.
        steps: of each descent to a matrix.
    """

    rates: tuple[float, ...] = (0.0025, 0.005, 0.01, 0.02, 0.04)
    methods: tuple[str, ...] = tuple(METHODS)
    seconds: float = 12.0
    rounds: int = 6
    matrices: int = 8
    steps: int = 600


QUICK = Scale(rates=(0.01,), methods=tuple(METHODS)[:-1], seconds=3.5, rounds=2, matrices=2, steps=400)


@dataclass(frozen=True)
class Races:
    """What came of every method, by name.

    Attributes:
        tried: by learning rate, the held-out loss at the end with the seed of the search.
        rounds: the runs that are judged: a curve for each round, in which all methods took turns.
        led: how often each worker led all, in those runs.
    """

    tried: Mapping[str, Mapping[float, float]]
    rounds: Mapping[str, Sequence[Curve]]
    led: Mapping[str, Sequence[int]]

    def ratios(self, ours: str, theirs: str) -> list[float]:
        """One method's loss at the end over another's, round by round."""
        return [_end(a) / _end(b) for a, b in zip(self.rounds[ours], self.rounds[theirs], strict=True)]


@dataclass(frozen=True)
class Landscapes:
    """What happened where there is no noise.

    Attributes:
        wells: by recipe, the descent of two workers from either side of a hill.
        completions: by method, a descent for every matrix.
    """

    wells: dict[str, Descent]
    completions: dict[str, list[Descent]]


def measure(attempt: Attempt) -> Result:
    """Race over a link, then go down landscapes."""
    scale, link = QUICK if attempt.quick else Scale(), emulated(_LINK)
    races = _raced(attempt, scale, link, _searched(attempt, scale, link))
    landscapes = _descended(scale, attempt.begin)
    return attempt.illustrated(
        judge(races, landscapes, link),
        lambda: (
            loss_picture(races.rounds),
            leaders_picture(races.led),
            well_picture(landscapes.wells),
            completion_picture(landscapes.completions),
        ),
    )


def _settings(scale: Scale, link: str | None, **own: float) -> dict[str, Any]:
    task = "mnist" if os.environ.get("THINWIRE_DATA") else "digits"
    asked = {"task": task, "model": "cnn", "workers": WORKERS, "link": link, "seconds": scale.seconds}
    return {**asked, "batch_size": 16, "eval_limit": 1024, **own}


def _searched(attempt: Attempt, scale: Scale, link: str | None) -> dict[str, dict[float, float]]:
    """By method and learning rate, the loss at the end with the seed of the search."""
    if len(scale.rates) == 1:
        # With nothing to choose, the time is better spent on runs that are judged.
        return {name: {scale.rates[0]: inf} for name in scale.methods}
    tried: dict[str, dict[float, float]] = {name: {} for name in scale.methods}
    for lr in scale.rates:
        done = attempt.compare(
            f"rate-{lr:g}",
            [METHODS[name] for name in scale.methods],
            _settings(scale, link, lr=lr, seed=_SEARCH_SEED),
            title=f"Search: over {link or 'loopback'}, learning rate {lr:g}",
        )
        for name, (curve,) in zip(scale.methods, curves_of(done), strict=True):
            tried[name][lr] = _end(curve)
    return tried


def _raced(attempt: Attempt, scale: Scale, link: str | None, tried: Mapping[str, Mapping[float, float]]) -> Races:
    """Run every method at its own rate, all of them in turn in each round, so that a slow minute meets all."""
    done = attempt.compare(
        "judged",
        [METHODS[name] for name in scale.methods],
        _settings(scale, link),
        rounds=scale.rounds,
        title=f"Leaders over {link or 'loopback'}, each method at its own learning rate",
        rates={METHODS[name]: best(tried[name]) for name in scale.methods},
    )
    rounds = dict(zip(scale.methods, curves_of(done), strict=True))
    led = {
        name: _led(folders)
        for name, folders in zip(scale.methods, done.folders, strict=True)
        if name.startswith(LEADER)
    }
    return Races(tried, rounds, led)


def _led(folders: Sequence[Path]) -> list[int]:
    """How often each worker led all, in all rounds of one method."""
    counts = [0] * WORKERS
    for folder in folders:
        for row in load(folder):
            leader = row.metrics.get("leader")
            if leader is not None:
                counts[round(leader)] += 1
    return counts


def _descended(scale: Scale, begin: Callable[[str], None]) -> Landscapes:
    begin("double wells")
    # A little off the symmetric point, which no descent would leave.
    sides = torch.tensor([[1.05], [-1.0]], dtype=torch.float64)
    wells = {
        name: go_down(double_well, strategy, sides, lr=_LR, steps=_WELL_STEPS) for name, (strategy, _) in _WELLS.items()
    }
    completions: dict[str, list[Descent]] = {_named(kind, pull): [] for pull in _PULLS for kind in ("EASGD", "LSGD")}
    for seed in range(scale.matrices):
        begin(f"matrix {seed}")
        problem = Completion(seed=seed)
        for pull in _PULLS:
            spring = EASGD(period=1, pull=pull, centre_pull=WORKERS * pull)
            for kind, strategy in (("EASGD", spring), ("LSGD", LeaderSGD(period=1, pull=pull))):
                found = go_down(problem.loss(), strategy, problem.starts(WORKERS), lr=1.0, steps=scale.steps)
                completions[_named(kind, pull)].append(found)
    return Landscapes(wells, completions)


def _named(kind: str, pull: float) -> str:
    return f"{kind}, pull {pull:g}"


def best(tried: Mapping[float, float]) -> float:
    """The learning rate with the lowest loss."""
    return min(tried, key=lambda lr: tried[lr])


def _end(curve: Curve) -> float:
    """The loss at the end; infinite where training diverged."""
    return curve.last_loss if isfinite(curve.last_loss) else inf


def trapped(descent: Descent) -> bool:
    """Whether two workers of a double well end on different sides of the hill."""
    first, second = descent.places[-1, :, 0].tolist()
    return first * second < 0


def judge(races: Races, landscapes: Landscapes, link: str | None) -> Result:
    """Whether leaders end lowest, thresholds are where theory has them, and no centre beats a leader at completion."""
    ratios = {part: races.ratios(*pair) for part, pair in _PAIRS.items()}
    parts = {
        **{part: at_most(each, 1.0) for part, each in ratios.items()},
        "double well": judged(_wells(landscapes)),
        **{f"matrix completion, pull {pull:g}": judged(all(_completed(landscapes, pull))) for pull in _PULLS},
    }
    ours = [ratio for part, (method, _) in _PAIRS.items() if method == LEADER for ratio in ratios[part]]
    return Result(
        parts=parts,
        measured="held-out loss after equal time: "
        + ", ".join(f"{name} {fmean(map(_end, each)):.4f}" for name, each in races.rounds.items())
        + "; LSGD's over the other's, round by round: "
        + ", ".join(
            f"{part} {spread(ratios[part]).words('.4f', of='mean')}"
            for part, (method, _) in _PAIRS.items()
            if method == LEADER
        )
        + "; matrix completion: "
        + ", ".join(f"{name} {_mean(each):.2e}" for name, each in landscapes.completions.items()),
        value=fmean(ours),
        least=min(ours),
        most=max(ours),
        details={
            **_of_races(races),
            **{f"double well, {name}": _where(landscapes.wells[name]) for name in _WELLS},
            **{f"matrices on which LSGD ends lower, pull {pull:g}": _share(landscapes, pull) for pull in _PULLS},
            "where it falls short": _shortfalls(parts, ratios),
            "link": link or "none: namespaces are not available here",
        },
    )


def _of_races(races: Races) -> dict[str, str]:
    """What else came of the races: pairs of every round, the choice of rates, time and bytes."""
    edges = [
        f"{name} {best(tried):g}" for name, tried in races.tried.items() if best(tried) in (min(tried), max(tried))
    ]
    only = all(len(tried) == 1 for tried in races.tried.values())
    return {
        **{
            f"loss of {ours} over that of {theirs}, each round": ", ".join(
                f"{ratio:.3f}" for ratio in races.ratios(ours, theirs)
            )
            for ours, theirs in (*_PAIRS.values(), *_TOLD)
        },
        **{
            f"held-out loss, {name}": spread(map(_end, each)).words(".4f", of="mean")
            for name, each in races.rounds.items()
        },
        **{f"learning rate, {name}": _choice(tried) for name, tried in races.tried.items()},
        "learning rates at an edge of those tried": "all: one was tried" if only else ", ".join(edges) or "none",
        **{f"seconds per step, {name}": _pace(curves) for name, curves in races.rounds.items()},
        **{f"bytes per worker and step, {name}": _bytes(curves) for name, curves in races.rounds.items()},
        **{f"elections won, {name}": ", ".join(map(str, counts)) for name, counts in races.led.items()},
    }


def _choice(tried: Mapping[float, float]) -> str:
    """The learning rate, and what it was chosen from."""
    if len(tried) == 1:
        return f"{best(tried):g}, not chosen"
    return f"{best(tried):g} (in the search {', '.join(f'{lr:g}: {loss:.4f}' for lr, loss in tried.items())})"


def _wells(landscapes: Landscapes) -> bool:
    """Whether workers of a double well are held where theory has them, and the leader never."""
    as_told = all(trapped(landscapes.wells[name]) == held for name, (_, held) in _WELLS.items())
    hill = float(landscapes.wells["EASGD, spring 0.6"].shipped[-1])
    leader = max(float(landscapes.wells[name].shipped[-1]) for name in _WELLS if name.startswith("LGD"))
    return as_told and abs(hill - _HILL) < 1e-3 and leader < 1e-9


def _completed(landscapes: Landscapes, pull: float) -> list[bool]:
    """Of every matrix, whether LSGD ends lower than EASGD's centre."""
    kinds = (landscapes.completions[_named(kind, pull)] for kind in ("EASGD", "LSGD"))
    return [float(ours.shipped[-1]) < float(theirs.shipped[-1]) for theirs, ours in zip(*kinds, strict=True)]


def _share(landscapes: Landscapes, pull: float) -> str:
    lower = _completed(landscapes, pull)
    return f"{sum(lower)} of {len(lower)}"


def _shortfalls(parts: Mapping[str, Outcome], ratios: Mapping[str, Sequence[float]]) -> str:
    higher = {part: sum(not ratio <= 1 for ratio in each) for part, each in ratios.items()}
    lost = [
        f"{part}: higher in {higher[part]} of {len(ratios[part])} rounds" if part in ratios else part
        for part, outcome in parts.items()
        if outcome is not Outcome.HOLDS
    ]
    return "; ".join(lost) or "nowhere"


def _mean(descents: Sequence[Descent]) -> float:
    return fmean(float(each.shipped[-1]) for each in descents)


def _pace(curves: Sequence[Curve]) -> str:
    return f"{fmean(curve.seconds_per_step for curve in curves):.4f}"


def _bytes(curves: Sequence[Curve]) -> str:
    return f"{fmean(curve.bytes_per_step for curve in curves):,.0f}"


def _where(descent: Descent) -> str:
    places = ", ".join(f"{place:+.4f}" for place in descent.places[-1, :, 0].tolist())
    return f"workers end at {places}, the shipped loss is {float(descent.shipped[-1]):.4f}"


CLAIM = Claim.read(__file__, measure, globals())
