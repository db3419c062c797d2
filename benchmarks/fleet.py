# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of elastic and unequal fleets share: results as lines, processes that are watched and killed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "survival"


def keep(rows: Iterable[Mapping[str, Any]], name: str | None) -> None:
    """Print results as lines of JSON, each as soon as it is there, and append them to NAME.jsonl of the results."""
    for row in rows:
        line = json.dumps(row)
        print(line, flush=True)
        if name:
            RESULTS.mkdir(parents=True, exist_ok=True)
            with (RESULTS / f"{name}.jsonl").open("a") as file:
                file.write(line + "\n")


def tell(**said: Any) -> None:
    """Print a line for the parent, with the time."""
    print(json.dumps({"at": time.monotonic(), **said}), flush=True)


def kill(pids: Iterable[int]) -> None:
    """SIGKILL to processes, of which some may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Steps:
    """Measures how much of a fleet's summed speed is used, by when its workers' steps end.

    The window begins with the first round that ends after `warm` seconds and ends with the first one that ends `window`
    seconds later, by rank 0's steps.

    Args:
        lengths: seconds of each worker's own step.
        period: steps of a round.
        warm: seconds.
        window: seconds.
    """

    def __init__(self, lengths: Sequence[float], period: int, warm: float, window: float) -> None:
        self._lengths, self._period, self._warm, self._window = lengths, period, warm, window
        self._ends: list[list[tuple[float, int]]] = [[] for _ in lengths]

    def read(self, rank: int, stream: str, line: str) -> None:
        """A line of a worker, which tells each step's number."""
        if stream == "stdout" and line.startswith("{"):
            said = json.loads(line)
            self._ends[rank].append((said["at"], said["step"]))
        elif "Error" in line:
            print(f"rank {rank}: {line}", file=sys.stderr)

    def seen(self) -> tuple[float, float] | None:
        """When the window began and ended; None before its end."""
        ends = list(self._ends[0])
        rounds = [at for at, step in ends if step % self._period == 0]
        first = next((at for at in rounds if at > ends[0][0] + self._warm), None)
        last = next((at for at in rounds if first is not None and at > first + self._window), None)
        return None if first is None or last is None else (first, last)

    def used(self, what: str) -> dict[str, Any]:
        """The window's seconds, what each worker took in it, and their sum over what they could do alone."""
        seen = self.seen()
        assert seen is not None
        first, last = seen
        taken = [sum(1 for at, _ in each if first < at <= last) for each in self._ends]
        share = sum(taken) / (last - first) / sum(1 / each for each in self._lengths)
        return {"seconds": round(last - first, 2), what: taken, "of_summed_speed": round(share, 4)}
