# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that writes the name of each test to a file before and after it runs.

python -m pytest -p tests.progress --progress FILE

pytest prints failures at its end, and a run that is cut has none. Each line here is written at once, by all processes
of pytest-xdist: an outcome and the name of the test; of a failure also its first line.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

_FILE = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--progress", type=Path, metavar="FILE", help="write names and outcomes of tests to FILE at once")


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("progress")) is not None:
        config.stash[_FILE] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write the name before the test runs; pytest-xdist calls this in the process that runs it."""
    _write(item, "begins")
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        crash: Any = getattr(report.longrepr, "reprcrash", None)
        _write(item, "failed", f": {str(getattr(crash, 'message', report.longrepr)).splitlines()[0][:200]}")
    elif report.when == "call" or report.skipped:
        _write(item, report.outcome)
    return report


def _write(item: pytest.Item, outcome: str, more: str = "") -> None:
    if (file := item.config.stash.get(_FILE, None)) is not None:
        os.write(file, f"{outcome} {item.nodeid}{more}\n".encode())  # one call, as other processes write there too


def failures(path: Path) -> list[str]:
    """The lines of tests that have failed, and of those that began and did not end."""
    lines = [line.partition(" ") for line in path.read_text().splitlines()] if path.exists() else []
    ended = {name.split(": ")[0] for outcome, _, name in lines if outcome != "begins"}
    failed = [f"failed {name}" for outcome, _, name in lines if outcome == "failed"]
    return failed + [f"unfinished {name}" for outcome, _, name in lines if outcome == "begins" and name not in ended]
