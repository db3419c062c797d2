# SPDX-License-Identifier: Apache-2.0
"""Coded means that travel while workers go on: step times against steps without communication, and losses; the 6 M GPT.

python -m benchmarks.overlapped [--quick] [--links 35mbit,100mbit] [--steps 240] [--rounds 3]

Every round has a seed of its own. A row's ratio of times is the median over rounds, and its spread their range; losses
are held-out losses after the same number of steps, relative to the same recipe without a codec. The bars are 1.06 and
1.01. On a machine that does other things meanwhile the times say nothing. Needs network namespaces.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from thinwire.emulate import available
from thinwire.runs.comparison import Comparison, compare
from thinwire.runs.defaults import resolve

WORKERS = 4
ALONE, LOCAL = "Local()", "LocalSGD(period=8)"
OVERLAPPED = ("OverlapLocalSGD(period=8{})", "DiLoCo(period=8, delay=6, mixing=0.5{})")
CODEC = ", codec=Quantize(4)"
Row = tuple[str, ...]


def comparison(link: str, steps: int, rounds: int) -> Comparison:
    """All recipes over one link, with and without the codec."""
    coded = [recipe.format(codec) for recipe in OVERLAPPED for codec in ("", CODEC)]
    asked = {"task": "text", "model": "6m", "workers": WORKERS, "link": link, "strategy": ALONE}
    settings = resolve({**asked, "steps": steps, "batch_size": 4, "eval_limit": 8})
    folder = Path(tempfile.mkdtemp(prefix="thinwire-bench-")) / "comparison"
    return compare(settings, [ALONE, LOCAL, *coded], folder, rounds=rounds)


def ratios(found: Comparison, key: str, strategy: str, base: str) -> list[float]:
    """A figure of one recipe relative to that of another, in every round."""
    pair = (found.rounds[found.strategies.index(name)] for name in (strategy, base))
    return [float(one[key]) / float(other[key]) for one, other in zip(*pair, strict=True)]


def rows(found: Comparison, link: str) -> Iterator[Row]:
    """One line for each recipe that overlaps."""
    for recipe in OVERLAPPED:
        plain, coded = recipe.format(""), recipe.format(CODEC)
        for name in (plain, coded):
            times = ratios(found, "seconds_per_step", name, ALONE)
            losses = [ratios(found, "eval_loss", name, base) for base in (plain, LOCAL)]
            yield (link, name, with_range(times), *(with_range(each) for each in losses))


def with_range(values: Sequence[float]) -> str:
    """The median, and the least and the most."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main(arguments: Sequence[str]) -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--links", default="35mbit,100mbit")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args(arguments)
    if (reason := available()) is not None:
        sys.exit(f"links are not emulated: {reason}")
    steps, rounds = (16, 1) if chosen.quick else (chosen.steps, chosen.rounds)
    print("| link | recipe | step / step alone | loss / uncoded | loss / LocalSGD(8) |")
    print("|---|---|---|---|---|", flush=True)
    for link in chosen.links.split(","):
        for row in rows(comparison(link, steps, rounds), link):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
