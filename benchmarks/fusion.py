# SPDX-License-Identifier: Apache-2.0
"""A sweep as one array against its trials one after another.

python -m benchmarks.fusion [--quick]

The process keeps freed memory (`fusion.keep_memory`), for both alike. `python -m reproductions hfta` compares training
steps with a loop over models and with `torch.vmap`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch

from benchmarks.paired import Row, show
from thinwire.arrays.fusion import clear_autotune_cache, keep_memory
from thinwire.arrays.sweep.sampling import RandomSampler
from thinwire.arrays.sweep.space import Space, parse_domain
from thinwire.arrays.sweep.sweeping import sweep
from thinwire.arrays.sweep.training import Plan, train_alone
from thinwire.lab.tasks import load


def sweep_rows(quick: bool) -> list[Row]:
    """Measure trials of `digits` as one array and one after another: seconds, ratio, difference of losses."""
    rows: list[Row] = []
    for size, trials, steps in (("mlp", 64, 50 if quick else 300), ("cnn", 16, 10 if quick else 300)):
        space = Space({"lr": parse_domain("log:1e-4:1e-1"), "momentum": parse_domain("0:0.95")})
        fixed = Space({**space.domains, "model_size": parse_domain(size)})
        plan = Plan(load("digits"), steps=steps)
        # Neither time should include reading the data, or what torch loads with a process's first optimizer.
        train_alone(replace(plan, steps=1), RandomSampler(fixed, seed=0).ask(1)[0])
        start = time.perf_counter()
        fused = sweep(plan, RandomSampler(fixed, seed=0), trials)
        middle = time.perf_counter()
        alone = [train_alone(plan, each.trial) for each in fused]
        after = time.perf_counter()
        apart = max(abs(a.loss - b.loss) for a, b in zip(fused, alone, strict=True))
        best = [min(every, key=lambda each: each.loss).trial.number for every in (fused, alone)]
        words = "same best" if best[0] == best[1] else f"best {best[0]} and {best[1]}"
        seconds = f"{middle - start:.2f}", f"{after - middle:.2f}", f"{(after - middle) / (middle - start):.2f}"
        rows.append((f"{trials} trials of digits, {size}, {steps} steps", *seconds, f"{apart:.1e}", words))
    return rows


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    keep_memory()
    clear_autotune_cache()
    head = ("sweep", "array, s", "one by one, s", "ratio", "largest difference of losses", "trial")
    show(head, ("---",) * len(head), *sweep_rows(quick))


if __name__ == "__main__":
    main()
