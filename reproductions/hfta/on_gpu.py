# SPDX-License-Identifier: Apache-2.0
"""The ways of training in turns on a GPU.

`python -m reproductions.hfta.on_gpu DEVICE SECONDS NAME:SIZE:ROUNDS...` prints each turn as JSON. To begin takes longer
on a GPU than to train, so processes stay: one goes all ways but that of processes at once, and these wait for their
turn too. They are started afresh, since CUDA may not be used in a process that was forked.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from reproductions.hfta.training import STEPS, WAYS, Pace, Step, cached, loop_step, seconds_per_step, warmed_up
from reproductions.hfta.workloads import Workload, every
from thinwire import ThinwireError
from thinwire.lab.emulate import run_workers

Rounds = Mapping[str, Mapping[int, int]]
Found = dict[str, dict[int, dict[str, list[Pace]]]]
_TIMEOUT_SECONDS = 240.0
# Of what a process that failed has written.
_LINES = 30
# Until processes that train at once have all been told to.
_AHEAD_SECONDS = 0.2


def in_turns_on_gpu(rounds: Rounds, seconds: float, device: str = "cuda") -> Found:
    """What each way took in every round, in which all take turns: by workload, number of models and way.

    Args:
        rounds: by workload and number of models.
        seconds: that each way trains for in each round, after a few steps that are not counted.
        device: "cuda", or for tests "cpu", where no memory is counted.

    Raises:
        ThinwireError: a process failed.
    """
    found = {name: {size: {way: list[Pace]() for way in WAYS} for size in sizes} for name, sizes in rounds.items()}
    errors: list[str] = []

    def keep(_: int, stream: str, line: str) -> None:
        if stream == "stderr":
            errors.append(line)
        elif line.startswith("{"):
            turn = json.loads(line)
            found[turn["name"]][turn["models"]][turn["way"]].append(Pace(**turn["pace"]))

    jobs = {(name, size): count for name, sizes in rounds.items() for size, count in sizes.items()}
    # The most models first: these are judged.
    given = [f"{name}:{size}:{jobs[name, size]}" for name, size in sorted(jobs, key=lambda job: -job[1])]
    command = [sys.executable, "-m", __name__, device, str(seconds), *given]
    exits = run_workers(command, 1, on_line=keep, timeout=sum(jobs.values()) * len(WAYS) * _TIMEOUT_SECONDS)
    missing = any(len(found[name][size][way]) < count for (name, size), count in jobs.items() for way in WAYS)
    if any(each.code for each in exits) or missing:
        raise ThinwireError("\n".join([f"{' '.join(given)}: the process ended without a result", *errors[-_LINES:]]))
    if errors:
        # Why a way failed, which the result counts as infinitely slow, is told where the study is started.
        sys.stderr.write("\n".join([*errors[-_LINES:], ""]))
    return found


def main(arguments: Sequence[str]) -> Iterator[str]:
    """Let all ways take turns; each turn is `{"name": .., "models": .., "way": .., "pace": ..}` as JSON."""
    device, seconds = arguments[0], float(arguments[1])
    jobs = [(name, int(size), int(rounds)) for name, size, rounds in (job.split(":") for job in arguments[2:])]
    with ExitStack() as stack:
        four = stack.enter_context(stays(partial(_Four, seconds, device)))
        many = [stack.enter_context(stays(partial(_One, seconds, device))) for _ in range(max(job[1] for job in jobs))]
        for name, models, rounds in jobs:
            # One after the other: in their first steps both take more memory than later.
            for each in many[:models]:
                each.begin("make", name)
            for each in many[:models]:
                each.end()
            four.call("make", name, models)
            for number in range(rounds):
                for way in WAYS if number % 2 == 0 else reversed(WAYS):
                    pace = _at_once(many[:models]) if way == "processes" else Pace(**four.call("turn", way))
                    yield json.dumps({"name": name, "models": models, "way": way, "pace": asdict(pace)})


# -- processes that stay -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Staying:
    """A process that stays, and does what it is told by the name of a method."""

    pipe: Connection
    process: BaseProcess

    def begin(self, method: str, *given: Any) -> None:
        """Tell it to do something."""
        self.pipe.send_bytes(json.dumps([method, *given]).encode())

    def end(self, seconds: float = _TIMEOUT_SECONDS) -> Any:
        """What the method has returned.

        Raises:
            ThinwireError: it ended, or took too long.
        """
        if not wait([self.pipe, self.process.sentinel], seconds):
            raise ThinwireError(f"no result within {seconds:g} s")
        try:
            # A process that has ended may have answered before.
            if self.pipe.poll():
                return json.loads(self.pipe.recv_bytes())
        except EOFError:
            pass
        raise ThinwireError("the process ended without a result")

    def call(self, method: str, *given: Any) -> Any:
        """Both."""
        self.begin(method, *given)
        return self.end()


@contextmanager
def stays(make: Callable[[], Any]) -> Generator[Staying]:
    """A new process that makes an object and calls its methods; killed in the end."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(target=_serve, args=(make, theirs))
    other.start()
    theirs.close()
    try:
        yield Staying(ours, other)
    finally:
        other.kill()
        other.join()
        ours.close()


def _serve(make: Callable[[], Any], theirs: Connection) -> None:
    torch.set_num_threads(1)
    made = make()
    while True:
        method, *given = json.loads(theirs.recv_bytes())
        theirs.send_bytes(json.dumps(getattr(made, method)(*given)).encode())


def _at_once(several: Sequence[Staying]) -> Pace:
    start = time.monotonic() + _AHEAD_SECONDS
    for each in several:
        each.begin("turn", start)
    found = [Pace(**each.end()) for each in several]
    # Until all have counted, none may make room: that would speed up the others.
    for each in several:
        each.call("rest")
    return Pace(sum(pace.models_per_second for pace in found), max(pace.nbytes for pace in found))


# -- what they do ------------------------------------------------------------------------------------------------------


def _on(device: str, name: str) -> Workload:
    return cached(cached(every(device)[name]).to(device))


class _Four:
    """All ways that one process can go."""

    def __init__(self, seconds: float, device: str) -> None:
        self._seconds, self._device = seconds, device
        self._turns: dict[str, Callable[[], Pace]] = {}

    def make(self, name: str, models: int) -> None:
        """Every way of training so many models; what was made before is given up."""
        self._turns.clear()
        gc.collect()
        workload = _on(self._device, name)
        for way, make in STEPS.items():
            count, before = 1 if way == "process" else models, torch.cuda.memory_allocated()
            try:
                step = warmed_up(make(workload, count))
            except Exception:
                if way in ("array", "process"):
                    raise  # without these there is nothing to judge
                traceback.print_exc()
                self._turns[way] = _cannot
            else:
                kept = torch.cuda.memory_allocated() - before
                self._turns[way] = partial(_turn, step, count, kept, self._seconds)
            torch.cuda.empty_cache()

    def turn(self, way: str) -> dict[str, Any]:
        """One turn."""
        return asdict(self._turns[way]())


def _turn(step: Step, models: int, kept: int, seconds: float) -> Pace:
    """Train for a while; what a way holds between its steps was counted when it was made."""
    step(0)
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    pace = models / seconds_per_step(step, seconds)
    nbytes = torch.cuda.max_memory_allocated() - before + kept
    torch.cuda.empty_cache()
    return Pace(pace, nbytes)


def _cannot() -> Pace:
    """The turn of a way that failed, for want of memory or of an operation."""
    return Pace(0.0, 0)


class _One:
    """One of many processes that train a model each."""

    def __init__(self, seconds: float, device: str) -> None:
        self._seconds, self._device = seconds, device
        self._step: Step | None = None

    def make(self, name: str) -> None:
        """The model; what was made before is given up."""
        self._step = None
        self.rest()
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        self._step = warmed_up(loop_step(_on(self._device, name), 1))
        self.rest()

    def turn(self, start: float) -> dict[str, Any]:
        """Train from one moment on, for a while."""
        assert self._step is not None
        self._step(0)
        time.sleep(max(0.0, start - time.monotonic()))
        begun, done = time.perf_counter(), 0
        while time.perf_counter() < begun + self._seconds or not done:
            self._step(done)
            done += 1
        return asdict(Pace(done / (time.perf_counter() - begun), torch.cuda.max_memory_allocated()))

    def rest(self) -> None:
        """Make room for others."""
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    for line in main(sys.argv[1:]):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
