# SPDX-License-Identifier: Apache-2.0
"""Every registered strategy gives way to another one, and takes over from one, in the middle of a run."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

import thinwire
from tests.battery.cases import STRATEGIES, is_first
from tests.battery.runs import Case, begin, go_on, smallest, with_
from tests.battery.test_resizing import mass_of
from tests.grids import fast_where
from tests.problems import flat
from thinwire import EASGD, AllReduce, CoCoD, Comm, LocalSGD, MinibatchLocalSGD, PushSum, Strategy
from thinwire.methods.strategies.base import nested
from thinwire.worker.worker import internals_of

OTHERS = [AllReduce(), LocalSGD(2), PushSum()]
FIRST, SECOND, LAST = 5, 9, 13


def is_asked(pair: tuple[Case, Strategy]) -> bool:
    """Whether a case is the first of its class, with a strategy that sends gradients or parameters in turn."""
    each, other = pair
    return is_first(each) and other == OTHERS[2 * (STRATEGIES.index(each) % 2)]


@pytest.mark.parametrize(("each", "other"), fast_where(is_asked, product(STRATEGIES, OTHERS)), ids=str)
def test_it_gives_way_to_another_and_takes_over_again(each: Case, other: Strategy) -> None:
    size = smallest(each)
    setting = with_(each, size=size, steps=LAST)

    def body(comm: Comm) -> dict[str, Tensor | float | None]:
        worker = go_on(begin(comm, setting), setting, FIRST)
        worker.optimizer.zero_grad()
        internals_of(worker).wait_pending()
        with worker.consensus() as model:
            agreed = flat(model)
        found: dict[str, Tensor | float | None] = {"x": flat(worker.model), "agreed": agreed}
        worker.switch(other)
        found["begun"], found["mass"] = flat(worker.model), mass_of(worker)
        go_on(worker, setting, SECOND)
        found["other's"] = flat(worker.model)
        worker.optimizer.zero_grad()
        with worker.consensus() as model:
            found["other agreed"] = flat(model)
        worker.switch(each.strategy)
        found["begun again"] = flat(worker.model)
        go_on(worker, setting)
        internals_of(worker).wait_pending()
        with worker.consensus() as model:
            found["result"] = flat(model)
        found["end"] = flat(worker.model)
        worker.detach()
        return found

    rows = thinwire.run_threads(size, body, timeout=20)
    stacks = {name: torch.stack([row[name] for row in rows]) for name in rows[0] if name != "mass"}  # pyright: ignore

    def equal(name: str) -> bool:
        return torch.equal(stacks[name], stacks[name][:1].expand_as(stacks[name]))

    agreed = stacks["agreed"]
    if any(isinstance(part, EASGD) for part in nested(each.strategy)):
        agreed = stacks["x"].mean(0).expand_as(agreed)
    assert equal("begun")
    # What a round's end adds to the mean is asked in `test_in_flight`.
    if not any(isinstance(part, CoCoD | MinibatchLocalSGD) for part in nested(each.strategy)):
        torch.testing.assert_close(stacks["begun"], agreed, rtol=2e-6, atol=2e-7)
    masses = [row["mass"] for row in rows if isinstance(row["mass"], float)]
    assert not masses or other == PushSum()
    assert not masses or sum(masses) == pytest.approx(size, abs=1e-12)
    assert not torch.equal(stacks["other's"], stacks["begun"])
    # Momenta of the optimizers are zero here.
    assert equal("other's") or other != AllReduce()
    assert equal("begun again")
    torch.testing.assert_close(stacks["begun again"], stacks["other agreed"], rtol=2e-6, atol=2e-7)
    assert stacks["end"].isfinite().all()
    assert equal("result")
    assert not torch.equal(stacks["end"], stacks["begun again"])
    if each.strategy.traits.equal_replicas:
        assert equal("end")
