# SPDX-License-Identifier: Apache-2.0
"""The examples in docstrings run as they are printed, and every public name has one."""

from __future__ import annotations

import doctest
import inspect
import sys
from importlib import import_module
from pathlib import Path

import pytest

import thinwire
from tests.rules import for_each
from thinwire.registry import REGISTERED

ROOT = Path(thinwire.__file__).parent


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


WITH_EXAMPLES = sorted(module_of(path) for path in ROOT.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_print_what_they_say(name: str) -> None:
    known = set(REGISTERED)
    found = doctest.testmod(import_module(name))
    # Classes of examples would pass for classes of the module, in the tests that ask all of these.
    for each in REGISTERED.keys() - known:
        if not hasattr(sys.modules[REGISTERED[each].__module__], each):
            del REGISTERED[each]
    assert found.attempted > 0
    assert found.failed == 0


@for_each(name for name in thinwire.__all__ if name != "__version__")
def test_every_public_name_has_an_example(name: str) -> None:
    thing = getattr(thinwire, name)
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return  # what raises it has the example
    assert ">>> " in (inspect.getdoc(thing) or "")
