# SPDX-License-Identifier: Apache-2.0
"""Rank 0 writes the folder of the run."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from thinwire._version import __version__
from thinwire.integrations.loggers import TensorBoard
from thinwire.lab.emulate import Traffic, parse_links
from thinwire.lab.report.folder import SCHEMA
from thinwire.lab.report.runs import Step, Totals
from thinwire.lab.runs.baselines import Baseline
from thinwire.lab.runs.folder import Fields, RunFolder
from thinwire.lab.runs.recipes import parse_recipe, topology_of
from thinwire.lab.runs.settings import Settings
from thinwire.lab.tasks import Evaluation, Task
from thinwire.methods.topology.analysis import matrices
from thinwire.registry import canonical
from thinwire.worker.times import SlowWorker

# Larger graphs, and longer periods, are no drawing that says anything.
_MOST_DRAWN = 32
_MOST_STEPS = 8
_SCALARS = ("loss", "step_seconds", "exposed_seconds", "payload_bytes")
_WIRE = "interface counters of each worker's namespace, while training"


class Writer:
    """Writes settings, steps, evaluations and the summary to a run's folder.

    Args:
        folder: of the run.
        settings: of the run.
        task: the model's task.
        step: steps done before; what the folder holds of later ones is dropped.
    """

    def __init__(self, folder: RunFolder, settings: Settings, task: Task, step: int) -> None:
        self.folder = folder
        self.settings = settings
        self.task = task
        self.totals = Totals(folder.rewind(step))
        self._scalars = TensorBoard(folder.path / "tensorboard") if settings.tensorboard else None
        self._slow_worker: SlowWorker | None = None

    def write_config(self, parameters: int, paper: str) -> None:
        """Write how the run was set up."""
        content = {
            "schema": SCHEMA,
            "thinwire": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "host": {"cores": os.cpu_count(), "cpu": _processor()},
            **self.settings.to_json(),
            "data": self.task.title,
            "metric": self.task.metric,
            "exposed": _exposed(self.settings),
            "wire": _WIRE if self.settings.link else None,
            "target": "held-out loss of the consensus model, at the first evaluation that reaches it",
            "parameters": parameters,
            "paper": paper,
            "topology": _topology(self.settings),
        }
        self.folder.write("config.json", content)

    def add(self, records: Sequence[Step]) -> None:
        """Append steps."""
        self.totals.add(records)
        self.folder.append("metrics.jsonl", (record.line() for record in records))
        if self._scalars is not None:
            for record in records:
                figures = {f"train/{name}": getattr(record, name) for name in _SCALARS}
                figures |= {f"metrics/{name}": value for name, value in record.metrics.items()}
                self._scalars.log(figures, record.step, flush=record is records[-1])

    def add_workers(self, step: int, workers: Mapping[str, Fields]) -> None:
        """Append the times of each worker in the steps since the last call.

        Args:
            step: steps done.
            workers: by rank, or by the name of an elastic worker; see `worker_times`.
        """
        self.folder.append("workers.jsonl", [{"step": step, "workers": dict(workers)}])

    def add_evaluation(self, line: Fields) -> None:
        """Append an evaluation."""
        self.folder.append("metrics.jsonl", [line])
        if self._scalars is not None:
            figures = {"held_out/loss": line["eval_loss"], "held_out/metric": line["eval_metric"]}
            self._scalars.log(figures, line["step"])

    def add_slow_worker(self, found: SlowWorker | None) -> None:
        """Keep the worker that the others have waited for last."""
        self._slow_worker = found or self._slow_worker

    def add_spans(self, spans: Sequence[Fields]) -> None:
        """Append time intervals."""
        if spans:
            self.folder.append("timeline.jsonl", spans)

    def write_links(self, wire_bytes: Sequence[Traffic | None], payloads: Sequence[float]) -> None:
        """Write the bytes of each worker's link while training; null where they were not measured."""
        links = parse_links(self.settings.link or "none", self.settings.workers)
        rows = [
            {
                "rank": rank,
                "sent_bytes": None if wire is None else wire.sent_bytes,
                "received_bytes": None if wire is None else wire.received_bytes,
                "payload_sent_bytes": payload,
                "bits_per_second": link.bits_per_second,
            }
            for rank, (wire, payload, link) in enumerate(zip(wire_bytes, payloads, links, strict=True))
        ]
        self.folder.write("links.json", rows)

    def write_summary(
        self,
        evaluation: Evaluation | None,
        seconds_to_target: float | None,
        wire_bytes: float | None,
        more: Fields | None = None,
    ) -> Fields:
        """Write the result of the run; the last file to be written.

        Args:
            evaluation: the last one.
            seconds_to_target: training time at which the target was reached, if it was.
            wire_bytes: sent while training, mean over workers; None where not measured.
            more: further entries.
        """
        summary = start_of_summary(self.settings, self.totals)
        steps = summary["steps"]
        summary |= {
            "wire_bytes_per_worker_per_step": wire_bytes / steps if wire_bytes is not None and steps else None,
            "eval_loss": None if evaluation is None else evaluation.loss,
            "eval_metric": None if evaluation is None else evaluation.metric,
            "eval_targets": None if evaluation is None else evaluation.targets,
            "metric": self.task.metric,
            "seconds_to_target": seconds_to_target,
            "slow_worker": None if self._slow_worker is None else asdict(self._slow_worker),
            **(more or {}),
        }
        self.folder.write("summary.json", summary)
        return summary

    def close(self) -> None:
        """Write what is left."""
        if self._scalars is not None:
            self._scalars.close()


def start_of_summary(settings: Settings, totals: Totals) -> Fields:
    """Return what every run's summary has, also that of one that diverged."""
    last = totals.records[-1] if totals.records else None
    return {
        **{name: getattr(settings, name) for name in ("strategy", "seed", "task", "model", "workers", "link")},
        "steps": 0 if last is None else last.step,
        "seconds": 0.0 if last is None else last.seconds,
        **totals.summary(),
        "target_loss": settings.target_loss,
    }


def _exposed(settings: Settings) -> str:
    """Return how exposed time was measured, for config.json."""
    if isinstance(parse_recipe(settings.strategy, imports=False), Baseline):
        return "from the last local gradient to the end of the backward pass, and averages of parameters"
    if settings.device == "cuda":
        return "time the host was blocked in waits for messages; what the GPU waits for counts as computation"
    return "time blocked in waits for messages"


def _topology(settings: Settings) -> Fields | None:
    """Return the graph of the strategy and its mixing matrices, for the report; None where it has none."""
    graph = topology_of(parse_recipe(settings.strategy, imports=False))
    if graph is None or not 1 < settings.copies <= _MOST_DRAWN:
        return None
    return {"name": canonical(graph), "mixing": matrices(graph, settings.copies)[:_MOST_STEPS].round(6).tolist()}


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    rows = path.read_text(errors="replace").splitlines() if path.exists() else []
    names: list[Any] = [row.partition(":")[2].strip() for row in rows if row.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
