# SPDX-License-Identifier: Apache-2.0
"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch.utils._device import _device_constructors

import thinwire
from tests.rules import for_each
from thinwire import Codec, Strategy, Topology, parse
from thinwire.methods.codecs.base import CodecWrapper
from thinwire.methods.strategies.base import Traits
from thinwire.methods.strategies.wrapper import Wrapper
from thinwire.registry import recipe_classes
from thinwire.worker.members import Members

ROOT = Path(thinwire.__file__).parent
REPOSITORY = Path(__file__).parents[1]
FILES = sorted(ROOT.rglob("*.py"))

# From the ground up: a package may import from the floors below its own.
FLOORS: list[set[str]] = [
    {"errors", "_version"},
    {"core"},
    {"registry"},
    {"methods", "coreset"},
    {"tensor2d", "asynchronous"},
    {"worker"},
    {"elastic"},
    {"integrations", "planning"},
    {"lab"},
    {"arrays"},
    {"cli"},
    {"__main__"},
]
# The same within the packages that have several: each may import from those before it.
ROOMS = {
    "core": [
        {"torch_internals", "validation", "modes", "lazy"},
        {"storage", "kernels"},
        {"comm"},
        {"replica", "view"},
    ],
    "methods": [{"topology", "codecs"}, {"reduce", "optimizers"}, {"strategies"}],
    "asynchronous": [{"quorum"}, {"ad_psgd", "async_leader", "backup_workers", "parameter_server"}],
    "planning": [{"quantities", "units"}, {"links"}, {"simulate"}, {"plan"}, {"doctor"}],
    "lab": [{"tasks", "emulate", "report"}, {"runs"}],
    "arrays": [{"fusion"}, {"finetuning"}, {"sweep"}],
}
# They know nothing of the rest but what needs neither a model nor another worker.
APART = {"lab.tasks", "lab.emulate", "lab.report", "arrays.fusion"}
GROUND = {"errors", "_version", "planning.links", "planning.quantities", "planning.units"} | {
    f"core.{room}" for room in ("torch_internals", "validation", "modes", "storage", "kernels")
}
# Packages whose files are alternatives to each other, with what is common to all of them in `base` (and `comm.work`,
# `comm.runtime`).
ALTERNATIVES = {"core.comm", "methods.topology", "methods.codecs"}
NEIGHBOURS = {
    # A code and its error are one pass over memory there.
    ("methods.codecs.feedback", "methods.codecs.one_bit"),
    # The codecs and the graph that they stand around unless another is given.
    ("methods.codecs.gathered", "methods.codecs.one_bit"),
    ("methods.codecs.between_nodes", "methods.codecs.cast"),
    ("methods.topology.graphs", "methods.topology.exponential"),
    ("methods.topology.periodic", "methods.topology.exponential"),
    # A world of one process needs no sockets.
    ("core.comm.group", "core.comm.threads"),
    ("core.comm.group", "core.comm.roll_call"),
    ("core.comm.group", "core.comm.send_times"),
    # A view's connections are a group's, whose failures are handled elsewhere.
    ("core.comm.view_group", "core.comm.group"),
    ("core.comm.view_group", "core.comm.roll_call"),
    ("core.comm.group", "core.comm.rendezvous"),
    ("core.comm.rendezvous", "core.comm.roll_call"),
    ("core.comm.group", "core.comm.liveness"),
    # What belongs to one process is kept out of its forks.
    ("core.comm.group", "core.comm.forks"),
    ("core.comm.mailbox.zeromq", "core.comm.forks"),
    ("core.comm.bucket", "core.comm.forks"),
    ("core.comm.roll_call", "core.comm.liveness"),
    ("core.comm.group", "core.comm.mailbox.zeromq"),
    ("core.comm.mailbox.zeromq", "core.comm.mailbox.frame"),
}
# Of strategies, those that are made of another one. The default base of outer steps is no communication.
MADE_OF = {
    ("methods.strategies.local.slow_momentum", "methods.strategies.local.local_sgd"),
    ("methods.strategies.local.diloco", "methods.strategies.local.local_sgd"),
    ("methods.strategies.local.streaming", "methods.strategies.local.overlap_local_sgd"),
    ("methods.strategies.wrappers.outer_state", "methods.strategies.local.slow_momentum"),
    ("methods.strategies.wrappers.node_average", "methods.strategies.local.local_sgd"),
    ("methods.strategies.wrappers.paced", "methods.strategies.local.local_sgd"),
    ("methods.strategies.wrappers.budget", "methods.strategies.local.local_sgd"),
    # Budgets of gradients, and of parameters.
    ("methods.strategies.wrappers.budget", "methods.strategies.gradients.all_reduce"),
    # The probe sees deviations from a mean of gradients, or from one of parameters.
    ("methods.strategies.wrappers.probe", "methods.strategies.gradients.all_reduce"),
    # The same mass, pushed without a schedule.
    ("methods.strategies.push_sum.eager_push_sum", "methods.strategies.push_sum.push_sum"),
}
MOST_LOOSE_FILES = 3
TALKERS = {
    "core/comm/group.py",
    "core/comm/view_group.py",
    "core/comm/rendezvous.py",
    "planning/doctor/rendezvous.py",
    "integrations/dcp.py",
    "core/replica/shards.py",
    "tensor2d/mesh.py",
    "core/torch_internals.py",
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def name_of(path: Path) -> str:
    """A file's module, within thinwire."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {name_of(path): path for path in FILES}
MODULES = set(PATHS)


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


@cache
def words(node: ast.AST) -> str:
    """The code of a node; dotted names, which are most of what is asked for, without the machinery for all others."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
        return f"{words(node.value)}.{node.attr}"
    return ast.unparse(node)


@cache
def imports_of(path: Path) -> list[tuple[str, str]]:
    """(module, name) of every import, for type checkers too; name is empty for a plain `import module`."""
    found: list[tuple[str, str]] = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [(node.module or "", alias.name) for alias in node.names]
    return found


# Functions that import a module by a string. A name in the string counts like one in a statement.
STRING_IMPORTS = {"import_module", "__import__", "resolve_name", "run_module"}
# Files that import modules whose names their code does not hold, each for a reason. No other file may.
LOADERS = {
    "core.lazy": "public names, which the importing package lists itself",
    "registry": "runs the files that register their classes, as it would those of another distribution; it names none",
    "methods.strategies.local.outer_optimizer": "a user's optimizer, as module:name",
    "methods.strategies.user_classes": "a user's class or function, as module:Name",
    "lab.runs.worker": "modules of a user's classes, from the launcher's command line",
    "lab.emulate.fork_server": "modules that the launcher names; this package knows none of them",
    "cli.commands": "the chosen command's module; the table of commands imports none of them",
}


def string_imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(module, whether more follows) of every import by a string; an empty name stands for one that is not written."""
    functions = {
        alias.asname or alias.name
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name in STRING_IMPORTS
    }
    for node in nodes_of(path):
        if not isinstance(node, ast.Call):
            continue
        called = words(node.func).rpartition(".")[2]
        if called in STRING_IMPORTS | functions:
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            first = given[0] if given else None
            open_end = isinstance(first, ast.JoinedStr)
            text = first.values[0] if isinstance(first, ast.JoinedStr) else first
            known = isinstance(text, ast.Constant) and isinstance(text.value, str)
            yield (text.value.partition(":")[0] if known else "", open_end)


@cache
def own_imports(path: Path) -> frozenset[str]:
    """The modules of thinwire that a file imports, within thinwire; "" is the whole of it.

    Every way counts alike: at the top, for type checkers, inside a function, and by a string. An import that comes
    late is a dependency too: who changes the one module must understand the other.
    """
    found: set[str] = set()
    for module, name in imports_of(path):
        if module == "thinwire" or module.startswith("thinwire."):
            inner = module.removeprefix("thinwire").removeprefix(".")
            deeper = f"{inner}.{name}".strip(".")
            found.add(deeper if deeper in MODULES else inner)
    if name_of(path) in LOADERS:
        return frozenset(found)
    for module, open_end in string_imports(path):
        if module == "thinwire" or module.startswith("thinwire."):
            inner = module.removeprefix("thinwire").removeprefix(".")
            # `__main__` is run, and never imported.
            begun = {each for each in MODULES if each.startswith(inner) and not each.endswith("__main__")}
            found |= begun if open_end else {inner}
    return frozenset(found)


def package_of(module: str) -> str:
    return module.partition(".")[0]


def room_of(module: str) -> str:
    """The package within a package, such as `methods.codecs`, where there are several in it; else the package."""
    package, _, inner = module.partition(".")
    return f"{package}.{inner.partition('.')[0]}" if package in ROOMS and inner else package


def floor_of(name: str, floors: list[set[str]]) -> int:
    return next(i for i, floor in enumerate(floors) if name in floor)


def may_import(module: str, other: str) -> bool:
    room, theirs = room_of(module), room_of(other)
    if room == theirs:
        return True
    if room in APART:
        return theirs in GROUND
    package, others = package_of(module), package_of(other)
    if package != others:
        return floor_of(others, FLOORS) < floor_of(package, FLOORS)
    if room == package:
        return True  # a package gives names of its rooms
    return floor_of(theirs.split(".")[1], ROOMS[package]) < floor_of(room.split(".")[1], ROOMS[package])


def test_every_package_has_its_floor() -> None:
    assert set().union(*FLOORS) | {""} == {package_of(module) for module in MODULES}
    inner = {room_of(module) for module in MODULES if "." in module and package_of(module) in ROOMS}
    assert {f"{package}.{room}" for package, floors in ROOMS.items() for floor in floors for room in floor} == inner


def test_imports_point_down() -> None:
    # The root is above all; public names are for users, so that every package imports them from where they are defined.
    wrong = [
        f"{module} imports {other or 'thinwire'}"
        for module, path in PATHS.items()
        if module
        for other in own_imports(path)
        if not other or not may_import(module, other)
    ]
    assert not wrong, wrong


def test_only_loaders_import_modules_that_their_code_does_not_name() -> None:
    assert {name_of(path) for path in FILES if any(not module for module, _ in string_imports(path))} == set(LOADERS)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('import_module("thinwire.planning.plan.auto")', {"planning.plan.auto"}),
        ('importlib.import_module(name="thinwire.planning.plan.auto")', {"planning.plan.auto"}),
        ('__import__("thinwire.planning.plan.auto")', {"planning.plan.auto"}),
        ('pkgutil.resolve_name("thinwire.planning.plan.auto:choose_for")', {"planning.plan.auto"}),
        ('from importlib import import_module as load\nload("thinwire.planning.plan.auto")', {"planning.plan.auto"}),
        ('import_module(f"thinwire.core.storage.f{name}")', {"core.storage.files"}),
        ("def late():\n    from thinwire.planning.plan import auto", {"planning.plan.auto"}),
        ('import_module("thinwire")', {""}),
        ('import_module("numpy")', set()),
    ],
)
def test_imports_by_a_string_count(code: str, found: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "late.py"
    path.write_text(code)
    assert own_imports(path) == found


def test_alternatives_know_only_what_is_common_to_them() -> None:
    wrong: list[str] = []
    for path in FILES:
        module = name_of(path)
        if room_of(module) not in ALTERNATIVES or path.stem == "__init__":
            continue
        for other in own_imports(path):
            common = other.endswith((".base", "_base", ".work", ".runtime"))
            fine = common or (module, other) in NEIGHBOURS or room_of(other) != room_of(module)
            if not fine:
                wrong.append(f"{module} imports {other}")
    assert not wrong, wrong


def test_methods_know_each_other_only_where_one_is_made_of_another() -> None:
    methods = {kind.__module__.removeprefix("thinwire.") for kind in kinds_of(Strategy)}
    known = {(module, other) for module in methods for other in own_imports(PATHS[module]) & methods}
    assert known == MADE_OF


def test_few_files_lie_loose() -> None:
    loose = sorted(path.name for path in ROOT.glob("*.py") if path.name not in ("__init__.py", "__main__.py"))
    assert len(loose) <= MOST_LOOSE_FILES, loose


def test_the_kernels_in_torch_know_nothing_of_those_that_are_checked_against_them() -> None:
    theirs = {name_of(path): own_imports(path) for path in FILES if name_of(path).startswith("core.kernels.reference")}
    assert theirs
    common = {"core.torch_internals"}
    wrong = {
        name: found
        for name, others in theirs.items()
        if (found := {o for o in others if "reference" not in o} - common)
    }
    assert not wrong, wrong


def test_nothing_imports_itself_by_a_detour() -> None:
    graph = {name_of(path): own_imports(path) for path in FILES}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail, module])
        if module not in done:
            for other in graph.get(module, set()):
                visit(other, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_no_file_imports_the_package_that_it_lies_in() -> None:
    wrong: list[str] = []
    for path in FILES:
        module = name_of(path)
        packages = {module[: dot.start()] for dot in re.finditer(r"\.", module)}
        if path.stem != "__main__":  # which is run, and never imported
            wrong += [f"{module} imports {other}" for other in own_imports(path) & packages]
    assert not wrong, wrong


def test_only_the_group_comm_and_whole_runs_know_torch_distributed() -> None:
    wrong: list[str] = []
    for path in FILES:
        place = path.relative_to(ROOT).as_posix()
        if place in TALKERS or place.startswith("lab/runs/"):
            continue
        used = [f"{module}.{name}".removesuffix(".") for module, name in imports_of(path)]
        used += [words(node) for node in nodes_of(path) if isinstance(node, ast.Attribute)]
        wrong += [f"{place}: {word}" for word in used if word.startswith("torch.distributed")]
    assert not wrong, wrong


INTERNALS = ROOT / "core" / "torch_internals.py"
# More of its kind, of objects that a file does not name: tensors, modules, optimizers and scalers.
PRIVATE_NAMES = {
    *("_local_tensor", "_backward_hooks", "_forward_hooks_with_kwargs", "_per_optimizer_states"),
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_orig_mod", "_schedulers"),
}
# Modules and classes of torch, under the names by which files import them.
TORCH_ROOTS = {"torch", "nn", "F", "dist", "Tensor", "optim", "Optimizer", "DistributedDataParallel", "init"}


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_names_of(path: Path) -> set[str]:
    """Attributes of other objects, and strings, that begin with an underscore."""
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and words(node.value) not in ("self", "cls"):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return set(filter(private, found))


def torch_internals_in(path: Path, known: set[str]) -> set[str]:
    """The private names of torch that a file uses."""
    found = private_names_of(path) & known
    for module, name in imports_of(path):
        parts = [*module.split("."), name]
        if parts[0] == "torch" and any(map(private, parts)):
            found.add(f"{module}.{name}")
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute):
            parts = words(node).split(".")
            if parts[0] in TORCH_ROOTS and all(map(str.isidentifier, parts)) and any(map(private, parts)):
                found.add(words(node))
    return found


def test_only_one_file_knows_private_names_of_torch() -> None:
    known = private_names_of(INTERNALS) | PRIVATE_NAMES
    assert {"_get_default_store", "_unscale_grads_", "_active_ddp_module", "_current_autograd_node"} <= known
    others = {name_of(path): torch_internals_in(path, known) for path in FILES if path != INTERNALS}
    wrong = {name: found for name, found in others.items() if found}
    assert not wrong, f"{wrong}: give them a name in torch_internals.py, with a test"


ORACLES = sorted((REPOSITORY / "tests" / "oracles").glob("*.py"))


@for_each(ORACLES, lambda path: path.stem)
def test_oracles_import_nothing_of_the_project(path: Path) -> None:
    modules = {module for module, _ in imports_of(path) if module.partition(".")[0] in ("thinwire", "tests")}
    assert all(module.startswith("tests.oracles") for module in modules), modules


# -- what must not be there --------------------------------------------------------------------------------------------

PICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
OBJECT_CALLS = {
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
}


def calls_in(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in nodes_of(path):
        if isinstance(node, ast.Call):
            yield words(node.func), node


def literal(call: ast.Call, name: str) -> Any:
    return next((k.value.value for k in call.keywords if k.arg == name and isinstance(k.value, ast.Constant)), None)


def unsafe(name: str, call: ast.Call) -> bool:
    if name in ("eval", "exec", "compile", "torch.save") or name.rpartition(".")[2] in OBJECT_CALLS:
        return True
    if name == "torch.load":
        return literal(call, "weights_only") is not True
    return bool(literal(call, "allow_pickle"))


@for_each(FILES, name_of)
def test_nothing_that_is_read_can_run(path: Path) -> None:
    imported = {module.partition(".")[0] for module, _ in imports_of(path)}
    assert not imported & PICKLERS
    assert not [f"line {call.lineno}: {name}" for name, call in calls_in(path) if unsafe(name, call)]


@for_each(FILES, name_of)
def test_nothing_is_left_to_be_done(path: Path) -> None:
    names = {node.id for node in nodes_of(path) if isinstance(node, ast.Name)}
    assert "NotImplementedError" not in names
    assert not [word for word in ("TODO", "FIXME", "XXX", "HACK") if word in path.read_text()]


def test_the_global_seed_is_never_set() -> None:
    seeders = {"torch.manual_seed", "random.seed", "np.random.seed", "torch.cuda.manual_seed_all"}
    wrong = [f"{name_of(path)}: {name}" for path in FILES for name, _ in calls_in(path) if name in seeders]
    # A user's own model and batches draw from torch's global generator, in a process that the command line started.
    allowed = {"lab.tasks.own: torch.manual_seed"}
    # A user's unmodified script, which is alone in its process too.
    allowed |= {f"integrations.script: {name}" for name in ("torch.manual_seed", "random.seed", "np.random.seed")}
    assert set(wrong) <= allowed, wrong


# On the default device where none is given, and only there.
MAKERS = {f"torch.{function.__name__}" for function in _device_constructors()}
# Networks are on the default device, as those of torch are.
ON_THE_DEFAULT_DEVICE = {"lab.tasks.models.base": 2}
# Of integers, or of the dtype of what they are given, whatever the default is.
NEED_NO_DTYPE = {f"torch.{name}" for name in ("asarray", "randint", "randperm", "sparse_coo_tensor", "tril_indices")}


@for_each(FILES, name_of)
def test_new_tensors_have_a_device(path: Path) -> None:
    made = [(name, call) for name, call in calls_in(path) if name in MAKERS]
    without = [(name, call.lineno) for name, call in made if "device" not in {each.arg for each in call.keywords}]
    fix = "device='cpu' for numbers of the host, or the device of what they meet"
    assert len(without) == ON_THE_DEFAULT_DEVICE.get(name_of(path), 0), f"{without}: {fix}"


@for_each(FILES, name_of)
def test_new_tensors_have_a_dtype(path: Path) -> None:
    made = [(name, call) for name, call in calls_in(path) if name in MAKERS - NEED_NO_DTYPE and not counts(name, call)]
    without = [(name, call.lineno) for name, call in made if "dtype" not in {each.arg for each in call.keywords}]
    assert not without, f"{without}: give the dtype, which torch.set_default_dtype would change"


def counts(name: str, call: ast.Call) -> bool:
    """Whether a call is a range of integers."""
    parts = [part for argument in call.args for part in ast.walk(argument)]
    fractions = [part for part in parts if isinstance(part, ast.Div) or isinstance(getattr(part, "value", None), float)]
    return name == "torch.arange" and not fractions


STRATEGIES = {"methods.strategies", "asynchronous.ad_psgd", "asynchronous.async_leader", "asynchronous.backup_workers"}


def hyperparameters() -> set[str]:
    """The names of all strategies' fields and traits."""
    kinds = [Traits, *(kind for kind in recipe_classes().values() if issubclass(kind, Strategy))]
    return {field.name for kind in kinds if dataclasses.is_dataclass(kind) for field in dataclasses.fields(kind)}


@for_each([path for path in FILES if room_of(name_of(path)) not in STRATEGIES], name_of)
def test_strategies_are_not_searched_for_hyperparameters(path: Path) -> None:
    searches = [call for name, call in calls_in(path) if name in ("getattr", "hasattr")]
    names = {argument.value for call in searches for argument in call.args[1:2] if isinstance(argument, ast.Constant)}
    assert not names & hyperparameters(), "read them from strategy.traits"


# -- the public names --------------------------------------------------------------------------------------------------


def test_the_public_names_are_listed_once_and_the_stub_says_the_same() -> None:
    assert len(set(thinwire.__all__)) == len(thinwire.__all__)
    tool = runpy.run_path(str(REPOSITORY / "tools" / "write_stub.py"))
    assert tool["main"](["--check"]) == 0


def test_no_package_bears_the_name_of_a_public_one() -> None:
    packages = {path.stem for path in ROOT.iterdir() if path.suffix in ("", ".py")}
    assert not packages & set(thinwire.__all__)


FIRST = (
    "import thinwire.worker.attach",
    "",
    "from thinwire import *",
    "import thinwire.lab.runs",
    "import thinwire.cli.commands",
)
CALLABLE = """
import thinwire
import thinwire.methods.reduce, thinwire.methods.strategies.recipe
import thinwire.arrays.fusion.array, thinwire.tensor2d.parallelize
print(all(map(callable, (thinwire.attach, thinwire.fuse, thinwire.parse, thinwire.parallelize_2d))))
"""
PLANNER = """
import thinwire
def train(comm):
    import torch
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    thinwire.attach(model, optimizer, "AllReduce()", comm=comm).detach()
    before = planner in sys.modules
    return before, thinwire.attach(model, optimizer, "auto", comm=comm).strategy, planner in sys.modules
planner = "thinwire.planning.plan"
print(planner in sys.modules, *thinwire.run_threads(1, train))
"""
OPTIONAL = """
before = set(sys.modules)
import thinwire
thinwire.attach, thinwire.parse
optional = "matplotlib rich cyclopts sklearn safetensors PIL datasets tensorboard zmq pyarrow".split()
print([name for name in optional if name in sys.modules and name not in before])
"""
IN_FORKS = """
import os, sys, torch
for number, code in enumerate(sys.argv[1:]):
    print("---", flush=True)
    process = os.fork()
    if not process:
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(process, 0)
"""


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What each program prints in a process that has imported torch and nothing else, which takes seconds."""
    codes = [*(f"{first}\n{CALLABLE}" for first in FIRST), PLANNER, OPTIONAL]
    found = subprocess.run([sys.executable, "-c", IN_FORKS, *codes], capture_output=True, text=True, timeout=100)
    assert not found.stderr and found.returncode == 0, found.stderr
    return dict(zip(codes, map(str.strip, found.stdout.split("---")[1:]), strict=True))


def test_attach_is_a_function_in_every_order_of_imports(printed: dict[str, str]) -> None:
    assert {first: printed[f"{first}\n{CALLABLE}"] for first in FIRST} == dict.fromkeys(FIRST, "True")


def test_the_command_line_does_not_wait_for_torch() -> None:
    code = "import sys, thinwire.cli.commands; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert found.stdout.strip() == "False"


def test_the_planner_is_imported_where_auto_is_asked_for_and_not_before(printed: dict[str, str]) -> None:
    assert printed[PLANNER] == "False (False, AllReduce(codec=None), True)"


def test_importing_thinwire_needs_torch_and_nothing_else(printed: dict[str, str]) -> None:
    assert printed[OPTIONAL] == "[]"


@for_each(name for name in thinwire.__all__ if name != "__version__")
def test_every_public_name_is_documented(name: str) -> None:
    thing = getattr(thinwire, name)
    assert inspect.getdoc(thing)
    if not inspect.isclass(thing):
        return
    for attribute, value in vars(thing).items():
        if not attribute.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            assert inspect.getdoc(getattr(thing, attribute)), f"{name}.{attribute}"


# -- recipes -----------------------------------------------------------------------------------------------------------


def kinds_of(base: type) -> list[type]:
    """All kinds of recipe in thinwire itself."""
    below = [kind for child in base.__subclasses__() for kind in [child, *kinds_of(child)]]
    # Examples in docstrings define classes of their own, and `Members` is no recipe: `attach` puts it around one.
    others = Wrapper, CodecWrapper, Members
    mine = [kind for kind in below if kind.__module__.startswith("thinwire.") and kind not in others]
    mine = [kind for kind in mine if hasattr(sys.modules[kind.__module__], kind.__name__)]
    return [kind for kind in mine if not inspect.isabstract(kind) and kind.__name__[0] != "_"]


recipe_classes()  # imports them all
RECIPES = [kind for base in (Strategy, Topology, Codec) for kind in kinds_of(base)]


@for_each(RECIPES, lambda kind: kind.__name__)
def test_every_recipe_is_a_frozen_dataclass_that_its_repr_makes_again(kind: type) -> None:
    assert dataclasses.is_dataclass(kind)
    recipe = kind()
    assert hash(recipe) == hash(kind())
    for field in dataclasses.fields(kind):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(recipe, field.name, None)
    assert again(recipe) == recipe
    assert recipe_classes()[kind.__name__] is kind
    assert kind.__name__ in thinwire.__all__


def again(recipe: Any) -> Any:
    """A recipe, made again from its repr."""
    if isinstance(recipe, Strategy):
        return parse(repr(recipe))
    holder = "PushSum(topology={})" if isinstance(recipe, Topology) else "AllReduce(codec={})"
    made: Any = parse(holder.format(repr(recipe)))
    return made.topology if isinstance(recipe, Topology) else made.codec
