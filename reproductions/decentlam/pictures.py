# SPDX-License-Identifier: Apache-2.0
"""The decentralised methods drawn: bias against learning rate and momentum, accuracy against the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from reproductions.decentlam.methods import METHODS
from thinwire.lab.report.palette import Look, looks
from thinwire.lab.report.picture import Picture, canvas, key, legend, line, log_axis, plain

_NAMES = [method.name for method in METHODS]
_REFERENCE = "PmSGD"
_LOOKS = dict(zip(_NAMES, looks(["ddp" if name == _REFERENCE else name for name in _NAMES]), strict=True))
_ROUNDING = 1e-15


def bias_picture(biases: Mapping[tuple[str, float, float], float], momentum: float) -> Picture:
    """Squared bias against the learning rate at one momentum, and against the momentum at one learning rate.

    Methods whose bias is rounding alone are left out.

    Args:
        biases: by method, momentum and learning rate; DSGD has the momentum 0.
        momentum: of the first half.
    """
    figure = canvas(10.8, 4.2)
    left, right = figure.subplots(1, 2, sharey=True)
    rates = sorted({rate for _, _, rate in biases})
    shown = {name: look for name, look in _LOOKS.items() if _most(biases, name) > _ROUNDING}
    momenta = sorted({b for _, b, _ in biases})
    for name, look in shown.items():
        still = name == "DSGD"
        _line(left, look, {rate: biases[name, 0.0 if still else momentum, rate] for rate in rates})
        by_momentum = {b: biases[name, 0.0 if still else b, rates[0]] for b in momenta if still or b > 0}
        _line(right, look, by_momentum)
    log_axis(left, rates)
    left.set_yscale("log")
    plain(left, x=f"learning rate, at momentum {momentum:g}", y="squared bias")
    plain(right, x=f"momentum, at learning rate {rates[0]:g}")
    legend(figure, [key(look) for look in shown.values()], list(shown))
    return Picture(
        "bias",
        figure,
        "Bias at rest",
        "Methods without bias are not drawn; QG-DmSGD and DecentLaM lie on DSGD, which has no momentum.",
        f"Two plots of squared bias on least squares for {len(shown)} methods, by learning rate and by momentum.",
    )


def accuracy_picture(accuracies: Mapping[tuple[str, int], Sequence[float]]) -> Picture:
    """Error against the examples of a step, the mean over seeds between the least and the greatest."""
    figure = canvas(7.2, 4.4)
    axes = figure.subplots()
    totals = sorted({total for _, total in accuracies})
    shown = {name: look for name, look in _LOOKS.items() if (name, totals[0]) in accuracies}
    for place, (name, look) in enumerate(shown.items()):
        found = [[100 * (1 - value) for value in accuracies[name, total]] for total in totals]
        shifted = [total * 1.03 ** (place - len(_LOOKS) / 2) for total in totals]
        axes.vlines(shifted, [min(each) for each in found], [max(each) for each in found], color=look.tone.light, lw=1)
        _line(axes, look, dict(zip(shifted, (fmean(each) for each in found), strict=True)))
    log_axis(axes, totals)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:g}"[0] in "25" else ""))
    plain(axes, x="examples a step, all workers together", y="wrong answers, percent")
    legend(figure, [key(look) for look in shown.values()], list(shown))
    return Picture(
        "accuracy",
        figure,
        "Accuracy as the batch grows",
        "The same number of examples each; bars reach from the worst seed to the best.",
        f"Wrong answers of {len(shown)} methods against the size of the batch, with the range over seeds.",
    )


def _most(biases: Mapping[tuple[str, float, float], float], name: str) -> float:
    return max((bias for (each, _, _), bias in biases.items() if each == name), default=0.0)


def _line(axes: Axes, look: Look, values: Mapping[float, float]) -> None:
    line(axes, look, list(values), list(values.values()), size=5)
