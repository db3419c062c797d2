# SPDX-License-Identifier: Apache-2.0
"""Recipes as text: they are parsed back as they were written, and nothing is ever evaluated."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

import thinwire
from tests.rules import for_each, refusals
from thinwire import (
    AllReduce,
    Bf16,
    Complete,
    ConfigError,
    Fp16,
    Gossip,
    Hypercube,
    Local,
    LocalSGD,
    OnePeerExponential,
    PushSum,
    Ring,
    SlowMo,
    Strategy,
    Topology,
    parse,
)
from thinwire.lab.runs.recipes import BASELINES
from thinwire.methods.strategies.recipe import read
from thinwire.registry import canonical, recipe_classes, registered

topologies: some.SearchStrategy[Topology] = some.sampled_from([Ring(), Complete(), OnePeerExponential(), Hypercube()])
periods = some.integers(1, 10**6)
bases: some.SearchStrategy[Strategy] = some.one_of(
    some.just(Local()),
    some.builds(AllReduce, some.sampled_from([None, Bf16(), Fp16()])),
    some.builds(LocalSGD, periods),
    some.builds(Gossip, topologies, some.sampled_from(["while", "after"])),
    some.builds(PushSum, topologies),
)
recipes = bases | some.builds(
    SlowMo,
    bases,
    periods,
    some.floats(0, 1, exclude_max=True),
    some.floats(0, exclude_min=True, allow_infinity=False),
)


@given(recipe=recipes)
def test_the_repr_and_the_canonical_text_are_parsed_back_to_the_recipe(recipe: Strategy) -> None:
    assert parse(repr(recipe)) == parse(str(recipe)) == recipe
    assert repr(parse(repr(recipe))) == repr(recipe)
    assert len(str(recipe)) <= len(repr(recipe))


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (SlowMo(period=48), "SlowMo(period=48)"),
        (SlowMo(PushSum(), 48), "SlowMo(base=PushSum(), period=48)"),
        (SlowMo(PushSum(Ring()), lr=1), "SlowMo(base=PushSum(topology=Ring()))"),
        (AllReduce(), "AllReduce()"),
        (AllReduce(Bf16()), "AllReduce(codec=Bf16())"),
        (Gossip(order="after"), "Gossip(order='after')"),
    ],
)
def test_the_canonical_text_leaves_out_what_is_at_its_default(recipe: Strategy, text: str) -> None:
    assert str(recipe) == canonical(recipe) == text
    assert parse(text) == recipe


def test_errors_show_a_recipe_as_it_was_typed() -> None:
    strategy = parse(" local-sgd(6 ,codec=ErrorFeedback(Nearest(4)),\n weights='equal')")
    assert str(strategy) == f"{strategy}" == "local-sgd(6, codec=ErrorFeedback(Nearest(4)), weights='equal')"
    assert (
        canonical(strategy)
        == str(dataclasses.replace(strategy))
        == "LocalSGD(period=6, codec=ErrorFeedback(codec=Nearest()))"
    )
    assert strategy == parse(canonical(strategy)) == pickle.loads(pickle.dumps(strategy))


@for_each(["slow-mo", "slowmo", "Slow_Mo", "SLOWMO()", " slow-mo( Period = 12 )"])
def test_case_hyphens_and_underscores_in_names_do_not_matter(text: str) -> None:
    assert parse(text) == SlowMo()


def test_no_two_names_differ_in_case_hyphens_and_underscores_alone() -> None:
    plain = [re.sub(r"[-+_]", "", name).lower() for name in [*recipe_classes(), *BASELINES]]
    assert len(set(plain)) == len(plain) > 50


@for_each(["a.b:C and more", "{'a-b:c': True}", "it's 1e-3 slow-mo", r"\\x:y"])
def test_what_looks_like_a_name_within_a_string_is_read_as_it_is(text: str) -> None:
    outer = read(f"Quote(words={text!r}, more=('x-y',))", Quote, what="quote", example="Quote()")
    assert (outer.words, outer.more) == (text, ("x-y",))


@registered
class Quote:
    """Holds any text."""

    words: str = ""
    more: tuple[str, ...] = ()


VALUES = ["None", "True", "-1", "0", "1e400", "'x'", "()", "[[1]]", "{}", "b'x'", "Ring", "1j", "[]", "{1}"]
VALUES += ["9" * 400, "(1, 'x', None)"]


@pytest.mark.parametrize("name", recipe_classes())
def test_whatever_value_an_argument_has_it_is_taken_or_refused(name: str) -> None:
    for field in dataclasses.fields(recipe_classes()[name]):
        for value in VALUES:
            text = f"{name}({field.name}={value})"
            try:
                read(text, object, what="recipe", example=name)
            except ConfigError as error:
                assert str(error), text


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("AllReduce", AllReduce()),
        ("  LocalSGD( 8 )\n", LocalSGD(8)),
        ("SlowMo(PushSum, period=48)", SlowMo(PushSum(), 48)),
        ("SlowMo(base=PushSum(Complete), period=48, momentum=5e-1)", SlowMo(PushSum(Complete()), 48, 0.5)),
        ("Gossip(OnePeerExponential(), 'after')", Gossip(OnePeerExponential(), "after")),
        ("AllReduce(None)", AllReduce()),
    ],
)
def test_bare_names_and_positional_arguments_are_parsed_too(text: str, recipe: Strategy) -> None:
    assert parse(text) == recipe


@pytest.mark.parametrize(
    "attack",
    [
        "__import__('os').system('touch {trap}')",
        "LocalSGD(period=__import__('pathlib').Path('{trap}').touch())",
        "(lambda: open('{trap}', 'w'))()",
        "LocalSGD(period=[open('{trap}', 'w') for _ in (1,)])",
        "LocalSGD.__init__.__globals__",
        "LocalSGD(period=(1).__class__)",
        "SlowMo(**dict(period=3))",
        "LocalSGD(*[3])",
        "LocalSGD(period=(x := 3))",
        "AllReduce() if open('{trap}', 'w') else Local()",
        "f'{{open('{trap}')}}'",
        "open('{trap}', 'w')",
        "LocalSGD(period=10**9**9)",
        "REGISTERED",
        "AllReduce; Local",
        "AllReduce\nLocal",
        "import os",
    ],
)
def test_nothing_in_a_recipe_is_ever_evaluated(attack: str, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    with pytest.raises(ConfigError):
        parse(attack.format(trap=trap))
    assert not trap.exists()


@given(
    text=some.text(some.characters(max_codepoint=0x2FF), max_size=40)
    | some.text("()[]{}=,*-'\"SlowMobase1 ", max_size=60)
)
def test_any_text_is_a_recipe_or_refused(text: str) -> None:
    try:
        assert isinstance(parse(text), Strategy)
    except ConfigError as error:
        assert str(error)


@for_each(["(" * 5000, "-" * 50000 + "1", "SlowMo(" * 90 + ")" * 90, "LocalSGD(" + "9" * 10000 + ")"])
def test_endless_texts_are_refused_and_not_repeated_in_full(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert len(str(caught.value)) < 400


test_errors_name_the_fault_and_the_fix = refusals(
    [
        ("", "Write it like SlowMo"),
        ("SlowMo(", r"never closed\. Write it like SlowMo\(period=12\)"),
        ("PushSun()", r"'PushSun' is unknown; did you mean PushSum, \w+ or \w+\?$"),
        ("Gossip(Rings())", r"'Rings' is unknown; did you mean Ring, \w+ or \w+\?$"),
        ("Quux()", r"'Quux' is unknown; did you mean \w+, \w+ or \w+\?$"),
        ("ADPSGD(topologie=Ring())", r"ADPSGD has no 'topologie'; did you mean topology\b.*\?"),
        ("AllReduce(kodec=None)", r"AllReduce has no 'kodec'; did you mean codec\? \(known: codec\)"),
        ("LocalSGD(8)(8)", r"'LocalSGD\(8\)\(8\)' is neither a literal nor a known name"),
        ("AllReduce() + (1)", r"'AllReduce\(\) \+ \(1\)' is neither a literal nor a known name"),
        ("LocalSGD(period=----1)", "'----1' is neither a literal nor a known name"),
        ("FromGraph(edges=3)", "."),
        ("AllReduce(1, 2)", r"AllReduce was given 2 arguments \(known: codec\)"),
        ("LocalSGD(1, period=2)", "LocalSGD was given 'period' twice"),
        ("LocalSGD(period=1, period=2)", "LocalSGD was given 'period' twice"),
        ("Local(period=3)", r"Local has no 'period' \(it takes no arguments\)"),
        ("Ring()", "is a Ring, not a strategy"),
        ("12", "is a int, not a strategy"),
        ("LocalSGD(period=0)", r"period=0: must be at least 1. Use AllReduce\(\)"),
        ("LocalSGD(period=2.5)", "period must be a whole number"),
        ("LocalSGD(period='8')", "period must be a whole number"),
        ("SlowMo(12)", r"SlowMo\(base=12\): base must be a Strategy"),
        ("SlowMo(momentum=1)", r"momentum=1: must lie in \[0, 1\)"),
        ("SlowMo(lr=1e999)", "lr=inf: must be positive and finite"),
        ("SlowMo(base=SlowMo())", "outer steps cannot be nested"),
        ("Gossip(order='never')", "order must be 'while' or 'after'"),
        ("PushSum(topology=Bf16())", "topology must be a Topology"),
        ("AllReduce(codec=Ring())", "codec must be a Codec or None"),
    ],
    lambda text: parse(text),
)


class _Cycle:
    """Collected as garbage, when it lets another thread run."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        time.sleep(0)


def test_several_threads_may_parse_at_once() -> None:
    def body(comm: thinwire.Comm) -> None:
        for period in range(4, 12):
            _ = [_Cycle() for _ in range(5)]
            text = f"SlowMo(LocalSGD(period=2, codec=ErrorFeedback(Nearest(bits=4))), period={2 * period + comm.rank})"
            assert str(parse(text)).startswith("SlowMo(")

    before = gc.get_threshold()
    gc.set_threshold(20)
    try:
        for _ in range(3):
            thinwire.run_threads(4, body, timeout=20)
    finally:
        gc.set_threshold(*before)
