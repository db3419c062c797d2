# SPDX-License-Identifier: Apache-2.0
"""Leader SGD with a slow worker: rounds of a number of steps of each worker, or of all workers together.

python -m benchmarks.leaders [--only WORD ...] [--rates RATE ...] [--rounds N] [--seconds N]

Four workers, each behind a link of 20 Mbit/s where links can be emulated, train a small CNN (on MNIST where
THINWIRE_DATA has it) for the same time. Besides its computation a step sleeps for 20 ms, so that four workers fit on
two cores, and the last worker takes three times as long from a step's beginning to its loss. Each method has the best
of some learning rates, searched with another seed. The mean of the workers is evaluated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

import thinwire
from benchmarks.paired import Row, run_ranks, show, start
from thinwire import Strategy, Worker
from thinwire.lab.emulate import Straggler, available
from thinwire.lab.tasks import Task, load
from thinwire.worker.worker import internals_of

WORKERS = 4
PERIOD = 8
LINK = "20mbit"
SLOW = 3.0
STEP_SECONDS = 0.02
BATCH_SIZE = 16
SEARCH_SEED = 100  # with which learning rates are compared
RATES = (0.005, 0.01, 0.02, 0.04)


@dataclass(frozen=True)
class Contender:
    """A method, and how slow the last worker is.

    Args:
        strategy: the recipe.
        every: steps after which all workers decide together whether the time is up; 0 if each looks at its own clock.
        factor: how many times as long the last worker computes.
    """

    strategy: Strategy
    every: int
    factor: float = SLOW


CONTENDERS = {
    "AllReduce": Contender(thinwire.AllReduce(), 1),
    "LeaderSGD": Contender(thinwire.LeaderSGD(PERIOD, result="mean"), PERIOD),
    "AsyncLeaderSGD": Contender(thinwire.AsyncLeaderSGD(PERIOD, result="mean"), 0),
    "even LeaderSGD": Contender(thinwire.LeaderSGD(PERIOD, result="mean"), PERIOD, factor=1.0),
    "even AsyncLeaderSGD": Contender(thinwire.AsyncLeaderSGD(PERIOD, result="mean"), 0, factor=1.0),
}


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Args:
        names: of the contenders.
        rates: learning rates to try for each.
        rounds: runs of each at its best learning rate.
        seconds: of each run.
    """

    names: tuple[str, ...]
    rates: tuple[float, ...] = RATES
    rounds: int = 3
    seconds: float = 12.0


@dataclass(frozen=True)
class Run:
    """One run, as one worker measured it.

    Attributes:
        loss: of the workers' mean, on held-out data; infinite where it diverged.
        steps: that this worker took.
        seconds: until the barrier at the end.
    """

    loss: float
    steps: int
    seconds: float


@dataclass(frozen=True)
class Tuned:
    """A method at its best learning rate.

    Attributes:
        tried: learning rates, each with its loss in the search.
        runs: at the best, one for each of the other seeds.
    """

    tried: list[tuple[float, float]]
    runs: list[Run]

    @property
    def rate(self) -> float:
        """The learning rate that was best."""
        return min(self.tried, key=lambda each: each[1])[0]


class Clock:
    """Decides when a worker takes no further step."""

    def __init__(self, seconds: float, every: int) -> None:
        self._seconds, self._every = seconds, every
        self._begin = self._decided = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds of training."""
        return time.perf_counter() - self._begin

    def has_time(self, step: int) -> bool:
        """Whether there is time for a step of this worker, or for half of the next `every` steps of all."""
        if not self._every:
            return self.elapsed < self._seconds
        if step % self._every:
            return True
        lasted, self._decided = time.perf_counter() - self._decided, time.perf_counter()
        late = torch.tensor(float(self.elapsed + lasted / 2 > self._seconds))
        dist.all_reduce(late)
        return not late.item()


def train(task: Task, contender: Contender, *, lr: float, seed: int, seconds: float) -> Run:
    """One run of one method."""
    rank = dist.get_rank()
    model = task.model("cnn", seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    worker = thinwire.attach(model, optimizer, contender.strategy, seed=seed)
    straggler = Straggler(factor=contender.factor if rank == WORKERS - 1 else 1.0, rank=rank)
    shard = task.shards(WORKERS, split="iid", seed=seed)[rank]
    dist.barrier()
    clock = Clock(seconds, contender.every)
    while clock.has_time(worker.step):
        begin = time.perf_counter()
        batch = task.batch(shard, worker.step, batch_size=BATCH_SIZE, seed=seed, rank=rank)
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        time.sleep(STEP_SECONDS)
        straggler.pause(worker.step, time.perf_counter() - begin)
        loss.backward()
        worker.record_batch(loss=loss)
        optimizer.step()
    internals_of(worker).wait_pending()
    dist.barrier()
    taken = clock.elapsed
    return Run(held_out(task, worker), worker.step, taken)


def held_out(task: Task, worker: Worker) -> float:
    """The loss of the consensus model, the same on all ranks."""
    found = torch.zeros(1, dtype=torch.float64)
    with worker.consensus() as model:
        if dist.get_rank() == 0:
            found += task.evaluate(model, limit=1024).loss
        dist.broadcast(found, 0)
    worker.detach()
    return found.nan_to_num(nan=float("inf")).item()


def tuned(task: Task, contender: Contender, settings: Settings) -> Tuned:
    """Search for the learning rate, then run as often as the settings say."""
    tried = [
        (lr, train(task, contender, lr=lr, seed=SEARCH_SEED, seconds=settings.seconds).loss) for lr in settings.rates
    ]
    lr = Tuned(tried, []).rate
    return Tuned(
        tried, [train(task, contender, lr=lr, seed=seed, seconds=settings.seconds) for seed in range(settings.rounds)]
    )


def work(settings: Settings) -> None:
    """As one of several workers: run all contenders, and write the results as a line of JSON."""
    start()
    task = load("mnist" if os.environ.get("THINWIRE_DATA") else "digits")
    found = {name: asdict(tuned(task, CONTENDERS[name], settings)) for name in settings.names}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


def measured(settings: Settings) -> list[dict[str, Tuned]]:
    """The results of every worker, by contender."""
    found = run_ranks("leaders", WORKERS, "work", json.dumps(asdict(settings)), link=None if available() else LINK)
    return [{name: tuned_from(each) for name, each in rank.items()} for rank in found]


def tuned_from(values: dict[str, Any]) -> Tuned:
    """Read back what a worker wrote."""
    return Tuned([(lr, loss) for lr, loss in values["tried"]], [Run(**run) for run in values["runs"]])


def rows(found: Sequence[dict[str, Tuned]]) -> Iterator[Row]:
    """The whole table, line by line."""
    yield ("method", "held-out loss", "extremes", "learning rate", "steps of a fast worker", "of the last", "seconds")
    yield ("---",) * 7
    for name, mine in found[0].items():
        losses, last = [run.loss for run in mine.runs], found[-1][name].runs
        yield (
            name,
            f"{statistics.fmean(losses):.4f}",
            f"{min(losses):.4f} to {max(losses):.4f}",
            f"{mine.rate:g} (tried {', '.join(f'{lr:g}: {loss:.3f}' for lr, loss in mine.tried)})",
            f"{statistics.fmean(run.steps for each in found[:-1] for run in each[name].runs):.0f}",
            f"{statistics.fmean(run.steps for run in last):.0f}",
            f"{statistics.fmean(run.seconds for run in last):.2f}",
        )


def main(arguments: Sequence[str]) -> None:
    """Print a Markdown table, or be one worker."""
    if arguments[:1] == ["work"]:
        work(Settings(**json.loads(arguments[1])))
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.leaders", description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS), help="these alone")
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="learning rates tried for each")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is run at the best rate")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each run")
    given = parser.parse_args(arguments)
    settings = Settings(tuple(given.only), tuple(given.rates), given.rounds, given.seconds)
    print(f"links: {available() or LINK}\n")
    show(*rows(measured(settings)))


if __name__ == "__main__":
    main(sys.argv[1:])
