# SPDX-License-Identifier: Apache-2.0
"""Damaged and forged checkpoints are refused by our own error on all ranks, before anything was touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.worker.rotten import DAMAGES, FORGERIES, RAW, cases, tried


def test_some_damaged_and_forged_checkpoints_are_refused_and_change_nothing(tmp_path: Path) -> None:
    for name, words in tried(tmp_path, list(cases())[::10]):
        assert words, f"{name}: was loaded"


@pytest.mark.slow
def test_every_damaged_and_forged_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    assert sum(count for _, count in DAMAGES) >= 150
    assert len(FORGERIES) + len(RAW) >= 50
    for name, words in tried(tmp_path, list(cases())):
        assert words, f"{name}: was loaded"
