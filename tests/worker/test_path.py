# SPDX-License-Identifier: Apache-2.0
"""How many files a reader has to follow through one training step."""

from __future__ import annotations

import pytest

from benchmarks.hot_path import FOLLOWED, changes_of_file

# Steps without an average, and steps with one.
MOST = {"AllReduce": (25, 25), "LocalSGD": (11, 78), "DiLoCo": (19, 36), "PushSum": (20, 20)}


@pytest.mark.parametrize("recipe", FOLLOWED)
def test_a_step_goes_through_few_files(recipe: str) -> None:
    found = changes_of_file(recipe, 24)[16:]
    least, most = MOST[recipe.partition("(")[0]]
    assert 0 < min(found) <= least
    assert max(found) <= most
