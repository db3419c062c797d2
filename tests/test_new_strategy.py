# SPDX-License-Identifier: Apache-2.0
"""`tools/new_strategy.py` writes all that a strategy of the repository needs: the tests that ask for it pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "docs", "tools", "examples", "pyproject.toml", "conftest.py", "README.md", "CHANGELOG.md")
# Each with a part of the names of the tests in it that a new strategy could fail.
ASKED = {
    "tests/methods/strategies/test_lazy_sgd.py": "lazy_sgd",
    "tests/battery/test_complete.py": "registered_class_has_a_case",
    "tests/battery/test_strategies.py": "LazySGD",
    "tests/test_docs.py": "line_among_the_papers or in_the_reference or hyperparameter_is_in_the_tables",
    "tests/test_architecture.py": "stub_says_the_same or frozen_dataclass_that_its_repr_makes_again",
}


def run(folder: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_skeleton_of_a_strategy_passes_the_tests_that_ask_for_one(tmp_path: Path) -> None:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "_build"))
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    said = run(tmp_path, "tools/new_strategy.py", "LazySGD")
    changed = [line.strip() for line in said.splitlines() if line.startswith("  ")]
    assert changed
    assert all("lazy" in (tmp_path / path).read_text().lower() for path in changed)
    words = " or ".join(ASKED.values())
    report = run(tmp_path, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", "not slow", *ASKED, "-k", words)
    assert report.splitlines()[0].count(".") > len(ASKED)
    # A second strategy of that name would overwrite the first.
    again = subprocess.run(
        [sys.executable, "tools/new_strategy.py", "LazySGD"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert again.returncode == 2
    assert "exists. Choose another name" in again.stderr


def test_contributing_names_every_place_that_the_tool_fills() -> None:
    steps = (
        (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Adding a strategy")[2].partition("## ")[0]
    )
    text = (ROOT / "tools" / "new_strategy.py").read_text(encoding="utf-8")
    assert "tools/new_strategy.py" in steps
    for place in (
        "src/thinwire/methods/strategies",
        "tests/oracles",
        "tests/methods/strategies",
        "tests/battery/cases.py",
        "docs/strategies",
        "docs/strategies/index.md",
        "docs/reference/strategies.md",
        "docs/reference/papers.md",
        "docs/explanation/bytes.md",
        "docs/how-to/choose.md",
        "docs/how-to/learning-rate.md",
    ):
        assert place in steps, f"CONTRIBUTING does not name {place}"
        assert place in text, f"tools/new_strategy.py does not fill {place}"
