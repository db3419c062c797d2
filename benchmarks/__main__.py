# SPDX-License-Identifier: Apache-2.0
"""`make bench`: speeds against DDP in the same run, in about five minutes, each as a ratio with its spread.

python -m benchmarks [--all [--quick]]

On two cores a step of the 6 M GPT takes 0.65 s without a link, 0.9 s of DDP at 1 Gbit and 4 s at 100 Mbit: 15 s for one
worker, 60 s unshaped, 75 s at 1 Gbit and 150 s at 100 Mbit, starts included. With `--all` all other bars about time
follow: coresets, stragglers, exposed time, compression; half an hour, with `--quick` a third of that.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import compressed, coreset, stragglers
from benchmarks.paired import run_in_turns
from thinwire.core.statistics import ratios
from thinwire.lab.emulate import available
from thinwire.lab.runs.comparison import Comparison, compare
from thinwire.lab.runs.defaults import resolve

WORKERS = 4
Row = tuple[str, str, str, str]


def against_ddp(link: str | None, workers: int, rounds: int, module: str = "against_ddp") -> dict[str, Any]:
    """Run a paired benchmark once and return what rank 0 wrote."""
    return run_in_turns(module, workers, str(rounds), link=link)


def paired_row(name: str, baseline: str, found: dict[str, Any], bar: str, contender: str = "thinwire") -> Row:
    """One line of the table: the ratio's median and quartiles, by the clock and by CPU time."""
    thinwire = found["contenders"][contender]
    wall, cpu = thinwire[f"speed_vs_{baseline}"], thinwire[f"cpu_speed_vs_{baseline}"]
    return (name, f"{wall['median']:.3f}", f"{wall['low']:.3f} to {wall['high']:.3f}; CPU {cpu['median']:.3f}", bar)


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


def main(arguments: Sequence[str]) -> None:
    """Print a Markdown table."""
    show(("what", "median", "quartiles or range", "bar"))
    show(("---",) * 4)
    emulated = available() is None
    for row in against(emulated=emulated, rounds=20 if "--all" in arguments and "--quick" not in arguments else 8):
        show(row)
    if "--all" in arguments:
        for row in others(emulated=emulated, quick="--quick" in arguments):
            show(row)
    if not emulated:
        print(f"\nlinks are not emulated: {available()}")


def against(*, emulated: bool, rounds: int) -> Iterator[Row]:
    """Speeds against DDP, and of one worker against the bare loop."""
    yield paired_row("attach on one worker, speed vs the bare loop", "bare", against_ddp(None, 1, rounds), "0.98")
    yield paired_row("AllReduce vs DDP, 4 workers, unshaped", "ddp", against_ddp(None, WORKERS, rounds), "0.98")
    if emulated:
        yield paired_row("AllReduce vs DDP, 4 workers, 1gbit", "ddp", against_ddp("1gbit", WORKERS, rounds), "0.98")
        found = against_ddp("100mbit", WORKERS, 3, "recipes")
        for name in found["contenders"]:
            if name != "ddp":
                yield paired_row(f"{name} vs DDP, 4 workers, 100mbit", "ddp", found, "", name)


def others(*, emulated: bool, quick: bool) -> Iterator[Row]:
    """The other bars about time."""
    yield from coreset.rows(quick=quick)
    yield from stragglers.rows(quick=quick)
    if emulated:
        yield exposed_row(exposed(steps=16 if quick else 32, rounds=1 if quick else 3))
        yield from compressed.rows(quick=quick)


def show(row: Sequence[str]) -> None:
    """Print one line of the table."""
    print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
