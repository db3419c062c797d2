# SPDX-License-Identifier: Apache-2.0
"""`make bench`: speeds against DDP in the same run, in about five minutes, each as a ratio with its spread.

python -m benchmarks [--all [--quick]]

On two cores a step of the 6 M GPT takes 0.65 s without a link, 0.9 s of DDP at 1 Gbit and 4 s at 100 Mbit: 15 s for one
worker, 60 s unshaped, 75 s at 1 Gbit and 150 s at 100 Mbit, starts included. With `--all` all other bars about time
follow: coresets, stragglers, exposed time, compression; half an hour, with `--quick` a third of that.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import coreset, stragglers, turns
from benchmarks.paired import Row, show
from thinwire.lab.emulate import available
from thinwire.lab.report.statistics import ratios
from thinwire.lab.runs import Comparison, compare, resolve

WORKERS = 4


def exposed(steps: int, rounds: int) -> Comparison:
    """AllReduce and LocalSGD(8) over 100 Mbit, the 6 M-parameter GPT."""
    names = ["AllReduce()", "LocalSGD(period=8)"]
    asked = {"task": "text", "model": "6m", "workers": WORKERS, "link": "100mbit", "strategy": names[0]}
    settings = resolve({**asked, "steps": steps, "batch_size": 4, "eval_limit": 8})
    folder = Path(tempfile.mkdtemp(prefix="thinwire-bench-")) / "comparison"
    return compare(settings, names, folder, rounds=rounds)


def exposed_row(comparison: Comparison) -> Row:
    """How much of AllReduce's waiting LocalSGD(8) keeps."""
    whole, local = ([each["exposed_seconds_per_step"] for each in rounds] for rounds in comparison.rounds)
    every = ratios(local, whole)
    extremes = f"{every.low:.4f} to {every.high:.4f}"
    return ("exposed: LocalSGD(8) / AllReduce, 100mbit", f"{every.median:.4f}", extremes, "0.1125 to 0.1375")


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Speeds against DDP in the same run.")
    parser.add_argument("--all", action="store_true", help="all other bars about time too")
    parser.add_argument("--quick", action="store_true", help="with --all, in a third of the time")
    options = parser.parse_args()
    whole, quick = options.all, options.quick
    show(("what", "median", "quartiles or range", "bar"), ("---",) * 4)
    for name in ("bare", "ddp", "recipes"):
        show(*turns.rows(name, rounds=3 if name == "recipes" else 20 if whole and not quick else 8))
    if whole:
        show(*others(emulated=available() is None, quick=quick))
    if reason := available():
        print(f"\nlinks are not emulated: {reason}")


def others(*, emulated: bool, quick: bool) -> Iterator[Row]:
    """The other bars about time."""
    yield from coreset.rows(quick=quick)
    yield from stragglers.rows(quick=quick)
    if emulated:
        yield exposed_row(exposed(steps=16 if quick else 32, rounds=1 if quick else 3))
    yield from turns.rows("compressed", rounds=4 if quick else 12)


if __name__ == "__main__":
    main()
