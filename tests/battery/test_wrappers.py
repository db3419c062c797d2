# SPDX-License-Identifier: Apache-2.0
"""Every strategy is the base of every wrapper: it trains and resumes, or is refused before step 0."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from tests.battery.cases import FAULTS, STRATEGIES, WRAPPERS, is_first
from tests.battery.runs import Case, Setting, begin, smallest, with_
from tests.battery.test_strategies import saved_and_resumed
from thinwire import AllReduce, Comm, ConfigError, LocalSGD, PushSum


def wrapped(wrapper: type, each: Case) -> Setting | str:
    """A setting with the wrapper around a case's strategy, or the words with which it is refused."""
    try:
        strategy = WRAPPERS[wrapper](each.strategy)
    except ConfigError as error:
        return str(error)
    setting = with_(replace(each, strategy=strategy), size=smallest(each), dtype=torch.float32)

    def body(comm: Comm) -> str:
        try:
            begin(comm, setting).detach()
        except ConfigError as error:
            return str(error)
        return ""

    refusals = thinwire.run_threads(setting.size, body, timeout=20)
    assert all(refusals) or not any(refusals), "all ranks refuse, or none"
    return refusals[0] or setting


def pairs() -> list[Any]:
    """All wrappers around gradients, averages and messages, and around all where there is time; but for known faults.

    Which bases a wrapper refuses is asked in tests/methods/strategies/test_compositions.py.
    """
    found: list[Any] = []
    for wrapper, each in product(WRAPPERS, STRATEGIES):
        fault = FAULTS.get((wrapper.__name__, each.strategy))
        marks = [pytest.mark.xfail(strict=True, reason=fault)] if fault else []
        asked = is_first(each) and isinstance(each.strategy, AllReduce | LocalSGD | PushSum)
        marks += [] if asked else [pytest.mark.slow]
        found.append(pytest.param(wrapper, each, id=f"{wrapper.__name__}-{each}", marks=marks))
    return found


@pytest.mark.parametrize(("wrapper", "each"), pairs())
def test_a_base_trains_and_resumes_bitwise_or_is_refused(wrapper: type, each: Case, tmp_path: Path) -> None:
    setting = wrapped(wrapper, each)
    if isinstance(setting, Setting):
        saved_and_resumed(setting, tmp_path)
    else:
        assert len(setting.split()) > 8, "the value, the rule and the fix"


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda kind: kind.__name__)
def test_every_wrapper_takes_a_base_of_the_kind_that_it_has_unless_one_is_given(wrapper: type) -> None:
    usual = type(wrapper().base)
    bases = [each for each in STRATEGIES if type(each.strategy) is usual]
    assert bases
    assert all(isinstance(wrapped(wrapper, each), Setting) for each in bases if each.exact)
