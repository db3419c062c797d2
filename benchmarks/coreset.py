# SPDX-License-Identifier: Apache-2.0
"""Selection compared with apricot's lazy greedy, per class, and for a million points, each in its own process.

python -m benchmarks.coreset [--quick]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.paired import Row, show
from thinwire.lab.report.statistics import ratios, spread

Found = dict[str, Any]
FEATURES = 64


def gaussian(n: int) -> Tensor:
    """Points without structure, which are the hardest to represent."""
    return torch.from_numpy(np.random.default_rng(0).standard_normal((n, FEATURES)).astype(np.float32))


def clustered(n: int) -> Tensor:
    """Points of 200 overlapping clusters."""
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(200, FEATURES, generator=draw)
    return centres[torch.randint(200, (n,), generator=draw)] + 0.7 * torch.randn(n, FEATURES, generator=draw)


def cost(x: Tensor, indices: Tensor, sample: int | None = None) -> float:
    """The mean distance to the nearest chosen point, in float64; of a sample of the points where its size is given."""
    points = x if sample is None else x[torch.randperm(len(x), generator=torch.Generator().manual_seed(7))[:sample]]
    chosen, near = x[indices].double(), []
    for part in points.double().split(256):
        near.append(torch.cdist(part, chosen, compute_mode="donot_use_mm_for_euclid_dist").min(1).values)
    return float(torch.cat(near).mean())


def peak_bytes() -> int:
    """The peak memory of this process so far."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def measured(work: Callable[[], Tensor], x: Tensor, warm_up: Callable[[], object], sample: int | None = None) -> Found:
    """Seconds, additional memory, and the mean distance."""
    warm_up()
    before, start, cpu = peak_bytes(), time.perf_counter(), time.process_time()
    indices = work()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "nbytes": peak_bytes() - before,
        "mean_distance": cost(x, indices, sample),
        "chosen": len(indices),
    }


def apricot(n: int) -> Found:
    """The lazy greedy of apricot, over a dense matrix of similarities, whose computation is included."""
    import warnings

    warnings.simplefilter("ignore")
    from apricot import FacilityLocationSelection
    from sklearn.metrics import pairwise_distances

    x = gaussian(n)

    def work(points: np.ndarray, budget: int) -> Tensor:
        distances = pairwise_distances(points.astype(np.float64))
        np.subtract(distances.max(), distances, out=distances)
        fitted = FacilityLocationSelection(budget, metric="precomputed", optimizer="lazy").fit(distances)
        return torch.from_numpy(np.asarray(fitted.ranking, dtype=np.int64))

    return measured(lambda: work(x.numpy(), n // 10), x, lambda: work(x[:100].numpy(), 5))


def ours(n: int) -> Found:
    """The same points and budget, by `select`."""
    from thinwire.coreset import select

    x = gaussian(n)
    return measured(lambda: select(x, budget=n // 10).indices, x, lambda: select(x[:100], budget=5))


def per_class(n: int) -> Found:
    """10 % of ten classes."""
    from thinwire.coreset import select

    x, labels = gaussian(n), torch.arange(n) % 10
    return measured(lambda: select(x, fraction=0.1, labels=labels).indices, x, lambda: select(x[:100], budget=5), 2000)


def million(n: int) -> Found:
    """Many points by `sparse`, which does not compare all pairs, and as many random ones."""
    from thinwire.coreset import select

    x = clustered(n)
    work = lambda: select(x, fraction=0.1, method="sparse").indices  # noqa: E731
    found = measured(work, x, lambda: select(x[:100], budget=5), 2000)
    random = torch.randperm(n, generator=torch.Generator().manual_seed(1))[: found["chosen"]]
    return found | {"random_mean_distance": cost(x, random, 2000)}


def in_own_process(name: str, n: int) -> Found:
    """One measurement in its own process."""
    command = [sys.executable, "-m", "benchmarks.coreset", "one", name, str(n)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=3600)
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def rows(*, quick: bool = False) -> list[Row]:
    """(what, figure, detail, bar) of each bar."""
    found = [*_against_apricot(3 if quick else 5)] if find_spec("apricot") else []
    split = in_own_process("per_class", 50_000)
    found.append(
        ("per class, 50,000 x 64, 10 classes, 10 %", f"{split['seconds']:.1f} s", _memory(split), "20 s, 300 MB")
    )
    n = 100_000 if quick else 1_000_000
    many = in_own_process("million", n)
    distances = f"mean distance {many['mean_distance']:.3f}, random {many['random_mean_distance']:.3f}"
    found.append((f"sparse, {n:,} x 64, 10 %", f"{many['seconds']:.0f} s", f"{_memory(many)}; {distances}", "minutes"))
    return found


def _against_apricot(rounds: int) -> list[Row]:
    """Alternating, so that other load on the machine affects both."""
    turns = [[in_own_process(name, 10_000) for name in ("apricot", "ours")] for _ in range(rounds)]
    theirs, mine = turns[0]
    apart = abs(mine["mean_distance"] / theirs["mean_distance"] - 1)
    return [
        _faster("10,000 x 64, 10 %: times as fast as apricot on the same distances", turns),
        ("memory above the features: apricot's / ours", f"{theirs['nbytes'] / mine['nbytes']:.0f}",
         f"{mine['nbytes'] / 1e6:.0f} MB against {theirs['nbytes'] / 1e6:.0f} MB", "10"),
        ("cost: relative difference from apricot's", f"{apart:.1e}", "lazy greedy both", "1e-6"),
    ]  # fmt: skip


def _faster(what: str, pairs: list[list[Found]]) -> Row:
    theirs, mine = ([pair[i]["seconds"] for pair in pairs] for i in (0, 1))
    faster = ratios(theirs, mine)
    seconds = f"{spread(mine).median:.2f} s against {spread(theirs).median:.2f} s"
    return (what, f"{faster.median:.1f}", f"{faster.low:.1f} to {faster.high:.1f}; {seconds}", "5")


def _memory(found: Found) -> str:
    return f"{found['nbytes'] / 1e6:.0f} MB above the features"


def main(arguments: Sequence[str]) -> None:
    """Print a Markdown table, or one measurement as JSON."""
    if arguments[:1] == ["one"]:
        print(json.dumps(globals()[arguments[1]](int(arguments[2]))))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(arguments).quick
    show(("what", "figure", "detail", "bar"), ("---",) * 4, *rows(quick=quick))


if __name__ == "__main__":
    main(sys.argv[1:])
