# SPDX-License-Identifier: Apache-2.0
"""`make bench`: the bars that are about time, each as a ratio with its spread.

python -m benchmarks [--quick]
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import compressed, coreset, stragglers
from thinwire.emulate import Network, available, parse_links, run_workers
from thinwire.runs.comparison import Comparison, compare
from thinwire.runs.defaults import resolve

WORKERS = 4
Row = tuple[str, str, str, str]


def against_ddp(link: str | None, workers: int, rounds: int) -> dict[str, Any]:
    """Run the paired benchmark once and return what rank 0 wrote."""
    lines: list[str] = []
    command = [sys.executable, "-m", "benchmarks.against_ddp", str(rounds)]

    def keep(rank: int, stream: str, line: str) -> None:
        if rank == 0 and stream == "stdout":
            lines.append(line)

    if link is None:
        run_workers(command, workers, on_line=keep, timeout=900)
    else:
        with Network(parse_links(link, workers)) as network:
            run_workers(command, workers, network=network, on_line=keep, timeout=900)
    found: dict[str, Any] = json.loads("".join(lines))
    return found


def paired_row(name: str, baseline: str, found: dict[str, Any], bar: str) -> Row:
    """One line of the table: the ratio's median and quartiles, by the clock and by CPU time."""
    thinwire = found["contenders"]["thinwire"]
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
    every = [
        local["exposed_seconds_per_step"] / whole["exposed_seconds_per_step"]
        for whole, local in zip(*comparison.rounds, strict=True)
    ]
    spread = f"{min(every):.4f} to {max(every):.4f}"
    return ("exposed: LocalSGD(8) / AllReduce, 100mbit", f"{statistics.median(every):.4f}", spread, "0.1125 to 0.1375")


def main(arguments: Sequence[str]) -> None:
    """Print a Markdown table."""
    quick = "--quick" in arguments
    rounds = 6 if quick else 20
    show(("what", "median", "quartiles or range", "bar"))
    show(("---",) * 4)
    show(paired_row("attach on one worker, speed vs the bare loop", "bare", against_ddp(None, 1, rounds), "0.98"))
    show(paired_row("AllReduce vs DDP, 4 workers, unshaped", "ddp", against_ddp(None, WORKERS, rounds), "0.98"))
    for row in coreset.rows(quick=quick):
        show(row)
    for row in stragglers.rows(quick=quick):
        show(row)
    reason = available()
    if reason is not None:
        print(f"\nlinks are not emulated: {reason}")
        return
    show(paired_row("AllReduce vs DDP, 4 workers, 1gbit", "ddp", against_ddp("1gbit", WORKERS, rounds), "0.98"))
    show(exposed_row(exposed(steps=16 if quick else 32, rounds=1 if quick else 3)))
    for row in compressed.rows(quick=quick):
        show(row)


def show(row: Sequence[str]) -> None:
    """Print one line of the table."""
    print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
