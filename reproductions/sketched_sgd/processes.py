# SPDX-License-Identifier: Apache-2.0
"""A task learned by processes, each behind an interface whose counters see all that leaves it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import torch

from reproductions.dqsgd.thread_runs import Learned
from reproductions.shared.threads import Schedule
from thinwire.lab.emulate import available
from thinwire.lab.runs.comparison import compare
from thinwire.lab.runs.defaults import resolve
from thinwire.lab.runs.folder import Fields
from thinwire.lab.runs.launcher import Listener
from thinwire.lab.tasks import Task
from thinwire.methods.strategies.base import Strategy

LINK = "1gbit"


@dataclass(frozen=True)
class RunOutput:
    """Where runs are kept, and what is called with their progress.

    Args:
        folder: a new one.
        listener: called with the progress of each run.
        begin: called before each run starts.
    """

    folder: Path
    listener: Listener
    begin: Callable[[str], None]


def learned_by_processes(
    task: Task, strategy: Strategy, schedule: Schedule, output: RunOutput, *, workers: int, seeds: int
) -> list[Learned]:
    """What `learned` does, once for each seed from 0 on, with a process for each worker.

    Where the machine can, each has a network namespace and a link of its own; otherwise wire bytes are not known.

    Args:
        task: what is learned, with the model of its default size.
        strategy: how workers communicate.
        schedule: how long and how fast.
        output: where runs are kept.
        workers: how many processes.
        seeds: how often.
    """
    settings = resolve(
        {
            "task": task.name,
            "workers": workers,
            "link": None if available() else LINK,
            "steps": schedule.steps,
            "batch_size": schedule.batch_size,
            "optimizer": "sgd",
            "lr": schedule.lr,
            "momentum": schedule.momentum,
            "weight_decay": schedule.weight_decay,
            "warmup_steps": schedule.steps // 10,
            "eval_every": schedule.steps,
        }
    )
    done = compare(
        replace(settings, eval_limit=None, timeline_steps=0),
        [str(strategy)],
        output.folder,
        rounds=seeds,
        title=f"{task.title}, {workers} processes",
        listener=output.listener,
        begin=lambda recipe, _: output.begin(recipe),
    )
    with torch.device("meta"):
        parameters = sum(p.numel() for p in task.model(seed=0).parameters())
    (summaries,) = done.rounds
    return [_learned(summary, parameters) for summary in summaries]


def _learned(summary: Fields, parameters: int) -> Learned:
    steps: int = summary["steps"]
    if "diverged" in summary:
        return Learned(0.0, inf, inf, max(steps, 1), parameters)  # as bad as can be, as on threads
    wire = summary["wire_bytes_per_worker_per_step"]
    return Learned(
        accuracy=summary["eval_metric"],
        loss=summary["eval_loss"],
        payload_bytes=summary["payload_bytes_per_worker_per_step"] * steps,
        steps=steps,
        parameters=parameters,
        wire_bytes=None if wire is None else wire * steps,
    )
