"""Papers' claims, checked at the scale of one machine against the papers' own baselines."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from laconic._version import __version__
from laconic.errors import ConfigError
from laconic.files import write_atomically
from laconic.runs import claims
from laconic.runs.driver import Listener

# One module per claim, called as it is on the command line: local_sgd_bytes is local-sgd-bytes.
MODULES = {each.name.replace("_", "-"): f"{claims.__name__}.{each.name}" for each in iter_modules(claims.__path__)}
Begin = Callable[[str, int], None]


@dataclass(frozen=True)
class Result:
    """What was measured.

    Args:
        holds: whether the claim does.
        measured: the figure, in words with its unit.
        value: the figure.
        least: the least of its rounds.
        most: the greatest of its rounds.
        details: whatever else a reader may want to know, as JSON values.
    """

    holds: bool
    measured: str
    value: float
    least: float
    most: float
    details: dict[str, Any]


@dataclass(frozen=True)
class Attempt:
    """How a claim is to be checked.

    Args:
        folder: a new one for its runs.
        quick: fewer steps and rounds.
        listener: told how each run gets on.
        begin: told of each run before it starts: its strategy and its place.
    """

    folder: Path
    quick: bool
    listener: Listener
    begin: Begin


@dataclass(frozen=True)
class Claim:
    """One claim of one paper; a module that is listed here holds it under the name `CLAIM`.

    Args:
        name: as it is called on the command line.
        sentence: the claim.
        paper: where it is made.
        published: the paper's own figure, in words with its unit.
        rule: when it holds here.
        run: measures it.
    """

    name: str
    sentence: str
    paper: str
    published: str
    rule: str
    run: Callable[[Attempt], Result]


def claim(name: str) -> Claim:
    """The claim of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in MODULES:
        close = get_close_matches(name, MODULES, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{name}: no such reproduction{hint} (there are: {', '.join(MODULES)})")
    found: Claim = import_module(MODULES[name]).CLAIM
    return found


def write_result(folder: Path, which: Claim, result: Result, *, quick: bool, when: str) -> Path:
    """Keep a result as `result.json`, which `last_result` reads where it is committed, and as `report.md`."""
    words = {key: value for key, value in asdict(which).items() if key != "run"}
    content = {**words, **asdict(result), "quick": quick, "when": when, "laconic": __version__}
    write_atomically(folder / "result.json", (json.dumps(content, indent=2) + "\n").encode())
    write_atomically(folder / "report.md", _page(which, result, quick=quick, when=when).encode())
    return folder / "report.md"


def last_result(name: str) -> dict[str, Any] | None:
    """The committed result: beside the package in a repository, or beneath the current folder; None if neither."""
    homes = (Path(__file__).parents[3], Path.cwd())
    paths = [home / "reproductions" / name / "result.json" for home in homes]
    found = next((path for path in paths if path.is_file()), None)
    return None if found is None else json.loads(found.read_bytes())


def _page(which: Claim, result: Result, *, quick: bool, when: str) -> str:
    verdict = "It holds." if result.holds else "It does not hold."
    rows = "".join(f"| {key} | {value} |\n" for key, value in result.details.items())
    return (
        f"# {which.name}\n\n{which.sentence}\n\n{which.paper}\n\n"
        f"| | |\n| --- | --- |\n| published | {which.published} |\n| measured | {result.measured} |\n"
        f"| spread | {result.least:.4g} to {result.most:.4g} |\n| rule | {which.rule} |\n"
        f"| version | laconic {__version__}, {when}{', quick' if quick else ''} |\n\n{verdict}\n\n"
        f"## Details\n\n| | |\n| --- | --- |\n{rows}"
    )
