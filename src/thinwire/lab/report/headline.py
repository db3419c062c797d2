# SPDX-License-Identifier: Apache-2.0
"""The top of the page: the setting, the main result in a sentence, a few large figures and the summary table."""

from collections.abc import Sequence
from html import escape

from thinwire.core import units
from thinwire.lab.report.files import number, text
from thinwire.lab.report.palette import Look
from thinwire.lab.report.runs import Collection
from thinwire.lab.report.table import Cell, baseline, best, cells, columns, direction, metric_name, winners

_PAYLOAD = "payload_bytes_per_worker_per_step"


def setting(collection: Collection) -> str:
    """One line on the task, the model, the workers, the links and the machine, from the first run."""
    known = {key: value for key, value in collection.runs[0].summary.items() if value is not None}
    config = {**collection.runs[0].config, **known}
    parameters, workers = number(config, "parameters"), number(config, "workers")
    # From a million on, the exact number is of no use to a reader.
    large = parameters is not None and parameters >= 999_500
    size = f"{units.digits((parameters or 0) / 1e6)} million" if large else units.count(parameters or 0)
    parts = [
        text(config, "task") and f"task {text(config, 'task')}",
        text(config, "model") and f"model {text(config, 'model')}",
        f"{size} parameters" if parameters else "",
        f"{workers:.0f} worker{'s' if workers != 1 else ''}" if workers else "",
        f"link {text(config, 'link')}" if text(config, "link") else collection.runs[0].other_links,
        _host(config.get("host")),
    ]
    spans = "".join(f"<span>{escape(part)}</span>" for part in parts if part)
    return f'<p class="setting">{spans}</p>' if spans else ""


def lead(collection: Collection) -> str:
    """The main result in one sentence; empty where there is only one run or nothing to compare."""
    summaries = collection.summaries
    base = baseline(summaries)
    if base is None:
        return ""
    sentence = _by_target(collection, base) or _by_step(collection, base)
    return f'<p class="lead">{sentence}</p>' if sentence else ""


def tiles(collection: Collection, styles: Sequence[Look]) -> str:
    """A few large figures: the best run of each kind in a comparison, or those of a single run."""
    summaries = collection.summaries
    several = len(summaries) > 1
    base = baseline(summaries)
    keys = [column.key for column in columns(summaries)]
    content = ""
    for words, key, better in _figures(collection, several):
        ahead = winners(summaries, key, better) if several else [0]
        # More than two that are alike are no finding.
        if not 1 <= len(ahead) <= 2 or key not in keys or number(summaries[ahead[0]], key) is None:
            continue
        index = ahead[0]
        cell = cells(summaries, base)[index][keys.index(key)]
        run, note = "", ""
        if several:
            run = " and ".join(swatch(styles[each]) + escape(collection.runs[each].label) for each in ahead)
        if cell.against:
            name = collection.runs[base].label if base is not None else ""
            than = "as" if cell.against.endswith("same") else "than"
            note = f"<small>{escape(f'{cell.against} {than} {name}')}</small>"
        shown = words if several else words[:1].upper() + words[1:]
        content += (
            f'<li><span class="what">{escape(shown)}</span><span class="figure">{escape(cell.text)}</span>'
            f'<span class="whose">{run}{note}</span></li>'
        )
    return f'<ul class="tiles">{content}</ul>' if content else ""


def summary_table(collection: Collection, styles: Sequence[Look]) -> str:
    """The table of summaries, with the best of each column marked, and figures compared with the baseline's."""
    summaries = collection.summaries
    base = baseline(summaries)
    body = ""
    for index, (run, look, row) in enumerate(zip(collection.runs, styles, cells(summaries, base), strict=True)):
        note = "<small>baseline</small>" if index == base else ""
        head = f'<th scope="row">{swatch(look)}{escape(run.label)}{note}</th>'
        body += f"<tr>{head}{''.join(map(_cell, row))}</tr>"
    heads = "".join(
        f'<th scope="col">{escape(column.heading.replace("/step", " / step"))}</th>' for column in columns(summaries)
    )
    against = f" Small figures compare with {collection.runs[base].label}." if base is not None else ""
    dot = " Dots mark the best of a column, and what differs from it by noise alone." if base is not None else ""
    several = next((len(run.rounds) for run in collection.runs if len(run.rounds) > 1), 0)
    over = f"Losses are means ± one standard deviation over {several} seeds, other figures medians." * bool(several)
    words = f"{over or 'Means over the run.'} Bytes are per worker and step.{against}{dot}"
    return (
        f'<p class="intro">{escape(words)}</p>'
        '<p class="hint">The table is wider than the page: scroll it sideways.</p>'
        '<div class="scroll" role="region" aria-label="Summary table" tabindex="0"><table>'
        '<caption class="unseen">Every run and its figures</caption>'
        f'<thead><tr><th scope="col">strategy</th>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def swatch(look: Look) -> str:
    """A small square of a strategy's colour."""
    return f'<span class="swatch" style="--own: var({look.tone.variable})" aria-hidden="true"></span>'


def _host(host: object) -> str:
    """The machine, as configurations describe it: cores and processor."""
    if not isinstance(host, dict):
        return ""
    cores = host.get("cores")
    parts = [f"{cores} core{'s' if cores != 1 else ''}" if cores else "", str(host.get("cpu") or "")]
    return ", ".join(part for part in parts if part)


def _by_target(collection: Collection, base: int) -> str:
    summaries = collection.summaries
    first = best(summaries, "seconds_to_target", -1)
    reached, target = (number(summaries[base], key) for key in ("seconds_to_target", "target_loss"))
    if first is None or target is None:
        return ""
    own = number(summaries[first], "seconds_to_target") or 0.0
    start = (
        f"<strong>{escape(collection.runs[first].label)}</strong> reached a held-out loss of {units.mark(target)} "
        f"in <strong>{units.seconds(own)}</strong>"
    )
    name = escape(collection.runs[base].label)
    ahead = winners(summaries, "seconds_to_target", -1)
    if first == base:
        return f"{start}, before any other strategy." if ahead == [base] or reached is None else f"{start}."
    if base in ahead or (reached is not None and not ahead):
        return f"{start}, no sooner than {name} within the noise."
    if reached is None:
        return f"{start}; {name} did not reach it{_traffic(collection, first, base)}."
    return f"{start}, {units.times(reached / own)} sooner than {name}{_traffic(collection, first, base)}."


def _by_step(collection: Collection, base: int) -> str:
    summaries = collection.summaries
    first = best(summaries, "seconds_per_step", -1)
    other = number(summaries[base], "seconds_per_step")
    if first is None or other is None:
        return ""
    own = number(summaries[first], "seconds_per_step") or 0.0
    start = (
        f"<strong>{escape(collection.runs[first].label)}</strong> takes <strong>{units.seconds(own)}</strong> per step"
    )
    ahead = winners(summaries, "seconds_per_step", -1)
    if not ahead or base in ahead[1:]:
        return "All strategies take the same time per step, within the noise." if not ahead else ""
    if first == base or own <= 0:
        return f"{start}, less than any other strategy." if len(ahead) == 1 else f"{start}; none takes less."
    name = escape(collection.runs[base].label)
    return f"{start}, {units.times(other / own)} faster than {name}{_traffic(collection, first, base)}."


def _traffic(collection: Collection, first: int, base: int) -> str:
    own, other = (number(collection.summaries[index], _PAYLOAD) for index in (first, base))
    if not own or not other or own > 0.95 * other:
        return ""
    return f", sending <strong>{units.times(other / own)} fewer bytes</strong> per step"


Figure = tuple[str, str, int]


def _figures(collection: Collection, several: bool) -> list[Figure]:
    """The figures to show large: words, the summary's key, and 1 or -1 where more or less is better."""
    metric = metric_name(collection.summaries)
    targeted = any(number(facts, "seconds_to_target") is not None for facts in collection.summaries)
    scored: Figure = ("held-out loss", "eval_loss", -1)
    if metric is not None and direction(metric) > 0:
        scored = (f"held-out {metric}", "eval_metric", 1)
    figures: list[Figure] = [
        *([("to the target loss", "seconds_to_target", -1)] if targeted else []),
        ("per step", "seconds_per_step", -1),
        ("payload per step", _PAYLOAD, -1),
        scored,
    ]
    ranked = ("First ", "Fastest ", "Least ", "Best ")[0 if targeted else 1 :]
    return [
        ((word if several else "") + words, key, better)
        for word, (words, key, better) in zip(ranked, figures, strict=True)
    ]


def _cell(cell: Cell) -> str:
    mark = ' class="best"' if cell.best else ""
    spoken = '<span class="unseen"> (best)</span>' if cell.best else ""
    against = f"<small>{escape(cell.against)}</small>" if cell.against else ""
    return f'<td{mark}><span class="value">{escape(cell.text)}</span>{spoken}{against}</td>'
