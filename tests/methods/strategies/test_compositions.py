# SPDX-License-Identifier: Apache-2.0
"""Every strategy under every wrapper: equal to an oracle, or refused before the first step."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import cos
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.oracles import common
from tests.oracles import machines as m
from tests.oracles.common import Descent, Mixing
from tests.oracles.machines import Fragments, Machine, Nodes, SlowMomentum
from tests.problems import Irregular, Quadratic, average_outside, distance, flat, quadratic
from tests.rules import for_each
from thinwire import (
    ADPSGD,
    DQSGD,
    EASGD,
    AllReduce,
    AsyncLeaderSGD,
    BackupWorkers,
    Budget,
    Choco,
    CoCoD,
    Comm,
    CompressedMomentum,
    ConfigError,
    DecentLaM,
    DiLoCo,
    DoubleAveraging,
    EagerPushSum,
    ErrorFeedback,
    ExactDiffusion,
    FetchSGD,
    Fp32,
    Gossip,
    LeaderGradientDescent,
    LeaderSGD,
    Local,
    LocalSGD,
    MinibatchLocalSGD,
    MultiLeaderSGD,
    Nearest,
    NodeAverage,
    NoLoCo,
    Offloaded,
    OuterOptimizer,
    OverlapLocalSGD,
    Paced,
    ParameterServer,
    Probe,
    PushSum,
    QuasiGlobal,
    Ring,
    Sharded,
    SketchedSGD,
    SlowMo,
    Strategy,
    Streaming,
    Worker,
    ZeroOne,
)
from thinwire.methods.optimizers.one_bit_adam import OneBitAdam
from thinwire.methods.optimizers.zero_one_adam import ZeroOneAdam
from thinwire.registry import REGISTERED

DOUBLE = torch.float64
STEPS = 12  # two slow steps of five, and two steps more
RATES = [0.1 + 0.05 * cos(k) for k in range(STEPS)]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Oracle = Callable[[int, int], Machine]  # of the number of workers, and the steps that it is ahead


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def one_bit_adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return OneBitAdam(parameters, lr=1.0)


def zero_one_adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return ZeroOneAdam(parameters, lr=1.0)


@dataclass(frozen=True)
class Case:
    """A strategy as a base, and what it is compared to.

    Attributes:
        strategy: the base.
        oracle: its machine. None: all workers are equal, and what the real optimizer did is recorded and replayed.
        refused: by the name of a wrapper, the reason for which it refuses this base.
        constant: gradients do not depend on the parameters, so that the mean does not depend on timing.
        tolerance: relative; payloads in fp32 need more.
        optimizer: of the workers.
    """

    strategy: Strategy
    oracle: Oracle | None = None
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    constant: bool = False
    tolerance: float = 1e-9
    optimizer: Make = sgd

    def machine(self, n: int, ahead: int) -> Machine:
        """The oracle, or a machine that moves as the real optimizers did."""
        return self.oracle(n, ahead) if self.oracle else Machine()


def ring(n: int) -> Mixing:
    return common.ring(n, DOUBLE)


def momentum_of(rule: Callable[..., tuple[Tensor, Tensor]]) -> Oracle:
    return lambda n, ahead: m.Momentum(ring(n), rule, momentum=0.5)


WRAPPER_NAMES = ("SlowMo", "SlowMo without averages", "DiLoCo", "Sharded", "Offloaded", "Probe")
IN_FLIGHT = {"SlowMo without averages": "own parameters do not estimate"}
EVEN = {"SlowMo without averages": "own parameters do not estimate|needs an even number"}
NO_PERIOD = {"Streaming": "has no period", "Probe": "neither sends gradients nor ends rounds"}
NOT_MEASURED = {"Probe": "neither sends gradients nor ends rounds"}
OWN_PARAMETERS = {**NOT_MEASURED, **IN_FLIGHT}
EVERY_STEP = {**NO_PERIOD, **IN_FLIGHT}
ONE_OUTER_STEP = dict.fromkeys(
    ("SlowMo", "SlowMo without averages", "DiLoCo", "Sharded", "Offloaded"), "outer steps cannot be nested"
)
GRADIENTS = {"Streaming": "has no period"}
OUTER = {**ONE_OUTER_STEP, **NOT_MEASURED}
EXACT = (Fp32(), ErrorFeedback(Fp32()))
MOMENTA = {**GRADIENTS, "Probe": "does not average plain gradients at every step"}
BASES: dict[str, list[Case]] = {
    "Local": [Case(Local(), lambda n, a: Machine(a), {"Streaming": "has no period"})],
    "LocalSGD": [
        Case(LocalSGD(2), lambda n, a: m.Means(2, a)),
        Case(LocalSGD(5), lambda n, a: m.Means(5, a)),
        Case(LocalSGD(2, codec=Fp32()), lambda n, a: m.Means(2, a), IN_FLIGHT, tolerance=1e-6),
    ],
    "CoCoD": [
        Case(CoCoD(2), lambda n, a: m.Decoupled(2, a), OWN_PARAMETERS),
        Case(CoCoD(5), lambda n, a: m.Decoupled(5, a), OWN_PARAMETERS),
        *(Case(CoCoD(2, codec), lambda n, a: m.Decoupled(2, a), OWN_PARAMETERS, tolerance=1e-6) for codec in EXACT),
    ],
    "OverlapLocalSGD": [
        Case(OverlapLocalSGD(2), lambda n, a: m.Overlap(2, a), OWN_PARAMETERS),
        Case(OverlapLocalSGD(5), lambda n, a: m.Overlap(5, a), OWN_PARAMETERS),
        *(
            Case(OverlapLocalSGD(2, codec=codec), lambda n, a: m.Overlap(2, a), OWN_PARAMETERS, tolerance=1e-6)
            for codec in EXACT
        ),
    ],
    "EASGD": [
        Case(EASGD(2, centre_pull=0.8), lambda n, a: m.Elastic(2, a, centre_pull=0.8), OWN_PARAMETERS),
        Case(EASGD(3, momentum=0.5), lambda n, a: m.Elastic(3, a, momentum=0.5), OWN_PARAMETERS),
        *(
            Case(
                EASGD(3, momentum=0.5, codec=codec),
                lambda n, a: m.Elastic(3, a, momentum=0.5),
                OWN_PARAMETERS,
                tolerance=1e-6,
            )
            for codec in EXACT
        ),
    ],
    "MinibatchLocalSGD": [
        Case(MinibatchLocalSGD(2), lambda n, a: m.TwoRates(2, a), OWN_PARAMETERS),
        Case(MinibatchLocalSGD(2, codec=EXACT[1]), lambda n, a: m.TwoRates(2, a), OWN_PARAMETERS, tolerance=1e-6),
        Case(MinibatchLocalSGD(3, inner=0.0), lambda n, a: m.TwoRates(3, a, inner=0.0), OWN_PARAMETERS),
    ],
    "Gossip": [
        Case(Gossip(), lambda n, a: m.Mixed(ring(n)), EVERY_STEP),
        Case(Gossip(order="after"), lambda n, a: m.Mixed(ring(n), after=True), NO_PERIOD),
    ],
    "PushSum": [
        Case(PushSum(), lambda n, a: m.Pushed(common.one_peer(n, DOUBLE)), NO_PERIOD),
        Case(PushSum(Irregular()), lambda n, a: m.Pushed(common.irregular(n, DOUBLE)), EVERY_STEP),
        Case(PushSum(staleness=2), lambda n, a: m.Pushed(common.one_peer(n, DOUBLE), staleness=2), EVERY_STEP),
    ],
    "EagerPushSum": [
        Case(EagerPushSum(staleness=0), lambda n, a: m.Pushed(common.one_peer(n, DOUBLE)), EVERY_STEP),
        Case(EagerPushSum(), lambda n, a: Machine(), EVERY_STEP, constant=True),
    ],
    "DecentLaM": [Case(DecentLaM(momentum=0.5), momentum_of(m.decentlam), NO_PERIOD)],
    "NoLoCo": [
        Case(
            NoLoCo(Ring(), 2, lr=0.6, momentum=0.4),
            lambda n, a: m.Pairs(ring(n), 2, a, lr=0.6, momentum=0.4),
            OWN_PARAMETERS,
        )
    ],
    "QuasiGlobal": [Case(QuasiGlobal(Ring(), momentum=0.5), momentum_of(m.quasi_global), NO_PERIOD)],
    "DoubleAveraging": [Case(DoubleAveraging(momentum=0.5), momentum_of(m.double_averaging), NO_PERIOD)],
    "ExactDiffusion": [Case(ExactDiffusion(momentum=0.5), lambda n, a: m.ExactDiffusion(ring(n), 0.5), NO_PERIOD)],
    "Choco": [
        Case(Choco(codec=Fp32(), step_size=0.7), lambda n, a: m.PublicCopies(ring(n), 0.7), EVERY_STEP, tolerance=1e-6)
    ],
    "LeaderSGD": [Case(LeaderSGD(2, pull=0.3), lambda n, a: m.Leader(2, a), OWN_PARAMETERS)],
    "MultiLeaderSGD": [
        Case(
            MultiLeaderSGD(2, pull=0.3, node_size=1, global_period=2, global_pull=0.3),
            lambda n, a: m.Leader(2, a),
            OWN_PARAMETERS,
        )
    ],
    "LeaderGradientDescent": [Case(LeaderGradientDescent(pull=0.5), lambda n, a: m.LeaderGradient(0.5), EVERY_STEP)],
    "AsyncLeaderSGD": [
        Case(
            AsyncLeaderSGD(2, pull=0.0),
            lambda n, a: Machine(),
            {**OWN_PARAMETERS, "Streaming": "no common schedule"},
            constant=True,
        )
    ],
    "ADPSGD": [Case(ADPSGD(), lambda n, a: Machine(), {**EVERY_STEP, **EVEN}, constant=True)],
    "ParameterServer": [Case(ParameterServer(), lambda n, a: m.Shared(), EVERY_STEP, constant=True)],
    "AllReduce": [Case(AllReduce(), lambda n, a: m.MeanGradient(), GRADIENTS)],
    "BackupWorkers": [
        Case(BackupWorkers(backups=0), lambda n, a: m.MeanGradient(), GRADIENTS),
        Case(BackupWorkers(), None, {**GRADIENTS, **dict.fromkeys(WRAPPER_NAMES, "a late worker skips steps|backups")}),
    ],
    "DQSGD": [Case(DQSGD(), None, GRADIENTS)],
    "SketchedSGD": [Case(SketchedSGD(), None, NO_PERIOD)],
    "FetchSGD": [Case(FetchSGD(0.25), None, NO_PERIOD)],
    "CompressedMomentum": [Case(CompressedMomentum(warmup_steps=4), None, MOMENTA, optimizer=one_bit_adam)],
    "ZeroOne": [
        Case(ZeroOne(variance_steps=4, local_doubling=1000), None, {**MOMENTA, **IN_FLIGHT}, optimizer=zero_one_adam)
    ],
    "SlowMo": [
        Case(SlowMo(period=5, momentum=0.5, lr=0.9), lambda n, a: SlowMomentum(Machine(a), 5), OUTER),
        Case(
            SlowMo(PushSum(staleness=1), period=3, momentum=0.5, lr=0.9),
            lambda n, a: SlowMomentum(m.Pushed(common.one_peer(n, DOUBLE), a, staleness=1), 3),
            OUTER,
        ),
    ],
    "DiLoCo": [
        Case(
            DiLoCo(period=5, outer=OuterOptimizer("SGD", lr=0.7)),
            lambda n, a: SlowMomentum(Machine(a), 5, momentum=0.0, lr=0.7),
            {**OUTER, "Streaming": "has its own fragments"},
        )
    ],
    "Sharded": [Case(Sharded(SlowMo(period=5, momentum=0.5, lr=0.9)), lambda n, a: SlowMomentum(Machine(a), 5), OUTER)],
    "Offloaded": [
        Case(Offloaded(SlowMo(period=5, momentum=0.5, lr=0.9)), lambda n, a: SlowMomentum(Machine(a), 5), OUTER)
    ],
    "Paced": [
        Case(
            Paced(LocalSGD(2), steps=(2,)),
            lambda n, a: m.Means(2, a),
            dict.fromkeys(
                (*WRAPPER_NAMES, "Streaming"),
                "a late worker skips steps|has no period|plain means|nor ends rounds with",
            ),
        )
    ],
    "Budget": [
        # With eight bits a round, a mean that is nearly exact.
        Case(
            Budget(LocalSGD(2, codec=ErrorFeedback(Nearest(block=8))), "1MB/step"),
            lambda n, a: m.Means(2, a),
            OWN_PARAMETERS,
            tolerance=2e-2,
        )
    ],
    "NodeAverage": [Case(NodeAverage(LocalSGD(4), period=2, node_size=1), lambda n, a: m.Means(4, a), NOT_MEASURED)],
    "Streaming": [
        Case(
            Streaming(OverlapLocalSGD(4), fragments=2),
            lambda n, a: Fragments(lambda ahead: m.Overlap(4, ahead), 4, 2),
            {**OWN_PARAMETERS, "Streaming": "does one thing twice"},
        )
    ],
    "Probe": [
        Case(
            Probe(LocalSGD(2), every=3),
            lambda n, a: m.Means(2, a),
            {"Streaming": "its figures are sums over the whole gradient", "Probe": "neither sends gradients"},
        ),
        Case(
            Probe(AllReduce(), every=3),
            lambda n, a: m.MeanGradient(),
            {"Streaming": "has no period", "Probe": "neither sends gradients"},
        ),
    ],
}


def slow(case: Case, *, exact: bool = True) -> tuple[Strategy, Oracle]:
    strategy = SlowMo(case.strategy, period=5, momentum=0.5, lr=0.9, exact=exact)
    return strategy, lambda n, a: SlowMomentum(case.machine(n, a), 5, exact=exact)


def outer(case: Case) -> tuple[Strategy, Oracle]:
    strategy = DiLoCo(case.strategy, period=5, outer=OuterOptimizer("SGD", lr=0.7))
    return strategy, lambda n, a: SlowMomentum(case.machine(n, a), 5, momentum=0.0, lr=0.7)


def streamed(case: Case) -> tuple[Strategy, Oracle]:
    period = case.strategy.traits.period or 1
    count = min(2, period)
    return Streaming(case.strategy, count), lambda n, a: Fragments(lambda a: case.machine(n, a), period, count)


# A new wrapper is one line here, and its reasons to refuse bases are in the table above.
WRAPPERS: dict[str, Callable[[Case], tuple[Strategy, Oracle]]] = {
    "SlowMo": slow,
    "SlowMo without averages": lambda case: slow(case, exact=False),
    "DiLoCo": outer,
    "Sharded": lambda case: (Sharded(slow(case)[0]), slow(case)[1]),
    "Offloaded": lambda case: (Offloaded(slow(case)[0]), slow(case)[1]),
    "Streaming": streamed,
    "Probe": lambda case: (Probe(case.strategy, every=2), case.machine),
}
CASES = [(wrapper, case) for wrapper in WRAPPERS for cases in BASES.values() for case in cases]


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slopes(Quadratic):
    """Worker i minimises a linear function: its gradient does not depend on the parameters."""

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        return (model() * self.centre[rank]).sum()

    def gradient(self, x: Tensor, step: int) -> Tensor:
        return self.centre


def problem_of(case: Case, n: int) -> Quadratic:
    given = quadratic(n, DOUBLE, width=4)
    return Slopes(given.curvature, given.centre) if case.constant else given


def real_run(
    comm: Comm,
    strategy: Strategy,
    problem: Quadratic,
    make: Make,
    steps: int = STEPS,
    starts: Tensor | None = None,
    after_step: Callable[[Worker], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """One rank's parameters after every step, and what the optimizer added in each."""
    model = problem.model()
    if starts is not None:
        nn.utils.vector_to_parameters(starts[comm.rank].clone(), model.parameters())
    optimizer = make(list(model.parameters()))
    seen, moves = list[Tensor](), list[Tensor]()
    # Registered before the worker's, so that they enclose the optimizer's step alone.
    optimizer.register_step_pre_hook(lambda *_: moves.append(flat(model)))
    optimizer.register_step_post_hook(lambda *_: moves.append(flat(model) - moves.pop()))
    worker = thinwire.attach(model, optimizer, strategy, comm=comm, init="broadcast" if starts is None else "own")
    for k in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATES[k % STEPS]
        optimizer.zero_grad()
        loss = problem.loss(model, comm.rank, k)
        loss.backward()
        worker.record_batch(loss=loss)
        optimizer.step()
        if after_step is not None:
            after_step(worker)
        seen.append(flat(model))
    worker.detach()
    return torch.stack(seen), torch.stack(moves)


def real(n: int, strategy: Strategy, case: Case, **settings: Any) -> tuple[Tensor, Tensor]:
    """All ranks' parameters after every step, and their optimizers' moves: (steps, n, width)."""
    results = thinwire.run_threads(
        n, lambda comm: real_run(comm, strategy, problem_of(case, n), case.optimizer, **settings), timeout=30
    )
    return torch.stack([x for x, _ in results], 1), torch.stack([moves for _, moves in results], 1)


def stacked(
    machine: Machine, problem: Quadratic, n: int, moves: Tensor | None = None, starts: Tensor | None = None
) -> Tensor:
    """The oracle's parameters after every step."""

    def losses(x: Tensor, k: int) -> Tensor:
        return torch.stack([problem.loss(x[i].clone, i, k) for i in range(n)])

    x = problem.start.expand(n, -1) if starts is None else starts
    update = Descent(RATES) if moves is None else lambda x, g, k: moves[k]
    return m.path(machine, problem.gradient, x, update, RATES, losses)


# -- the table ---------------------------------------------------------------------------------------------------------


def test_every_registered_strategy_is_in_the_table() -> None:
    strategies = {name for name, kind in REGISTERED.items() if issubclass(kind, Strategy)}
    mine = {name for name in strategies if REGISTERED[name].__module__.startswith("thinwire.")}
    assert mine == BASES.keys()
    assert all(type(case.strategy).__name__ == name for name, cases in BASES.items() for case in cases)


KINDS = (LocalSGD, OverlapLocalSGD, PushSum, AllReduce)


def is_refused(wrapper: str, case: Case, n: int) -> bool:
    # A worker alone has its own weight, one, on every graph.
    alone = n == 1 and case.strategy == PushSum(Irregular()) and wrapper == "SlowMo without averages"
    return wrapper in case.refused and not alone


@for_each(
    [(wrapper, case) for wrapper, case in CASES if wrapper in case.refused],
    lambda pair: f"{pair[0]} {pair[1].strategy}",
)
def test_a_wrapper_refuses_a_base_for_the_reason_in_the_table(pair: tuple[str, Case]) -> None:
    wrapper, case = pair
    for n in (2, 3, 5):
        with pytest.raises(ConfigError) as refused:
            WRAPPERS[wrapper](case)[0].check(n)
        assert re.search(case.refused[wrapper], str(refused.value))


def sized(n: int) -> list[Any]:
    """The bases that wrappers take, with a number of workers.

    Always asked is each wrapper around the first base of each class, with three workers, or with two where three are
    refused; `DiLoCo`, whose outer step comes when that of `SlowMo` does, and `Sharded` and `Offloaded`, which wrap the
    outer step and not the base, around bases of a few kinds.
    """
    found: list[Any] = []
    for wrapper, case in CASES:
        if is_refused(wrapper, case, n):
            continue
        usual = 2 if isinstance(case.strategy, ADPSGD) else 3
        first = case is BASES[type(case.strategy).__name__][0]
        asked = first and (wrapper not in ("DiLoCo", "Sharded", "Offloaded") or isinstance(case.strategy, KINDS))
        marks = () if n == usual and asked else pytest.mark.slow
        found.append(pytest.param(wrapper, case, n, id=f"{wrapper}({case.strategy})-{n}", marks=marks))
    return found


@pytest.mark.parametrize(("wrapper", "case", "n"), [each for n in (1, 2, 3, 5) for each in sized(n)])
def test_a_wrapped_strategy_equals_its_oracle(wrapper: str, case: Case, n: int) -> None:
    strategy, oracle = WRAPPERS[wrapper](case)
    if isinstance(case.strategy, ADPSGD) and n % 2 and n > 1:
        with pytest.raises(ConfigError, match="even number"):
            real(n, strategy, case)
        return
    found, moves = real(n, strategy, case)
    expected = stacked(oracle(n, 0), problem_of(case, n), n, moves if case.oracle is None else None)
    if case.constant:
        # Between slow steps the workers' places depend on timing; after one they are where the mean has led.
        found, expected = found[4::5], expected[4::5]
    assert distance(found, expected) <= case.tolerance


@pytest.mark.parametrize(
    "case", [case for cases in BASES.values() for case in cases], ids=lambda case: str(case.strategy)
)
def test_averages_within_nodes_equal_their_oracle_around_local_steps_and_nothing_else(case: Case) -> None:
    every = case.strategy.traits.period or 1
    kinds = {type(each) for each in thinwire.methods.strategies.base.nested(case.strategy)}
    try:
        strategy = NodeAverage(case.strategy, period=1, node_size=2)
    except ConfigError as refused:
        assert "must take local steps between averages over all workers" in str(refused)
        assert kinds - {LocalSGD, SlowMo, DiLoCo, Sharded, Offloaded, Local} or every == 1
        return
    assert case.oracle is not None
    found, _ = real(4, strategy, case)
    expected = stacked(Nodes(case.oracle(4, 0), 1, every, 2), problem_of(case, 4), 4)
    assert distance(found, expected) <= case.tolerance


# -- workers that start apart ------------------------------------------------------------------------------------------


def starts_of(n: int) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(3), dtype=DOUBLE)


EVERY = [
    pytest.param(case, id=str(case.strategy), marks=() if case is cases[0] else pytest.mark.slow)
    for cases in BASES.values()
    for case in cases
]


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("case", EVERY)
def test_workers_that_start_apart_follow_the_oracle_or_are_refused(case: Case, n: int) -> None:
    if isinstance(case.strategy, ADPSGD) and n == 3:
        pytest.skip("needs an even number of workers")
    if case.strategy.traits.needs_equal_start:
        with pytest.raises(ConfigError, match=r'init="own" under .* would stay apart'):
            real(n, case.strategy, case, starts=starts_of(n))
        return
    averages = dict[int, Tensor]()

    def average(worker: Worker) -> None:
        if worker.step == STEPS:
            (r,) = worker.replicas
            with torch.no_grad():
                average_outside(case.strategy, r)
            averages[worker.comm.rank] = r.x.clone()

    found, _ = real(n, case.strategy, case, starts=starts_of(n), after_step=average)
    assert case.oracle is not None
    machine = case.oracle(n, 0)
    expected = stacked(machine, problem_of(case, n), n, starts=starts_of(n))
    if not case.constant:
        assert distance(found[:-1], expected[:-1]) <= case.tolerance
    for mine in averages.values():
        assert torch.equal(mine, averages[0]) or isinstance(case.strategy, Local)
        assert distance(mine, machine.average(expected[-1])[0]) <= case.tolerance


# -- what is in flight -------------------------------------------------------------------------------------------------


def test_local_steps_of_zero_one_adam_begin_anew_where_the_parameters_were_set() -> None:
    """Without a new start the next synchronisation would return to where the local steps began, and undo the move."""
    strategy = ZeroOne(variance_steps=2, local_doubling=1, most_local=8)
    # Entries of one size are coded by their signs exactly.
    problem = Slopes(torch.ones(2, dtype=DOUBLE), torch.tensor([[1.0, -1.0, 1.0, 1.0]] * 2, dtype=DOUBLE))
    moved_at = list[bool]()

    def move(worker: Worker) -> None:
        (r,) = worker.replicas
        if worker.step == 7:
            moved_at.append(bool(worker.optimizer.param_groups[0]["lr_sum"]))
            with torch.no_grad():
                r.x.add_(10.0)
                strategy.restart(r)

    def ended(after_step: Callable[[Worker], None] | None) -> list[Tensor]:
        return thinwire.run_threads(
            2, lambda comm: real_run(comm, strategy, problem, zero_one_adam, after_step=after_step)[0][-1]
        )

    moved, plain = ended(move), ended(None)
    assert moved_at == [True, True]  # amid local steps
    # Not exactly: the momentum that is synchronised is the mean since local steps began, which is later here.
    assert all((x - y - 10).abs().max() < 1 for x, y in zip(moved, plain, strict=True))


@for_each(
    [
        lambda: SlowMo(Streaming(SlowMo(period=4), fragments=2)),
        lambda: Streaming(SlowMo(Streaming(OverlapLocalSGD(), fragments=2))),
        lambda: Probe(SlowMo(Probe(AllReduce()))),
    ]
)
def test_a_wrapper_around_a_wrapper_of_the_same_kind_is_refused(make: Callable[[], Strategy]) -> None:
    with pytest.raises(ConfigError, match=r"does one thing twice|one slow momentum at a time"):
        make().check(4)
