# SPDX-License-Identifier: Apache-2.0
"""Measure arrays on a GPU by protocol.md: `python -m reproductions.hfta.gpu --seconds 200 --out hfta_gpu.jsonl`.

Cells run in processes that stay, since starting one takes longer than a cell. A process that fails is replaced.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.flop_counter import FlopCounterMode

from reproductions.hfta.bytes import ByteCounter
from reproductions.hfta.on_gpu import Staying, stays
from reproductions.hfta.training import made, rates
from reproductions.hfta.workloads import Batch, Workload, paper_workloads, workloads
from thinwire import ThinwireError, fuse
from thinwire.arrays.fusion import Adam

Step = Callable[[Batch, Batch], Any]
Line = dict[str, Any]
SMALL = ("transformer", "resnet18", "dcgan", "pointnet-cls", "mobilenet", "pointnet-seg")
PAPER = tuple(f"paper-{name}" for name in SMALL)
LEAST, LEAST_SMALL = 2.4, 3.0
_BATCHES = 4
_LAST = ", channels last"
_IMAGES = ("paper-resnet18", "paper-dcgan", "paper-mobilenet")
_CELL_SECONDS = 60.0
# A GPU is this many steps behind at most, so that a cell ends when its time is over.
_AHEAD = 4


# -- ways of training --------------------------------------------------------------------------------------------------


def _workload(name: str, device: str) -> Workload:
    if device == "cuda" and name in PAPER:
        return paper_workloads()[name]
    # On a CPU, to test this file, small networks stand for those of the paper's sizes.
    return workloads()[name.removeprefix("paper-")]


def _channels_last(workload: Workload) -> Workload:
    """The workload with the channels of its images next to each other in memory."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor

    def batch(number: int) -> tuple[Batch, Batch]:
        inputs, targets = workload.batch(number)
        return tuple(map(moved, inputs)), tuple(map(moved, targets))

    made_by: Any = workload.make  # the type of a module's `to` does not know a memory format alone
    return replace(workload, make=lambda: made_by().to(memory_format=torch.channels_last), batch=batch)


def _precision(device: str, precision: str) -> Any:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    return torch.autocast(device, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def one_step(workload: Workload, device: str, precision: str, **options: Any) -> Step:
    """A step of one model, by PyTorch alone."""
    (model,) = made(workload, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=rates(1)[0], **options)

    def step(inputs: Batch, targets: Batch) -> Tensor:
        optimizer.zero_grad()
        with _precision(device, precision):
            loss = workload.loss(model(*inputs), *targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def captured(step: Step, batch: tuple[Batch, Batch]) -> Step:
    """The step as one CUDA graph, by PyTorch alone; as it is on a CPU."""
    if not torch.cuda.is_available():
        return step
    static = tuple(tuple(each.clone() for each in part) for part in batch)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(5):
            step(*static)
    torch.cuda.current_stream().wait_stream(stream)
    gc.collect()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step(*static)

    def replay(inputs: Batch, targets: Batch) -> None:
        for own, given in zip((*static[0], *static[1]), (*inputs, *targets), strict=True):
            own.copy_(given, non_blocking=True)
        graph.replay()

    return replay


def array_step(workload: Workload, models: int, device: str, precision: str, batch: tuple[Batch, Batch]) -> Step:
    """A captured step of an array."""
    array = fuse(made(workload, models))
    optimizer = Adam(array.parameters(), lr=rates(models))

    def step(inputs: Batch, targets: Batch) -> Tensor:
        array.zero_grad()
        with _precision(device, precision):
            losses = array.losses(workload.loss, array(*inputs), *targets)
        losses.sum().backward()
        optimizer.step()
        return losses

    return array.capture(step, *batch)


# -- batches -----------------------------------------------------------------------------------------------------------


class _Batches(IterableDataset[Any]):
    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def __iter__(self) -> Iterator[Any]:
        return map(self.workload.batch, count())


def _unchanged(batch: Any) -> Any:
    return batch


def read(workload: Workload, device: str) -> Iterator[tuple[Batch, Batch]]:
    """Batches from a loader with one worker, copied to the device."""
    options: dict[str, Any] = {"num_workers": 1, "pin_memory": True, "multiprocessing_context": "fork"}
    loader: Any = DataLoader(
        _Batches(workload), batch_size=None, collate_fn=_unchanged, **(options if device == "cuda" else {})
    )
    for inputs, targets in loader:
        moved = [tuple(each.to(device, non_blocking=True) for each in part) for part in (inputs, targets)]
        yield moved[0], moved[1]


def kept(workload: Workload, device: str) -> Iterator[tuple[Batch, Batch]]:
    """A few batches on the device, again and again."""
    batches = [workload.to(device).batch(number) for number in range(_BATCHES)]
    return (batches[number % _BATCHES] for number in count())


def pace(step: Step, batches: Iterator[tuple[Batch, Batch]], seconds: float, device: str) -> float:
    """Steps per second."""
    for batch in islice(batches, 3):
        step(*batch)
    _wait(device)
    start, done = time.perf_counter(), 0
    while time.perf_counter() < start + seconds:
        for batch in islice(batches, _AHEAD):
            step(*batch)
        done += _AHEAD
        _wait(device)
    return done / (time.perf_counter() - start)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# -- what the processes do ---------------------------------------------------------------------------------------------


class Ways:
    """All ways that one process can go; it keeps the steps of one network in one precision.

    Args:
        device: "cuda", or "cpu" for tests.
        seconds: of each measurement.
        models: of an array.
    """

    def __init__(self, device: str, seconds: float, models: int) -> None:
        self.device, self.seconds, self.models = device, seconds, models
        self._key: tuple[str, str] | None = None
        self._steps: dict[str, Step] = {}

    def cell(self, name: str, precision: str, way: str) -> Line:
        """Measure one cell; an error is part of the line."""
        try:
            return self._cell(name, precision, way)
        except Exception as error:
            traceback.print_exc()
            self._steps.clear()
            return {"error": f"{type(error).__name__}: {str(error)[:300]}"}

    def peaks(self) -> Line:
        """The pace of a large product in each precision, and of a large copy."""
        n, device = (8192, self.device) if self.device == "cuda" else (128, self.device)
        _precision(device, "tf32")
        found: Line = {}
        for precision, dtype in (("bf16", torch.bfloat16), ("tf32", torch.float32)):
            x = torch.randn(n, n, device=device).to(dtype)
            found[f"flops {precision}"] = 2 * n**3 * _rate(partial(torch.matmul, x, x), self.seconds / 2, device)
        x = torch.zeros(n * n * 4, device=device)
        found["bytes"] = 2 * x.nbytes * _rate(partial(torch.empty_like(x).copy_, x), self.seconds / 2, device)
        name = torch.cuda.get_device_name() if device == "cuda" else "a processor"
        return found | {"device": name, "torch": torch.__version__}

    def _cell(self, name: str, precision: str, way: str) -> Line:
        device, seconds = self.device, self.seconds
        if self._key != (name, precision):
            self._key = name, precision
            self._steps.clear()
        own = _workload(name, device)
        workload = own.to(device)
        if way.endswith(_LAST):
            own, workload = _channels_last(own), _channels_last(workload)
        batch = workload.batch(0)
        if device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        kind, reads = way.removesuffix(_LAST).removesuffix(" on device"), way in ("process", "array")
        models = self.models if kind == "array" else 1
        step = self._steps.get(kind)
        if step is None or way.endswith(_LAST):
            step = self._steps[kind] = self.make(kind, workload, precision, batch)
        line: Line = {"setup_s": round(time.perf_counter() - start, 2), "models": models}
        batches = read(own, device) if reads else kept(own, device)
        line["models_per_s"] = models * pace(step, batches, seconds, device)
        del batches
        if way == "captured":
            line |= self._counted(workload, precision, batch)
        if device == "cuda":
            line["mb"] = round(torch.cuda.max_memory_allocated() / 2**20)
        return line

    def make(self, kind: str, workload: Workload, precision: str, batch: tuple[Batch, Batch]) -> Step:
        """Make a step of a kind: "array", "process" or "captured"."""
        if kind == "array":
            return array_step(workload, self.models, self.device, precision, batch)
        if kind == "process":
            return one_step(workload, self.device, precision)
        options = {"capturable": True, "fused": True} if self.device == "cuda" else {}
        return captured(one_step(workload, self.device, precision, **options), batch)

    def _counted(self, workload: Workload, precision: str, batch: tuple[Batch, Batch]) -> Line:
        """The FLOPs and bytes of one eager step of one model; of small batches where they fail, none."""
        step = one_step(workload, self.device, precision)
        step(*batch)
        with FlopCounterMode(display=False) as flops:
            step(*batch)
        with ByteCounter() as moved:
            step(*batch)
        return {"flops": flops.get_total_flops(), "bytes": moved.nbytes}


def _rate(work: Callable[[], object], seconds: float, device: str) -> float:
    return pace(lambda *_: work(), iter(lambda: ((), ()), None), seconds, device)


class One:
    """One of many processes that train a model each, with its batches on the device."""

    def __init__(self, device: str, seconds: float) -> None:
        self.ways = Ways(device, seconds, 1)
        self._turns: dict[str, Callable[[], float]] = {}

    def make(self, name: str) -> str:
        """Make the eager and the captured step; returns an error, or nothing."""
        device, own = self.ways.device, _workload(name, self.ways.device)
        workload = cached_on(own, device)
        batch = workload.batch(0)
        try:
            for kind in ("process", "captured"):
                step = self.ways.make(kind, workload, "tf32", batch)
                step(*batch)
                self._turns[kind] = partial(pace, step, kept(own, device), self.ways.seconds, device)
        except Exception as error:
            traceback.print_exc()
            return f"{type(error).__name__}: {str(error)[:300]}"
        return ""

    def turn(self, kind: str, start: float) -> float:
        """Train from one moment on."""
        time.sleep(max(0.0, start - time.monotonic()))
        return self._turns[kind]()


def cached_on(workload: Workload, device: str) -> Workload:
    """The workload with one batch on the device."""
    moved = workload.to(device)
    batch = moved.batch(0)
    return replace(moved, batch=lambda _: batch)


# -- all cells ---------------------------------------------------------------------------------------------------------


def cells(only: Sequence[str] = ()) -> list[tuple[str, str, str]]:
    """Every cell: network, precision and way, the most important first."""
    on_device, reading = ("captured", "array on device"), ("process", "array")
    every = [(name, "bf16", way) for name in PAPER for way in (*on_device, *reading)]
    every += [(name, "tf32", "array on device") for name in SMALL]
    every += [(name, "tf32", "processes") for name in SMALL]
    every += [(name, "bf16", way + _LAST) for name in _IMAGES for way in on_device]
    every += [(name, "tf32", way) for name in PAPER for way in (*on_device, *reading)]
    every += [(name, "tf32", way) for name in SMALL for way in ("captured", "process")]
    return [cell for cell in every if not only or cell[0] in only]


def run(
    out: TextIO, total: float, *, device: str = "cuda", models: int = 16, seconds: float = 0.8, only: Sequence[str] = ()
) -> list[Line]:
    """Measure all cells that fit the time; each is a line of JSON, written at once.

    Args:
        out: the file.
        total: seconds that all cells may take; none begins later.
        device: "cuda", or for tests "cpu".
        models: of an array, and processes at once.
        seconds: of each measurement.
        only: networks; none for all.
    """
    end, found = time.monotonic() + total, list[Line]()

    def keep(**line: Any) -> None:
        found.append(line)
        out.write(json.dumps(line) + "\n")
        out.flush()

    with ExitStack() as stack:
        make_ways = partial(stays, partial(Ways, device, seconds, models))
        ways = stack.enter_context(make_ways())
        many: list[Staying] = []
        try:
            keep(way="peaks", **_call(ways, end, "peaks"))
        except ThinwireError as error:
            keep(way="peaks", error=str(error))
            ways = stack.enter_context(make_ways())
        for name, precision, way in cells(only):
            named = {"name": name, "precision": precision, "way": way}
            if time.monotonic() > end:
                keep(**named, error="no time was left")
                continue
            try:
                if way == "processes":
                    many = many or [stack.enter_context(stays(partial(One, device, seconds))) for _ in range(models)]
                    for kind, at in (("processes", "process"), ("processes captured", "captured")):
                        keep(**named | {"way": kind}, **_at_once(many, name, at, end))
                else:
                    # Processes that train no more would keep their memory.
                    for each in many:
                        each.process.kill()
                    many = []
                    line = _call(ways, end, "cell", name, precision, way)
                    keep(**named, **line)
                    if "CUDA error" in line.get("error", "") or "AcceleratorError" in line.get("error", ""):
                        # The context of that process is lost.
                        ways.process.kill()
                        ways = stack.enter_context(make_ways())
            except ThinwireError as error:
                keep(**named, error=str(error))
                if way == "processes":
                    for each in many:
                        each.process.kill()
                    many = []
                else:
                    ways.process.kill()
                    ways = stack.enter_context(make_ways())
    return found


def _call(process: Staying, end: float, method: str, *given: Any) -> Any:
    process.begin(method, *given)
    return process.end(_left(end))


def _left(end: float) -> float:
    """A cell that has begun may end a little later than all should."""
    return min(_CELL_SECONDS, max(0.0, end - time.monotonic()) + 15.0)


def _at_once(many: Sequence[Staying], name: str, kind: str, end: float) -> Line:
    start = time.perf_counter()
    if kind == "process":  # which comes first, and makes both
        for each in many:
            each.begin("make", name)
        errors = [error for each in many if (error := each.end(_left(end)))]
        if errors:
            raise ThinwireError(errors[0])
    setup, at = time.perf_counter() - start, time.monotonic() + 0.2
    for each in many:
        each.begin("turn", kind, at)
    total = sum(each.end(_left(end)) for each in many)
    return {"models": len(many), "models_per_s": total, "setup_s": round(setup, 2)}


# -- in words ----------------------------------------------------------------------------------------------------------


def table(lines: Sequence[Line]) -> str:
    """The ratios of protocol.md, and how much of the card's peaks an array and one captured model reach."""
    found: Mapping[tuple[str, str, str], Line] = {
        (line["name"], line["precision"], line["way"]): line for line in lines if "name" in line
    }
    peaks = next((line for line in lines if line["way"] == "peaks"), {})

    def rate(name: str, precision: str, way: str) -> float | None:
        return found.get((name, precision, way), {}).get("models_per_s")

    def ratio(name: str, precision: str, one: str, other: str) -> str:
        a, b = rate(name, precision, one), rate(name, precision, other)
        return "-" if not a or not b else f"{a / b:.2f}"

    def share(name: str, precision: str, way: str, what: str) -> str:
        cost = found.get((name, precision, "captured"), {}).get(what)
        peak = peaks.get(f"flops {precision}" if what == "flops" else "bytes")
        speed = rate(name, precision, way)
        return f"{100 * cost * speed / peak:.0f} %" if cost and peak and speed else "-"

    rows = ["| network | precision | array / process | array / captured | FLOPs: array, one | bytes: array, one |"]
    rows.append("|---|---|---|---|---|---|")
    for precision in ("bf16", "tf32"):
        for name in PAPER:
            both = [
                ", ".join(share(name, precision, way, what) for way in ("array on device", "captured"))
                for what in ("flops", "bytes")
            ]
            first = ratio(name, precision, "array", "process")
            rows.append(
                f"| {name} | {precision} | {first} | {ratio(name, precision, 'array on device', 'captured')} | "
                f"{both[0]} | {both[1]} |"
            )
    for name in _IMAGES:
        gain = ratio(name, "bf16", "array on device" + _LAST, "captured" + _LAST)
        rows.append(f"| {name}{_LAST} | bf16 | - | {gain} | - | - |")
    rows += ["", "| network | array / processes | array / processes captured |", "|---|---|---|"]
    for name in SMALL:
        others = (ratio(name, "tf32", "array on device", way) for way in ("processes", "processes captured"))
        rows.append(f"| {name} | {' | '.join(others)} |")
    return "\n".join(rows)


def main(arguments: Sequence[str]) -> None:
    """Parse the command line, measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m reproductions.hfta.gpu")
    parser.add_argument("--seconds", type=float, default=200.0, help="no cell begins later")
    parser.add_argument("--out", type=Path, default=Path("hfta_gpu.jsonl"))
    parser.add_argument("--models", type=int, default=16)
    parser.add_argument("--each", type=float, default=0.8, help="seconds of a measurement")
    parser.add_argument("--only", default="", help="networks, separated by commas")
    given = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    only = [name for name in given.only.split(",") if name]
    with given.out.open("a") as out:
        lines = run(out, given.seconds, device=device, models=given.models, seconds=given.each, only=only)
    sys.stdout.write(table(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
