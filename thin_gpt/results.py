# SPDX-License-Identifier: Apache-2.0
"""Records as lines of JSON, and what they amount to: rates, targets, steps and seconds to them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from thin_gpt.referee import Entry, Record
from thin_gpt.task import REPLAYED, SEEDS, SIZES, START_OUTER, START_RATE, TUNING_SEED
from thin_gpt.tuning import OUTER_RATIO, OUTER_TRIES, at_edge, best_rate, next_rate
from thin_gpt.verdicts import seconds_at, steps_to, target_of

THINNED = 10
FILE = "results.jsonl"


class Results:
    """The records of a folder; a new one is appended as a whole line and synced.

    Args:
        folder: where `results.jsonl` is or will be, or the path of such a file.
        fingerprint: of the text; records of other texts are ignored. By default, that of the last record.
    """

    def __init__(self, folder: str | Path, fingerprint: str = "") -> None:
        self.path = Path(folder) if Path(folder).suffix == ".jsonl" else Path(folder) / FILE
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        lines = [each for line in text.splitlines() if (each := _parsed(line)) is not None]
        self.fingerprint = fingerprint or (lines[-1]["text"] if lines else "")
        self.records = list[Record]()
        self._by_racer: dict[str, list[Record]] = {}
        for each in lines:
            if each["text"] == self.fingerprint:
                self._keep(each)

    def append(self, record: Record) -> None:
        """Add a record, with its per-step lists thinned."""
        thin = dict(record)
        if "step_ends" in thin:
            thin["step_ends"] = thin["step_ends"][THINNED - 1 :: THINNED]
            thin["training"] = thin["training"][:REPLAYED]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                # What a stopped process left is a line of its own, which is not read.
                file.write(b"" if file.read(1) == b"\n" else b"\n")
            file.write((json.dumps(thin) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        self._keep(thin)

    def _keep(self, record: Record) -> None:
        self.records.append(record)
        self._by_racer.setdefault(record["racer"], []).append(record)

    def find(self, **fields: Any) -> list[Record]:
        """The records with these values."""
        records = self._by_racer.get(fields["racer"], []) if "racer" in fields else self.records
        return [each for each in records if all(each.get(key) == value for key, value in fields.items())]

    def one(self, **fields: Any) -> Record | None:
        """The last record with these values."""
        return (self.find(**fields) or [None])[-1]

    # -- tuning --------------------------------------------------------------------------------------------------------

    def tries(self, name: str, size: str, *, outer: bool = False) -> dict[float, float]:
        """Loss by rate, or by outer rate."""
        kind, key = ("tune-outer", "outer") if outer else ("tune", "rate")
        found = self.find(kind=kind, racer=name, size=size, seed=TUNING_SEED)
        return {each[key]: loss_of_try(each) for each in found}

    def next_try(self, entry: Entry, size: str) -> tuple[str, float, float | None] | None:
        """The kind, rate and outer rate of the next try; None when the racer is tuned."""
        inner = self.tries(entry.name, size)
        rate = next_rate(inner, START_RATE)
        if rate is not None:
            return "tune", rate, START_OUTER if entry.outer else None
        if not entry.outer:
            return None
        outer = next_rate(self.tries(entry.name, size, outer=True), START_OUTER, ratio=OUTER_RATIO, tries=OUTER_TRIES)
        return None if outer is None else ("tune-outer", best_rate(inner), outer)

    def rates(self, entry: Entry, size: str) -> tuple[float, float | None, bool] | None:
        """The chosen rate and outer rate, and whether one is at an edge; None if the racer is not tuned."""
        if self.next_try(entry, size) is not None:
            return None
        inner, outer = self.tries(entry.name, size), self.tries(entry.name, size, outer=True)
        edge = at_edge(inner) or bool(outer and at_edge(outer))
        return best_rate(inner), best_rate(outer) if outer else None, edge

    # -- races ---------------------------------------------------------------------------------------------------------

    def target(self, size: str, seed: int) -> float | None:
        """DDP's loss at the end of its trunk."""
        found = self.one(kind="curve", racer="ddp", size=size, seed=seed)
        return target_of(found["curve"], SIZES[size].trunk) if found and "failed" not in found else None

    def reached(self, record: Record | None) -> float | None:
        """Steps to the target in a record's trunk."""
        target = None if record is None else self.target(record["size"], record["seed"])
        if record is None or target is None or "failed" in record:
            return None
        return steps_to(record["curve"], target, record["trunk"])

    def curve(self, name: str, size: str, seed: int = SEEDS[0]) -> Record | None:
        """The curve whose trunk reaches the target, else the one of the budget."""
        found = self.find(kind="curve", racer=name, size=size, seed=seed)
        reached = [each for each in found if self.reached(each) is not None]
        return (reached or found or [None])[0]

    def product(self, name: str, size: str, track: str) -> float | None:
        """Seconds to the target as steps of the curve times seconds of a step on the track."""
        steps, timed = self.reached(self.curve(name, size)), self.one(kind="time", racer=name, size=size, track=track)
        if steps is None or timed is None or "failed" in timed or timed["checks"]:
            return None
        return steps * timed["step_seconds"]

    def whole(self, name: str, size: str, track: str) -> list[float]:
        """Seconds to the target of whole runs that count, by seed."""
        found = [self.one(kind="whole", racer=name, size=size, track=track, seed=seed) for seed in SEEDS]
        return [
            seconds_at(each["step_ends"], steps / THINNED)
            for each in found
            if each and not each.get("checks") and (steps := self.reached(each)) is not None
        ]

    def seconds(self, name: str, size: str, track: str) -> float | None:
        """The median of whole runs, or else the product."""
        whole = self.whole(name, size, track)
        return median(whole) if whole else self.product(name, size, track)

    def ranking(self, size: str, track: str) -> list[str]:
        """Racers with a time, the fastest first."""
        names = dict.fromkeys(each["racer"] for each in self.records)
        timed = {name: self.seconds(name, size, track) for name in names}
        return sorted((name for name in timed if timed[name] is not None), key=lambda name: timed[name] or 0)

    def finals(self, name: str, size: str) -> list[float]:
        """The final loss at equal tokens of each seed, from curves or whole runs of equal workers."""
        trunk, found = SIZES[size].trunk, list[float]()
        for seed in SEEDS:
            same = [each for each in self.find(racer=name, size=size, seed=seed, trunk=trunk) if each["decay"]]
            equal = [each for each in same if each["track"].endswith("/equal")]
            own = [each for each in equal if each["kind"] in ("curve", "whole") and "failed" not in each]
            found += [own[0]["final"]] if own else []
        return found


def _parsed(line: str) -> Record | None:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None  # a process was stopped while it wrote this line


def loss_of_try(record: Record) -> float:
    """What a try is judged by: the final loss, or infinity where the run failed."""
    return record.get("final", float("inf")) if "failed" not in record else float("inf")


def step_seconds(ends: Sequence[float], period: int) -> float:
    """The median over blocks of whole periods, after the first third of the steps."""
    first = max(1, len(ends) // 3)
    blocks = [(ends[i + period] - ends[i]) / period for i in range(first - 1, len(ends) - period, period)]
    return median(blocks) if blocks else fmean(_gaps(ends))


def _gaps(ends: Sequence[float]) -> Iterator[float]:
    before = 0.0
    for end in ends:
        yield end - before
        before = end
