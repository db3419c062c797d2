# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.race`."""

from __future__ import annotations

import argparse
import sys

import benchmarks.race as rule
from benchmarks.race.jobs import PARTS, missing, run_next


def main() -> int:
    """Run what is missing, or say what it is."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.race", description=rule.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("next", "all", "left"))
    parser.add_argument("--part", nargs="*", default=[], choices=PARTS, help="only these parts")
    parser.add_argument("--only", nargs="*", default=[], help="LINK/WORKERS/RACER, each a pattern, such as '*/4/ddp*'")
    asked = parser.parse_args()
    if asked.what == "next":
        return 0 if run_next(asked.part, asked.only) else 3
    if asked.what == "all":
        while run_next(asked.part, asked.only):
            pass
        return 0
    left = missing(asked.part, asked.only)
    for job in left:
        sys.stdout.write(f"{job.name:44} {job.seconds / 60:5.1f} minutes\n")
    for part in PARTS:
        seconds = [job.seconds for job in left if job.part == part]
        sys.stdout.write(f"{part}: {len(seconds)} runs, about {sum(seconds) / 60:.0f} minutes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
