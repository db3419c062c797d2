# SPDX-License-Identifier: Apache-2.0
"""The consensus model and its buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine import attach, batch, batches, drawn, flat, net, steps
from tests.problems import Irregular
from tests.rules import for_each
from thinwire import (
    AllReduce,
    Budget,
    Comm,
    ConfigError,
    DiLoCo,
    Gossip,
    Local,
    LocalSGD,
    PushSum,
    Quantize,
    SlowMo,
    Strategy,
    run_threads,
)
from thinwire.core.replica.replica import Replica
from thinwire.methods.strategies.base import At

STRATEGIES = [
    AllReduce(),
    Local(),
    LocalSGD(4),
    Gossip(),
    Gossip(order="after"),
    PushSum(),
    PushSum(Irregular()),
    SlowMo(Gossip(), period=4),
    SlowMo(PushSum(Irregular()), period=4),
]


def normed() -> nn.Sequential:
    return drawn(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_the_consensus_of_workers_that_average_is_their_mean(strategy: Strategy) -> None:
    def work(comm: Comm) -> tuple[Tensor, Tensor, bool]:
        worker = steps(attach(comm, strategy), batches(comm.rank, 7))
        before = flat(worker.model)
        with worker.consensus() as model:
            agreed = flat(model)
            assert model is worker.model
        return before, agreed, torch.equal(before, flat(worker.model))

    found = run_threads(3, work)
    assert all(restored for *_, restored in found)
    assert all(torch.equal(agreed, found[0][1]) for _, agreed, _ in found)
    if "Irregular" not in repr(strategy):
        torch.testing.assert_close(found[0][1], torch.stack([own for own, *_ in found]).mean(0))


def test_an_error_during_evaluation_still_puts_everything_back() -> None:
    def work(comm: Comm) -> bool:
        worker = steps(attach(comm, Local(), model=normed()), batches(comm.rank, 3))
        before = [x.clone() for x in worker.model.state_dict().values()]
        with pytest.raises(ZeroDivisionError), worker.consensus():
            _ = 1 / 0
        return all(torch.equal(x, y) for x, y in zip(before, worker.model.state_dict().values(), strict=True))

    assert run_threads(2, work) == [True, True]


@dataclass(frozen=True)
class Halfway(Strategy):
    """Fails while it computes the consensus."""

    def average(self, r: Replica, at: At = "now") -> Tensor:
        if r.x.dtype == torch.float64:
            raise ZeroDivisionError
        return torch.zeros_like(r.x)


def test_an_error_on_the_way_to_the_consensus_puts_everything_back() -> None:
    model = drawn(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2).double()))
    worker = attach(None, Halfway(), model=model)
    before = flat(model)
    with pytest.raises(ZeroDivisionError), worker.consensus():
        pytest.fail("there is no consensus")
    assert torch.equal(before, flat(model))


def test_batch_statistics_are_each_worker_s_own_and_averaged_in_the_consensus() -> None:
    def work(comm: Comm) -> tuple[Tensor, ...]:
        worker = steps(attach(comm, AllReduce(), model=normed()), batches(comm.rank, 4))
        norm = worker.model[1]
        own, seen = norm.running_mean.clone(), norm.num_batches_tracked.clone()
        with worker.consensus():
            shared, shared_seen = norm.running_mean.clone(), norm.num_batches_tracked.clone()
        assert torch.equal(own, norm.running_mean)
        return own, shared, seen, shared_seen

    found = run_threads(3, work)
    assert not torch.equal(found[0][0], found[1][0])
    mean = torch.stack([own for own, *_ in found]).mean(0)
    for _, shared, seen, shared_seen in found:
        torch.testing.assert_close(shared, mean)
        assert seen == shared_seen == 4


def test_counters_in_the_consensus_are_those_of_rank_zero() -> None:
    def work(comm: Comm) -> tuple[int, int]:
        model = normed()
        worker = attach(comm, Local(), model=model)
        model[1].num_batches_tracked.fill_(10 + comm.rank)
        with worker.consensus():
            shared = int(model[1].num_batches_tracked)
        return shared, int(model[1].num_batches_tracked)

    assert run_threads(2, work) == [(10, 10), (10, 11)]


def test_batch_statistics_are_not_sent_while_training() -> None:
    def work(comm: Comm) -> float:
        worker = attach(comm, AllReduce(), model=normed())
        before = comm.meter.payload_bytes
        steps(worker, batches(comm.rank, 3))
        return comm.meter.payload_bytes - before

    trained = sum(p.numel() for p in normed().parameters())
    assert run_threads(2, work) == [3 * 4 * trained] * 2


class Buffered(nn.Module):
    """A layer with one buffer."""

    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("buffer", buffer)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def bits(x: Tensor) -> list[int]:
    return x.to_dense().contiguous().view(torch.uint8).flatten().tolist()


CONSTANTS = {
    "least": torch.full((2, 2), torch.finfo(torch.float32).min),
    "mask": torch.full((3, 3), -torch.inf).triu(1),
    "half": torch.tensor([-6e4], dtype=torch.float16),
    "frequencies": 1 / 10000 ** (torch.arange(0, 64, 2) / 64),
    "NaN": torch.tensor([torch.nan, -0.0]),
    "float8": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
    "COO": torch.eye(3).to_sparse(),
    "expanded": torch.ones(1).expand(4),
    "complex": torch.polar(torch.ones(4), torch.arange(4.0)),
    "wide": torch.polar(torch.ones(4), torch.arange(4.0)).to(torch.complex128),
    "bool": torch.tensor([True, False]),
    "none": torch.empty(0),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@for_each([*CONSTANTS, "CSR"])
def test_a_buffer_that_is_equal_on_all_ranks_keeps_its_bits(name: str) -> None:
    buffer = torch.eye(3).to_sparse_csr() if name == "CSR" else CONSTANTS[name]
    wanted = bits(buffer)

    def work(comm: Comm) -> None:
        # A copy of an expanded tensor has memory for all its elements.
        own = torch.ones(1).expand(4) if buffer.shape == (4,) and not buffer.is_complex() else buffer.clone()
        model = drawn(Buffered(own))
        worker = steps(attach(comm, LocalSGD(2), model=model), batches(comm.rank, 1))
        with worker.consensus():
            assert bits(model.buffer) == wanted
        assert bits(model.buffer) == wanted

    run_threads(3, work)


@for_each([(torch.float16, 6e4), (torch.bfloat16, 6e4), (torch.float32, 3e38), (torch.float64, 1e308)])
def test_the_mean_of_large_buffers_does_not_overflow(case: tuple[torch.dtype, float]) -> None:
    dtype, wanted = case

    def work(comm: Comm) -> Tensor:
        model = drawn(Buffered(torch.zeros(2, dtype=dtype)))
        worker = attach(comm, Local(), model=model)
        model.buffer.copy_(torch.tensor([wanted, comm.rank], dtype=torch.float64))
        with worker.consensus():
            return model.buffer.clone()

    for found in run_threads(2, work):
        torch.testing.assert_close(found, torch.tensor([wanted, 0.5], dtype=torch.float64).to(dtype))


def test_buffers_that_cannot_be_added_are_those_of_rank_zero_at_the_start_and_in_the_consensus() -> None:
    def work(comm: Comm) -> tuple[Tensor, ...]:
        model = drawn(Buffered(torch.full((2,), 1.0 + comm.rank).to(torch.float8_e5m2)))
        model.frozen = nn.Parameter(torch.full((2,), 1.0 + comm.rank).to(torch.float8_e4m3fn), requires_grad=False)
        worker = attach(comm, Local(), model=model, optimizer=lambda m: torch.optim.SGD(m.layer.parameters(), lr=0.1))
        begins = model.buffer.float(), model.frozen.float()
        model.buffer.copy_(torch.tensor([4.0, 4.0 + comm.rank]))
        with worker.consensus():
            agreed = model.buffer.float()
        return *begins, agreed, model.buffer.float()

    for rank, (buffer, frozen, agreed, own) in enumerate(run_threads(2, work)):
        assert buffer.tolist() == frozen.tolist() == [1.0, 1.0]
        assert agreed.tolist() == [4.0, 4.0]
        assert own.tolist() == [4.0, 4.0 + rank]


def test_sparse_buffers_that_differ_are_refused_by_name_on_all_ranks() -> None:
    def work(comm: Comm) -> None:
        with pytest.raises(ConfigError, match=r"buffer has layout torch.sparse_coo and differs between ranks"):
            attach(comm, Local(), model=drawn(Buffered((torch.eye(3) * (1 + comm.rank)).to_sparse())))

    run_threads(2, work)


def test_all_buffers_are_compared_in_one_message() -> None:
    def work(comm: Comm) -> float:
        worker = attach(comm, AllReduce(), model=normed())
        before = comm.meter.messages
        with worker.consensus():
            return comm.meter.messages - before

    assert run_threads(2, work) == [2, 2]  # what buffers there are, and their bits


AVERAGED = [
    LocalSGD(4),
    LocalSGD(4, weights="samples"),
    LocalSGD(4, codec=Quantize(4)),
    SlowMo(PushSum(), period=4),
    DiLoCo(period=4),
]


@for_each(AVERAGED)
def test_parameters_are_not_sent_right_after_an_average(strategy: Strategy) -> None:
    def work(comm: Comm) -> list[tuple[int, bool, float]]:
        worker, found = attach(comm, strategy), list[tuple[int, bool, float]]()
        for data in batches(comm.rank, 8):
            steps(worker, [data])
            own, before = flat(worker.model), comm.meter.payload_bytes
            with worker.consensus() as model:
                found.append((worker.step, torch.equal(own, flat(model)), comm.meter.payload_bytes - before))
        return found

    for step, unchanged, sent in run_threads(3, work)[0]:
        assert unchanged == (sent == 0) == (step % 4 == 0)


@for_each([[1], [0, 1, 2]])
def test_parameters_that_were_changed_since_the_average_are_averaged(changed: list[int]) -> None:
    def work(comm: Comm) -> tuple[Tensor, Tensor]:
        worker = steps(attach(comm, LocalSGD(2)), batches(comm.rank, 2))
        with torch.no_grad():
            if comm.rank in changed:
                worker.model[0].bias[1] += 3.0 + comm.rank
        own = flat(worker.model)
        with worker.consensus() as model:
            return own, flat(model)

    found = run_threads(3, work)
    for _, agreed in found:
        torch.testing.assert_close(agreed, torch.stack([own for own, _ in found]).mean(0))


def test_values_assigned_to_data_are_averaged_and_dropped_at_the_end() -> None:
    def work(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        worker = steps(attach(comm, LocalSGD(4)), batches(comm.rank, 2))
        for parameter in worker.model.parameters():
            parameter.data = parameter.data + 1.0 + comm.rank
        own = flat(worker.model)
        with worker.consensus() as model:
            agreed = flat(model)
            model.half().float()
        assert torch.equal(own, flat(worker.model))
        return own, agreed, flat(steps(worker, batches(comm.rank, 2, first=2)).model)

    found = run_threads(2, work)
    for _, agreed, after in found:
        torch.testing.assert_close(agreed, torch.stack([own for own, *_ in found]).mean(0))
        assert torch.equal(after, found[0][2])


def test_autocast_around_the_consensus_sees_its_parameters() -> None:
    def work(comm: Comm) -> None:
        worker = steps(attach(comm, LocalSGD(4)), batches(comm.rank, 2))
        model, (x, _) = worker.model, batch(0, 0)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            own = model(x)
            with worker.consensus():
                agreed = model(x)
            again = model(x)
        with torch.no_grad(), worker.consensus(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(agreed, model(x))
        assert torch.equal(own, again) and not torch.equal(own, agreed)

    run_threads(2, work)


@for_each([LocalSGD(4), DiLoCo(period=4), SlowMo(PushSum(), period=4)])
def test_a_consensus_in_a_consensus_changes_nothing(strategy: Strategy) -> None:
    def work(comm: Comm) -> None:
        worker = steps(attach(comm, strategy), batches(comm.rank, 6))
        own = flat(worker.model)
        with worker.consensus() as model:
            agreed = flat(model)
            with worker.consensus():
                assert torch.equal(agreed, flat(model))
            assert torch.equal(agreed, flat(model))
        assert torch.equal(own, flat(worker.model)) and not torch.equal(own, agreed)

    run_threads(3, work)


class ScheduleFree(torch.optim.Optimizer):
    """SGD whose model in training is a point between an iterate and its average, as in Defazio et al., 2024."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "beta": 0.9, "count": 0, "train_mode": False})

    @torch.no_grad()
    def _turn(self, weight: float, *, trains: bool) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] != trains else []:
                if p in self.state:
                    p.data.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = trains

    def train(self) -> None:
        self._turn(1 - 0.9, trains=True)

    def eval(self) -> None:
        self._turn(1 - 1 / 0.9, trains=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        assert group["train_mode"]
        group["count"] += 1
        share, lr, beta = 1 / group["count"], group["lr"], group["beta"]
        for p in group["params"]:
            z = self.state[p].setdefault("z", p.clone())
            p.lerp_(z, share).add_(p.grad, alpha=lr * (beta * (1 - share) - 1))
            z.sub_(p.grad, alpha=lr)


@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(4)], ids=str)
def test_a_schedule_free_optimizer_is_evaluated_at_its_average(strategy: Strategy) -> None:
    def work(comm: Comm, *, evaluates: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        worker = attach(comm, strategy, optimizer=lambda model: ScheduleFree(model.parameters()))
        made: Any = worker.optimizer
        agreed = None
        for step in (0, 3):
            made.train()
            steps(worker, batches(comm.rank, 3, step))
            if evaluates:
                with worker.consensus() as model:
                    made.eval()  # as trainers do, which call `train()` before the next step
                    agreed = flat(model)
        made.train()
        own = flat(worker.model)
        made.eval()
        return own, flat(worker.model), agreed

    plain, evaluated = (run_threads(2, lambda comm, e=e: work(comm, evaluates=e)) for e in (False, True))
    mean = torch.stack([result for _, result, _ in plain]).mean(0)
    for (own, result, _), (same, _, agreed) in zip(plain, evaluated, strict=True):
        assert torch.equal(own, same) and not torch.allclose(own, result)
        torch.testing.assert_close(agreed, mean)


def test_a_frozen_teacher_that_the_loop_updates_is_averaged() -> None:
    def work(comm: Comm) -> tuple[Tensor, Tensor]:
        model = net()
        model.append(nn.Linear(2, 2).requires_grad_(False))
        student = lambda m: torch.optim.SGD([*m[0].parameters(), *m[2].parameters()], lr=0.1)  # noqa: E731
        worker = steps(attach(comm, LocalSGD(4), model=model, optimizer=student), batches(comm.rank, 2))
        model[3].weight.data.mul_(0.9).add_(1.0 + comm.rank)
        own, bias = model[3].weight.clone(), model[3].bias.clone()
        with worker.consensus():
            agreed = model[3].weight.clone()
            assert torch.equal(bias, model[3].bias)
        assert torch.equal(own, model[3].weight)
        return own, agreed

    found = run_threads(2, work)
    for _, agreed in found:
        torch.testing.assert_close(agreed, (found[0][0] + found[1][0]) / 2)


def test_an_average_that_was_postponed_is_taken_in_the_consensus() -> None:
    def work(comm: Comm) -> tuple[Tensor, Tensor]:
        worker = attach(comm, Budget(LocalSGD(2), "0.001kB/step"))
        steps(worker, batches(comm.rank, 4))
        own = flat(worker.model)
        with worker.consensus() as model:
            return own, flat(model)

    found = run_threads(2, work)
    assert not torch.equal(found[0][0], found[1][0])
    for _, agreed in found:
        torch.testing.assert_close(agreed, torch.stack([own for own, _ in found]).mean(0))
