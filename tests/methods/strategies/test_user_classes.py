# SPDX-License-Identifier: Apache-2.0
"""Classes of other packages: recipes find them by `module:Class` or by entry point, and import nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import thinwire
from tests.rules import refusals
from thinwire import (
    AllReduce,
    BetweenNodes,
    Choco,
    Codec,
    ConfigError,
    ErrorFeedback,
    Gathered,
    LocalSGD,
    Replica,
    Ring,
    SlowMo,
    Strategy,
    parse,
    registered,
)
from thinwire.methods.codecs.base import State
from thinwire.methods.strategies.recipe import parse_topology
from thinwire.registry import REGISTERED, canonical

SOURCE = '''
import thinwire
from thinwire.methods.topology import Peers

IMPORTED = []

@thinwire.registered
class Mine(thinwire.Strategy):
    """Sends nothing."""

    period: int = 4

@thinwire.registered
class OneWay(thinwire.Topology):
    def peers(self, rank, size, step):
        return Peers(((rank + 1) % size,), ((rank - 1) % size,), 0.5, (0.5,))

class Loose(thinwire.Strategy):
    pass

def helper():
    open("trap", "w")

number = 3
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a package; its modules and classes are forgotten afterwards."""
    known = set(REGISTERED), set(sys.modules)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text("")
    (tmp_path / "theirs" / "methods.py").write_text(SOURCE)
    (tmp_path / "theirs" / "again.py").write_text("from theirs.methods import Mine, number\n")
    (tmp_path / "theirs" / "broken.py").write_text("import thinwire\n\nnumber = 1 / 0\n")
    (tmp_path / "theirs" / "needy.py").write_text("import a_library_that_nobody_has\n")
    (tmp_path / "theirs" / "script.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "theirs" / "wrong.py").write_text("def (:\n")
    (tmp_path / "theirs" / "slow.py").write_text(
        "import thinwire\n\n@thinwire.registered\nclass SlowMo(thinwire.Strategy):\n    depth: int = 1\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    yield tmp_path
    for name in set(REGISTERED) - known[0]:
        del REGISTERED[name]
    for name in {name for name in sys.modules if name.partition(".")[0] == "theirs"} - known[1]:
        del sys.modules[name]


@pytest.mark.usefixtures("folder")
def test_a_class_is_named_by_its_module_and_its_repr_names_it_again() -> None:
    strategy = parse("SlowMo(base=theirs.methods:Mine(period=3), period=12)")
    assert isinstance(strategy, SlowMo)
    assert repr(strategy.base) == "theirs.methods:Mine(period=3)"
    assert canonical(strategy) == "SlowMo(base=theirs.methods:Mine(period=3))"
    assert parse(repr(strategy)) == parse(canonical(strategy)) == strategy
    assert parse("theirs.methods:Mine") == parse("theirs.again:Mine()") == parse("Mine(4)") == parse("mine")
    assert repr(parse_topology("theirs.methods:OneWay")) == "theirs.methods:OneWay()"
    assert "topology=theirs.methods:OneWay()" in repr(parse("PushSum(theirs.methods:OneWay)"))


@pytest.mark.usefixtures("folder")
def test_a_class_may_have_the_name_of_one_of_thinwire_s() -> None:
    theirs = parse("SlowMo(base=theirs.slow:SlowMo(depth=2))")
    assert repr(theirs).startswith("SlowMo(base=theirs.slow:SlowMo(depth=2), ")
    assert parse(repr(theirs)) == theirs
    assert isinstance(parse("SlowMo()"), SlowMo)


@pytest.mark.slow
def test_another_process_reads_the_repr_and_prints_the_same(folder: Path) -> None:
    text = repr(parse("SlowMo(base=theirs.methods:Mine(period=3))"))
    code = "import sys, thinwire; print(repr(thinwire.parse(sys.argv[1])))"
    done = subprocess.run([sys.executable, "-c", code, text], cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == text, done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "theirs.nothing:Mine()",
            r"no module theirs\.nothing is installed or in .*\. Name the module as in an import",
        ),
        ("nobody.methods:Mine()", "no module nobody is installed or in"),
        ("theirs.methods:Yours()", r"methods\.py\) has no 'Yours'; it has Mine, OneWay"),
        ("theirs.methods:Loose()", r"is a class that is not registered .*\. Put @thinwire\.registered above the class"),
        ("theirs.methods:helper()", r"'helper' in theirs\.methods .* is a function \(it has Mine, OneWay\)"),
        ("theirs.methods:number", r"is a int \(it has"),
        ("theirs.again:number", r"\(it has Mine\)"),
        (
            "theirs.broken:Mine()",
            r"broken failed: ZeroDivisionError: division by zero \(.*broken\.py, line 3",
        ),
        ("theirs.needy:Mine()", "importing theirs.needy failed: No module named 'a_library_that_nobody_has'"),
        ("theirs.script:Mine()", r"importing theirs\.script failed: SystemExit: 3 \(.*script\.py, line 2"),
        ("theirs.wrong:Mine()", r"SyntaxError: .*wrong\.py, line 1"),
        ("theirs.methods:Mine(perod=3)", r"theirs\.methods:Mine has no 'perod'; did you mean period\?"),
        ("theirs.methods:Mine(period=3.5)", r"Mine\(period=3\.5\): period must be a whole number"),
        ("theirs.methods.Mine()", "is neither a literal nor a known name"),
        ("theirs.methods:OneWay()", "is a OneWay, not a strategy"),
        ("os:system('touch trap')", "'system' in os .* is a builtin_function_or_method"),
        ("thinwire:parse('Local')", "'parse' in thinwire .* is a function|has no 'parse'"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_only_a_registered_class_is_taken_and_the_error_says_what_was_found(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(text)
    assert not Path("trap").exists()


@pytest.mark.usefixtures("folder")
def test_text_from_elsewhere_imports_nothing() -> None:
    text = "SlowMo(base=theirs.methods:Mine(period=3))"
    with pytest.raises(ConfigError, match=r"theirs\.methods:Mine is not imported, .*\. Import theirs\.methods first"):
        parse(text, imports=False)
    assert not {"theirs", "theirs.methods"} & set(sys.modules)
    strategy = parse(text)
    assert parse(text, imports=False) == strategy


@pytest.mark.usefixtures("folder")
def test_two_classes_of_one_name_must_be_named_by_their_modules() -> None:
    parse("theirs.methods:Mine")

    @registered
    class Mine(Strategy):
        """Sends nothing either."""

    with pytest.raises(ConfigError, match=rf"'Mine' could be {__name__}:Mine or theirs.methods:Mine. Write one"):
        parse("Mine()")
    assert parse(f"{__name__}:Mine") == Mine()
    with pytest.raises(ConfigError, match="Mine"):
        parse("Minee()")


@pytest.mark.slow
def test_installed_distributions_offer_classes_under_short_names(folder: Path) -> None:
    metadata = folder / "theirs-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    points = ("Ours = theirs.methods:Mine", "SlowMo = theirs.slow:SlowMo", "Gone = theirs.nothing:Gone")
    (metadata / "entry_points.txt").write_text("\n".join(["[thinwire.recipes]", *points, ""]))
    code = """
import json, sys, thinwire
def read(text, imports=True):
    try:
        return repr(thinwire.parse(text, imports=imports))
    except thinwire.ConfigError as error:
        return str(error)
before = read("Ours(3)", imports=False), "theirs.methods" in sys.modules
print(json.dumps([*before, read("SlowMo(base=ours(3))"), read("Ours(3)", imports=False),
    read("theirs.methods:Mine(3)"), read("SlowMo(theirs.slow:SlowMo)"), read("Gone"), read("Our")]))
"""
    path = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    refused, imported, nested, after, by_module, named_alike, gone, typo = json.loads(done.stdout)
    assert "theirs.methods:Mine is not imported" in refused
    assert not imported
    assert nested.startswith("SlowMo(base=Ours(period=3), ")
    assert after == by_module == "Ours(period=3)"
    assert named_alike.startswith("SlowMo(base=theirs.slow:SlowMo(depth=1), ")
    assert "no module theirs.nothing is installed" in gone
    assert "did you mean Ours, " in typo


@registered
class Needing(Strategy):
    """Needs a value, and is made of two."""

    graph: thinwire.Topology
    depth: int = 2

    def __post_init__(self) -> None:
        if self.depth > 5:
            raise RuntimeError("too deep for this example")


def test_what_a_class_of_one_s_own_did_not_foresee_is_told_in_words() -> None:
    assert parse(repr(Needing(Ring()))) == Needing(Ring())
    with pytest.raises(ConfigError, match=r"Needing needs 'graph'. Write Needing\(graph=\.\.\.\)"):
        parse("Needing()")
    with pytest.raises(ConfigError, match="Needing refuses its arguments: RuntimeError: too deep for this example"):
        parse("Needing(Ring, depth=6)")


# -- what is checked when they are attached ----------------------------------------------------------------------------


@dataclass
class Mutable(Strategy):
    steps: int = 0


@dataclass(frozen=True)
class Loud(Strategy):
    sends_gradients = True


def test_a_trait_that_is_written_as_an_attribute_of_the_class_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Loud has the class attribute sends_gradients=True.*thinwire.Traits\("):
        attached(Loud())


@dataclass(frozen=True)
class Earlier(Strategy):
    """Overrides a hook that earlier versions had."""

    def consensus(self, r: Replica) -> Tensor:
        return r.x


@dataclass(frozen=True)
class Narrow(Strategy):
    def check(self, size: int) -> None:  # type: ignore[override]
        pass


test_a_hook_that_nothing_calls_is_refused = refusals(
    [
        (
            Earlier(),
            r"Earlier defines consensus, which is no hook of Strategy and would be ignored. Use average\(r\)\.",
        ),
        (SlowMo(Earlier()), "Earlier defines consensus"),
        (Narrow(), "Narrow.check does not take the optimizer"),
    ],
    lambda strategy: attached(strategy),
)


@dataclass(frozen=True)
class Plain(Codec):
    """The elements in fp32; the classes below are wrong in one way each."""

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        return x.float().view(torch.uint8).clone()

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        return payload.view(torch.float32).to(like.dtype)

    def nbytes(self, n: int) -> int:
        return 4 * n


@dataclass(frozen=True)
class Short(Plain):
    def nbytes(self, n: int) -> int:
        return 2 * n


@dataclass(frozen=True)
class Doubles(Plain):
    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        return payload.view(torch.float32).double()


@dataclass(frozen=True)
class Changing(Plain):
    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        return super().encode(x.mul_(2), state, key)


@dataclass(frozen=True)
class Unkeyed(Plain):
    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        return super().encode(x + torch.rand(len(x), generator=DRAWS), state, key)


@dataclass(frozen=True)
class Failing(Plain):
    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        return super().encode(x.view(-1, 2), state, key)


@dataclass(frozen=True)
class Halved(Plain):
    """Half of all elements, which is biased."""

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        y = payload.view(torch.float32).clone()
        y[y.abs() < y.abs().median()] = 0
        return y.to(like.dtype)


@dataclass(frozen=True)
class Dropping(Plain):
    """Half of all elements at random, twice as large, which is not."""

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        kept = torch.rand(len(x), generator=torch.Generator().manual_seed(key)) < 0.5
        return super().encode(torch.where(kept, 2 * x, 0.0), state, key)


@dataclass(frozen=True)
class Claims(Plain):
    needs_feedback = True


@dataclass(frozen=True)
class Computes(Plain):
    @property
    def alignment(self) -> int:
        return 8


DRAWS = torch.Generator().manual_seed(0)


def attached(strategy: Strategy) -> None:
    model = torch.nn.Linear(4, 2)
    before = torch.get_rng_state()
    thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy).detach()
    assert torch.equal(before, torch.get_rng_state())


test_a_class_that_breaks_its_contract_is_refused_by_name_at_attach = refusals(
    [
        (Mutable(), "Mutable is not a frozen dataclass"),
        (SlowMo(Mutable()), "Mutable is not a frozen dataclass"),
        (
            AllReduce(Claims()),
            r"Claims has the class attribute needs_feedback=True.*CodecTraits\(needs_feedback=True\)",
        ),
        (AllReduce(ErrorFeedback(Computes())), r"Computes has the class attribute alignment=8\. Traits are read from"),
        (AllReduce(Short()), r"codec Short: encode returned 4 bytes for 1 elements, but nbytes\(1\) is 2"),
        (AllReduce(BetweenNodes(Short(), 1)), "codec Short: encode returned 4 bytes"),
        (LocalSGD(2, codec=ErrorFeedback(Short())), "codec Short: encode returned 4 bytes"),
        (AllReduce(Doubles()), "codec Doubles: decode returned .* of torch.float64"),
        (AllReduce(Changing()), "codec Changing: encode changed its input"),
        (AllReduce(Unkeyed()), "codec Unkeyed: two calls of encode with one key differ"),
        (AllReduce(Failing()), "codec Failing: a vector of 1 elements fails: RuntimeError"),
    ],
    lambda strategy: attached(strategy),
)


def test_a_biased_codec_without_error_feedback_is_warned_of_by_name() -> None:
    with pytest.warns(UserWarning, match=r"codec Halved is biased: .* Use ErrorFeedback\(Halved\(\)\)"):
        attached(AllReduce(Halved()))
    for codec in (ErrorFeedback(Halved()), ErrorFeedback(Gathered(Halved())), Dropping(), Plain()):
        attached(AllReduce(codec))
    attached(Choco(Ring(), Halved()))
