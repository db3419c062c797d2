# SPDX-License-Identifier: Apache-2.0
"""Papers' claims, checked at the scale of one machine against the papers' own baselines."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from enum import StrEnum
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire import ConfigError, NonFiniteError
from thinwire._version import __version__
from thinwire.core.storage.files import write_atomically
from thinwire.lab.emulate import available
from thinwire.lab.report.statistics import spread
from thinwire.lab.runs import Comparison, Settings, compare, launch, resolve
from thinwire.lab.runs.defaults import check_recipe
from thinwire.lab.runs.folder import Fields
from thinwire.lab.runs.launcher import Listener

if TYPE_CHECKING:
    from thinwire.lab.report.picture import Picture

_HOME = Path(__file__).parents[1]
# One folder per claim, with its results beside its code: on the command line local_sgd_bytes is local-sgd-bytes.
MODULES = {
    path.parent.name.replace("_", "-"): f"reproductions.{path.parent.name}.claim"
    for path in sorted(_HOME.glob("*/claim.py"))
}
Begin = Callable[[str, int], None]


class Outcome(StrEnum):
    """What came of one part of a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    NOISE = "within noise"
    UNDECIDED = "cannot be decided here"


def judged(holds: bool) -> Outcome:
    """The outcome of a rule that is met or not."""
    return Outcome.HOLDS if holds else Outcome.FAILS


def at_most(rounds: Sequence[float], limit: float) -> Outcome:
    """The outcome of a rule about measured times: a figure of each round, paired within it, must not exceed a limit.

    Where some rounds meet the rule and others do not, their spread can turn it, and it is not decided.

    Example:
        >>> at_most([0.97, 1.01, 1.02], 1.05).value, at_most([1.01, 1.04, 1.09], 1.05).value
        ('holds', 'within noise')
    """
    met = [figure <= limit for figure in rounds]
    return judged(met[0]) if len(set(met)) == 1 else Outcome.NOISE


def at_least(rounds: Sequence[float], limit: float) -> Outcome:
    """As `at_most`, for figures that must not be below the limit."""
    return at_most([-figure for figure in rounds], -limit)


def weakest(outcomes: Sequence[Outcome]) -> Outcome:
    """What comes of a rule that must hold of every one of several tasks, or numbers of workers.

    Example:
        >>> weakest([Outcome.HOLDS, Outcome.NOISE]).value, weakest([Outcome.NOISE, Outcome.FAILS]).value
        ('within noise', 'does not hold')
    """
    return next(each for each in (Outcome.FAILS, Outcome.NOISE, Outcome.HOLDS) if each in outcomes)


@dataclass(frozen=True)
class Result:
    """What was measured.

    Args:
        parts: what came of each part of the claim, by the names that `Claim.parts` has.
        measured: the figure, in words with its unit.
        value: the figure.
        least: the least of its rounds.
        most: the greatest of its rounds.
        details: whatever else a reader may want to know, as JSON values.
    """

    parts: Mapping[str, Outcome]
    measured: str
    value: float
    least: float
    most: float
    details: dict[str, Any]

    @property
    def holds(self) -> bool:
        """Whether every part does."""
        return all(outcome is Outcome.HOLDS for outcome in self.parts.values())

    @property
    def verdict(self) -> str:
        """One of four: holds; holds in part, and which; does not hold; cannot be decided here."""
        return verdict_of({name: str(outcome) for name, outcome in self.parts.items()})


def verdict_of(parts: Mapping[str, str]) -> str:
    """The verdict over the parts of a claim, in words.

    Example:
        >>> verdict_of({"bytes": "holds", "time": "within noise"})
        'holds in part: bytes; time: within noise'
        >>> verdict_of({"bytes": "holds"}), verdict_of({"a": "does not hold", "b": "within noise"})
        ('holds', 'does not hold: a; b: within noise')
    """
    held = [name for name, outcome in parts.items() if outcome == Outcome.HOLDS]
    rest = [f"{name}: {outcome}" for name, outcome in parts.items() if outcome not in (Outcome.HOLDS, Outcome.FAILS)]
    failed = [name for name, outcome in parts.items() if outcome == Outcome.FAILS]
    if len(held) == len(parts):
        return "holds"
    if held:
        not_held = [f"{name}: does not hold" for name in failed]
        return "; ".join([f"holds in part: {', '.join(held)}", *not_held, *rest])
    if failed:
        return "; ".join([f"does not hold: {', '.join(failed)}", *rest])
    return f"cannot be decided here: {'; '.join(rest)}"


def with_error(differences: Sequence[float]) -> str:
    """Write differences of accuracy, paired by seed, in words: their mean, its standard error, and each."""
    # The sum has no negative zero.
    found = spread(0.0 + 100 * each for each in differences)
    error = f" ± {found.error:.2f}" if len(found.values) > 1 else ""
    return f"{found.mean:+.2f}{error} points (by seed: {', '.join(f'{each:+.2f}' for each in found.values)})"


@dataclass(frozen=True)
class Attempt:
    """How a claim is to be checked.

    Args:
        folder: a new one for its runs.
        quick: fewer steps and rounds.
        listener: called with the progress of each run.
        on_begin: called before each run starts: its strategy and its place.
    """

    folder: Path
    quick: bool
    listener: Listener
    on_begin: Begin
    _places: Iterator[int] = field(default_factory=count, init=False, repr=False)

    def begin(self, words: str, _: int = 0) -> None:
        """Report that the next run starts."""
        self.on_begin(words, next(self._places))

    def compare(
        self,
        name: str,
        recipes: Iterable[str],
        asked: Mapping[str, Any] | Settings,
        *,
        rounds: int = 1,
        title: str = "",
        rates: Mapping[str, float] | None = None,
    ) -> Comparison:
        """Run recipes in turns as processes.

        Args:
            name: of the folder.
            recipes: in the order of their turns.
            asked: the settings of all runs.
            rounds: how often each is run.
            title: of the report.
            rates: by recipe, its own learning rate.
        """
        settings = asked if isinstance(asked, Settings) else resolve(dict(asked))
        own = {check_recipe(recipe, settings.workers): lr for recipe, lr in (rates or {}).items()}

        def start(settings: Settings, folder: Path, *, listener: Listener) -> Fields:
            return launch(replace(settings, lr=own.get(settings.strategy, settings.lr)), folder, listener=listener)

        progress: dict[str, Any] = {"listener": self.listener, "begin": self.begin, "start": start}
        return compare(settings, list(recipes), self.folder / name, rounds=rounds, title=title, **progress)

    def illustrated(self, result: Result, pictures: Callable[[], Iterable[Picture]]) -> Result:
        """Add pictures to a result, drawn into the folder; none where matplotlib is not installed."""
        try:
            names = [picture.png(self.folder).name for picture in pictures()]
        except ModuleNotFoundError as missing:
            if (missing.name or "").partition(".")[0] != "matplotlib":
                raise
            names = []
        words = " ".join(f"![{name}]({name})" for name in names) or "none: matplotlib is missing"
        return replace(result, details={**result.details, "pictures": words})


def emulated(link: str) -> str | None:
    """The link where this machine can emulate it, else None: workers then use the machine's own network."""
    return None if available() else link


def ended(done: Comparison) -> Comparison:
    """The comparison, all of whose runs reached their end: bytes and seconds of others say nothing.

    Raises:
        NonFiniteError: one of them diverged; with what ended it.
    """
    for strategy, number, words in done.diverged:
        raise NonFiniteError(f"{strategy}, round {number}: {words}")
    return done


@dataclass(frozen=True)
class Earlier:
    """A rule by which a claim was judged before, and what came of it then.

    Args:
        rule: its words.
        verdict: what came of it.
        why: it was changed.
    """

    rule: str
    verdict: str
    why: str


@dataclass(frozen=True)
class Claim:
    """One claim of one paper; a module that is listed here holds it under the name `CLAIM`.

    Its words are in `claim.toml` beside the module, where `{NAME}` stands for a constant of that module.

    Args:
        name: as it is called on the command line.
        sentence: the claim.
        paper: where it is made.
        published: the paper's own figure, in words with its unit.
        protocol: what is run: data, baselines, what is tuned over what, seeds.
        parts: by name, when that part of the claim holds here.
        costs: where the method does not pay, in words, from figures of this reproduction.
        minutes: that the full and the quick form take on two cores, about.
        run: measures it.
        earlier: rules by which it was judged before, newest first.
        full_only: parts that the quick form measures and does not decide, since so few rounds or seeds cannot.
    """

    name: str
    sentence: str
    paper: str
    published: str
    protocol: str
    parts: Mapping[str, str]
    costs: str
    minutes: tuple[float, float]
    run: Callable[[Attempt], Result]
    earlier: tuple[Earlier, ...] = ()
    full_only: tuple[str, ...] = ()

    @classmethod
    def read(cls, module: str, run: Callable[[Attempt], Result], constants: Mapping[str, Any]) -> Claim:
        """Read the words of a claim.

        Args:
            module: its file.
            run: measures it.
            constants: of the module, by name.
        """

        def filled(found: Any) -> Any:
            if isinstance(found, str):
                return found.format_map(constants)
            if isinstance(found, list):
                return tuple(filled(each) for each in found)
            return {key: filled(each) for key, each in found.items()} if isinstance(found, dict) else found

        words = filled(tomllib.loads(Path(module).with_name("claim.toml").read_text(encoding="utf-8")))
        earlier = tuple(Earlier(**each) for each in words.pop("earlier", ()))
        return cls(**words, run=run, earlier=earlier)

    def decided_by_quick(self, parts: Mapping[str, str]) -> dict[str, Outcome]:
        """The outcomes of parts in the quick form: of those that only the full form decides, that it cannot."""
        return {name: Outcome.UNDECIDED if name in self.full_only else Outcome(x) for name, x in parts.items()}

    @property
    def rule(self) -> str:
        """The rules of all parts."""
        return "; ".join(f"{name}: {rule}" for name, rule in self.parts.items())


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
    """Keep a result as `result.json`, which `last_result` reads where it is committed, and as `report.md`.

    Raises:
        ConfigError: the result has other parts than the claim.
    """
    if list(result.parts) != list(which.parts):
        raise ConfigError(f"{which.name}: the result has parts {list(result.parts)}, the claim {list(which.parts)}")
    content = {
        "name": which.name,
        "published": which.published,
        "protocol": which.protocol,
        "rule": which.rule,
        "verdict": result.verdict,
        **asdict(result),
        "quick": quick,
        "when": when,
        "thinwire": __version__,
    }
    write_atomically(folder / "result.json", (json.dumps(content, indent=2) + "\n").encode())
    write_atomically(folder / "report.md", _page(which, result, quick=quick, when=when).encode())
    return folder / "report.md"


def last_result(name: str) -> dict[str, Any] | None:
    """The committed result of a claim; None if there is none yet."""
    path = _HOME / name.replace("-", "_") / "result.json"
    return json.loads(path.read_bytes()) if path.is_file() else None


def is_present(which: Claim, result: Mapping[str, Any]) -> bool:
    """Whether a result was made by the present rule and protocol, which names the data and seeds."""
    return result["rule"] == which.rule and result.get("protocol") == which.protocol


def last_verdict(which: Claim, result: dict[str, Any] | None) -> str:
    """The verdict of a committed result, and whether it is one by the present rule."""
    if result is None:
        return "no committed result"
    verdict = result.get("verdict") or ("holds" if result["holds"] else "does not hold")
    if not is_present(which, result):
        return f"not run yet by the present rule; by the rule before: {verdict}"
    return f"{verdict}{' (quick form)' if result['quick'] else ''}"


def _page(which: Claim, result: Result, *, quick: bool, when: str) -> str:
    rows = "".join(f"| {key} | {words} |\n" for key, words in _flat(result.details))
    parts = "".join(f"| {name} | {which.parts[name]} | {outcome} |\n" for name, outcome in result.parts.items())
    before = "".join(f"| {each.rule} | {each.verdict} | {each.why} |\n" for each in which.earlier)
    history = f"## Earlier rules\n\n| rule | verdict | why it was changed |\n| --- | --- | --- |\n{before}\n"
    return (
        f"# {which.name}\n\n{which.sentence}\n\n{which.paper}\n\n"
        f"| | |\n| --- | --- |\n| published | {which.published} |\n| measured | {result.measured} |\n"
        f"| spread | {result.least:.4g} to {result.most:.4g} |\n| protocol | {which.protocol} |\n"
        f"| version | thinwire {__version__}, {when}{', quick' if quick else ''} |\n\n"
        f"**Verdict: {result.verdict}.**\n\n| part | it holds when | outcome |\n| --- | --- | --- |\n{parts}\n"
        f"{history if before else ''}## Details\n\n| | |\n| --- | --- |\n{rows}"
    )


def _flat(found: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """A row for each detail, of nested ones too, in words."""
    for key, value in found.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}, ")
        elif isinstance(value, list | tuple):
            yield f"{before}{key}", ", ".join(map(_in_words, value))
        else:
            yield f"{before}{key}", _in_words(value)


def _in_words(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
