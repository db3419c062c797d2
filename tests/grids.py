# SPDX-License-Identifier: Apache-2.0
"""Which cases of a grid the fast tests run; `make test` runs those, and `make test-all` runs the whole grid."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest


def fast_where(fast: Callable[[Any], bool], values: Iterable[Any]) -> list[Any]:
    """All values for `pytest.mark.parametrize`, those for which `fast` is false marked as slow.

    Tuples are the values of several parameters.
    """
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=() if fast(value) else pytest.mark.slow)
        for value in values
    ]


def one_of_each(values: Iterable[Any], kind: Callable[[Any], Hashable] = type) -> list[Any]:
    """All values for `pytest.mark.parametrize`; the first of each kind is fast, and the others are slow."""
    seen = set[Hashable]()

    def is_first(value: Any) -> bool:
        new = kind(value) not in seen
        seen.add(kind(value))
        return new

    return fast_where(is_first, values)
