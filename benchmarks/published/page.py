# SPDX-License-Identifier: Apache-2.0
"""Write the pages about predicted measurements, and their picture, from the committed results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.published import faults, growth
from benchmarks.published.papers import backups, papers
from benchmarks.published.results import (
    BOUNDS,
    HERE,
    RESULTS,
    all_predictions,
    classes,
    load,
    num_groups,
    wrong_orders,
)
from thinwire.lab.report.palette import GRID, INK, MUTED, looks
from thinwire.lab.report.picture import FONT_SIZE, canvas, plain, write_svg
from thinwire.planning.plan.published import load_source

_DOCS = HERE.parents[1] / "docs"
_MARKERS = {"dense": "o", "methods": "^", "hard": "x"}


def verdict() -> str:
    """The classes, and the groups whose methods are in the wrong order."""
    found = all_predictions()
    lines = ["| Class | Cells | Within the bound | Share | Rule | Verdict |", "|---|---|---|---|---|---|"]
    for each in classes(found):
        bound, share = BOUNDS[each.name]
        rule = f"{share:.0%} within {bound:.0%}" if share else "none"
        outcome = "" if not share else "holds" if each.holds else "fails"
        lines.append(
            f"| {each.name} | {each.cells} | {each.within} | {each.within / each.cells:.0%} | {rule} | {outcome} |"
        )
    wrong = wrong_orders(found)
    groups = num_groups(found)
    outcome = "fails" if wrong else "holds"
    lines.append(f"| order of methods | {groups} groups | {groups - len(wrong)} right | | all right | {outcome} |")
    return "\n".join(lines)


def _by_source() -> Iterator[str]:
    yield "| Source | Cells | Median error | Largest | Fitted numbers |"
    yield "|---|---|---|---|---|"
    for name, found in all_predictions().items():
        source = load_source(HERE / "sources" / name)
        errors = sorted((each.error for each in found if not each.calibrates and each.cell.kind != "hard"), key=abs)
        if not errors:
            continue
        fits = source.table.get("fits", [])
        yield (
            f"| {source.table['title']} | {len(errors)} | {abs(errors[len(errors) // 2]):.1%} | {errors[-1]:+.0%} "
            f"| {len(fits)} |"
        )


def _outside() -> Iterator[str]:
    yield "| Source | Cell | Published | Predicted | Error |"
    yield "|---|---|---|---|---|"
    for name, found in all_predictions().items():
        title = load_source(HERE / "sources" / name).table["title"]
        for each in found:
            if each.cell.kind != "hard" and not each.calibrates and abs(each.error) > BOUNDS[each.cell.kind][0]:
                yield (
                    f"| {title} | {each.cell.name} | {each.cell.seconds:.4g} s | {each.seconds:.4g} s "
                    f"| {each.error:+.0%} |"
                )


def _causes() -> Iterator[str]:
    yield "| Source | What is changed | Cells | Errors then | Within their bound | Wrong pairs before, then |"
    yield "|---|---|---|---|---|---|"
    for name in all_predictions():
        title = load_source(HERE / "sources" / name).table["title"]
        for each in load(name).get("causes", []):
            errors = sorted(each["errors"])
            span = "" if not errors else f"{errors[0]:+.0%} to {errors[-1]:+.0%}"
            pairs = f"{each['wrong_pairs']}, {each['wrong_pairs_then']}" if each["wrong_pairs"] else ""
            yield f"| {title} | {each['cause']} | {len(errors)} | {span} | {each['within']} | {pairs} |"


def _orders() -> Iterator[str]:
    for (name, model, workers, link), pairs in wrong_orders(all_predictions()).items():
        title = load_source(HERE / "sources" / name).table["title"]
        yield f"- {title}, {model}, {workers} workers, {link}: measured {'; '.join(pairs)}."


def draw(path: Path) -> None:
    """Draw predicted against published times on logarithmic axes, one color per source."""
    found = all_predictions()
    figure = canvas(7.2, 5.4)
    axes = figure.subplots()
    plain(axes, x="published, seconds", y="predicted, seconds")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for (name, cells), look in zip(
        found.items(), looks([f"source{place}" for place in range(len(found))]), strict=True
    ):
        title = load_source(HERE / "sources" / name).table["title"]
        for kind, marker in _MARKERS.items():
            chosen = [each for each in cells if each.cell.kind == kind and not each.calibrates]
            if chosen:
                axes.plot(
                    [each.cell.seconds for each in chosen],
                    [each.seconds for each in chosen],
                    marker,
                    color=look.tone.light,
                    alpha=0.5 if kind == "hard" else 0.9,
                    markersize=4.5,
                    label=title if kind != "hard" else None,
                )
    everything = [each.cell.seconds for cells in found.values() for each in cells]
    ends = min(everything) / 1.5, max(everything) * 1.5
    axes.plot(ends, ends, color=INK.light, linewidth=0.8)
    axes.fill_between(ends, [0.85 * end for end in ends], [1.15 * end for end in ends], color=GRID.light, zorder=0)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), frameon=False, fontsize=FONT_SIZE - 2, labelcolor=MUTED.light)
    write_svg(figure, path)


def write() -> None:
    """Write the page, its details, its picture and the table of all cells."""
    draw(_DOCS / "_static" / "published.svg")
    growth.draw(_DOCS / "_static" / "growth.svg")
    faults.draw(_DOCS / "_static" / "goodput.svg")
    found = all_predictions()
    rows = [
        "\t".join(
            (
                name,
                each.cell.kind,
                each.cell.name,
                f"{each.cell.seconds:g}",
                f"{each.seconds:.5g}",
                f"{each.error:+.3f}",
                "calibrates" if each.calibrates else "",
            )
        )
        for name, cells in found.items()
        for each in cells
    ]
    header = "source\tclass\tcell\tpublished\tpredicted\terror\tuse"
    (RESULTS / "cells.tsv").write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    sections = {
        "verdict": [verdict()],
        "sources": _by_source(),
        "outside": _outside(),
        "causes": _causes(),
        "orders": list(_orders()) or ["None."],
        "papers": papers(),
        "backups": [backups()],
        "growth": growth.table(),
        "growth-bar": [growth.bar_seconds()],
        "left-out": [growth.left_out()],
        "faults": faults.table(),
        "bars": faults.bars(),
        "cells": [str(sum(len(each) for each in found.values()))],
    }
    written = {f"<!-- {name} -->": "\n".join(lines) for name, lines in sections.items()}
    for folder, name in ((_DOCS, "scale.md"), (_DOCS, "growth.md"), (RESULTS, "details.md")):
        path, text = folder / name, (HERE / name).read_text(encoding="utf-8")
        for mark, section in written.items():
            text = text.replace(mark, section)
        path.write_text(re.sub(r"\n{3,}", "\n\n", text), encoding="utf-8")
