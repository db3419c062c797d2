# SPDX-License-Identifier: Apache-2.0
"""DecentLaM takes the momentum's part out of the bias, and keeps its accuracy as the batch grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from reproductions.decentlam.least_squares import drawn, trained
from reproductions.decentlam.methods import METHODS, Method
from reproductions.decentlam.pictures import accuracy_picture, bias_picture
from reproductions.shared.claims import Attempt, Claim, Outcome, Result, judged
from reproductions.shared.curves import Choice
from reproductions.shared.threads import Schedule, train_on_threads
from thinwire import Ring
from thinwire.lab.report.statistics import spread
from thinwire.lab.tasks import Evaluation, load

WORKERS = 8
MOMENTUM = 0.9
EXACT, CLOSE = 1e-9, 0.01
ERRORS = 2
_TASK, _SPLIT = "digits", "dirichlet(0.1)"
_LR_PER_EXAMPLE = 0.01 / 64
_EXAMPLES = 40 * 1438

_SETTING = (
    f"{WORKERS} workers on a ring; accuracy: {_TASK}, {_SPLIT} split, momentum {MOMENTUM:g}, the same {_EXAMPLES:,} "
    "examples whatever the batch, learning rates warmed up over a tenth of the steps; the grid is that of 0.01 at 64 "
    "examples a step and in proportion, times each factor; for DSGD and EDM, whose steps momentum does not lengthen, "
    "each rate of the grid is divided by 1 - momentum, so that all methods are tried with the same lengths of steps"
)

# By (method, momentum, learning rate).
Biases = dict[tuple[str, float, float], "AtRest"]
# By (method, examples a step): the accuracy of the consensus, with each seed.
Accuracies = dict[tuple[str, int], list[float]]
# By (method, examples a step): which factor of the grid it got.
Choices = dict[tuple[str, int], Choice]
Begin = Callable[[str], None]


@dataclass(frozen=True)
class AtRest:
    """Where a method came to rest on least squares.

    Args:
        bias: its squared bias.
        off: the largest distance of a worker's unknowns from the closed form.
        predicted: the squared bias of the closed form.
    """

    bias: float
    off: float
    predicted: float


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Args:
        rates: learning rates on least squares.
        momenta: on least squares.
        batches: examples a step and worker on the task.
        factors: of the learning rate in proportion to the batch, tried for every method and batch on the task.
        trial_seed: with which they are tried, none of those that are judged.
        seeds: on the task.
        left_out: methods that are not measured.
    """

    rates: tuple[float, ...] = (0.0125, 0.025, 0.05, 0.1)
    momenta: tuple[float, ...] = (0.5, 0.8, 0.9, 0.95)
    batches: tuple[int, ...] = (8, 32, 128)
    factors: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    trial_seed: int = 1000
    seeds: int = 6
    left_out: tuple[str, ...] = ()


QUICK = Scale(
    rates=(0.05, 0.1),
    momenta=(0.5, MOMENTUM),
    batches=(32, 128),
    factors=(0.25, 0.5, 1.0),
    seeds=3,
    left_out=("AWC-DmSGD", "DA-DmSGD", "QG-DmSGD", "EDM"),
)


def measure(attempt: Attempt) -> Result:
    """Train on least squares and on a task, judge, and draw both."""
    scale = QUICK if attempt.quick else Scale()
    biases = measured_biases(scale, attempt.begin)
    choices, accuracies = measured_accuracies(scale, attempt.begin)
    result = judge(biases, choices, accuracies)
    real = {key: rest.bias for key, rest in biases.items()}
    return attempt.illustrated(result, lambda: (bias_picture(real, MOMENTUM), accuracy_picture(accuracies)))


def _methods(scale: Scale) -> list[Method]:
    return [method for method in METHODS if method.name not in scale.left_out]


def measured_biases(scale: Scale, begin: Begin) -> Biases:
    """Every method's squared bias on least squares, at rest, beside its closed form."""
    problem, graph, found = drawn(WORKERS), Ring(), Biases()
    for method in _methods(scale):
        for momentum in scale.momenta if method.name != "DSGD" else (0.0,):
            begin(f"{method.name}, momentum {momentum:g}, on least squares")
            recipe, own = method.recipe(graph, momentum), method.own_momentum(momentum)
            rows, _ = trained(problem, recipe, scale.rates, momentum=own)
            for rate, real in zip(scale.rates, rows, strict=True):
                told = method.rest(problem, graph, rate, momentum)
                off = float(np.abs(real - told).max())
                found[method.name, momentum, rate] = AtRest(problem.bias(real), off, problem.bias(told))
    return found


def measured_accuracies(scale: Scale, begin: Begin) -> tuple[Choices, Accuracies]:
    """Every method's accuracy on the task after the same number of examples, as the batch grows.

    Each is at the rate that had the lowest held-out loss at this size of the batch with another seed.
    """
    choices, found = Choices(), Accuracies()
    for batch in scale.batches:
        for method in _methods(scale):
            key = (method.name, batch * WORKERS)
            begin(f"{method.name}, {batch * WORKERS} examples a step, on {_TASK}")
            choices[key] = Choice(
                {factor: _ended(method, batch, factor, scale.trial_seed).loss for factor in scale.factors}
            )
            found[key] = [_ended(method, batch, choices[key].rate, seed).metric for seed in range(scale.seeds)]
    return choices, found


def _ended(method: Method, batch: int, factor: float, seed: int) -> Evaluation:
    total = batch * WORKERS
    pace = 1 / (1 - MOMENTUM) if method.slow else 1.0
    schedule = Schedule(
        steps=round(_EXAMPLES / total),
        batch_size=batch,
        lr=pace * factor * _LR_PER_EXAMPLE * total,
        momentum=method.own_momentum(MOMENTUM),
    )
    recipe = method.recipe(Ring(), MOMENTUM)
    return train_on_threads(load(_TASK), recipe, schedule, workers=WORKERS, split=_SPLIT, seed=seed)


def judge(biases: Biases, choices: Choices, accuracies: Accuracies) -> Result:
    """Whether training rests where the equations say, and DecentLaM is the better one the larger the batch."""
    off = max(rest.off for rest in biases.values())
    ratios = _ratios(biases)
    fewest, most = (of(total for _, total in accuracies) for of in (min, max))
    gains = _gains(accuracies, "DmSGD", most)
    growth = [large - small for large, small in zip(gains, _gains(accuracies, "DmSGD", fewest), strict=True)]
    return Result(
        parts={
            "points of rest": judged(off < EXACT),
            "bias": _amplified(biases, ratios),
            "accuracy": _above_zero(gains),
            "growing with the batch": _above_zero(growth),
        },
        measured=f"DecentLaM's accuracy less DmSGD's, each at its best rate: {_with_error(gains)} at {most} examples a "
        f"step, by {_with_error(growth)} more than at {fewest}; DmSGD's squared bias is "
        f"{min(each for each, _ in ratios.values()):.1f} to {max(each for each, _ in ratios.values()):.1f} times "
        f"DecentLaM's; points of rest are off by {off:.1e}",
        value=fmean(gains),
        least=min(gains),
        most=max(gains),
        details={
            "setting": _SETTING,
            "seeds": len(gains),
            **{
                f"factor of the learning rate at {total} examples a step: {name}": str(choice)
                for (name, total), choice in choices.items()
            },
            **_accuracy_rows(accuracies),
            f"more accurate than DecentLaM at {most} examples a step": ", ".join(_better(accuracies, most)) or "none",
            **{
                f"DmSGD's squared bias over DecentLaM's, momentum {momentum:g}, rate {rate:g}": f"{real:.4g}, and "
                f"{told:.4g} by the equations"
                for (momentum, rate), (real, told) in ratios.items()
            },
            **_bias_rows(biases),
        },
    )


def _ratios(biases: Biases) -> dict[tuple[float, float], tuple[float, float]]:
    """By momentum and learning rate: DmSGD's squared bias over DecentLaM's, after training and by the equations."""
    found: dict[tuple[float, float], tuple[float, float]] = {}
    for (name, momentum, rate), rest in biases.items():
        if name == "DmSGD":
            other = biases["DecentLaM", momentum, rate]
            found[momentum, rate] = (rest.bias / other.bias, rest.predicted / other.predicted)
    return found


def _amplified(biases: Biases, ratios: Mapping[tuple[float, float], tuple[float, float]]) -> Outcome:
    """Whether momentum adds to DmSGD's bias what the equations say, and nothing to DecentLaM's, at each trial."""
    as_told = all(real > 1 and abs(real / told - 1) <= CLOSE for real, told in ratios.values())
    without = all(
        abs(biases["DecentLaM", momentum, rate].bias / biases["DSGD", 0.0, rate].bias - 1) <= CLOSE
        for momentum, rate in ratios
    )
    return judged(as_told and without)


def _with_error(figures: Sequence[float]) -> str:
    return f"{spread(figures).mean:+.2f} points (standard error {spread(figures).error:.2f})"


def _above_zero(figures: Sequence[float]) -> Outcome:
    """Whether the mean of differences paired by seed is above 0 by more than its errors can explain."""
    found = spread(figures)
    if found.mean <= 0:
        return Outcome.FAILS
    return Outcome.HOLDS if found.mean > ERRORS * found.error else Outcome.NOISE


def _gains(accuracies: Accuracies, other: str, total: int) -> list[float]:
    """DecentLaM's accuracy less another's, in percentage points, for each seed."""
    pairs = zip(accuracies["DecentLaM", total], accuracies[other, total], strict=True)
    return [100 * (ours - theirs) for ours, theirs in pairs]


def _better(accuracies: Accuracies, total: int) -> list[str]:
    """The methods whose mean accuracy is above DecentLaM's."""
    return [name for name, each in accuracies if each == total and fmean(_gains(accuracies, name, total)) < 0]


def _accuracy_rows(accuracies: Accuracies) -> dict[str, Any]:
    """Mean and range in percent, best first, for each size of the batch."""
    rows: dict[str, Any] = {}
    for total in sorted({total for _, total in accuracies}):
        found = {name: values for (name, each), values in accuracies.items() if each == total}
        for name in sorted(found, key=lambda name: -fmean(found[name])):
            words = spread(found[name]).words(".2f", of="mean", scale=100, unit=" %")
            rows[f"accuracy at {total} examples a step: {name}"] = words
    return rows


def _bias_rows(biases: Biases) -> dict[str, Any]:
    """The squared bias against the learning rate, for each method and momentum."""
    rows: dict[str, dict[str, str]] = {}
    for (name, momentum, rate), rest in biases.items():
        row = rows.setdefault(f"squared bias, momentum {momentum:g}: {name}", {})
        row[f"{rate:g}"] = f"{rest.bias:.3g}"
    return {key: ", ".join(f"{bias} at {rate}" for rate, bias in row.items()) for key, row in rows.items()}


CLAIM = Claim.read(__file__, measure, globals())
