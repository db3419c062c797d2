# SPDX-License-Identifier: Apache-2.0
"""Damaged and forged checkpoints are refused by our own error on all ranks, before anything was touched."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.worker.rotten import DAMAGES, FORGERIES, RAW, cases, tried

OF_BYTES = ("truncate", "flip", "blank", "append", "replace_content", "swap_ranks", "json_value")


def check(results: list[tuple[str, str]]) -> None:
    """Each is refused; where bytes are damaged, the file is named with what to do."""
    for name, words in results:
        assert words, f"{name}: was loaded"
        if name.startswith(OF_BYTES):
            assert re.search(r"rank-000[01]\b.*Remove .*step-00000005", words), f"{name}: {words}"


def test_some_damaged_and_forged_checkpoints_are_refused_and_change_nothing(tmp_path: Path) -> None:
    check(tried(tmp_path, list(cases())[::7]))


@pytest.mark.slow
def test_every_damaged_and_forged_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    assert sum(count for _, count in DAMAGES) >= 150
    assert len(FORGERIES) + len(RAW) >= 50
    check(tried(tmp_path, list(cases())))
