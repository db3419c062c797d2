# SPDX-License-Identifier: Apache-2.0
"""How each run was made: recipe, command, versions, configuration and papers."""

import json
import re
from collections.abc import Mapping, Sequence
from html import escape

from thinwire.core import units
from thinwire.lab.report.files import Facts, number, text
from thinwire.lab.report.headline import swatch
from thinwire.lab.report.palette import Look
from thinwire.lab.report.runs import Collection, Run

_ELSEWHERE = ("command", "strategy", "paper", "papers")
_WORDS = {"lr": "learning rate", "batch_size": "batch size", "cores": "cores", "cpu": "processor"}
_ARXIV = re.compile(r"(?:arxiv:\s*|^)(\d{4}\.\d{4,5})(?:v\d+)?", re.IGNORECASE)


def details(collection: Collection, styles: Sequence[Look]) -> str:
    """The settings that all runs share, then one folded part per run with the rest."""
    configs = [run.config for run in collection.runs]
    if not any(configs):
        return '<p class="empty">No config.json was found, so how the runs were made is not known.</p>'
    known = [config for config in configs if config]
    shared: dict[str, object] = {}
    if len(known) > 1:
        first, *others = known
        shared = {
            key: value
            for key, value in first.items()
            if key not in _ELSEWHERE and all(key in other and other[key] == value for other in others)
        }
    parts = [_run(run, look, shared) for run, look in zip(collection.runs, styles, strict=True)]
    opened = parts[0].replace("<details>", "<details open>", 1) if len(parts) == 1 else "".join(parts)
    head = "<h3>The same for all</h3>" if shared else ""
    return head + _listed(shared) + opened


def papers(config: Facts) -> list[tuple[str, str | None]]:
    """The papers in a configuration's `paper` or `papers`, each with its address; None where that is not known.

    A paper is an address, a text that may contain an arXiv number such as `arXiv:1910.00643`, or an object with `title`
    and `url`.
    """
    given = config.get("papers", config.get("paper"))
    entries = given if isinstance(given, list) else [given]
    return [paper for paper in map(_paper, entries) if paper is not None]


def _paper(entry: object) -> tuple[str, str | None] | None:
    if isinstance(entry, Mapping):
        address = str(entry.get("url") or entry.get("arxiv") or "")
        return str(entry.get("title") or address), _address(address)
    return (entry, _address(entry)) if isinstance(entry, str) and entry else None


def _address(words: str) -> str | None:
    if words.startswith(("https://", "http://")):
        return words
    number_found = _ARXIV.search(words)
    return f"https://arxiv.org/abs/{number_found[1]}" if number_found else None


def _run(run: Run, look: Look, shared: Mapping[str, object]) -> str:
    """The folded part of one run: command, papers, and what is not shared."""
    own = {key: value for key, value in run.config.items() if key not in shared and key not in _ELSEWHERE}
    # Figures of the whole run, which the summary table does not have.
    steps, seconds = number(run.summary, "steps"), number(run.summary, "seconds")
    own |= {"steps taken": units.count(steps)} if steps is not None else {}
    own |= {"time taken": units.seconds(seconds)} if seconds is not None else {}
    recipe = "" if run.strategy == run.label else f"<code>{escape(run.strategy)}</code>"
    command = text(run.config, "command")
    command = f'<p class="label">Command</p><pre>{escape(command)}</pre>' if command else ""
    lines = [
        f'<a href="{escape(address)}" rel="noreferrer">{escape(title)}</a>' if address else escape(title)
        for title, address in papers(run.config)
    ]
    paper = f'<p class="label">Paper</p><p class="papers">{"<br>".join(lines)}</p>' if lines else ""
    return (
        f"<details><summary>{swatch(look)}{escape(run.label)}{recipe}</summary>{command}{paper}{_listed(own)}</details>"
    )


def _listed(facts: Mapping[str, object]) -> str:
    flat: dict[str, object] = {}
    for key, value in facts.items():
        flat |= value if isinstance(value, dict) else {key: value}
    items = "".join(
        f"<dt>{escape(_WORDS.get(key, key.replace('_', ' ')))}</dt><dd>{escape(_value(value))}</dd>"
        for key, value in flat.items()
        if value is not None and value != ""
    )
    return f"<dl>{items}</dl>" if items else ""


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and abs(value) >= 10_000:
        return units.count(value)
    return json.dumps(value) if isinstance(value, list) else str(value)
