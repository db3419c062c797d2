# SPDX-License-Identifier: Apache-2.0
"""DecentLaM takes the momentum's part out of the bias, and keeps its accuracy as the batch grows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from math import sqrt
from statistics import fmean, stdev
from typing import Any

import numpy as np

from reproductions.decentlam.least_squares import drawn, trained
from reproductions.decentlam.methods import METHODS, Method
from reproductions.shared.claims import Attempt, Claim, Result, judged
from reproductions.shared.threads import Schedule, train_on_threads
from thinwire.tasks import load
from thinwire.topology.graphs import Ring

WORKERS = 8
MOMENTUM = 0.9
EXACT = 1e-9
_TASK, _SPLIT = "digits", "dirichlet(0.1)"
_LR_PER_EXAMPLE = 0.01 / 64
_EXAMPLES = 40 * 1438

_SETTING = (
    f"{WORKERS} workers on a ring; accuracy: {_TASK}, {_SPLIT} split, momentum {MOMENTUM:g}, the same {_EXAMPLES:,} "
    "examples whatever the batch, learning rate 0.01 at 64 examples a step and in proportion, warmed up over a tenth "
    "of the steps; DSGD and EDM, whose steps momentum does not lengthen, have ten times that"
)

# By (method, momentum, learning rate): the squared bias, and the largest distance from the closed form.
Biases = dict[tuple[str, float, float], tuple[float, float]]
# By (method, examples a step): the accuracy of the consensus, with each seed.
Accuracies = dict[tuple[str, int], list[float]]
Begin = Callable[[str], None]


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Args:
        rates: learning rates on least squares.
        momenta: on least squares.
        batches: examples a step and worker on the task.
        seeds: on the task.
    """

    rates: tuple[float, ...] = (0.0125, 0.025, 0.05, 0.1)
    momenta: tuple[float, ...] = (0.5, 0.8, 0.9, 0.95)
    batches: tuple[int, ...] = (8, 32, 128)
    seeds: int = 5


QUICK = Scale(rates=(0.05, 0.1), momenta=(MOMENTUM,), batches=(32, 128), seeds=2)


def measure(attempt: Attempt) -> Result:
    """Train on least squares and on a task, judge, and draw both."""
    scale, places = QUICK if attempt.quick else Scale(), count()

    def begin(words: str) -> None:
        attempt.begin(words, next(places))

    biases = measured_biases(scale, begin)
    accuracies = measured_accuracies(scale, begin)
    return judge(biases, accuracies, _drawn(attempt, biases, accuracies))


def measured_biases(scale: Scale, begin: Begin) -> Biases:
    """Every method's squared bias on least squares, at rest, beside its closed form."""
    problem, graph, found = drawn(WORKERS), Ring(), Biases()
    for method in METHODS:
        for momentum in scale.momenta if method.name != "DSGD" else (0.0,):
            begin(f"{method.name}, momentum {momentum:g}, on least squares")
            recipe, own = method.recipe(graph, momentum), method.own_momentum(momentum)
            rows, _ = trained(problem, recipe, scale.rates, momentum=own)
            for rate, real in zip(scale.rates, rows, strict=True):
                off = float(np.abs(real - method.rest(problem, graph, rate, momentum)).max())
                found[method.name, momentum, rate] = (problem.bias(real), off)
    return found


def measured_accuracies(scale: Scale, begin: Begin) -> Accuracies:
    """Every method's accuracy on the task after the same number of examples, as the batch grows."""
    found = Accuracies()
    for batch in scale.batches:
        for method in METHODS:
            begin(f"{method.name}, {batch * WORKERS} examples a step, on {_TASK}")
            found[method.name, batch * WORKERS] = [_accuracy(method, batch, seed) for seed in range(scale.seeds)]
    return found


def _accuracy(method: Method, batch: int, seed: int) -> float:
    total = batch * WORKERS
    pace = 1 / (1 - MOMENTUM) if method.slow else 1.0
    schedule = Schedule(
        steps=round(_EXAMPLES / total),
        batch_size=batch,
        lr=pace * _LR_PER_EXAMPLE * total,
        momentum=method.own_momentum(MOMENTUM),
    )
    recipe = method.recipe(Ring(), MOMENTUM)
    return train_on_threads(load(_TASK), recipe, schedule, workers=WORKERS, split=_SPLIT, seed=seed).metric


def judge(biases: Biases, accuracies: Accuracies, pictures: list[str]) -> Result:
    """Whether the biases are those of the equations, and DecentLaM the better one where the batch is largest."""
    off = max(distance for _, distance in biases.values())
    least_rate = min(rate for _, _, rate in biases)
    ratio = biases["DmSGD", MOMENTUM, least_rate][0] / biases["DecentLaM", MOMENTUM, least_rate][0]
    most = max(total for _, total in accuracies)
    gains = _gains(accuracies, "DmSGD", most)
    error = stdev(gains) / sqrt(len(gains))
    return Result(
        parts={
            "points of rest": judged(off < EXACT),
            "bias": judged(ratio > 1),
            "accuracy": judged(fmean(gains) > error),
        },
        measured=f"at {most} examples a step DecentLaM's accuracy less DmSGD's is {fmean(gains):+.2f} points "
        f"(standard error {error:.2f}); DmSGD's squared bias is {ratio:.1f} times DecentLaM's at the learning rate "
        f"{least_rate:g}; points of rest are off by {off:.1e}",
        value=fmean(gains),
        least=min(gains),
        most=max(gains),
        details={
            "setting": _SETTING,
            "seeds": len(gains),
            **_accuracy_rows(accuracies),
            f"more accurate than DecentLaM at {most} examples a step": ", ".join(_better(accuracies, most)) or "none",
            **_bias_rows(biases),
            "pictures": " ".join(f"![{name}]({name})" for name in pictures) or "none",
        },
    )


def _gains(accuracies: Accuracies, other: str, total: int) -> list[float]:
    """DecentLaM's accuracy less another's, in percentage points, for each seed."""
    pairs = zip(accuracies["DecentLaM", total], accuracies[other, total], strict=True)
    return [100 * (ours - theirs) for ours, theirs in pairs]


def _better(accuracies: Accuracies, total: int) -> list[str]:
    """The methods whose mean accuracy is above DecentLaM's."""
    return [method.name for method in METHODS if fmean(_gains(accuracies, method.name, total)) < 0]


def _accuracy_rows(accuracies: Accuracies) -> dict[str, Any]:
    """Mean and range in percent, best first, for each size of the batch."""
    rows: dict[str, Any] = {}
    for total in sorted({total for _, total in accuracies}):
        found = {name: values for (name, each), values in accuracies.items() if each == total}
        for name in sorted(found, key=lambda name: -fmean(found[name])):
            low, mean, high = (100 * of(found[name]) for of in (min, fmean, max))
            rows[f"accuracy at {total} examples a step: {name}"] = f"{mean:.2f} % ({low:.2f} to {high:.2f})"
    return rows


def _bias_rows(biases: Biases) -> dict[str, Any]:
    """The squared bias against the learning rate, for each method and momentum."""
    rows: dict[str, dict[str, str]] = {}
    for (name, momentum, rate), (bias, _) in biases.items():
        row = rows.setdefault(f"squared bias, momentum {momentum:g}: {name}", {})
        row[f"{rate:g}"] = f"{bias:.3g}"
    return {key: ", ".join(f"{bias} at {rate}" for rate, bias in row.items()) for key, row in rows.items()}


def _drawn(attempt: Attempt, biases: Biases, accuracies: Accuracies) -> list[str]:
    """The names of the pictures; none where matplotlib is not installed."""
    try:
        from reproductions.decentlam.pictures import accuracy_picture, bias_picture
    except ModuleNotFoundError:
        return []
    plain = {key: bias for key, (bias, _) in biases.items()}
    pictures = (bias_picture(plain, MOMENTUM), accuracy_picture(accuracies))
    return [picture.png(attempt.folder).name for picture in pictures]


CLAIM = Claim(
    name="decentlam",
    sentence="Momentum amplifies the bias of decentralised SGD on heterogeneous data, the more visibly the larger the "
    "batch; DecentLaM removes the momentum's part of it and stays accurate where DmSGD does not.",
    paper="Yuan et al., DecentLaM: Decentralized Momentum SGD for Large-batch Deep Training, ICCV 2021, "
    "arXiv:2104.11981",
    published="in words: momentum amplifies DmSGD's inconsistency bias, which becomes more evident as the batch grows, "
    "and DecentLaM removes what momentum adds (the paper's accuracies are for ImageNet, and not comparable)",
    protocol="least squares of 8 workers on a ring, at rest; digits split by a Dirichlet distribution (0.1), equal "
    "numbers of examples at three sizes of the batch (quick: two), 5 seeds (quick: 2), learning rates in proportion to "
    "the batch",
    parts={
        "points of rest": f"all within {EXACT:g} of their equations",
        "bias": "DmSGD's squared bias is above DecentLaM's",
        "accuracy": "at the largest batch DecentLaM is more accurate than DmSGD by more than the standard error of the "
        "paired difference",
    },
    costs="where data are alike there is no bias to remove, and DmSGD does as well",
    minutes=(12, 2),
    run=measure,
)
