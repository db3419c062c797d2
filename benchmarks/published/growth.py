# SPDX-License-Identifier: Apache-2.0
"""How the cost of each strategy grows from 4 to 4,096 workers, in the simulation and of the simulation.

python -m benchmarks.published.growth [RECIPE ...] [--bar]

A matrix of ten million parameters, a step of 0.1 s, 10 Gbit/s and 0.1 ms. One worker stands for all where all do the
same; other strategies are simulated with all their workers up to 64. With recipes, only these are measured again.
`--bar` times 100 steps of 1,024 workers of 10,000 parameters, writes the processor's seconds, and fails above the bar
of 60 s.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import thinwire
from benchmarks.published.results import RESULTS
from reproductions.shared.charts import Panel, lines
from thinwire import ThinwireError, parse
from thinwire.lab.report.picture import write_svg
from thinwire.planning.plan.predict import ModelTime, Simulated
from thinwire.planning.simulate import Network, SimulatedComm, simulate

SIZES = (4, 16, 64, 256, 1024, 4096)
DRAWN = (
    "AllReduce()",
    "AllReduce(codec=Quantize(8))",
    "AllReduce(codec=ErrorFeedback(OneBit()))",
    "AllReduce(codec=PowerSGD(rank=4))",
    "CompressedMomentum(warmup_steps=1)",
    "SketchedSGD()",
    "LocalSGD(period=8)",
    "OverlapLocalSGD(period=8)",
    "CoCoD(period=8)",
    "SlowMo(period=8)",
    "DiLoCo(period=8)",
    "NoLoCo(period=8)",
    "EASGD(period=8)",
    "PushSum()",
    "PushSum(staleness=1)",
    "Gossip(topology=Ring())",
    "DecentLaM()",
    "DoubleAveraging()",
    "LeaderSGD()",
)
STRATEGIES = (
    *DRAWN,
    "ZeroOne(variance_steps=1)",
    "FetchSGD()",
    "DQSGD(rule=FixedBits(4))",
    "MinibatchLocalSGD(period=8)",
    "Streaming(base=OverlapLocalSGD(period=8))",
    "EagerPushSum()",
    "QuasiGlobal()",
    "ExactDiffusion()",
    "Choco()",
    "ADPSGD()",
    "MultiLeaderSGD(period=8, global_period=32)",
    "LeaderGradientDescent()",
    "AsyncLeaderSGD(period=8)",
    "BackupWorkers()",
    "ParameterServer()",
    "NodeAverage(base=LocalSGD(period=32), period=8)",
    "Sharded(base=SlowMo(period=8))",
    "Offloaded(base=SlowMo(period=8))",
    "Paced(base=LocalSGD(period=8))",
)
LEFT_OUT = {
    "Local": "sends nothing",
    "Budget": "sends as much as its budget allows",
    "Probe": "is its base with three numbers more",
}
_SHAPE = (2500, 4000)
_NETWORK = Network(bits_per_second=1e10, latency=1e-4)
_MOST_UNLIKE = 64
_SMALLER = 200  # a simulation with numbers has tensors divided by this
_MOST_SECONDS = 40.0  # of the simulator; larger sizes are left out
BAR_RECIPES, BAR_SECONDS = ("LocalSGD(period=8)", "PushSum()"), 60.0


def measure(recipes: Sequence[str] = STRATEGIES) -> None:
    """Predict strategies at each size, and write them in the place of earlier figures of theirs."""
    for text in recipes:
        rows: list[dict[str, Any]] = []
        for workers in SIZES:
            start = time.process_time()
            row = _cost(text, workers)
            if row is None:
                break
            seconds = time.process_time() - start
            rows.append({"strategy": text, "workers": workers, **row, "simulator_seconds": round(seconds, 2)})
            print(rows[-1], flush=True)
            if seconds > _MOST_SECONDS:
                break
        others = [each for each in committed()["rows"] if each["strategy"] != text]
        ordered = sorted([*others, *rows], key=lambda each: STRATEGIES.index(each["strategy"]))
        _path().write_text(json.dumps(committed() | {"rows": ordered}, indent=1) + "\n", encoding="utf-8")


def _cost(text: str, workers: int) -> dict[str, float | bool] | None:
    """The cost of a step, from one worker that stands for all, or from all, with numbers where it reads them.

    Raises:
        ThinwireError: of the last way, if none works for this strategy.
    """
    time_of = ModelTime(0.034, 0.066)
    given = Simulated(parse(text), workers, [_SHAPE], torch.float32, [(0, 1.0)], time_of, [0.0], None, 8 << 20)
    small = given.smaller(_SMALLER)
    for alike, meta in ((True, True), (False, True), (False, False)):
        if not alike and workers > _MOST_UNLIKE:
            return None
        try:
            if meta:
                found = given.run(_NETWORK, meta=True, alike=alike)
            else:
                found = small.run(replace(_NETWORK, magnified=_SMALLER), meta=False).larger(_SMALLER)
            return {
                "alike": alike,
                "step_seconds": float(f"{found.seconds:.4g}"),
                "sent_bytes": round(found.payload_bytes),
                "memory_bytes": round(found.memory_bytes),
            }
        except (ThinwireError, RuntimeError):
            if not meta:
                raise
    raise AssertionError("the last way returns or raises")


def bar(workers: int = 1024, steps: int = 100) -> bool:
    """Time the simulator on all workers of a large run; whether each recipe takes at most the bar's seconds."""

    def work(comm: SimulatedComm) -> None:
        model = torch.nn.Linear(100, 100, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        thinwire.attach(model, optimizer, recipe, comm=comm)
        # Neither strategy uses the backward pass: a user's own takes as long with and without the simulator.
        model.weight.grad = gradient.clone()
        for _ in range(steps):
            comm.compute(0.05)
            optimizer.step()

    gradient, seconds = torch.ones(100, 100), dict[str, float]()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    if cores:
        os.sched_setaffinity(0, {min(cores)})
    try:
        for recipe in BAR_RECIPES:
            start = time.process_time()
            ended = simulate(workers, work, seed=1)
            assert not ended.failures, ended.failures
            seconds[recipe] = round(time.process_time() - start, 1)
            print(f"{recipe}: {seconds[recipe]} s, {'met' if seconds[recipe] <= BAR_SECONDS else 'missed'}", flush=True)
    finally:
        if cores:
            os.sched_setaffinity(0, cores)
    _path().write_text(json.dumps(committed() | {"bar": seconds}, indent=1) + "\n", encoding="utf-8")
    return max(seconds.values()) <= BAR_SECONDS


def _path() -> Path:
    RESULTS.mkdir(parents=True, exist_ok=True)
    return RESULTS / "growth.json"


def committed() -> dict[str, Any]:
    """Return the committed figures; none before the first run."""
    try:
        return json.loads(_path().read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"rows": [], "bar": {}}


def exponent(rows: list[dict[str, Any]], quantity: str) -> float:
    """The power of the number of workers with which a quantity grows from the second to the last size."""
    first, last = rows[min(1, len(rows) - 1)], rows[-1]
    if first is last or not first[quantity] or not last[quantity]:
        return 0.0
    return math.log(last[quantity] / first[quantity]) / math.log(last["workers"] / first["workers"])


def bar_seconds() -> str:
    """The time that the simulator took for each recipe of the bar, and whether the bar is met."""
    found = committed()["bar"]
    verdict = "met" if max(found.values()) <= BAR_SECONDS else "missed"
    times = " and ".join(f"{seconds:.0f} s for `{recipe}`" for recipe, seconds in found.items())
    return f"{times} (bar: {BAR_SECONDS:.0f} s, {verdict})"


def table() -> Iterator[str]:
    """One line per strategy."""
    yield "| Strategy | Step at 4, at most | Bytes at 4, at most | Memory | Workers | Step grows as | Simulator |"
    yield "|---|---|---|---|---|---|---|"
    found = committed()["rows"]
    for text in dict.fromkeys(row["strategy"] for row in found):
        rows = [row for row in found if row["strategy"] == text]
        first, last = rows[0], rows[-1]
        yield (
            f"| `{text}` | {first['step_seconds'] * 1e3:.0f}, {last['step_seconds'] * 1e3:.0f} ms "
            f"| {first['sent_bytes'] / 1e6:.1f}, {last['sent_bytes'] / 1e6:.1f} MB "
            f"| {last['memory_bytes'] / 1e6:.0f} MB | {last['workers']:,} | n^{exponent(rows, 'step_seconds'):.2f} "
            f"| {max(row['simulator_seconds'] for row in rows):.1f} s |"
        )


def left_out() -> str:
    """The strategies that are not in the table, and why."""
    return "; ".join(f"`{name}` {why}" for name, why in LEFT_OUT.items())


def draw(path: Path) -> None:
    """Draw the step time and the bytes of half the strategies against the number of workers."""
    found = [row for row in committed()["rows"] if row["strategy"] in DRAWN]

    def panel(quantity: str, title: str) -> Panel:
        names = dict.fromkeys(row["strategy"] for row in found)
        costs = {name: [{row["workers"]: row[quantity] for row in found if row["strategy"] == name}] for name in names}
        return Panel(title, costs, "workers", log="xy", ticks=SIZES)

    panels = panel("step_seconds", "seconds of a step"), panel("sent_bytes", "bytes sent in a step")
    write_svg(lines("growth", panels, title="How cost grows", caption="").figure, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipes", nargs="*", choices=[[], *STRATEGIES], default=[], metavar="RECIPE")
    parser.add_argument("--bar", action="store_true", help="only the bar on simulator seconds")
    asked = parser.parse_args()
    if not asked.bar:
        measure(asked.recipes or STRATEGIES)
    elif not bar():
        raise SystemExit(1)
