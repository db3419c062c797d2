# SPDX-License-Identifier: Apache-2.0
"""Faults drawn from seeds; `python -m tests.faults.many --seeds 500` prints those whose runs ended badly."""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

# Torch reports every connection that is closed, with a stack of calls.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from tests.faults.drawn import PLACES, Fault, fault
from tests.faults.rank import Ending
from tests.faults.runs import endings_of, on_processes, on_threads, wrong

TOGETHER = 3
"""Runs that are under way at a time: most of their time is waiting."""


def results(faults: Iterable[Fault], together: int = TOGETHER) -> Iterator[tuple[Fault, list[Ending], str]]:
    """Every fault, how its ranks ended, and what is wrong with that; those on threads first."""
    faults = list(faults)
    light, real = ([each for each in faults if each.processes == processes] for processes in (False, True))
    with ThreadPoolExecutor(together) as pool:
        for each, endings in zip(light, pool.map(on_threads, light), strict=True):
            yield each, endings, wrong(each, endings)
    for i in range(0, len(real), together):
        for each, endings in on_processes(real[i : i + together]):
            yield each, endings, wrong(each, endings)


def main() -> None:
    """Run the seeds, and print what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.many", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--only", choices=list(PLACES), action="append", help="faults of this kind alone")
    parser.add_argument("--together", type=int, default=TOGETHER, help="runs at a time")
    parser.add_argument("--show", type=int, help="run this seed alone, and print every rank's ending")
    given = parser.parse_args()
    if given.show is not None:
        one = fault(given.show)
        endings = endings_of(one)
        print(one, *endings, wrong(one, endings) or "nothing is wrong", sep="\n")
        return
    faults = [fault(seed) for seed in range(given.first, given.first + given.seeds)]
    kinds, bad, start = Counter[str](), 0, time.monotonic()
    for each, _, problem in results((f for f in faults if not given.only or f.kind in given.only), given.together):
        kinds[f"{each.kind} ({'processes' if each.processes else 'threads'})"] += 1
        if problem:
            bad += 1
            print(f"{each}\n    {problem[-600:]}", flush=True)
    print(f"{sum(kinds.values())} faults in {time.monotonic() - start:.0f} s, {bad} ended badly", dict(kinds))


if __name__ == "__main__":
    main()
