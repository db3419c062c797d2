# SPDX-License-Identifier: Apache-2.0
"""A run of tests that is killed has written which tests had failed, and which one was running."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.progress import failures

TESTS = """
import os, pytest

def test_passes(): pass

@pytest.mark.parametrize("n", [1, 2])
def test_fails(n): assert n == 1, "not one"

@pytest.fixture
def broken(): raise RuntimeError("no GPU: lost")

def test_has_no_fixture(broken): pass

@pytest.mark.skip
def test_is_skipped(): pass

def test_ends_the_process(): os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("options", [[], ["-n", "1", "--max-worker-restart", "0"]], ids=["alone", "xdist"])
def test_a_killed_run_has_named_its_failures(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    log, root = tmp_path / "log", Path(__file__).parents[1]
    words = ["-p", "tests.progress", "--progress", str(log), "-p", "no:randomly", "-p", "no:cacheprovider", *options]
    subprocess.run(
        [sys.executable, "-m", "pytest", *words, "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert failures(log) == [
        "failed test_it.py::test_fails[2]: AssertionError: not one",
        "failed test_it.py::test_has_no_fixture: RuntimeError: no GPU: lost",
        "unfinished test_it.py::test_ends_the_process",
    ]
    assert "passed test_it.py::test_passes" in log.read_text().splitlines()
