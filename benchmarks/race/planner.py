# SPDX-License-Identifier: Apache-2.0
"""What `thinwire plan` recommends for the race's model on each link, from what the doctor measures there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.race.racers import LINKS, SIZES, WORKS
from benchmarks.race.results import RESULTS, Fields, best_try, result
from benchmarks.race.table import NOT_RUN, Row, first, rows
from thinwire import parse

NAME = "planner"
NEAR = 0.15
_TASK = "text"


def ask(links: Sequence[str] = tuple(LINKS)) -> None:
    """Examine the workers on each link, ask what to train with there, and write the answers, beside those of others."""
    found: dict[str, Fields] = dict((result(NAME) or {"links": {}})["links"])
    for link in links:
        with TemporaryDirectory() as folder:
            found[link] = {
                "when": time.strftime("%Y-%m-%d", time.gmtime()),
                **_answer(link, Path(folder, "doctor.json")),
            }
        RESULTS.put(NAME, {"links": {each: found[each] for each in LINKS if each in found}}, file=_TASK)


def _answer(link: str, file: Path) -> Fields:
    work = WORKS[_TASK]
    doctor = ["doctor", "--json", "--task", _TASK, "--model-size", work.model, "--batch-size", str(work.batch_size)]
    seen = _said([*doctor, "--workers", str(SIZES[0]), "--link", link, "--out", str(file)])
    answer = _said(["plan", "--json", "--doctor", str(file), "--optimizer", work.optimizer])
    predicted = {each["recipe"]: each["seconds_per_step"] for each in answer["options"] if not each["tensor_parallel"]}
    return {
        "step_seconds": round(fmean(_seconds_of(each) for each in seen["steps"].values()), 4),
        "loaded_step_seconds": round(fmean(each["seconds"] for each in seen["loaded"].values()), 4),
        "contention": round(answer["contention"], 4),
        "recommended": answer["recommended"],
        "predicted_seconds_per_step": round(predicted[answer["recommended"]], 4),
        "predicted": {recipe: taken and round(taken, 4) for recipe, taken in predicted.items()},
    }


def _said(command: list[str]) -> dict[str, Any]:
    # A thread for each worker, as in the race.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole = [sys.executable, "-m", "thinwire.cli", *command]
    return json.loads(subprocess.run(whole, stdout=subprocess.PIPE, check=True, env=environment).stdout)


def _seconds_of(step: Fields) -> float:
    return step["forward"] + step["backward"] + step["update"]


def asked() -> list[str]:
    """The links with an answer."""
    answers = (result(NAME) or {"links": {}})["links"]
    return [link for link in LINKS if link in answers]


def lines() -> list[str]:
    """A row of a table for each answer."""
    answers = (result(NAME) or {"links": {}})["links"]
    return [_line(link, answers[link]) for link in asked()]


def step_lines() -> list[str]:
    """A row for each racer that is a recipe of the plan: predicted and measured seconds of a step on each link."""
    found = _steps()
    names = dict.fromkeys(name for _, name in found)
    told = {place: f"{predicted:.3f}, {measured:.3f}" for place, (predicted, measured) in found.items()}
    return [f"| {name} | {' | '.join(told.get((link, name), NOT_RUN) for link in asked())} |" for name in names]


def near() -> tuple[int, int]:
    """How many predicted steps are near the measured ones, and how many there are."""
    found = _steps().values()
    return sum(abs(predicted / measured - 1) <= NEAR for predicted, measured in found), len(found)


def _steps() -> dict[tuple[str, str], tuple[float, float]]:
    """Predicted and measured seconds, by link and racer."""
    answers, found = (result(NAME) or {"links": {}})["links"], dict[tuple[str, str], tuple[float, float]]()
    for link in asked():
        predicted = answers[link].get("predicted", {})
        for row in rows(link, SIZES[0]):
            if row.racer.whose == "thinwire" and row.seconds:
                for recipe, taken in predicted.items():
                    if taken and _is(row, recipe):
                        found[link, row.racer.name] = taken, row.seconds
    return found


def _line(link: str, answer: Fields) -> str:
    found = [row for row in rows(link, SIZES[0]) if row.racer.whose == "thinwire" and row.to_target < float("inf")]
    fast = first(found)
    own = next((row for row in found if _is(row, answer["recommended"])), None)
    steps = [f"{answer[name]:.3f}" for name in ("step_seconds", "loaded_step_seconds")]
    step = f"{answer['predicted_seconds_per_step']:.3f}"
    measured = f"{own.seconds:.3f}" if own and own.seconds else NOT_RUN
    cells = [link, *steps, f"`{answer['recommended']}`", step, measured, _seconds(own), _named(fast), _seconds(fast)]
    return f"| {' | '.join(cells)} |"


def _is(row: Row, recipe: str) -> bool:
    """Whether a racer's recipe is this one, whatever its outer rate, which the race has tuned."""
    best = best_try(row.racer) if row.racer.outer else None
    written = row.racer.recipe.replace("{outer}", f"{best['outer']:g}" if best else "0.7")
    own, asked = (parse(text) for text in (written, recipe))
    names = {each.name for each in fields(own)} - {"outer"}  # type: ignore[arg-type]
    return type(own) is type(asked) and all(getattr(own, name) == getattr(asked, name) for name in names)


def _seconds(row: Row | None) -> str:
    return NOT_RUN if row is None else f"{row.to_target:.0f} s"


def _named(row: Row | None) -> str:
    return NOT_RUN if row is None else row.racer.name
