# SPDX-License-Identifier: Apache-2.0
"""A worker goes on with another strategy in the middle of its run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.engine import attach, batches, flat, momentum, net, steps
from tests.oracles.common import Descent
from tests.oracles.switching import in_turns
from tests.pool import run_processes
from tests.problems import Regression, train
from thinwire import (
    AllReduce,
    Bf16,
    Comm,
    ConfigError,
    DiLoCo,
    ErrorFeedback,
    LocalSGD,
    MismatchError,
    OneBit,
    PushSum,
    SlowMo,
    Strategy,
    TopK,
    Worker,
)
from thinwire.methods.optimizers.lamb import Lamb

RATES = [0.1, 0.08, 0.06, 0.12] * 4
TURNS: list[tuple[int, str, int]] = [(4, "LocalSGD(period=3)", 0), (11, "AllReduce()", 3), (16, "", 0)]


def in_turns_for_real(comm: Comm | None = None) -> Tensor:
    """AllReduce, LocalSGD and AllReduce again."""
    size = 3

    def after(worker: Worker) -> None:
        for last, following, _ in TURNS:
            if worker.step == last and following:
                worker.switch(following)

    worker = train(comm, AllReduce(), Regression(size, 16, torch.float64), RATES, after_step=after, momentum=0.8)
    return flat(worker.model)


def listed() -> list[float]:
    return in_turns_for_real().tolist()


def the_oracle() -> Tensor:
    problem = Regression(3, 16, torch.float64)
    start = problem.start.expand(3, -1)
    turns = [(last, period) for last, _, period in TURNS]
    return in_turns(problem.gradient, start, Descent(RATES, momentum=0.8), turns)


def test_all_reduce_then_local_sgd_then_all_reduce_is_its_oracle_on_threads_and_processes() -> None:
    threads = torch.stack(thinwire.run_threads(3, in_turns_for_real))
    torch.testing.assert_close(threads, the_oracle(), rtol=1e-12, atol=1e-13)
    processes = torch.tensor(run_processes(3, listed), dtype=torch.float64)
    torch.testing.assert_close(processes, the_oracle(), rtol=1e-12, atol=1e-13)


def switched(
    before: Strategy, after: Strategy | str, see: Callable[[Worker, Any], Any], *, count: int = 5, **more: Any
) -> list[Any]:
    """Two threads that train, switch, and look."""

    def work(comm: Comm) -> Any:
        worker = steps(attach(comm, before, **more), batches(comm.rank, count))
        worker.optimizer.zero_grad()
        done = worker.switch(after)
        found = see(worker, done)
        worker.detach()
        return found

    return thinwire.run_threads(2, work, timeout=20)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_workers_with_optimizers_of_their_own_stay_equal_under_all_reduce(kind: Any) -> None:
    more = {"momentum": 0.9} if kind is torch.optim.SGD else {}

    def work(comm: Comm) -> Tensor:
        made = attach(comm, LocalSGD(period=3), optimizer=lambda model: kind(model.parameters(), lr=0.02, **more))
        worker = steps(made, batches(comm.rank, 5))
        worker.switch(AllReduce())
        return flat(steps(worker, batches(comm.rank, 4, first=5)).model)

    first, *others = thinwire.run_threads(3, work, timeout=20)
    assert all(torch.equal(first, other) for other in others)


def test_workers_that_have_counted_different_steps_in_a_group_go_on_with_the_most() -> None:
    def work(comm: Comm) -> tuple[int, Tensor]:
        made = attach(comm, LocalSGD(period=3), optimizer=lambda model: Lamb(model.parameters(), lr=0.02))
        worker = steps(made, batches(comm.rank, 5))
        worker.optimizer.zero_grad()
        if comm.rank:
            worker.optimizer.step()  # without a gradient
        else:
            steps(worker, batches(comm.rank, 1, first=5))
        worker.switch(AllReduce())
        return worker.optimizer.param_groups[0]["step"], flat(steps(worker, batches(comm.rank, 4, first=6)).model)

    (count, first), *others = thinwire.run_threads(3, work, timeout=20)
    assert count == 6
    assert all(number == count and torch.equal(first, other) for number, other in others)


def test_an_optimizer_whose_memory_has_no_mean_is_refused_where_replicas_must_be_equal() -> None:
    def work(comm: Comm) -> None:
        made = attach(comm, LocalSGD(period=3), optimizer=lambda model: torch.optim.Adafactor(model.parameters()))
        worker = steps(made, batches(comm.rank, 2))
        worker.switch(SlowMo(period=4))
        worker.switch(AllReduce())

    with pytest.raises(ConfigError, match=r"Adafactor under AllReduce\(\).*'row_var' of this one has no mean"):
        thinwire.run_threads(2, work, timeout=20)


def test_equal_replicas_stay_where_they_are_bit_for_bit() -> None:
    plain = thinwire.run_threads(
        3, lambda comm: flat(steps(attach(comm, AllReduce()), batches(comm.rank, 5)).model), timeout=20
    )

    def work(comm: Comm) -> Tensor:
        worker = steps(attach(comm, AllReduce()), batches(comm.rank, 5))
        worker.optimizer.zero_grad()
        worker.switch(LocalSGD(period=4))
        return flat(worker.model)

    assert all(torch.equal(x, y) for x, y in zip(plain, thinwire.run_threads(3, work, timeout=20), strict=True))


def test_what_is_kept_and_what_is_dropped_is_told() -> None:
    def see(_: Worker, done: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return done.kept, done.dropped

    assert switched(SlowMo(period=3), SlowMo(period=4), see)[0] == (("anchor", "num_steps", "slow"), ("lr_sum",))
    assert switched(SlowMo(period=3), DiLoCo(period=4), see)[0][0] == ()
    signs, few = ErrorFeedback(OneBit(8)), ErrorFeedback(TopK(fraction=0.5))
    kept, dropped = switched(AllReduce(signs), AllReduce(few), see)[0]
    assert kept[0] == "error"
    assert dropped == ()
    kept, dropped = switched(AllReduce(signs), AllReduce(Bf16()), see)[0]
    assert kept == ()
    assert "error" in dropped
    assert "error" in switched(AllReduce(signs), LocalSGD(codec=signs), see)[0][1]
    assert switched(PushSum(), PushSum(staleness=1), see)[0][0] == ()


def plain(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def test_gradients_are_exchanged_after_a_switch_to_all_reduce_and_no_more_after_one_away() -> None:
    def work(comm: Comm) -> tuple[Tensor, Tensor]:
        worker = steps(attach(comm, LocalSGD(period=100), optimizer=plain), batches(comm.rank, 2))
        worker.optimizer.zero_grad()
        worker.switch(AllReduce())
        steps(worker, batches(comm.rank, 3, first=2))
        together = flat(worker.model)
        worker.optimizer.zero_grad()
        sent = worker.comm.meter.payload_bytes
        worker.switch("Local()")
        steps(worker, batches(comm.rank, 3, first=5))
        assert worker.comm.meter.payload_bytes - sent < 200  # the ranks agreed by a hash, and no gradient was sent
        return together, flat(worker.model)

    (together, apart), (also_together, also_apart) = thinwire.run_threads(2, work, timeout=20)
    assert torch.equal(together, also_together)
    assert not torch.equal(apart, also_apart)


def test_another_strategy_on_another_rank_is_named_on_both() -> None:
    def work(comm: Comm) -> str:
        worker = steps(attach(comm, AllReduce()), batches(comm.rank, 2))
        worker.optimizer.zero_grad()
        before = flat(worker.model)
        with pytest.raises(MismatchError) as caught:
            worker.switch(LocalSGD(period=4 + comm.rank))
        assert torch.equal(flat(worker.model), before)
        assert worker.strategy == AllReduce()
        return str(caught.value)

    first, second = thinwire.run_threads(2, work, timeout=20)
    assert first == second
    assert "LocalSGD(period=4) on rank 0 and LocalSGD(period=5) on rank 1" in first


def test_another_step_on_another_rank_is_named() -> None:
    def work(comm: Comm) -> None:
        worker = steps(attach(comm, LocalSGD(period=100)), batches(comm.rank, 3 + comm.rank))
        worker.optimizer.zero_grad()
        worker.switch(AllReduce())

    with pytest.raises(MismatchError, match=r"rank 0 is in switch\(\) at step 3, rank 1 is in switch\(\) at step 4"):
        thinwire.run_threads(2, work, timeout=20)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("CompressedMomentum()", "variance cannot be frozen"),
        ("SlowMoo()", "unknown"),
        ("NodeAverage(LocalSGD(8), period=2, node_size=3)", "node_size"),
    ],
)
def test_what_attach_would_refuse_is_refused_and_training_goes_on(target: str, words: str) -> None:
    def work(comm: Comm) -> Tensor:
        worker = steps(attach(comm, LocalSGD(period=3)), batches(comm.rank, 4))
        worker.optimizer.zero_grad()
        with pytest.raises(ConfigError, match=words):
            worker.switch(target)
        return flat(steps(worker, batches(comm.rank, 3, first=4)).model)

    def undisturbed(comm: Comm) -> Tensor:
        return flat(steps(attach(comm, LocalSGD(period=3)), batches(comm.rank, 7)).model)

    found, plain = (thinwire.run_threads(2, each, timeout=20) for each in (work, undisturbed))
    assert all(torch.equal(x, y) for x, y in zip(found, plain, strict=True))


@pytest.mark.parametrize(("before", "after"), [(AllReduce(), LocalSGD(4)), (LocalSGD(4), AllReduce())])
def test_a_switch_between_backward_and_step_is_refused(before: Strategy, after: Strategy) -> None:
    def work(comm: Comm) -> None:
        worker = steps(attach(comm, before), batches(comm.rank, 2))
        worker.optimizer.zero_grad()
        x, y = batches(comm.rank, 1)[0]
        (worker.model(x) - y).square().mean().backward()
        worker.switch(after)
        worker.optimizer.step()

    with pytest.raises(ConfigError, match=r"between backward\(\) and optimizer.step\(\)"):
        thinwire.run_threads(2, work, timeout=20)


def test_a_checkpoint_after_a_switch_is_that_of_the_new_strategy(tmp_path: Path) -> None:
    def work(comm: Comm) -> tuple[Tensor, Tensor]:
        worker = steps(attach(comm, AllReduce()), batches(comm.rank, 3))
        worker.optimizer.zero_grad()
        worker.switch(SlowMo(period=4))
        steps(worker, batches(comm.rank, 3, first=3))
        worker.save(tmp_path)
        whole = flat(steps(worker, batches(comm.rank, 4, first=6)).model)
        worker.detach()
        again = attach(comm, SlowMo(period=4), model=net(seed=5), optimizer=momentum)
        again.load(tmp_path)
        return whole, flat(steps(again, batches(comm.rank, 4, first=6)).model)

    for whole, resumed in thinwire.run_threads(2, work, timeout=20):
        assert torch.equal(whole, resumed)


def test_a_scaler_skips_alike_after_a_switch_to_local_steps() -> None:
    def work(comm: Comm) -> int:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        worker = attach(comm, AllReduce(), scaler=scaler)
        worker.switch(LocalSGD(period=2))
        third = float("inf") if comm.rank == 1 else 1.0
        data = batches(comm.rank, 4)
        return steps(worker, data, scaler=scaler, factor=lambda step: third if step == 2 else 1.0).step

    assert thinwire.run_threads(2, work, timeout=20) == [3, 3]
