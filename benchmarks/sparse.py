# SPDX-License-Identifier: Apache-2.0
"""SparseLoCo beside DiLoCo in fp32 at equal tokens: held-out losses, and what is left of the wait over a link.

python -m benchmarks.sparse FOLDER [--model 6m] [--steps 240] [--period 30] [--batch 4] [--first 0] [--rounds 3]
    [--link 100mbit]

Losses: both are trained for as many steps of as many windows, with AdamW and one learning rate; each round has a seed
of its own. They do not depend on the link, so that none is emulated. The bar is 1.005 of DiLoCo's.

Times: once for each recipe, two periods over the emulated link, with the share of a step in which workers only wait
for messages; the bar is 5 %. A worker's wait for another that computes longer counts too, so on a machine that does
other things meanwhile they say nothing. They need network namespaces, and `--link none` leaves them out.

Every run is kept in the folder, and the command goes on with those that are missing. It ends with all figures in
FOLDER/sparse.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from thinwire.core.statistics import ratios, spread
from thinwire.core.storage.files import write_atomically
from thinwire.lab.emulate import available
from thinwire.lab.runs.defaults import resolve
from thinwire.lab.runs.folder import RunFolder
from thinwire.lab.runs.launcher import launch

WORKERS = 4
SPARSE_CODEC = "ErrorFeedback(Gathered(ChunkedTopK(kept=64, chunk=4096, bits=2)), decay=0.95)"


def recipes(period: int) -> dict[str, str]:
    """The names of the recipes and what they are, the one to compare with first."""
    return {
        "DiLoCo": f"DiLoCo(period={period})",
        "SparseLoCo": f"DiLoCo(period={period}, outer=OuterOptimizer('SGD', lr=1.0), codec={SPARSE_CODEC})",
    }


def run(home: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """The summary of a run, which is made unless it is in the folder."""
    if (summary := RunFolder(home).summary()) is None:
        shutil.rmtree(home, ignore_errors=True)
        summary = launch(resolve(asked), home)
        print(f"{home.name}: {summary['eval_loss']:.4f}", file=sys.stderr, flush=True)
    return summary


def figures(chosen: argparse.Namespace) -> dict[str, Any]:
    """Losses by seed, and seconds of a step and of its waits, of every recipe."""
    shared = {"task": "text", "model": chosen.model, "workers": WORKERS, "batch_size": chosen.batch, "eval_limit": 64}
    named, size = recipes(chosen.period), f"{chosen.model}-{chosen.period}-{chosen.batch}"
    found: dict[str, Any] = {name: {"recipe": recipe, "losses": []} for name, recipe in named.items()}
    # Round by round, so that an interrupted comparison has whole rounds.
    for seed in range(chosen.first, chosen.first + chosen.rounds):
        for name, recipe in named.items():
            asked = {**shared, "strategy": recipe, "steps": chosen.steps, "seed": seed}
            summary = run(chosen.folder / f"{name}-{size}-{chosen.steps}-{seed}", asked)
            found[name]["losses"].append(summary["eval_loss"])
    if chosen.link == "none":
        return found
    for name, recipe in named.items():
        asked = {**shared, "strategy": recipe, "steps": 2 * chosen.period, "link": chosen.link}
        summary = run(chosen.folder / f"{name}-{size}-{chosen.link}", asked)
        for key in ("seconds_per_step", "exposed_seconds_per_step", "payload_bytes_per_worker_per_step"):
            found[name][key] = summary[key]
    return found


def table(found: dict[str, Any], link: str) -> Iterator[str]:
    """A line for each recipe."""
    base = found["DiLoCo"]["losses"]
    for name, row in found.items():
        over = ratios(row["losses"], base).words(".3f")
        line = f"| {name} | {spread(row['losses']).mean:.4f} | {over} |"
        if link != "none":
            step, waits = row["seconds_per_step"], row["exposed_seconds_per_step"]
            line += f" {row['payload_bytes_per_worker_per_step']:,.0f} | {step:.3f} s | {waits / step:.1%} |"
        yield line


def main(arguments: Sequence[str]) -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="6m")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--period", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4, help="windows a worker and step")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--link", default="100mbit")
    chosen = parser.parse_args(arguments)
    if chosen.link != "none" and (reason := available()) is not None:
        sys.exit(f"links are not emulated: {reason}; --link none measures the losses alone")
    chosen.folder.mkdir(parents=True, exist_ok=True)
    found = figures(chosen)
    asked = {name: getattr(chosen, name) for name in ("model", "steps", "period", "batch", "first", "rounds", "link")}
    write_atomically(chosen.folder / "sparse.json", (json.dumps({**asked, "recipes": found}, indent=1) + "\n").encode())
    timed = "" if chosen.link == "none" else f" payload per worker and step | seconds per step, {chosen.link} | waits |"
    print(f"| method | held-out loss | / DiLoCo |{timed}\n|{'---|' * (6 if timed else 3)}", flush=True)
    for line in table(found, chosen.link):
        print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
