# SPDX-License-Identifier: Apache-2.0
"""Arrays kept in the user's cache folder, and the numbers of words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from thinwire.lab.tasks.data.examples import UNKNOWN, Vocabulary, tokens
from thinwire.lab.tasks.data.files import cached


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_an_array_is_computed_once_and_again_when_its_file_is_damaged(cache: Path) -> None:
    calls: list[int] = []

    def make() -> np.ndarray:
        calls.append(1)
        return np.arange(5, dtype=np.uint8)

    for _ in range(2):
        assert cached("numbers", make).tolist() == [0, 1, 2, 3, 4]
    assert len(calls) == 1
    (cache / "numbers.npy").write_bytes(b"\x93NUMPY damaged")
    assert cached("numbers", make).tolist() == [0, 1, 2, 3, 4]
    assert len(calls) == 2
    assert [path.name for path in cache.iterdir()] == ["numbers.npy"]


def test_a_cache_that_cannot_be_written_is_not_needed(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    assert cached("numbers", lambda: np.arange(3, dtype=np.uint8)).tolist() == [0, 1, 2]


def test_words_have_numbers_by_frequency_and_rare_ones_are_unknown() -> None:
    vocabulary = Vocabulary.of([tokens("The cat, the dog; the CAT")], size=7, occurrences=2)
    assert vocabulary.words[4:] == ("the", "cat")
    assert vocabulary.numbers(tokens("the cat barks")) == [4, 5, UNKNOWN]
