# SPDX-License-Identifier: Apache-2.0
"""A model and an optimizer under a strategy: parameters, gradients, steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import thinwire
from tests.engine import Mixed, attach, batch, batches, drawn, flat, momentum, net, steps, threads
from thinwire import AllReduce, Bf16, Comm, ConfigError, Gossip, Local, LocalSGD, PushSum, SlowMo, Strategy, run_threads
from thinwire.core.replica.replica import Replica
from thinwire.methods.strategies.traits import Traits

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


def test_tied_parameters_stay_tied_and_are_sent_once() -> None:
    def work(comm: Comm) -> bool:
        model = drawn(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2)))
        model[2].weight = model[0].weight
        worker = steps(attach(comm, AllReduce(), model=model), batches(comm.rank, 3))
        assert worker.replicas[0].x.numel() == 9 + 3 + 3 + 8
        return model[2].weight is model[0].weight and shares_memory(model[2].weight, worker.replicas[0].x)

    assert run_threads(2, work) == [True, True]


def test_frozen_parameters_start_equal_and_never_move() -> None:
    def work(comm: Comm) -> tuple[Tensor, Tensor]:
        model = net(seed=comm.rank)
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        worker = attach(comm, AllReduce(), model=model)
        frozen = model[0].weight.detach().clone()
        steps(worker, batches(comm.rank, 3))
        assert torch.equal(frozen, model[0].weight)
        assert worker.replicas[0].x.numel() == 12
        return frozen, flat(model)

    (frozen, x), (other_frozen, y) = run_threads(2, work)
    assert torch.equal(frozen, net(seed=0)[0].weight)
    assert torch.equal(frozen, other_frozen)
    assert torch.equal(x, y)


def test_several_dtypes_are_several_replicas_and_train_alike() -> None:
    def work(comm: Comm) -> Tensor:
        worker = steps(attach(comm, AllReduce(), model=drawn(Mixed())), batches(comm.rank, 5))
        assert [r.x.dtype for r in worker.replicas] == [torch.float32, torch.float64]
        assert [r.x.numel() for r in worker.replicas] == [30, 24]
        return flat(worker.model)

    x, y = run_threads(2, work)
    assert torch.equal(x, y)
    model = drawn(Mixed())
    optimizer = momentum(model)
    for step in range(5):
        optimizer.zero_grad()
        for rank in range(2):
            inputs, targets = batch(rank, step)
            ((model(inputs) - targets).square().mean() / 2).backward()
        optimizer.step()
    torch.testing.assert_close(x, flat(model), rtol=1e-5, atol=1e-6)


def test_every_dtype_of_a_model_has_its_own_strategy_state() -> None:
    def work(comm: Comm) -> Tensor:
        worker = steps(attach(comm, SlowMo(LocalSGD(3), period=2), model=drawn(Mixed())), batches(comm.rank, 4))
        assert [r.state["anchor"].dtype for r in worker.replicas] == [torch.float32, torch.float64]
        return flat(worker.model)

    x, y = run_threads(2, work)
    assert torch.equal(x, y)


def test_bfloat16_and_float32_parameters_train_side_by_side() -> None:
    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(3, 5).bfloat16(), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x.bfloat16()).float())

    def work(comm: Comm) -> Tensor:
        return flat(steps(attach(comm, LocalSGD(2), model=drawn(Halved())), batches(comm.rank, 4)).model.float())

    x, y = run_threads(2, work)
    assert torch.equal(x, y)


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


@pytest.mark.parametrize("strategy", ALONE, ids=repr)
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_one_worker_alone_trains_bitwise_as_the_bare_loop(strategy: Strategy, kind: str) -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return momentum(model) if kind == "sgd" else torch.optim.AdamW(model.parameters(), lr=0.01)

    model = net()
    expected = bare(model, optimizer(model), 10)
    worker = steps(attach(None, strategy, optimizer=optimizer), batches(0, 10))
    assert torch.equal(flat(worker.model), expected)
    assert worker.comm.meter.payload_bytes == 0


def test_slow_momentum_without_momentum_alone_is_the_bare_loop() -> None:
    model = net()
    expected = bare(model, momentum(model), 10)
    worker = steps(attach(None, SlowMo(period=3, momentum=0.0)), batches(0, 10))
    assert torch.equal(flat(worker.model), expected)


# -- unused parameters -------------------------------------------------------------------------------------------------


def picky(comm: Comm, *, find_unused: bool, set_to_none: bool = True) -> tuple[Tensor, bool]:
    model = drawn(Picky())
    worker = attach(comm, AllReduce(), model=model, find_unused=find_unused)
    for step in range(3):
        model.use_left = comm.rank == 0
        worker.optimizer.zero_grad(set_to_none=set_to_none)
        x, y = batch(comm.rank, step)
        (model(x) - y).square().mean().backward()
        worker.optimizer.step()
    return flat(model), model.never.weight.grad is None


def oracle_picky(*, never_decays: bool) -> Tensor:
    """Two ranks, each with its own branch; the gradient that a rank lacks is zero."""
    model = drawn(Picky())
    optimizer = momentum(model)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            model.use_left = rank == 0
            x, y = batch(rank, step)
            ((model(x) - y).square().mean() / 2).backward()
        if never_decays:
            for parameter in model.never.parameters():
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return flat(model)


def test_parameters_unused_everywhere_keep_no_gradient_and_do_not_decay_when_found() -> None:
    (x, none), (y, other_none) = run_threads(2, lambda c: picky(c, find_unused=True))
    assert none and other_none
    assert torch.equal(x, y)
    torch.testing.assert_close(x, oracle_picky(never_decays=False), rtol=1e-6, atol=1e-7)
    assert torch.equal(x[-8:], flat(drawn(Picky()))[-8:])


def test_parameters_unused_everywhere_have_a_zero_gradient_when_not_looked_for() -> None:
    (x, none), (y, other_none) = run_threads(2, lambda c: picky(c, find_unused=False))
    assert not none and not other_none
    assert torch.equal(x, y)
    torch.testing.assert_close(x, oracle_picky(never_decays=True), rtol=1e-6, atol=1e-7)


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


def test_slow_momentum_uses_each_group_s_own_rate() -> None:
    def work(comm: Comm) -> Tensor:
        strategy = SlowMo(period=2, momentum=0.5, lr=0.8)
        return flat(steps(attach(comm, strategy, optimizer=two_rates), batches(comm.rank, 8)).model)

    x, y = run_threads(2, work)
    assert torch.equal(x, y)
    rates = torch.tensor([0.1] * 20 + [0.02] * 12, dtype=torch.float64)
    models = [net().double(), net().double()]
    anchor, slow = flat(models[0]), torch.zeros(32, dtype=torch.float64)
    for step in range(8):
        for rank, model in enumerate(models):
            inputs, targets = (each.double() for each in batch(rank, step))
            gradients = torch.autograd.grad((model(inputs) - targets).square().mean(), list(model.parameters()))
            moved = flat(model) - rates * torch.cat([g.reshape(-1) for g in gradients])
            nn.utils.vector_to_parameters(moved, model.parameters())
        if step % 2:
            slow = 0.5 * slow + (anchor - (flat(models[0]) + flat(models[1])) / 2) / rates
            anchor = anchor - 0.8 * rates * slow
            for model in models:
                nn.utils.vector_to_parameters(anchor.clone(), model.parameters())
    torch.testing.assert_close(x.double(), anchor, rtol=1e-4, atol=1e-5)


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


# -- accumulation, clipping --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(2)], ids=repr)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulated_gradients_equal_one_big_batch(strategy: Strategy, set_to_none: bool) -> None:
    def work(comm: Comm, parts: int) -> tuple[Tensor, float]:
        worker = attach(comm, strategy)
        for step in range(4):
            x, y = batch(comm.rank, step, rows=8)
            worker.optimizer.zero_grad(set_to_none=set_to_none)
            for i, (inputs, targets) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
                with worker.no_sync() if i < parts - 1 else nullcontext():
                    ((worker.model(inputs) - targets).square().mean() / parts).backward()
            worker.optimizer.step()
        return flat(worker.model), worker.comm.meter.payload_bytes

    (whole, nbytes), _ = run_threads(2, lambda c: work(c, 1))
    (parts, nbytes_in_parts), _ = run_threads(2, lambda c: work(c, 4))
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)
    assert nbytes_in_parts == nbytes


def test_backward_twice_without_no_sync_adds_up_two_means() -> None:
    def work(comm: Comm) -> Tensor:
        worker = attach(comm, AllReduce())
        for step in range(2):
            x, y = batch(comm.rank, step)
            (worker.model(x) - y).square().mean().backward()
        return torch.cat([p.grad.reshape(-1) for p in worker.model.parameters() if p.grad is not None])

    found = run_threads(2, work)
    model = net()
    for rank in range(2):
        for step in range(2):
            x, y = batch(rank, step)
            ((model(x) - y).square().mean() / 2).backward()
    expected = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_clipping_after_backward_clips_the_mean_gradient(set_to_none: bool) -> None:
    def work(comm: Comm) -> tuple[Tensor, list[float]]:
        worker, norms = attach(comm, AllReduce()), []
        for x, y in batches(comm.rank, 4):
            worker.optimizer.zero_grad(set_to_none=set_to_none)
            (worker.model(x) - y).square().mean().backward()
            norms.append(float(nn.utils.clip_grad_norm_(worker.model.parameters(), 0.3)))
            worker.optimizer.step()
        return flat(worker.model), norms

    (x, norms), (y, other_norms) = run_threads(2, work)
    assert torch.equal(x, y)
    assert norms == other_norms
    model = net()
    optimizer, expected = momentum(model), []
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            inputs, targets = batch(rank, step)
            ((model(inputs) - targets).square().mean() / 2).backward()
        expected.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
    assert norms == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(x, flat(model), rtol=1e-5, atol=1e-6)


def test_sparse_gradients_are_exchanged_too() -> None:
    def work(comm: Comm) -> Tensor:
        model = drawn(nn.EmbeddingBag(6, 2, sparse=True))
        worker = thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), AllReduce(), comm=comm)
        for step in range(3):
            worker.optimizer.zero_grad()
            model(torch.tensor([[comm.rank, step, step]])).square().sum().backward()
            worker.optimizer.step()
        return flat(model)

    x, y = run_threads(2, work)
    model = drawn(nn.EmbeddingBag(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            (model(torch.tensor([[rank, step, step]])).square().sum() / 2).backward()
        optimizer.step()
    assert torch.equal(x, y)
    torch.testing.assert_close(x, flat(model))


class Checkpointed(nn.Module):
    """Forgets its activations, and runs forward once more within backward."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2)])
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = layer(x.tanh()) if self.reentrant is None else checkpoint(layer, x.tanh(), use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_run_again_within_backward_change_nothing(reentrant: bool) -> None:
    def work(comm: Comm, how: bool | None) -> Tensor:
        worker = attach(comm, AllReduce(), model=drawn(Checkpointed(how)))
        return flat(steps(worker, batches(comm.rank, 4)).model)

    plain = run_threads(2, lambda comm: work(comm, None))
    again = run_threads(2, lambda comm: work(comm, reentrant))
    assert all(torch.equal(plain[0], x) for x in [*plain, *again])


# -- closures ----------------------------------------------------------------------------------------------------------


def with_closure(comm: Comm | None, strategy: Strategy, make: Callable[[nn.Module], Any], count: int) -> Tensor:
    worker = attach(comm, strategy, optimizer=make)
    for x, y in batches(worker.comm.rank, count):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            worker.optimizer.zero_grad()
            loss = (worker.model(x) - y).square().mean()
            loss.backward()
            return loss

        assert worker.optimizer.step(closure) is not None
    return flat(worker.model)


@pytest.mark.parametrize("strategy", [*ALONE, SlowMo(Gossip(), period=2)], ids=repr)
def test_a_closure_changes_nothing(strategy: Strategy) -> None:
    plain = threads(3, strategy, 5)
    closed = run_threads(3, lambda comm: with_closure(comm, strategy, momentum, 5))
    assert all(torch.equal(x, y) for x, y in zip(plain, closed, strict=True))


def test_an_optimizer_that_evaluates_several_times_a_step_keeps_replicas_equal() -> None:
    def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=4)

    x, y = run_threads(2, lambda comm: with_closure(comm, AllReduce(), lbfgs, 3))
    assert torch.equal(x, y)
    model = net()
    optimizer = lbfgs(model)
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            losses = [(model(x) - y).square().mean() / 2 for x, y in (batch(0, step), batch(1, step))]
            sum(losses, torch.zeros(())).backward()
            return torch.stack(losses).sum()

        optimizer.step(closure)
    torch.testing.assert_close(x, flat(model), rtol=1e-3, atol=1e-4)


@dataclass(frozen=True)
class Halving(Strategy):
    """Halves each gradient before the step."""

    @cached_property
    def traits(self) -> Traits:
        return Traits(reads_gradient=True)

    def before_step(self, r: Replica) -> None:
        r.g.mul_(0.5)


@pytest.mark.parametrize("closed", [False, True])
def test_a_strategy_may_rewrite_the_gradient_before_the_step(closed: bool) -> None:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    model = net()
    expected = bare(model, torch.optim.SGD(model.parameters(), lr=0.05), 4)
    if closed:
        found = with_closure(None, Halving(), sgd, 4)
    else:
        found = flat(steps(attach(None, Halving(), optimizer=sgd), batches(0, 4)).model)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


# -- the wire ----------------------------------------------------------------------------------------------------------


def test_rounded_gradients_train_nearly_alike_and_cost_half() -> None:
    def work(comm: Comm, strategy: Strategy) -> tuple[Tensor, float]:
        worker = attach(comm, strategy)
        before = comm.meter.payload_bytes
        steps(worker, batches(comm.rank, 10))
        return flat(worker.model), comm.meter.payload_bytes - before

    (exact, nbytes), _ = run_threads(2, lambda c: work(c, AllReduce()))
    (rounded, half), (other, _) = run_threads(2, lambda c: work(c, AllReduce(Bf16())))
    assert torch.equal(rounded, other)
    assert nbytes == 2 * half == 10 * 32 * 4
    torch.testing.assert_close(rounded, exact, rtol=0.02, atol=0.02)
    assert not torch.equal(rounded, exact)


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


def test_a_detached_model_can_be_attached_again() -> None:
    def work(comm: Comm) -> Tensor:
        worker = steps(attach(comm, LocalSGD(2)), batches(comm.rank, 4))
        worker.detach()
        again = thinwire.attach(worker.model, momentum(worker.model), AllReduce(), comm=comm)
        return flat(steps(again, batches(comm.rank, 4)).model)

    x, y = run_threads(2, work)
    assert torch.equal(x, y)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 parameters that are not the model's"):
        thinwire.attach(net(), momentum(net()), AllReduce())


def test_an_optimizer_without_anything_to_train_is_refused() -> None:
    model = net().requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        thinwire.attach(model, momentum(model), AllReduce())


def test_sparse_parameters_are_refused_by_name() -> None:
    model = nn.Module()
    model.table = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(ConfigError, match="table has layout"):
        thinwire.attach(model, torch.optim.SGD([model.table], lr=0.1), AllReduce())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(2)], ids=str)
def test_complex_parameters_are_refused_by_name_and_their_real_form_attaches(
    strategy: Strategy, dtype: torch.dtype
) -> None:
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
