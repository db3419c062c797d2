# SPDX-License-Identifier: Apache-2.0
"""How many more steps recipes need for the loss that AllReduce() reaches: the table that `thinwire plan` quotes.

python -m benchmarks.accuracy [--only WORD ...] [--tasks NAME ...] [--seeds N]

Four simulated workers, one thread, real gradients: the numbers are those of a real run, and the same on every machine
with the same version of PyTorch. AllReduce() trains for as many steps as the setting has; its held-out loss there, the
mean of the last three evaluations, is what the others must reach, in at most twice as many steps. All have the
optimizer that the task has for AllReduce(), and each recipe the best of the same four learning rates: half, one, two
and four times the task's. For AllReduce() that is the one with the lowest loss, for the others that with the fewest
steps to AllReduce()'s loss, with a seed apart from those that count. Outer rates are those of the recipe. Data are
divided evenly at random. Each run is written as soon as it has ended, and is not repeated: delete a line to measure it
again.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from math import inf
from statistics import fmean
from typing import Any

import torch

import thinwire
from thinwire import ConfigError, NonFiniteError
from thinwire.core.storage.files import write_atomically
from thinwire.lab import tasks
from thinwire.lab.tasks import text
from thinwire.lab.tasks.models.base import Network, build
from thinwire.lab.tasks.models.gpt import GPT, GPTSize
from thinwire.planning import simulate
from thinwire.planning.plan.candidates import CANDIDATES, DENSE, TABLE
from thinwire.planning.simulate import SimulatedComm
from thinwire.worker.worker import internals_of

WORKERS = 4
AVERAGED = 3
MOST = 2
"""Times the dense run's steps that a recipe may take."""
RATES = (0.5, 1.0, 2.0, 4.0)
"""Multiples of the task's learning rate that each recipe tries."""
TUNING_SEED = 100


@dataclass(frozen=True)
class Setting:
    """What is trained.

    Args:
        task: of `thinwire.lab.tasks`.
        model: in words.
        build: makes the model; None for the task's default.
        optimizer: with the task's settings for it.
        batch_size: examples per worker and step.
        steps: of the dense run.
        every: steps between evaluations.
    """

    task: str
    model: str
    build: Callable[[], Network] | None
    optimizer: str
    batch_size: int
    steps: int
    every: int


SETTINGS = {
    "digits": Setting("digits", "its default model", None, "sgd", 16, 240, 8),
    "text": Setting(
        "text", "a GPT with 2 layers of width 64", lambda: GPT(GPTSize(2, 64, 2), context=64), "adamw", 4, 320, 16
    ),
}


@dataclass(frozen=True)
class Run:
    """What is trained: a recipe on a task, with a seed and a multiple of the task's learning rate."""

    recipe: str
    task: str
    seed: int
    rate: float


def losses(run: Run, *, steps: int, target: float | None = None) -> list[float]:
    """The held-out loss of the consensus model after every few steps; ends early where it has reached the target."""
    setting, seed = SETTINGS[run.task], run.seed
    task = text(context=64, nbytes=1_500_000) if setting.task == "text" else tasks.load(setting.task)
    defaults = task.defaults_for(setting.optimizer)
    shards = task.shards(WORKERS, seed=seed)
    found: list[float] = []

    def work(comm: SimulatedComm) -> None:
        model = task.model(seed=seed) if setting.build is None else build(setting.build, seed=seed)
        settings: dict[str, Any] = {"lr": run.rate * defaults.lr, "weight_decay": defaults.weight_decay}
        kind = torch.optim.AdamW if setting.optimizer == "adamw" else torch.optim.SGD
        if kind is torch.optim.SGD:
            settings["momentum"] = defaults.momentum
        optimizer = kind(model.parameters(), **settings)
        worker = thinwire.attach(model, optimizer, run.recipe, comm=comm, seed=seed)
        while worker.step < steps:
            comm.compute(0.01)
            batch = task.batch(shards[comm.rank], worker.step, batch_size=setting.batch_size, seed=seed, rank=comm.rank)
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()
            if worker.step % setting.every == 0:
                with worker.consensus():
                    if comm.rank == 0:
                        found.append(task.evaluate(model, limit=256).loss)
                # Nobody goes on before rank 0 has its figure, so that all end at the same step.
                comm.all_reduce_(torch.zeros(1)).wait()
                if target is not None and reached(found, target):
                    break
        internals_of(worker).wait_pending()
        worker.detach()

    simulate.run(WORKERS, work, network=simulate.Network(bits_per_second=1e12, latency=1e-6), seed=seed)
    return found


def reached(found: Sequence[float], target: float) -> bool:
    """Whether the mean of the last evaluations is no more than the target."""
    return len(found) >= AVERAGED and fmean(found[-AVERAGED:]) <= target


class Table:
    """What has been measured: a line for each run, which is kept as soon as it is there.

    Args:
        lines: those that there are.
        keep: writes all lines.
    """

    def __init__(self, lines: list[dict[str, Any]], keep: Callable[[list[dict[str, Any]]], None]) -> None:
        self.lines = lines
        self._keep = keep

    def line(self, run: Run) -> dict[str, Any]:
        """The line of a run, which is made if it is missing."""
        for each in self.lines:
            if (each["recipe"], each["task"], each["seed"], each["rate"]) == astuple(run):
                return each
        setting = SETTINGS[run.task]
        target = None if run.recipe == DENSE else self.line(self.best(DENSE, run.task, run.seed))["last_loss"]
        start = time.perf_counter()
        try:
            found = losses(run, steps=setting.steps if target is None else MOST * setting.steps, target=target)
        except NonFiniteError:
            found = []
        last = fmean(found[-AVERAGED:]) if found else None
        line = {
            **asdict(run),
            "target_loss": target,
            "last_loss": last,
            "steps": steps_to(found, last if target is None else target, setting.every),
            "dense_steps": setting.steps,
            "most_steps": MOST * setting.steps,
        }
        self.lines.append(line)
        self._keep(self.lines)
        sys.stdout.write(f"{json.dumps(line)} {time.perf_counter() - start:.0f} s\n")
        sys.stdout.flush()
        return line

    def best(self, recipe: str, task: str, seed: int) -> Run:
        """A recipe's run at the best of its learning rates, which are tried where they have not been."""
        tries = [Run(recipe, task, TUNING_SEED, rate) for rate in RATES]
        return replace(min(tries, key=lambda each: _order(self.line(each), by_steps=recipe != DENSE)), seed=seed)


def _order(line: Mapping[str, Any], *, by_steps: bool) -> tuple[float, float]:
    """Less is better: steps to the loss, and of those that took as many, or did not reach it, the loss at the end."""
    steps, loss = (inf if line[name] is None else line[name] for name in ("steps", "last_loss"))
    return (steps, loss) if by_steps else (loss, steps)


def steps_to(found: Sequence[float], target: float | None, every: int) -> int | None:
    """Steps to the first evaluation at which the mean of three is no more than the target; None if there is none."""
    if target is None:
        return None
    ends = range(AVERAGED, len(found) + 1)
    return next((every * end for end in ends if reached(found[:end], target)), None)


def provenance(runs: Sequence[Mapping[str, Any]]) -> str:
    """How the table was measured, in one sentence."""
    parts = [
        f"{name} ({SETTINGS[name].model}, {SETTINGS[name].optimizer}, {SETTINGS[name].steps} steps of AllReduce(), "
        f"batches of {SETTINGS[name].batch_size}, {len({run['seed'] for run in runs if run['task'] == name})} seeds)"
        for name in dict.fromkeys(run["task"] for run in runs)
    ]
    tried = ", ".join(f"{rate:g}" for rate in RATES)
    return (
        f"measured on {WORKERS} workers with data divided evenly: {' and '.join(parts)}; each recipe at the best of "
        f"{tried} times the task's learning rate, with another seed"
    )


def write(lines: Sequence[Mapping[str, Any]]) -> None:
    """The table, whole."""
    content = {
        "command": "python -m benchmarks.accuracy",
        "provenance": provenance([line for line in lines if line["seed"] != TUNING_SEED]),
        "versions": {"thinwire": thinwire.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "settings": {name: {k: v for k, v in asdict(each).items() if k != "build"} for name, each in SETTINGS.items()},
        "runs": [line for line in lines if line["seed"] != TUNING_SEED],
        "tries": [line for line in lines if line["seed"] == TUNING_SEED],
    }
    write_atomically(TABLE, (json.dumps(content, indent=1) + "\n").encode())


def main() -> None:
    """Measure what the table has not yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="recipes that contain one of these words")
    parser.add_argument("--tasks", nargs="*", default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    content = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    # A table without tries is of another protocol; it is measured anew.
    table = Table([*content["runs"], *content["tries"]] if "tries" in content else [], write)
    for name in asked.tasks:
        for recipe in CANDIDATES:
            if asked.only and not any(word in recipe for word in asked.only):
                continue
            try:
                for seed in range(asked.seeds):
                    table.line(table.best(recipe, name, seed))
            except ConfigError as refusal:
                sys.stdout.write(f"{recipe} on {name}: {refusal}\n")


if __name__ == "__main__":
    main()
