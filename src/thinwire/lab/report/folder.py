# SPDX-License-Identifier: Apache-2.0
"""Run folders and comparison folders, read into runs."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.lab.report.files import Facts, json_lines, json_object, number, text
from thinwire.lab.report.labels import labels
from thinwire.lab.report.rounds import of_same_seeds
from thinwire.lab.report.runs import Collection, Evaluation, Run, Span, Step, Totals

_FIX = "Give the folder that `thinwire train --out` or `thinwire compare --out` wrote"
SCHEMA = 1
"""The version of the files; `config.json` and `comparison.json` have it, and folders without one have version 1."""
# Kinds of intervals as timeline.jsonl names them, and as they are shown.
_KINDS = ("compute", "communication", "wait")


def read(folder: Path) -> Collection:
    """Read a run folder, or a comparison folder and the run folders in it.

    Raises:
        ConfigError: there is no such folder, it holds no run, or one of its JSON files is broken.
    """
    comparison = _comparison(folder)
    if comparison is None:
        run = read_run(folder)
        return Collection(folder, _title([run]), (run,))
    runs, notes = _read_runs(folder, comparison)
    title = text(comparison, "title") or _title(runs)
    return Collection(folder, title, _labelled(runs), tuple(notes))


def rounds_of(folder: Path) -> dict[str, list[Path]] | None:
    """Return the run folders of each strategy of a comparison, in order; None if it is no comparison's folder.

    Raises:
        ConfigError: there is no such folder, it has an unknown schema, or its comparison.json is broken.
    """
    comparison = _comparison(folder)
    if comparison is None:
        return None
    runs = comparison.get("runs")
    # Earlier comparisons list their runs only.
    listed = {str(name): [name] for name in runs} if isinstance(runs, list) else {}
    return _inside(folder, comparison.get("rounds") or listed)


def read_spans(folder: Path) -> tuple[Span, ...]:
    """Return the timeline of a run folder; empty where none was recorded.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder. {_FIX}")
    return _spans(json_lines(folder / "timeline.jsonl")[0])


def _read_runs(folder: Path, comparison: Facts) -> tuple[list[Run], list[str]]:
    names = comparison.get("runs")
    if not isinstance(names, list) or not names:
        raise ConfigError(
            f"{folder / 'comparison.json'}: `runs` must list at least one folder. Run the comparison again"
        )
    every = _inside(folder, comparison.get("rounds")).values()
    runs: list[Run] = []
    notes: list[str] = []
    for subfolder in map(str, names):
        # The second condition keeps a comparison.json from reading outside its folder.
        if not _is_run(folder / subfolder) or Path(subfolder).name != subfolder:
            notes.append(f"{subfolder} is listed in comparison.json but holds no run, so it is left out.")
            continue
        rounds = next((each for each in every if folder / subfolder in each), [])
        found = [json_object(each / "summary.json") for each in rounds]
        summaries = tuple(facts for facts in found if facts is not None)
        runs.append(dataclasses.replace(read_run(folder / subfolder), rounds=summaries))
    same = of_same_seeds([run.rounds for run in runs])
    runs = [dataclasses.replace(run, rounds=rounds) for run, rounds in zip(runs, same, strict=True)]
    seeds = [seed for run in runs if isinstance(seed := run.summary.get("seed"), int)]
    if len(set(seeds)) > 1:
        notes.append(
            f"The runs have different seeds ({', '.join(map(str, seeds))}), so that losses differ by chance too."
        )
    if not runs:
        raise ConfigError(
            f"{folder}: none of the runs in comparison.json is there ({', '.join(map(str, names))}). {_FIX}"
        )
    return runs, notes


def _comparison(folder: Path) -> Facts | None:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder. {_FIX}")
    comparison = json_object(folder / "comparison.json")
    if comparison is not None:
        _check_schema(folder / "comparison.json", comparison)
    return comparison


def _inside(folder: Path, rounds: object) -> dict[str, list[Path]]:
    """Return the run folders of each strategy; a comparison.json must not name folders outside its own."""
    return {
        str(strategy): [
            folder / name for name in map(str, names) if Path(name).name == name and (folder / name).is_dir()
        ]
        for strategy, names in (rounds.items() if isinstance(rounds, dict) else ())
        if isinstance(names, list)
    }


def _check_schema(where: Path, facts: Facts) -> None:
    schema = facts.get("schema", SCHEMA)
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        raise ConfigError(f"{where} has schema {schema!r}: must be 1 to {SCHEMA}. Restore the file, or train again")
    if schema > SCHEMA:
        raise ConfigError(f"{where} has schema {schema}: this thinwire reads schemas up to {SCHEMA}. Upgrade thinwire")


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("summary.json", "config.json", "metrics.jsonl"))


def read_run(folder: Path) -> Run:
    """Read the folder of one run.

    Raises:
        ConfigError: it holds no run, a newer thinwire has written it, or one of its JSON files is broken.
    """
    if not _is_run(folder):
        raise ConfigError(f"{folder}: holds no config.json, metrics.jsonl or summary.json. {_FIX}")
    config = json_object(folder / "config.json")
    _check_schema(folder, config or {})
    summary = json_object(folder / "summary.json")
    metrics, metric_notes = json_lines(folder / "metrics.jsonl")
    timeline, timeline_notes = json_lines(folder / "timeline.jsonl")
    steps = tuple(filter(None, map(step_of, metrics or ())))
    evaluations = tuple(filter(None, map(_evaluation, metrics or ())))
    notes = [*metric_notes, *timeline_notes]
    if config is None and metrics is None and not text(summary or {}, "strategy"):
        raise ConfigError(
            f"{folder}: its summary.json is that of no training run; `thinwire sweep` writes a report.html of its "
            f"own. {_FIX}"
        )
    if config is None:
        notes.append("config.json is missing, so how the run was set up is not known.")
    if metrics is None:
        notes.append("metrics.jsonl is missing, so there are no curves.")
    if summary is None:
        notes.append("The run ended before its summary.json was written; its figures come from metrics.jsonl.")
        summary = _summarised(config or {}, steps, evaluations)
    if text(summary, "diverged"):
        notes.append(f"The run diverged, and ended: {text(summary, 'diverged')}.")
    run = Run(
        folder=folder,
        label="",
        config=config or {},
        summary=summary,
        steps=steps,
        evaluations=evaluations,
        spans=_spans(timeline),
        notes=tuple(notes),
    )
    return _labelled([run])[0]


def _labelled(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Return the runs with labels that tell them apart."""
    names = labels([run.strategy for run in runs])
    return tuple(dataclasses.replace(run, label=label) for run, label in zip(runs, names, strict=True))


def _title(runs: Sequence[Run]) -> str:
    link = text(runs[0].summary, "link")
    task = text(runs[0].summary, "task") or text(runs[0].config, "task") or "an unnamed task"
    many = f"{len(runs)} strategies" if len(runs) > 1 else runs[0].label
    return f"{many} on {task}" + (f" over {link}" if link else "")


def step_of(line: Facts) -> Step | None:
    """Return the training step in a line of metrics.jsonl; None where the line is something else."""
    step = number(line, "step")
    if step is None or "loss" not in line:
        return None
    names = ("seconds", "loss", "payload_bytes", "step_seconds", "exposed_seconds")
    entry = line.get("metrics")
    facts: Facts = entry if isinstance(entry, dict) else {}
    metrics = {str(name): value for name in facts if (value := number(facts, str(name))) is not None}
    return Step(int(step), *(_or_nan(line, name) for name in names), metrics=metrics)


def _evaluation(line: Facts) -> Evaluation | None:
    step = number(line, "step")
    if step is None or not ("eval_loss" in line or "eval_metric" in line):
        return None
    names = ("seconds", "payload_bytes", "eval_loss", "eval_metric")
    return Evaluation(int(step), *(_or_nan(line, name) for name in names))


def _spans(lines: Iterable[Facts] | None) -> tuple[Span, ...]:
    return tuple(filter(None, map(_span, lines or ())))


def _span(line: Facts) -> Span | None:
    rank, start, end = number(line, "rank"), number(line, "start"), number(line, "end")
    kind = text(line, "kind")
    if rank is None or start is None or end is None or end < start or kind not in _KINDS:
        return None
    return Span(int(rank), kind, text(line, "name", kind), start, end, int(number(line, "step") or 0))


def _or_nan(line: Facts, key: str) -> float:
    value = number(line, key)
    return math.nan if value is None else value


def _summarised(config: Facts, steps: Sequence[Step], evaluations: Sequence[Evaluation]) -> dict[str, object]:
    """Return a summary from the metrics alone, for a run that wrote none."""
    facts: dict[str, object] = {key: config.get(key) for key in ("strategy", "task", "workers", "link")}
    if steps:
        facts |= {"steps": steps[-1].step, "seconds": steps[-1].seconds, **Totals(list(steps)).summary()}
    if evaluations:
        facts |= {"eval_loss": evaluations[-1].loss, "eval_metric": evaluations[-1].metric}
    return {key: None if isinstance(fact, float) and math.isnan(fact) else fact for key, fact in facts.items()}
