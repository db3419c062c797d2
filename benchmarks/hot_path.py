# SPDX-License-Identifier: Apache-2.0
"""What a strategy costs a worker besides the link: processor time per tensor and per parameter, and memory.

python -m benchmarks.hot_path [--profile RECIPE | --files | --step]

Two workers on one machine, over the loopback interface, one thread each; all recipes take turns with the bare loop, in
the same processes, and what is told is the difference. A model of 300 tensors of 64 elements shows what each tensor
costs, one of 12 tensors of 2 MiB what each parameter does, its share of sending included. Memory is that of all
tensors that are alive, less the bare loop's. Two minutes. With `--profile` one recipe trains the 300 tensors on one
worker, under Python's profiler. `--files` counts how often a step of rank 0, of two workers on threads, goes from one
file of thinwire to another one: a measure of what has to be read to follow it. `--step` times `optimizer.step()` alone,
for 80 tensors of 64 elements on one worker, attached and plain in turns.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from benchmarks.paired import Step, Turns, run_in_turns, start, take_turns
from thinwire.lab.report.statistics import ratios, spread

_FED_BACK = "ErrorFeedback(Nearest(bits=4))"
RECIPES = (
    "Local()",
    "AllReduce()",
    f"AllReduce(codec={_FED_BACK})",
    "PushSum()",
    "LocalSGD(period=8)",
    f"LocalSGD(period=8, codec={_FED_BACK})",
    "OverlapLocalSGD(period=8)",
    f"OverlapLocalSGD(period=8, codec={_FED_BACK})",
    "SlowMo(period=8)",
    "DiLoCo(period=8)",
    f"DiLoCo(period=8, fragments=2, delay=2, mixing=0.5, codec={_FED_BACK})",
)
# Whose calls are followed from file to file.
FOLLOWED = ("AllReduce()", f"LocalSGD(period=8, codec={_FED_BACK})", "DiLoCo(period=8, delay=4)", "PushSum()")
BARE = "bare"
# Tensors, and elements of each.
MANY, LARGE, TOY = (300, 64), (12, 1 << 19), (80, 64)
# A block is whole periods; steps of many small tensors are short, so that it takes many.
_PERIOD, _STEPS, _ROUNDS = 8, {MANY: 80, LARGE: 8}, 9


class Tensors(nn.Module):
    """Parameters, and a loss with as little work as there can be."""

    def __init__(self, count: int, elements: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.every = nn.ParameterList(nn.Parameter(torch.randn(elements, generator=draw)) for _ in range(count))

    def forward(self) -> Tensor:
        """The sum of all elements."""
        return torch.stack([each.sum() for each in self.every]).sum()


def contender(recipe: str, shape: tuple[int, int]) -> Step:
    """A training step."""
    model = Tensors(*shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    if recipe != BARE:
        thinwire.attach(model, optimizer, thinwire.parse(recipe))

    def once() -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()

    return once


def alive() -> int:
    """Bytes of all tensors."""
    gc.collect()
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if isinstance(each, Tensor)
    }
    return sum(storages.values())


def held(recipe: str) -> float:
    """Bytes per parameter that are alive after two periods, parameters and gradients included."""
    before, step = alive(), contender(recipe, LARGE)
    for _ in range(2 * _PERIOD):
        step()
    return (alive() - before) / (LARGE[0] * LARGE[1])


def beyond(turns: dict[str, Turns], recipe: str) -> list[float]:
    """CPU seconds of a step more than the bare loop's, round by round."""
    return [ours - bare for ours, bare in zip(turns[recipe].cpu, turns[BARE].cpu, strict=True)]


def work() -> None:
    """One worker; rank 0 writes what was measured as JSON."""
    start()
    bytes_held = {recipe: held(recipe) for recipe in (BARE, *RECIPES)}
    found: dict[str, dict[str, list[float]]] = {recipe: {} for recipe in RECIPES}
    for shape, unit in ((MANY, MANY[0]), (LARGE, LARGE[0] * LARGE[1])):
        steps = {recipe: contender(recipe, shape) for recipe in (BARE, *RECIPES)}
        turns = take_turns(steps, rounds=_ROUNDS, steps=_STEPS[shape], warm_up=_PERIOD)
        for recipe in RECIPES:
            found[recipe][f"{shape[0]} tensors"] = [seconds / unit for seconds in beyond(turns, recipe)]
    if dist.get_rank() == 0:
        rows = {recipe: {**each, "bytes": bytes_held[recipe] - bytes_held[BARE]} for recipe, each in found.items()}
        sys.stdout.write(json.dumps(rows) + "\n")
    dist.destroy_process_group()


def table() -> str:
    """Run two workers; returns a Markdown table."""
    rows = ["| recipe | µs a tensor | ns a parameter | bytes a parameter |", "| --- | ---: | ---: | ---: |"]
    for recipe, found in run_in_turns("hot_path", 2, "--worker").items():
        many, large = found[f"{MANY[0]} tensors"], found[f"{LARGE[0]} tensors"]
        tensors, parameters = spread(many).words(".2f", scale=1e6), spread(large).words(".2f", scale=1e9)
        rows.append(f"| `{recipe}` | {tensors} | {parameters} | {found['bytes']:.2f} |")
    return "\n".join(rows) + "\n"


def profile(recipe: str) -> None:
    """Print where the time of 50 steps of one worker goes, by functions' own time."""
    torch.set_num_threads(1)
    step, profiler = contender(recipe, MANY), cProfile.Profile(time.process_time)
    for _ in range(_PERIOD):
        step()
    profiler.enable()
    for _ in range(50):
        step()
    profiler.disable()
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(16)


def changes_of_file(recipe: str, steps: int) -> list[int]:
    """For each step of a small model, how often a call entered another file of thinwire than the call before it."""
    home = str(Path(thinwire.__file__).parent)

    def train(comm: thinwire.Comm) -> list[int]:
        torch.manual_seed(comm.rank)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        thinwire.attach(model, optimizer, recipe, comm=comm)
        batch, found = torch.randn(4, 8), list[int]()
        for _ in range(steps):
            files = [""]

            def see(frame: FrameType, event: str, _: object, files: list[str] = files) -> None:
                file = frame.f_code.co_filename
                if event == "call" and file != files[-1] and file.startswith(home):
                    files.append(file)

            sys.setprofile(see if comm.rank == 0 else None)
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            sys.setprofile(None)
            found.append(len(files) - 1)
        return found

    return thinwire.run_threads(2, train)[0]


def files_table() -> str:
    """The fewest and the most changes of file in a step, once the first checks are over; a Markdown table."""
    rows = ["| recipe | fewest | most |", "| --- | ---: | ---: |"]
    for recipe in FOLLOWED:
        found = changes_of_file(recipe, 4 * _PERIOD)[2 * _PERIOD :]
        rows.append(f"| `{recipe}` | {min(found)} | {max(found)} |")
    return "\n".join(rows) + "\n"


def step_table() -> str:
    """What `optimizer.step()` takes, attached and plain; a Markdown table."""
    torch.set_num_threads(1)
    steps: dict[str, Step] = {}
    for recipe in (BARE, "LocalSGD(period=1000000)", "AllReduce()"):
        model = Tensors(*TOY)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        if recipe != BARE:
            thinwire.attach(model, optimizer, recipe)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        steps[recipe] = optimizer.step
    turns = take_turns(steps, rounds=15, steps=200)
    rows = ["| recipe | µs a step | times plain |", "| --- | ---: | ---: |"]
    for recipe, found in turns.items():
        times = ratios(found.cpu, turns[BARE].cpu).words(".2f")
        rows.append(f"| `{recipe}` | {1e6 * spread(found.cpu).median:.0f} | {times} |")
    return "\n".join(rows) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Print one of the tables, or a profile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", metavar="RECIPE", help="such as 'LocalSGD(period=8)'; 'bare' for none")
    parser.add_argument("--files", action="store_true", help="count the changes of file in a step")
    parser.add_argument("--step", action="store_true", help="time optimizer.step() alone")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.worker:
        assert "RANK" in os.environ
        work()
    elif chosen.profile:
        profile(chosen.profile)
    elif chosen.files:
        sys.stdout.write(files_table())
    elif chosen.step:
        sys.stdout.write(step_table())
    else:
        sys.stdout.write(table())


if __name__ == "__main__":
    main(sys.argv[1:])
