# SPDX-License-Identifier: Apache-2.0
"""Tables and a page with three pictures, drawn as SVG without any library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import combinations
from pathlib import Path

from thin_gpt import VERSION
from thin_gpt.racers import NOT_RUN, RACERS
from thin_gpt.referee import Record
from thin_gpt.results import Results
from thin_gpt.task import RANKED, SEEDS, SIZES
from thin_gpt.verdicts import KENDALL, Bar, final_bar, kendall, memory_bar, rank_bar, ratio_bar

Points = Sequence[tuple[float, float]]
_PARAMETERS = {"toy": 30_432, "400k": 391_264, "6m": 6_482_688, "30m": 29_905_088}
_COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#888")
_HEAD = (
    "| Racer | s to target | local steps | steps | s a step | final loss | MB sent a step | copies | CPU s | checks |"
)


def table(results: Results, size: str, track: str) -> str:
    """The racers of a track, the fastest first; `~` is steps times seconds of a step, not whole runs."""
    lines = [_HEAD, "| --- |" + " ---: |" * 8 + " --- |"]
    timed = results.ranking(size, track)
    others = [name for name in dict.fromkeys(each["racer"] for each in results.find(size=size)) if name not in timed]
    for name in [*timed, *others]:
        record = _of_track(results, name, size, track)
        seconds, steps = results.seconds(name, size, track), results.reached(results.curve(name, size))
        whole, own = results.whole(name, size, track), results.rates(RACERS[name], size) if name in RACERS else None
        if record is None and steps is None:
            continue
        cells = [f"{name}{'*' if own and own[2] else ''}"]
        cells.append("" if seconds is None else f"{'' if whole else '~'}{seconds:.0f}")
        local = record["local"] if record else 0.0
        cells.append(f"{seconds / local:.0f}" if seconds is not None and local else "")
        cells.append("" if steps is None else f"{steps:.0f}")
        cells += _costs(results, name, size, record)
        lines.append(f"| {' | '.join(cells)} |")
    if len(lines) == 2:
        return "Not run.\n"
    notes = "*: the best rate is at an edge of what was tried. ~: steps of the curve times seconds of a step."
    return "\n".join([*lines, "", notes, ""])


def _costs(results: Results, name: str, size: str, record: Record | None) -> list[str]:
    finals = results.finals(name, size)
    final = f"{sum(finals) / len(finals):.3f} ({len(finals)})" if finals else ""
    if record is None or "failed" in record:
        return ["", final, "", "", "", record["failed"].splitlines()[0].replace("|", "/") if record else ""]
    each = record.get("step_seconds", record["seconds"] / record["steps"])
    wire = sum(record["wire"] or record["claimed"]) / len(record["claimed"]) / record["steps"] / 1e6
    copies = _copies(results, record)
    cpu = record["cpu_seconds"] / len(record["claimed"]) / record["steps"]
    told = "" if copies is None else f"{copies:.1f}"
    return [f"{each:.3f}", final, f"{wire:.3g}", told, f"{cpu:.3f}", ", ".join(record["checks"])]


def _copies(results: Results, record: Record) -> float | None:
    ddp = _of_track(results, "ddp", record["size"], record["track"])
    if ddp is None or "memory" not in ddp:
        return None
    return (record["memory"] - ddp["memory"]) / (4 * _PARAMETERS[record["size"]])


def _of_track(results: Results, name: str, size: str, track: str) -> Record | None:
    whole = results.find(kind="whole", racer=name, size=size, track=track)
    timed = results.find(kind="time", racer=name, size=size, track=track)
    return next((each for each in [*whole, *timed] if "failed" not in each), (whole or timed or [None])[0])


def bars(results: Results, size: str) -> list[Bar]:
    """The demands that one folder of results can answer."""
    found, best = list[Bar](), set[str]()
    for track in RANKED:
        times = {name: results.seconds(name, size, track) for name in results.ranking(size, track)}
        known = {name: seconds for name, seconds in times.items() if seconds is not None}
        ours = {name: seconds for name, seconds in known.items() if name.startswith("thinwire")}
        found.append(ratio_bar(track, ours, {name: each for name, each in known.items() if name not in ours}))
        if ours:
            first = min(ours, key=lambda name: ours[name])
            best.add(first)
            own, ddp = _of_track(results, first, size, track), _of_track(results, "ddp", size, track)
            both = [each["memory"] if each and "memory" in each else None for each in (own, ddp)]
            found.append(memory_bar(f"{track}: {first}", both[0], both[1], _PARAMETERS[size]))
    return [
        *found,
        *(final_bar(name, results.finals(name, size), results.finals("ddp", size)) for name in sorted(best)),
    ]


def compare(first: Results, second: Results, size: str) -> tuple[list[str], bool]:
    """Lines on how far two rankings agree on each track, with the pairs that changed order; and whether they do.

    Raises:
        ValueError: the texts differ.
    """
    if first.fingerprint != second.fingerprint:
        raise ValueError(
            f"{first.path} has results of text {first.fingerprint!r}, and {second.path} of {second.fingerprint!r}. "
            "Only results of the same text can be compared. Run both with the same --text"
        )
    lines, agree = list[str](), list[bool]()
    for track in RANKED:
        own, other = first.ranking(size, track), second.ranking(size, track)
        common, again = [name for name in own if name in other], [name for name in other if name in own]
        if len(common) < 2:
            lines.append(f"{track}: {len(common)} racers have a time in both")
            continue
        bar = rank_bar(own, other, track)
        judged = "" if bar.met is None else f"; of the first eight {bar.measured:.2f}, {'' if bar.met else 'not '}"
        judged += f"at least {KENDALL:g}" if judged else ""
        lines.append(f"{track}: Kendall's tau {kendall(common, again):.2f} of {len(common)} racers{judged}")
        for a, b in combinations(common, 2):
            if again.index(a) > again.index(b):
                times = [f"{each.seconds(name, size, track):.0f}" for each in (first, second) for name in (a, b)]
                lines.append(f"  {a}, {b}: {times[0]} and {times[1]} s, then {times[2]} and {times[3]} s")
        agree.append(bar.met is not False)
    return lines, bool(agree) and all(agree)


def page(results: Results, size: str, folder: Path) -> list[Path]:
    """Write `page.md` and three pictures; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name in RACERS if results.curve(name, size)]
    times: dict[str, dict[str, float]] = {}
    for track in RANKED:
        for name in results.ranking(size, track):
            times.setdefault(name, {})[track] = results.seconds(name, size, track) or 0.0
    curves: dict[str, Points] = {}
    sent: dict[str, Points] = {}
    for name in names:
        record = results.curve(name, size)
        if record is None or "failed" in record:
            continue
        points = [(step, loss) for step, loss, *_ in record["curve"] if step <= SIZES[size].trunk]
        bytes_per_step = sum(record["claimed"]) / len(record["claimed"]) / record["steps"] / 1e6
        curves[name] = points
        sent[name] = [(step * bytes_per_step, loss) for step, loss in points]
    pictures = {
        "times.svg": bar_chart("Seconds to the target", times),
        "losses.svg": line_chart("Held-out loss of the trunk", "steps", curves),
        "bytes.svg": line_chart("Held-out loss by bytes", "MB sent by a worker", sent, logarithmic=True),
    }
    lines = [f"# {VERSION}, {size}", "", *(f"![{name}]({name})\n" for name in pictures)]
    for track in RANKED:
        lines += [f"## {track}", "", table(results, size, track)]
    lines += ["## Bars", "", "| Bar | asked | measured | |", "| --- | --- | ---: | --- |"]
    lines += [*(bar.line() for bar in bars(results, size)), "", "## Not run", ""]
    lines += [f"- {name}: {reason}." for name, reason in NOT_RUN.items()]
    machines = sorted({f"{m['cores']} cores, torch {m['torch']}" for m in (r["machine"] for r in results.records)})
    lines += ["", f"Seeds {SEEDS}; text {results.fingerprint}; {'; '.join(machines) or 'no results yet'}.", ""]
    written = {"page.md": "\n".join(lines), **pictures}
    for name, content in written.items():
        (folder / name).write_text(content, encoding="utf-8")
    return [folder / name for name in written]


# -- pictures ----------------------------------------------------------------------------------------------------------


def line_chart(title: str, label: str, lines: Mapping[str, Points], *, logarithmic: bool = False) -> str:
    """Losses by steps or bytes."""
    points = [point for each in lines.values() for point in each if math.isfinite(point[1])]
    if logarithmic:
        points = [point for point in points if point[0] > 0]
    if not points:
        return _svg(title, ["<text x='40' y='60'>Not run.</text>"], 80)
    places = [math.log10(x) if logarithmic else x for x, _ in points]
    left, right, low, high = min(places), max(places), min(y for _, y in points), max(y for _, y in points)

    def at(x: float, y: float) -> str:
        place = math.log10(x) if logarithmic else x
        across, up = (place - left) / (right - left or 1), (y - low) / (high - low or 1)
        return f"{60 + 480 * across:.1f},{330 - 280 * up:.1f}"

    parts = [f"<text x='300' y='365' text-anchor='middle'>{escape(label)}{', log' if logarithmic else ''}</text>"]
    for place, text in ((left, 60), (right, 540)):
        shown = 10**place if logarithmic else place
        parts.append(f"<text x='{text}' y='347' text-anchor='middle'>{shown:.3g}</text>")
    parts += [f"<text x='52' y='{y}' text-anchor='end'>{value:.2f}</text>" for y, value in ((334, low), (54, high))]
    for number, (name, each) in enumerate(lines.items()):
        kept = [at(x, y) for x, y in each if math.isfinite(y) and (x > 0 or not logarithmic)]
        dashed = "" if name.startswith("thinwire") else " stroke-dasharray='5 3'"
        parts.append(f"<polyline fill='none' stroke='{_color(number)}'{dashed} points='{' '.join(kept)}'/>")
        parts.append(f"<text x='560' y='{50 + 16 * number}' fill='{_color(number)}'>{escape(name)}</text>")
    return _svg(title, parts, max(380, 60 + 16 * len(lines)))


def bar_chart(title: str, rows: Mapping[str, Mapping[str, float]]) -> str:
    """A group of bars for each racer, one for each track, on a logarithmic scale."""
    values = [value for row in rows.values() for value in row.values() if value > 0]
    if not values:
        return _svg(title, ["<text x='40' y='60'>Not run.</text>"], 80)
    low, high = math.log10(min(values)) - 0.3, math.log10(max(values))
    parts = [
        f"<text x='{200 + 140 * n}' y='45' fill='{_color(n)}'>{escape(track)}</text>" for n, track in enumerate(RANKED)
    ]
    y = 60
    for name, row in rows.items():
        parts.append(f"<text x='190' y='{y + 12}' text-anchor='end'>{escape(name)}</text>")
        for track, value in row.items():
            width = 480 * (math.log10(max(value, 1e-9)) - low) / (high - low or 1)
            color = _color(RANKED.index(track))
            parts.append(f"<rect x='200' y='{y}' width='{max(1.0, width):.1f}' height='10' fill='{color}'/>")
            parts.append(f"<text x='{206 + width:.1f}' y='{y + 9}' font-size='9'>{value:.3g}</text>")
            y += 12
        y += 6
    return _svg(title, parts, y + 10)


def _color(number: int) -> str:
    return _COLORS[number % len(_COLORS)]


def _svg(title: str, parts: Sequence[str], height: float) -> str:
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 760 {height:.0f}' font-family='sans-serif'"
    body = "\n".join(parts)
    named = f"<text x='20' y='22' font-size='15'>{escape(title)}</text>"
    return f"{head} font-size='12'>\n<rect width='100%' height='100%' fill='white'/>\n{named}\n{body}\n</svg>\n"
