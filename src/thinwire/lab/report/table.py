# SPDX-License-Identifier: Apache-2.0
"""The table of summaries: as rows of text, as Markdown, and for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thinwire.lab.report.files import Facts, diverged, number, text
from thinwire.lab.report.labels import labels
from thinwire.lab.report.rounds import deviation
from thinwire.planning import units

if TYPE_CHECKING:
    from rich.table import Table

MISSING = "-"
_WIRE = "wire_bytes_per_worker_per_step"
_HIGHER_IS_BETTER = ("accuracy", "bleu", "f1", "score", "auc", "precision", "recall", "matthews")
_LOWER_IS_BETTER = ("loss", "perplexity", "error", "bits", "entropy", "nats")


# Relative differences below these are noise: of clocks on a shared machine, of headers and acknowledgements, and of the
# order in which sums are rounded. Payload is counted exactly.
_NOISE = {
    "seconds_per_step": 0.05,
    "seconds_to_target": 0.05,
    "exposed_seconds_per_step": 0.05,
    "payload_bytes_per_worker_per_step": 0.005,
    _WIRE: 0.02,
    "train_loss": 0.01,
    "eval_loss": 0.01,
    "eval_metric": 0.01,
}


@dataclass(frozen=True)
class Column:
    """One column of the table.

    Args:
        key: the summary's key.
        heading: the column's heading.
        unit: writes the number with its unit.
        better: -1 where less is better, 1 where more is, 0 where that is not known.
        words: what more and less of it are called in comparison with the baseline; None where it is not compared.
    """

    key: str
    heading: str
    unit: Callable[[float], str]
    better: int
    words: tuple[str, str] | None = None


@dataclass(frozen=True)
class Cell:
    """One figure of one run: its text, whether it is the best of its column, and its ratio to the baseline's."""

    text: str
    best: bool = False
    against: str = ""


def columns(summaries: Sequence[Facts]) -> list[Column]:
    """The columns for these summaries: time to a target if one was set, bytes on the wire if they were counted."""
    name = metric_name(summaries)
    timed = ("slower", "faster")
    sized = ("more", "less")
    return [
        Column("seconds_per_step", "time/step", units.seconds, -1, timed),
        *_target_columns(summaries),
        Column("payload_bytes_per_worker_per_step", "payload/step", units.nbytes, -1, sized),
        *([Column(_WIRE, "wire/step", units.nbytes, -1, sized)] if _counted(summaries, _WIRE) else []),
        Column("compute_seconds_per_step", "compute", units.seconds, 0),
        Column("exposed_seconds_per_step", "exposed", units.seconds, -1),
        Column("train_loss", "train loss", units.score, -1),
        Column("eval_loss", "held-out loss", units.score, -1),
        *([] if name is None else [Column("eval_metric", name, units.score, direction(name))]),
    ]


def rows(summaries: Sequence[Facts]) -> list[dict[str, str]]:
    """Return one row per summary: heading to text with its unit, `-` for what was not measured.

    Bytes are per worker and step. Where one summary's strategy is `ddp`, the column `vs ddp` has each run's speed in
    steps relative to it.

    Example:
        >>> ddp = {"strategy": "ddp", "seconds_per_step": 0.4}
        >>> local = {"strategy": "LocalSGD(period=8)", "seconds_per_step": 0.1}
        >>> [(row["strategy"], row["time/step"], row["vs ddp"]) for row in rows([ddp, local])]
        [('ddp', '400 ms', '1.00×'), ('LocalSGD', '100 ms', '4.0×')]
    """
    shown, against = columns(summaries), speeds(summaries)
    names = labels([text(facts, "strategy", MISSING) for facts in summaries])
    result: list[dict[str, str]] = []
    for index, (label, summary) in enumerate(zip(names, summaries, strict=True)):
        row = {"strategy": label}
        for column in shown:
            row[column.heading] = written(summary, column)
            if column.key == "seconds_per_step" and against is not None:
                row["vs ddp"] = against[index]
        result.append(row)
    return result


def cells(summaries: Sequence[Facts], base: int | None) -> list[list[Cell]]:
    """One row per summary and one cell per column, with the best marked, compared with the run at index `base`."""
    return [[_cell(summaries, index, column, base) for column in columns(summaries)] for index in range(len(summaries))]


def baseline(summaries: Sequence[Facts]) -> int | None:
    """Return the run others are compared with: `ddp` where present, else the first; None when there is only one."""
    return None if len(summaries) < 2 else (_ddp(summaries) or 0)


def best(summaries: Sequence[Facts], key: str, better: int) -> int | None:
    """The index of the run with the best figure under a key; None unless at least two runs have different ones."""
    known = [(index, value) for index, facts in enumerate(summaries) if (value := number(facts, key)) is not None]
    if not better or len({value for _, value in known}) < 2:
        return None
    return max(known, key=lambda pair: better * pair[1])[0]


def differs(key: str, one: float, other: float) -> bool:
    """Return True if two figures under a key differ by more than noise."""
    return abs(one - other) > _NOISE.get(key, 0.0) * max(abs(one), abs(other))


def winners(summaries: Sequence[Facts], key: str, better: int) -> list[int]:
    """Return the run with the best figure under a key, then those that differ from it by noise alone; none if all do.

    Example:
        >>> pace = [{"seconds_per_step": seconds} for seconds in (0.4, 0.101, 0.1)]
        >>> winners(pace, "seconds_per_step", -1), winners(pace[1:], "seconds_per_step", -1)
        ([2, 1], [])
    """
    first = best(summaries, key, better)
    if first is None:
        return []
    known = {index: value for index, facts in enumerate(summaries) if (value := number(facts, key)) is not None}
    tied = [index for index, value in known.items() if index != first and not differs(key, value, known[first])]
    return [] if len(tied) + 1 == len(known) else [first, *tied]


def speeds(summaries: Sequence[Facts]) -> list[str] | None:
    """Return the speed of each run's steps relative to the run named `ddp`; None where there is no such run."""
    ddp = _ddp(summaries)
    if ddp is None:
        return None
    reference = number(summaries[ddp], "seconds_per_step")
    own = [number(facts, "seconds_per_step") for facts in summaries]
    return [units.times(reference / value) if reference and value else MISSING for value in own]


def written(summary: Facts, column: Column) -> str:
    """Return one figure with its unit, and its standard deviation over rounds.

    `-` stands for what was not measured, `not reached` for a target, `not finite` for NaN and infinity. The losses of a
    run that ended since it diverged are `diverged`.
    """
    if column.key in ("train_loss", "eval_loss") and text(summary, "diverged"):
        return "diverged"
    if diverged(summary, column.key):
        return "not finite"
    value, spread = number(summary, column.key), deviation(summary, column.key)
    if value is not None:
        return column.unit(value) if spread is None else f"{column.unit(value)} ± {units.digits(spread)}"
    unreached = column.key == "seconds_to_target" and number(summary, "target_loss") is not None
    return "not reached" if unreached else MISSING


def metric_name(summaries: Sequence[Facts]) -> str | None:
    """Return the name of the held-out metric; None where no run has one besides its loss."""
    if not _counted(summaries, "eval_metric"):
        return None
    names = {text(facts, "metric") for facts in summaries} - {""}
    return names.pop() if len(names) == 1 else "metric"


def direction(metric: str) -> int:
    """1 where a higher value of the metric with this name is better, -1 where a lower one is, 0 if not known."""
    plain = metric.lower()
    if any(word in plain for word in _HIGHER_IS_BETTER):
        return 1
    return -1 if any(word in plain for word in _LOWER_IS_BETTER) else 0


def markdown(summaries: Sequence[Facts]) -> str:
    """Return the rows as a Markdown table with the best of each column in bold; ends with a newline.

    Example:
        >>> summaries = [{"strategy": "ddp", "train_loss": 2.5}, {"strategy": "PushSum()", "train_loss": 2.25}]
        >>> for line in markdown(summaries).splitlines():
        ...     first, *_, loss, _ = line.split(" | ")
        ...     print(first, loss)
        | strategy train loss
        | --- ---:
        | ddp 2.500
        | PushSum **2.250**
    """
    table, marked = rows(summaries), _marked(summaries)
    if not table:
        return ""
    headings = list(table[0])
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1)]
    for index, row in enumerate(table):
        bold = [(f"**{row[h]}**" if (index, h) in marked else row[h]) for h in headings]
        lines.append([value.replace("|", "\\|") for value in bold])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rich_table(summaries: Sequence[Facts], title: str | None = None) -> Table:
    """Return the rows as a table for the terminal, with the best of each column in bold green."""
    from rich.table import Table
    from rich.text import Text

    table, marked = Table(title=title, title_justify="left"), _marked(summaries)
    content = rows(summaries)
    for heading in content[0] if content else ():
        left = heading == "strategy"
        table.add_column(heading, justify="left" if left else "right", overflow="fold" if left else "ellipsis")
    for index, row in enumerate(content):
        table.add_row(*(Text(v, style="bold green" if (index, h) in marked else "") for h, v in row.items()))
    return table


def _counted(summaries: Sequence[Facts], key: str) -> bool:
    return any(number(facts, key) is not None for facts in summaries)


def _target_columns(summaries: Sequence[Facts]) -> list[Column]:
    targets = {target for facts in summaries if (target := number(facts, "target_loss")) is not None}
    if not targets and not _counted(summaries, "seconds_to_target"):
        return []
    heading = f"time to loss {units.mark(targets.pop())}" if len(targets) == 1 else "time to target"
    return [Column("seconds_to_target", heading, units.seconds, -1, ("later", "sooner"))]


def _cell(summaries: Sequence[Facts], index: int, column: Column, base: int | None) -> Cell:
    summary = summaries[index]
    return Cell(
        text=written(summary, column),
        best=index in _bests(summaries, column),
        against="" if base is None else _against(summary, summaries[base], column, index == base),
    )


def _against(summary: Facts, base: Facts, column: Column, itself: bool) -> str:
    own, other = number(summary, column.key), number(base, column.key)
    if column.words is None or itself or not own or not other:
        return ""
    ratio = own / other
    # Otherwise it would read "1.00x more".
    if 0.995 < ratio < 1.005:
        return "the same"
    more, less = column.words
    return f"{units.times(ratio)} {more}" if ratio > 1 else f"{units.times(1 / ratio)} {less}"


def _marked(summaries: Sequence[Facts]) -> set[tuple[int, str]]:
    return {(index, column.heading) for column in columns(summaries) for index in _bests(summaries, column)}


def _bests(summaries: Sequence[Facts], column: Column) -> set[int]:
    """Return the indices of the best of a column, and of those that differ from it by noise alone."""
    ahead = winners(summaries, column.key, column.better)
    return {index for index in ahead if written(summaries[index], column) != MISSING}


def _ddp(summaries: Sequence[Facts]) -> int | None:
    names = [text(facts, "strategy").strip().lower() for facts in summaries]
    return names.index("ddp") if "ddp" in names else None
