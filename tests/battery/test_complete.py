# SPDX-License-Identifier: Apache-2.0
"""Every registered class of the package has a case, and every strategy an oracle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

import thinwire
from tests.battery.cases import CODECS, STRATEGIES, TOPOLOGIES, WRAPPERS
from thinwire import Codec, Strategy, Topology
from thinwire.methods.strategies.wrapper import Wrapper
from thinwire.registry import REGISTERED, registered


def parts_of(recipe: Any) -> Iterator[Any]:
    """A recipe and all that it is made of."""
    yield recipe
    for each in fields(recipe):
        if is_dataclass(value := getattr(recipe, each.name)):
            yield from parts_of(value)


def without_a_case(package: str) -> list[str]:
    """Registered classes of a package that no case is about, by name.

    Strategies, codecs and topologies have cases of their own; what these are made of is part of one.
    """
    # Looked up, so that all modules are imported.
    assert all(hasattr(thinwire, name) for name in thinwire.__all__)
    strategies = [each.strategy for each in STRATEGIES]
    tables: list[tuple[type, set[type]]] = [
        (Strategy, {type(strategy) for strategy in strategies}),
        (Codec, {type(each.codec) for each in CODECS}),
        (Topology, {type(topology) for topology in TOPOLOGIES}),
        (object, {type(part) for strategy in strategies for part in parts_of(strategy)}),
    ]
    kinds = [kind for kind in REGISTERED.values() if kind.__module__.startswith(package)]
    return [kind.__name__ for kind in kinds if kind not in next(has for base, has in tables if issubclass(kind, base))]


def test_every_registered_class_has_a_case() -> None:
    missing = without_a_case("thinwire.")
    assert not missing, f"no line in tests/battery/cases.py: {missing}"


@pytest.mark.parametrize("base", [Strategy, Codec, Topology, object], ids=lambda base: base.__name__)
def test_a_registered_class_without_a_case_is_named(base: type) -> None:
    kind = registered(type("Untested", (base,), {"__module__": __name__, "__doc__": "Without a case."}))
    try:
        assert without_a_case(__name__) == ["Untested"]
    finally:
        for name in [name for name, other in REGISTERED.items() if other is kind]:
            del REGISTERED[name]


def test_every_wrapper_has_a_line_that_puts_it_around_a_base() -> None:
    def below(kind: type) -> Iterator[type]:
        for child in kind.__subclasses__():
            yield child
            yield from below(child)

    kinds = {kind for kind in below(Wrapper) if kind in REGISTERED.values() and kind.__module__.startswith("thinwire.")}
    assert {kind.__name__ for kind in kinds} == {kind.__name__ for kind in WRAPPERS}
