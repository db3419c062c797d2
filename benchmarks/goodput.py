# SPDX-License-Identifier: Apache-2.0
"""Goodput of runs whose workers are killed: batches kept over those of the undisturbed run.

    python -m benchmarks.goodput [--only TEXT ...] [--seconds 300] [--undisturbed 60] [--seed 0] [--save NAME]

A contender takes `--undisturbed` + `--seconds` seconds and about 30 more for its two starts, so all eight take about 55
minutes with the defaults; `--only thinwire` picks those whose name contains the text. They run one after the other.
torchft gets an environment of its own (`benchmarks.peers`), once, which takes a minute.

The rule, which was written before any run:

- Four workers, each a process in a network namespace of its own with a link of 100 Mbit; the GPT of 0.5 M parameters on
  `text`, 4 sequences a worker and step, AdamW, a thread a worker. A step has a fixed length of its own, `STEP_SECONDS`:
  forward and backward pass are computed, and the rest of that time is slept before the optimizer's step. So the workers
  do not compete for the processors while they train. What they compete for is the start of processes, which is in the
  times here, as it is elsewhere.
- Contenders, all with the same loop, model and schedule. `thinwire`: `attach(elastic=True)`; who is killed is started
  again at once, and joins. `restart`: the same recipes without `elastic`; when one worker ends, all are ended and
  started again at once, from the newest checkpoint of `worker.save`, which is written after every `SAVE_STEPS` steps to
  a disk that all share, not over the links. No time is taken for a new rendezvous of agents. `torchft`: its `LocalSGD`
  and `DiLoCo` with `sync_every` 8, each worker a replica group; its lighthouse has the settings of its README
  (`min_replicas` 1, `join_timeout_ms` 10000, `quorum_tick_ms` 100); who is killed is started again at once.
- Store and lighthouse are in a process that is not killed, with a link of 1 Gbit. `restart` has neither.
- A batch is *kept* if its gradient is in the model that the run has at the end of the window. Batches of a worker count
  at the average (or all-reduce) that takes them in. Lost are, by that: those of a killed worker since its last average;
  those after the checkpoint from which all were started again; those of an average that failed and was thrown away;
  those that a worker computed before it got the state of the others. Of a worker of `thinwire` that was started again,
  the first batch is never counted, since its step may be the one with which it comes in. A failed average of torchft's
  `LocalSGD` leaves a worker its parameters: its batches count at the next one.
- Schedule: the window is cut into four parts, and in each another worker gets SIGKILL, in an order and at moments
  drawn from `--seed`, each in the first three quarters of its part, so that the recovery is in the window. So each
  worker, the first rank too, is killed once in `--seconds`.
- The window begins when each worker has been in an average, and ends with the first average of each worker after
  `--seconds`. If none comes for `PATIENCE` seconds more, it ends there, and `ended` is false.
- The undisturbed run is a run of its own of the same contender, with its checkpoints, for `--undisturbed` seconds,
  since its rate is steady. Its rate is, summed over the workers, batches between a worker's first and last average
  over the time between them. *Goodput* is the kept batches over that rate times the length of the window.
- Told are goodput, the undisturbed batches in a second, batches kept and lost, and for each kill `recovery_seconds`,
  from the kill to the first average that takes in a batch of each worker as before (of all started again, for the
  killed one after it began again), and `pause_seconds`, the longest time between two kept averages of anybody from the
  kill on to then, less the median of the undisturbed run. Also how many processes ended with an error of their own.
- The bar is 0.88 for `thinwire`. One run each. Figures of `--seconds` other than 300 are trials and are not reported.

Each result is a line of JSON, and of benchmarks/results/survival/NAME.jsonl with `--save NAME`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import fleet
from benchmarks.peers import install, installed, python_of
from thinwire.lab.emulate import Network, WorkerExit, Workers, parse_links
from thinwire.lab.emulate.network import RENDEZVOUS_PORT, address

PERIOD = 8
RECIPES = ("AllReduce()", f"LocalSGD(period={PERIOD})", f"DiLoCo(period={PERIOD})")
CONTENDERS = (
    *(f"thinwire {recipe}" for recipe in RECIPES),
    *(f"restart {recipe}" for recipe in RECIPES),
    "torchft LocalSGD",
    "torchft DiLoCo",
)
WORKERS, BATCH = 4, 4
STEP_SECONDS = 0.25
SAVE_STEPS = 32
START_SECONDS, PATIENCE = 120.0, 60.0
LIGHTHOUSE_PORT = RENDEZVOUS_PORT + 1


# -- the parent --------------------------------------------------------------------------------------------------------


@dataclass
class Line:
    """A worker has taken a step.

    Attributes:
        at: when.
        slot: which worker, from 0; one that is started again has the same.
        step: the number of the step.
        kept: how many of its batches an average has taken in with this step.
    """

    at: float
    slot: int
    step: int
    kept: int


@dataclass
class Watched:
    """What the workers of a run have said so far.

    Attributes:
        kind: of the contender.
        lines: of all workers.
        begun: when the processes of each worker began.
    """

    kind: str
    lines: list[Line] = field(default_factory=list[Line])
    begun: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    _fresh: set[int] = field(default_factory=set[int])

    def read(self, slot: int, stream: str, text: str) -> None:
        """A line of a worker."""
        if not text.startswith("{"):
            if stream == "stderr" and "Error" in text:
                print(f"worker {slot}: {text}", file=sys.stderr)
            return
        said = json.loads(text)
        if "began" in said:
            self.begun.setdefault(slot, []).append(said["began"])
            if self.kind == "thinwire" and len(self.begun[slot]) > 1:
                self._fresh.add(slot)
        elif "loaded" in said:
            for line in self.lines:
                if line.slot == slot and line.step > said["loaded"]:
                    line.kept = 0
        else:
            kept = said["kept"]
            if kept and slot in self._fresh:
                self._fresh.discard(slot)
                kept -= 1
            self.lines.append(Line(said["at"], slot, said["step"], kept))

    def averages(self, slot: int) -> list[float]:
        """When a worker's batches were taken in."""
        return [line.at for line in self.lines if line.slot == slot and line.kept]

    def after(self, moment: float) -> float | None:
        """When each worker has been in an average since then; None if not yet."""
        first = [next((at for at in self.averages(slot) if at > moment), None) for slot in range(WORKERS)]
        there = [at for at in first if at is not None]
        return max(there) if len(there) == WORKERS else None

    def rate(self) -> float:
        """Batches in a second of all workers, from each one's first average to its last."""
        total = 0.0
        for slot in range(WORKERS):
            lines = [line for line in self.lines if line.slot == slot and line.kept]
            total += sum(line.kept for line in lines[1:]) / (lines[-1].at - lines[0].at)
        return total

    def gaps(self, since: float, until: float) -> list[float]:
        """Times between averages of anybody; those that end together count as one."""
        moments = sorted(line.at for line in self.lines if line.kept and since <= line.at <= until)
        return [b - a for a, b in pairwise(moments) if b - a > STEP_SECONDS / 2]


class Job:
    """The processes of a contender.

    Args:
        contender: its name.
        watched: gets what they say.
        link: of each worker.
    """

    def __init__(self, contender: str, watched: Watched, link: str) -> None:
        self.kind, _, self.recipe = contender.partition(" ")
        self.errors = 0
        self._watched = watched
        self._contexts, self._generation = ExitStack(), ExitStack()
        # All but `restart` have one more process, which hosts the store or the lighthouse.
        self._hosts = 0 if self.kind == "restart" else 1
        self._links = [*parse_links("1gbit", self._hosts)] if self._hosts else []
        self._links += parse_links(link, WORKERS)
        python = str(python_of("torchft")) if self.kind == "torchft" else sys.executable
        self._command = [python, "-m", "benchmarks.goodput", "--worker", contender]

    def __enter__(self) -> Job:
        self._network = self._contexts.enter_context(Network(self._links))
        folder = self._contexts.enter_context(tempfile.TemporaryDirectory())
        # The environment of torchft does not know this checkout.
        self._environment = {
            "GOODPUT_FOLDER": folder,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        if self.kind == "thinwire":
            self._environment |= {
                "THINWIRE_STORE": f"{address(0)}:{RENDEZVOUS_PORT}",
                "THINWIRE_WORKERS": str(WORKERS),
            }
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        self._contexts.close()

    def kill(self, slot: int) -> float:
        """SIGKILL to a worker; returns when."""
        now = time.monotonic()
        fleet.kill([self._workers.pids[slot + self._hosts]])
        return now

    def poll(self) -> None:
        """Hand over lines for a moment, and start again who is to be."""
        running = self._workers.poll(0.05)
        if self.kind == "restart" and self._workers.failure is not None:
            self._note(self._workers.failure)
            self._end()
            self._start()
        elif not running:
            raise SystemExit(f"{self.kind} {self.recipe}: all workers have ended")

    def _start(self) -> None:
        workers = Workers(
            self._command,
            WORKERS + self._hosts,
            network=self._network,
            environment=self._environment,
            on_line=lambda rank, stream, text: self._watched.read(rank - self._hosts, stream, text),
            grace_seconds=0.0,
            survives=self.kind != "restart",
            restart=self._note,
        )
        self._workers = self._generation.enter_context(workers)

    def _end(self) -> None:
        fleet.kill({self._workers.pids[rank] for rank in self._workers.running})
        self._workers.poll(0.2)
        self._generation.close()

    def _note(self, ended: WorkerExit) -> float:
        self.errors += ended.signal is None
        return 0.0


def schedule(seconds: float, seed: int) -> list[tuple[float, int]]:
    """When whom is killed, in seconds from the window's begin."""
    draw, part = random.Random(seed), seconds / WORKERS
    order = draw.sample(range(WORKERS), WORKERS)
    return [((number + 0.75 * draw.random()) * part, slot) for number, slot in enumerate(order)]


@dataclass
class Run:
    """A run that has ended: what was said, its window, and the kills with their moments."""

    watched: Watched
    begins: float
    ends: float
    ended: bool
    kills: list[tuple[float, int]]
    errors: int


def run(contender: str, link: str, seconds: float, kills: Sequence[tuple[float, int]]) -> Run:
    """Let a contender train, and kill by schedule."""
    watched = Watched(contender.partition(" ")[0])
    made: list[tuple[float, int]] = []
    with Job(contender, watched, link) as job:

        def until(moment: float, enough: Callable[[], bool] = lambda: False) -> None:
            while time.monotonic() < moment and not enough():
                job.poll()

        until(time.monotonic() + START_SECONDS, lambda: watched.after(0.0) is not None)
        begins = watched.after(0.0)
        if begins is None:
            raise SystemExit(f"{contender}: no average of all workers in {START_SECONDS:g} s")
        for moment, slot in kills:
            until(begins + moment)
            made.append((job.kill(slot), slot))
        until(begins + seconds)
        until(begins + seconds + PATIENCE, lambda: watched.after(begins + seconds) is not None)
        ends = watched.after(begins + seconds)
        return Run(watched, begins, ends or time.monotonic(), ends is not None, made, job.errors)


def recovery(done: Run, killed: float, slot: int) -> float | None:
    """Seconds from a kill to an average with a batch of each worker; None if there was none."""
    # A restart begins all of them anew; elsewhere the killed one.
    slots = range(WORKERS) if done.watched.kind == "restart" else [slot]
    since = [next((at for at in done.watched.begun[each] if at > killed), None) for each in slots]
    begun = [at for at in since if at is not None]
    back = done.watched.after(max(begun)) if len(begun) == len(since) else None
    return None if back is None else back - killed


def measure(contender: str, options: argparse.Namespace) -> dict[str, Any]:
    """The undisturbed run and the one with kills."""
    whole = run(contender, options.link, options.undisturbed, [])
    rate = whole.watched.rate()
    usual = statistics.median(whole.watched.gaps(whole.begins, whole.ends))
    done = run(contender, options.link, options.seconds, schedule(options.seconds, options.seed))
    length = done.ends - done.begins
    lines = [line for line in done.watched.lines if done.begins < line.at <= done.ends]
    kept = sum(line.kept for line in lines)
    recoveries, pauses = list[float | None](), list[float]()
    for killed, slot in done.kills:
        seconds = recovery(done, killed, slot)
        recoveries.append(None if seconds is None else round(seconds, 2))
        # From the last average before the kill on.
        before = max((line.at for line in done.watched.lines if line.kept and line.at < killed), default=killed)
        gaps = done.watched.gaps(before, done.ends if seconds is None else killed + seconds)
        pauses.append(round(max(gaps, default=0.0) - usual, 2))
    return {
        "what": "goodput", "contender": contender, "link": options.link, "seed": options.seed,
        "seconds": round(length, 1), "undisturbed_seconds": round(whole.ends - whole.begins, 1), "ended": done.ended,
        "goodput": round(kept / (rate * length), 4), "undisturbed_batches_per_second": round(rate, 3),
        "kept": kept, "lost": len(lines) - kept, "kills": [slot for _, slot in done.kills],
        "recovery_seconds": recoveries, "pause_seconds": pauses, "errors": done.errors,
    }  # fmt: skip


# -- a worker ----------------------------------------------------------------------------------------------------------


def train(slot: int, recipe: str, *, elastic: bool) -> None:
    """A worker of `thinwire` or of `restart`."""
    import thinwire
    from thinwire.errors import CheckpointError

    folder, trainer = (
        Path(os.environ["GOODPUT_FOLDER"]),
        fleet.Trainer(WORKERS, slot, batch=BATCH, seconds=STEP_SECONDS),
    )
    worker = thinwire.attach(trainer.model, trainer.optimizer, recipe, elastic=elastic, timeout=60)
    period, pending = int(getattr(thinwire.parse(recipe), "period", 1)), 0
    if not elastic:
        # Where none is complete yet, the run begins anew.
        with suppress(CheckpointError):
            worker.load(folder)
        fleet.tell(loaded=worker.step)
    while True:
        trainer.step(worker.step)
        pending += 1
        kept = pending if worker.step % period == 0 else 0
        pending -= kept
        fleet.tell(step=worker.step, kept=kept)
        if not elastic and worker.step % SAVE_STEPS == 0:
            worker.save(folder)


def train_torchft(slot: int, method: str) -> None:
    """A replica group of torchft."""
    import socket

    from benchmarks.peers.base import own_address

    # The namespaces have no names: what it tells the others must be an address.
    own = own_address()
    socket.gethostname = lambda: own
    named = {"lighthouse": f"http://{address(0)}:{LIGHTHOUSE_PORT}", "name": f"worker_{os.environ['RANK']}"}
    trainer = fleet.Trainer(WORKERS, slot, batch=BATCH, seconds=STEP_SECONDS)
    for step, kept in fleet.torchft_steps(trainer, method, PERIOD, **named, address=own):
        fleet.tell(step=step, kept=kept or 0)


def host(kind: str) -> None:
    """The store or the lighthouse."""
    if kind == "torchft":
        _lighthouse = fleet.lighthouse(f"0.0.0.0:{LIGHTHOUSE_PORT}")
    else:
        from thinwire.core.comm.rendezvous import host_store

        _store = host_store(address(0), RENDEZVOUS_PORT)  # lives as long as the object
    signal.pause()


def worker(contender: str) -> None:
    """One of the processes of a contender."""
    kind, _, recipe = contender.partition(" ")
    slot = int(os.environ["RANK"]) - (kind != "restart")
    if slot < 0:
        host(kind)
        return
    fleet.tell(began=time.monotonic())
    if kind == "torchft":
        train_torchft(slot, recipe)
        return
    os.environ["THINWIRE_RANK"] = str(slot)
    train(slot, recipe, elastic=kind == "thinwire")


def main() -> None:
    """Measure what is asked for, or be one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="contenders whose name contains one of these texts")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--undisturbed", type=float, default=60.0)
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return
    for contender in [each for each in CONTENDERS if any(text in each for text in options.only)]:
        if contender.startswith("torchft") and not installed("torchft"):
            install("torchft")
        fleet.keep([measure(contender, options)], options.save)


if __name__ == "__main__":
    main()
