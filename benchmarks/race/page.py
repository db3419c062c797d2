# SPDX-License-Identifier: Apache-2.0
"""`docs/race.md` and `benchmarks/race/results.md`, from the rule and the results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import benchmarks.race as rule
from benchmarks.peers import NOT_RUN as PEERS_NOT_RUN
from benchmarks.race import planner
from benchmarks.race.bars import bars
from benchmarks.race.checks import check_lines, whole_runs
from benchmarks.race.racers import LOCALS, OUTER, OUTER_RATES, PLACES, RACERS, SIZES, Racer, ddp_of, named
from benchmarks.race.results import RESULTS, best_try, final_of_try, result, tries
from benchmarks.race.table import COST, NOT_RUN, SPEED, STEP, Row, first, rows, table, wall_seconds
from reproductions.shared.committed import filled
from thinwire import parse

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "race.md"
TABLES = Path(__file__).with_name("results.md")
README = PAGE.parents[1] / "README.md"
_FASTEST = ("fastest thinwire recipe", "to the target")
_MARKS = ("<!-- race -->\n", "<!-- /race -->")
_PLACES = {
    "20mbit": "20 Mbit",
    "100mbit": "100 Mbit",
    "1gbit": "1 Gbit",
    "none": "no limit",
    "100mbit+50ms": "100 Mbit with 50 ms",
}


def page() -> str:
    """Return the page of the docs: who is first where, the verdicts, pictures and commands."""
    parts = {
        "standing": _standing(),
        "walls": _walls(),
        "missed": _missed(),
        "planned": _planned(),
        "pictures": _pictures(),
        "later": _later(),
        "absent": "\n".join(f"- {name}: {reason}" for name, reason in PEERS_NOT_RUN.items()),
        "made": _made(),
    }
    return filled(HERE / "page.md", parts)


def tables() -> str:
    """Return every table, rate and check, and the rule that was committed before the runs."""
    text, links = rule.__doc__ or "", planner.asked()
    parts = {
        "asked": "\n".join(bar.line() for bar in bars()),
        "tables": _tables(),
        "rates": "\n".join(map(_tried, RACERS)),
        "predicted": _table("Racer", links, planner.step_lines()),
        "checks": "\n".join(check_lines()),
        "rule": text[text.index("The rule, which") :],
    }
    return filled(HERE / "tables.md", parts)


def _table(corner: str, others: Sequence[str], lines: Sequence[str]) -> str:
    return "\n".join([f"| {corner} | {' | '.join(others)} |", f"| --- |{' ---: |' * len(others)}", *lines])


def readme() -> str:
    """The README, with what the results say between its marks."""
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(_MARKS[0])
    _, _, after = rest.partition(_MARKS[1])
    return before + _MARKS[0] + _headline() + _MARKS[1] + after


def _headline() -> str:
    """The fastest recipe on each link that was raced, beside DDP and the fastest of the others."""
    lines = [
        "| link | thinwire's fastest recipe | time | DDP | vs. DDP | best other | vs. best other |",
        "| --- | --- | ---: | ---: | ---: | --- | ---: |",
    ]
    seeds = 0
    for task, link, workers in PLACES:
        if workers != SIZES[0] or task != "text":
            continue
        own, peer, ddp = _firsts(task, link, headline=True)
        if own is None or peer is None or ddp is None:
            continue
        seeds = max(seeds, len(own.steps))
        name = f"{peer.racer.name}, {peer.to_target:.0f} s" if peer.racer is not ddp.racer else "DDP"
        cells = [
            _PLACES[link],
            f"`{_recipe(own.racer)}`",
            f"{own.to_target:.0f} s",
            f"{ddp.to_target:.0f} s",
            f"{ddp.to_target / own.to_target:.1f}x",
            name,
            f"{peer.to_target / own.to_target:.2f}x",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    of = "one seed" if seeds == 1 else f"medians of {seeds} seeds"
    told = f"Times are {of}: steps to the target times the seconds of a step. Compare within a row only."
    if whole := whole_runs():
        took = {(link, name): seconds for link, name, seconds in whole}
        told += "".join(f" {words}" for words in _ratios_by_whole_runs(took))
    return "\n".join([*lines, "", told, ""])


def _walls() -> str:
    """How fast the machine was when each link was timed, where that was not the same."""
    found = {
        link: wall_seconds(link, workers) for task, link, workers in PLACES if (task, workers) == ("text", SIZES[0])
    }
    walls = {link: seconds for link, seconds in found.items() if seconds is not None}
    if len({round(seconds, 2) for seconds in walls.values()}) < 2:
        return ""
    return (
        "Links were timed on several days, on which a step without communication took "
        f"{min(walls.values()):.2f} to {max(walls.values()):.2f} s. So compare within a row."
    )


def _ratios_by_whole_runs(took: Mapping[tuple[str, str], float]) -> Iterator[str]:
    """On a link on which a peer was run as a whole too, how much later it was."""
    for link in dict.fromkeys(link for link, _ in took):
        own = [seconds for (where, name), seconds in took.items() if where == link and named(name).whose == "thinwire"]
        for (where, name), seconds in took.items():
            if where == link and own and named(name).whose != "thinwire":
                yield f"By whole runs {name} took {seconds / own[0]:.2f} times as long at {_PLACES[link]}."


def _firsts(task: str, link: str, *, headline: bool = False) -> tuple[Row | None, Row | None, Row | None]:
    """The fastest of thinwire's recipes and of the others on a link, and DDP."""
    found = rows(link, SIZES[0], task)
    own = [row for row in found if row.racer.whose == "thinwire" and (row.racer.headline or not headline)]
    others = [row for row in found if row.racer.whose != "thinwire"]
    return first(own), first(others), first([row for row in found if row.racer is ddp_of(task)])


def _standing() -> str:
    """The fastest on each link, of thinwire's recipes and of the others."""
    lines: list[str] = []
    for task, link, workers in PLACES:
        if workers != SIZES[0]:
            continue
        own, peer, ddp = _firsts(task, link)
        ratio = f"{peer.to_target / own.to_target:.2f}" if own and peer else NOT_RUN
        place = _PLACES[link] + ("" if task == "text" else f", {task}")
        cells = [place, str(workers), _told(own), _told(peer), _seconds(ddp), ratio]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _missed() -> str:
    """The limits that are not met; all of them are in the tables."""
    rows = [bar.line() for bar in bars()]
    missed = [row for row in rows if not row.endswith("| met |")]
    if not missed:
        return f"All {len(rows)} limits that were set before the runs are met."
    lines = [
        f"Of {len(rows)} limits that were set before the runs, {len(rows) - len(missed)} are met. These are not:",
        "",
        "| What | Asked | Measured | |",
        "|---|---:|---:|---|",
    ]
    return "\n".join([*lines, *missed])


def _planned() -> str:
    """What a plan would have said."""
    found = planner.lines()
    if not found:
        return f"{NOT_RUN.capitalize()}."
    near, count = planner.near()
    head = "step", "amid messages", "recommended", "predicted", "measured", "to the target", *_FASTEST
    steps = f"{near} of {count} predictions are within {100 * planner.NEAR:.0f} % of the measured seconds of a step."
    lines = [f"| Link | {' | '.join(head)} |", "|---|---:|---:|---|---:|---:|---:|---|---:|", *found]
    return "\n".join([*lines, "", steps])


def _title_of(task: str, link: str, workers: int) -> str:
    return f"{_PLACES[link]}, {workers} workers" + ("" if task == "text" else f", {task}")


def _seconds(row: Row | None) -> str:
    return NOT_RUN if row is None else f"{row.to_target:.0f}"


def _told(row: Row | None) -> str:
    return NOT_RUN if row is None else f"{row.racer.name}, {row.to_target:.0f} s"


def _tables() -> str:
    lines: list[str] = []
    absent: list[str] = []
    for task, link, workers in PLACES:
        title = _title_of(task, link, workers)
        if result(f"times/{link}-{workers}-{LOCALS[task].name}") is None:
            absent.append(title)
            continue
        if workers != SIZES[0]:
            lines += [f"## {title}", "", "What a step costs:", "", table(link, workers, STEP, task=task), ""]
            continue
        lines += [f"## {title}", "", table(link, workers, SPEED, task=task)]
        lines += ["What a step costs, and the loss at equal cost:", ""]
        lines += [table(link, workers, COST, task=task).split("\n\n")[0], ""]
    return "\n".join([*lines, f"Not run: {'; '.join(absent)}." if absent else ""])


def _pictures() -> str:
    found = sorted(path.name for path in (PAGE.parent / "_static").glob("race-*.svg"))
    return "\n\n".join(f"![{_title(name)}](_static/{name})" for name in found) or "None yet: too little has been run."


def _later() -> str:
    lost = [f"- {_title_of(*place)}: {', '.join(names)}" for place in PLACES if (names := _later_than_ddp(*place))]
    return "\n".join(lost) or "- none of those that were run"


def _title(name: str) -> str:
    if "speed-up" in name:
        return "How much sooner than DDP, by the link's speed"
    return f"Held-out loss by seconds and by bytes, {name.removeprefix('race-').removesuffix('.svg')}"


def _later_than_ddp(task: str, link: str, workers: int) -> list[str]:
    found = rows(link, workers, task)
    ddp = next(row for row in found if row.racer is ddp_of(task))
    if ddp.to_target == float("inf"):
        return []
    return [row.racer.name for row in found if row.seconds is not None and row.steps and row.to_target > ddp.to_target]


def _tried(racer: Racer) -> str:
    """What was tried of a racer's rates."""
    best, told, recipe = best_try(racer), list[str](), _recipe(racer)
    if racer.tuned_as is not racer:
        return f"| {racer.name} | `{recipe}` | those of {racer.tuned_as.name} |"
    for each in tries(racer):
        rate = each["rate"] if each["outer"] is None else each["outer"]
        text = f"{rate:g}: {final_of_try(each):.3f}"
        told.append(f"**{text}{_edge(racer, rate)}**" if each is best else text)
    return f"| {racer.name} | `{recipe}` | {', '.join(told) or NOT_RUN} |"


def _recipe(racer: Racer) -> str:
    """As it is written, with the chosen outer rate."""
    best = best_try(racer) if racer.outer else None
    rate = f"{best['outer'] if best else OUTER_RATES[0]:g}" if racer.outer else ""
    recipe, shorter = (racer.recipe.replace(each, "").replace("{outer}", rate) for each in ("", f", outer={OUTER}"))
    return shorter if racer.whose == "thinwire" and parse(shorter) == parse(recipe) else recipe


def _edge(racer: Racer, rate: float) -> str:
    tried = OUTER_RATES if racer.outer else racer.work.rates
    return "*" if rate in (min(tried), max(tried)) else ""


def _made() -> str:
    made = [each["made"] for each in RESULTS.all().values() if "made" in each]  # the planner's answers are no runs
    machines = sorted({f"{each['cores']} cores, torch {each['torch']}, Python {each['python']}" for each in made})
    days = sorted(each["when"] for each in made)
    return f"Results of {days[0][:10]} to {days[-1][:10]}: {'; '.join(machines)}." if made else "No results yet."
