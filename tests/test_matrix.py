# SPDX-License-Identifier: Apache-2.0
"""Each feature of a training loop works under each family of strategies, or is refused in words; a page says which."""

from __future__ import annotations

from functools import cache

import pytest

from tests.matrix import FAMILIES, FEATURES, PAGE, PROCESSES, expected, matches, page, run_row
from tests.pool import run_processes


@cache
def row(feature: str) -> list[dict[str, str]]:
    """All families of a feature, on the same processes."""
    return run_processes(PROCESSES.get(feature, 2), run_row, feature, seconds=110)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("feature", FEATURES)
def test_every_cell_works_or_is_refused_in_words(feature: str, family: str) -> None:
    for found in row(feature):
        assert matches(found[family], expected(feature, family)), found[family]


def test_the_page_is_what_the_cells_are() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.matrix"
