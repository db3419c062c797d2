# SPDX-License-Identifier: Apache-2.0
"""What `thinwire plan` recommends for the race's model on each link, beside what the race found there."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from statistics import median
from typing import Any

from benchmarks.race.racers import LINKS, LOCALS, SIZES, WORKS
from benchmarks.race.results import RESULTS, Fields, best_try, result
from benchmarks.race.table import NOT_RUN, Row, rows
from thinwire.storage.files import write_atomically
from thinwire.strategies.recipe import parse

NAME = "planner"
_TASK = "text"
ASKED = tuple(link for link in LINKS if link != "none")
"""A plan is for a link of a known rate."""


def ask() -> None:
    """Ask on each link on which `Local()` was timed, with its step, and write the answers."""
    found: dict[str, Fields] = {}
    for link in ASKED:
        wall = result(f"times/{link}-{SIZES[0]}-{LOCALS[_TASK].name}")
        if wall is None or "failed" in wall:
            continue
        step = round(median(wall["block_seconds"]), 3)
        work = WORKS[_TASK]
        command = [sys.executable, "-m", "thinwire.cli", "plan", "--json", "--task", _TASK, "--model-size", work.model]
        command += ["--batch-size", str(work.batch_size), "--optimizer", work.optimizer, "--workers", str(SIZES[0])]
        command += ["--link", link, "--step-seconds", str(step)]
        answer: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        chosen = next(each for each in answer["options"] if each["recipe"] == answer["recommended"])
        found[link] = {
            "step_seconds": step,
            "recommended": answer["recommended"],
            "predicted_seconds_per_step": round(chosen["seconds_per_step"], 4),
        }
    content = {"when": time.strftime("%Y-%m-%d", time.gmtime()), "links": found}
    write_atomically(RESULTS / f"{NAME}.json", (json.dumps(content, indent=1) + "\n").encode())


def lines() -> list[str]:
    """A row of a table for each answer."""
    answers = (result(NAME) or {"links": {}})["links"]
    return [_line(link, answers[link]) for link in ASKED if link in answers]


def _line(link: str, answer: Fields) -> str:
    found = [row for row in rows(link, SIZES[0]) if row.racer.whose == "thinwire" and row.to_target < float("inf")]
    first = min(found, key=lambda row: row.to_target, default=None)
    own = next((row for row in found if _is(row, answer["recommended"])), None)
    step = f"{answer['predicted_seconds_per_step']:.3f}"
    measured = f"{own.seconds:.3f}" if own and own.seconds else NOT_RUN
    cells = [link, f"`{answer['recommended']}`", step, measured, _seconds(own), _named(first), _seconds(first)]
    return f"| {' | '.join(cells)} |"


def _is(row: Row, recipe: str) -> bool:
    """Whether a racer's recipe is this one, whatever its outer rate, which the race has tuned."""
    best = best_try(row.racer) if row.racer.outer else None
    written = row.racer.recipe.replace("{outer}", f"{best['outer']:g}" if best else "0.7")
    own, asked = (parse(text) for text in (written, recipe))
    names = set(vars(own)) - {"outer"}
    return type(own) is type(asked) and all(getattr(own, name) == getattr(asked, name) for name in names)


def _seconds(row: Row | None) -> str:
    return NOT_RUN if row is None else f"{row.to_target:.0f} s"


def _named(row: Row | None) -> str:
    return NOT_RUN if row is None else row.racer.name
