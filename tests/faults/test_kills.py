# SPDX-License-Identifier: Apache-2.0
"""A few of the random runs of `tests.faults.kills`, in which workers are killed and join."""

from __future__ import annotations

import pytest

from tests.faults.kills import run
from tests.grids import fast_where


@pytest.mark.parametrize("seed", fast_where(lambda seed: seed < 4, range(12)))
def test_a_run_with_random_kills_and_joins_ends_with_one_model(seed: int) -> None:
    run(seed)
