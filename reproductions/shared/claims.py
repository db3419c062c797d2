"""Papers' claims, checked at the scale of one machine against the papers' own baselines."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from thinwire._version import __version__
from thinwire.errors import ConfigError
from thinwire.runs.launcher import Listener
from thinwire.storage.files import write_atomically

_HOME = Path(__file__).parents[1]
# One folder per claim, with its results beside its code: on the command line local_sgd_bytes is local-sgd-bytes.
MODULES = {
    path.parent.name.replace("_", "-"): f"reproductions.{path.parent.name}.claim"
    for path in sorted(_HOME.glob("*/claim.py"))
}
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
        listener: called with the progress of each run.
        begin: called before each run starts: its strategy and its place.
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
    content = {**words, **asdict(result), "quick": quick, "when": when, "thinwire": __version__}
    write_atomically(folder / "result.json", (json.dumps(content, indent=2) + "\n").encode())
    write_atomically(folder / "report.md", _page(which, result, quick=quick, when=when).encode())
    return folder / "report.md"


def last_result(name: str) -> dict[str, Any] | None:
    """The committed result of a claim; None if there is none yet."""
    path = _HOME / name.replace("-", "_") / "result.json"
    return json.loads(path.read_bytes()) if path.is_file() else None


def _page(which: Claim, result: Result, *, quick: bool, when: str) -> str:
    verdict = "It holds." if result.holds else "It does not hold."
    rows = "".join(f"| {key} | {value} |\n" for key, value in result.details.items())
    return (
        f"# {which.name}\n\n{which.sentence}\n\n{which.paper}\n\n"
        f"| | |\n| --- | --- |\n| published | {which.published} |\n| measured | {result.measured} |\n"
        f"| spread | {result.least:.4g} to {result.most:.4g} |\n| rule | {which.rule} |\n"
        f"| version | thinwire {__version__}, {when}{', quick' if quick else ''} |\n\n{verdict}\n\n"
        f"## Details\n\n| | |\n| --- | --- |\n{rows}"
    )
