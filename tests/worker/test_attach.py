# SPDX-License-Identifier: Apache-2.0
"""A model and an optimizer under a strategy: parameters, gradients, steps."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.engine import (
    adamw,
    attach,
    batches,
    drawn,
    flat,
    momentum,
    net,
    serial,
    squared_error,
    steps,
)
from tests.rules import for_each
from thinwire import AllReduce, Comm, ConfigError, Gossip, Local, LocalSGD, PushSum, SlowMo, Strategy, run_threads

ALONE = [AllReduce(), LocalSGD(2), Gossip(), Gossip(order="after"), PushSum(), Local()]


class Picky(nn.Module):
    """Uses one of its two branches; a third is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)
        self.use_left = True

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) if self.use_left else self.right(x)


def bare(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> Tensor:
    for x, y in batches(0, count):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return flat(model)


def shares_memory(parameter: Tensor, vector: Tensor) -> bool:
    return parameter.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_the_strategy_may_be_a_recipe_s_text() -> None:
    model = net(3)
    worker = thinwire.attach(model, momentum(model), "slow-mo(period=2)")
    assert worker.strategy == SlowMo(period=2)


def test_arguments_of_a_wrong_type_are_refused_and_the_right_one_is_named() -> None:
    model = net(3)
    optimizer = momentum(model)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    wrong: list[tuple[Any, Any, Any, str]] = [
        (model, optimizer, SlowMo, r"strategy is the class SlowMo: .*. Write SlowMo\(\)$"),
        (model, optimizer, thinwire.Ring(), "strategy is of type Ring: must be a strategy or its text"),
        (model, optimizer, None, "strategy is of type NoneType"),
        (model, optimizer, "PushSun()", "'PushSun' is unknown; did you mean PushSum, "),
        (model, optimizer, "train fast", "Write it like SlowMo"),
        (
            model,
            scheduler,
            SlowMo(),
            r"optimizer is of type ConstantLR: must be a torch\.optim\.Optimizer. Pass its \.opt",
        ),
        (model, torch.optim.SGD, SlowMo(), "optimizer is the class SGD: .*such as torch.optim.SGD"),
        (optimizer, model, SlowMo(), "model is of type SGD: must be a torch.nn.Module"),
    ]
    for one_model, one_optimizer, strategy, words in wrong:
        with pytest.raises(ConfigError, match=words):
            thinwire.attach(one_model, one_optimizer, strategy)


# -- parameters --------------------------------------------------------------------------------------------------------


def test_parameters_become_views_of_one_vector_and_keep_their_values() -> None:
    model = net(3)
    before = [p.detach().clone() for p in model.parameters()]
    worker = attach(None, AllReduce(), model=model)
    (replica,) = worker.replicas
    assert replica.x.numel() == sum(p.numel() for p in before)
    assert all(shares_memory(p, replica.x) for p in model.parameters())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    with torch.no_grad():
        replica.x.fill_(7.0)
    assert all(bool((p == 7).all()) for p in model.parameters())


def test_channels_last_parameters_stay_channels_last() -> None:
    model = drawn(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 2))).to(
        memory_format=torch.channels_last
    )
    weight = model[0].weight
    before, stride = weight.detach().clone(), weight.stride()
    worker = thinwire.attach(model, momentum(model), AllReduce())
    assert weight.stride() == stride
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(weight, before)
    assert shares_memory(weight, worker.replicas[0].x)
    model(torch.randn(1, 3, 6, 6, generator=torch.Generator().manual_seed(0))).sum().backward()
    worker.optimizer.step()
    assert not torch.equal(weight, before)


def test_every_rank_starts_from_rank_zero_or_from_its_own() -> None:
    def work(comm: Comm) -> tuple[Tensor, Tensor]:
        own, shared = net(seed=comm.rank), net(seed=comm.rank)
        shared.register_buffer("mask", torch.tensor([comm.rank == 0, True]))
        shared.register_buffer("phases", torch.full((2,), 1j * comm.rank))
        own.register_buffer("mask", torch.tensor([comm.rank == 0]))
        attach(comm, Local(), model=own, init="own")
        attach(comm, Local(), model=shared)
        assert shared.mask.tolist() == [True, True]
        assert shared.phases.tolist() == [0, 0]
        assert own.mask.tolist() == [comm.rank == 0]
        return flat(own), flat(shared)

    for rank, (own, shared) in enumerate(run_threads(3, work)):
        assert torch.equal(own, flat(net(seed=rank)))
        assert torch.equal(shared, flat(net(seed=0)))


# -- alone -------------------------------------------------------------------------------------------------------------


@for_each(product([*ALONE, SlowMo(period=3, momentum=0.0)], [momentum, adamw]))
def test_one_worker_alone_trains_bitwise_as_the_bare_loop(case: tuple[Strategy, Any]) -> None:
    strategy, optimizer = case
    model = net()
    expected = bare(model, optimizer(model), 10)
    worker = steps(attach(None, strategy, optimizer=optimizer), batches(0, 10))
    assert torch.equal(flat(worker.model), expected)
    assert worker.comm.meter.payload_bytes == 0


# -- unused parameters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", [True, False])
def test_parameters_unused_everywhere_have_a_zero_gradient_and_decay_unless_they_are_found(found: bool) -> None:
    def work(comm: Comm) -> tuple[Tensor, bool]:
        model = drawn(Picky())
        model.use_left = comm.rank == 0
        steps(attach(comm, AllReduce(), model=model, find_unused=found), batches(comm.rank, 3))
        return flat(model), model.never.weight.grad is None

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        expected.use_left = rank == 0
        return squared_error(model, rank, step)

    def before_step() -> None:
        for parameter in expected.never.parameters():
            parameter.grad = None if found else torch.zeros_like(parameter)

    (x, none), (y, other_none) = run_threads(2, work)
    assert none == other_none == found
    assert torch.equal(x, y)
    expected = drawn(Picky())
    torch.testing.assert_close(x, flat(serial(3, expected, loss=loss, before_step=before_step)), rtol=1e-6, atol=1e-7)
    assert torch.equal(x[-8:], flat(drawn(Picky()))[-8:]) == found


# -- parameter groups and schedules ------------------------------------------------------------------------------------


def two_rates(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.02}]
    )


def test_the_learning_rate_is_a_vector_where_groups_differ_and_a_number_where_they_do_not() -> None:
    worker = attach(None, AllReduce(), optimizer=two_rates)
    (replica,) = worker.replicas
    assert isinstance(replica.lr, Tensor)
    assert replica.lr.tolist() == pytest.approx([0.1] * 20 + [0.02] * 12)
    for group in worker.optimizer.param_groups:
        group["lr"] = 0.5
    assert replica.lr == 0.5


@pytest.mark.parametrize(
    "strategy", [AllReduce(), LocalSGD(2), SlowMo(period=3), SlowMo(PushSum(), period=3)], ids=repr
)
def test_a_schedule_may_reach_zero_and_come_back(strategy: Strategy) -> None:
    def work(comm: Comm) -> Tensor:
        worker = attach(comm, strategy)
        schedule = torch.optim.lr_scheduler.LambdaLR(worker.optimizer, lambda k: [1.0, 0.5, 0.0, 0.0, 0.0, 1.0][k % 6])
        for x, y in batches(comm.rank, 9):
            steps(worker, [(x, y)])
            schedule.step()
        return flat(worker.model)

    x, y = run_threads(2, work)
    assert bool(torch.isfinite(x).all())
    if strategy != SlowMo(PushSum(), period=3):
        torch.testing.assert_close(x, y)


def test_a_round_at_learning_rate_zero_moves_nothing() -> None:
    def work(comm: Comm) -> bool:
        worker = attach(comm, SlowMo(period=2, momentum=0.0))
        worker.optimizer.param_groups[0]["lr"] = 0.0
        before = flat(worker.model)
        steps(worker, batches(comm.rank, 4))
        return torch.equal(before, flat(worker.model))

    assert run_threads(2, work) == [True, True]


# -- the wire ----------------------------------------------------------------------------------------------------------


def test_errors_and_intervals_name_the_step_that_is_under_way() -> None:
    def work(comm: Comm) -> list[int]:
        worker = attach(comm, AllReduce())
        comm.meter.tracing = True
        steps(worker, batches(comm.rank, 3))
        return sorted({interval.step for interval in comm.meter.intervals})

    assert run_threads(2, work) == [[0, 1, 2]] * 2


# -- the end -----------------------------------------------------------------------------------------------------------


def test_detach_removes_every_hook_and_leaves_a_model_that_trains_alone() -> None:
    def work(comm: Comm) -> tuple[float, Tensor]:
        worker = steps(attach(comm, AllReduce()), batches(comm.rank, 2))
        worker.detach()
        sent = comm.meter.payload_bytes
        steps(worker, batches(comm.rank, 2))
        assert not worker.optimizer._optimizer_step_pre_hooks
        assert not worker.optimizer._optimizer_step_post_hooks
        assert not any(p._post_accumulate_grad_hooks for p in worker.model.parameters())
        assert worker.step == 2
        return comm.meter.payload_bytes - sent, flat(worker.model)

    (sent, x), (other_sent, y) = run_threads(2, work)
    assert sent == other_sent == 0
    assert not torch.equal(x, y)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 parameters that are not the model's"):
        thinwire.attach(net(), momentum(net()), AllReduce())


def test_an_optimizer_without_anything_to_train_is_refused() -> None:
    model = net().requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        thinwire.attach(model, momentum(model), AllReduce())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_sparse_parameters_are_refused_by_name(layout: torch.layout) -> None:
    model = nn.Module()
    model.table = nn.Parameter(torch.eye(3).to_sparse(layout=layout))
    with pytest.raises(ConfigError, match="table has layout"):
        thinwire.attach(model, torch.optim.SGD([model.table], lr=0.1), AllReduce())


@for_each(product([AllReduce(), LocalSGD(2)], [torch.complex64, torch.complex128]))
def test_complex_parameters_are_refused_by_name_and_their_real_form_attaches(case: tuple[Strategy, Any]) -> None:
    strategy, dtype = case
    model = nn.Sequential(nn.Linear(3, 2, dtype=dtype))
    with pytest.raises(ConfigError, match=rf"0\.weight is of {dtype}: only real .* torch\.view_as_real"):
        thinwire.attach(model, momentum(model), strategy)
    model.requires_grad_(False)
    model.weight = nn.Parameter(torch.view_as_real(model[0].weight.data.clone()))  # a frozen complex one may stay
    thinwire.attach(model, torch.optim.SGD([model.weight], lr=0.1), strategy).detach()


def test_several_workers_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    model = net()
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=4 but no process group exists.* or call torch.distributed"):
        thinwire.attach(model, momentum(model), AllReduce())


@pytest.mark.parametrize("made", [True, False])
def test_a_model_inside_inference_mode_is_refused(made: bool) -> None:
    with torch.inference_mode(made):
        model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.inference_mode(not made), pytest.raises(ConfigError, match=r"inside torch\.inference_mode\(\).*outside"):
        thinwire.attach(model, optimizer, LocalSGD(2))


def test_a_state_loaded_inside_inference_mode_is_refused(tmp_path: Path) -> None:
    worker = steps(attach(None, LocalSGD(2)), batches(0, 1))
    worker.save(tmp_path)
    state = worker.state_dict(model=True, optimizer=True)
    with torch.inference_mode():
        for load in (lambda: worker.load(tmp_path), lambda: worker.load_state_dict(state)):
            with pytest.raises(ConfigError, match=r"inside torch\.inference_mode\(\).*Call it outside"):
                load()
    worker.load(tmp_path)
    steps(worker, batches(0, 2))


def test_a_model_of_which_a_part_is_on_the_meta_device_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ConfigError, match=r"1\.weight is on the meta device, and other parameters are not"):
        thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), LocalSGD(2))


class Bare(torch.optim.Optimizer):
    """A wrapper that does not call the base's constructor."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups


def test_an_optimizer_without_torch_s_hooks_is_refused() -> None:
    model = net()
    with pytest.raises(ConfigError, match=r"Bare does not call Optimizer\.__init__.*pass the optimizer inside it"):
        thinwire.attach(model, Bare(momentum(model)), LocalSGD(2))


def test_a_model_that_was_converted_for_an_evaluation_is_named_as_the_cause() -> None:
    def work(comm: Comm) -> None:
        worker = steps(attach(comm, AllReduce()), batches(comm.rank, 2))
        with worker.consensus() as model:
            model.half()
        steps(worker, batches(comm.rank, 1))

    with pytest.raises(ConfigError, match=r"step 2: parameters were converted or moved.*copy\.deepcopy\(model\)"):
        run_threads(2, work)
