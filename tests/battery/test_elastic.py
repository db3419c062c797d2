# SPDX-License-Identifier: Apache-2.0
"""Every registered strategy goes on when a worker is lost, or says at attach why it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thinwire
from tests.battery.cases import STRATEGIES, is_first
from tests.battery.runs import Case
from tests.elastic.fleets import Kill, run_fleet, survivors
from tests.grids import fast_where
from thinwire.methods.strategies.base import nested


@pytest.mark.parametrize("each", fast_where(is_first, STRATEGIES), ids=lambda each: str(each.strategy))
def test_a_strategy_survives_a_death_or_is_refused(each: Case) -> None:
    strategy = each.strategy
    if any(part.traits.inelastic_reason for part in nested(strategy)):
        model = torch.nn.Linear(2, 1)
        with pytest.raises(thinwire.ConfigError, match="elastic=True"):
            thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, elastic=True)
        return
    kind: Any = each.optimizer or torch.optim.SGD
    ends = survivors(
        run_fleet(3, strategy, kills=(Kill(2, 5),), optimizer=lambda model: kind(model.parameters(), lr=each.rate / 5))
    )
    agreed = [end.agreed for end in ends]
    assert agreed[0] is not None and torch.isfinite(agreed[0]).all()
    assert all(x is not None and torch.equal(x, agreed[0]) for x in agreed)
