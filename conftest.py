# SPDX-License-Identifier: Apache-2.0
"""One thread per process, and nothing left behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests.processes import descendants, left_behind

_GRACE_SECONDS = 3.0

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail a test whose threads or processes outlive it."""
    threads, processes = set(threading.enumerate()), set(descendants())
    yield
    end = time.monotonic() + _GRACE_SECONDS
    while left := left_behind(threads, processes):
        if time.monotonic() > end:
            pytest.fail(f"left behind: {', '.join(left)}")
        time.sleep(0.02)


@pytest.fixture
def fresh_autotune_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Autotuning starts without measurements, and its cache file is in a temporary folder."""
    from thinwire.fusion import autotune_cache, clear_autotune_cache

    monkeypatch.setattr(autotune_cache, "cache_path", lambda: tmp_path / "autotune.json")
    clear_autotune_cache()
    yield
    clear_autotune_cache()
