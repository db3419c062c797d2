# SPDX-License-Identifier: Apache-2.0
"""What the tests of runs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import pytest

from thinwire.lab.emulate import Workers
from thinwire.lab.runs import launcher


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[int, ...]]:
    """The processes of the workers that were launched last, by rank; as forks they share one process's environment."""
    started = list[Workers]()

    class Recorded(Workers):
        def __enter__(self) -> Self:
            started.append(self)
            return super().__enter__()

    monkeypatch.setattr(launcher, "Workers", Recorded)
    return lambda: started[-1].pids
