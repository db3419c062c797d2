# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML file, without scripts and without links to other files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thinwire.lab.report.bars import time_picture
from thinwire.lab.report.curves import loss_pictures, metric_pictures
from thinwire.lab.report.document import render
from thinwire.lab.report.files import write_text
from thinwire.lab.report.folder import read
from thinwire.lab.report.graph import topology_pictures
from thinwire.lab.report.headline import details, lead, paper_of, setting, tiles
from thinwire.lab.report.palette import Look, looks
from thinwire.lab.report.picture import Picture, narrow
from thinwire.lab.report.runs import Collection
from thinwire.lab.report.table import baseline, cells, columns
from thinwire.lab.report.timeline import timeline_pictures
from thinwire.lab.report.tradeoff import figure_pictures, pareto_picture


@dataclass(frozen=True)
class Written:
    """The paths of a report's files: the page and its plots."""

    report: Path
    plots: tuple[Path, ...]


@dataclass(frozen=True)
class Drawings:
    """The pictures of a report; those that the runs have no data for are None or missing."""

    losses: Sequence[Picture]
    trade: Sequence[Picture]
    topologies: Sequence[Picture]
    metrics: Sequence[Picture]
    times: Picture | None
    timelines: dict[int, Picture]

    def all(self) -> list[Picture]:
        """Return the pictures in the page's order."""
        times = [] if self.times is None else [self.times]
        return [*self.losses, *self.trade, *self.metrics, *times, *self.topologies, *self.timelines.values()]


def write(folder: Path) -> Written:
    """Write `report.html` and `plots/*.png` into a run folder or a comparison folder.

    Raises:
        ConfigError: there is no such folder, it holds no run, or it cannot be written to.
    """
    collection = read(folder)
    styles = looks([run.strategy for run in collection.runs])
    drawings = draw(collection, styles)
    plots = tuple(picture.png(folder / "plots") for picture in drawings.all())
    with narrow():
        small = draw(collection, styles)
    return Written(write_text(folder / "report.html", page(collection, styles, drawings, small)), plots)


def draw(collection: Collection, styles: Sequence[Look]) -> Drawings:
    """Draw every picture that the runs have data for."""
    return Drawings(
        losses=loss_pictures(collection, styles),
        trade=[each for each in (pareto_picture(collection, styles),) if each] + figure_pictures(collection, styles),
        topologies=topology_pictures(collection),
        metrics=metric_pictures(collection, styles),
        times=time_picture(collection, styles),
        timelines=timeline_pictures(collection, styles),
    )


def page(collection: Collection, styles: Sequence[Look], drawings: Drawings, small: Drawings | None = None) -> str:
    """Return the whole HTML document.

    Args:
        collection: the runs.
        styles: a look for each.
        drawings: the pictures for wide screens and for paper.
        small: the same for narrow screens; None shows the wide ones there too.
    """
    summaries = collection.summaries
    base = baseline(summaries)
    shared, owns = details(collection)
    several = len(collection.runs) > 1
    notes = [f"{run.label}: {note}" if several else note for run in collection.runs for note in run.notes]
    return render(
        "report.html",
        collection.title,
        "thinwire report",
        collection=collection,
        runs=list(zip(collection.runs, styles, strict=True)),
        drawings=drawings,
        narrow={} if small is None else {each.name.removesuffix("-narrow"): each for each in small.all()},
        base=base,
        columns=columns(summaries),
        cells=cells(summaries, base),
        seeds=next((len(run.rounds) for run in collection.runs if len(run.rounds) > 1), 0),
        setting=setting(collection),
        lead=lead(collection),
        tiles=tiles(collection, styles),
        notes=[*collection.notes, *notes],
        configured=any(run.config for run in collection.runs),
        shared=shared,
        owns=owns,
        paper_of=paper_of,
    )
