# SPDX-License-Identifier: Apache-2.0
"""How many more steps recipes need for the loss that AllReduce() reaches: the table that `thinwire plan` quotes.

python -m benchmarks.accuracy [--only WORD ...] [--tasks NAME ...] [--seeds N]

Four simulated workers, one thread, real gradients: the numbers are those of a real run, and the same on every machine
with the same version of PyTorch. AllReduce() trains for as many steps as the setting has; its held-out loss there, the
mean of the last three evaluations, is what the others must reach, in at most twice as many steps. All have the
optimizer and the learning rate that the task has for AllReduce(): nothing is tuned for a recipe. Data are divided
evenly at random. Each run is written as soon as it has ended, and is not repeated: delete a line to measure it again.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch

import thinwire
from thinwire import simulate, tasks
from thinwire.errors import ConfigError
from thinwire.plan.candidates import CANDIDATES, TABLE
from thinwire.simulate import SimulatedComm
from thinwire.storage.files import write_atomically
from thinwire.tasks.language import text
from thinwire.tasks.models.base import Network, build
from thinwire.tasks.models.gpt import GPT, GPTSize

WORKERS = 4
AVERAGED = 3
MOST = 2
"""Times the dense run's steps that a recipe may take."""


@dataclass(frozen=True)
class Setting:
    """What is trained.

    Args:
        task: of `thinwire.tasks`.
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
        "text", "a GPT with 2 layers of width 64", lambda: GPT(GPTSize(2, 64, 2), context=64), "adamw", 8, 320, 16
    ),
}


def losses(setting: Setting, recipe: str, seed: int, *, steps: int, target: float | None = None) -> list[float]:
    """The held-out loss of the consensus model after every few steps; ends early where it has reached the target."""
    task = text(context=64, nbytes=1_500_000) if setting.task == "text" else tasks.load(setting.task)
    defaults = task.defaults_for(setting.optimizer)
    shards = task.shards(WORKERS, seed=seed)
    found: list[float] = []

    def work(comm: SimulatedComm) -> None:
        model = task.model(seed=seed) if setting.build is None else build(setting.build, seed=seed)
        settings: dict[str, Any] = {"lr": defaults.lr, "weight_decay": defaults.weight_decay}
        kind = torch.optim.AdamW if setting.optimizer == "adamw" else torch.optim.SGD
        if kind is torch.optim.SGD:
            settings["momentum"] = defaults.momentum
        optimizer = kind(model.parameters(), **settings)
        worker = thinwire.attach(model, optimizer, recipe, comm=comm, seed=seed)
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
        worker.wait_pending()
        worker.detach()

    simulate.run(WORKERS, work, network=simulate.Network(bits_per_second=1e12, latency=1e-6), seed=seed)
    return found


def reached(found: Sequence[float], target: float) -> bool:
    """Whether the mean of the last evaluations is no more than the target."""
    return len(found) >= AVERAGED and fmean(found[-AVERAGED:]) <= target


def measure(name: str, recipe: str, seed: int, dense: dict[tuple[str, int], float]) -> dict[str, Any]:
    """One run, as a line of the table."""
    setting = SETTINGS[name]
    if (name, seed) not in dense:
        dense[name, seed] = fmean(losses(setting, "AllReduce()", seed, steps=setting.steps)[-AVERAGED:])
    target, most = dense[name, seed], MOST * setting.steps
    found = losses(setting, recipe, seed, steps=most, target=target)
    steps = len(found) * setting.every if reached(found, target) else None
    return {
        "recipe": recipe,
        "task": name,
        "seed": seed,
        "target_loss": round(target, 5),
        "last_loss": round(fmean(found[-AVERAGED:]), 5),
        "steps": steps,
        "dense_steps": setting.steps,
        "most_steps": most,
    }


def provenance(runs: Sequence[dict[str, Any]]) -> str:
    """How the table was measured, in one sentence."""
    parts = [
        f"{name} ({SETTINGS[name].model}, {SETTINGS[name].optimizer}, {SETTINGS[name].steps} steps of AllReduce(), "
        f"batches of {SETTINGS[name].batch_size}, {len({run['seed'] for run in runs if run['task'] == name})} seeds)"
        for name in dict.fromkeys(run["task"] for run in runs)
    ]
    return f"measured on {WORKERS} workers with data divided evenly: {' and '.join(parts)}; learning rates not tuned"


def write(runs: list[dict[str, Any]]) -> None:
    """The table, whole."""
    content = {
        "command": "python -m benchmarks.accuracy",
        "provenance": provenance(runs),
        "versions": {"thinwire": thinwire.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "settings": {name: {k: v for k, v in asdict(each).items() if k != "build"} for name, each in SETTINGS.items()},
        "runs": runs,
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
    runs: list[dict[str, Any]] = json.loads(TABLE.read_text())["runs"] if TABLE.exists() else []
    dense = {(run["task"], run["seed"]): run["target_loss"] for run in runs}
    for name in asked.tasks:
        for seed in range(asked.seeds):
            for recipe in CANDIDATES:
                known = any((r["recipe"], r["task"], r["seed"]) == (recipe, name, seed) for r in runs)
                if known or (asked.only and not any(word in recipe for word in asked.only)):
                    continue
                start = time.perf_counter()
                try:
                    runs.append(measure(name, recipe, seed, dense))
                except ConfigError as refusal:
                    sys.stdout.write(f"{recipe} on {name}: {refusal}\n")
                    continue
                write(runs)
                line = {k: runs[-1][k] for k in ("recipe", "task", "seed", "steps", "last_loss", "target_loss")}
                sys.stdout.write(f"{json.dumps(line)} {time.perf_counter() - start:.0f} s\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
