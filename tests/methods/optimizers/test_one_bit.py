# SPDX-License-Identifier: Apache-2.0
"""1-bit LAMB and 1-bit Adam under CompressedMomentum: oracles, and the papers' claims about each stage."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.grids import fast_where
from tests.methods.optimizers.one_bit_runs import Kind, begun, freezing, kept, oracle, parameters_of, path, stepped
from tests.oracles import one_bit as oracles
from tests.problems import Regression, distance
from thinwire import AllReduce, Comm, Worker
from thinwire.methods.codecs.one_bit import OneBit
from thinwire.methods.optimizers.lamb import Lamb
from thinwire.methods.optimizers.one_bit_adam import OneBitAdam
from thinwire.methods.optimizers.one_bit_lamb import OneBitLamb
from thinwire.methods.strategies.gradients.one_bit import CompressedMomentum

_EXACT = {torch.float64: 2e-6, torch.float32: 2e-5}
_PARTS = [24, 10]  # the buckets of a perceptron of 34 parameters, in the vector's order


def hyperparameters_of(settings: dict[str, Any]) -> oracles.Hyperparameters:
    return oracles.Hyperparameters(rate=settings["lr"], decay=settings.get("weight_decay", 0.0))


@pytest.mark.parametrize("kind", [OneBitLamb, OneBitAdam])
@pytest.mark.parametrize(
    ("size", "dtype"),
    fast_where(
        lambda each: each in ((1, torch.float32), (3, torch.float64)),
        product((1, 2, 3), (torch.float64, torch.float32)),
    ),
)
def test_it_equals_its_oracle(kind: Kind, size: int, dtype: torch.dtype) -> None:
    problem, settings = Regression(size, 20, dtype), dict[str, Any](lr=0.03, weight_decay=0.1)
    found = path(size, CompressedMomentum(OneBit(block=8), warmup_steps=8), problem, 20, kind, **settings)
    expected = oracle(
        problem,
        size,
        20,
        warmup=8,
        code=oracles.signs(8),
        hyperparameters=hyperparameters_of(settings),
        adam=kind is OneBitAdam,
    )
    assert distance(found, torch.stack(expected.path)[:, None].expand_as(found)) < _EXACT[dtype]


@pytest.mark.parametrize("kind", [OneBitLamb, OneBitAdam])
def test_codes_sent_during_the_backward_pass_equal_the_oracle_bucket_by_bucket(kind: Kind) -> None:
    problem = Regression(2, 30, torch.float64)
    strategy = CompressedMomentum(OneBit(block=16), warmup_steps=10, overlap=True)
    found = path(2, strategy, problem, 30, kind, lr=0.03)
    code = oracles.signs(16, parts=_PARTS)
    expected = oracle(
        problem,
        2,
        30,
        warmup=10,
        code=code,
        hyperparameters=oracles.Hyperparameters(rate=0.03),
        adam=kind is OneBitAdam,
    )
    assert distance(found, torch.stack(expected.path)[:, None].expand_as(found)) < _EXACT[torch.float64]
    whole = path(2, replace(strategy, overlap=False), problem, 30, kind, lr=0.03)
    assert not torch.equal(found, whole), "blocks must start again in every bucket"


def test_the_paper_s_whole_buffer_equals_its_oracle() -> None:
    problem = Regression(2, 30, torch.float64)
    strategy = CompressedMomentum(OneBit(whole=True, norm="l2"), warmup_steps=10, rescale=True)
    found = path(2, strategy, problem, 30, lr=0.01)
    chunks = whole_chunks(34, 2)
    expected = oracle(
        problem,
        2,
        30,
        warmup=10,
        code=oracles.signs(34, "l2"),
        server=oracles.signs(34, "l2", parts=chunks),
        hyperparameters=oracles.Hyperparameters(rate=0.01),
        rescale=True,
    )
    assert distance(found, torch.stack(expected.path)[:, None].expand_as(found)) < _EXACT[torch.float64]


def whole_chunks(n: int, size: int) -> list[int]:
    """What each rank adds up of a vector: as many whole bytes of signs for each, but for the last."""
    chunk = -(-n // (8 * size)) * 8
    return [max(0, min(chunk, n - rank * chunk)) for rank in range(size)]


@pytest.mark.parametrize("kind", [OneBitLamb, OneBitAdam])
def test_clipping_has_one_factor_for_all_workers(kind: Kind) -> None:
    problem = Regression(3, 24, torch.float64)
    strategy = CompressedMomentum(OneBit(block=8), warmup_steps=8, max_norm=0.5)
    found = path(3, strategy, problem, 24, kind, lr=0.03)
    settings: dict[str, Any] = {
        "warmup": 8,
        "code": oracles.signs(8),
        "hyperparameters": oracles.Hyperparameters(rate=0.03),
    }
    expected = oracle(problem, 3, 24, max_norm=0.5, adam=kind is OneBitAdam, **settings)
    assert distance(found, torch.stack(expected.path)[:, None].expand_as(found)) < _EXACT[torch.float64]
    free = oracle(problem, 3, 24, adam=kind is OneBitAdam, **settings)
    assert distance(found[-1, 0], free.path[-1]) > 1e-3, "the clip must have bitten"


# -- the first stage ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("size", [1, 3])
def test_the_first_stage_is_lamb_bit_for_bit(size: int, decay: float) -> None:
    problem = Regression(size, 12, torch.float32)
    found = path(size, CompressedMomentum(warmup_steps=100), problem, 12, lr=0.03, weight_decay=decay)
    plain: Any = lambda params, **settings: Lamb(params, bias_correction=False, **settings)  # noqa: E731
    expected = path(size, AllReduce(), problem, 12, plain, lr=0.03, weight_decay=decay)
    assert torch.equal(found, expected)


def test_steps_in_which_a_norm_is_zero_leave_the_mean_trust_alone() -> None:
    x = nn.Parameter(torch.zeros(3))
    optimizer = OneBitLamb([x], lr=0.1)
    weights: list[float] = []
    for _ in range(2):
        x.grad = torch.ones(3)
        optimizer.step()
        weights.append(float(optimizer.state[x]["trust_weight"]))
    assert weights == pytest.approx([0.0, 0.1])


def constant(size: int, *, groups: int = 1) -> tuple[nn.ParameterList, list[Tensor]]:
    draw = torch.Generator().manual_seed(size)
    model = nn.ParameterList([nn.Parameter(torch.randn(size, generator=draw)) for _ in range(groups)])
    return model, [torch.randn(size, generator=draw) for _ in range(groups)]


def test_the_warm_up_ends_by_itself_when_the_variance_has_settled() -> None:
    # Of a constant gradient the variance is 1 - 0.9^t: it changes by 8 % from step 20 to 30, by 3 % from 30 to 40.
    def body(comm: Comm) -> list[bool]:
        model, gradients = constant(5)
        optimizer = OneBitLamb(model.parameters(), lr=0.01, betas=(0.9, 0.9))
        thinwire.attach(model, optimizer, CompressedMomentum(OneBit(), warmup_steps=None), comm=comm)
        ended: list[bool] = []
        for _ in range(45):
            stepped(optimizer, (model[0] * gradients[0]).sum())
            ended.append(optimizer.frozen)
        assert "previous_variance" not in optimizer.state[model[0]]
        return ended

    for ended in thinwire.run_threads(2, body):
        assert ended == [False] * 39 + [True] * 6


# -- the second stage --------------------------------------------------------------------------------------------------


def test_the_factor_stays_in_its_bounds_and_changes_by_its_share_at_most() -> None:
    problem = Regression(2, 60, torch.float64)

    def see(worker: Worker) -> Tensor:
        return kept(worker, "factor") if freezing(worker).frozen else torch.ones(4, dtype=torch.float64)

    settings = dict[str, Any](lr=0.03, betas=(0.9, 0.9), least_factor=0.8, most_factor=1.5, factor_change=0.05)
    seen = path(2, CompressedMomentum(OneBit(block=8), warmup_steps=3), problem, 60, see=see, **settings)[:, 0]
    assert seen.min() >= 0.8 - 1e-12 and seen.max() <= 1.5 + 1e-12
    assert seen.max() == 1.5, "the bound must have been reached"
    changes = seen[1:] / seen[:-1]
    assert changes.min() >= 0.95 - 1e-12 and changes.max() <= 1.05 + 1e-12
    assert changes.max() > 1.049


def test_the_factor_is_one_as_long_as_the_fresh_variance_is_the_frozen_one() -> None:
    model, gradients = constant(6)
    optimizer = OneBitLamb(model.parameters(), lr=0.01, betas=(0.0, 0.0))
    for step in range(5):
        model[0].grad = gradients[0].clone()
        optimizer.step()
        if step == 1:
            optimizer.freeze()
    state = optimizer.state[model[0]]
    assert torch.equal(state["fresh"], state["variance"])
    assert state["factor"] == 1


@pytest.mark.parametrize("kind", [OneBitLamb, OneBitAdam])
def test_parameters_without_a_gradient_never_move(kind: Kind) -> None:
    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        model, gradients = constant(8, groups=2)
        before = model[1].detach().clone()
        optimizer = kind(model.parameters(), lr=0.01)
        thinwire.attach(model, optimizer, CompressedMomentum(OneBit(block=8), warmup_steps=3), comm=comm)
        for step in range(30):
            stepped(optimizer, (model[0] * gradients[0] * (comm.rank + step)).sum())
        return before, model[1].detach()

    for before, after in thinwire.run_threads(2, body):
        assert torch.equal(before, after)


def test_entries_that_first_have_a_gradient_when_the_variance_is_frozen_take_ordinary_steps() -> None:
    def body(comm: Comm) -> list[float]:
        model, gradients = constant(8, groups=2)
        optimizer = OneBitAdam(model.parameters(), lr=0.01)
        thinwire.attach(model, optimizer, CompressedMomentum(OneBit(block=8), warmup_steps=5), comm=comm)
        before = [p.detach().clone() for p in model]
        for step in range(8):
            optimizer.zero_grad()
            chosen = [0] if step < 5 else [0, 1]
            torch.stack([(model[i] * gradients[i]).sum() for i in chosen]).sum().backward()
            before = [p.detach().clone() for p in model]
            optimizer.step()
        return [float((p.detach() - x).abs().max()) for p, x in zip(model, before, strict=True)]

    for first, second in thinwire.run_threads(2, body):
        assert second < 10 * first


def test_a_rank_without_data_brings_the_momentum_alone() -> None:
    problem = Regression(2, 20, torch.float64)
    lengths = (20, 14)

    def body(comm: Comm) -> Tensor:
        strategy = CompressedMomentum(OneBit(block=8), warmup_steps=6)
        worker = begun(comm, strategy, problem.model(), lr=0.03)
        for step in worker.join(list(range(lengths[comm.rank]))):
            stepped(worker.optimizer, problem.loss(worker.model, comm.rank, step))
        worker.detach()
        return parameters_of(worker)

    def gradient(x: Tensor, step: int) -> Tensor:
        g = problem.gradient(x, step)
        return g if step < 14 else torch.stack([2 * g[0], torch.zeros_like(g[1])])

    agree = oracles.TwoStages(oracles.signs(8), oracles.signs(8))
    expected = oracles.OneBit([20, 4, 8, 2], oracles.Hyperparameters(rate=0.03), 6, agree)
    last = expected.run(gradient, problem.start.expand(2, -1), 20)[-1]
    for found in thinwire.run_threads(2, body, timeout=20):
        assert distance(found, last) < _EXACT[torch.float64]


@pytest.mark.parametrize("overlap", [False, True])
def test_without_feedback_every_code_is_of_its_momentum_alone(overlap: bool) -> None:
    def work(comm: Comm, feedback: bool, forget: bool) -> Tensor:
        model = nn.Linear(40, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = OneBitAdam(model.parameters(), lr=0.01)
        strategy = CompressedMomentum(OneBit(8), warmup_steps=2, overlap=overlap, feedback=feedback)
        (r,) = thinwire.attach(model, optimizer, strategy, comm=comm).replicas
        for step in range(6):
            if forget:
                for name, residual in r.state.items():
                    if "error" in name:
                        residual.zero_()
            stepped(optimizer, (model(torch.linspace(-1, 2, 40)[None] * (comm.rank + step + 1)) - 1).square().sum())
        return model.weight.detach().clone()

    without, emptied, kept_ones = (
        thinwire.run_threads(2, lambda comm, how=how: work(comm, *how))[0]
        for how in ((False, False), (True, True), (True, False))
    )
    assert torch.equal(without, emptied)
    assert not torch.equal(without, kept_ones)
