# SPDX-License-Identifier: Apache-2.0
"""Local SGD sends as many times less as its period has steps."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from reproductions.shared.claims import Attempt, Claim, Outcome, Result, judged
from reproductions.shared.ended import ended
from thinwire.lab.emulate import available
from thinwire.lab.runs.comparison import Comparison, compare
from thinwire.lab.runs.defaults import resolve

_PERIOD = 8
_LINK = "200mbit"
_WIRE_TOLERANCE = 0.03


def measure(attempt: Attempt) -> Result:
    """Train both ways and compare the counted bytes."""
    link = None if available() else _LINK
    steps, rounds = (16, 1) if attempt.quick else (40, 3)
    settings = resolve(
        {
            "task": "text",
            "model": "0.5m",
            "workers": 4,
            "link": link,
            "steps": steps,
            "batch_size": 2,
            "eval_every": steps,
            "eval_limit": 16,
        }
    )
    done = compare(
        settings,
        ["AllReduce()", f"LocalSGD(period={_PERIOD})"],
        attempt.folder / "runs",
        rounds=rounds,
        title="Bytes of Local SGD against those of synchronous SGD",
        listener=attempt.listener,
        begin=attempt.begin,
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


CLAIM = Claim(
    name="local-sgd-bytes",
    sentence=f"Averaging parameters every {_PERIOD} steps, Local SGD communicates {_PERIOD} times less than "
    "synchronous mini-batch SGD.",
    paper="Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019, arXiv:1805.09767",
    published=f"{_PERIOD} times less: one round of communication every {_PERIOD} steps, by construction (Algorithm 1)",
    protocol="a GPT of 0.5 M parameters on text, 4 workers, 40 steps over 200 Mbit/s (quick: 16), 3 rounds (quick: 1); "
    "nothing to tune",
    parts={
        "payload": f"payload ratio exactly {_PERIOD}",
        "wire": f"wire ratio within {_WIRE_TOLERANCE:.0%} of it in every round",
    },
    costs="parameters of workers drift apart between averages: with the same learning rate the loss per step is higher",
    minutes=(2, 0.5),
    run=measure,
)
