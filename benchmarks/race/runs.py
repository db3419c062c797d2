# SPDX-License-Identifier: Apache-2.0
"""One run of the race: a loss curve without a link, or the seconds of a step behind one."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from math import isnan
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.race.racers import (
    AVERAGED_STEPS,
    FEW_BLOCK,
    FEW_STEPS,
    FEW_WARM_STEPS,
    FEWEST_STEPS,
    WARM_STEPS,
    Racer,
)
from reproductions.shared.committed import Fields
from thinwire import ThinwireError
from thinwire.lab.runs import Settings, launch, resolve
from thinwire.lab.runs import load as load_rows
from thinwire.lab.tasks import load

Enough = Callable[[Fields], bool]


class _EnoughError(Exception):
    """Ends a run whose curve is long enough."""


def settings_of(racer: Racer, rate: float, outer: float | None, *, workers: int = 4, **more: Any) -> Settings:
    """The settings of a run; `rate` is a multiple of the task's learning rate for the work's own optimizer.

    Args:
        racer: who runs.
        rate: the multiple.
        outer: the outer rate, if there is one.
        workers: how many.
        more: other settings; `strategy` replaces the recipe.
    """
    work = racer.work
    recipe = more.pop("strategy", racer.recipe)
    recipe = recipe.format(outer=outer) if outer is not None else recipe
    asked = {"task": racer.task, "model": work.model, "strategy": recipe, "workers": workers}
    asked |= {"optimizer": racer.optimizer or work.optimizer, "batch_size": work.batch_size}
    found = resolve({**asked, "threads": 1, "warmup_steps": 20, "eval_limit": work.eval_limit, **more})
    own = resolve({**asked, "optimizer": work.optimizer})
    return replace(found, lr=rate * own.lr)


def curve(settings: Settings, enough: Enough = lambda _: False) -> Fields:
    """The curve of a run: at each evaluation its step, held-out and training loss, payload and seconds.

    Args:
        settings: of the run.
        enough: asked after every evaluation; True ends the run.

    Returns:
        Lists by name; `failed` holds the message of an error that ended the run.
    """
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "run"

        def listen(event: Fields) -> None:
            if event["event"] == "evaluation" and event["step"] and enough(_curve_in(home)):
                raise _EnoughError

        failed: Fields = {}
        try:
            launch(settings, home, listener=listen)
        except _EnoughError:
            pass
        except ThinwireError as error:
            failed = {"failed": str(error)[:300]}
        return {**_curve_in(home), **failed, "made": made(settings)}


def _curve_in(home: Path) -> Fields:
    # A run that failed at its start has written nothing.
    rows = [row for row in load_rows(home) if row.step] if (home / "metrics.jsonl").exists() else []
    losses = [row.loss for row in rows]
    # The evaluation before the first step is the same for all methods.
    marks = [row for row in rows if not isnan(row.eval_loss)]
    steps = [row.step for row in marks]
    return {
        "steps": steps,
        "losses": [round(row.eval_loss, 6) for row in marks],
        "training": [round(fmean(losses[max(0, step - AVERAGED_STEPS) : step]), 6) for step in steps],
        "payload_bytes": [row.payload_bytes for row in marks],
        "seconds": [round(row.seconds, 4) for row in marks],
    }


def steps_timed(racer: Racer, link: str) -> tuple[int, int, int]:
    """Steps before the timed ones, the timed ones, and those of a block."""
    if link == "20mbit" and racer.dense:
        return FEW_WARM_STEPS, FEW_STEPS, FEW_BLOCK
    # Two periods at least, so that there is a spread.
    return WARM_STEPS, max(2, -(-FEWEST_STEPS // racer.period)) * racer.period, racer.period


def step_times(racer: Racer, link: str, workers: int) -> Fields:
    """What a step costs on a link: seconds, bytes, memory, CPU time."""
    warm, timed, block = steps_timed(racer, link)
    # What is in flight at the end is waited for in the last step, which belongs to no block.
    steps = warm + timed + 1
    # No rate changes what a step costs. A form that is only timed may compress too early to train at a real one.
    rate, outer = 1e-3 if racer.timed else 0.5, 0.7 if racer.outer else None
    settings = settings_of(
        racer,
        rate,
        outer,
        workers=workers,
        strategy=racer.timed or racer.recipe,
        steps=steps,
        seed=0,
        eval_every=steps,
        link=None if link == "none" else link,
    )
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "run"
        try:
            summary = launch(settings, home)
        except ThinwireError as error:
            return {"link": link, "workers": workers, "failed": str(error)[:300], "made": made(settings)}
        rows = [row for row in load_rows(home) if row.step]
    ends = range(warm + block - 1, warm + timed, block)
    seconds = [(rows[end].seconds - rows[end - block].seconds) / block for end in ends]
    payload = [(rows[end].payload_bytes - rows[end - block].payload_bytes) / block for end in ends]
    return {
        "link": link,
        "workers": workers,
        "block_steps": block,
        "block_seconds": [round(each, 6) for each in seconds],
        # Some send whole gradients in their first steps.
        "payload_bytes_per_step": median(payload),
        "payload_bytes_of_run": rows[-1].payload_bytes,
        **{name: summary.get(name) for name in _SUMMARY},
        "made": made(settings),
    }


_SUMMARY = (
    "steps",
    "wire_bytes_per_worker_per_step",
    "exposed_seconds_per_step",
    "cpu_seconds_per_worker_per_step",
    "peak_memory_bytes",
)


def made(settings: Settings) -> Fields:
    """When and where, with what."""
    return {
        "when": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "recipe": settings.strategy,
        "lr": settings.lr,
        "data": load(settings.task).fingerprint(),
    }
