# SPDX-License-Identifier: Apache-2.0
"""What closes the gap between methods with rounds and DDP at equal tokens, on a small GPT of `thin_gpt`.

    python -m benchmarks.quality [--minutes 4]

Four workers train `thin_gpt`'s size `400k` on its text for 512 steps and 128 steps of decay. Nothing is emulated: only
losses are compared. The 60 runs or more take about 25 s each on one core. Each call continues where the last one
stopped. Results: `results/quality/results.jsonl`.

The rule, written before any run:

- `ddp`, `localsgd-8`, `overlap-8` and `diloco-32` (these three in 4 bits) are tuned with seed 100 by `thin_gpt`'s rule
  with five tries, and the outer rate of `diloco-32` with three, more where the best is at an edge. Variants run at the
  rates of their base.
- Variants: `dense end` switches to `AllReduce` in 4 bits for the last 64 steps; `dense start` uses it for the first 64;
  `moments` averages Adam's moments every 160 and 320 steps, in 32 bits, which `OverlapLocalSGD` does not offer.
- The *gap* of a run is its final held-out loss over DDP's of the same seed, minus 1. Seeds 0, 1 and 2.
- A variant *helps* if its gap is smaller than its base's in all three seeds, and by at least 0.5 % in the mean. It
  *hurts* if the same holds with the opposite sign. Otherwise it makes no difference that three seeds show.
- A recipe has *closed* the gap if its mean gap is at most 1 %.
- A variant becomes advice if it helps two bases, or if it helps one of them and closes its gap. Its bytes are told.

The second part, written after the first was run and before its own runs: `ddp`, the bases and their `dense start` train
four times as long, for 2,560 steps, at the rates of the first part. It was stopped after seven runs (kind `long`), of
`ddp` and `localsgd-8`: the rate at which DDP is best in 640 steps is too high for it in 2,560, where `localsgd-8` ended
3.6 to 4.6 % below it. That says nothing of the methods.

The third part, written then and before its own runs: `ddp long`, `localsgd-8 long` and `overlap-8 long` have 2,560
steps and are tuned in runs of that length by the same rule. Their gaps are to `ddp long`. A gap *shrinks* if it is
smaller than that of 640 steps in all three seeds, and by at least 0.5 % in the mean.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from thin_gpt.racers import RACERS
from thin_gpt.referee import Entry, Record, Run, run
from thin_gpt.results import Results
from thin_gpt.task import SEEDS, SIZES, START_OUTER, START_RATE, TUNING_SEED, load_text
from thin_gpt.tuning import OUTER_RATIO, best_rate, next_rate

FOLDER = Path(__file__).parent / "results" / "quality"
SIZE, PHASE, TRIES, OUTER_TRIES, HELPS, CLOSED = "400k", 64, 5, 3, 0.005, 0.01
LONGER, LONG = 4, ("ddp", "localsgd-8", "overlap-8")
_BITS = "codec=ErrorFeedback(Nearest(bits=4))"
_OUTER = "outer=OuterOptimizer('SGD', lr={outer}, momentum=0.9, nesterov=True)"
_DENSE, _MOMENTS = f"AllReduce({_BITS})", "moments=(160, 320)"
BASES = {
    "localsgd-8": f"LocalSGD(period=8, {_BITS}%s)",
    "overlap-8": f"OverlapLocalSGD(period=8, {_BITS})",
    "diloco-32": f"DiLoCo(period=32, {_BITS}, {_OUTER}%s)",
}
STEPS = SIZES[SIZE].trunk + SIZES[SIZE].decay


def _entry(name: str, phases: Mapping[int, str], *, outer: bool) -> Entry:
    like = RACERS["thinwire-diloco-32"]
    return Entry(name, like.file, {"recipe": phases}, outer=outer, allow=like.allow)


def entries() -> dict[str, Entry]:
    """The recipes by name; a variant is named `BASE, VARIANT`."""
    found = {"ddp": RACERS["ddp"]}
    for name, recipe in BASES.items():
        plain, outer = recipe.replace("%s", ""), "{outer}" in recipe
        shapes = {
            name: {0: plain},
            f"{name}, dense end": {0: plain, STEPS - PHASE: _DENSE},
            f"{name}, dense start": {0: _DENSE, PHASE: plain},
        }
        if plain != recipe:
            shapes[f"{name}, moments"] = {0: recipe % f", {_MOMENTS}"}
        found |= {each: _entry(each, phases, outer=outer) for each, phases in shapes.items()}
    return found | {f"{name} long": replace(found[name], name=f"{name} long") for name in LONG}


def pending(results: Results) -> Iterator[tuple[str, Run]]:
    """The runs that can be made now, with their kinds."""
    found, size = entries(), SIZES[SIZE]
    for name, entry in found.items():
        times = LONGER if name.endswith(" long") else 1
        plain = Run(entry, SIZE, seed=TUNING_SEED, trunk=times * size.trunk, decay=times * size.decay, every=0)
        base = name.partition(",")[0]
        inner, outer = results.tries(base, SIZE), START_OUTER if entry.outer else None
        if (rate := next_rate(inner, START_RATE, tries=TRIES)) is not None:
            yield "tune", replace(plain, rate=rate, outer=outer)
            continue
        plain = replace(plain, rate=best_rate(inner))
        if entry.outer:
            tried = results.tries(base, SIZE, outer=True)
            outer = next_rate(tried, START_OUTER, ratio=OUTER_RATIO, tries=OUTER_TRIES)
            if outer is not None:
                yield "tune-outer", replace(plain, outer=outer)
                continue
            outer = best_rate(tried)
        for seed in SEEDS:
            if not results.find(kind="whole", racer=name, seed=seed):
                yield "whole", replace(plain, seed=seed, outer=outer)


def gaps(results: Results, name: str) -> list[float]:
    """Of the seeds that were run, of DDP too."""
    names = name, "ddp long" if name.endswith(" long") else "ddp"
    pairs = [[results.one(kind="whole", racer=each, seed=seed) for each in names] for seed in SEEDS]
    return [own["final"] / ddp["final"] - 1 for own, ddp in pairs if own and ddp]


def outcome(own: Sequence[float], base: Sequence[float]) -> str:
    """What the rule says of a variant."""
    if min(len(own), len(base)) < len(SEEDS):
        return "not run"
    changes = [a - b for a, b in zip(own, base, strict=True)]
    if max(changes) < 0 and fmean(changes) <= -HELPS:
        return "helps"
    return "hurts" if min(changes) > 0 and fmean(changes) >= HELPS else "no difference"


def report(results: Results) -> str:
    """A table of all recipes."""
    lines = ["| Recipe | rate | outer | gap, three seeds | mean gap | MB sent | outcome |"]
    lines.append("| --- | ---: | ---: | --- | ---: | ---: | --- |")
    for name in entries():
        records, own = results.find(kind="whole", racer=name), gaps(results, name)
        if not own:
            continue
        base = name.partition(",")[0]
        told = "" if base == name else outcome(own, gaps(results, base))
        if name.endswith(" long"):
            told = "shrinks" if outcome(own, gaps(results, name[: -len(" long")])) == "helps" else "does not shrink"
        told = "" if name.startswith("ddp") else told + (", closed" if fmean(own) <= CLOSED else "")
        sent = fmean(records[0]["claimed"]) / 1e6
        each = ", ".join(f"{100 * gap:+.2f} %" for gap in own)
        outer = records[0]["outer"] or ""
        lines.append(
            f"| {name} | {records[0]['rate']:g} | {outer} | {each} | {100 * fmean(own):+.2f} % | {sent:.1f} | {told} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run what is left, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run later than this")
    options = parser.parse_args()
    text, until = load_text(), time.monotonic() + 60 * options.minutes
    results = Results(FOLDER, text.fingerprint)
    while time.monotonic() < until and (following := next(pending(results), None)):
        kind, plan = following
        record: Record = run(plan, text) | {"kind": kind}
        results.append(record)
        rates = f"rate {plan.rate:g} outer {plan.outer} seed {plan.seed}"
        print(f"{kind} {plan.entry.name}, {rates}: {record.get('final', record.get('failed'))}", flush=True)
    print(report(results))


if __name__ == "__main__":
    main()
