# SPDX-License-Identifier: Apache-2.0
"""Predicted bytes on the wire are those that interfaces count."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

from tests.planning.plan.wire import ELEMENTS, STEPS
from thinwire import parse
from thinwire.lab.emulate import Network, available, parse_links, run_workers
from thinwire.lab.emulate.network import LARGEST_PACKET, PACKET_SECONDS
from thinwire.planning.plan.traffic import DryRun

REASON = available()
HEADER_BYTES = 66  # of one packet: 14 of Ethernet, 20 of IP, and 32 of TCP with timestamps
RECIPES = [
    "AllReduce()",
    "LocalSGD(period=4)",
    "PushSum()",
    "AllReduce(codec=Quantize(8))",
    "OverlapLocalSGD(period=4)",
]


def predicted_payload(recipe: str, workers: int, rank: int) -> tuple[float, float]:
    """What a dry run says that a rank sends and receives in all steps."""
    settings: dict[str, Any] = {"workers": workers, "rank": rank, "dtype": torch.float32, "bucket_bytes": 8 << 20}
    run = DryRun(parse(recipe), [ELEMENTS], **settings)
    steps = [run.step() for _ in range(STEPS)]
    return sum(each.sent for each in steps), sum(each.received for each in steps)


@pytest.mark.slow
@pytest.mark.emulation
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize(("workers", "rate"), [(2, 1e8), (4, 1e8), (2, 1e9)])
def test_predicted_wire_bytes_are_those_of_the_interfaces(workers: int, rate: float) -> None:
    lines: list[tuple[int, str]] = []
    with Network(parse_links(f"{rate / 1e6:g}mbit", workers)) as network:
        exits = run_workers(
            [sys.executable, "-m", "tests.planning.plan.wire", *RECIPES],
            workers,
            network=network,
            environment={"OMP_NUM_THREADS": "1"},
            on_line=lambda rank, stream, line: lines.append((rank, line)),
            timeout=120,
        )
    assert not any(each.code for each in exits), lines[-10:]
    found = [(rank, *json.loads(line)) for rank, line in lines if line.startswith("[")]
    assert len(found) == workers * len(RECIPES)
    segment = min(LARGEST_PACKET, rate / 8 * PACKET_SECONDS) - HEADER_BYTES
    for rank, recipe, payload, sent, sent_packets, *_ in found:
        where = f"{recipe}, rank {rank} of {workers}"
        predicted, incoming = predicted_payload(recipe, workers, rank)
        # A compressed mean's pieces may be of unequal size.
        assert payload == pytest.approx(predicted, 0.01 if "Quantize" in recipe else 0.0), where
        # What is no header is payload; Gloo's own messages, and the barrier, are the rest.
        assert 0 <= sent - HEADER_BYTES * sent_packets - payload < 0.006 * payload, where
        # A packet of payload has a header, and so has its acknowledgement.
        expected = predicted + HEADER_BYTES * (predicted + incoming) / segment
        assert sent == pytest.approx(expected, 0.015), where
