# SPDX-License-Identifier: Apache-2.0
"""Local SGD sends as many times less as its period has steps."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from reproductions.shared.claims import Attempt, Claim, Outcome, Result, emulated, ended, judged
from thinwire.lab.runs import Comparison

_PERIOD = 8
_LINK = "200mbit"
_WIRE_TOLERANCE = 0.03


def measure(attempt: Attempt) -> Result:
    """Train both ways and compare the counted bytes."""
    link, (steps, rounds) = emulated(_LINK), (16, 1) if attempt.quick else (40, 3)
    asked = {"task": "text", "model": "0.5m", "workers": 4, "link": link, "steps": steps, "batch_size": 2}
    done = attempt.compare(
        "runs",
        ["AllReduce()", f"LocalSGD(period={_PERIOD})"],
        {**asked, "eval_every": steps, "eval_limit": 16},
        rounds=rounds,
        title="Bytes of Local SGD against those of synchronous SGD",
    )
    return judge(ended(done), link)


def judge(done: Comparison, link: str | None) -> Result:
    """Whether the ratios are what they should be."""
    payload = _ratios(done, "payload_bytes_per_worker_per_step")
    wire = _ratios(done, "wire_bytes_per_worker_per_step") if link else []
    exact = all(abs(ratio - _PERIOD) < 1e-9 for ratio in payload)
    close = all(abs(ratio / _PERIOD - 1) <= _WIRE_TOLERANCE for ratio in wire)
    on_wire = f", {fmean(wire):.3f} times less on the wire" if wire else ", wire not measured (no namespaces here)"
    details: dict[str, Any] = {"payload ratios": payload, "wire ratios": wire, "link": link}
    shown = wire or payload
    return Result(
        parts={"payload": judged(exact), "wire": judged(close) if link else Outcome.UNDECIDED},
        measured=f"{fmean(payload):.6g} times less payload{on_wire}",
        value=fmean(shown),
        least=min(shown),
        most=max(shown),
        details={**details, "exposed time ratios": _ratios(done, "exposed_seconds_per_step")},
    )


def _ratios(done: Comparison, key: str) -> list[float]:
    """Synchronous over local, for each round."""
    return [synchronous[key] / local[key] for synchronous, local in zip(*done.rounds, strict=True)]


CLAIM = Claim.read(__file__, measure, globals())
