"""Files that are written whole may be read by whom the process says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from stat import S_IMODE

import pytest

from thinwire.storage.files import write_atomically


@pytest.fixture(params=[0o022, 0o027, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_new_file_may_be_read_by_whom_the_umask_lets(umask: int, tmp_path: Path) -> None:
    write_atomically(tmp_path / "ours", b"content")
    (tmp_path / "theirs").write_bytes(b"content")
    modes = [S_IMODE((tmp_path / name).stat().st_mode) for name in ("ours", "theirs")]
    assert modes == [0o666 & ~umask] * 2


def test_a_file_that_was_private_stays_so(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(0o600)
    write_atomically(path, b"content")
    assert S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == b"content"
    assert list(tmp_path.iterdir()) == [path]
