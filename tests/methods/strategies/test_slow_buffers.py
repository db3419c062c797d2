# SPDX-License-Identifier: Apache-2.0
"""What becomes of the optimizer's own state at a slow step, and slow steps without an average."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import thinwire
from tests import engine
from tests.grids import fast_where
from tests.methods.strategies.local_runs import Make, adamw, ended, sent, sgd
from tests.oracles.common import Descent, Mixing, one_peer
from tests.oracles.machines import Machine, Pushed, SlowMomentum, path
from tests.oracles.updates import AdamW
from tests.problems import Regression, distance
from tests.rules import for_each
from thinwire import Comm, ConfigError, Local, PushSum, SlowMo
from thinwire.core.replica.flat import lay_out
from thinwire.core.replica.moments import Moments, fresh_optimizer, moment_names
from thinwire.methods.optimizers.lamb import Lamb
from thinwire.methods.optimizers.one_bit_adam import OneBitAdam

DOUBLE = torch.float64
STEPS = 16
SLOW: dict[str, Any] = {"period": 4, "momentum": 0.6, "lr": 0.9}
RATES = [0.05] * STEPS
WORKERS: dict[str, tuple[Make, Callable[[], Descent | AdamW]]] = {
    "momentum": (sgd(0.05), lambda: Descent(RATES, momentum=0.9)),
    "adamw": (adamw(0.05), lambda: AdamW(RATES)),
}


def expected(
    n: int, worker: str, *, buffers: str = "maintain", mixing: Mixing | None = None, exact: bool = True
) -> Tensor:
    problem, own = Regression(n, STEPS, DOUBLE), WORKERS[worker][1]()

    def update(x: Tensor, g: Tensor, k: int) -> Tensor:
        if k % SLOW["period"] == 0 and buffers == "reset":
            own.forget()
        if k % SLOW["period"] == 0 and k and buffers == "average":
            own.average()
        return own(x, g, k)

    machine = SlowMomentum(Pushed(mixing) if mixing else Machine(), **SLOW, exact=exact)
    return path(machine, problem.gradient, problem.start.expand(n, -1), update, RATES)[-1]


@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize(
    ("buffers", "gossiping"),
    fast_where(lambda each: each != ("maintain", False), product(["maintain", "reset", "average"], [False, True])),
)
def test_each_treatment_of_the_optimizer_s_state_equals_its_oracle(worker: str, buffers: Any, gossiping: bool) -> None:
    base = PushSum() if gossiping else Local()
    mixing = one_peer(3, DOUBLE) if gossiping else None
    strategy = SlowMo(base, buffers=buffers, **SLOW)
    real = ended(3, strategy, Regression(3, STEPS, DOUBLE), STEPS, WORKERS[worker][0])
    assert distance(real, expected(3, worker, buffers=buffers, mixing=mixing)) < 1e-12


def test_averaged_moments_cost_one_all_reduce_of_their_size() -> None:
    problem = Regression(4, 8, torch.float32)
    vector = 2 * 3 / 4 * 4 * 34
    for make, moments in [(sgd(), 1), (adamw(), 2), (sgd(momentum=0.0), 0)]:
        (nbytes, messages), *_ = sent(4, SlowMo(period=4, buffers="average"), problem, 8, make)
        assert nbytes == pytest.approx(2 * vector * (1 + moments))
        assert messages == 2 + 2 * (moments > 0)
    assert sent(4, SlowMo(period=4, buffers="reset"), problem, 8, sgd()) == [(2 * vector, 2)] * 4


@pytest.mark.parametrize("n", [1, 3])
def test_without_averages_nothing_is_sent_and_each_worker_takes_slow_steps_of_its_own(n: int) -> None:
    strategy = SlowMo(exact=False, **SLOW)
    problem = Regression(n, STEPS, DOUBLE)
    real = ended(n, strategy, problem, STEPS, sgd(0.05))
    assert distance(real, expected(n, "momentum", exact=False)) < 1e-12
    assert sent(n, strategy, problem, STEPS, sgd(0.05)) == [(0.0, 0)] * n
    if n == 1:
        assert torch.equal(real, ended(n, SlowMo(**SLOW), problem, STEPS, sgd(0.05)))


def test_push_sum_without_averages_equals_its_oracle_and_sends_no_more_than_push_sum() -> None:
    strategy = SlowMo(PushSum(), exact=False, **SLOW)
    problem = Regression(4, STEPS, DOUBLE)
    real = ended(4, strategy, problem, STEPS, sgd(0.05))
    assert distance(real, expected(4, "momentum", exact=False, mixing=one_peer(4, DOUBLE))) < 1e-12
    assert sent(4, strategy, problem, STEPS, sgd()) == sent(4, PushSum(), problem, STEPS, sgd())


# -- the optimizer's state, by itself ----------------------------------------------------------------------------------

KINDS: list[tuple[type[Optimizer], dict[str, Any], tuple[str, ...]]] = [
    (torch.optim.SGD, {"lr": 0.1}, ()),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, ("momentum_buffer",)),
    (torch.optim.AdamW, {"amsgrad": True}, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}, ("sum",)),
    (torch.optim.RMSprop, {"momentum": 0.9}, ("momentum_buffer", "square_avg")),
    (torch.optim.NAdam, {}, ("exp_avg", "exp_avg_sq")),
    (torch.optim.Adadelta, {}, ("acc_delta", "square_avg")),
    (Lamb, {"lr": 0.1}, ("momentum", "variance")),  # counts steps in its groups
]


@for_each(KINDS)
def test_a_reset_optimizer_continues_as_a_new_one(
    case: tuple[type[Optimizer], dict[str, Any], tuple[str, ...]],
) -> None:
    kind, settings, names = case

    def step(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.detach() - 1
        optimizer.step()

    make: Any = kind
    parameters = [nn.Parameter(torch.full((2, 3), 3.0)), nn.Parameter(torch.full((4,), 2.0))]
    used = make(parameters, **settings)
    assert moment_names(used) == names
    for _ in range(3):
        step(used)
    untouched = [parameter.detach().clone() for parameter in parameters]
    Moments(used, parameters, lay_out([("a", parameters[0]), ("b", parameters[1])])).forget()
    copies = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    new = make(copies, **settings)
    for _ in range(2):
        step(used)
        step(new)
    assert all(torch.equal(p, q) for p, q in zip(parameters, copies, strict=True))
    assert not any(torch.equal(p, q) for p, q in zip(parameters, untouched, strict=True))


def test_a_replica_resets_only_its_own_parameters_state() -> None:
    mine, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([mine, other], lr=0.1, momentum=0.9)
    mine.grad, other.grad = torch.ones(2), torch.ones(2)
    optimizer.step()
    Moments(optimizer, [mine], lay_out([("mine", mine)])).forget()
    assert mine not in optimizer.state
    assert torch.equal(optimizer.state[other]["momentum_buffer"], torch.ones(2))


def test_a_group_of_two_replicas_counts_from_zero_once_both_have_forgotten() -> None:
    mine, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = Lamb([mine, other], lr=0.1)
    mine.grad, other.grad = torch.ones(2), torch.ones(2)
    optimizer.step()
    counts: list[int] = []
    for parameter in (mine, other):
        Moments(optimizer, [parameter], lay_out([("", parameter)])).forget()
        counts.append(optimizer.param_groups[0]["step"])
    assert counts == [1, 0]


def test_a_rank_without_moments_counts_as_zero_and_no_rank_hangs() -> None:
    def body(comm: Comm) -> list[float]:
        parameter = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        if comm.rank:
            parameter.grad = torch.full((2,), 3.0 * comm.rank)
            optimizer.step()
        Moments(optimizer, [parameter], lay_out([("", parameter)])).average_(comm)
        state: dict[str, Tensor] = optimizer.state.get(parameter, {})
        return state["momentum_buffer"].tolist() if state else []

    assert thinwire.run_threads(3, body) == [[], [3.0, 3.0], [3.0, 3.0]]


def test_moments_in_fp32_of_parameters_in_sixteen_bits_have_means_in_fp32() -> None:
    def body(comm: Comm) -> Tensor:
        model = nn.ParameterList([torch.ones(3, dtype=torch.float16)])
        optimizer = OneBitAdam(model.parameters(), lr=0.01)
        worker = thinwire.attach(model, optimizer, SlowMo(period=1, buffers="average"), comm=comm)
        model[0].grad = torch.full_like(model[0], 2.0**-8 * (1 + comm.rank))
        optimizer.step()
        worker.detach()
        return optimizer.state[model[0]]["variance"]

    # A thousandth of the mean square: fp16 has no number between 0 and 6e-8.
    expected = torch.full((3,), 1e-3 * 2.0**-16 * (1 + 4) / 2)
    for variance in thinwire.run_threads(2, body):
        assert variance.dtype == torch.float32
        assert torch.allclose(variance, expected, rtol=1e-4, atol=0)


def test_averaged_moments_cost_the_bytes_in_which_the_optimizer_keeps_them() -> None:
    problem = Regression(4, 8, torch.bfloat16)
    vector = 2 * 3 / 4 * 34
    own: Make = lambda model: OneBitAdam(model.parameters(), lr=0.01)  # noqa: E731
    for make, nbytes in [(sgd(), 2), (adamw(), 2 * 2), (own, 3 * 4)]:  # momentum, variance and master
        plain, _ = sent(4, SlowMo(period=4), problem, 8, make)[0]
        averaged, _ = sent(4, SlowMo(period=4, buffers="average"), problem, 8, make)[0]
        assert averaged - plain == pytest.approx(2 * vector * nbytes)


class WithSecret(torch.optim.SGD):
    """Needs more than parameters."""

    def __init__(self, parameters: Any, secret: int) -> None:
        super().__init__(parameters, lr=0.1 * secret)


def test_optimizers_that_cannot_be_made_anew_are_refused_where_that_would_be_needed() -> None:
    model = nn.Linear(2, 2)
    optimizer = WithSecret(model.parameters(), secret=2)
    SlowMo().check(2, optimizer)
    with pytest.raises(ConfigError, match="WithSecret: cannot be created from its parameter groups"):
        SlowMo(buffers="reset").check(2, optimizer)
    with pytest.raises(ConfigError, match="LBFGS: its state is unknown"):
        thinwire.attach(model, torch.optim.LBFGS(model.parameters()), SlowMo(buffers="average"))
    assert not fresh_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)).state


@pytest.mark.parametrize("buffers", ["reset", "average"])
def test_parameters_of_two_kinds_have_slow_steps_and_moments_of_their_own(buffers: Any) -> None:
    def body(comm: Comm) -> list[list[Tensor]]:
        model = engine.drawn(engine.Mixed())
        strategy = SlowMo(period=3, momentum=0.5, buffers=buffers)
        worker = engine.attach(comm, strategy, model=model)
        engine.steps(worker, engine.batches(comm.rank, 6))
        optimizer = worker.optimizer
        moments = [optimizer.state[p]["momentum_buffer"] for p in model.parameters() if p in optimizer.state]
        return [[r.x.clone() for r in worker.replicas], [moment.clone() for moment in moments]]

    (x, moments), (y, others) = thinwire.run_threads(2, body)
    assert [each.dtype for each in x] == [torch.float32, torch.float64]
    assert all(torch.equal(a, b) for a, b in zip(x, y, strict=True))
    assert len(moments) == (6 if buffers == "average" else 0)
    assert all(torch.equal(a, b) for a, b in zip(moments, others, strict=True))
