# SPDX-License-Identifier: Apache-2.0
"""`docs/race.md` and `benchmarks/race/results.md`, from the rule and the results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import benchmarks.race as rule
from benchmarks.peers import NOT_RUN as PEERS_NOT_RUN
from benchmarks.race import planner
from benchmarks.race.bars import bars
from benchmarks.race.checks import check_lines, whole_runs
from benchmarks.race.racers import LOCALS, OUTER, OUTER_RATES, PLACES, RACERS, SIZES, Racer, ddp_of, named
from benchmarks.race.results import RESULTS, best_try, final_of_try, result, tries
from benchmarks.race.table import COST, NOT_RUN, SPEED, STEP, Row, rows, table, wall_seconds
from thinwire.methods.strategies.recipe import parse

PAGE = Path(__file__).parents[2] / "docs" / "race.md"
TABLES = Path(__file__).with_name("results.md")
README = PAGE.parents[1] / "README.md"
_MARKS = ("<!-- race -->\n", "<!-- /race -->")
_HEAD = """# The race

How long do workers over a thin link train until the held-out loss is as low as DDP's after 240 steps? thinwire's
recipes, PyTorch's own methods and other libraries train the same model from the same parameters on the same batches: a
GPT of 6.5 M parameters (size `6m`) on text, and on one link a ResNet on pictures.

The speed of the machine varied by up to 20 %, so differences of 10 % between rows decide nothing.
`benchmarks/race/results.md` has all methods with their bytes, memory and rates, and the rule that was committed before
the runs.
"""
_TRIED = """## What was tried and did not help

- Rounds of 12 steps whose mean all wait for (`DiLoCo-12-4bit`): with seed 0 they took 250 steps to the target, where
  rounds of 8 with a delay of 4 (`DiLoCo-8-4bit`) took 190, and they wait.
- At 100 Mbit, rounds of 32 steps in two fragments (`DiLoCo-4bit`, and torchft's): a quarter of the bytes, and 240 and
  230 steps. Where rounds of 8 steps are hidden behind computation, fewer bytes gain little; at 20 Mbit they make steps
  a tenth shorter, and more steps are needed.
- Outer learning rates of 0.7 and 1 with rounds of 8 and 12 steps: no better than 0.4, the least that was tried.
- Error feedback where means overlap costs memory: the workers' last messages, the mean that follows them, and residuals
  are three vectors more.

Mended in the library while the race was prepared: runs take torch's fused AdamW, since its loop over parameters was a
seventh of a step of this model, for all racers alike; and workers are forks of one process that has imported torch.
"""
_PLACES = {
    "20mbit": "20 Mbit",
    "100mbit": "100 Mbit",
    "1gbit": "1 Gbit",
    "none": "no limit",
    "100mbit+50ms": "100 Mbit with 50 ms",
}


def page() -> str:
    """Return the page of the docs: who is first where, the verdicts, pictures and commands."""
    return _joined(_HEAD, _standing(), _missed(), _planned(), _drawn(), _absent(), _commands())


def tables() -> str:
    """Return every table, rate and check, and the rule that was committed before the runs."""
    head = "# The race: tables, rates and the rule\n\n`docs/race.md` has the results in short.\n"
    return _joined(head, _asked(), _tables(), _rates(), _predicted(), _TRIED, _checks(), _rule())


def _joined(*parts: str) -> str:
    return "\n".join(part.rstrip() + "\n" for part in parts)


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
        found = rows(link, workers, task) if workers == SIZES[0] and task == "text" else []
        own = _first([row for row in found if row.racer.whose == "thinwire" and row.racer.headline])
        peer = _first([row for row in found if row.racer.whose != "thinwire"])
        ddp = _first([row for row in found if row.racer is ddp_of(task)])
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


def _standing() -> str:
    """The fastest on each link, of thinwire's recipes and of the others."""
    lines = [
        "## Where it stands",
        "",
        "Seconds to the target: the fastest thinwire recipe, the fastest of the others, and DDP.",
        "",
        "| Link | Workers | Fastest thinwire recipe | Fastest of the others | DDP | The others' over thinwire's |",
        "|---|---:|---|---|---:|---:|",
    ]
    for task, link, workers in PLACES:
        if workers != SIZES[0]:
            continue
        found = rows(link, workers, task)
        own = _first([row for row in found if row.racer.whose == "thinwire"])
        peer = _first([row for row in found if row.racer.whose != "thinwire"])
        ddp = _first([row for row in found if row.racer is ddp_of(task)])
        ratio = f"{peer.to_target / own.to_target:.2f}" if own and peer else NOT_RUN
        place = _PLACES[link] + ("" if task == "text" else f", {task}")
        cells = [place, str(workers), _told(own), _told(peer), _seconds(ddp), ratio]
        lines.append(f"| {' | '.join(cells)} |")
    if walls := _walls():
        lines += ["", walls]
    return "\n".join(lines)


def _asked() -> str:
    lines = [
        "## What was asked",
        "",
        "Medians over the seeds. The fastest thinwire recipe is that of the methods with all seeds.",
        "",
        "| Where | What | Asked | Measured | |",
        "| --- | --- | ---: | ---: | --- |",
    ]
    return "\n".join([*lines, *(bar.line() for bar in bars())])


def _missed() -> str:
    """The limits that are not met; all of them are in the tables."""
    rows = [bar.line() for bar in bars()]
    missed = [row for row in rows if not row.endswith("| met |")]
    if not missed:
        return f"All {len(rows)} limits that were set before the runs are met."
    lines = [
        f"Of {len(rows)} limits that were set before the runs, {len(rows) - len(missed)} are met. These are not:",
        "",
        "| Where | What | Asked | Measured | |",
        "|---|---|---:|---:|---|",
    ]
    return "\n".join([*lines, *missed])


def _planned() -> str:
    """What a plan would have said."""
    lines = [
        "## What the planner says",
        "",
        f"`thinwire doctor --workers {SIZES[0]}` measures each link, and `thinwire plan --doctor` recommends a recipe. "
        "Columns are seconds of a step, alone and while messages pass, then of the recommended recipe:",
        "",
        "| Link | step | amid messages | recommended | predicted | measured | to the target | fastest thinwire "
        "recipe | to the target |",
        "|---|---:|---:|---|---:|---:|---:|---|---:|",
    ]
    found = planner.lines()
    if not found:
        return "\n".join([*lines[:2], f"{NOT_RUN.capitalize()}."])
    near, count = planner.near()
    steps = f"{near} of {count} predictions are within {100 * planner.NEAR:.0f} % of the measured seconds of a step."
    return "\n".join([*lines, *found, "", steps])


def _predicted() -> str:
    """Return predicted and measured times of a step, by racer and link."""
    links = planner.asked()
    return "\n".join(
        [
            "## Predicted and measured seconds of a step",
            "",
            "Of every thinwire racer that is a recipe of the plan:",
            "",
            f"| Racer | {' | '.join(links)} |",
            f"| --- |{' ---: |' * len(links)}",
            *planner.step_lines(),
        ]
    )


def _title_of(task: str, link: str, workers: int) -> str:
    return f"{_PLACES[link]}, {workers} workers" + ("" if task == "text" else f", {task}")


def _first(found: list[Row]) -> Row | None:
    known = [row for row in found if row.to_target < float("inf")]
    return min(known, key=lambda row: row.to_target) if known else None


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


def _drawn() -> str:
    lines = ["## Pictures", ""]
    found = sorted(path.name for path in (PAGE.parent / "_static").glob("race-*.svg"))
    lines += [f"![{_title(name)}](_static/{name})\n" for name in found] or ["None yet: too little has been run."]
    lost = [f"- {_title_of(*place)}: {', '.join(names)}" for place in PLACES if (names := _later_than_ddp(*place))]
    return "\n".join([*lines, "", "Later at the target than DDP:", "", *(lost or ["- none of those that were run"])])


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


def _rates() -> str:
    lines = [
        "## Rates",
        "",
        "Held-out loss after the tries, by the multiple of the task's learning rate, or by the outer rate; the chosen "
        "one is bold, and stands in the recipe; * is at an edge of what was tried.",
        "",
        "| | recipe | tries |",
        "| --- | --- | --- |",
    ]
    for racer in RACERS:
        best, told, recipe = best_try(racer), list[str](), _recipe(racer)
        if racer.tuned_as is not racer:
            lines.append(f"| {racer.name} | `{recipe}` | those of {racer.tuned_as.name} |")
            continue
        for each in tries(racer):
            rate = each["rate"] if each["outer"] is None else each["outer"]
            text = f"{rate:g}: {final_of_try(each):.3f}"
            chosen = best is not None and each is best
            told.append(f"**{text}{_edge(racer, rate)}**" if chosen else text)
        lines.append(f"| {racer.name} | `{recipe}` | {', '.join(told) or NOT_RUN} |")
    return "\n".join(lines)


def _recipe(racer: Racer) -> str:
    """As it is written, with the chosen outer rate."""
    best = best_try(racer) if racer.outer else None
    rate = f"{best['outer'] if best else OUTER_RATES[0]:g}" if racer.outer else ""
    recipe, shorter = (racer.recipe.replace(each, "").replace("{outer}", rate) for each in ("", f", outer={OUTER}"))
    return shorter if racer.whose == "thinwire" and parse(shorter) == parse(recipe) else recipe


def _edge(racer: Racer, rate: float) -> str:
    tried = OUTER_RATES if racer.outer else racer.work.rates
    return "*" if rate in (min(tried), max(tried)) else ""


def _checks() -> str:
    lines = [
        "## Products and whole runs",
        "",
        "Seconds to the target as steps times seconds, and as a whole run of as many steps on the link took them, with "
        "one evaluation at its end; the loss there, and that of the curve:",
        "",
        "| Link | method | product | whole run | its loss | the curve's |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    return "\n".join([*lines, *check_lines()])


def _absent() -> str:
    lines = ["## What was not run", ""]
    lines += [f"- {name}: {reason}" for name, reason in PEERS_NOT_RUN.items()]
    return "\n".join(lines)


def _rule() -> str:
    text = rule.__doc__ or ""
    return "## The rule\n\n" + text[text.index("The rule, which") :]


def _commands() -> str:
    made = [each["made"] for each in RESULTS.all().values() if "made" in each]  # the planner's answers are no runs
    machines = sorted({f"{each['cores']} cores, torch {each['torch']}, Python {each['python']}" for each in made})
    days = sorted(each["when"] for each in made)
    when = f"Results of {days[0][:10]} to {days[-1][:10]}: {'; '.join(machines)}." if made else "No results yet."
    return f"""## Machine and commands

{when} Workers are processes with one thread each, in network namespaces of one virtual machine, behind emulated links.

`make race` runs everything that is missing and resumes an interrupted race, and `python -m benchmarks.race page` writes
this page. `python -m benchmarks.race next` makes one result, `left` prints the time that is left, and `table` all
columns. `--only '100mbit/4/ddp*'` selects links, numbers of workers and methods.
"""
