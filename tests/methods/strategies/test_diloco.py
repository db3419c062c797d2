# SPDX-License-Identifier: Apache-2.0
"""DiLoCo with fragments, delay, mixing, codecs and weights: against its oracle, and against another program's runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.battery import adapters as to
from tests.grids import one_of_each
from tests.oracles.codecs import Agreed, Decaying, TwoStages, largest_of_chunks, signs
from tests.oracles.common import Descent
from tests.oracles.diloco import Rule, descent, streaming_diloco
from tests.problems import Regression, average_outside, distance, flat, together
from tests.rules import refusals
from thinwire import (
    AllReduce,
    ChunkedTopK,
    Codec,
    Comm,
    DiLoCo,
    ErrorFeedback,
    Gathered,
    LocalSGD,
    NodeAverage,
    Offloaded,
    OneBit,
    OuterOptimizer,
    Quantize,
    Sharded,
    Strategy,
    Streaming,
)
from thinwire.planning.plan.traffic import DryRun, StepTraffic

DOUBLE = torch.float64
STEPS = 23
RATES = [0.02 * (k + 1) for k in range(5)] + [0.1] * (STEPS - 5)
NESTEROV = OuterOptimizer("SGD", lr=0.7, momentum=0.6, nesterov=True)
PLAIN = OuterOptimizer("SGD", lr=1.0)
SIGNS = ErrorFeedback(OneBit(8))
LEVELS = Quantize(8, 8)
SPARSE = ErrorFeedback(Gathered(ChunkedTopK(4, 16)), decay=0.9)


def even(fragments: int, n: int = 34) -> list[int]:
    return [f * n // fragments for f in range(fragments + 1)]


def outer_of(outer: OuterOptimizer) -> Callable[[], Rule]:
    return descent(0.7, 0.6, nesterov=True) if outer == NESTEROV else descent(outer.lr)


def in_signs() -> Agreed:
    """Means of a fragment in signs, with the errors kept."""
    stages: list[TwoStages] = []

    def agree(rows: Tensor, _: int) -> Tensor:
        stages[:] = stages or [TwoStages(signs(8), 8, [rows.shape[1]])]
        return stages[0](rows)

    return agree


def of_largest() -> Agreed:
    """Means of each worker's largest elements, whose errors are forgotten little by little."""
    mean = Decaying(largest_of_chunks(4, 16, 2), 0.9)
    return lambda rows, _: mean(rows)


MEANS: dict[Codec, Callable[[], Agreed]] = {SIGNS: in_signs, LEVELS: to.in_levels(8, 8), SPARSE: of_largest}


def expected(
    n: int,
    strategy: DiLoCo,
    dtype: torch.dtype = DOUBLE,
    samples: Any = (),
    edges: list[int] | None = None,
    problem: Regression | None = None,
    **settings: Any,
) -> Tensor:
    problem = problem or Regression(n, STEPS, dtype)
    return streaming_diloco(
        problem.gradient,
        problem.start.expand(n, -1),
        Descent(RATES, **settings),
        STEPS,
        period=strategy.period,
        outer=outer_of(strategy.outer),
        edges=edges or even(strategy.fragments),
        delay=strategy.delay,
        mixing=strategy.mixing,
        mean=MEANS[strategy.codec] if strategy.codec else None,
        feedback=strategy.codec in (SIGNS, SPARSE),
        samples=samples,
        carry=strategy.carry,
        outliers=strategy.outliers,
    )


class Spiked(Regression):
    """One worker's gradients are far too large in the third round."""

    def factor(self, rank: int, step: int) -> float:
        return 40.0 if rank == 0 and 12 <= step < 18 else 1.0

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        return self.factor(rank, step) * super().loss(model, rank, step)

    def gradient(self, x: Tensor, step: int) -> Tensor:
        factors = torch.tensor([[self.factor(rank, step)] for rank in range(self.size)], dtype=self.dtype)
        return factors * super().gradient(x, step)


UNCODED = [
    DiLoCo(period=6, outer=outer, fragments=fragments, delay=delay, mixing=mixing)
    for outer, fragments, delay, mixing in product((NESTEROV, PLAIN), (1, 2, 4), (0, 1, 5), (0.0, 0.4, 1.0))
]
CODED = [
    DiLoCo(period=4, outer=NESTEROV, codec=codec, fragments=fragments, delay=delay, mixing=mixing)
    for codec, fragments, delay, mixing in product((SIGNS, LEVELS, SPARSE), (1, 2), (0, 1, 3), (0.0, 0.4, 1.0))
    if not (codec.traits.forgets and mixing == 1)  # refused
]


def parts(strategies: list[DiLoCo], nth: int) -> list[Any]:
    """Three workers under every nth of them, and where there is time one worker and three under all."""
    return [
        pytest.param(3, strategies[::nth], id=f"3 under each {nth}th"),
        *(pytest.param(n, strategies, id=f"{n} under all", marks=pytest.mark.slow) for n in (1, 3)),
    ]


# Every eleventh meets each outer step, number of fragments, delay and mixing.
@pytest.mark.parametrize(("n", "strategies"), parts(UNCODED, 11))
def test_every_combination_equals_the_oracle(n: int, strategies: list[DiLoCo]) -> None:
    problem = Regression(n, STEPS, DOUBLE)
    for strategy in strategies:
        real = together(n, strategy, problem, RATES, momentum=0.9)
        assert distance(real, expected(n, strategy, momentum=0.9)) < 1e-12, strategy


@pytest.mark.parametrize(("n", "strategies"), parts(CODED, 7))
def test_every_coded_combination_equals_the_oracle(n: int, strategies: list[DiLoCo]) -> None:
    problem = Regression(n, STEPS, torch.float32)
    for strategy in strategies:
        real = together(n, strategy, problem, RATES)
        assert distance(real, expected(n, strategy, torch.float32)) < 2e-5, strategy


@pytest.mark.parametrize("carry", ["full", "adaptive"])
@pytest.mark.parametrize("codec", one_of_each([None, SIGNS, LEVELS]), ids=str)
def test_carried_steps_of_the_delay_equal_the_oracle(carry: Any, codec: Codec | None) -> None:
    dtype = torch.float32 if codec else DOUBLE
    problem = Regression(3, STEPS, dtype)
    for fragments, delay in ((1, 1), (1, 5), (2, 3)):
        strategy = DiLoCo(period=6, outer=NESTEROV, fragments=fragments, delay=delay, carry=carry, codec=codec)
        real = together(3, strategy, problem, RATES, momentum=0.9)
        found = expected(3, strategy, dtype, momentum=0.9)
        assert distance(real, found) < (2e-5 if codec else 1e-12), strategy


@pytest.mark.parametrize("outliers", ["clip", "down-weight", "leave-out"])
@pytest.mark.parametrize("codec", [None, LEVELS, SIGNS], ids=str)
@pytest.mark.parametrize("weights", ["equal", "samples"])
def test_guarded_means_equal_the_oracle(
    outliers: Any, codec: Codec | None, weights: Any, caplog: pytest.LogCaptureFixture
) -> None:
    dtype = torch.float32 if codec else DOUBLE
    problem = Spiked(4, STEPS, dtype)
    for fragments, delay in ((1, 0), (2, 1)):
        strategy = DiLoCo(
            period=6, outer=NESTEROV, fragments=fragments, delay=delay, codec=codec, weights=weights, outliers=outliers
        )
        real = together(4, strategy, problem, RATES)
        found = expected(4, strategy, dtype, problem=problem)
        assert distance(real, found) < (5e-5 if codec else 1e-12), strategy
        unguarded = together(4, replace(strategy, outliers="keep"), problem, RATES)
        assert distance(real, unguarded) > 1e-2
    assert "moved much further than usual in this round: rank 0 (" in caplog.text


def test_a_worker_that_is_not_finite_is_left_out_and_comes_back() -> None:
    def body(comm: Comm) -> tuple[list[float], float]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        strategy = DiLoCo(period=1, outer=PLAIN, outliers="leave-out")
        worker = thinwire.attach(model, optimizer, strategy, comm=comm, nonfinite="ignore")
        for step in range(2):
            model.weight.grad = torch.full((1, 1), float("nan") if (comm.rank, step) == (1, 0) else 1.0)
            optimizer.step()
        return flat(model).tolist(), worker.metrics()["outliers"]

    assert thinwire.run_threads(3, body) == [([-2.0], 0.0)] * 3


@pytest.mark.parametrize(
    ("fragments", "delay", "mixing", "codec"),
    [
        *((1, 2, 0.0, codec) for codec in (None, LEVELS, SIGNS)),
        *((*form, codec) for form in ((3, 0, 0.5), (2, 3, 0.5)) for codec in (None, LEVELS)),
    ],
    ids=str,
)
def test_workers_weigh_as_much_as_they_have_used_since_they_last_sent(
    fragments: int, delay: int, mixing: float, codec: Codec | None
) -> None:
    n, dtype = 3, torch.float32 if codec else DOUBLE
    draw = torch.Generator().manual_seed(5)
    used = torch.randint(0, 5, (STEPS, n), generator=draw).to(dtype).clamp_(min=1)
    strategy = DiLoCo(
        period=6, outer=NESTEROV, fragments=fragments, delay=delay, mixing=mixing, weights="samples", codec=codec
    )
    problem = Regression(n, STEPS, dtype)

    def body(comm: Comm) -> Tensor:
        model = problem.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        worker = thinwire.attach(model, optimizer, strategy, comm=comm)
        for k in range(STEPS):
            optimizer.param_groups[0]["lr"] = RATES[k]
            optimizer.zero_grad()
            problem.loss(model, comm.rank, k).backward()
            worker.record_batch(float(used[k, comm.rank]))
            optimizer.step()
        return flat(model)

    real = torch.stack(thinwire.run_threads(n, body))
    assert distance(real, expected(n, strategy, dtype, samples=list(used))) < (2e-5 if codec else 1e-12)


@pytest.mark.parametrize("place", [lambda each: each, Sharded, Offloaded], ids=["whole", "sharded", "offloaded"])
def test_an_average_is_where_all_fragments_begin_a_round(place: Callable[[Strategy], Strategy]) -> None:
    strategy = place(DiLoCo(period=4, outer=PLAIN, fragments=2, delay=3, mixing=0.5))

    def body(comm: Comm) -> Tensor:
        model = nn.Linear(6, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        (r,) = thinwire.attach(model, optimizer, strategy, comm=comm).replicas
        for step in range(13):
            if step == 6:
                r.x.fill_(comm.rank)
                average_outside(strategy, r)
            model.weight.grad = torch.full_like(model.weight, float(comm.rank) if step < 6 else 0.0)
            optimizer.step()
        return r.x.clone()

    for x in thinwire.run_threads(2, body):
        assert torch.equal(x, torch.full_like(x, 0.5))


class Blocks(nn.Module):
    """Layers of 12, 30, 6 and 7 numbers."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(3, 3), nn.Linear(5, 5), nn.Linear(2, 2), nn.Linear(6, 1))
        self.layers = nn.ModuleList(layers)


@pytest.mark.parametrize(
    ("fragments", "cut", "sizes"),
    [(2, "evenly", [27, 28]), (2, "layers", [12, 43]), (4, "layers", [12, 0, 30, 13]), (1, "layers", [55])],
)
def test_fragments_are_even_or_whole_layers(fragments: int, cut: Literal["evenly", "layers"], sizes: list[int]) -> None:
    def body(comm: Comm) -> list[int]:
        model = Blocks()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = DiLoCo(period=4, fragments=fragments, cut=cut, delay=1, mixing=0.5, codec=LEVELS)
        (r,) = thinwire.attach(model, optimizer, strategy, comm=comm).replicas
        for _ in range(9):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        return [x.numel() for name, x in r.state.items() if name.endswith("anchor")]

    assert thinwire.run_threads(2, body) == [sizes, sizes]


# -- what other programs do --------------------------------------------------------------------------------------------

GOLDEN: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "torchft_diloco.json").read_text(encoding="utf-8")
)["traces"]


class Two(nn.Module):
    """Two layers of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("trace", GOLDEN, ids=lambda trace: f"delay {trace['delay']}, mixing {trace['mixing']}")
def test_the_golden_traces_of_torchft_are_met(trace: dict[str, Any]) -> None:
    outer = OuterOptimizer("SGD", lr=2.0)
    strategy = DiLoCo(period=6, fragments=2, delay=trace["delay"], mixing=trace["mixing"], outer=outer)

    def body(comm: Comm) -> list[list[float]]:
        model, seen = Two(), list[list[float]]()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        thinwire.attach(model, optimizer, strategy, comm=comm)
        for _ in range(16):
            seen.append([model.one.item(), model.two.item()])
            model.one.grad, model.two.grad = torch.full((1,), 2.0), torch.full((1,), 2.0)
            optimizer.step()
        return seen

    for seen in thinwire.run_threads(2, body):
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(trace["layers"]), rtol=1e-5, atol=1e-5)


# -- what is sent, and when --------------------------------------------------------------------------------------------


def steps_of(strategy: Strategy, count: int) -> list[StepTraffic]:
    """What is sent in each step, of sixteen elements in fp32 between two workers."""
    run = DryRun(strategy, [16], workers=2, rank=0, dtype=torch.float32, bucket_bytes=1)
    return [run.step() for _ in range(count)]


def test_fragments_lower_the_peak_and_neither_they_nor_delays_change_the_sum() -> None:
    sent = [step.sent for step in steps_of(DiLoCo(period=8, fragments=4, delay=3, mixing=0.5), 24)]
    assert sent[8:16] == sent[16:24]
    assert sum(sent[8:16]) == 64
    assert [step for step, nbytes in enumerate(sent[8:16], 9) if nbytes] == [9, 11, 13, 15]


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [
        (DiLoCo(period=8, delay=6, codec=LEVELS), [2, 5, 10, 13]),
        (thinwire.OverlapLocalSGD(8, codec=LEVELS), [8, 12, 16]),
        (thinwire.OverlapLocalSGD(8, delay=4, codec=SIGNS), [8, 10, 16]),
        (thinwire.CoCoD(8, codec=LEVELS), [8, 12, 16]),
        (thinwire.EASGD(8, codec=LEVELS), [1, 5, 9, 13]),
    ],
    ids=str,
)
def test_the_second_stage_of_a_coded_mean_starts_in_the_middle_of_its_delay(
    strategy: Strategy, steps: list[int]
) -> None:
    assert [number for number, step in enumerate(steps_of(strategy, 16), 1) if step.messages] == steps


test_what_cannot_be_meant_is_refused_with_the_fix = refusals(
    [
        (lambda: DiLoCo(period=4, fragments=5), "fragments=5: must lie in 1..4"),
        (lambda: DiLoCo(period=4, delay=4), r"delay=4: must lie in \[0, 4\)"),
        (lambda: DiLoCo(mixing=1.5), r"mixing=1.5: must lie in \[0, 1\]"),
        (lambda: DiLoCo(AllReduce(), delay=1), r"Use base=Local\(\), or fragments=1"),
        (lambda: DiLoCo(LocalSGD(5), weights="samples"), r"Use base=Local\(\), or fragments=1"),
        (
            lambda: DiLoCo(mixing=0.5, weights="samples", codec=SIGNS),
            "Use weights='equal', mixing=0.0",
        ),
        (lambda: DiLoCo(carry="full"), "Use delay of at least 1 and mixing=0.0, or carry='off'"),
        (lambda: DiLoCo(delay=1, mixing=0.5, carry="adaptive"), "Use delay of at least 1 and mixing=0.0"),
        (lambda: DiLoCo(LocalSGD(5), outliers="clip"), r"Use base=Local\(\)"),
        (lambda: DiLoCo(mixing=0.5, codec=SIGNS, outliers="clip"), r"needs whole displacements"),
        (lambda: Sharded(DiLoCo(outliers="clip")).check(2), "outliers='keep'"),
        (lambda: DiLoCo(cut="modules"), "'evenly' or 'layers'"),  # type: ignore[arg-type]
        (lambda: Sharded(DiLoCo(weights="samples")).check(2), "Use weights='equal'"),
        (lambda: NodeAverage(DiLoCo(period=4, delay=1), period=2), "must take local steps between averages"),
        (lambda: Streaming(DiLoCo(period=4), fragments=2), "has its own fragments. Use it without Streaming"),
    ]
)
