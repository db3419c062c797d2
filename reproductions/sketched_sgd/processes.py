# SPDX-License-Identifier: Apache-2.0
"""A task learned by processes, each behind an interface whose counters see all that leaves it."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import torch

from reproductions.dqsgd.thread_runs import Learned
from reproductions.shared.claims import Attempt, emulated
from reproductions.shared.threads import Schedule
from thinwire import Strategy
from thinwire.lab.runs import resolve
from thinwire.lab.runs.folder import Fields
from thinwire.lab.tasks import Task

LINK = "1gbit"


def learned_by_processes(
    attempt: Attempt, name: str, task: Task, strategy: Strategy, schedule: Schedule, *, workers: int, seeds: int
) -> list[Learned]:
    """What `learned` does, once for each seed from 0 on, with a process for each worker.

    Where the machine can, each has a network namespace and a link of its own; otherwise wire bytes are not known.

    Args:
        attempt: keeps the runs.
        name: of their folder.
        task: what is learned, with the model of its default size.
        strategy: how workers communicate.
        schedule: how long and how fast.
        workers: how many processes.
        seeds: how often.
    """
    own = {key: getattr(schedule, key) for key in ("steps", "batch_size", "lr", "momentum", "weight_decay")}
    asked = {"task": task.name, "workers": workers, "link": emulated(LINK), "optimizer": "sgd", **own}
    settings = resolve({**asked, "warmup_steps": schedule.steps // 10, "eval_every": schedule.steps})
    done = attempt.compare(
        name,
        [str(strategy)],
        replace(settings, eval_limit=None, timeline_steps=0),
        rounds=seeds,
        title=f"{task.title}, {workers} processes",
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
