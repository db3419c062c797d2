# SPDX-License-Identifier: Apache-2.0
"""One batch on one rank whose gradient is NaN, under every registered strategy."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.battery.cases import STRATEGIES, is_first
from tests.battery.runs import BUCKET_BYTES, Case, Setting, go_on, smallest
from tests.grids import fast_where
from tests.problems import flat
from thinwire import Comm, NonFiniteError, Worker
from thinwire.worker.state import Policy

BAD_STEP, BAD_RANK = 3, 1
every = pytest.mark.parametrize("each", fast_where(is_first, STRATEGIES), ids=str)


@dataclass(frozen=True)
class Poisoned(Setting):
    """A run in which one rank's gradient is NaN once; where late workers skip steps, from then on."""

    def loss(self, model: nn.Module, rank: int, step: int, part: int = 0) -> Tensor:
        bad = step >= BAD_STEP if self.case.strategy.traits.skips_steps else step == BAD_STEP
        return super().loss(model, rank, step, part) * (float("nan") if bad and rank == BAD_RANK else 1.0)


def begun(comm: Comm, setting: Setting, policy: Policy) -> Worker:
    model = setting.problem.model()
    strategy = setting.case.strategy
    optimizer = setting.make_optimizer(model)
    return thinwire.attach(model, optimizer, strategy, comm=comm, bucket_bytes=BUCKET_BYTES, nonfinite=policy)


@every
def test_it_ends_all_ranks_with_an_error_that_names_the_rank_and_the_parameter(each: Case) -> None:
    setting = Poisoned(each, size=smallest(each), dtype=torch.float32)

    def body(comm: Comm) -> tuple[str, bool]:
        worker = begun(comm, setting, "raise")
        with pytest.raises(NonFiniteError) as found:
            go_on(worker, setting)
            with worker.consensus():
                pass
        return str(found.value), bool(flat(worker.model).isfinite().all())

    for text, finite in thinwire.run_threads(setting.size, body, timeout=20):
        step = r"\d+" if each.strategy.traits.skips_steps else BAD_STEP
        assert re.match(rf"step {step}: the gradient of \w+ on rank {BAD_RANK} is NaN or infinite;", text)
        assert finite


@every
def test_it_is_left_out_and_all_ranks_go_on_with_finite_parameters(each: Case) -> None:
    setting = Poisoned(each, size=smallest(each), dtype=torch.float32)

    def body(comm: Comm) -> tuple[Tensor, Tensor, float]:
        worker = go_on(begun(comm, setting, "skip"), setting)
        skipped = worker.metrics().get("skipped_steps", 0.0)
        with worker.consensus():
            agreed = flat(worker.model)
        worker.detach()
        return flat(worker.model), agreed, skipped

    found = thinwire.run_threads(setting.size, body, timeout=20)
    for x, agreed, _ in found:
        assert x.isfinite().all()
        assert torch.equal(agreed, found[0][1])
    if not each.strategy.traits.skips_steps:
        # Counted once, by all ranks that leave it out.
        assert found[BAD_RANK][2] == 1
        assert {skipped for *_, skipped in found} <= {0, 1}
