# SPDX-License-Identifier: Apache-2.0
"""The commands by name, and how a command line becomes the dataclass that carries it out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

from thinwire.errors import ConfigError

if TYPE_CHECKING:
    from cyclopts import App


COMMANDS = {
    "train": "train a task with one strategy, on several workers",
    "compare": "run several strategies on one task, and tabulate them",
    "up": "run an unmodified training script on several workers",
    "init": "write a training script for your case, to change and run",
    "explain": "show what a strategy sends, stores and waits for",
    "plan": "say which strategy suits a model, a network and a number of workers",
    "simulate": "run a strategy on many simulated workers, in virtual time",
    "topology": "show which worker sends to which on a graph, and how fast it mixes",
    "export": "write a run's weights to one safetensors file",
    "report": "draw a run or a comparison as one HTML page",
    "watch": "show a run while it trains: loss, bytes, waits, slowest worker",
    "emulate": "run any command once per worker, over emulated slow links",
    "demo": "compare five strategies on a slow link, in about two and a half minutes",
    "select": "choose a small weighted subset of a data set: a coreset",
    "sweep": "search hyperparameters: many trials trained as one array",
    "bucket": "draw the key of a run over a bucket, or delete an ended run",
    "store": "host the store in which elastic workers agree on who they are",
    "doctor": "examine machines and links: what is wrong, and what it costs",
    "tools": "list what runs natively on this machine, and what is missing",
    "completion": "print or install a script that completes commands in a shell",
}
"""What each command does; `train` is the dataclass `Train` of the module `thinwire.cli.train`, and so on."""
RECIPES = {
    "AllReduce()": "the network is fast enough",
    "LocalSGD(period=8)": "sending takes several times as long as computing",
    "LocalSGD(period=8, codec=Quantize(4))": "the same, on a very slow link",
    "OverlapLocalSGD(period=8)": "the same, with no time to wait for averages",
}


def parse(arguments: Sequence[str]) -> Callable[[], int]:
    """Turn the arguments into a callable that does the work and returns the exit code.

    Raises:
        ConfigError: the command or an option is unknown, or an option's value cannot be read.
    """
    if len(arguments) == 2 and arguments[0] == "help":
        arguments = [arguments[1], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        return _help
    if arguments[0] in ("-V", "--version"):
        return _version
    name, *rest = arguments
    if name == "--install-completion":
        name = "completion"
        rest.append("--install")
    if name == "__complete":  # what a shell's script asks for the values that it does not list itself
        return lambda: program()(list(arguments)) or 0
    if name not in COMMANDS:
        close = get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{name}: no such command{hint} (commands: {', '.join(COMMANDS)})")
    from thinwire.cli.parsing import parse_command

    return parse_command(f"thinwire {name}", kind_of(name), rest)


def kind_of(name: str) -> type[Any]:
    """Return the dataclass of a command, whose module is imported now, so that help does not wait for the others."""
    return getattr(import_module(f"{__package__}.{name}"), name.capitalize())


def program() -> App:
    """Make the program with all commands, for which every command's module is imported."""
    from cyclopts import App

    from thinwire.cli.parsing import make_app

    app = App(name="thinwire", help_format="plaintext")
    for name, summary in COMMANDS.items():
        made = make_app(f"thinwire {name}", kind_of(name))
        made.help = summary
        app.command(made, name=name)
    return app


def _help() -> int:
    rows = ["usage: thinwire COMMAND ...", "", "Train PyTorch models over thin wires.", ""]
    rows += [f"  {name:<11}{summary}" for name, summary in COMMANDS.items()]
    rows += ["", "Recipes to begin with; thinwire explain RECIPE says what each sends, and its limits:", ""]
    rows += [f"  {recipe:<40}{use}" for recipe, use in RECIPES.items()]
    rows += ["", "thinwire help COMMAND shows a command's options, thinwire --version the version;"]
    rows += ["thinwire --install-completion lets your shell complete commands, options and files."]
    # Without rich, whose import takes longer than everything else here.
    sys.stdout.write("\n".join(rows) + "\n")
    return 0


def _version() -> int:
    from thinwire._version import __version__

    sys.stdout.write(f"thinwire {__version__}\n")
    return 0
