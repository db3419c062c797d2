# SPDX-License-Identifier: Apache-2.0
"""The decentralised methods drawn: bias against learning rate and momentum, accuracy against the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from reproductions.shared.charts import Panel, lines

if TYPE_CHECKING:
    from thinwire.lab.report.picture import Picture

_REFERENCE = "PmSGD"
_ROUNDING = 1e-15


def bias_picture(biases: Mapping[tuple[str, float, float], float], momentum: float) -> Picture:
    """Squared bias against the learning rate at one momentum, and against the momentum at one learning rate.

    Methods whose bias is rounding alone are left out.

    Args:
        biases: by method, momentum and learning rate; DSGD has the momentum 0.
        momentum: of the first half.
    """
    names = [name for name in dict.fromkeys(name for name, _, _ in biases) if _most(biases, name) > _ROUNDING]
    rates, momenta = sorted({rate for _, _, rate in biases}), sorted({b for _, b, _ in biases})

    def bias(name: str, b: float, rate: float) -> float:
        return biases[name, 0.0 if name == "DSGD" else b, rate]

    by_rate = {name: [{rate: bias(name, momentum, rate) for rate in rates}] for name in names}
    by_momentum = {name: [{b: bias(name, b, rates[0]) for b in momenta if name == "DSGD" or b > 0}] for name in names}
    return lines(
        "bias",
        [
            Panel("", by_rate, f"learning rate, at momentum {momentum:g}", "squared bias", "xy", rates),
            Panel("", by_momentum, f"momentum, at learning rate {rates[0]:g}", log="y"),
        ],
        title="Bias at rest",
        caption="Methods without bias are not drawn; QG-DmSGD and DecentLaM lie on DSGD, which has no momentum.",
        shared=True,
        reference=_REFERENCE,
    )


def accuracy_picture(accuracies: Mapping[tuple[str, int], Sequence[float]]) -> Picture:
    """Error against the examples of a step, the mean over seeds between the least and the greatest."""
    names = list(dict.fromkeys(name for name, _ in accuracies))
    totals = sorted({total for _, total in accuracies})
    # Side by side, so that the strokes of several methods can be told apart.
    wrong = {
        name: [
            {
                total * 1.03 ** (place - len(names) / 2): [100 * (1 - each) for each in accuracies[name, total]]
                for total in totals
            }
        ]
        for place, name in enumerate(names)
    }
    return lines(
        "accuracy",
        [Panel("", wrong, "examples a step, all workers together", "wrong answers, percent", "xy", totals)],
        title="Accuracy as the batch grows",
        caption="The same number of examples each; strokes reach from the worst seed to the best.",
        reference=_REFERENCE,
    )


def _most(biases: Mapping[tuple[str, float, float], float], name: str) -> float:
    return max(bias for (each, _, _), bias in biases.items() if each == name)
