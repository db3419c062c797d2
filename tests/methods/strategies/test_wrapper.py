# SPDX-License-Identifier: Apache-2.0
"""A wrapper is its base in all that it does not override, whatever hooks and traits strategies have."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.rules import for_each
from thinwire import Codec, CountingComm, Replica, Strategy
from thinwire.methods.strategies.base import Rounds, Traits
from thinwire.methods.strategies.wrapper import SOURCES, Wrapper
from thinwire.registry import recipe_classes

TRAITS = sorted(each.name for each in fields(Traits))
PLAIN_TRAITS = [name for name in TRAITS if name != "rounds"]
FUNCTIONS = {name for name, what in vars(Strategy).items() if inspect.isfunction(what) and name[0] != "_"}
HOOKS = sorted(FUNCTIONS - {"make_traits"})


@dataclass(frozen=True)
class Around(Wrapper):
    """Overrides nothing."""

    base: Strategy


def replica() -> Replica:
    return Replica(torch.zeros(3), torch.zeros(3), CountingComm(0, 2), lr=lambda: 0.1, seed=0)


def arguments(r: Replica) -> dict[str, Any]:
    """One of each kind that hooks are given."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    few = {"size": 4, "at": "resume", "before": 3, "blocks": "in blocks"}
    return {"r": r, "part": slice(0, 2), "x": r.x, "optimizer": optimizer, **few}


def recording(answer: Any) -> tuple[Strategy, list[tuple[str, tuple[Any, ...]]]]:
    """A strategy that notes every call of a hook, and gives the same answer to all."""
    calls: list[tuple[str, tuple[Any, ...]]] = []

    def noting(name: str) -> Any:
        def hook(_: Strategy, *given: Any) -> Any:
            calls.append((name, given))
            return answer

        return hook

    kind = type("Recording", (Strategy,), {name: noting(name) for name in HOOKS})
    return kind(), calls


@for_each(kind for kind in recipe_classes().values() if issubclass(kind, Strategy | Codec))
def test_traits_are_stored_when_they_are_complete(kind: type) -> None:
    recipe = kind()
    vars(recipe).pop("traits", None)
    assert kind.traits.func(recipe) == recipe.traits  # type: ignore[attr-defined]
    del vars(recipe)["traits"]
    kind.traits.func(recipe)  # type: ignore[attr-defined]
    assert "traits" not in vars(recipe)


def test_the_table_has_every_trait_and_hook() -> None:
    assert sorted(SOURCES) == sorted([*TRAITS, *HOOKS])


@for_each([hook for hook in HOOKS if SOURCES[hook] != "own" and hook != "resized"])
def test_every_hook_is_the_base_s_and_is_given_the_base_s_replica(hook: str) -> None:
    answer, r = object(), replica()
    base, calls = recording(answer)
    given = [arguments(r)[name] for name in list(inspect.signature(getattr(Strategy, hook)).parameters)[1:]]
    found = getattr(Around(base), hook)(*given)
    assert calls == [(hook, tuple(r.part("base") if each is r else each for each in given))]
    if inspect.signature(getattr(Strategy, hook)).return_annotation != "None":
        assert found is answer


def test_the_state_of_another_number_of_workers_is_the_base_s_under_the_base_s_names() -> None:
    own, inner = torch.ones(1), torch.full((1,), 2.0)
    base, calls = recording([{"new": inner}, {}])
    found = Around(base).resized([{"own": own, "base/old": inner}, {"own": own, "base/old": inner}], 2)
    assert calls == [("resized", ([{"old": inner}, {"old": inner}], 2))]
    assert found == [{"own": own, "base/new": inner}, {"own": own}]


@for_each([hook for hook in HOOKS if SOURCES[hook] == "own"])
def test_a_hook_of_its_own_is_that_of_every_strategy(hook: str) -> None:
    assert getattr(Wrapper, hook) is getattr(Strategy, hook)


@pytest.mark.parametrize("name", PLAIN_TRAITS)
@pytest.mark.parametrize("value", [0, 1])
def test_every_trait_is_the_base_s_or_that_of_every_strategy(name: str, value: int) -> None:
    odd = Traits(**{name: value})
    kind = type("Odd", (Strategy,), {"traits": odd})
    assert getattr(Around(kind()).traits, name) == getattr(odd if SOURCES[name] == "base" else Traits(), name)


def test_rounds_are_the_base_s_with_the_weight_where_the_base_keeps_it() -> None:
    rounds = Rounds(ends=(4, 6), warmup=2, local=True, weight="samples", estimates=True, postpones=True)
    found = Around(type("Odd", (Strategy,), {"traits": Traits(rounds=rounds)})()).traits.rounds
    assert found == replace(rounds, weight="base/samples", postpones=False)
    assert Around(Around(Strategy())).traits.rounds == Rounds()
