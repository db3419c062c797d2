# SPDX-License-Identifier: Apache-2.0
"""The pages of published scripts: their diffs apply, and their commands and recipes are understood.

`THINWIRE_SCRIPTS` names a folder with checkouts of the repositories, such as `nanoGPT`: diffs are then applied to them.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import thinwire
from tests.test_docs import ROOT, blocks, text

PAGES = sorted(path.relative_to(ROOT) for path in (ROOT / "docs/scripts").glob("*.md") if path.stem != "index")
UPSTREAM = os.environ.get("THINWIRE_SCRIPTS")


def diff_of(page: Path) -> str:
    ((_, diff),) = blocks(page, "diff")
    return diff


def repository(page: Path) -> tuple[str, str]:
    """The repository's name and the commit that a page names first."""
    name, commit = re.findall(r"github\.com/[\w-]+/([\w-]+)\)\s+at\s+commit\s+`([0-9a-f]{12})`", text(page))[0]
    return name, commit


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_diff_of_a_script_is_whole_and_names_recipes_that_exist(page: Path) -> None:
    repository(page)
    diff = diff_of(page)
    hunks = re.split(r"^@@ .* @@\n", diff, flags=re.MULTILINE)[1:]
    heads = re.findall(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@$", diff, re.MULTILINE)
    assert len(hunks) == len(heads) > 0
    for hunk, (before, after) in zip(hunks, heads, strict=True):
        lines = [line for line in hunk.splitlines() if not line.startswith(("--- ", "+++ "))]
        assert sum(not line.startswith("+") for line in lines) == int(before or 1), hunk
        assert sum(not line.startswith("-") for line in lines) == int(after or 1), hunk
    added = "\n".join(line[1:] for line in diff.splitlines() if line.startswith("+") and not line.startswith("+++"))
    recipes = re.findall(r"[\"']([A-Z]\w+\(.*?\))[\"']", added)
    assert recipes
    for recipe in recipes:
        thinwire.parse(recipe)
    for line in added.splitlines():
        if "import" in line:
            ast.parse(line.strip())


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_commands_of_a_script_s_page_are_understood(page: Path) -> None:
    from torch.distributed.run import parse_args

    commands = pytest.importorskip("thinwire.cli.commands")
    printed = "\n".join(body for _, body in blocks(page, "text")).replace("\\\n", " ")
    lines = [line.removeprefix("$ ") for line in printed.splitlines() if line.startswith("$ ")]
    starts = [line.split()[0] for line in lines]
    assert "torchrun" in starts
    for line in lines:
        program, *words = shlex.split(line)
        if program == "torchrun":
            assert parse_args(words).nnodes == "2", line
        else:
            assert program == "thinwire"
            commands.parse(words)


@pytest.mark.skipif(UPSTREAM is None, reason="THINWIRE_SCRIPTS names no folder with the scripts' repositories")
@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_diff_of_a_script_applies_to_its_commit(page: Path, tmp_path: Path) -> None:
    name, commit = repository(page)
    checkout = Path(str(UPSTREAM)) / name
    if not checkout.exists():
        pytest.skip(f"{checkout} does not exist")
    for path in re.findall(r"^--- a/(\S+)$", diff_of(page), re.MULTILINE):
        source = subprocess.run(
            ["git", "-C", str(checkout), "show", f"{commit}:{path}"], capture_output=True, text=True, check=True
        )
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source.stdout)
    subprocess.run(["git", "apply", "-"], input=diff_of(page), cwd=tmp_path, text=True, check=True)
    for path in tmp_path.rglob("*.py"):
        ast.parse(path.read_text())
