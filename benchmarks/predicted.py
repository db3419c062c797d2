# SPDX-License-Identifier: Apache-2.0
"""Predicted step times against measured ones: eight groups of links, workers and models, eight recipes each.

    python -m benchmarks.predicted --all                    measure all cells that are missing; about an hour in all
    python -m benchmarks.predicted --group N [--cell M]     measure what is missing of a group
    python -m benchmarks.predicted --report [--plot FILE]   all cells, and whether the rule holds
    python -m benchmarks.predicted --again                  the same, predicted with today's code
    python -m benchmarks.predicted --quick [--plot FILE]    one small group as a trial, which counts for nothing
    python -m benchmarks.predicted --plot FILE              draw them
    python -m benchmarks.predicted --all --folder FOLDER    measure all cells again, into another folder

The rule, which was written before any of the groups was run, and is not changed:

- Every cell of the eight groups below counts, and all are committed. A cell's measured step time is the median over
  blocks of a block's mean, a block being the steps after which the recipe's communication repeats; from the slowest
  rank's clock, after a warm-up of one block and at least two steps.
- Predicted step times lie within 15 % of the measured ones in at least 80 % of the cells.
- In at least seven of the eight groups, the recipe with the least predicted step time takes at most 10 % longer than
  the one with the least measured step time.

What a prediction is given was measured in the same processes, right before, with all workers computing at once as in
training, because more workers than cores share them: the model's step without communication (the median over ranks of
their medians), what the strategy computes itself (the same), and all-reduces of some sizes, which calibrate the link's
rate and latency as `thinwire doctor` does. Nothing of the recipe's own communication is measured beforehand.

The first edition, by this rule: 50 of 64 cells within 15 %, which is 78 %: not met; the recipe within 6 % of the best
in all eight groups.

The second edition, whose rule was written after the first was run and before any of its own: the same, but for the
model's step, which is the median over ranks of their means. With eight workers on two cores the medians left out the
pauses in which others had the core, and said 4 ms for a step of 21 ms.

By it: 51 of 64 cells, 79.7 %: not met, by one cell; the recipe that was chosen was the fastest in all eight groups.

The third edition, whose rule was written before any of its own: at least 85 % of the cells, and a prediction is also
given the contention, as `thinwire doctor` measures it: how much longer the model's step takes while each worker sends
all along, and how much it sends meanwhile. The all-reduces calibrate Gloo's own ring.

By it: 55 of 64 cells, 85.9 %: met, with none to spare; the recipe that was chosen was the fastest in all eight groups.
Since then a codec's encoding lies in the simulated backward pass: 56 of the same cells (`--again`).

Each cell is a line of benchmarks/results/predicted (the third edition's) or of `--folder`, written as soon as it is
done, and is not repeated: an interrupted run is continued by the same command. Nothing else may run on the machine
meanwhile. How long a group took is printed, and each cell holds its own `wall_seconds`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import thinwire
from benchmarks.paired import run_in_turns
from reproductions.shared.committed import Records
from thinwire import Comm, GroupComm, parse
from thinwire.lab.emulate import parse_links
from thinwire.planning.doctor.speeds import StepTime, time_loaded_step, time_steps
from thinwire.planning.plan.all_reduces import time_all_reduces
from thinwire.planning.plan.networks import contended, fitted, network_of_links
from thinwire.planning.plan.predict import ModelTime, own_work, predict
from thinwire.planning.plan.traffic import cycle

RESULTS = Records(Path(__file__).parent / "results" / "predicted")
RECIPES = (
    "AllReduce()",
    "AllReduce(codec=Quantize(8))",
    "LocalSGD(period=8)",
    "SlowMo(base=PushSum(), period=8)",
    "DiLoCo(period=16)",
    "PushSum(staleness=1)",
    "OverlapLocalSGD(period=8)",
    "DQSGD(rule=FixedBits(4))",
)
WITHIN, CELLS = 0.15, 0.85
NEAR_BEST, GROUPS_RIGHT = 0.10, 7
_SECONDS = 30.0
_FEWEST_BLOCKS, _MOST_BLOCKS = 3, 16
_REDUCES = (4 << 10, 256 << 10, 4 << 20)


@dataclass(frozen=True)
class Group:
    """A link, a number of workers, and a model: `layers` square matrices of `width`."""

    link: str
    workers: int
    layers: int
    width: int
    batch: int = 16


GROUPS = {
    1: Group("20mbit", 2, 8, 250),  # 0.5 M parameters
    2: Group("20mbit", 4, 8, 250),
    3: Group("100mbit", 4, 6, 1000),  # 6 M
    4: Group("100mbit", 8, 8, 250),
    5: Group("500mbit", 2, 20, 1000),  # 20 M
    6: Group("1gbit", 4, 20, 1000),
    7: Group("100mbit+10ms", 4, 6, 1000),
    8: Group("500mbit+50ms", 2, 6, 1000),
}
QUICK = Group("100mbit", 2, 4, 250)


def main() -> None:
    """Measure, report, or be one of the workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--group", type=int, choices=GROUPS)
    parser.add_argument("--cell", type=int, choices=range(len(RECIPES)))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--folder", type=Path, help="where cells are kept, instead of benchmarks/results/predicted")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    results = Records(asked.folder) if asked.folder else RESULTS
    if asked.work:
        work(json.loads(asked.work))
    elif asked.report:
        report(cells(results), asked.plot)
    elif asked.again:
        found = cells(results)
        report(
            [each | {"predicted_seconds": predicted(GROUPS[int(each["group"])], each)} for each in found], asked.plot
        )
    elif asked.quick:
        with TemporaryDirectory() as folder:
            run("quick", QUICK, range(len(RECIPES)), trial := Records(Path(folder)), seconds=3.0)
            report(cells(trial), asked.plot)
    elif asked.group or asked.all:
        places = range(len(RECIPES)) if asked.cell is None else [asked.cell]
        for number in [asked.group] if asked.group else GROUPS:
            run(str(number), GROUPS[number], places, results, seconds=_SECONDS)
        report(cells(results), asked.plot)
    elif asked.plot:
        draw(cells(results), asked.plot)
    else:
        parser.error("give --all, --group, --report, --again, --quick or --plot")


# -- measuring ---------------------------------------------------------------------------------------------------------


def run(name: str, group: Group, places: Sequence[int], results: Records, *, seconds: float) -> None:
    """Measure and predict the cells of a group that are missing."""
    missing = [place for place in places if results.get(f"{name}-{place}") is None]
    start = time.perf_counter()
    for place in missing:
        begin = time.perf_counter()
        cell = measured(group, RECIPES[place], seconds) | {"group": name, "cell": place}
        cell["predicted_seconds"] = predicted(group, cell)
        cell["wall_seconds"] = round(time.perf_counter() - begin, 1)
        results.put(f"{name}-{place}", cell, file="cells")
        sys.stdout.write(_line(cell) + "\n")
        sys.stdout.flush()
    if missing:
        sys.stdout.write(f"group {name}: {len(missing)} cells in {time.perf_counter() - start:.0f} s\n")


def measured(group: Group, recipe: str, seconds: float) -> dict[str, Any]:
    """Start workers, which train; returns what they measured."""
    task = json.dumps({**asdict(group), "recipe": recipe, "seconds": seconds})
    return run_in_turns("predicted", group.workers, "--work", task, link=group.link)


def predicted(group: Group, cell: dict[str, Any]) -> float:
    """The step time that is predicted from what was measured without the recipe's communication."""
    reduces = {int(size): taken for size, taken in cell["all_reduces"].items()}
    network = fitted(network_of_links(parse_links(group.link, group.workers)), reduces, group.workers)
    if "slowed" in cell:  # from the third edition on
        network = contended(network, cell["slowed"], cell["sent_bytes_per_second"])
    time_of = ModelTime(cell["forward"], cell["backward"], cell["update"], tuple(cell["ready"]))
    return predict(
        parse(cell["recipe"]),
        parameters=[tuple(p.shape) for p in model_of(group).parameters()],
        workers=group.workers,
        network=network,
        model_time=time_of,
        own_seconds=cell["own_seconds"],
        optimizer=optimizer_of,
    ).seconds


def model_of(group: Group) -> nn.Module:
    """The model."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(group.layers):
        parts += [nn.Linear(group.width, group.width), nn.Tanh()]
    return nn.Sequential(*parts)


def optimizer_of(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def work(task: dict[str, Any]) -> None:
    """As one of several workers: time the parts alone, then train; rank 0 writes the figures."""
    recipe, seconds = task.pop("recipe"), task.pop("seconds")
    group = Group(**task)
    dist.init_process_group("gloo")
    comm = GroupComm(timeout=600.0)
    reduces = time_all_reduces(comm, budget=4.0, sizes=_REDUCES)
    model = model_of(group)
    batch = torch.randn(group.batch, group.width)
    dist.barrier()
    optimizer = optimizer_of(list(model.parameters()))

    def time_model(budget: float) -> StepTime:
        return time_steps("model", model, optimizer, lambda: model(batch).square().mean(), budget=budget)

    step = time_model(4.0)
    loaded = time_loaded_step(comm, time_model, budget=4.0)
    dist.barrier()
    strategy = parse(recipe)
    own = own_work(strategy, parameters=model, workers=group.workers, optimizer=optimizer_of, rounds=2)
    dist.barrier()
    blocks = train(comm, group, recipe, seconds)
    slowed = loaded.seconds / step.seconds
    row = [step.forward, step.backward, step.update, slowed, loaded.bytes_per_second, *step.ready, *own, *blocks]
    rows = comm.all_gather(torch.tensor(row, dtype=torch.float64)).wait()
    if comm.rank == 0:
        middle = torch.stack(rows).median(0).values.tolist()
        slowest = torch.stack(rows).amax(0).tolist()
        count = len(step.ready)
        figures: dict[str, Any] = {
            "recipe": recipe,
            **asdict(group),
            "cores": len(os.sched_getaffinity(0)),
            "torch": torch.__version__,
            "all_reduces": reduces,
            "forward": middle[0],
            "backward": middle[1],
            "update": middle[2],
            "slowed": middle[3],
            "sent_bytes_per_second": middle[4],
            "ready": middle[5 : 5 + count],
            "own_seconds": middle[5 + count : 5 + count + len(own)],
            "block_seconds": slowest[5 + count + len(own) :],
        }
        figures["measured_seconds"] = median(figures["block_seconds"])
        sys.stdout.write(json.dumps(figures) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


def train(comm: Comm, group: Group, recipe: str, seconds: float) -> list[float]:
    """This rank's seconds of a step, the mean of each block."""
    model = model_of(group)
    optimizer = optimizer_of(list(model.parameters()))
    strategy = parse(recipe)
    thinwire.attach(model, optimizer, strategy, timeout=600.0)
    batch = torch.randn(group.batch, group.width)
    length = cycle(strategy, group.workers)

    def block(steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return (time.perf_counter() - begin) / steps

    steps = length * -(-2 // length)
    taken = comm.all_gather(torch.tensor([block(steps) * length], dtype=torch.float64)).wait()
    count = min(_MOST_BLOCKS, max(_FEWEST_BLOCKS, int(seconds / max(float(each) for each in taken))))
    dist.barrier()
    return [block(length) for _ in range(count)]


# -- the report --------------------------------------------------------------------------------------------------------


def cells(results: Records) -> list[dict[str, Any]]:
    """All cells that were measured, by group."""
    return sorted(results.all().values(), key=lambda cell: (cell["group"], cell["cell"]))


def report(found: Sequence[dict[str, Any]], plot: Path | None) -> None:
    """Write all cells, and whether the rule holds."""
    right, near = 0, 0
    groups = list(dict.fromkeys(cell["group"] for cell in found))
    for group in groups:
        rows = [cell for cell in found if cell["group"] == group]
        for cell in rows:
            right += abs(_error(cell)) <= WITHIN
            sys.stdout.write(_line(cell) + "\n")
        chosen = min(rows, key=lambda cell: cell["predicted_seconds"])
        best = min(rows, key=lambda cell: cell["measured_seconds"])
        slower = chosen["measured_seconds"] / best["measured_seconds"] - 1
        near += slower <= NEAR_BEST
        sys.stdout.write(f"  chosen {chosen['recipe']}: {slower:+.0%} of the best measured, {best['recipe']}\n")
    sys.stdout.write(
        f"{right} of {len(found)} cells within {WITHIN:.0%} (the rule: {CELLS:.0%} of {len(GROUPS) * len(RECIPES)}); "
        f"{near} of {len(groups)} choices within {NEAR_BEST:.0%} of the best (the rule: {GROUPS_RIGHT} of "
        f"{len(GROUPS)})\n"
    )
    if plot is not None:
        draw(found, plot)


def _error(cell: dict[str, Any]) -> float:
    return cell["predicted_seconds"] / cell["measured_seconds"] - 1


def _line(cell: dict[str, Any]) -> str:
    where = f"{cell['link']}, {cell['workers']} workers, {cell['layers'] * cell['width'] ** 2 / 1e6:.2g} M"
    times = f"predicted {1e3 * cell['predicted_seconds']:.1f} ms, measured {1e3 * cell['measured_seconds']:.1f} ms"
    return f"{cell['group']}: {where:<30} {cell['recipe']:<34} {times}, {_error(cell):+.0%}"


def draw(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Predicted against measured, a point for each cell."""
    from thinwire.lab.report.palette import MUTED, PAPER, looks
    from thinwire.lab.report.picture import canvas, key, legend, plain

    figure = canvas(6.0, 5.2)
    axes = figure.add_subplot()
    plain(axes, x="measured seconds of a step", y="predicted")
    styles = looks(RECIPES)
    for recipe, look in zip(RECIPES, styles, strict=True):
        rows = [cell for cell in found if cell["recipe"] == recipe]
        measured_, predicted_ = ([cell[f"{name}_seconds"] for cell in rows] for name in ("measured", "predicted"))
        axes.plot(measured_, predicted_, color=look.tone.light, marker=look.marker, linestyle="none")
    ends = [min(c["measured_seconds"] for c in found) / 1.5, max(c["measured_seconds"] for c in found) * 1.5]
    for factor in (1 - WITHIN, 1.0, 1 + WITHIN):
        width = 1.0 if factor == 1 else 0.6
        axes.plot(ends, [factor * each for each in ends], color=MUTED.light, linewidth=width)
    axes.set_xscale("log")
    axes.set_yscale("log")
    legend(figure, [key(look) for look in styles], list(RECIPES))
    figure.savefig(path, dpi=110, facecolor=PAPER.light)


if __name__ == "__main__":
    main()
