# SPDX-License-Identifier: Apache-2.0
"""Permissions of files that are written atomically."""

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


def test_a_new_file_has_the_permissions_of_the_umask(umask: int, tmp_path: Path) -> None:
    write_atomically(tmp_path / "atomic", b"content")
    (tmp_path / "plain").write_bytes(b"content")
    modes = [S_IMODE((tmp_path / name).stat().st_mode) for name in ("atomic", "plain")]
    assert modes == [0o666 & ~umask] * 2


def test_a_private_file_stays_private(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(0o600)
    write_atomically(path, b"content")
    assert S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == b"content"
    assert list(tmp_path.iterdir()) == [path]
