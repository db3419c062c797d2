# SPDX-License-Identifier: Apache-2.0
"""The race: recipes and PyTorch's own methods on the same work over the same thin links.

    python -m benchmarks.race tune              learning rates: the same number of tries for everyone
    python -m benchmarks.race losses            loss curves at the chosen rates, several seeds
    python -m benchmarks.race times             seconds of a step on every link, without communication too
    python -m benchmarks.race table             seconds to the target
    python -m benchmarks.race all               everything that is missing, in this order

The rule, which was written before any run, and is not changed:

- Everyone trains the same model from the same parameters, on the same batches in the same order: the GPT of 6 M
  parameters on `text`, 4 sequences a worker and step, AdamW with 20 steps of warm-up and a constant rate.
- Rates are tuned at 4 workers with seed 100, apart from those that are judged: each racer has the same four, multiples
  of the task's own; one with an outer optimizer has four of that one's rate, at the inner rate that is best for
  LocalSGD of the same period. The one with the lowest held-out loss after the budget is taken.
- The budget is 240 steps. The target is the mean of the last three held-out losses of DDP, by seed.
- Steps to the target are those of the first evaluation from which the mean of three is no more than it, within twice
  the budget. No method here depends on timing, so curves are computed once per seed, and not per link.
- Seconds of a step are the median over blocks of whole periods, of at least 30 steps after 5, as rank 0's clock has
  them between synchronisations of all. Seconds to the target are steps times seconds, the median over seeds. Five of
  these products are checked by whole runs, which are told beside them.
- The wall is the step of `Local()` on the same link, in the same hour.

Each result is a file of benchmarks/results/race, written as soon as it is there, and is not repeated.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from thinwire.errors import ThinwireError
from thinwire.runs import Settings, launch
from thinwire.runs.defaults import resolve
from thinwire.storage.files import write_atomically

RESULTS = Path(__file__).parent / "results" / "race"
BUDGET, EVALUATED_EVERY, AVERAGED, MOST = 240, 10, 3, 2
TUNING_SEED, SEEDS = 100, (0, 1, 2)
RATES = (0.5, 1.0, 2.0, 4.0)
OUTER_RATES = (0.4, 0.6, 0.8, 1.0)
WARM_STEPS, BLOCK, FEWEST_STEPS = 5, 10, 30
LINKS = ("20mbit", "100mbit", "1gbit", "none", "100mbit+50ms")
SIZES = (4, 8)


@dataclass(frozen=True)
class Racer:
    """One of those that race.

    Args:
        name: in tables and file names.
        recipe: with {outer} where an outer optimizer's rate goes.
        whose: "thinwire" or "torch".
        optimizer: if not the task's AdamW.
        inner: of a racer with an outer rate, whose inner rate it takes.
        headline: raced with all seeds; others with the first.
    """

    name: str
    recipe: str
    whose: str = "thinwire"
    optimizer: str = "adamw"
    inner: str | None = None
    headline: bool = True


CODED = "ErrorFeedback(Nearest(bits=4))"
RACERS = (
    Racer("ddp", "ddp", "torch"),
    Racer("ddp-bf16", "ddp+bf16", "torch"),
    Racer("powersgd-1", "ddp+powersgd(rank=1)", "torch", headline=False),
    Racer("powersgd-2", "ddp+powersgd(rank=2)", "torch", headline=False),
    Racer("powersgd-4", "ddp+powersgd(rank=4)", "torch"),
    Racer("post-local-sgd", "post-local-sgd(period=8)", "torch"),
    Racer("AllReduce", "AllReduce()"),
    Racer("PowerSGD", "AllReduce(codec=PowerSGD(rank=4))"),
    Racer("LocalSGD", "LocalSGD(period=8)"),
    Racer("LocalSGD-4bit", f"LocalSGD(period=8, codec={CODED})"),
    Racer("Overlap", "OverlapLocalSGD(period=8)", headline=False),
    Racer("Overlap-4bit", f"OverlapLocalSGD(period=8, codec={CODED})"),
    Racer("Overlap-4bit-16", f"OverlapLocalSGD(period=16, codec={CODED})"),
    Racer("PushSum", "PushSum()", headline=False),
    Racer("OneBitAdam", "CompressedMomentum()", optimizer="onebit-adam", headline=False),
    Racer("LocalSGD-32", "LocalSGD(period=32)", headline=False),
    Racer("SlowMo", "SlowMo(period=32, momentum=0.4, lr={outer})", inner="LocalSGD-32", headline=False),
    Racer("DiLoCo", "DiLoCo(period=32, outer=OuterOptimizer(lr={outer}))", inner="LocalSGD-32"),
    Racer(
        "DiLoCo-4bit",
        f"DiLoCo(period=32, fragments=2, delay=8, mixing=0.5, codec={CODED}, outer=OuterOptimizer(lr={{outer}}))",
        inner="LocalSGD-32",
    ),
    Racer(
        "SparseLoCo",
        "DiLoCo(period=32, outer=OuterOptimizer('SGD', lr={outer}), "
        "codec=ErrorFeedback(ChunkedTopK(kept=64, chunk=4096, bits=2), decay=0.95))",
        inner="LocalSGD-32",
    ),
)
LOCAL = Racer("Local", "Local()")


# -- runs --------------------------------------------------------------------------------------------------------------


def settings_of(racer: Racer, rate: float, outer: float | None, *, workers: int = 4, **more: Any) -> Settings:
    """The settings of a run; `rate` is a multiple of the task's learning rate."""
    recipe = racer.recipe.format(outer=outer) if outer is not None else racer.recipe
    asked = {"task": "text", "model": "6m", "strategy": recipe, "workers": workers, "optimizer": racer.optimizer}
    found = resolve({**asked, "batch_size": 4, "threads": 1, "warmup_steps": 20, "eval_limit": 64, **more})
    return replace(found, lr=rate * found.lr)


def curve(settings: Settings) -> list[float]:
    """The held-out losses of a run without a link, one every few steps; NaN ends it."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "run"
        launch(settings, home)
        lines = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
        shutil.rmtree(home)
    return [line["eval_loss"] for line in lines if "eval_loss" in line]


def steps_to(losses: Sequence[float], target: float) -> int | None:
    """Steps after which the mean of the last evaluations first is no more than the target; None where it never is."""
    for k in range(AVERAGED, len(losses) + 1):
        if fmean(losses[k - AVERAGED : k]) <= target:
            return k * EVALUATED_EVERY
    return None


def last(losses: Sequence[float]) -> float:
    """The mean of the last evaluations within the budget; infinite where training failed."""
    within = losses[: BUDGET // EVALUATED_EVERY]
    return fmean(within[-AVERAGED:]) if len(within) == BUDGET // EVALUATED_EVERY else float("inf")


def kept(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a file holds; it is made first where it is missing."""
    if not path.exists():
        found = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(found, indent=1) + "\n").encode())
        sys.stdout.write(f"{path.relative_to(RESULTS)}\n")
        sys.stdout.flush()
    return json.loads(path.read_text())


# -- the four parts ----------------------------------------------------------------------------------------------------


def tries(racer: Racer) -> Iterator[tuple[float, float | None]]:
    """The rates that are tried: multiples of the task's, and of an outer optimizer."""
    if racer.inner is None:
        yield from ((rate, None) for rate in RATES)
    else:
        inner = tuned(next(each for each in RACERS if each.name == racer.inner))["rate"]
        yield from ((inner, outer) for outer in OUTER_RATES)


def tuned(racer: Racer) -> dict[str, Any]:
    """The chosen rates of a racer, and the held-out loss with each that was tried."""

    def attempt(rate: float, outer: float | None) -> dict[str, Any]:
        settings = settings_of(
            racer, rate, outer, steps=BUDGET, seed=TUNING_SEED, eval_every=EVALUATED_EVERY, nonfinite="raise"
        )
        try:
            losses = curve(settings)
        except ThinwireError as error:
            return {"rate": rate, "outer": outer, "losses": [], "failed": str(error)[:200]}
        return {"rate": rate, "outer": outer, "losses": losses}

    found = []
    for rate, outer in tries(racer):
        name = f"{racer.name}-{rate:g}" + ("" if outer is None else f"-{outer:g}")
        found.append(kept(RESULTS / "tune" / f"{name}.json", lambda rate=rate, outer=outer: attempt(rate, outer)))
    return min(found, key=lambda each: last(each["losses"]))


def losses_of(racer: Racer, seed: int) -> list[float]:
    """The curve of a seed at the chosen rates, over twice the budget or until well below the target."""
    best = tuned(racer)
    steps = BUDGET if racer.name == "ddp" else MOST * BUDGET

    def run() -> dict[str, Any]:
        settings = settings_of(racer, best["rate"], best["outer"], steps=steps, seed=seed, eval_every=EVALUATED_EVERY)
        return {"rate": best["rate"], "outer": best["outer"], "seed": seed, "losses": curve(settings)}

    return kept(RESULTS / "losses" / f"{racer.name}-{seed}.json", run)["losses"]


def time_of(racer: Racer, link: str, workers: int) -> dict[str, Any]:
    """What a step costs on a link: seconds, bytes, memory."""

    def run() -> dict[str, Any]:
        best: dict[str, Any] = {"rate": 1.0, "outer": None} if racer.name == LOCAL.name else tuned(racer)
        period = max(8, 32 * ("period=32" in racer.recipe), 16 * ("period=16" in racer.recipe))
        steps = WARM_STEPS + -(-FEWEST_STEPS // period) * period
        with tempfile.TemporaryDirectory() as folder:
            settings = settings_of(
                racer,
                best["rate"],
                best["outer"],
                workers=workers,
                steps=steps,
                seed=0,
                eval_every=steps,
                link=None if link == "none" else link,
            )
            summary = launch(settings, Path(folder) / "run")
            lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
        clock = [line["seconds"] for line in lines if "loss" in line]
        blocks = [clock[end] - clock[end - period] for end in range(len(clock) - 1, WARM_STEPS - 2 + period, -period)]
        return {
            "link": link,
            "workers": workers,
            "block_seconds": [taken / period for taken in blocks],
            **{name: summary.get(name) for name in SUMMARY},
        }

    return kept(RESULTS / "times" / f"{link}-{workers}-{racer.name}.json", run)


SUMMARY = (
    "payload_bytes_per_worker_per_step",
    "wire_bytes_per_worker_per_step",
    "exposed_seconds_per_step",
    "peak_memory_bytes",
)


def seeds_of(racer: Racer) -> Sequence[int]:
    """Those that a racer runs with."""
    return SEEDS if racer.headline else SEEDS[:1]


# -- the table ---------------------------------------------------------------------------------------------------------


def rows(link: str, workers: int) -> list[dict[str, Any]]:
    """A row for each racer whose runs are there, from the least time to the target."""
    targets = {seed: last(losses_of(RACERS[0], seed)) for seed in SEEDS}
    wall = median(time_of(LOCAL, link, workers)["block_seconds"])
    found = []
    for racer in RACERS:
        seconds = time_of(racer, link, workers)["block_seconds"]
        counts = [steps_to(losses_of(racer, seed), targets[seed]) for seed in seeds_of(racer)]
        reached = [count for count in counts if count is not None]
        found.append(
            {
                "name": racer.name,
                "whose": racer.whose,
                "seconds": median(seconds),
                "of the wall": wall / median(seconds),
                "steps": median(reached) if len(reached) == len(counts) else None,
                "to target": median(reached) * median(seconds) if len(reached) == len(counts) else None,
                "final loss": fmean(last(losses_of(racer, seed)) for seed in seeds_of(racer)),
            }
        )
    return sorted(found, key=lambda row: row["to target"] or float("inf"))


def table(link: str, workers: int) -> str:
    """The rows as Markdown."""
    found = rows(link, workers)
    ddp = next(row for row in found if row["name"] == "ddp")
    lines = [
        f"### {link}, {workers} workers",
        "",
        "| | seconds a step | of the speed without communication | steps to the target | seconds to it | "
        "DDP's over these | held-out loss after the budget |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in found:
        reached = row["to target"] is not None
        cells = [
            f"{row['name']} ({row['whose']})",
            f"{row['seconds']:.3f}",
            f"{row['of the wall']:.0%}",
            f"{row['steps']:.0f}" if reached else "not reached",
            f"{row['to target']:.0f}" if reached else "",
            f"{ddp['to target'] / row['to target']:.2f}" if reached and ddp["to target"] else "",
            f"{row['final loss']:.3f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run a part, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("tune", "losses", "times", "table", "all"))
    parser.add_argument("--only", nargs="*", default=[], help="racers by name")
    parser.add_argument("--links", nargs="*", default=list(LINKS))
    parser.add_argument("--workers", nargs="*", type=int, default=list(SIZES))
    asked = parser.parse_args()
    chosen = [racer for racer in RACERS if not asked.only or racer.name in asked.only]
    if asked.part in ("tune", "all"):
        for racer in chosen:
            best = tuned(racer)
            sys.stdout.write(f"{racer.name}: rate {best['rate']:g}, outer {best['outer']}\n")
    if asked.part in ("losses", "all"):
        for racer in chosen:
            for seed in seeds_of(racer):
                losses_of(racer, seed)
    if asked.part in ("times", "all"):
        for link in asked.links:
            for workers in asked.workers:
                for racer in (LOCAL, *chosen):
                    time_of(racer, link, workers)
    if asked.part in ("table", "all"):
        for link in asked.links:
            for workers in asked.workers:
                sys.stdout.write(table(link, workers) + "\n")


if __name__ == "__main__":
    main()
