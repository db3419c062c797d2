# SPDX-License-Identifier: Apache-2.0
"""Budgets over real processes, whose links change their rate during the run."""

from __future__ import annotations

import pytest

from benchmarks.budget import measured
from thinwire.lab.emulate import available

pytestmark = [
    pytest.mark.slow,
    pytest.mark.emulation,
    pytest.mark.skipif(available() is not None, reason=str(available())),
]


@pytest.mark.parametrize("recipe", ["AllReduce(ErrorFeedback(Nearest()))", "LocalSGD(2, codec=PowerSGD())"])
def test_a_budget_per_second_is_used_and_kept_while_links_change(recipe: str) -> None:
    found = measured(recipe, "1MB/s", workers=2, steps=150, rates=["20mbit", "200mbit", "60mbit"])
    # A busy machine may stop a worker for a while within a span, or before it; means over spans hardly show that.
    assert 0.9 <= sum(found.used) / len(found.used) <= 1.02
    assert max(found.used) <= 1.1
