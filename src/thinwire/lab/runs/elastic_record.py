# SPDX-License-Identifier: Apache-2.0
"""The record of an elastic run, which its launcher writes from what the workers say."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from statistics import fmean, median
from typing import Any

from thinwire.core.comm.rendezvous import host_store
from thinwire.elastic.late_saves import saved_step
from thinwire.elastic.records import TOKEN
from thinwire.lab.report.runs import Step
from thinwire.lab.runs.folder import Fields, RunFolder
from thinwire.lab.runs.measure import worker_times
from thinwire.lab.runs.own_functions import load_task
from thinwire.lab.runs.recipes import parse_recipe
from thinwire.lab.runs.settings import Settings
from thinwire.lab.runs.writer import Writer
from thinwire.lab.tasks import Evaluation

_TIMES = ("step_seconds", "exposed_seconds")


@contextmanager
def hosted_store(workers: int) -> Generator[dict[str, str]]:
    """Host the store of an elastic run in this process, which outlives every worker; yields the workers' variables."""
    store = host_store("127.0.0.1", 0)
    yield {"THINWIRE_STORE": f"127.0.0.1:{store.port}", "THINWIRE_WORKERS": str(workers), TOKEN: secrets.token_hex(16)}
    del store


class ElasticRecord:
    """Puts the workers' events together: means over those that took each step, views, and the goodput.

    Args:
        folder: of the run.
        settings: of the run.
        listener: called with each step, evaluation and view as a fixed run has them.
        resume: whether the run continues from its checkpoints.
    """

    def __init__(
        self, folder: RunFolder, settings: Settings, listener: Callable[[Fields], None], *, resume: bool = False
    ) -> None:
        self.views: list[Fields] = []
        self.ended = 0
        self.left = 0
        self.restarts: list[Fields] = []
        self._late = settings.late is not None
        self._done = (saved_step(folder.checkpoints) or 0) if resume else 0
        self._writer = Writer(folder, settings, load_task(settings), self._done)
        self._paper, self._listener = parse_recipe(settings.strategy, imports=False).paper, listener
        self._rows: dict[int, dict[str, Fields]] = {}
        self._evaluations: dict[int, Evaluation] = {}
        self._latest: dict[str, int] = {}
        self._origin: float | None = None
        before = self._writer.totals.records[-1:]
        self._payload = before[0].payload_bytes if before else 0.0
        self._before = self._seconds = before[0].seconds if before else 0.0
        self._memory = self._parameters = 0
        self._batches = 0
        self._first_pace: dict[str, list[float]] = {}
        self._costs: dict[str, float] = {}

    def add(self, event: Fields) -> None:
        """Take in one event of a worker."""
        kind = event["event"]
        if kind == "start":
            if not self._parameters:
                self._parameters = event["parameters"]
                self._writer.write_config(self._parameters, self._paper)
                self._listener(event)
        elif kind == "view":
            self._add_view(event)
        elif kind == "rows":
            self._add_rows(event["worker"], event["rows"])
        elif kind == "evaluation":
            self._add_evaluation(event)
        elif kind == "left":
            self.left += 1
        elif kind == "end":
            self.ended += 1
            self._memory = max(self._memory, event["memory"])
            self._costs = {name: max(cost, self._costs.get(name, 0.0)) for name, cost in event["costs"].items()}

    def finish(self) -> Fields:
        """Write what is left, and the summary."""
        self._flush(None)
        last = self._evaluations[max(self._evaluations)] if self._evaluations else None
        more: Fields = {
            "peak_memory_bytes": self._memory,
            "views": self.views,
            "goodput": self.goodput,
            "costs": self._costs,
            "restarts": self.restarts,
        }
        summary = self._writer.write_summary(last, None, None, more)
        self._writer.close()
        return summary

    @property
    def goodput(self) -> float | None:
        """Batches trained on in a second, over those of as many workers as the run began with, undisturbed."""
        if not (self.views and self._first_pace and self._seconds > self._before):
            return None
        if self._late:  # workers do not wait for each other, so that each has a pace of its own
            undisturbed = sum(1 / median(seconds) for seconds in self._first_pace.values())
        else:
            every = [each for seconds in self._first_pace.values() for each in seconds]
            undisturbed = len(self.views[0]["members"]) / median(every)
        return self._batches / (self._seconds - self._before) / undisturbed

    def add_restart(self, event: Fields) -> None:
        """Take in that the launcher starts a worker again."""
        if event["after"] is None:
            self._listener(event)
            return
        since = 0.0 if self._origin is None else time.perf_counter() - self._origin
        self.restarts.append({name: event[name] for name in ("rank", "how")} | {"seconds": since})
        self._listener(event)

    def _add_view(self, event: Fields) -> None:
        if self._late:
            # Each worker notices at a round of its own which workers come and go.
            before = self.views[-1]["members"] if self.views else event["members"]
            if self.views and before == event["members"]:
                return
            joined, lost = (
                [x for x in a if x not in b] for a, b in ((event["members"], before), (before, event["members"]))
            )
            event = {**event, "epoch": len(self.views), "joined": joined, "lost": lost}
        if event["epoch"] in {view["epoch"] for view in self.views}:
            return
        view: Fields = {name: event[name] for name in ("epoch", "step", "members", "joined", "lost", "left")}
        view["seconds"] = 0.0 if self._origin is None else event["at"] - self._origin
        self.views = sorted([*self.views, view], key=lambda each: each["epoch"])
        self._listener({"event": "view", **view})

    def _add_rows(self, worker: str, rows: list[Fields]) -> None:
        if self._origin is None:
            self._origin = rows[0]["end"] - rows[0]["step_seconds"] - self._before
        for row in rows:
            if row["step"] > self._done:  # a worker may have saved in an earlier round than others
                self._rows.setdefault(row["step"], {})[worker] = row
            if len(self.views) == 1:
                self._first_pace.setdefault(worker, []).append(row["step_seconds"])
        self._latest[worker] = rows[-1]["step"]
        members = self.views[-1]["members"] if self.views else []
        if members:
            self._flush(min(self._latest.get(each, 0) for each in members))

    def _flush(self, until: int | None) -> None:
        """Write the steps that all have taken."""
        records: list[Step] = []
        taken: dict[str, list[Fields]] = {}
        for step in sorted(each for each in self._rows if until is None or each <= until):
            by_worker = self._rows.pop(step)
            rows = list(by_worker.values())
            assert self._origin is not None
            self._batches += len(rows)
            self._seconds = max(self._seconds, *(row["end"] - self._origin for row in rows))
            self._payload += fmean(row["sent"] for row in rows)
            for worker, row in by_worker.items():
                taken.setdefault(worker, []).append(row)
            names = {name for row in rows for name in row["metrics"]}
            figures: dict[str, Any] = {
                name: fmean(row[name] for row in rows) for name in ("loss", "step_seconds", "exposed_seconds")
            }
            metrics = {name: fmean(r["metrics"][name] for r in rows if name in r["metrics"]) for name in sorted(names)}
            records.append(Step(step, self._seconds, payload_bytes=self._payload, metrics=metrics, **figures))
        if records:
            self._writer.add(records)
            means = {worker: [fmean(row[name] for row in rows) for name in _TIMES] for worker, rows in taken.items()}
            self._writer.add_workers(records[-1].step, {worker: worker_times(*mean) for worker, mean in means.items()})
            self._listener({"event": "step", **records[-1].line()})

    def _add_evaluation(self, event: Fields) -> None:
        step = event["step"]
        if step in self._evaluations:
            return  # all workers evaluate the same model
        self._evaluations[step] = Evaluation(event["eval_loss"], event["eval_metric"], event["targets"])
        line = {
            "step": step,
            "seconds": 0.0 if self._origin is None else event["at"] - self._origin,
            "payload_bytes": self._payload,
            "eval_loss": event["eval_loss"],
            "eval_metric": event["eval_metric"],
        }
        self._writer.add_evaluation(line)
        self._listener({"event": "evaluation", **line})
