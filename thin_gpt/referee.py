# SPDX-License-Identifier: Apache-2.0
"""Runs a racer's workers, keeps the time and the losses, and returns one record per run.

The clock starts when all workers are set up and stops when all have finished. Snapshots are evaluated after the run,
so the clock never stops in between. Bytes, memory and processor time are the kernel's figures.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from thin_gpt import VERSION, worker
from thin_gpt.network import Network, address
from thin_gpt.task import (
    FLEETS,
    LINKS,
    REPLAYED,
    SIZES,
    WORKERS,
    Text,
    load_text,
    loss_of,
    model_of,
    rate_factor,
)

Record = dict[str, Any]
_AHEAD = 2  # batches that a worker holds, so that it never waits for the referee


@dataclass(frozen=True)
class Entry:
    """A racer.

    Args:
        name: in results.
        file: the submission.
        settings: arguments of its class.
        outer: whether its class takes `outer`, a second rate that is tuned.
        period: steps after which its communication repeats.
        replayable: whether equal batches give equal parameters, whatever the timing.
        elastic: it survives a killed worker, which is started again with THIN_GPT_JOINING=1. Its class makes its own
            process group, and has `progress`.
        allow: permissions of the sandbox.
    """

    name: str
    file: str
    settings: dict[str, Any] = field(default_factory=dict)
    outer: bool = False
    period: int = 1
    replayable: bool = True
    elastic: bool = False
    allow: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """One run.

    Args:
        entry: the racer.
        size: of the model.
        track: `LINK/FLEET`; `loopback/equal` runs without namespaces, and no bytes are counted.
        seed: of the initial parameters and the batches.
        rate: base learning rate.
        outer: outer rate, if the racer has one.
        trunk: steps before the decay.
        decay: steps of decay.
        stop: steps after which the run ends, if before that.
        every: steps between snapshots; 0 is none.
        workers: how many.
        audit: count forward and backward passes; slow.
        local: seconds of a step without communication in this sitting; a slow worker's delay is a multiple of it.
        patience: seconds without a report after which the run has failed.
    """

    entry: Entry
    size: str = "6m"
    track: str = "loopback/equal"
    seed: int = 0
    rate: float = 1e-3
    outer: float | None = None
    trunk: int = 2000
    decay: int = 500
    stop: int | None = None
    every: int = 100
    workers: int = WORKERS
    audit: bool = False
    local: float = 0.0
    patience: float = 900.0


def run(plan: Run, text: Text | None = None) -> Record:
    """Run the workers; a failure is in the record as `failed`."""
    with ExitStack() as contexts:
        race = _Race(plan, text or load_text(), contexts)
        try:
            race.drive()
        except _FailedError as error:
            race.record["failed"] = str(error)
        finally:
            race.stop()
        return race.record


class _FailedError(Exception):
    pass


@dataclass
class _Seat:
    """A worker as the referee sees it."""

    process: Any
    pipe: Connection
    done: int = 0  # steps of the run
    mark: int = 0
    ready: bool = False
    handed: int = 0  # batches
    returned: int = 0
    ending: bool = False
    awaited: list[tuple[int, int]] = field(default_factory=list)  # own steps and marks of snapshots
    report: Record = field(default_factory=dict)
    final: bytes = b""
    before: bytes = b""


class _Race:
    def __init__(self, plan: Run, text: Text, contexts: ExitStack) -> None:
        self.plan, self.text, self.size = plan, text, SIZES[plan.size]
        link, _, fleet = plan.track.partition("/")
        self.fleet = FLEETS[fleet]
        self.network = None if link == "loopback" else contexts.enter_context(Network(LINKS[link], plan.workers))
        self.steps = min(plan.trunk + plan.decay, plan.stop or 1 << 60)
        self.seats: list[_Seat] = []
        self.sums: dict[int, tuple[Tensor, int]] = {}
        self.saved: dict[int, dict[int, bytes]] = {}
        self.digests: dict[int, str] = {}
        self.at: dict[int, float] = {}
        self.losses: dict[int, list[float]] = {}
        self.ends: list[float] = []
        self.killed, self.restarted_at, self.lost_claims = False, 0, [0.0] * plan.workers
        self.start = self.cpu = self.memory = 0.0
        self.port = 0
        self.record: Record = {
            "task": VERSION,
            "racer": plan.entry.name,
            "text": text.fingerprint,
            "machine": machine(),
            **{key: value for key, value in asdict(plan).items() if key != "entry"},
        }

    # -- processes -----------------------------------------------------------------------------------------------------

    def seat(self, rank: int, *, resume: int = 0, joining: bool = False) -> _Seat:
        plan = self.plan
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(plan.workers),
            "MASTER_ADDR": address(0) if self.network else "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "GLOO_SOCKET_IFNAME": "eth0" if self.network else "lo",
            "THIN_GPT_JOINING": "1" if joining else "",
            "THIN_GPT_ADDRESS": address(rank) if self.network else "127.0.0.1",
        }
        settings = dict(plan.entry.settings) | ({} if plan.outer is None else {"outer": plan.outer})
        config: Record = {
            "size": plan.size,
            "seed": plan.seed,
            "rate": plan.rate,
            "file": str(Path(plan.entry.file).resolve()),
            "settings": settings,
            "environment": environment,
            "namespace": self.network.namespace(rank) if self.network else "",
            "held": self.text.held_files,
            "allow": plan.entry.allow,
            "elastic": plan.entry.elastic,
            "audit": plan.audit,
            "checkpoints": self.fleet.killed is not None and not plan.entry.elastic,
            "restored": resume > 0,
            "patience": plan.patience,
            "cpu_seconds": 24 * 3600,
        }
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = get_context("forkserver")
        context.set_forkserver_preload(["thin_gpt.worker", "torch._dynamo"])  # optimizers import the latter
        pipe, other = context.Pipe()
        process = context.Process(target=worker.main, args=(other, config), daemon=not plan.entry.allow)
        process.start()
        other.close()
        return _Seat(process, pipe, done=resume, mark=self._next_mark(resume))

    def seat_all(self, resume: int = 0) -> None:
        self.port = _free_port()
        self.seats = [self.seat(rank, resume=resume) for rank in range(self.plan.workers)]
        # Only now: a worker reads its checkpoint when it has met all others.
        for rank, state in self.saved[resume].items() if resume else ():
            self.tell(self.seats[rank], state)

    def stop(self) -> None:
        for seat in self.seats:
            # Its whole group: a racer that may start processes leaves none behind.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(seat.process.pid, 9)
            seat.process.kill()
            seat.process.join()
            seat.pipe.close()
        self.seats = []

    # -- the loop ------------------------------------------------------------------------------------------------------

    def drive(self) -> None:
        self.seat_all()
        self.await_ready()
        self.start, carried = time.monotonic(), self.network.sent() if self.network else []
        self.pump()
        while any(not seat.final for seat in self.seats):
            self.handle_some()
        seconds = time.monotonic() - self.start
        wire = [now - then for now, then in zip(self.network.sent(), carried, strict=True)] if self.network else None
        self.finish(seconds, wire)

    def await_ready(self) -> None:
        while not all(seat.ready for seat in self.seats):
            self.handle_some(pumping=False)

    def handle_some(self, *, pumping: bool = True) -> None:
        by_pipe = {seat.pipe: rank for rank, seat in enumerate(self.seats) if not seat.final}
        ready = wait(list(by_pipe), self.plan.patience)
        if not ready:
            raise _FailedError(f"no worker reported for {self.plan.patience:.0f} s")
        for pipe in ready:
            rank = by_pipe[pipe]  # type: ignore[index]
            if self.seats[rank].pipe is not pipe:
                continue  # the worker has been replaced meanwhile
            try:
                self.handle(rank)
            except (EOFError, ConnectionResetError, BrokenPipeError):
                raise _FailedError(f"worker {rank} ended without a report") from None
        if pumping:
            self.pump()

    def handle(self, rank: int) -> None:
        seat = self.seats[rank]
        report = json.loads(seat.pipe.recv_bytes())
        if "error" in report:
            raise _FailedError(f"worker {rank}: {report['error']}\n" + "\n".join(report["trace"]))
        if "ready" in report:
            seat.ready = True
            if report["progress"]:
                seat.done, seat.mark = report["progress"], self._next_mark(report["progress"])
            self.record["sandbox"] = report["sandbox"]
            return
        seat.report = report
        if "finished" in report:
            self.read_usage(seat)
            seat.before, seat.final = seat.pipe.recv_bytes(), seat.pipe.recv_bytes()
            return
        seat.returned += 1
        seat.done = seat.done + 1 if report["progress"] is None else report["progress"]
        if seat.returned >= self.steps + REPLAYED and seat.done < self.steps:
            raise _FailedError(f"worker {rank} got {seat.returned} batches, and its progress is {seat.done} steps")
        self.losses.setdefault(report["step"], []).append(report["loss"])
        if seat.awaited and seat.awaited[0][0] == report["step"]:
            self.take_snapshot(rank, seat, seat.awaited.pop(0)[1])
        now = time.monotonic() - self.start
        while len(self.ends) < min(seat.done for seat in self.seats if seat.ready):
            self.ends.append(now)
        if self.fleet.killed and not self.killed and rank == self.fleet.killed[0]:
            self.kill_when_due(rank)

    def take_snapshot(self, rank: int, seat: _Seat, mark: int) -> None:
        content = bytearray(seat.pipe.recv_bytes())
        values = torch.frombuffer(content, dtype=torch.float32)
        if mark == REPLAYED:
            # Of each worker: the last bits of a sum depend on the order of arrival.
            self.digests[rank] = hashlib.sha256(content).hexdigest()
        total, count = self.sums.get(mark, (None, 0))
        self.sums[mark] = (values if total is None else total + values, count + 1)
        self.at[mark] = time.monotonic() - self.start
        if self.fleet.killed is not None and not self.plan.entry.elastic:
            self.saved.setdefault(mark, {})[rank] = seat.pipe.recv_bytes()
            if len(self.saved[mark]) == self.plan.workers:
                self.saved = {later: parts for later, parts in self.saved.items() if later >= mark}

    def pump(self) -> None:
        """Hand out batches, and the end."""
        for rank, seat in enumerate(self.seats):
            while seat.ready and (ahead := seat.handed - seat.returned) < _AHEAD and seat.done + ahead < self.steps:
                step = seat.done + ahead
                snapshot = bool(self.plan.every) and step + 1 >= seat.mark
                if snapshot:
                    seat.awaited.append((step, seat.mark))
                    seat.mark = self._next_mark(step + 1)
                slow = self.fleet.slow
                asked = {
                    "step": step,
                    "factor": rate_factor(step, self.plan.trunk, self.plan.decay),
                    "snapshot": snapshot,
                    "sleep": (slow[1] - 1) * self.plan.local if slow and slow[0] == rank else 0.0,
                }
                batch = self.text.batch(self.size, self.plan.seed, rank, step)
                self.tell(seat, json.dumps(asked).encode(), batch)
                seat.handed += 1
            if seat.ready and seat.handed == seat.returned and seat.done >= self.steps and not seat.ending:
                seat.ending = True
                self.tell(seat, b'{"finish": true}')

    def tell(self, seat: _Seat, *parts: bytes) -> None:
        # A worker that has ended is noticed when its report is read.
        with suppress(BrokenPipeError, ConnectionResetError):
            for part in parts:
                seat.pipe.send_bytes(part)

    def _next_mark(self, step: int) -> int:
        every = self.plan.every
        if not every:
            return 1 << 60
        following = (step // every + 1) * every
        # The parameters after the replayed steps identify the run.
        return REPLAYED if step < REPLAYED < min(following, self.steps) else min(following, max(self.steps, step + 1))

    def kill_when_due(self, rank: int) -> None:
        assert self.fleet.killed is not None
        if self.seats[rank].done < self.fleet.killed[1] * self.steps:
            return
        self.killed = True
        if self.plan.entry.elastic:
            lost = self.seats[rank]
            self.count_lost(rank)
            os.killpg(lost.process.pid, 9)
            lost.process.join()
            lost.pipe.close()
            self.seats[rank] = self.seat(rank, joining=True)
        else:
            # As torchrun does: the loss of one ends all, and all start from the last checkpoint.
            for each in range(self.plan.workers):
                self.count_lost(each)
            self.stop()
            whole = [mark for mark, parts in self.saved.items() if len(parts) == self.plan.workers]
            resume = max(whole, default=0)
            self.restarted_at = resume
            self.sums = {mark: each for mark, each in self.sums.items() if mark <= resume}
            self.losses = {step: each for step, each in self.losses.items() if step < resume}
            self.ends = self.ends[:resume]
            self.seat_all(resume)
            self.await_ready()

    # -- what comes of it ----------------------------------------------------------------------------------------------

    def count_lost(self, rank: int) -> None:
        self.read_usage(self.seats[rank])
        self.lost_claims[rank] += self.seats[rank].report.get("sent", 0.0)

    def read_usage(self, seat: _Seat) -> None:
        with suppress(OSError):
            home = Path(f"/proc/{seat.process.pid}")
            fields = (home / "stat").read_text().rpartition(")")[2].split()
            self.cpu += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            peak = next(line for line in (home / "status").read_text().splitlines() if line.startswith("VmHWM"))
            self.memory = max(self.memory, 1024.0 * int(peak.split()[1]))

    def finish(self, seconds: float, wire: list[int] | None) -> None:
        reports = [seat.report for seat in self.seats]
        finals = [torch.frombuffer(bytearray(seat.final), dtype=torch.float32) for seat in self.seats]
        befores = [torch.frombuffer(bytearray(seat.before), dtype=torch.float32) for seat in self.seats]
        scale = max(1e-6, float(finals[0].abs().max()))
        digests = [self.digests[rank] for rank in sorted(self.digests)]
        evaluate = _Evaluation(self)
        self.record |= {
            "seconds": round(seconds, 4),
            "steps": self.steps,
            "step_ends": [round(each, 4) for each in self.ends],
            "training": [round(fmean(self.losses[step]), 5) for step in sorted(self.losses)],
            "curve": [
                [mark, round(evaluate(total / count), 5), round(self.at[mark], 3)]
                for mark, (total, count) in sorted(self.sums.items())
            ],
            "final": round(evaluate(finals[0]), 5),
            "before_finish": round(evaluate(torch.stack(befores).mean(0)), 5),
            "spread": float(max((each - finals[0]).abs().max() for each in finals)) / scale,
            "digest": hashlib.sha256("".join(digests).encode()).hexdigest()[:16] if digests else None,
            "claimed": [report["sent"] + lost for report, lost in zip(reports, self.lost_claims, strict=True)],
            "wire": wire,
            "updates": [report["updates"] for report in reports],
            "forwards": [report["forwards"] for report in reports],
            "passes": [[report["forward"], report["backward"]] for report in reports] if self.plan.audit else None,
            "handed": [seat.handed for seat in self.seats],
            "violations": sorted({each for report in reports for each in report["violations"]}),
            "memory": self.memory,
            "cpu_seconds": round(self.cpu, 2),
            "killed": self.killed,
            "restarted_at": self.restarted_at,
        }


class _Evaluation:
    """Held-out loss of flat parameters."""

    def __init__(self, race: _Race) -> None:
        self.model = model_of(race.size, 0)
        self.tokens = race.text.held_out(race.size)

    @torch.no_grad()
    def __call__(self, values: Tensor) -> float:
        if not bool(values.isfinite().all()):
            return float("inf")
        torch.nn.utils.vector_to_parameters(values, self.model.parameters())
        return fmean(float(loss_of(self.model, part)) for part in self.tokens.split(32))


def machine() -> Record:
    """Where a run is made."""
    return {
        "when": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
        "processor": platform.machine(),
    }


def local_step_seconds(size: str, *, workers: int = WORKERS, steps: int = 12, text: Text | None = None) -> float:
    """Seconds of a step without communication, all workers together: the median after a third of the steps."""
    entry = Entry("local", str(Path(__file__).with_name("racers") / "local.py"))
    done = run(Run(entry, size, trunk=steps, decay=0, every=0, workers=workers), text)
    if "failed" in done:
        raise RuntimeError(f"the step without communication could not be measured: {done['failed']}")
    ends = done["step_ends"][steps // 3 :]
    return median(b - a for a, b in pairwise(ends))


def replay_of(plan: Run) -> Run:
    """The first steps of a run, without a link and with passes counted."""
    steps = min(REPLAYED, plan.trunk + plan.decay)
    return replace(plan, track="loopback/equal", stop=steps, every=steps, audit=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
