# SPDX-License-Identifier: Apache-2.0
"""Simulate rounds of unequal workers that close by a rule: goodput and ages of late work.

Run `python -m benchmarks.closing FOLDER` for a table, `closing.json` and `closing.svg` over quorum and grace: 256
workers with speeds from a Pareto distribution, one of which fails every 30 seconds, three seeds.

Figures of one cell, means over the seeds:

- goodput: the work in closed rounds and under way, as a fraction of what all workers could do alone;
- mean age: of the contributions of closed rounds, in rounds;
- effective goodput: the work in closed rounds, each times the discount $(1+a)^{-1/2}$ of its age $a$, as the same
  fraction.

The default grace window of `CloseRule` follows this rule, which was written before the run that chose it: of all cells
whose effective goodput is at least 0.99 times the largest one, the one with the largest quorum; of these the one with
the longest grace window. Waiting wastes time and lateness wastes weight, and the effective goodput has both. Within one
percent more contributions in a round are better, since means over more workers have less noise. The first run chose a
quorum of 0.75 too. Since late workers end their next round with the others, it is 0.9, which is all of four workers, so
the default is still 0.75.

`python -m benchmarks.closing --slack` prints the effective goodput for values of `closing.SLACK`, the least grace
window as a fraction of the median duration, and of `closing.SPREADS`, the same in deviations of a worker's own
durations. The fleets have 12 equal workers, whose rounds vary by up to 2, 10, 30 or
60 %, and run for 2,000 rounds, each undisturbed and with a loss every three rounds and a stop every one and a half. The
rule, which was written before the run: the pair with the largest mean over the eight fleets is the default.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import fmean

from reproductions.shared.charts import Panel, lines
from thinwire.elastic import closing
from thinwire.elastic.closing import CloseRule
from thinwire.planning.plan.late import DEVIATIONS, QUORUMS, Cell, Fleet, Outcome, choose, simulate

SEEDS = (1, 2, 3)
SIZE, FAILURE_SECONDS, SECONDS = 256, 30.0, 900.0


def measure() -> dict[Cell, Outcome]:
    """Simulate all cells; figures are means over the seeds, except for the oldest age."""
    found: dict[Cell, Outcome] = {}
    for quorum in QUORUMS:
        for deviations in DEVIATIONS:
            rule = CloseRule(quorum, deviations=deviations)
            each = [
                simulate(Fleet.drawn(SIZE, seed=seed, failure_seconds=FAILURE_SECONDS), rule, until_seconds=SECONDS)
                for seed in SEEDS
            ]
            found[quorum, deviations] = Outcome(
                round(fmean(one.rounds for one in each)),
                fmean(one.goodput for one in each),
                max(one.oldest for one in each),
                fmean(one.mean_age for one in each),
                fmean(one.effective for one in each),
                sum(one.dropped for one in each),
            )
    return found


def draw(found: Mapping[Cell, Outcome], path: Path) -> None:
    """Draw the three figures over the quorum, a line for each grace window."""
    from thinwire.lab.report.picture import write_svg

    figures = {"goodput": "goodput", "mean_age": "mean age, rounds", "effective": "effective goodput"}
    panels = [
        Panel(
            label,
            {
                f"deviations={d:g}": [{quorum: getattr(found[quorum, d], name) for quorum in QUORUMS}]
                for d in DEVIATIONS
            },
            "quorum",
        )
        for name, label in figures.items()
    ]
    write_svg(lines("closing", panels, title="Rounds that close by a rule", caption="").figure, path)


def slacks() -> None:
    """Print the effective goodput for each least grace window."""
    before, means = (closing.SPREADS, closing.SLACK), dict[tuple[float, float], float]()
    fleets = [
        Fleet([1.0] * 12, failure_seconds=3.0 * disturbed, stop_seconds=1.5 * disturbed, spread=spread, seed=1)
        for disturbed in (0, 1)
        for spread in (0.02, 0.1, 0.3, 0.6)
    ]
    for closing.SPREADS, closing.SLACK in product((0.0, 1.0, 2.0, 3.0, 4.0), (0.02, 0.05, 0.1, 0.15, 0.2, 0.25)):
        found = [simulate(fleet, CloseRule(), until_seconds=2000.0).effective for fleet in fleets]
        means[closing.SPREADS, closing.SLACK] = fmean(found)
        row = " ".join(f"{each:.3f}" for each in found)
        print(f"SPREADS={closing.SPREADS:g} SLACK={closing.SLACK:4.2f}: {fmean(found):.4f}  {row}")
    closing.SPREADS, closing.SLACK = before
    print("the default by the rule: SPREADS={:g}, SLACK={:g}".format(*max(means, key=means.__getitem__)))


def main() -> None:
    """Print the table and the default; write the figures and the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("folder", nargs="?", type=Path)
    asked.add_argument("--slack", action="store_true", help="compare least grace windows")
    options = parser.parse_args()
    if options.slack:
        slacks()
        return
    folder, found = options.folder, measure()
    folder.mkdir(parents=True, exist_ok=True)
    print("quorum  deviations  goodput  effective  mean age  oldest  rounds")
    for (quorum, deviations), each in found.items():
        figures = (
            f"{each.goodput:7.3f}  {each.effective:9.3f}  {each.mean_age:8.2f}  {each.oldest:6d}  {each.rounds:6d}"
        )
        print(f"{quorum:6.2f}  {deviations:10.0f}  {figures}")
    print("the default by the rule: quorum={:g}, deviations={:g}".format(*choose(found)))
    rows = [
        {"quorum": quorum, "deviations": deviations, **asdict(each)} for (quorum, deviations), each in found.items()
    ]
    (folder / "closing.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    draw(found, folder / "closing.svg")


if __name__ == "__main__":
    main()
