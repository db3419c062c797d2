# SPDX-License-Identifier: Apache-2.0
"""The ways of training in turns on a GPU.

`python -m reproductions.hfta.on_gpu NAME DEVICE SECONDS SIZE:ROUNDS...` prints each turn as JSON. To begin takes longer
there than to train: so one process keeps all ways but the one of processes at once, and these wait for their next turn
too. Both are forked before CUDA is first used, since a forked process cannot use what its parent has begun.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from reproductions.hfta.training import (
    STEPS,
    WARM_UP,
    WAYS,
    Pace,
    Step,
    cached,
    loop_step,
    seconds_per_step,
    warmed_up,
)
from reproductions.hfta.workloads import Workload, every
from thinwire.emulate import run_workers
from thinwire.errors import ThinwireError
from thinwire.fusion import save_autotune_cache

Turn = Callable[[], Pace]
_TIMEOUT_SECONDS = 240.0


def in_turns_on_gpu(
    name: str, rounds: Mapping[int, int], seconds: float, device: str = "cuda"
) -> dict[int, dict[str, list[Pace]]]:
    """What each way took in every round, in which all take turns, by the number of models.

    Args:
        name: of a workload.
        rounds: by the number of models.
        seconds: that each way trains for in each round, after a few steps that are not counted.
        device: "cuda", or for tests "cpu", where no memory is counted.

    Raises:
        ThinwireError: a process failed.
    """
    found: dict[int, dict[str, list[Pace]]] = {size: {way: [] for way in WAYS} for size in rounds}

    def keep(_: int, stream: str, line: str) -> None:
        if stream == "stdout" and line.startswith("{"):
            turn = json.loads(line)
            found[turn["models"]][turn["way"]].append(Pace(**turn["pace"]))

    given = [name, device, str(seconds), *(f"{size}:{count}" for size, count in rounds.items())]
    deadline = sum(rounds.values()) * len(WAYS) * _TIMEOUT_SECONDS
    exits = run_workers([sys.executable, "-m", __name__, *given], 1, on_line=keep, timeout=deadline)
    short = any(len(found[size][way]) < count for size, count in rounds.items() for way in WAYS)
    if any(each.code for each in exits) or short:
        raise ThinwireError(f"{' '.join(given)}: the process ended without a result")
    return found


def main(arguments: Sequence[str]) -> Iterator[str]:
    """Let all ways take turns; each turn is `{"models": .., "way": .., "pace": ..}` as JSON."""
    name, device, seconds = arguments[0], arguments[1], float(arguments[2])
    import_module("torch._dynamo")
    workload = cached(every(device)[name])
    for models, rounds in (map(int, each.split(":")) for each in arguments[3:]):
        own = partial(workload.to, device)
        # One after the other: in their first steps both take more memory than later.
        with _at_once(own, models, seconds) as together, kept(partial(_four_ways, own, models, seconds)) as four:
            for number in range(rounds):
                for way in WAYS if number % 2 == 0 else reversed(WAYS):
                    pace = together() if way == "processes" else four(way)
                    yield json.dumps({"models": models, "way": way, "pace": asdict(pace)})


@contextmanager
def kept(make: Callable[[], Mapping[str, Turn]]) -> Generator[Callable[[str], Pace]]:
    """A forked process that makes all turns once, and takes one whenever it is called with its name.

    Raises:
        ThinwireError: it ended, or took too long.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def serve() -> None:
        turns = make()
        theirs.send_bytes(b"")
        while way := theirs.recv_bytes().decode():
            theirs.send_bytes(json.dumps(asdict(turns[way]())).encode())
        save_autotune_cache()

    other = context.Process(target=serve)
    other.start()
    theirs.close()

    def take(way: str) -> Pace:
        ours.send_bytes(way.encode())
        return _answer(ours, other)

    try:
        _received(ours, other)
        yield take
        ours.send_bytes(b"")
        other.join(_TIMEOUT_SECONDS)
    finally:
        other.kill()
        other.join()


def _answer(ours: Connection, other: BaseProcess) -> Pace:
    return Pace(**json.loads(_received(ours, other)))


def _received(ours: Connection, other: BaseProcess) -> bytes:
    if not wait([ours, other.sentinel], _TIMEOUT_SECONDS):
        raise ThinwireError(f"no result within {_TIMEOUT_SECONDS:g} s")
    try:
        # A process that has ended may have answered before.
        if ours.poll():
            return ours.recv_bytes()
    except EOFError:
        pass
    raise ThinwireError("the process ended without a result")


def _four_ways(own: Callable[[], Workload], models: int, seconds: float) -> dict[str, Turn]:
    """A turn of every way that one process can go."""
    torch.set_num_threads(1)
    workload, turns = cached(own()), dict[str, Turn]()
    for way, make in STEPS.items():
        count, before = 1 if way == "process" else models, torch.cuda.memory_allocated()
        try:
            step = warmed_up(make(workload, count))
        except torch.OutOfMemoryError:
            turns[way] = _no_room
        else:
            turns[way] = partial(_turn, step, count, torch.cuda.memory_allocated() - before, seconds)
        torch.cuda.empty_cache()
    return turns


def _no_room() -> Pace:
    """The turn of a way that needs more memory than there is."""
    return Pace(0.0, torch.cuda.mem_get_info()[1])


def _turn(step: Step, models: int, kept: int, seconds: float) -> Pace:
    """Train for a while; what a way holds between its steps was counted when it was made."""
    for number in range(WARM_UP):
        step(number)
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    pace = models / seconds_per_step(step, seconds)
    nbytes = torch.cuda.max_memory_allocated() - before + kept
    torch.cuda.empty_cache()
    return Pace(pace, nbytes)


@contextmanager
def _at_once(own: Callable[[], Workload], models: int, seconds: float) -> Generator[Callable[[], Pace]]:
    """Processes of a model each, that train together whenever it is called."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(models)
    pipes = [context.Pipe() for _ in range(models)]
    others = [context.Process(target=_one_of_many, args=(own, seconds, barrier, theirs)) for _, theirs in pipes]
    for other in others:
        other.start()
    for _, theirs in pipes:
        theirs.close()

    def take() -> Pace:
        for ours, _ in pipes:
            ours.send_bytes(b"go")
        found = [_answer(ours, other) for (ours, _), other in zip(pipes, others, strict=True)]
        return Pace(sum(pace.models_per_second for pace in found), max(pace.nbytes for pace in found))

    try:
        for (ours, _), other in zip(pipes, others, strict=True):
            _received(ours, other)
        yield take
    finally:
        for other in others:
            other.kill()
        for other in others:
            other.join()


def _one_of_many(own: Callable[[], Workload], seconds: float, barrier: Any, theirs: Connection) -> None:
    torch.set_num_threads(1)
    step = warmed_up(loop_step(cached(own()), 1))
    torch.cuda.empty_cache()
    theirs.send_bytes(b"")
    while theirs.recv_bytes():
        for number in range(WARM_UP):
            step(number)
        barrier.wait(_TIMEOUT_SECONDS)
        start, done = time.perf_counter(), 0
        while time.perf_counter() < start + seconds or not done:
            step(done)
            done += 1
        pace = Pace(done / (time.perf_counter() - start), torch.cuda.max_memory_allocated())
        # Until all have counted, none may make room: that would speed up the others.
        barrier.wait(_TIMEOUT_SECONDS)
        torch.cuda.empty_cache()
        theirs.send_bytes(json.dumps(asdict(pace)).encode())


if __name__ == "__main__":
    for line in main(sys.argv[1:]):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
