# SPDX-License-Identifier: Apache-2.0
"""Files that are written atomically, and the paths that users give."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from stat import S_IMODE

import pytest

from tests.rules import for_each
from thinwire import ConfigError
from thinwire.core.storage.files import local_path, write_atomically


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


@for_each(["s3://bucket/run", "gs://bucket/run", "hdfs://host/run", "file:///run", "http://host/x"])
def test_a_url_is_no_path(url: str) -> None:
    for path in (url, Path(url)):  # which makes one slash of two
        with pytest.raises(ConfigError, match=r"is a URL\. Files are written to"):
            local_path(path)


def test_the_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert local_path("~/runs") == local_path(Path("~/runs")) == Path("/home/ada/runs")
    for path in ("runs/long", "/runs", "C:/runs", "a:b/runs", "."):
        assert local_path(path) == Path(path)
