# SPDX-License-Identifier: Apache-2.0
"""Elastic runs of real processes with random faults, while the loop saves and evaluates.

    python -m tests.elastic.chaos [--runs 300] [--seed 0] [--first NUMBER] [--only NUMBER] [--rendezvous URL]

Every run trains a small model on loopback with 2 to 4 workers. By the seed, workers get SIGKILL, SIGSTOP for a while or
SIGTERM (they leave with notice), and others join, at random steps. At least one of the first workers gets no signal but
a short SIGSTOP. With `--rendezvous` they train over a bucket or a folder. There, workers with another model or another
key come too, clocks jump, a share of the requests fails, hangs or succeeds without an answer, objects are not shown at
once, and in half of the runs no worker sees the processes of the others, as on other machines. After each run:

- nothing hangs: all workers end before a deadline;
- every worker ends as it should: those without a fault reach the last step, and an error of another one says why;
- a worker with another model or key is refused;
- all that reach the end have the same model, bit for bit;
- each batch that was assigned in an epoch is in the model, or the sampler lists it as lost;
- the steps of a lost worker that count as used lie between its last average and its next one;
- the last checkpoint that was saved can be read, with the parts of all ranks;
- without a fault the model is that of a serial computation with the same batches.

Each run prints a line. The exit code is 1 if a rule was broken; `--only` repeats one run. Signals are sent when a
worker reports a step, so that a repetition sends the same signals, but not in the same microsecond.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

RECIPES = {
    "AllReduce()": 1,
    "LocalSGD(period=4)": 4,
    "SlowMo(period=5)": 5,
    "DiLoCo(period=4)": 4,
    "LocalSGD(period=3, codec=QSGD(8))": 3,
    "PushSum()": 0,
    "Gossip()": 0,
}
DELAYED, DELAY = "DiLoCo(period=8, delay=3, codec=ErrorFeedback(Nearest(bits=4)))", 3
BUCKET_RECIPES = {
    "LocalSGD(period=4)": 4,
    "SlowMo(period=5)": 5,
    "LocalSGD(period=3, codec=QSGD(8))": 3,
    "DiLoCo(period=4)": 4,
    DELAYED: 8,
    "NoLoCo(period=4)": 4,
}
PERIODS = RECIPES | BUCKET_RECIPES
ARRIVALS = {"join": "", "model": "MismatchError: ", "key": "ConfigError: "}  # and their errors
SHARES = (0.0, 0.01, 0.03)  # of the requests to a bucket that fail, and of the reads that find nothing yet
HANG_SECONDS = 1.5
SILENT_SECONDS = 8.0
STEPS = 40
STEP_SECONDS = 0.012
EPOCH = 37  # batches
TIMEOUT = 10.0
SHORT_TIMEOUT = 4.0  # starting takes a while on a busy machine
DEADLINE = 75.0
LR = 0.05
FORK = multiprocessing.get_context("fork")
LOST = ("PeerLostError", "RunEndedError", "CommTimeoutError")


@dataclass(frozen=True)
class Fault:
    """A signal or a new worker, when a worker reports a step.

    Attributes:
        kind: "kill", "stop", "long stop", "term", "join", or "model" or "key" of a worker that must not join.
        worker: the number of the worker that gets the signal, or that comes.
        at: the number of the worker that is watched.
        step: the step that it has reported.
        delay: seconds after the report.
        seconds: how long a stopped worker stays stopped.
    """

    kind: str
    worker: int
    at: int
    step: int
    delay: float
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What one run does."""

    number: int
    recipe: str
    size: int
    eval_every: int
    save_every: int
    eval_first: bool
    timeout: float
    faults: tuple[Fault, ...]
    share: float = 0.0
    remote: bool = False

    def arrival(self, number: int) -> str:
        """Return the kind of a worker that comes later; "" of one of the first."""
        return next((each.kind for each in self.faults if each.worker == number and each.kind in ARRIVALS), "")


@dataclass
class Log:
    """What one worker has reported, and how it ended."""

    process: Any
    inbox: Connection
    steps: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    saves: list[int] = field(default_factory=list[int])
    last: int = -1
    begins: int = -1
    name: str = ""
    end: dict[str, Any] | None = None
    error: str = ""
    left: bool = False

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self.process.exitcode

    def read(self) -> None:
        """Take in what it has reported."""
        with suppress(EOFError, OSError):
            while self.inbox.poll():
                self._take(**self.inbox.recv())

    def _take(self, **told: Any) -> None:
        if "step" in told:
            self.last = told["step"]
            self.steps[self.last] = (told["batch"][0], told["batch"][1])
        elif "begins" in told:
            self.begins, self.name = told["begins"], told["name"]
        elif "saved" in told:
            self.saves.append(told["saved"])
        self.left |= "left" in told
        self.error = told.get("error", self.error)
        self.end = told.get("end", self.end)


def plan_of(seed: int, number: int, *, bucket: bool = False) -> Plan:
    """Return the plan of a run; the same for the same seed and number."""
    rng = random.Random(f"chaos {seed} {number}")
    size = rng.choice((2, 3, 3, 4))
    recipe = rng.choice(list(BUCKET_RECIPES if bucket else RECIPES))
    kinds: list[str] = []
    if rng.random() > 0.08:
        kinds += ["join"] * rng.choice((0, 1, 1, 2))
        kinds += rng.choices(("kill", "stop", "term", "long stop"), weights=(6, 3, 3, 1), k=rng.choice((0, 1, 1, 2, 2)))
    hurt = rng.sample(range(1, size) if rng.random() < 0.5 else range(size - 1), size - 1)
    faults: list[Fault] = []
    joined = size
    if bucket and kinds:
        kinds += ["model"] * (rng.random() < 0.3) + ["key"] * (rng.random() < 0.2)
    for kind in kinds:
        step, delay = rng.randint(1, STEPS - 12), rng.uniform(0, 2 * STEP_SECONDS)
        if kind in ARRIVALS:
            faults.append(Fault(kind, joined, -1, rng.randint(1, STEPS // 3), delay))
            joined += 1
        elif kind == "stop":
            worker = rng.randrange(joined)
            faults.append(Fault(kind, worker, worker, step, delay, rng.uniform(0.1, 0.7)))
        elif hurt or joined > size:
            # A worker that joins may be hit too, from its first step on.
            worker = hurt.pop() if hurt and (joined == size or rng.random() < 0.7) else joined - 1
            if any(each.worker == worker and each.kind != "stop" and each.kind != "join" for each in faults):
                continue
            faults.append(Fault(kind, worker, worker, step, delay, 2.5 * SHORT_TIMEOUT))
    return Plan(
        number,
        recipe,
        size,
        rng.choice((0, 3, 4, 5)),
        rng.choice((0, 4, 5, 8)),
        rng.random() < 0.3,
        SHORT_TIMEOUT if any(each.kind == "long stop" for each in faults) else TIMEOUT,
        tuple(faults),
        share=rng.choice(SHARES) if bucket else 0.0,
        remote=bucket and rng.random() < 0.5,
    )


# -- a worker ---------------------------------------------------------------------------------------------------


def batch(epoch: int, number: int) -> tuple[Any, Any]:
    """Return the inputs and targets of a batch."""
    import torch

    draw = torch.Generator().manual_seed(1000 * epoch + number)
    x = torch.randn(4, 3, generator=draw)
    return x, x.sum(1, keepdim=True).sin()


def model_of(width: int = 5) -> Any:
    """Return the model before the first step."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))


def vector(model: Any) -> list[str]:
    """Return the parameters as hexadecimal numbers."""
    return [float(x).hex() for p in model.parameters() for x in p.detach().flatten()]


def work(plan: Plan, number: int, out: Connection, folder: Path) -> None:
    """Train as one worker."""
    import torch

    import thinwire
    from thinwire.elastic.notice import Notice
    from thinwire.elastic.sampler import ElasticSampler

    def tell(**fields: Any) -> None:
        out.send(fields)

    torch.set_num_threads(1)
    model = model_of(6 if plan.arrival(number) == "model" else 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    worker = thinwire.attach(model, optimizer, plan.recipe, elastic=True, timeout=plan.timeout)
    assert worker.elastic is not None
    notice = Notice(worker, every=3)
    sampler = ElasticSampler(EPOCH, seed=plan.number)
    tell(begins=worker.step, name=worker.elastic.worker_id)
    rng = random.Random(number)

    def evaluate() -> None:
        if plan.eval_every and worker.step % plan.eval_every == 0:
            with worker.consensus() as agreed, torch.no_grad():
                agreed(torch.ones(1, 3))

    while worker.step < STEPS:
        if plan.eval_first:
            evaluate()
        epoch, which = sampler.assignment(worker)
        step = worker.step
        x, y = batch(epoch, which)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        time.sleep(STEP_SECONDS * rng.uniform(0.5, 1.5))
        optimizer.step()
        tell(step=step, batch=[epoch, which])
        if not plan.eval_first:
            evaluate()
        if plan.save_every and worker.step % plan.save_every == 0:
            alone = worker.elastic.has_just_joined
            worker.save(folder, keep=3)
            if not alone:
                tell(saved=worker.step)
        if notice.leave():
            tell(left=worker.step)
            return
    notice.close()
    with worker.consensus() as agreed:
        found = vector(agreed)
    # The others may have ended just now, which is a loss after the last step.
    known = [crew for crew in worker.elastic.crews() if crew.begins <= worker.step]
    crews = [[crew.begins, list(crew.members), list(crew.left), crew.unused_from] for crew in known]
    lost = [[epoch, which] for epoch, numbers in sampler.lost(worker).items() for which in numbers]
    tell(end={"model": found, "crews": crews, "lost": lost, "dealt": sampler.assignment(worker)})


def fail_requests(seed: int, share: float) -> None:
    """Let a share of this process's requests fail, hang, succeed without an answer, or find nothing yet."""
    module: Any = import_module("thinwire.core.storage.bucket")
    draw, request, get = random.Random(seed), module.Bucket._request, module.Bucket._get
    module._REQUEST_SECONDS = HANG_SECONDS

    async def faulty(bucket: Any, call: Any, nbytes: int) -> Any:
        fault = draw.choice(("before", "after", "slow", "hang")) if draw.random() < share else ""
        if fault == "before":
            call.close()
            raise ConnectionError("500 Internal Server Error")
        if fault == "hang":
            call.close()
            return await request(bucket, asyncio.sleep(3600), 0)
        if fault == "slow":
            await asyncio.sleep(draw.uniform(0.05, 0.5))
        found = await request(bucket, call, nbytes)
        if fault == "after":
            raise ConnectionError("the connection was closed before the answer")
        return found

    async def lagging(bucket: Any, name: str, most: int) -> bytes | None:
        # The check at the start refuses a store that does not show its own writer what it has just written.
        lags = draw.random() < share and not name.startswith(("run", "probe/"))
        return None if lags else await get(bucket, name, most)

    module.Bucket._request, module.Bucket._get = faulty, lagging


def be_elsewhere() -> None:
    """Be a process of another machine to all others, whose end only its heartbeats show."""
    liveness: Any = import_module("thinwire.core.comm.liveness")
    membership: Any = import_module("thinwire.elastic.membership")
    fleet: Any = import_module("thinwire.elastic.fleet")
    entered = fleet.Membership

    def beat_often(*given: Any, **named: Any) -> Any:
        return entered(*given, **{**named, "beat_seconds": 0.2})

    fleet.Membership = beat_often
    liveness._BOOT_ID = Path("/proc/sys/kernel/random/uuid")  # another one at each look
    membership._SILENT_SECONDS, membership._GIVEN_UP_SECONDS = SILENT_SECONDS, SILENT_SECONDS


def worker(plan: Plan, number: int, place: str, out: Connection, folder: Path) -> None:
    """Be the process of one worker."""
    code = 3
    try:
        os.environ |= {"THINWIRE_WORKERS": str(plan.size)}
        if "://" in place:
            from thinwire.core.storage.bucket import new_key

            time.time = random.Random(number).random  # clocks of machines may differ and jump
            os.environ |= {"THINWIRE_RENDEZVOUS": place}
            if plan.arrival(number) == "key":
                os.environ |= {"THINWIRE_KEY": new_key()}
            if number < plan.size:
                os.environ |= {"THINWIRE_RANK": str(number)}
            if plan.share:
                fail_requests(100 * plan.number + number, plan.share)
            if plan.remote:
                be_elsewhere()
        else:
            os.environ |= {
                "THINWIRE_STORE": place,
                "THINWIRE_RUN": f"chaos-{plan.number}-{os.getppid()}-{folder.name}",
                "THINWIRE_RANK": str(number if number < plan.size else 0),
            }
        os.dup2(os.open(folder / f"worker-{number}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
        work(plan, number, out, folder / "checkpoints")
        code = 0
    except BaseException as error:
        traceback.print_exc()
        out.send({"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(code)


# -- a run ---------------------------------------------------------------------------------------------------


class Run:
    """One run: its processes, and the faults that are still to come.

    Args:
        plan: what it does.
        place: the address of the store, or the URL of the run.
        folder: of its logs and checkpoints.
    """

    def __init__(self, plan: Plan, place: str, folder: Path) -> None:
        self.plan, self.place, self.folder = plan, place, folder
        self.logs: dict[int, Log] = {}
        self.done: list[Fault] = []
        self.waiting = list(plan.faults)
        self.armed: list[tuple[float, Fault]] = []
        self.hung: list[int] = []

    def start(self, number: int) -> None:
        """Fork a worker."""
        inbox, out = FORK.Pipe(duplex=False)
        process = FORK.Process(target=worker, args=(self.plan, number, self.place, out, self.folder))
        process.start()
        out.close()
        self.logs[number] = Log(process, inbox)

    def run(self) -> None:
        """Run to the end, and kill what is left at the deadline."""
        deadline = time.monotonic() + DEADLINE * (2 if self.plan.share else 1)
        for number in range(self.plan.size):
            self.start(number)
        try:
            while any(log.code is None for log in self.logs.values()) or self.armed:
                for log in self.logs.values():
                    log.read()
                self.strike()
                if time.monotonic() > deadline:
                    self.hung = [number for number, log in self.logs.items() if log.code is None]
                    return
                time.sleep(0.003)
        finally:
            for log in self.logs.values():
                log.process.kill()
                log.process.join()
                log.read()

    def strike(self) -> None:
        """Inject the faults that are due."""
        now = time.monotonic()
        for fault in list(self.waiting):
            watched = [self.logs[fault.at]] if fault.at in self.logs else list(self.logs.values())
            if fault.at >= 0 and fault.at not in self.logs:
                continue
            # A worker that joins late is hit at one of its own first steps.
            if any(log.last >= fault.step for log in watched):
                self.waiting.remove(fault)
                self.armed.append((now + fault.delay, fault))
        for due, fault in list(self.armed):
            if now < due:
                continue
            self.armed.remove((due, fault))
            if fault.kind in ARRIVALS:
                self.start(fault.worker)
                self.done.append(fault)
                continue
            log = self.logs[fault.worker]
            if log.code is not None or (fault.kind != "continue" and log.end is not None):
                continue
            number = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "continue": signal.SIGCONT}
            os.kill(log.process.pid, number.get(fault.kind, signal.SIGSTOP))
            if fault.kind.endswith("stop"):
                self.armed.append((now + fault.seconds, Fault("continue", fault.worker, 0, 0, 0.0)))
            if fault.kind != "continue":
                self.done.append(fault)

    # -- the rules -----------------------------------------------------------------------------------------------

    def violations(self) -> list[str]:
        """Return the rules that were broken, in words."""
        if self.hung:
            return [f"workers {self.hung} hang after steps {[self.logs[each].last for each in self.hung]}"]
        found: list[str] = []
        hit = {kind: {each.worker for each in self.done if each.kind == kind} for kind in ("kill", "term", "long stop")}
        for number, log in self.logs.items():
            arrival = self.plan.arrival(number)
            if arrival in ("model", "key") and log.begins >= 0:
                found.append(f"worker {number} with another {arrival} was let in")
            if log.end is not None and log.code == 0:
                continue
            joins = number >= self.plan.size
            expected_end = (
                (number in hit["kill"] and log.code == -signal.SIGKILL)
                or (number in hit["term"] and log.left and log.code == 0)
                or (number in hit["long stop"] and log.error.startswith(LOST))
                or (ARRIVALS.get(arrival) and log.error.startswith(ARRIVALS[arrival]))
                # A worker that joins as the run ends comes too late. It is not one that has trained.
                or (joins and log.begins < 0 and log.error.startswith(LOST))
                # SIGTERM ends a process that has no handler any more.
                or (number in hit["term"] and log.code == -signal.SIGTERM and log.last >= STEPS - 1)
            )
            if not expected_end:
                found.append(f"worker {number} ended with {log.code} after step {log.last}: {log.error[:300]}")
        ends = [log for log in self.logs.values() if log.end is not None]
        if not ends:
            return [*found, "nobody reached the last step"]
        if any(log.end["model"] != ends[0].end["model"] for log in ends):  # pyright: ignore[reportOptionalSubscript]
            found.append("the models of workers differ at the end")
        found += self.unused_batches(ends)
        found += self.unreadable(ends)
        if not self.done:
            found += self.recomputed(ends)
        return found

    def unused_batches(self, ends: list[Log]) -> list[str]:
        """Check that every batch is in the model, or listed as lost."""
        found: list[str] = []
        end: dict[str, Any] = ends[0].end or {}
        if any((log.end or {})[key] != end[key] for log in ends for key in ("crews", "lost")):
            found.append("workers list different crews or lost batches")
        period = PERIODS[self.plan.recipe]
        unused_from: dict[str, int] = {}
        crews = end["crews"]
        for before, crew in pairwise(crews):
            for name in {*before[1]} - {*crew[1]} - {*crew[2]}:
                unused_from[name] = crew[3]
        used: set[tuple[int, int]] = set()
        for number, log in self.logs.items():
            limit = STEPS if log.end is not None or log.left else unused_from.get(log.name, 0)
            used |= {which for step, which in log.steps.items() if step < limit}
            if log.name in unused_from and log.end is None and not log.left and log.steps:
                done = log.last + 1
                least, most = self.averaged(log.name, done, crews) if period else (0, done + 1)
                least, most = max(log.begins, least), max(log.begins, most)
                limit = max(limit, log.begins)  # none of the steps of one that has just joined
                if not least <= limit <= most:
                    found.append(f"worker {number}: {done} steps done, and {limit} count as used ({least} to {most})")
                # Its last step may have come through although it could not report it.
                if limit == done + 1:
                    used |= set(self.unreported(log.name, crews, done))
        lost = {(epoch, which) for epoch, which in end["lost"]}
        last_epoch = max(epoch for epoch, _ in used)
        for epoch in range(last_epoch + 1):
            here = {which for e, which in used | lost if e == epoch}
            dealt = set(range(EPOCH)) if epoch < last_epoch else self.dealt_in(epoch, here)
            if missing := sorted(dealt - here):
                found.append(f"epoch {epoch}: batches {missing} were used by nobody and are not listed as lost")
        return found

    def averaged(self, name: str, done: int, crews: list[Any]) -> tuple[int, int]:
        """Return how many steps of a worker are in an average at least, and at most, after `done` reported ones."""
        period, delay = PERIODS[self.plan.recipe], DELAY if self.plan.recipe == DELAYED else 0
        ends = range(0, done + 2, period)
        # When members change, all may take the mean of their parameters in place of the one in flight.
        changes = [begins for begins, members, *_ in crews[1:] if delay and name in members and begins <= done + 1]
        dropped = {end for end in ends for begins in changes if end - delay <= begins <= end + 1}
        least = max(end for end in ends if end == 0 or (end <= done and end not in dropped))
        return max(0, least - delay), max(0, max(ends) - delay, *changes)

    def unreported(self, name: str, crews: list[Any], step: int) -> list[tuple[int, int]]:
        """Return the batch of the step that a lost worker could not report."""
        from types import SimpleNamespace

        from thinwire.elastic.sampler import ElasticSampler, MembershipInterval

        known = [
            MembershipInterval(begins, tuple(members), tuple(left), unused) for begins, members, left, unused in crews
        ]
        known = [crew for crew in known if crew.begins <= step]
        worker: Any = SimpleNamespace(step=step, elastic=SimpleNamespace(crews=lambda: known, worker_id=name))
        return [ElasticSampler(EPOCH, seed=self.plan.number).assignment(worker)]

    def dealt_in(self, epoch: int, here: set[int]) -> set[int]:
        """Return the batches of the last epoch up to the last one that was used or lost."""
        import torch

        draw = torch.Generator().manual_seed(1_000_003 * self.plan.number + epoch)
        order = torch.randperm(EPOCH, generator=draw).tolist()
        return set(order[: max(order.index(which) for which in here) + 1]) if here else set()

    def unreadable(self, ends: list[Log]) -> list[str]:
        """Check that the last checkpoint that a worker has saved can be read."""
        from thinwire.core.storage.rank_file import RankFile
        from thinwire.errors import ThinwireError
        from thinwire.worker import checkpoint

        saves = [log.saves[-1] for log in ends if log.saves]
        if not saves:
            return []
        step = max(saves)
        home = self.folder / "checkpoints" / f"step-{step:08d}"
        try:
            size = int(checkpoint.facts_of(RankFile(home, 0).outline())["size"])
            checkpoint.read_parts(home, range(size), step, size)
        except (ThinwireError, OSError) as error:
            return [f"the checkpoint of step {step} cannot be read: {error}"]
        return []

    def recomputed(self, ends: list[Log]) -> list[str]:
        """Compare the model of a run without faults with a serial computation."""
        import torch

        period = {"AllReduce()": 1, "LocalSGD(period=4)": 4}.get(self.plan.recipe)
        if period is None:
            return []
        models = [model_of() for _ in self.logs]
        for step in range(STEPS):
            for log, model in zip(self.logs.values(), models, strict=True):
                x, y = batch(*log.steps[step])
                model.zero_grad()
                (model(x) - y).square().mean().backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p -= LR * p.grad
            if (step + 1) % period == 0 or step + 1 == STEPS:
                with torch.no_grad():
                    for parts in zip(*(model.parameters() for model in models), strict=True):
                        mean = torch.stack(list(parts)).mean(0)
                        for p in parts:
                            p.copy_(mean)
        mine = torch.tensor([float.fromhex(x) for x in vector(models[0])])
        theirs = torch.tensor([float.fromhex(x) for x in (ends[0].end or {})["model"]])
        far = float((mine - theirs).abs().max())
        return [] if far < 1e-5 else [f"the model is {far:g} away from a serial computation"]


def host(out: Connection) -> None:
    """Host the store of all runs, and tell its port."""
    from thinwire.core.comm.rendezvous import host_store

    store = host_store("127.0.0.1", 0)
    out.send(store.port)
    while os.getppid() != 1:
        time.sleep(0.5)


def run_all(numbers: list[int], seed: int, url: str = "") -> int:
    """Run these runs, print a line for each and a summary; returns the number of runs that broke a rule.

    Args:
        numbers: of the runs.
        seed: of their plans.
        url: of a bucket or a folder; "" for TCP.
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    import torch

    torch.set_num_threads(1)
    # Optimizers import the first when they are made. Workers are forks, which then import nothing.
    for module in (
        "torch._dynamo",
        "thinwire.worker.attach",
        "thinwire.elastic.notice",
        "thinwire.methods.strategies.recipe",
    ):
        import_module(module)
    for recipe in PERIODS:
        import_module("thinwire").parse(recipe)
    if url:
        os.environ |= {"THINWIRE_KEY": import_module("thinwire.core.storage.bucket").new_key()}

    inbox, out = FORK.Pipe(duplex=False)
    hosting = FORK.Process(target=host, args=(out,), daemon=True)
    hosting.start()
    store = f"127.0.0.1:{inbox.recv()}"
    kinds: Counter[str] = Counter()
    broken: list[int] = []
    trained = 0
    begin = time.monotonic()
    try:
        for number in numbers:
            folder = Path(tempfile.mkdtemp(prefix=f"chaos-{number}-"))
            place = f"{url}/{folder.name}" if url else store
            run, start = Run(plan_of(seed, number, bucket=bool(url)), place, folder), time.monotonic()
            run.run()
            problems = run.violations()
            kinds.update(fault.kind for fault in run.done)
            trained += sum(log.begins >= 0 for n, log in run.logs.items() if n >= run.plan.size)
            what = ", ".join(f"{fault.kind} {fault.worker}" for fault in run.done) or "no fault"
            what += f", {run.plan.share:.0%} of requests" * bool(run.plan.share) + ", elsewhere" * run.plan.remote
            state = "ok" if not problems else f"VIOLATION (logs in {folder})"
            print(
                f"run {number}: {run.plan.recipe}, {run.plan.size} workers, {what}: {state} "
                f"{time.monotonic() - start:.1f} s",
                flush=True,
            )
            for problem in problems:
                print(f"    {problem}", flush=True)
            if problems:
                broken.append(number)
            else:
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        hosting.kill()
        hosting.join()
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    print(
        f"{len(numbers)} runs with seed {seed} in {time.monotonic() - begin:.0f} s; faults: {faults or 'none'}; "
        f"{trained} workers joined and trained; {len(broken)} runs with violations{f': {broken}' if broken else ''}"
    )
    return len(broken)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Elastic runs with random faults.")
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first run")
    parser.add_argument("--only", type=int, help="repeat the run of this number")
    parser.add_argument("--rendezvous", default="", help="the URL of a bucket or a folder, for runs over it")
    options = parser.parse_args()
    numbers = list(range(options.first, options.first + options.runs)) if options.only is None else [options.only]
    sys.exit(bool(run_all(numbers, options.seed, options.rendezvous)))


if __name__ == "__main__":
    main()
