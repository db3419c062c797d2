# SPDX-License-Identifier: Apache-2.0
"""The state of a run while it trains, from its folder."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from thinwire.lab.report.files import Facts, json_lines, json_object, number, text
from thinwire.lab.report.folder import read_run
from thinwire.lab.report.runs import Run
from thinwire.lab.runs.rows import run_folders

_RECENT = 50  # steps that the means are over
_SLOW = 1.1
"""A worker that is busy this many times as long as the median one is slow."""
_LONG = 0.1
"""Waits of this share of a step are reported where no worker is slow."""


@dataclass(frozen=True)
class Member:
    """One worker of a run over a bucket.

    Attributes:
        name: its id.
        step: steps done.
        rounds: steps with an exchange since it has started.
        loss: the recorded loss of the last step with an exchange.
        bytes_up: bytes that it has written to the store.
        bytes_down: bytes that it has read.
        late: why the others wait for it, or will: "awaited" if a worker is blocked because its message is missing,
            "silent" if its heartbeat has stopped, "gone" if it has left or ended; "" otherwise.
    """

    name: str
    step: int
    rounds: int
    loss: float | None
    bytes_up: int
    bytes_down: int
    late: Literal["", "awaited", "silent", "gone"]


@dataclass(frozen=True)
class Status:
    """A run as its folder or its bucket shows it; a figure is None where it is not recorded yet.

    Attributes:
        folder: of the run, or its URL.
        strategy: the recipe.
        task: what is trained.
        state: "running", "ended" or "diverged"; "waiting" before the workers of a bucket have started.
        step: steps done.
        steps: the step at which the run ends, if it has a limit of steps.
        seconds: training time.
        limit_seconds: the training time at which the run ends, if it has such a limit.
        loss: on the last step's batches.
        eval_loss: the last evaluation's.
        seconds_per_step: the mean over the last 50 steps.
        wait_share: the part of these steps spent waiting for messages.
        payload_bytes: sent so far, the mean over workers.
        bytes_per_step: the mean over the last 50 steps.
        members: ranks, or names of elastic workers.
        slowest: the worker that the others wait for; None where no worker is much slower than the others.
        because: why steps take longer than they must: "data" or "compute" of the slowest worker, or "wait" for
            messages where no worker is slow; None where neither is the case.
        slowdown: how many times as long as the median worker the slowest one is busy.
        written_seconds_ago: since the folder's last change, or the last heartbeat.
        workers: of a run over a bucket, in the order of ranks.
    """

    folder: str
    strategy: str
    task: str
    state: Literal["waiting", "running", "ended", "diverged"]
    step: int
    steps: int | None
    seconds: float
    limit_seconds: float | None
    loss: float | None
    eval_loss: float | None
    seconds_per_step: float | None
    wait_share: float | None
    payload_bytes: float | None
    bytes_per_step: float | None
    members: tuple[str, ...]
    slowest: str | None
    because: Literal["data", "compute", "wait"] | None
    slowdown: float | None
    written_seconds_ago: float
    workers: tuple[Member, ...] = ()


def status(folder: str | Path) -> Status:
    """Read the state of a run; of a comparison, that of its newest run.

    Raises:
        ConfigError: there is no such folder, or it holds no run.
    """
    home = max(run_folders(Path(folder)), key=_changed, default=Path(folder))
    run = _read(home)
    state: Literal["running", "ended", "diverged"] = "running"
    if (home / "summary.json").is_file():
        state = "diverged" if text(run.summary, "diverged") else "ended"
    recent, last = run.steps[-_RECENT - 1 :], run.steps[-1] if run.steps else None
    taken = recent[1:] if len(recent) > _RECENT else recent
    seconds = _mean([step.step_seconds for step in taken])
    waits = _mean([step.exposed_seconds for step in taken])
    start = recent[0].payload_bytes if len(recent) > _RECENT else 0.0
    entry = ((json_lines(home / "workers.jsonl")[0] or [{}])[-1]).get("workers")
    workers: Mapping[str, Any] = entry if isinstance(entry, dict) else {}
    slowest, because, slowdown = slowest_of(workers)
    share = waits / seconds if seconds and waits is not None else None
    if because is None and share is not None and share >= _LONG:
        because = "wait"
    steps, limit = number(run.config, "steps"), number(run.config, "seconds")
    evaluations = [each.loss for each in run.evaluations if math.isfinite(each.loss)]
    return Status(
        folder=str(home),
        strategy=run.strategy,
        task=text(run.config, "task") or text(run.summary, "task"),
        state=state,
        step=0 if last is None else last.step,
        steps=None if steps is None else int(steps),
        seconds=0.0 if last is None else last.seconds,
        limit_seconds=limit,
        loss=None if last is None or not math.isfinite(last.loss) else last.loss,
        eval_loss=evaluations[-1] if evaluations else None,
        seconds_per_step=seconds,
        wait_share=share,
        payload_bytes=None if last is None else last.payload_bytes,
        bytes_per_step=None if last is None else (last.payload_bytes - start) / len(taken),
        members=tuple(workers),
        slowest=slowest,
        because=because,
        slowdown=slowdown,
        written_seconds_ago=max(0.0, time.time() - _changed(home)),
    )


def _read(home: Path) -> Run:
    """Return the run, also where its workers are not connected yet, and only its settings are written."""
    settings = json_object(home / "settings.json")
    if settings is None or (home / "config.json").is_file():
        return read_run(home)
    return Run(home, "", settings, {}, (), (), (), (), ())


def _changed(folder: Path) -> float:
    """Return the time of the last change of a run's folder, in seconds since the epoch."""
    return max((path.stat().st_mtime for path in folder.glob("*.json*")), default=0.0)


def slowest_of(workers: Mapping[str, Facts]) -> tuple[str | None, Literal["data", "compute"] | None, float | None]:
    """Return the worker that is busy much longer than the median one, why, and how many times as long."""
    busy = {
        name: (number(row, "step_seconds") or 0.0) - (number(row, "exposed_seconds") or 0.0)
        for name, row in workers.items()
    }
    if len(busy) < 2:
        return None, None, None
    name = max(busy, key=busy.__getitem__)
    others = median(each for other, each in busy.items() if other != name)
    if others <= 0 or busy[name] < _SLOW * others:
        return None, None, None
    data = {other: number(row, "data_seconds") or 0.0 for other, row in workers.items()}
    longer = data[name] - median(each for other, each in data.items() if other != name)
    because = "data" if longer > 0.5 * (busy[name] - others) else "compute"
    return name, because, busy[name] / others


def _mean(values: list[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else None
