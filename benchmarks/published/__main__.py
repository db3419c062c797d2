# SPDX-License-Identifier: Apache-2.0
"""Predict what others measured on real clusters, and write the results, their picture and the page about them.

python -m benchmarks.published [SOURCE ...] [--causes] [--page]

Without names all sources are predicted, in a minute and a half on one core. `--causes` predicts the cells outside their
bounds again with one mechanism changed; its results are kept until a prediction changes. `--page` only writes the page
from committed results.
"""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.published import page
from benchmarks.published.results import BOUNDS, RESULTS, SOURCES, failing, load, predictions, wrong_orders
from thinwire.planning.plan.published import Source, load_source, set_number


@dataclass(frozen=True)
class Cause:
    """What the cells outside their bounds may miss.

    Attributes:
        name: in words.
        cells: part of the names of the cells that it may explain.
        numbers: changes of the source's file, by their path.
        cell: changes of the cells.
    """

    name: str
    cells: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict[str, Any])
    cell: Mapping[str, Any] = field(default_factory=dict[str, Any])


CAUSES = {
    source: [Cause(**each) for each in causes]
    for source, causes in tomllib.loads(Path(__file__).with_name("causes.toml").read_text(encoding="utf-8")).items()
}


def main() -> int:
    """Predict sources, or write the page."""
    parser = argparse.ArgumentParser(prog="benchmarks.published", description=__doc__)
    parser.add_argument("sources", nargs="*", choices=[[], *SOURCES], default=[])
    parser.add_argument("--causes", action="store_true")
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    for name in [] if args.page else args.sources or SOURCES:
        source = load_source(Path(__file__).parent / "sources" / name)
        (explain if args.causes else run)(source)
    page.write()
    print(page.verdict())
    return 0


def run(source: Source) -> None:
    """Predict all cells of a source and write them."""
    start = time.process_time()
    fitted = source.calibrated()
    calibrating = {fit["cell"] for fit in source.table.get("fits", [])}
    cells = [
        {"cell": cell.name, "kind": cell.kind, "published": cell.seconds, "predicted": float(f"{seconds:.6g}")}
        | ({"calibrates": True} if cell.name in calibrating else {})
        for cell in fitted.predictable
        for seconds in [fitted.seconds(cell)]
    ]
    seconds = round(time.process_time() - start)
    found = {"fitted": fitted.numbers(), "cells": cells, "processor_seconds": seconds}
    earlier = load(source.name) if (RESULTS / f"{source.name}.json").exists() else {}
    if "causes" in earlier and earlier["cells"] == cells:
        found["causes"] = earlier["causes"]
    _write(source.name, found)


def explain(source: Source) -> None:
    """Predict cells outside their bounds and groups in the wrong order with one mechanism changed at a time."""
    found, fitted, committed = load(source.name), source.calibrated(), predictions(source.name)
    wrong = {group[1:]: pairs for group, pairs in wrong_orders({source.name: committed}).items()}
    outside = [each for each in failing(found, source) if each.kind != "hard"]
    causes: list[dict[str, Any]] = []
    for cause in CAUSES.get(source.name, ()):
        changed = Source(source.name, source.cells, deepcopy(dict(fitted.table)))
        for path, value in cause.numbers.items():
            set_number(changed.table, path, value)
        # Cells of groups in the wrong order too: those that the cause does not concern stay as they were predicted.
        seconds = {
            each.cell: changed.seconds(replace(each.cell, **cause.cell))
            for each in committed
            if cause.cells in each.cell.name
            and each.cell.kind != "hard"
            and (each.cell in outside or each.cell.group in wrong)
        }
        groups = {cell.group for cell in seconds if cell.group in wrong}
        then = [replace(each, seconds=seconds.get(each.cell, each.seconds)) for each in committed]
        still = {group[1:]: pairs for group, pairs in wrong_orders({source.name: then}).items()}
        cells = [cell for cell in outside if cell in seconds]
        errors = [seconds[cell] / cell.seconds - 1 for cell in cells]
        within = sum(abs(error) <= BOUNDS[cell.kind][0] for cell, error in zip(cells, errors, strict=True))
        causes.append(
            {
                "cause": cause.name,
                "cells": [cell.name for cell in cells],
                "errors": [float(f"{error:.3f}") for error in errors],
                "within": within,
                "wrong_pairs": sum(len(wrong[group]) for group in groups),
                "wrong_pairs_then": sum(len(still.get(group, ())) for group in groups),
            }
        )
        print(source.name, causes[-1], flush=True)
    _write(source.name, found | {"causes": causes})


def _write(name: str, found: dict[str, Any]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
