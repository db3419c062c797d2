"""The commands by name, and from what was typed to what is to be done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from thinwire.cli.console import out
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Command:
    """One command: where its dataclass is, and one line on what it does.

    A command's module is imported when it is called for, so that help comes at once.
    """

    module: str
    kind: str
    summary: str


COMMANDS = {
    "train": Command("thinwire.cli.train", "Train", "train a recipe on a task, with several workers on this machine"),
    "compare": Command("thinwire.cli.compare", "Compare", "run several strategies side by side, and tabulate them"),
    "explain": Command("thinwire.cli.explain", "Explain", "what a recipe will send, keep and wait for, before any run"),
    "topology": Command("thinwire.cli.topology", "Topology", "who sends to whom on a graph, and how fast it agrees"),
    "report": Command("thinwire.cli.report", "Report", "draw a run or a comparison as one page to look at"),
    "emulate": Command("thinwire.cli.emulate", "Emulate", "run any command once per worker, over slow links"),
    "demo": Command("thinwire.cli.demo", "Demo", "five strategies on a slow link, in under four minutes"),
    "select": Command("thinwire.cli.select", "Select", "choose the few points of a data set that stand for all"),
    "sweep": Command("thinwire.cli.sweep", "Sweep", "search hyperparameters: many trials for the price of few"),
    "reproduce": Command("thinwire.cli.reproduce", "Reproduce", "check a paper's claim at the scale of one machine"),
}


def parse(arguments: Sequence[str]) -> Callable[[], int]:
    """What the arguments ask for, to be called; it returns the exit code.

    Raises:
        ConfigError: there is no such command.
    """
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        return _help
    if arguments[0] in ("-V", "--version"):
        return _version
    name, *rest = arguments
    if name not in present():
        raise ConfigError(_unknown(name))
    return _build(name, rest)


def present() -> list[str]:
    """The commands whose modules are installed."""
    return [name for name, command in COMMANDS.items() if find_spec(command.module) is not None]


def _build(name: str, arguments: Sequence[str]) -> Callable[[], int]:
    """The command's dataclass, filled in by tyro; help and usage errors are over once they are printed."""
    import tyro

    command = COMMANDS[name]
    kind: Any = getattr(import_module(command.module), command.kind)
    try:
        return tyro.cli(kind, prog=f"thinwire {name}", args=list(arguments), config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 2
        return lambda: code


def _help() -> int:
    out.print("usage: thinwire COMMAND ...\n\nTrain PyTorch models over slow networks.\n", markup=False)
    for name in present():
        out.print(f"  {name:<11}{COMMANDS[name].summary}", markup=False)
    out.print("\nthinwire COMMAND --help says what each takes; thinwire --version says which this is.", markup=False)
    return 0


def _version() -> int:
    from thinwire._version import __version__

    out.print(f"thinwire {__version__}", markup=False)
    return 0


def _unknown(name: str) -> str:
    close = get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{name}: no such command{hint} (commands: {', '.join(present())})"
