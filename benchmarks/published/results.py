# SPDX-License-Identifier: Apache-2.0
"""Committed predictions and the rules by which they are judged; `README.md` explains both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.planning.plan.published import Cell, Predicted, Source, load_source

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "published"
SOURCES = sorted(path.stem for path in (HERE / "sources").glob("*.toml"))
BOUNDS = {"dense": (0.10, 0.90), "methods": (0.15, 0.80), "hard": (0.15, 0.0)}
"""Of each class the largest error, and the share of cells that must keep it."""


@dataclass(frozen=True)
class Class:
    """How the cells of one class are predicted."""

    name: str
    cells: int
    within: int

    @property
    def holds(self) -> bool:
        """Whether enough cells are within the bound."""
        return self.within >= BOUNDS[self.name][1] * self.cells


def load(name: str) -> dict[str, Any]:
    """Read the committed results of a source."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def predictions(name: str) -> list[Predicted]:
    """Return a source's predictions, as committed."""
    cells = {cell.name: cell for cell in load_source(HERE / "sources" / name).cells}
    return [
        Predicted(cells[each["cell"]], each["predicted"], each.get("calibrates", False)) for each in load(name)["cells"]
    ]


def all_predictions() -> dict[str, list[Predicted]]:
    """Return the predictions of all sources."""
    return {name: predictions(name) for name in SOURCES}


def order_errors(found: list[Predicted], apart: float = 0.05) -> list[tuple[Predicted, Predicted]]:
    """Return the pairs of methods of one group that were measured in another order than they are predicted.

    Args:
        found: predictions.
        apart: published times that differ by less are not compared.
    """
    return [
        (fast, slow)
        for fast in found
        for slow in found
        if fast.cell.group == slow.cell.group
        and slow.cell.seconds > fast.cell.seconds * (1 + apart)
        and slow.seconds <= fast.seconds
    ]


def is_within(each: Predicted) -> bool:
    """Whether a prediction is within the bound of its class."""
    return abs(each.error) <= BOUNDS[each.cell.kind][0]


def classes(found: Mapping[str, list[Predicted]]) -> list[Class]:
    """Count the cells of each class that nothing was fitted to."""
    counted = [each for cells in found.values() for each in cells if not each.calibrates]
    return [
        Class(kind, len(of_kind), sum(map(is_within, of_kind)))
        for kind in BOUNDS
        for of_kind in [[each for each in counted if each.cell.kind == kind]]
    ]


def wrong_orders(found: Mapping[str, list[Predicted]]) -> dict[tuple[str, str, int, str], list[str]]:
    """Return the groups whose methods are predicted in another order, and which pairs."""
    wrong: dict[tuple[str, str, int, str], list[str]] = {}
    for name, cells in found.items():
        for fast, slow in order_errors([each for each in cells if each.cell.kind != "hard"]):
            wrong.setdefault((name, *fast.cell.group), []).append(f"{fast.cell.method} < {slow.cell.method}")
    return wrong


def num_groups(found: Mapping[str, list[Predicted]]) -> int:
    """Count the groups with several methods."""
    groups = [(name, each.cell.group) for name, cells in found.items() for each in cells if each.cell.kind != "hard"]
    return sum(groups.count(group) > 1 for group in set(groups))


def failing(found: Mapping[str, Any], source: Source) -> list[Cell]:
    """Return the cells of a source outside the bounds of their classes."""
    return [
        source.cell(each["cell"])
        for each in found["cells"]
        if not is_within(Predicted(source.cell(each["cell"]), each["predicted"], False))
    ]
