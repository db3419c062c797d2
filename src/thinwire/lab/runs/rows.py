# SPDX-License-Identifier: Apache-2.0
"""Run folders as tidy rows: one for each step of each run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.lab.report.files import number
from thinwire.lab.report.folder import read_run, rounds_of


@dataclass(frozen=True)
class Row:
    """One step of one run; a figure is NaN where none was recorded.

    Attributes:
        run: the name of the run's folder.
        strategy: the recipe.
        seed: of the run; None where it is not known.
        step: steps done, with this one; 0 is the evaluation before the first step.
        seconds: training time at the end of the step.
        loss: on the step's batches, the mean over workers.
        payload_bytes: sent so far, the mean over workers.
        step_seconds: the duration of the step.
        compute_seconds: the part of it that was not waiting.
        exposed_seconds: the part of it spent waiting for messages.
        eval_loss: of the consensus model on held-out data, in steps with an evaluation.
        eval_metric: the task's metric there.
        metrics: measurements of the strategy, by name.
    """

    run: str
    strategy: str
    seed: int | None
    step: int
    seconds: float
    loss: float = math.nan
    payload_bytes: float = math.nan
    step_seconds: float = math.nan
    compute_seconds: float = math.nan
    exposed_seconds: float = math.nan
    eval_loss: float = math.nan
    eval_metric: float = math.nan
    metrics: dict[str, float] = field(default_factory=dict[str, float])


def load(folder: str | Path) -> list[Row]:
    """Read a run folder, or all runs of a comparison, as rows: one for each step of each run.

    A running run can be read too. `pandas.DataFrame(load(folder))` makes a table.

    Args:
        folder: the folder that `thinwire train --out` or `thinwire compare --out` wrote.

    Raises:
        ConfigError: there is no such folder, it holds no run, it has an unknown schema, or one of its JSON files is
            broken.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from thinwire.lab.runs import load, resolve, work
        >>> with TemporaryDirectory() as folder:
        ...     settings = resolve({"task": "digits", "strategy": "LocalSGD(period=2)", "steps": 2, "workers": 1})
        ...     _ = work(settings, Path(folder))
        ...     [(row.strategy, row.seed, row.step, row.loss > 0) for row in load(folder)]
        [('LocalSGD(period=2)', 0, 0, False), ('LocalSGD(period=2)', 0, 1, True), ('LocalSGD(period=2)', 0, 2, True)]
    """
    return [row for each in run_folders(Path(folder)) for row in _rows(each)]


def run_folders(folder: Path) -> list[Path]:
    """Return the folder itself, or those of all runs of a comparison, in its order.

    Raises:
        ConfigError: there is no such folder.
    """
    rounds = rounds_of(folder)
    return [folder] if rounds is None else [each for every in rounds.values() for each in every]


def _rows(folder: Path) -> list[Row]:
    run = read_run(folder)
    seed = number(run.summary, "seed")
    seed = number(run.config, "seed") if seed is None else seed
    facts = (folder.name, run.strategy, None if seed is None else int(seed))
    evaluations = {each.step: each for each in run.evaluations}
    rows: dict[int, Row] = {}
    for each in run.steps:
        evaluation = evaluations.pop(each.step, None)
        held_out = (math.nan, math.nan) if evaluation is None else (evaluation.loss, evaluation.metric)
        times = (each.step_seconds, each.compute_seconds, each.exposed_seconds)
        rows[each.step] = Row(
            *facts, each.step, each.seconds, each.loss, each.payload_bytes, *times, *held_out, each.metrics
        )
    for each in evaluations.values():
        rows[each.step] = Row(
            *facts,
            each.step,
            each.seconds,
            payload_bytes=each.payload_bytes,
            eval_loss=each.loss,
            eval_metric=each.metric,
        )
    return [rows[step] for step in sorted(rows)]
