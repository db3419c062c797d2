# SPDX-License-Identifier: Apache-2.0
"""What a release promises: few dependencies, quick starts, a licence in every file, and one version everywhere."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import thinwire

ROOT = Path(__file__).parents[1]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
checkout = pytest.mark.skipif(not TRACKED, reason="not a checkout")


def name_of(requirement: str) -> str:
    return re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0]


def test_the_base_install_brings_torch_numpy_and_safetensors_alone() -> None:
    assert {name_of(each) for each in PROJECT["dependencies"]} == {"torch", "numpy", "safetensors"}


def test_all_extras_leave_out_what_few_need() -> None:
    extras = PROJECT["optional-dependencies"]
    (everything,) = extras["all"]
    named = set(re.findall(r"\w+", everything.partition("[")[2]))
    # The sweep's database, a second trainer of trials, data sets from a hub, and adapters of language models.
    assert set(extras) - named == {"all", "tune", "ray", "hub", "adapters"}


def modules_after(*program: str) -> set[str]:
    """The top-level modules that a program has imported."""
    probe = f"import sys\n{'; '.join(program)}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_an_import_of_thinwire_waits_for_no_other_package() -> None:
    before = modules_after("pass")
    ours = {name for name in modules_after("import thinwire") - before if name not in sys.stdlib_module_names}
    assert ours == {"thinwire"}


def test_help_and_version_wait_for_no_other_package() -> None:
    before = modules_after("pass")
    for option in ("--help", "--version"):
        found = modules_after("from thinwire.cli import main", f"main(['{option}'])") - before
        assert {name for name in found if name not in sys.stdlib_module_names} == {"thinwire"}, option


def test_the_version_is_the_same_everywhere() -> None:
    assert f"version: {thinwire.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## {re.escape(thinwire.__version__)} - \d{{4}}-\d\d-\d\d$", CHANGELOG, re.MULTILINE)


def test_each_version_of_the_changelog_has_one_section_for_each_kind_of_change() -> None:
    kinds = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    first, *versions = re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1:]
    assert first.startswith("Unreleased\n")
    for version in (first, *versions):
        found = re.findall(r"^### (.*)$", version, re.MULTILINE)
        assert found == [kind for kind in kinds if kind in found], version.partition("\n")[0]


@checkout
def test_every_source_file_names_its_licence() -> None:
    done = subprocess.run([sys.executable, "tools/spdx.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_workflows_run_targets_of_make_and_the_versions_of_python_that_are_declared() -> None:
    texts = [path.read_text() for path in sorted((ROOT / ".github/workflows").glob("*.yml"))]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for text in texts for name in re.findall(r"run: make ([\w-]+)", text)}
    assert named == {"check", "test", "test-all", "docs", "dist"} and named <= targets
    declared = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each}
    assert declared == set(re.findall(r'"(3\.\d+)"', re.findall(r"python: \[(.*)\]", texts[0])[0]))


@checkout
def test_the_site_of_a_version_is_built_from_its_tag_by_the_command_of_make_docs() -> None:
    hosted, made = ((ROOT / name).read_text() for name in (".readthedocs.yaml", "Makefile"))
    command = re.search(r"python -m sphinx .* docs ", made)
    assert command and command[0] in hosted
    groups = re.findall(r"--group (\w+)", hosted)
    assert set(groups) <= set(PYPROJECT["dependency-groups"]) and "docs" in groups
    assert PROJECT["urls"]["Documentation"].endswith(".readthedocs.io")
