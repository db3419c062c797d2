# SPDX-License-Identifier: Apache-2.0
"""Arrays kept in the user's cache folder, the progress bar, and the numbers of words."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from thinwire.lab.tasks.data.cache import cache_folder, cached
from thinwire.lab.tasks.data.decode import progress
from thinwire.lab.tasks.data.vocabulary import UNKNOWN, Vocabulary, tokens


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


@pytest.mark.parametrize(
    ("platform", "variables", "folder"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/thinwire"),
        ("linux", {}, "/home/me/.cache/thinwire"),
        ("darwin", {}, "/home/me/Library/Caches/thinwire"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/thinwire/Cache"),
        ("linux", {"THINWIRE_CACHE": "/mine"}, "/mine"),
    ],
)
def test_the_cache_is_in_the_system_s_folder_for_caches(
    platform: str, variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    assert cache_folder() == Path(folder)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_drawn_on_a_terminal_only(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(progress(range(10), 10, title="decoding")) == list(range(10))
    assert ("decoding [###" in stream.getvalue()) == terminal
    assert stream.getvalue().endswith("\x1b[K") == terminal


def test_words_have_numbers_by_frequency_and_rare_ones_are_unknown() -> None:
    vocabulary = Vocabulary.of([tokens("The cat, the dog; the CAT")], size=7, occurrences=2)
    assert vocabulary.words[4:] == ("the", "cat")
    assert vocabulary.numbers(tokens("the cat barks")) == [4, 5, UNKNOWN]
    assert vocabulary.sentence([4, 5, 2, 4]) == ["the", "cat"]
