# SPDX-License-Identifier: Apache-2.0
"""Gradients that are NaN or infinite: raised, left out or ignored, on all ranks alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from tests.battery.runs import everything
from tests.engine import Mixed, adamw, attach, batch, batches, drawn, endings, flat, net, steps
from tests.pool import run_processes
from thinwire import (
    AllReduce,
    Comm,
    CommError,
    ConfigError,
    LocalSGD,
    NonFiniteError,
    PushSum,
    Strategy,
    Worker,
)
from thinwire.worker.compatibility import check_policy

BAD_STEP = 2


def train(
    worker: Worker,
    ranks: tuple[int, ...] = (1,),
    *,
    value: float = float("nan"),
    count: int = 5,
    closed: bool = False,
) -> Worker:
    """A user's loop in which one step's loss is no number on these ranks."""
    bad = worker.comm.rank in ranks
    data = batches(worker.comm.rank, count)
    return steps(worker, data, closed=closed, factor=lambda step: value if bad and step == BAD_STEP else 1.0)


def errors(strategy: Strategy, ranks: tuple[int, ...] = (1,), *, size: int = 3, **settings: Any) -> list[str]:
    """What all threads raise; none has moved a parameter by what it raises about."""

    def work(comm: Comm) -> str:
        worker = attach(comm, strategy, **settings)
        with pytest.raises(NonFiniteError) as found:
            train(worker, ranks, value=float("inf"))
            worker.state_dict()
            with worker.consensus():
                pass
        assert flat(worker.model).isfinite().all()
        return str(found.value)

    return thinwire.run_threads(size, work, timeout=10)


def test_the_first_of_several_ranks_is_named_where_gradients_are_exchanged() -> None:
    assert all("on rank 1 " in text for text in errors(AllReduce(), (2, 1)))


def test_a_parameter_of_any_dtype_is_named() -> None:
    for text in endings(2, lambda comm: train(attach(comm, AllReduce(), model=drawn(Mixed())))):
        assert "on rank 1 is NaN" in text


@pytest.mark.parametrize("closed", [False, True])
def test_one_worker_alone_raises_too(closed: bool) -> None:
    for strategy in (AllReduce(), LocalSGD(2)):
        with pytest.raises(NonFiniteError, match=r"step 2: the gradient of 0\.weight on rank 0"):
            train(attach(None, strategy), (0,), closed=closed)


def test_gradients_that_stay_in_place_name_their_rank_too() -> None:
    def work(comm: Comm) -> str:
        worker = attach(comm, AllReduce())
        with pytest.raises(NonFiniteError) as found:
            for step in range(4):
                x, y = batch(comm.rank, step)
                worker.optimizer.zero_grad(set_to_none=False)
                factor = float("nan") if step == BAD_STEP and comm.rank == 2 else 1.0
                (factor * (worker.model(x) - y).square().mean()).backward()
                worker.optimizer.step()
        return str(found.value)

    assert all("on rank 2 " in text for text in thinwire.run_threads(3, work, timeout=10))


def test_a_sum_that_overflows_is_nobodys_fault() -> None:
    def work(comm: Comm) -> None:
        worker = attach(comm, AllReduce())
        (worker.model[2].bias * 3e38).sum().backward()
        worker.optimizer.step()

    for text in endings(3, work):
        assert text.startswith("NonFiniteError: step 0: the mean gradient of 2.bias is NaN or infinite; ")


def test_large_gradients_are_no_error() -> None:
    worker = attach(None, LocalSGD(2), optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-38))
    (worker.model[0].weight * 3e38).sum().backward()
    worker.optimizer.step()
    assert worker.step == 1


@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(8)], ids=str)
def test_a_step_that_is_left_out_changes_nothing_on_the_ranks_that_leave_it_out(strategy: Strategy) -> None:
    def work(comm: Comm) -> tuple[bool, list[Tensor], list[Tensor]]:
        worker = attach(comm, strategy, optimizer=adamw, nonfinite="skip")
        train(worker, (), count=BAD_STEP)
        before = everything(worker)
        x, y = batch(comm.rank, BAD_STEP)
        worker.optimizer.zero_grad()
        ((float("nan") if comm.rank == 1 else 1.0) * (worker.model(x) - y).square().mean()).backward()
        worker.optimizer.step()
        assert worker.step == BAD_STEP + 1
        return "skipped_steps" in worker.metrics(), before, everything(worker)

    for rank, (skipped, before, after) in enumerate(thinwire.run_threads(3, work, timeout=10)):
        leaves_out = rank == 1 or strategy.traits.sends_gradients
        assert skipped == leaves_out
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True)) == leaves_out


def test_gradients_that_are_ignored_reach_the_optimizer() -> None:
    def work(comm: Comm) -> bool:
        return bool(flat(train(attach(comm, AllReduce(), nonfinite="ignore")).model).isnan().any())

    assert thinwire.run_threads(2, work, timeout=10) == [True, True]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match='nonfinite=\'stop\': must be "raise", "skip" or "ignore"'):
        attach(None, LocalSGD(2), nonfinite="stop")


def on_processes() -> list[str]:
    """The errors on a Gloo group, by an exchange and by a message to all."""
    found: list[str] = []
    for strategy in (AllReduce(), LocalSGD(2), PushSum()):
        try:
            train(attach(None, strategy))
        except (NonFiniteError, CommError) as error:
            found.append(f"{type(error).__name__}: {error}")
        dist.barrier()
    return found


@pytest.mark.slow
def test_processes_raise_the_same_error() -> None:
    found = run_processes(3, on_processes)
    assert found[1] == found[2] == found[0]
    assert len(found[0]) == 3
    for text in found[0]:
        assert text.startswith("NonFiniteError: step 2: the gradient of 0.weight on rank 1 is NaN or infinite; ")


def test_steps_of_several_gradients_cannot_be_left_out_in_part() -> None:
    model = net()
    optimizer = thinwire.Svrg(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="a step has several gradients"):
        thinwire.attach(model, optimizer, AllReduce(), nonfinite="skip")


def test_blocks_of_one_model_leave_out_no_steps() -> None:
    model = net()
    with pytest.raises(ConfigError, match="a model in 2 blocks: each rank sees its own part"):
        check_policy("skip", model.parameters(), 2, adamw(model))
    for policy, blocks in (("skip", 1), ("raise", 2), ("ignore", 2)):
        check_policy(policy, model.parameters(), blocks, adamw(model))
