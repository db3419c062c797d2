# SPDX-License-Identifier: Apache-2.0
"""Verification of a record and its replay. Each check returns why the run does not count, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

from thin_gpt.referee import Entry, Record, Run, replay_of, run
from thin_gpt.task import SIZES, Text

SPREAD, JUMP, NEAR = 1e-4, 0.03, 0.05
OVERHEAD, SLACK_BYTES, SLACK_PER_STEP = 1.25, 200_000, 3_000


def _completed(record: Record, replay: Record) -> str:
    return record.get("failed") or (f"replay: {replay['failed']}" if "failed" in replay else "")


def _sandbox(record: Record, replay: Record) -> str:
    return "; ".join(record["violations"] or replay["violations"])


def _weights_equal(record: Record, replay: Record) -> str:
    spread = record["spread"]
    if spread <= SPREAD:
        return ""
    return f"final parameters differ between workers by {spread:.2g} of the largest. finish() must make them equal"


def _weights_earned(record: Record, replay: Record) -> str:
    before, after = record["before_finish"], record["final"]
    if abs(after - before) <= JUMP * before:
        return ""
    return f"finish() moved the held-out loss of the mean model from {before:.4f} to {after:.4f}"


def _bytes_claimed(record: Record, replay: Record) -> str:
    if record["wire"] is None:
        return ""
    slack = SLACK_BYTES + SLACK_PER_STEP * record["steps"]
    claimed, carried = sum(record["claimed"]), sum(record["wire"])
    if carried > OVERHEAD * claimed + slack * len(record["wire"]):
        return f"workers claim {claimed:.0f} bytes sent, and their interfaces carried {carried}"
    if carried < claimed / OVERHEAD:
        return f"workers claim {claimed:.0f} bytes sent, and their interfaces carried only {carried}"
    return ""


def _one_pass_per_step(record: Record, replay: Record) -> str:
    for rank, handed in enumerate(record["handed"]):
        for what in ("forwards", "updates"):
            if record[what][rank] != handed and not (record["killed"] and record[what][rank] < handed):
                return f"worker {rank} got {handed} batches and made {record[what][rank]} {what}"
    for rank, (forward, backward) in enumerate(replay["passes"]):
        if (forward, backward) != (replay["handed"][rank],) * 2:
            steps = replay["handed"][rank]
            return f"worker {rank} replayed {steps} steps in {forward} forward and {backward} backward passes"
    return ""


def _replayed(record: Record, replay: Record, *, exact: bool = True) -> str:
    if record["digest"] is None:
        return ""
    if exact and record["digest"] != replay["digest"]:
        return f"the replay ends with parameters {replay['digest']}, and the run had {record['digest']}"
    steps = len(replay["training"])
    own, again = fmean(record["training"][:steps]), fmean(replay["training"])
    return "" if abs(own - again) <= NEAR * again else f"the replay's training loss is {again:.4f}, the run's {own:.4f}"


def _memory(record: Record, replay: Record) -> str:
    limit = SIZES[record["size"]].memory
    return "" if record["memory"] <= limit else f"a worker used {record['memory']:.0f} bytes. The limit is {limit}"


CHECKS: dict[str, Callable[..., str]] = {
    "sandbox": _sandbox,
    "weights equal": _weights_equal,
    "weights earned": _weights_earned,
    "bytes": _bytes_claimed,
    "one pass per step": _one_pass_per_step,
    "replay": _replayed,
    "memory": _memory,
}


def check(record: Record, replay: Record, *, replayable: bool = True) -> dict[str, str]:
    """The failed checks of a record, by name, with the reason; empty if it counts."""
    if reason := _completed(record, replay):
        return {"completed": reason}
    options: dict[str, dict[str, Any]] = {"replay": {"exact": replayable}}
    found = {name: test(record, replay, **options.get(name, {})) for name, test in CHECKS.items()}
    return {name: reason for name, reason in found.items() if reason}


def plan_of(record: Record, entry: Entry) -> Run:
    """The run of a record."""
    names = ("size", "track", "seed", "rate", "outer", "trunk", "decay", "stop", "every", "workers", "local")
    return Run(entry, **{name: record[name] for name in names})


def verify(record: Record, entry: Entry, text: Text | None = None) -> dict[str, str]:
    """Replay the first steps of a record and check it."""
    if "failed" in record:
        return {"completed": record["failed"]}
    replay = run(replay_of(plan_of(record, entry)), text)
    return check(record, replay, replayable=entry.replayable)
