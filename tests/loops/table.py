# SPDX-License-Identifier: Apache-2.0
"""The table of loops, and what is to be known of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.loops.kits import METHODS, Kit

ALL = "*"
GRADIENTS, *LOCAL_METHODS = METHODS
LOCAL = "local"
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Case:
    """A loop.

    Attributes:
        run: the loop; returns what two runs are compared by.
        refused: by recipe, or for all recipes that have no entry of their own (`ALL`), or for those that train locally
            (`LOCAL`), the words of the error that ends it on all ranks; empty where it must work.
        dtypes: default dtypes under which it can run without thinwire.
        tolerance: a relative difference that is no fault, where the loop needs one of its own.
        slow: longer than ten seconds.
    """

    run: Callable[[Kit], Any]
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    dtypes: tuple[torch.dtype, ...] = DTYPES
    tolerance: float | None = None
    warns: str = ""
    slow: bool = False

    def words(self, recipe: str) -> str:
        """What the error says under a recipe; empty where the loop must work."""
        kind = LOCAL if recipe in LOCAL_METHODS else GRADIENTS
        return self.refused.get(recipe, self.refused.get(kind, self.refused.get(ALL, "")))


LOOPS: dict[str, Case] = {}


def loop(**facts: Any) -> Callable[[Callable[[Kit], Any]], Callable[[Kit], Any]]:
    """Put a loop into the table."""

    def put(run: Callable[[Kit], Any]) -> Callable[[Kit], Any]:
        LOOPS[run.__name__] = Case(run, **facts)
        return run

    return put
