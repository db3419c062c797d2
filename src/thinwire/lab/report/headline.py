# SPDX-License-Identifier: Apache-2.0
"""The words of the page: the setting, the main result in a sentence, a few large figures, and how each run was made."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from thinwire.lab.report.files import Facts, number, text
from thinwire.lab.report.palette import Look
from thinwire.lab.report.runs import Collection, Run
from thinwire.lab.report.table import baseline, best, cells, columns, direction, metric_name, winners
from thinwire.planning import units

_PAYLOAD = "payload_bytes_per_worker_per_step"
_ELSEWHERE = ("command", "strategy", "paper")
_WORDS = {"lr": "learning rate", "batch_size": "batch size", "cores": "cores", "cpu": "processor"}
_ARXIV = re.compile(r"(?:arxiv:\s*|^)(\d{4}\.\d{4,5})(?:v\d+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Tile:
    """A large figure: what it is, its value, the runs that have it, and its ratio to the baseline's."""

    what: str
    figure: str
    whose: list[tuple[Run, Look]]
    against: str


def setting(collection: Collection) -> list[str]:
    """Words on the task, the model, the workers, the links and the machine, from the first run."""
    known = {key: value for key, value in collection.runs[0].summary.items() if value is not None}
    config = {**collection.runs[0].config, **known}
    parameters, count = number(config, "parameters"), number(config, "workers")
    # From a million on, the exact number is of no use to a reader.
    large = parameters is not None and parameters >= 999_500
    size = f"{units.digits((parameters or 0) / 1e6)} million" if large else units.count(parameters or 0)
    parts = [
        text(config, "task") and f"task {text(config, 'task')}",
        text(config, "model") and f"model {text(config, 'model')}",
        f"{size} parameters" if parameters else "",
        units.workers(int(count)) if count else "",
        f"link {text(config, 'link')}" if text(config, "link") else collection.runs[0].other_links,
        _host(config.get("host")),
    ]
    return [part for part in parts if part]


def lead(collection: Collection) -> str:
    """Return the main result in one sentence of HTML; empty where there is only one run or nothing to compare."""
    base = baseline(collection.summaries)
    return "" if base is None else _by_target(collection, base) or _by_step(collection, base)


def tiles(collection: Collection, styles: Sequence[Look]) -> list[Tile]:
    """Return a few large figures: the best run of each kind in a comparison, or those of a single run."""
    summaries = collection.summaries
    several, base = len(summaries) > 1, baseline(summaries)
    keys = [column.key for column in columns(summaries)]
    found: list[Tile] = []
    for words, key, better in _figures(collection, several):
        ahead = winners(summaries, key, better) if several else [0]
        # More than two that are alike are no finding.
        if not 1 <= len(ahead) <= 2 or key not in keys or number(summaries[ahead[0]], key) is None:
            continue
        cell = cells(summaries, base)[ahead[0]][keys.index(key)]
        against = ""
        if cell.against and base is not None:
            than = "as" if cell.against.endswith("same") else "than"
            against = f"{cell.against} {than} {collection.runs[base].label}"
        whose = [(collection.runs[each], styles[each]) for each in ahead] if several else []
        found.append(Tile(words if several else words[:1].upper() + words[1:], cell.text, whose, against))
    return found


def _host(host: object) -> str:
    """Return the machine, as configurations describe it: cores and processor."""
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
    """Return the figures to show large: words, the summary's key, and 1 or -1 where more or less is better."""
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


# -- how each run was made ---------------------------------------------------------------------------------------------


def details(collection: Collection) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Return the settings that all runs share, and those that each run has besides, in words."""
    known = [run.config for run in collection.runs if run.config]
    shared: dict[str, object] = {}
    if len(known) > 1:
        first, *others = known
        shared = {key: value for key, value in first.items() if all(key in x and x[key] == value for x in others)}
    owns: list[dict[str, str]] = []
    for run in collection.runs:
        own = {key: value for key, value in run.config.items() if key not in shared}
        # Figures of the whole run, which the summary table does not have.
        steps, seconds = number(run.summary, "steps"), number(run.summary, "seconds")
        own |= {} if steps is None else {"steps taken": units.count(steps)}
        owns.append(_listed(own | ({} if seconds is None else {"time taken": units.seconds(seconds)})))
    return _listed(shared), owns


def paper_of(config: Facts) -> tuple[str, str] | None:
    """Return the paper in a configuration and its address, "" where that is not known; None if it names no paper.

    A paper is an address, or a text that may contain an arXiv number such as `arXiv:1910.00643`.
    """
    words = text(config, "paper")
    found = _ARXIV.search(words)
    address = f"https://arxiv.org/abs/{found[1]}" if found else words if words.startswith("https://") else ""
    return (words, address) if words else None


def _listed(facts: Mapping[str, object]) -> dict[str, str]:
    flat: dict[str, object] = {}
    for key, value in facts.items():
        flat |= value if isinstance(value, dict) else {} if key in _ELSEWHERE else {key: value}
    return {_WORDS.get(key, key.replace("_", " ")): _value(x) for key, x in flat.items() if x is not None and x != ""}


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and abs(value) >= 10_000:
        return units.count(value)
    return json.dumps(value) if isinstance(value, list) else str(value)
