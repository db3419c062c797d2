# SPDX-License-Identifier: Apache-2.0
"""1-bit methods with faults and unusual sizes: what is skipped, kept and counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.engine import Mixed, batch, batches, net, steps
from tests.methods.optimizers.one_bit_runs import begun, freezing, path, stepped, taken
from tests.problems import Regression, flat
from thinwire import Comm, Worker
from thinwire.methods.codecs.header import HEADER_BYTES
from thinwire.methods.codecs.one_bit import OneBit
from thinwire.methods.optimizers.one_bit_lamb import OneBitLamb
from thinwire.methods.strategies.gradients.one_bit import CompressedMomentum
from thinwire.worker.step import share_skips
from thinwire.worker.worker import internals_of

SMALL = CompressedMomentum(OneBit(block=8), warmup_steps=4)
OVERLAPPED = CompressedMomentum(OneBit(block=8), warmup_steps=4, overlap=True)


def all_of(worker: Worker) -> dict[str, Tensor]:
    """The whole state of a rank by name, except its step."""
    found = {"x": worker.replicas[0].x.clone()}
    found |= {f"strategy {name}": x.clone() for name, x in worker.replicas[0].state.items() if "norm" not in name}
    for i, parameter in enumerate(worker.model.parameters()):
        found |= {f"{name} of {i}": x.clone() for name, x in worker.optimizer.state[parameter].items()}
    return found


# -- values that are not finite ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "strategy", [SMALL, OVERLAPPED, replace(SMALL, max_norm=1.0)], ids=["after", "during", "clipped"]
)
def test_a_gradient_that_is_not_finite_on_one_rank_lets_all_skip_the_step(
    strategy: CompressedMomentum, bad: float
) -> None:
    problem = Regression(2, 12, torch.float32)

    def body(comm: Comm) -> Tensor:
        worker = begun(comm, strategy, problem.model(), lr=0.03)
        internals_of(worker).nonfinite = "skip"
        taken(worker, problem, 0, 8)
        before = all_of(worker)
        worker.optimizer.zero_grad()
        loss = problem.loss(worker.model, comm.rank, 8)
        (loss * (bad if comm.rank == 1 else 1.0)).backward()
        worker.optimizer.step()
        after = all_of(worker)
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed <= {"strategy message"}
        taken(worker, problem, 9, 12)
        worker.detach()
        assert worker.step == 12
        return flat(worker.model)

    first, second = thinwire.run_threads(2, body, timeout=20)
    assert torch.equal(first, second)
    assert first.isfinite().all()


def test_an_overflow_on_one_rank_skips_the_scaled_step_on_all() -> None:
    problem = Regression(2, 12, torch.float32)

    def body(comm: Comm) -> tuple[int, Tensor, float]:
        worker = begun(comm, SMALL, problem.model(), lr=0.03)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        internals_of(worker).scaler = scaler
        share_skips(internals_of(worker))
        for step in range(12):
            worker.optimizer.zero_grad()
            loss = problem.loss(worker.model, comm.rank, step)
            scaler.scale(loss * (float("inf") if (step, comm.rank) == (8, 1) else 1.0)).backward()
            scaler.step(worker.optimizer)
            scaler.update()
        worker.detach()
        return worker.step, flat(worker.model), scaler.get_scale()

    (taken_, first, scale), (_, second, _) = thinwire.run_threads(2, body, timeout=20)
    assert (taken_, scale) == (11, 4.0)
    assert torch.equal(first, second)


# -- parameters without elements ---------------------------------------------------------------------------------------


class WithNothing(nn.Module):
    """A model with one parameter of no elements."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.nothing, self.inner = nn.Parameter(torch.empty(0)), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.nothing.sum()


class RegressionWithNothing(Regression):
    def model(self) -> nn.Module:
        return WithNothing(super().model())


def test_a_parameter_without_elements_does_not_change_the_scales_of_the_others() -> None:
    strategy = CompressedMomentum(OneBit(block=8), warmup_steps=4, rescale=True)
    found = path(2, strategy, RegressionWithNothing(2, 8, torch.float32), 8, lr=0.03)
    assert torch.equal(found, path(2, strategy, Regression(2, 8, torch.float32), 8, lr=0.03))
    assert not torch.equal(found[-1], found[3])


def test_an_optimizer_of_nothing_can_be_frozen() -> None:
    nothing = nn.Parameter(torch.empty(0))
    optimizer = OneBitLamb([nothing])
    optimizer.freeze()
    assert optimizer.state[nothing]["coefficient"] == 1


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", [SMALL, OVERLAPPED], ids=["after", "during"])
def test_parameters_in_sixteen_bits_are_saved_with_their_exact_copy(
    strategy: CompressedMomentum, dtype: torch.dtype, tmp_path: Any
) -> None:
    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        def fresh() -> Worker:
            return begun(comm, strategy, net().to(dtype), lr=0.01)

        def data(first: int, last: int) -> list[tuple[Tensor, Tensor]]:
            return [tuple(x.to(dtype) for x in batch(comm.rank, step)) for step in range(first, last)]  # type: ignore[misc]

        whole = steps(fresh(), data(0, 10))
        half = steps(fresh(), data(0, 6))
        half.save(tmp_path)
        again = fresh()
        again.load(tmp_path)
        steps(again, data(6, 10))
        exact = torch.cat([again.optimizer.state[p]["master"].reshape(-1) for p in again.model.parameters()])
        assert exact.dtype == torch.float32
        assert torch.equal(exact.to(dtype), flat(again.model))
        for each in (whole, half, again):
            each.detach()
        return flat(whole.model), flat(again.model)

    (first, resumed), (second, _) = thinwire.run_threads(2, body, timeout=20)
    assert torch.equal(first, resumed)
    assert torch.equal(first, second)


def test_an_optimizer_frozen_at_any_step_begins_with_its_own_variance() -> None:
    model = net()
    optimizer = OneBitLamb(model.parameters(), lr=0.01)
    for x, y in batches(0, 7):
        stepped(optimizer, (model(x) - y).square().mean())
    other = net()
    loaded = OneBitLamb(other.parameters(), lr=0.5)
    loaded.load_state_dict(optimizer.state_dict())
    loaded.freeze()
    for parameter in other.parameters():
        state = loaded.state[parameter]
        assert torch.equal(state["fresh"], state["variance"])
        assert (state["fresh"] > 0).all()


# -- unusual sizes and values ------------------------------------------------------------------------------------------


class Lengths(nn.Module):
    """Parameters of the given sizes."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(size, generator=draw)) for size in sizes])


@pytest.mark.parametrize("sizes", [[1], [7], [8], [9], [3, 0, 4], [1, 1], [17, 40]])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("strategy", [SMALL, OVERLAPPED], ids=["after", "during"])
def test_vectors_of_any_length_are_sent(strategy: CompressedMomentum, size: int, sizes: list[int]) -> None:
    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        model = Lengths(sizes)
        before = flat(model)
        worker = begun(comm, strategy, model, lr=0.03)
        for step in range(9):
            stepped(worker.optimizer, torch.cat([(p - comm.rank - step / 9) ** 2 for p in model.parts]).sum())
        worker.detach()
        return before, flat(model)

    found = thinwire.run_threads(size, body, timeout=20)
    assert all(torch.equal(after, found[0][1]) for _, after in found)
    assert ((found[0][0] != found[0][1]) & found[0][1].isfinite()).all()


@pytest.mark.parametrize("value", [-0.0, 1e-42, -1e-42, 1e15])
def test_extreme_gradients_leave_finite_parameters(value: float) -> None:
    def body(comm: Comm) -> Tensor:
        model = Lengths([16])
        worker = begun(comm, SMALL, model, lr=0.01)
        for step in range(10):
            stepped(worker.optimizer, (model.parts[0] * (value if step % 2 else torch.linspace(-1, 1, 16))).sum())
        worker.detach()
        return flat(model)

    first, second = thinwire.run_threads(2, body, timeout=20)
    assert torch.equal(first, second)
    assert first.isfinite().all()


def test_a_tensor_without_momentum_does_not_spoil_the_others_coefficients() -> None:
    def body(comm: Comm) -> tuple[Tensor, list[float]]:
        model = Lengths([16, 16])
        strategy = CompressedMomentum(OneBit(whole=True, norm="l2"), warmup_steps=4, rescale=True)
        worker = begun(comm, strategy, model, lr=0.01)
        for _ in range(8):
            stepped(worker.optimizer, (model.parts[0] * torch.linspace(-1, 1, 16)).sum())
        worker.detach()
        return flat(model), [float(worker.optimizer.state[p]["coefficient"]) for p in model.parts]

    for x, coefficients in thinwire.run_threads(2, body, timeout=20):
        assert x.isfinite().all()
        assert coefficients == [0.5, 1.0]


def test_two_dtypes_are_sent_separately_and_frozen_together() -> None:
    def body(comm: Comm) -> Tensor:
        worker = begun(comm, SMALL, Mixed(), lr=0.01)
        for x, y in batches(comm.rank, 8):
            stepped(worker.optimizer, (worker.model(x) - y).square().mean())
            assert freezing(worker).frozen == (worker.step >= 4)
        worker.detach()
        return torch.cat([p.detach().reshape(-1).double() for p in worker.model.parameters()])

    first, second = thinwire.run_threads(2, body, timeout=20)
    assert torch.equal(first, second)


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_a_coded_step_sends_what_its_formula_says(size: int, overlap: bool) -> None:
    codec = OneBit(block=8)

    def body(comm: Comm) -> list[float]:
        model = Lengths([64])
        worker = begun(comm, CompressedMomentum(codec, warmup_steps=4, overlap=overlap), model, lr=0.03)
        sent: list[float] = []
        for step in range(7):
            before = comm.meter.payload_bytes
            stepped(worker.optimizer, (model.parts[0] - comm.rank - step).square().sum())
            sent.append(comm.meter.payload_bytes - before)
        worker.detach()
        return sent

    gradient, codes = 2 * (size - 1) / size * 4 * 64, 2 * (size - 1) * (HEADER_BYTES + codec.nbytes(64 // size))
    for sent in thinwire.run_threads(size, body, timeout=20):
        assert sent == [gradient] * 4 + [codes] * 3


def test_small_buckets_are_sent_together_in_quarters_of_the_vector() -> None:
    def body(comm: Comm) -> tuple[list[int], Tensor]:
        model = Lengths([10] * 16)
        worker = begun(comm, OVERLAPPED, model, lr=0.03)
        sent: list[int] = []
        for step in range(7):
            before = comm.meter.messages
            stepped(worker.optimizer, torch.cat([*model.parts]).sub(comm.rank + step).square().sum())
            sent.append(comm.meter.messages - before)
        worker.detach()
        assert not worker.replicas[0].inflight
        return sent, flat(model)

    (sent, first), (_, second) = thinwire.run_threads(2, body, timeout=20)
    assert sent == [16] * 4 + [2 * 4] * 3
    assert torch.equal(first, second)
