# SPDX-License-Identifier: Apache-2.0
"""Many models of one kind, trained in five ways, and what each takes.

`python -m reproductions.hfta.training NAME MODELS SECONDS THREADS ROUNDS` lets all ways take turns, each turn
in a process of its own. These are forked from one that has loaded what all of them need, torch's compiler above all,
which the first optimizer of a process would spend seconds on.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from math import inf
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from reproductions.hfta.workloads import Workload, every
from thinwire import ThinwireError, fuse
from thinwire.arrays.fusion import Adam, keep_memory, measuring
from thinwire.lab.emulate import run_workers

Step = Callable[[int], list[float]]
Make = Callable[[Workload, int], list[nn.Module]]
WAYS = {
    "array": "an array",
    "loop": "a loop over models",
    "vmap": "torch.func.vmap",
    "process": "one process after another",
    "processes": "processes at once",
}
WARM_UP = 3
_BATCHES = 8
_TIMEOUT_SECONDS = 240.0


@dataclass(frozen=True)
class Pace:
    """What one way of training took.

    Args:
        models_per_second: steps of single models in a second, of all models together.
        nbytes: the most memory that a process held, in bytes; on a GPU, its tensors there.

    A pace of zero stands for a way that failed, for want of memory or of an operation.
    """

    models_per_second: float
    nbytes: int


# By network, number of models and way, round by round.
Paces = Mapping[str, Mapping[int, Mapping[str, Sequence[Pace]]]]


def ratios(found: Mapping[str, Sequence[Pace]], way: str, other: str) -> list[float]:
    """How many times the pace of another way one has, round by round; infinitely many where that failed."""
    pairs = zip(found[way], found[other], strict=True)
    return [a.models_per_second / b.models_per_second if b.models_per_second else inf for a, b in pairs]


def speedup(found: Mapping[str, Sequence[Pace]], way: str, other: str) -> float:
    """The median of `ratios`."""
    return median(ratios(found, way, other))


def rates(models: int) -> list[float]:
    """Learning rates of the models, from 1e-4 up to 1e-2."""
    return [1e-4 * 100 ** (place / max(1, models - 1)) for place in range(models)]


def made(workload: Workload, models: int) -> list[nn.Module]:
    """Networks of different first parameters, alike in every way of training."""
    found: list[nn.Module] = []
    for seed in range(models):
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())
            found.append(workload.make())
    return found


def array_step(workload: Workload, models: int) -> Step:
    """All models as one array."""
    array = fuse(made(workload, models))
    optimizer = Adam(array.parameters(), lr=rates(models))

    def step(number: int) -> list[float]:
        inputs, targets = workload.batch(number)
        array.zero_grad()
        losses = array.losses(workload.loss, array(*inputs), *targets)
        losses.sum().backward()
        optimizer.step()
        return losses.tolist()

    return step


def loop_step(workload: Workload, models: int, make: Make = made) -> Step:
    """One model after another, with torch's own optimizer each."""
    every = make(workload, models)
    optimizers = [torch.optim.Adam(one.parameters(), lr=lr) for one, lr in zip(every, rates(models), strict=True)]

    def step(number: int) -> list[float]:
        inputs, targets = workload.batch(number)
        losses: list[float] = []
        for model, optimizer in zip(every, optimizers, strict=True):
            optimizer.zero_grad()
            loss = workload.loss(model(*inputs), *targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    return step


def vmap_step(workload: Workload, models: int) -> Step:
    """Torch's own transform over stacked parameters, and its own optimizer on each model's rows."""
    every = made(workload, models)
    parameters, buffers = torch.func.stack_module_state(every)
    stacked, skeleton = list(parameters.values()), every[0]
    rows = [[p.detach()[place].requires_grad_() for p in stacked] for place in range(models)]
    optimizers = [torch.optim.Adam(own, lr=lr) for own, lr in zip(rows, rates(models), strict=True)]

    def one(values: Any, others: Any, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor:
        return workload.loss(torch.func.functional_call(skeleton, (values, others), inputs), *targets)

    mapped = torch.vmap(one, in_dims=(0, 0, None, None))

    def step(number: int) -> list[float]:
        for parameter in stacked:
            parameter.grad = None
        losses = mapped(parameters, buffers, *workload.batch(number))
        losses.sum().backward()
        for place, (own, optimizer) in enumerate(zip(rows, optimizers, strict=True)):
            for row, parameter in zip(own, stacked, strict=True):
                row.grad = None if parameter.grad is None else parameter.grad[place]
            optimizer.step()
        return losses.tolist()

    return step


STEPS = {"array": array_step, "loop": loop_step, "vmap": vmap_step, "process": loop_step}


def in_turns(name: str, models: int, seconds: float, threads: int, rounds: int) -> dict[str, list[Pace]]:
    """What each way took in every round, in which all take turns.

    Args:
        name: of a workload.
        models: how many; "process" trains one, whose pace is that of many in turn.
        seconds: that each way trains for, after a few steps that are not counted.
        threads: of torch; processes that run at once have one each.
        rounds: each goes through the ways in the other direction than the one before.

    Raises:
        ThinwireError: a process failed.
    """
    found: dict[str, list[Pace]] = {way: [] for way in WAYS}

    def keep(_: int, stream: str, line: str) -> None:
        if stream == "stdout" and line.startswith("{"):
            way, pace = json.loads(line).popitem()
            found[way].append(Pace(**pace))

    given = [name, str(models), str(seconds), str(threads), str(rounds)]
    deadline = rounds * len(WAYS) * _TIMEOUT_SECONDS
    exits = run_workers([sys.executable, "-m", __name__, *given], 1, on_line=keep, timeout=deadline)
    if any(each.code for each in exits) or any(len(paces) < rounds for paces in found.values()):
        raise ThinwireError(f"{' '.join(given)}: the process ended without a result")
    return found


def main(arguments: Sequence[str]) -> Iterator[str]:
    """Let all ways take turns; each turn is `{way: pace}` as JSON."""
    name, models, seconds = arguments[0], int(arguments[1]), float(arguments[2])
    threads, rounds = int(arguments[3]), int(arguments[4])
    import_module("torch._dynamo")
    for number in range(rounds):
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            yield json.dumps({way: asdict(forked(partial(measure, name, way, models, seconds, threads)))})


def forked(work: Callable[[], Pace]) -> Pace:
    """What is measured in a process of its own, forked from this one.

    Raises:
        ThinwireError: it failed, or took too long.
    """

    def tell() -> None:
        sender.send_bytes(json.dumps(asdict(work())).encode())

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    other = context.Process(target=tell)
    other.start()
    sender.close()
    try:
        if not receiver.poll(_TIMEOUT_SECONDS):
            raise ThinwireError(f"no result within {_TIMEOUT_SECONDS:g} s")
        pace = Pace(**json.loads(receiver.recv_bytes()))
        other.join(_TIMEOUT_SECONDS)
        return pace
    except EOFError:
        raise ThinwireError("the process ended without a result") from None
    finally:
        other.kill()
        other.join()


def measure(name: str, way: str, models: int, seconds: float, threads: int) -> Pace:
    """Train in this process; arguments as of `in_turns`."""
    torch.set_num_threads(1 if way == "processes" else threads)
    keep_memory()
    workload = cached(every("cpu")[name])
    if way == "processes":
        pace = _at_once(workload, models, seconds)
    else:
        count = 1 if way == "process" else models
        pace = count / seconds_per_step(warmed_up(STEPS[way](workload, count)), seconds)
    return Pace(pace, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def cached(workload: Workload) -> Workload:
    """With a few batches that are made beforehand: reading data is no part of what is compared."""
    batches = [workload.batch(number) for number in range(_BATCHES)]
    return replace(workload, batch=lambda number: batches[number % _BATCHES])


def warmed_up(step: Step) -> Step:
    """Take the first few steps, in which layers are measured."""
    with measuring():
        for number in range(WARM_UP):
            step(number)
    return step


def seconds_per_step(step: Step, seconds: float) -> float:
    """The median of steps taken for so long, three at least."""
    found, end = list[float](), time.perf_counter() + seconds
    while time.perf_counter() < end or len(found) < WARM_UP:
        start = time.perf_counter()
        step(len(found))
        found.append(time.perf_counter() - start)
    return median(found)


def _at_once(workload: Workload, models: int, seconds: float) -> float:
    """Steps per second of processes that begin and end together."""
    context = multiprocessing.get_context("fork")
    barrier, counts = context.Barrier(models), context.Queue()
    work = partial(_beside, workload, seconds, barrier, counts)
    others = [context.Process(target=work) for _ in range(models)]
    for other in others:
        other.start()
    found = [counts.get(timeout=_TIMEOUT_SECONDS) for _ in others]
    for other in others:
        other.join()
    return sum(found)


def _beside(workload: Workload, seconds: float, barrier: Any, counts: Any) -> None:
    step, done = loop_step(workload, 1), 0
    for number in range(WARM_UP):
        step(number)
    barrier.wait(_TIMEOUT_SECONDS)
    start = time.perf_counter()
    while time.perf_counter() < start + seconds or not done:
        step(done)
        done += 1
    counts.put(done / (time.perf_counter() - start))


if __name__ == "__main__":
    for line in main(sys.argv[1:]):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
