# SPDX-License-Identifier: Apache-2.0
"""Ordinary loops under four methods and three default dtypes: equal to the same loop by hand, or refused in words."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.loops import plain, theirs  # noqa: F401  (they fill the table)
from tests.loops.kits import METHODS, attached, by_hand, default_dtype
from tests.loops.table import LOOPS, Case
from thinwire.errors import ThinwireError

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float64: 1e-6}


def cases() -> list[Any]:
    """Each loop under each method and dtype.

    In the fast tests dtypes take turns, so that each loop has met all. A sample of the tests has each loop under
    AllReduce() and, in turn, under one of the other methods.
    """

    def marks(number: int, turn: int, dtype: torch.dtype, case: Case) -> Any:
        if case.slow or dtype != case.dtypes[(number + turn) % len(case.dtypes)]:
            return pytest.mark.slow
        return pytest.mark.every_case if turn in (0, 1 + number % 3) else ()

    return [
        pytest.param(
            name,
            recipe,
            dtype,
            id=f"{name}-{recipe.partition('(')[0]}-{str(dtype)[6:]}",
            marks=marks(number, turn, dtype, case),
        )
        for number, (name, case) in enumerate(LOOPS.items())
        for turn, recipe in enumerate(METHODS)
        for dtype in case.dtypes
    ]


def compare(real: Any, expected: Any, tolerance: float) -> None:
    for rank, (found, wanted) in enumerate(zip(real, expected, strict=True)):
        assert len(found) == len(wanted)
        scale = max(float(x.abs().max()) for x in wanted)
        for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
            assert isinstance(x, Tensor) and x.dtype == y.dtype
            off = float((x.double() - y.double()).abs().max()) / scale
            assert off <= tolerance, f"rank {rank}, tensor {i}: {off:.1%} off"


@pytest.mark.parametrize(("name", "recipe", "dtype"), cases())
def test_a_loop_is_right_or_refused(name: str, recipe: str, dtype: torch.dtype) -> None:
    case: Case = LOOPS[name]
    words = case.words(recipe)
    with default_dtype(dtype), warnings.catch_warnings():
        warnings.simplefilter("error")
        if words:
            with pytest.raises(ThinwireError, match=words):
                attached(case.run, recipe)
            return
        compare(attached(case.run, recipe), by_hand(case.run, recipe), case.tolerance or TOLERANCE[dtype])
