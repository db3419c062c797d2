# SPDX-License-Identifier: Apache-2.0
"""One thread per process, and nothing left behind."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

from tests.processes import descendants, left_behind

_GRACE_SECONDS = 3.0

torch.set_num_threads(1)
# No test asserts how long something takes.
hypothesis.settings.register_profile("thinwire", deadline=None)
hypothesis.settings.register_profile("sample", deadline=None, max_examples=30)
hypothesis.settings.load_profile("thinwire")
# pytest adds its handlers, several times in each test, to every logger that keeps its records from the root; torch has
# tens of them, and this took a third of the time that pytest needs for an empty test.
for name in list(logging.root.manager.loggerDict):
    if name.partition(".")[0] == "torch":
        logging.getLogger(name).propagate = True


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--cases N` runs N cases of each grid, and fewer examples of each property."""
    parser.addoption("--cases", type=int, metavar="N", help="run N cases of each parametrized test, spread over all")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("cases") is not None:
        hypothesis.settings.load_profile("sample")


@pytest.hookimpl(trylast=True)  # what other options leave out is no case
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the cases of `--cases`: the same in each run, and at other places of the grid in each test."""
    most = config.getoption("cases")
    if most is None:
        return
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = {item for item in items if item.get_closest_marker("every_case")}
    for name, cases in grids.items():
        cases.sort(key=lambda item: item.nodeid)
        first, count = zlib.crc32(name.encode()) % len(cases), min(most, len(cases))
        chosen.update(cases[(first + k * len(cases) // count) % len(cases)] for k in range(count))
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave what collection makes to nobody: it stays to the end, and each collection of garbage would walk over it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


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
    from thinwire.arrays.fusion import autotune_cache, clear_autotune_cache

    monkeypatch.setattr(autotune_cache, "cache_path", lambda: tmp_path / "autotune.json")
    clear_autotune_cache()
    yield
    clear_autotune_cache()
