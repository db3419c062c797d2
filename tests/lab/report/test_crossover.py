# SPDX-License-Identifier: Apache-2.0
"""The picture of step times by link rate, latency and number of workers: all of its words can be read."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from thinwire.lab.report import crossover
from thinwire.lab.report.crossover import Sweep, draw_crossovers
from thinwire.planning.plan.sweeps import LATENCIES, RATES, WORKERS

RECIPES = ("AllReduce()", "SlowMo(period=16)", "LocalSGD(period=32)", "LocalSGD(period=8, codec=Quantize(4))")


@pytest.mark.slow
def test_no_word_lies_upon_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    canvas = crossover.canvas

    def kept(width: float, height: float) -> Figure:
        drawn.append(canvas(width, height))
        return drawn[0]

    monkeypatch.setattr(crossover, "canvas", kept)
    swept = ("link", "rate", RATES), ("latency", "seconds", LATENCIES), ("workers", "count", WORKERS)
    sweeps = [Sweep(name, unit, values, times(values), values[1]) for name, unit, values in swept]
    draw_crossovers(tmp_path / "it.png", sweeps, "predicted; 0.509 M parameters, 4 workers, 100 Mbit/s")
    # Saved in another resolution, in which positions were left.
    drawn[0].canvas.draw()
    found = list(words(drawn[0]))
    assert len(found) > 15
    for one, other in combinations(found, 2):
        assert not one.get_window_extent().overlaps(other.get_window_extent()), f"{one} lies upon {other}"


def times(values: Sequence[float]) -> dict[str, list[float]]:
    return {each: [0.1 * (1 + place * value / values[-1]) for value in values] for place, each in enumerate(RECIPES)}


def words(figure: Figure) -> Iterator[Text]:
    """The legend's, with its title, and the labels of all axes and of the ticks in view."""
    (legend,) = figure.legends
    yield from legend.get_texts()
    if legend.get_title().get_text():
        yield legend.get_title()
    if figure.get_suptitle():
        yield from (each for each in figure.texts if each.get_text() == figure.get_suptitle())
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            least, most = sorted(axis.get_view_interval())
            labels = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
            yield from (label for place, label in labels if least <= place <= most)
            yield axis.label
