# SPDX-License-Identifier: Apache-2.0
"""A simulated run ends with the bits of a run on threads or on processes, whatever its network."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.battery.cases import STRATEGIES, is_of_a_family
from tests.battery.runs import Case, ended, together
from tests.battery.test_processes import FIRST
from tests.grids import fast_where
from tests.planning.simulate.helpers import setting_of, simulated
from tests.pool import run_processes
from tests.problems import distance, flat
from thinwire import Comm, Strategy
from thinwire.planning import simulate
from thinwire.planning.simulate import Network
from thinwire.worker.worker import internals_of

DETERMINISTIC = [each for each in STRATEGIES if each.reproducible]


@pytest.mark.parametrize("each", fast_where(is_of_a_family, DETERMINISTIC), ids=str)
def test_two_simulated_workers_do_bit_for_bit_what_threads_do(each: Case) -> None:
    setting = setting_of(each, 2)
    if 2 in each.refuses:
        pytest.skip("not for two workers")
    assert torch.equal(simulated(setting), together(setting))


def on_a_process(size: int) -> list[list[float]]:
    return [ended(None, setting_of(each, size))[0].tolist() for each in FIRST]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_simulated_workers_do_what_processes_do(size: int) -> None:
    rows = run_processes(size, on_a_process, size)
    for place, each in enumerate(FIRST):
        setting = setting_of(each, size)
        real, found = torch.tensor([row[place] for row in rows], dtype=setting.dtype), simulated(setting)
        if size == 2:  # where Gloo adds in the order of ranks
            assert torch.equal(found, real), str(each)
        else:
            assert distance(found, real) < (1e-12 if each.exact else 2e-5), str(each)


EXACT: list[Strategy] = [
    thinwire.AllReduce(),
    thinwire.LocalSGD(3),
    thinwire.CoCoD(3),
    thinwire.SlowMo(period=3, lr=1.0, momentum=0.5),
    thinwire.Gossip(thinwire.Hypercube()),
    thinwire.PushSum(thinwire.Hypercube()),
    thinwire.PushSum(staleness=1),
]


def sums_exactly(comm: Comm | None, strategy: Strategy) -> list[float]:
    """Gradients, rates and shares that are small multiples of powers of two: every order of a sum is exact."""
    model = nn.ParameterList([torch.zeros(6, dtype=torch.float64)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    worker = thinwire.attach(model, optimizer, strategy, comm=comm)
    for step in range(6):
        model[0].grad = torch.arange(6, dtype=torch.float64) + worker.comm.rank * (step % 3) - model[0].detach() / 4
        if (backward := internals_of(worker).backward) is not None:
            backward.flush()
        optimizer.step()
    worker.detach()
    return flat(model).tolist()


def all_exact(comm: Comm | None) -> list[list[float]]:
    return [sums_exactly(comm, strategy) for strategy in EXACT]


def test_four_simulated_workers_do_bit_for_bit_what_threads_and_processes_do_where_sums_are_exact() -> None:
    found = simulate.run(4, all_exact, network=Network(bits_per_second=1e6))
    assert found == thinwire.run_threads(4, all_exact, timeout=20)
    assert found == run_processes(4, all_exact, None)


@pytest.mark.parametrize("each", fast_where(lambda each: each in DETERMINISTIC[::15], DETERMINISTIC[::5]), ids=str)
@pytest.mark.slow
def test_more_workers_do_bit_for_bit_what_threads_do(each: Case) -> None:
    setting = setting_of(each, 5)
    if 5 in each.refuses:
        pytest.skip("not for five workers")
    assert torch.equal(simulated(setting), together(setting))


TIMED = (
    thinwire.EagerPushSum(staleness=2),
    thinwire.ADPSGD(),
    thinwire.AsyncLeaderSGD(3, pull=0.3),
    thinwire.BackupWorkers(),
    thinwire.ParameterServer(),
)


@pytest.mark.parametrize("strategy", TIMED, ids=str)
@pytest.mark.slow
def test_methods_that_depend_on_timing_depend_on_the_seed_alone(strategy: Strategy) -> None:
    each = next(each for each in STRATEGIES if type(each.strategy) is type(strategy))
    setting = setting_of(replace(each, strategy=strategy, lockstep=False), 4)

    def run(seed: int) -> Tensor:
        return simulated(setting, seed=seed)

    first = run(1)
    assert torch.equal(first, run(1))
    assert any(not torch.equal(first, run(seed)) for seed in range(2, 6))
