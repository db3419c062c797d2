# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.race`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import benchmarks.race as rule
from benchmarks.peers import LIBRARIES, install
from benchmarks.race import planner
from benchmarks.race.jobs import PARTS, jobs, missing, run_next
from benchmarks.race.page import PAGE, README, TABLES, page, readme, tables
from benchmarks.race.racers import LINKS, PLACES
from benchmarks.race.table import table
from reproductions.shared.committed import write_pages


def main() -> int:
    """Run what is missing, or say what it is."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.race", description=rule.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("next", "all", "left", "table", "plot", "page", "planner", "peers", "run"))
    parser.add_argument("names", nargs="*", help="of results, for run; of libraries, for peers; of links, for planner")
    parser.add_argument("--part", nargs="*", default=[], choices=PARTS, help="only these parts")
    parser.add_argument("--only", nargs="*", default=[], help="LINK/WORKERS/RACER, each a pattern, such as '*/4/ddp*'")
    parser.add_argument("--check", action="store_true", help="with page: write nothing; 1 if it would change")
    asked = parser.parse_args()
    if asked.what == "next":
        return 0 if run_next(asked.part, asked.only) else 3
    if asked.what == "all":
        return run_all(asked.part, asked.only)
    if asked.what == "run":
        for job in jobs():
            if job.name in asked.names:
                job.run()
        return 0
    if asked.what in ("table", "plot", "page"):
        return show(asked.what, check=asked.check)
    if asked.what == "planner":
        planner.ask(asked.names or tuple(LINKS))
        return 0
    if asked.what == "peers":
        for library in asked.names or LIBRARIES:
            install(library)
        return 0
    left = missing(asked.part, asked.only)
    for job in left:
        sys.stdout.write(f"{job.name:44} {job.seconds / 60:5.1f} minutes\n")
    for part in PARTS:
        seconds = [job.seconds for job in left if job.part == part]
        sys.stdout.write(f"{part}: {len(seconds)} runs, about {sum(seconds) / 60:.0f} minutes\n")
    return 0


def run_all(parts: Sequence[str], only: Sequence[str]) -> int:
    """Run everything that is missing, then draw the pictures and write the page; 1 if something could not run."""
    failed = 0
    while left := missing(parts, only):
        try:
            run_next(parts, only)
        except Exception as error:
            # Its traceback is kept, and it is not tried again.
            if not left[0].failed:
                raise
            sys.stdout.write(f"failed: {error}\n")
            failed = 1
    show("plot")
    show("page")
    return failed


def show(what: str, *, check: bool = False) -> int:
    """Print the tables, draw the pictures, or write the pages."""
    if what == "table":
        for task, link, workers in PLACES:
            sys.stdout.write(f"### {task}, {link}, {workers} workers\n\n{table(link, workers, task=task)}\n")
    elif what == "plot":
        # matplotlib is of no use to the runs.
        from benchmarks.race.pictures import draw_all

        for path in draw_all():
            sys.stdout.write(f"{path}\n")
    else:
        return write_pages({PAGE: page, TABLES: tables, README: readme}, check=check)
    return 0


if __name__ == "__main__":
    sys.exit(main())
