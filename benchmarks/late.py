# SPDX-License-Identifier: Apache-2.0
"""Rounds that close without late workers: how much of the fleet's summed speed is used, and the loss at equal tokens.

    python -m benchmarks.late speed                     about two minutes
    python -m benchmarks.late speed --large             about seven minutes, as root
    python -m benchmarks.late loss [--seeds 0 1 2]      about four minutes a seed
    python -m benchmarks.late loss --large
    python -m benchmarks.late merge                     about half an hour

The rule, which was written before any run:

- Four workers, of which one is five times slower. `DiLoCo(period=32)`, `LateMerging()` with its defaults.
- `speed`: every worker is a process that trains a vector of 65,536 elements over a shared folder. A step lasts 0.05 s,
  and 0.25 s on the slow worker, which sleeps for most of it, so that workers do not compete for cores. The summed speed
  is 3 / 0.05 + 4 = 64 steps a second. The window begins with worker 0's first closed round after 5 s and ends with the
  first one that ends 40 s later. Printed are the steps of all workers in the window, over its seconds and over 64. The
  bar is 0.93. `DiLoCo(period=32)` over the same folder is printed next to it.
- `speed --large`: as `speed`, with the GPT of 6.5 million parameters on `text`, one sequence a worker and step, AdamW,
  and steps of 1 s and 5 s. The summed speed is 3.2 steps a second. The store is SeaweedFS, and each worker is in a
  network namespace with 100 Mbit/s in each direction and a round trip of 1 ms to the store (`benchmarks.nat`).
  Contributions have 4 bits with error feedback. They are sent two steps before the end of a round, and these steps are
  kept: `LateMerging(codec=..., delay=2, carry="full")`. The window begins after 60 s and lasts at least 120 s. The bar
  is 0.93. `DiLoCo(period=32)` with the same codec over the same store is printed next to it.
- `loss`: threads of one process, with the GPT of half a million parameters and the data of `benchmarks.unequal`. The
  state machine closes the rounds of this fleet in virtual time, and `replay` trains with these closings. The equal
  fleet is four workers under `DiLoCo(period=32)` alone, and takes 1,664 batches. The unequal one takes as many whole
  rounds as have no more batches in their means. The loss is of the consensus on the same 256 held-out windows. Printed
  is the unequal fleet's loss over the equal one's, less one, for each seed, and the mean. The bar is 1 %.
- `loss --large`: as `loss`, with the model, the batch and the recipes of `speed --large`, also for the equal fleet. A
  worker's first contribution has 30 batches, since it is sent two steps before the end of its round, and the others
  have 32.
- `merge`: would radial-directional merging be better than the mean? It takes the mean of the contributions' norms times
  the unit vector of the mean of their directions, for each tensor but embeddings, whose mean stays (Decoupled DiLoCo,
  arXiv:2604.21428). The unequal fleet of `loss` is trained with its closings. Outer rates of 0.25, 0.35, 0.5, 0.7 and 1
  are compared on seed 3 with half of the batches. Each contender then trains three seeds at its best rate. The library
  would offer it if its mean loss were at least 0.5 % lower than that of the mean. The run of this rule, before the
  library had it, trained a stacked loop.

Each result is a line of JSON.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

import thinwire
from benchmarks import fleet
from benchmarks.nat import STORE_VARIABLES, NatRig, start_store
from benchmarks.unequal import BATCH, BATCHES, PERIOD, WORKERS, compared, loss_after, loss_of
from thinwire.core.storage.bucket import KEY, new_key
from thinwire.elastic.closing import CloseRule, Closing, Contribution
from thinwire.planning.plan.late import Fleet, simulate

SPEEDS = (1.0, 1.0, 1.0, 5.0)
BASE = f"DiLoCo(period={PERIOD})"
NUMEL = 65_536
CODEC = thinwire.ErrorFeedback(thinwire.Nearest(bits=4))


@dataclass(frozen=True)
class Setting:
    """A fleet whose speed is measured, in seconds.

    Attributes:
        recipe: without late merging.
        late: the options of late merging.
        size: of the model whose loss is measured.
        batch: its sequences a step.
        step: a fast worker's step.
        warm: before the window.
        window: at least so long.
        most: the run fails if it takes longer.
    """

    recipe: str
    late: dict[str, Any]
    size: str
    batch: int
    step: float
    warm: float
    window: float
    most: float


SMALL = Setting(BASE, {}, "0.5m", BATCH, step=0.05, warm=5, window=40, most=150)
LARGE = Setting(
    f"DiLoCo(period={PERIOD}, codec={CODEC})",
    {"codec": CODEC, "delay": 2, "carry": "full"},
    "6m",
    1,
    step=1.0, warm=60, window=120, most=600,
)  # fmt: skip


class Vector:
    """A vector that is trained in steps of a fixed length."""

    def __init__(self, rank: int, seconds: float) -> None:
        self.model = torch.nn.Linear(NUMEL, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)) / NUMEL**0.5
        self._seconds = seconds

    def step(self, _: int) -> None:
        """Train on the worker's one batch."""
        ends = time.monotonic() + self._seconds
        self.optimizer.zero_grad()
        self.model(self._x).square().mean().backward()
        time.sleep(max(0.0, ends - time.monotonic()))
        self.optimizer.step()


def worker(rank: int, url: str, *, late: bool, large: bool) -> None:
    """Train until it is killed; prints when each step has ended."""
    setting = LARGE if large else SMALL
    seconds = setting.step * SPEEDS[rank]
    trainer = (
        fleet.Trainer(WORKERS, rank, size=setting.size, batch=setting.batch, seconds=seconds)
        if large
        else Vector(rank, seconds)
    )
    recipe = BASE if late else setting.recipe
    elastic: Any = thinwire.LateMerging(**setting.late) if late else False
    trained = thinwire.attach(
        trainer.model, trainer.optimizer, recipe, rendezvous=url, workers=WORKERS, elastic=elastic, timeout=600
    )
    for number in count():
        trainer.step(number)
        fleet.tell(step=trained.step)


@contextmanager
def started(*, late: bool, large: bool) -> Generator[list[subprocess.Popen[str]]]:
    """Start the workers, over a folder or behind links to a store."""
    command = [sys.executable, "-m", "benchmarks.late", "worker"] + ["--late"] * late + ["--large"] * large
    environment = {KEY: new_key(), "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url = f"file://{folder}/run"
        rig = None
        if large:
            rig = stack.enter_context(NatRig(WORKERS, up=100e6, down=100e6, delay=0.0005))
            stack.callback(end, [start_store(rig, WORKERS, Path(folder))])
            url = "s3://bucket/run"
            environment |= STORE_VARIABLES
        workers = list[subprocess.Popen[str]]()
        stack.callback(end, workers)
        for rank in range(WORKERS):
            words = [*command, "--url", url, "--rank", str(rank)]
            extra = {**environment, "THINWIRE_RANK": str(rank)}
            if rig is not None:
                workers.append(rig.start(rank, words, extra, stdout=subprocess.PIPE))
            else:
                workers.append(subprocess.Popen(words, env={**os.environ, **extra}, stdout=subprocess.PIPE, text=True))
        yield workers


def end(processes: list[subprocess.Popen[str]]) -> None:
    """Kill processes."""
    for process in processes:
        process.kill()
        process.wait()


def speed(*, late: bool, large: bool) -> dict[str, Any]:
    """How much of the summed speed is used."""
    setting = LARGE if large else SMALL
    steps = fleet.Steps([setting.step * each for each in SPEEDS], PERIOD, setting.warm, setting.window)

    def read(rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            steps.read(rank, "stdout", line)

    with started(late=late, large=large) as processes:
        for rank, process in enumerate(processes):
            threading.Thread(target=read, args=(rank, process), daemon=True).start()
        begun = time.monotonic()
        while steps.seen() is None:
            time.sleep(0.2)
            if time.monotonic() > begun + setting.most or any(each.poll() is not None for each in processes):
                raise SystemExit("the run ended, or took too long")
    options = ", ".join(f"{name}={value}" for name, value in setting.late.items())
    recipe = f"LateMerging({options}), {BASE}" if late else setting.recipe
    return {"what": "speed", "recipe": recipe, **steps.used("steps")}


def closings(setting: Setting, most: int = BATCHES) -> tuple[Closing, ...]:
    """The closings of this fleet in virtual time, while their batches are not more than so many."""
    log: list[Closing] = []
    simulate(Fleet(SPEEDS), CloseRule(), rounds=100, log=log)
    found, batches, known = list[Closing](), 0, set[str]()
    for closing in log:
        if batches + PERIOD * len(closing.contributions) > most:
            break
        taken = list[Contribution]()
        for each in closing.contributions:
            steps = PERIOD - (0 if each.worker in known else setting.late.get("delay", 0))
            taken.append(Contribution(each.started, each.worker[1:], float(steps * setting.batch)))
            known.add(each.worker)
        found.append(Closing(closing.round, tuple(taken)))
        batches += PERIOD * len(taken)
    return tuple(found)


def late_loss(seed: int, setting: Setting, recipe: str = BASE, most: int = BATCHES, **options: Any) -> float:
    """The held-out loss of the unequal fleet."""
    log, url = closings(setting, most), f"memory://{secrets.token_hex(4)}"

    def train(_: int) -> float:
        shared: dict[str, Any] = {"rendezvous": url, "workers": WORKERS, "timeout": 900, "key": ""}
        late = thinwire.LateMerging(replay=log, **setting.late, **options)

        def attach(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> thinwire.Worker:
            return thinwire.attach(model, optimizer, recipe, elastic=late, **shared)

        return loss_after(len(log) * PERIOD, seed, attach, size=setting.size, batch=setting.batch)

    with ThreadPoolExecutor(WORKERS) as pool:
        return max(pool.map(train, range(WORKERS)))


def losses(seed: int, setting: Setting) -> tuple[float, float]:
    """The held-out losses of the equal and of the unequal fleet."""
    equal = loss_of(setting.recipe, seed, PERIOD * WORKERS, size=setting.size, batch=setting.batch)
    return equal, late_loss(seed, setting)


def merges(seeds: Sequence[int]) -> Generator[dict[str, Any]]:
    """A line for each rate that is compared, and for each seed."""
    means = list[float]()
    for merge in ("mean", "radial"):
        found = dict[str, float]()
        for rate in (0.25, 0.35, 0.5, 0.7, 1.0):
            recipe = f"DiLoCo(period={PERIOD}, outer=OuterOptimizer('SGD', lr={rate}, momentum=0.9, nesterov=True))"
            found[recipe] = late_loss(3, SMALL, recipe, BATCHES // 2, merge=merge)
            yield {"what": "rate", "merge": merge, "rate": rate, "loss": round(found[recipe], 4)}
        best = min(found, key=lambda recipe: found[recipe])
        losses = list[float]()
        for seed in seeds:
            losses.append(late_loss(seed, SMALL, best, merge=merge))
            yield {"what": "merge", "merge": merge, "recipe": best, "seed": seed, "loss": round(losses[-1], 4)}
        means.append(statistics.fmean(losses))
    yield {"what": "merge", "difference": round(means[1] / means[0] - 1, 4)}


def main() -> None:
    """Run what is asked for, or be one of its workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["speed", "loss", "merge", "worker"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--url", default="")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "worker":
        worker(options.rank, options.url, late=options.late, large=options.large)
    elif options.what == "speed":
        fleet.keep((speed(late=late, large=options.large) for late in (True, False)), None)
    elif options.what == "merge":
        fleet.keep(merges(options.seeds), None)
    else:
        setting = LARGE if options.large else SMALL
        fleet.keep(compared(options.seeds, lambda seed: losses(seed, setting)), None)


if __name__ == "__main__":
    main()
