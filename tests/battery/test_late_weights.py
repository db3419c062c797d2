# SPDX-License-Identifier: Apache-2.0
"""Weights that all ranks load between `attach` and the first step are the start, for every strategy."""

from __future__ import annotations

import pytest
from torch import Tensor

import thinwire
from tests.battery.cases import STRATEGIES, is_first
from tests.battery.runs import Case, alike, begin, everything, go_on, smallest, with_
from tests.grids import fast_where
from thinwire import Comm, ConfigError
from thinwire.worker.worker import internals_of


@pytest.mark.parametrize("each", fast_where(is_first, STRATEGIES), ids=str)
def test_weights_loaded_after_attach_are_the_start(each: Case) -> None:
    setting = with_(each, size=smallest(each), steps=4)

    def train(comm: Comm, *, late: bool) -> list[Tensor]:
        worker = begin(comm, setting, elsewhere=late)
        if late:
            worker.model.load_state_dict(setting.problem.model().state_dict())
        go_on(worker, setting)
        internals_of(worker).wait_pending()
        found = everything(worker)
        worker.detach()
        return found

    def run(*, late: bool) -> list[list[Tensor]]:
        return thinwire.run_threads(setting.size, lambda comm: train(comm, late=late), timeout=20)

    if each.strategy.traits.timing_dependent or each.strategy.traits.skips_steps:
        with pytest.raises(ConfigError, match=r"parameters were changed after attach.*before attach"):
            run(late=True)
        return
    for early, late in zip(run(late=False), run(late=True), strict=True):
        assert alike(early, late)
