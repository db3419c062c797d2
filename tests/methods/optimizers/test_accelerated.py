# SPDX-License-Identifier: Apache-2.0
"""Accelerated minibatch SGD: AC-SA equals its oracle, evaluates, resumes, and refuses what would undo it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.methods.strategies.local_runs import Make, begin, go_on
from tests.oracles import minibatch as oracles
from tests.problems import Regression, distance, flat
from tests.rules import for_each, refusals
from thinwire import AllReduce, Comm, ConfigError, Gossip, Local, LocalSGD, SlowMo, Strategy, Worker
from thinwire.methods.optimizers import AcSA
from thinwire.methods.strategies.local.minibatch_local_sgd import MinibatchLocalSGD
from thinwire.methods.strategies.wrappers.probe import Probe

DOUBLE = torch.float64


def acsa(lr: float = 0.05, **settings: Any) -> Make:
    return lambda model: AcSA(model.parameters(), lr, **settings)


def result(worker: Worker) -> Tensor:
    """What the model's parameters are for evaluation."""
    with worker.consensus() as model:
        return flat(model)


def rounds(comm: Comm, problem: Regression, make: Make, period: int, strategy: Strategy | None = None) -> Worker:
    """Accelerated minibatch SGD as the manual writes it; the loss is divided by the passes of a round."""
    worker = begin(comm, strategy or AllReduce(), problem, make)
    for first in range(0, problem.steps, period):
        worker.optimizer.zero_grad()
        with worker.no_sync():
            for step in range(first, first + period - 1):
                (problem.loss(worker.model, comm.rank, step) / period).backward()
        (problem.loss(worker.model, comm.rank, first + period - 1) / period).backward()
        worker.optimizer.step()
    return worker


def expected(n: int, steps: int, period: int, **settings: Any) -> tuple[Tensor, Tensor]:
    problem = Regression(n, steps, DOUBLE)
    start = problem.start.expand(n, -1)
    return oracles.accelerated(problem.gradient, start, 0.05, steps // period, period=period, **settings)


@pytest.mark.parametrize(("period", "stage"), [(1, None), (4, None), (2, 3), (1, 1)])
@pytest.mark.parametrize("n", [1, 3])
def test_it_equals_its_oracle(n: int, period: int, stage: int | None) -> None:
    problem = Regression(n, 12, DOUBLE)

    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        worker = rounds(comm, problem, acsa(restart_every=stage), period)
        return flat(worker.model), result(worker)

    real = [torch.stack(each) for each in zip(*thinwire.run_threads(n, body), strict=True)]
    for found, wanted in zip(real, expected(n, 12, period, stage=stage or float("inf")), strict=True):
        assert distance(found, wanted) < 1e-12


class Bowl(nn.Module):
    """A quadratic with given curvatures, whose optimum is the origin."""

    def __init__(self, curvatures: Tensor, start: Tensor) -> None:
        super().__init__()
        self.x, self.curvatures = nn.Parameter(start.clone()), curvatures

    def forward(self) -> Tensor:
        return (self.curvatures * self.x.square()).sum() / 2


def descend(bowl: Bowl, optimizer: AcSA, steps: int) -> float:
    """The value of the result after some steps."""
    for _ in range(steps):
        optimizer.zero_grad()
        bowl().backward()
        optimizer.step()
    with optimizer.evaluating(), torch.no_grad():
        return float(bowl())


def test_a_stage_as_long_as_the_strong_convexity_implies_is_that_stage() -> None:
    curvatures = torch.logspace(0, -2, 5, dtype=DOUBLE)
    ends: list[Tensor] = []
    for stage in ({"strong_convexity": 0.01}, {"restart_every": 40}):
        bowl = Bowl(curvatures, torch.ones(5, dtype=DOUBLE))
        descend(bowl, AcSA(bowl.parameters(), 0.5, **stage), 90)
        ends.append(bowl.x.detach())
    assert torch.equal(*ends)


def test_a_schedule_s_rates_are_those_of_the_steps() -> None:
    bowl = Bowl(torch.tensor([1.0, 0.1], dtype=DOUBLE), torch.ones(2, dtype=DOUBLE))
    optimizer = AcSA(bowl.parameters(), 0.4)
    x = aggregate = torch.ones(2, dtype=DOUBLE)
    for t, rate in enumerate((0.4, 0.0, 0.2, 0.1), 1):
        optimizer.param_groups[0]["lr"] = rate
        descend(bowl, optimizer, 1)
        a = 2 / (t + 1)
        x, aggregate = x - rate * t * bowl.curvatures * ((1 - a) * aggregate + a * x), aggregate
        aggregate = (1 - a) * aggregate + a * x
    with optimizer.evaluating():
        assert distance(bowl.x.detach(), aggregate) < 1e-14


def test_weight_decay_is_a_quadratic_in_the_loss() -> None:
    curvatures, start = torch.tensor([1.0, 0.1], dtype=DOUBLE), torch.ones(2, dtype=DOUBLE)
    decayed, added = Bowl(curvatures, start), Bowl(curvatures + 0.3, start)
    descend(decayed, AcSA(decayed.parameters(), 0.3, weight_decay=0.3), 7)
    descend(added, AcSA(added.parameters(), 0.3), 7)
    assert distance(decayed.x.detach(), added.x.detach()) < 1e-14


def test_a_closure_is_called_once_a_step() -> None:
    bowl, other = (Bowl(torch.ones(2, dtype=DOUBLE), torch.ones(2, dtype=DOUBLE)) for _ in range(2))
    optimizer, calls = AcSA(bowl.parameters(), 0.3), list[float]()

    def closure() -> float:
        optimizer.zero_grad()
        loss = bowl()
        loss.backward()
        calls.append(float(loss.detach()))
        return calls[-1]

    assert [optimizer.step(closure) for _ in range(3)] == calls
    descend(other, AcSA(other.parameters(), 0.3), 3)
    assert torch.equal(bowl.x, other.x)


def test_a_parameter_without_gradient_stays_where_it_is() -> None:
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((3,), 1.1))
    optimizer = AcSA([used, unused], 0.1)
    optimizer.step()
    assert not optimizer.state
    for _ in range(5):
        optimizer.zero_grad()
        used.square().sum().backward()
        optimizer.step()
    assert torch.equal(unused, torch.full((3,), 1.1))
    assert not torch.equal(used, torch.ones(3))


def test_evaluation_sees_the_result_and_training_goes_on_as_if_it_had_not() -> None:
    problem = Regression(2, 10, torch.float32)

    def body(comm: Comm, look: bool) -> tuple[Tensor, Tensor, Tensor]:
        worker = begin(comm, AllReduce(), problem, acsa())
        for step in range(10):
            go_on(worker, problem, range(step, step + 1))
            if look:
                result(worker)
        own = flat(worker.model)
        return own, result(worker), flat(worker.model)

    looked, blind = (thinwire.run_threads(2, partial(body, look=look)) for look in (True, False))
    for seen, unseen in zip(looked, blind, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(seen, unseen, strict=True))
        assert torch.equal(seen[0], seen[2])
        assert not torch.equal(seen[0], seen[1])


def test_evaluation_that_fails_puts_the_parameters_back() -> None:
    bowl = Bowl(torch.ones(2), torch.ones(2))
    optimizer = AcSA(bowl.parameters(), 0.1)
    with optimizer.evaluating():
        assert torch.equal(bowl.x, torch.ones(2))
    descend(bowl, optimizer, 3)
    before = bowl.x.detach().clone()
    with pytest.raises(RuntimeError, match="no"), optimizer.evaluating():
        raise RuntimeError("no")
    assert torch.equal(bowl.x, before)


@pytest.mark.parametrize("stop", [0, 3, 5])
def test_it_resumes_bit_for_bit(stop: int, tmp_path: Any) -> None:
    problem = Regression(2, 10, torch.float32)
    make = acsa(restart_every=4)

    def body(comm: Comm) -> list[Tensor]:
        one = go_on(begin(comm, AllReduce(), problem, make), problem, range(stop))
        one.save(tmp_path)
        go_on(one, problem, range(stop, 10))
        two = begin(comm, AllReduce(), problem, make)
        two.load(tmp_path)
        go_on(two, problem, range(stop, 10))
        return [flat(one.model), flat(two.model), result(one), result(two)]

    for one, two, its, their in thinwire.run_threads(2, body):
        assert torch.equal(one, two)
        assert torch.equal(its, their)


MOVERS = [LocalSGD(), Gossip(), SlowMo(), SlowMo(AllReduce()), MinibatchLocalSGD(inner=0.0)]


@for_each(MOVERS)
def test_strategies_whose_moves_it_would_undo_are_refused(strategy: Strategy) -> None:
    words = "would undo what the strategy does" if not isinstance(strategy, MinibatchLocalSGD) else "no_sync"
    with pytest.raises(ConfigError, match=words):
        begin(None, strategy, Regression(1, 1, DOUBLE), acsa())


@pytest.mark.parametrize("strategy", [AllReduce(), Local(), Probe(AllReduce())], ids=str)
def test_strategies_that_leave_the_parameters_alone_are_served(strategy: Strategy) -> None:
    problem = Regression(1, 4, DOUBLE)
    worker = go_on(begin(None, strategy, problem, acsa()), problem, range(4))
    start = problem.start[None]
    assert distance(result(worker)[None], oracles.accelerated(problem.gradient, start, 0.05, 4)[1]) < 1e-13


test_settings_that_cannot_work_are_refused = refusals(
    [
        ({"lr": 0.0}, r"lr=0.0: must be positive and finite. Up to 1/\(2L\)"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"strong_convexity": -1.0}, "strong_convexity=-1.0: must be finite and not negative"),
        ({"weight_decay": float("inf")}, "weight_decay=inf: must be finite"),
        ({"restart_every": 0}, "restart_every=0: must be at least 1"),
        ({"restart_every": 3, "strong_convexity": 0.1}, "both set the length of a stage"),
    ],
    lambda settings: AcSA([nn.Parameter(torch.ones(1))], **{"lr": 0.1, **settings}),
)
