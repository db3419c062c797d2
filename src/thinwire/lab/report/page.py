# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML file, without scripts and without links to other files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from thinwire.lab.report.bars import time_picture
from thinwire.lab.report.curves import loss_pictures, metric_pictures
from thinwire.lab.report.details import details
from thinwire.lab.report.document import card, document, figure
from thinwire.lab.report.files import write_text
from thinwire.lab.report.folder import read
from thinwire.lab.report.graph import topology_pictures
from thinwire.lab.report.headline import lead, setting, summary_table, tiles
from thinwire.lab.report.links import link_picture
from thinwire.lab.report.palette import Look, looks
from thinwire.lab.report.picture import Picture, narrow
from thinwire.lab.report.runs import Collection
from thinwire.lab.report.timeline import timeline_pictures
from thinwire.lab.report.tradeoff import figure_pictures, pareto_picture
from thinwire.lab.report.views import views

Shown = Callable[..., str]
"""Makes HTML of a picture, with the options of `figure`."""
_WIDE = 8.0


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
    links: Picture | None

    def all(self) -> list[Picture]:
        """The pictures in the page's order."""
        single = [picture for picture in (self.times, self.links) if picture is not None]
        return [*self.losses, *self.trade, *self.metrics, *single, *self.topologies, *self.timelines.values()]


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
        links=link_picture(collection, styles),
    )


def page(collection: Collection, styles: Sequence[Look], drawings: Drawings, small: Drawings | None = None) -> str:
    """The whole HTML document.

    Args:
        collection: the runs.
        styles: a look for each.
        drawings: the pictures for wide screens and for paper.
        small: the same for narrow screens; None shows the wide ones there too.
    """
    narrow_ones = {} if small is None else {each.name.removesuffix("-narrow"): each for each in small.all()}

    def shown(picture: Picture, *, titled: bool = False, captioned: bool = True) -> str:
        return figure(picture, narrow_ones.get(picture.name), titled=titled, captioned=captioned)

    untimed = _empty("No step was timed, so its time cannot be split.")
    parts = [
        ("summary", "Summary", summary_table(collection, styles)),
        ("trade", "What it costs", _in_pairs(drawings.trade, shown)),
        ("loss", "Loss", _losses([*drawings.losses, *drawings.metrics], shown)),
        ("time", "Time per step", untimed if drawings.times is None else shown(drawings.times)),
        ("timeline", "Timeline", _timelines(collection, drawings.timelines, shown)),
        ("links", "Links", _links(collection, drawings.links, shown)),
        ("views", "Who came and went", views(collection)),
        ("topology", "Who sends to whom", "".join(shown(each, titled=True) for each in drawings.topologies)),
        ("details", "How it was run", details(collection, styles)),
    ]
    # A single run has no trade-off, and most strategies have no graph.
    parts = [(anchor, words, body) for anchor, words, body in parts if body]
    links = "".join(f'<a href="#{anchor}">{words}</a>' for anchor, words, _ in parts)
    sections = "".join(card(words, body, anchor) for anchor, words, body in parts)
    return document(
        collection.title,
        "thinwire report",
        f"{_notes(collection)}\n{tiles(collection, styles)}\n{sections}",
        below=f'{setting(collection)}\n{lead(collection)}\n<nav aria-label="Sections">{links}</nav>',
        foot="<footer><p>Made by <code>thinwire report</code>. The drawings are also in the folder <code>plots</code>; "
        "the numbers are in each run's <code>summary.json</code> and <code>metrics.jsonl</code>.</p></footer>",
    )


def _in_pairs(pictures: Sequence[Picture], shown: Shown) -> str:
    """The wide pictures in full width, then the others in pairs."""
    wide = [picture for picture in pictures if picture.figure.get_figwidth() > _WIDE]
    rest = [picture for picture in pictures if picture not in wide]
    pairs = f'<div class="pair">{"".join(shown(each, titled=True) for each in rest)}</div>' if rest else ""
    return "".join(shown(each, titled=True) for each in wide) + pairs


def _losses(pictures: Sequence[Picture], shown: Shown) -> str:
    if not pictures:
        return _empty("No loss was recorded: metrics.jsonl is missing or holds no training step.")
    return _in_pairs(pictures, shown)


def _timelines(collection: Collection, pictures: dict[int, Picture], shown: Shown) -> str:
    if not pictures:
        return _empty("No timeline was recorded (timeline.jsonl is missing or empty).")
    intro = (
        '<p class="intro">Each run over the same length of time, taken where it is most typical of the run. The upper '
        "lane of a worker shows computing and waiting, the thin lane beneath it messages in flight. Empty spans of the "
        "upper lane lie between steps: evaluations, checkpoints, and the end of a shorter record.</p>"
    )
    unrecorded = [run.label for index, run in enumerate(collection.runs) if index not in pictures]
    missing = _empty(f"No timeline was recorded for {', '.join(unrecorded)}.") if unrecorded else ""
    mute = [run.label for run in collection.runs if run.spans and all(s.kind != "communication" for s in run.spans)]
    if mute:
        intro += (
            f'<p class="intro">The thin lane of {escape(", ".join(mute))} is empty: no message was recorded there. '
            "DistributedDataParallel sends its buckets itself during the backward pass, so that only the wait for the "
            "last of them shows.</p>"
        )
    return intro + "".join(shown(picture, captioned=False) for picture in pictures.values()) + missing


def _links(collection: Collection, picture: Picture | None, shown: Shown) -> str:
    if picture is None:
        return _empty("No bytes were counted on the links (links.json is missing, empty or all zero).")
    uncounted = [run.label for run in collection.runs if not run.links]
    missing = _empty(f"No bytes were counted for {', '.join(uncounted)}.") if uncounted else ""
    return shown(picture) + missing


def _notes(collection: Collection) -> str:
    several = len(collection.runs) > 1
    notes = [*collection.notes]
    for run in collection.runs:
        notes += [f"{run.label}: {note}" if several else note for note in run.notes]
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (
        f'<div class="card"><div class="notes" role="note"><strong>What is missing</strong><ul>{items}</ul></div></div>'
    )


def _empty(sentence: str) -> str:
    return f'<p class="empty">{escape(sentence)}</p>'
