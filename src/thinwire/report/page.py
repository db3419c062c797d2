"""The report as one HTML file, without scripts and without links to other files."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from thinwire.report.bars import time_picture
from thinwire.report.curves import loss_pictures
from thinwire.report.details import details
from thinwire.report.document import card, document, figure
from thinwire.report.files import write_text
from thinwire.report.folder import read
from thinwire.report.headline import lead, setting, summary_table, tiles
from thinwire.report.links import link_picture
from thinwire.report.metrics import metric_pictures
from thinwire.report.palette import Look, looks
from thinwire.report.picture import Picture
from thinwire.report.runs import Collection
from thinwire.report.timeline import timeline_pictures

_PARTS = (
    ("summary", "Summary"),
    ("loss", "Loss"),
    ("time", "Time per step"),
    ("timeline", "Timeline"),
    ("links", "Links"),
    ("details", "How it was run"),
)


@dataclass(frozen=True)
class Written:
    """The paths of a report's files: the page and its plots."""

    report: Path
    plots: tuple[Path, ...]


@dataclass(frozen=True)
class Drawings:
    """The pictures of a report; those that the runs have no data for are None or missing."""

    losses: Sequence[Picture]
    metrics: Sequence[Picture]
    times: Picture | None
    timelines: dict[int, Picture]
    links: Picture | None

    def all(self) -> list[Picture]:
        """The pictures in the page's order."""
        single = [picture for picture in (self.times, self.links) if picture is not None]
        return [*self.losses, *self.metrics, *single, *self.timelines.values()]


def write(folder: Path) -> Written:
    """Write `report.html` and `plots/*.png` into a run folder or a comparison folder.

    Raises:
        ConfigError: there is no such folder, it holds no run, or it cannot be written to.
    """
    collection = read(folder)
    styles = looks([run.strategy for run in collection.runs])
    drawings = draw(collection, styles)
    plots = tuple(picture.png(folder / "plots") for picture in drawings.all())
    return Written(write_text(folder / "report.html", page(collection, styles, drawings)), plots)


def draw(collection: Collection, styles: Sequence[Look]) -> Drawings:
    """Draw every picture that the runs have data for."""
    return Drawings(
        losses=loss_pictures(collection, styles),
        metrics=metric_pictures(collection, styles),
        times=time_picture(collection, styles),
        timelines=timeline_pictures(collection, styles),
        links=link_picture(collection, styles),
    )


def page(collection: Collection, styles: Sequence[Look], drawings: Drawings) -> str:
    """The whole HTML document."""
    links = "".join(f'<a href="#{anchor}">{words}</a>' for anchor, words in _PARTS)
    bodies = (
        summary_table(collection, styles),
        _losses([*drawings.losses, *drawings.metrics]),
        _empty("No step was timed, so its time cannot be split.") if drawings.times is None else figure(drawings.times),
        _timelines(collection, drawings.timelines),
        _links(collection, drawings.links),
        details(collection, styles),
    )
    sections = "".join(card(words, body, anchor) for (anchor, words), body in zip(_PARTS, bodies, strict=True))
    return document(
        collection.title,
        "thinwire report",
        f"{_notes(collection)}\n{tiles(collection, styles)}\n{sections}",
        below=f'{setting(collection)}\n{lead(collection)}\n<nav aria-label="Sections">{links}</nav>',
        foot="<footer><p>Made by <code>thinwire report</code>. The drawings are also in the folder <code>plots</code>; "
        "the numbers are in each run's <code>summary.json</code> and <code>metrics.jsonl</code>.</p></footer>",
    )


def _losses(pictures: Sequence[Picture]) -> str:
    """The first picture in full width, the others in pairs."""
    if not pictures:
        return _empty("No loss was recorded: metrics.jsonl is missing or holds no training step.")
    first, *others = pictures
    return f'{figure(first, titled=True)}<div class="pair">{"".join(figure(p, titled=True) for p in others)}</div>'


def _timelines(collection: Collection, pictures: dict[int, Picture]) -> str:
    if not pictures:
        return _empty("No timeline was recorded (timeline.jsonl is missing or empty).")
    intro = (
        '<p class="intro">Each run over the same length of time, taken where it is most typical of the run. The upper '
        "lane of a worker shows computing and waiting, the thin lane beneath it messages in flight. Empty spans of the "
        "upper lane lie between steps: evaluations, checkpoints, and the end of a shorter record.</p>"
    )
    unrecorded = [run.label for index, run in enumerate(collection.runs) if index not in pictures]
    missing = _empty(f"No timeline was recorded for {', '.join(unrecorded)}.") if unrecorded else ""
    return intro + "".join(figure(picture, captioned=False) for picture in pictures.values()) + missing


def _links(collection: Collection, picture: Picture | None) -> str:
    if picture is None:
        return _empty("No bytes were counted on the links (links.json is missing, empty or all zero).")
    uncounted = [run.label for run in collection.runs if not run.links]
    missing = _empty(f"No bytes were counted for {', '.join(uncounted)}.") if uncounted else ""
    return figure(picture) + missing


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
