# SPDX-License-Identifier: Apache-2.0
"""DQ-SGD: its oracle, budgets, bytes and faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests import engine
from tests.grids import fast_where
from tests.oracles.sketched import coded, squares
from tests.problems import Regression, distance, flat, train, watched
from tests.rules import refusals
from thinwire import Comm, Replica
from thinwire.core.kernels import uniform
from thinwire.methods.codecs.base import draw_key, worker_key
from thinwire.methods.codecs.quantize import Quantize
from thinwire.methods.strategies.gradients.bit_rules import BitBudget, BitLedger, ErrorBound, FixedBits, Rule, Step
from thinwire.methods.strategies.gradients.bits import square_of
from thinwire.methods.strategies.gradients.dynamic_quantization import DQSGD
from thinwire.planning.plan.card import explain
from thinwire.planning.plan.traffic import DryRun

RATES = [0.1, 0.08, 0.12, 0.05, 0.1, 0.02, 0.06, 0.1]
RULES: list[Rule] = [FixedBits(4), BitBudget(4.5, 8), ErrorBound(3e-3, 8, smoothness=2.0, strong_convexity=0.1)]
SIX: list[Rule] = [
    FixedBits(4),
    BitBudget(4.5, 8, most=6),
    ErrorBound(3e-3, 8, smoothness=2.0, strong_convexity=0.1, most=6),
]


def parts_of(r: Replica) -> Tensor:
    """What was exchanged last: where each part begins and ends, and in how many bits."""
    return r.state["sent"].flatten()


def cuts_of(n: int, size: int, block: int) -> list[slice]:
    length = -(-n // (size * block)) * block
    return [slice(min(i * length, n), min((i + 1) * length, n)) for i in range(size)]


def two_stages(rows: Tensor, bits: int, block: int, key: int, *, dither: bool, answer: int | None = 0) -> Tensor:
    """Every worker codes the piece of every server, which codes the mean in more bits, or sends it in fp32."""
    size, pieces = len(rows), list[Tensor]()
    for server, cut in enumerate(cuts_of(rows.shape[1], len(rows), block)):
        if cut.start == cut.stop:
            continue
        draws = [uniform(cut.stop - cut.start, int(worker_key(key, rank, size, server))) for rank in range(size)]
        total = sum(coded(x[cut], bits, block, u, dither=dither) for x, u in zip(rows, draws, strict=True))
        mean, own = (
            torch.as_tensor(total) / size,
            uniform(cut.stop - cut.start, int(worker_key(key, 0, 1, size + server))),
        )
        pieces.append(mean if answer is None else coded(mean, bits + answer, block, own, dither=dither))
    return torch.cat(pieces)


def share_of(size: int, *, dither: bool, answer: int | None) -> float:
    """The squared error of both stages, over that of one worker's code without dither."""
    return (1 / size + (0 if answer is None else 0.25**answer)) / (3 if dither else 1)


@dataclass
class Means:
    """Mean gradients, with the bits that the rule chooses from the scales of the step before.

    Attributes:
        chosen: the bits of every part, at each step.
    """

    strategy: DQSGD
    parts: list[slice]
    rates: Sequence[float]
    ledger: BitLedger = field(default_factory=BitLedger)
    known: list[float] = field(default_factory=list[float])
    chosen: list[list[int]] = field(default_factory=list[list[int]])

    def __call__(self, rows: Tensor, t: int) -> Tensor:
        rule, block = self.strategy.rule, self.strategy.block
        stages: Any = {"dither": self.strategy.dither, "answer": self.strategy.answer}
        sizes, share = [part.stop - part.start for part in self.parts], share_of(len(rows), **stages)
        if t == 0:
            # Nothing is known, of one bucket after the other.
            bits = [rule.choose(self.ledger, Step([inf], [n], self.rates[t], share))[0] for n in sizes]
        else:
            bits = rule.choose(self.ledger, Step(self.known, sizes, self.rates[t], share))
        mean = torch.zeros_like(rows[0])
        for part, b in zip(self.parts, bits, strict=True):
            key = draw_key(0, t, offset=part.start)
            mean[part] = two_stages(rows[:, part], b, block, key, **stages)
        self.known = [squares(rows[:, part], block) for part in self.parts]
        self.ledger = rule.settle(self.ledger, Step(self.known, sizes, self.rates[t], share), bits)
        self.chosen.append(bits)
        return mean


@pytest.mark.parametrize(
    ("rule", "answer"), [*((rule, 0) for rule in RULES), *((rule, answer) for rule in SIX for answer in (1, 2, None))]
)
@pytest.mark.parametrize("dither", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_on_threads_it_equals_its_oracle_bits_and_all(rule: Rule, answer: int | None, dither: bool) -> None:
    problem, strategy = Regression(3, 8, torch.float32), DQSGD(rule, block=8, dither=dither, answer=answer)
    both = watched(3, strategy, problem, RATES, lambda r: torch.cat([r.x.double(), parts_of(r).double()]))
    assert torch.equal(both, both[:, :1].expand_as(both))
    seen, rows = both[..., :34], both[..., 34:].long()
    parts = [slice(int(start), int(stop)) for start, stop, _ in rows[-1, 0].view(-1, 3)]
    x, mean, path = problem.start.expand(3, -1), Means(strategy, parts, RATES), list[Tensor]()
    for t, rate in enumerate(RATES):
        x = x - rate * mean(problem.gradient(x, t), t)
        path.append(x[0])
    assert rows[:, 0].reshape(8, -1, 3)[:, :, 2].tolist() == mean.chosen
    assert distance(seen[:, 0], torch.stack(path)) < 1e-5


# -- what the rules know -----------------------------------------------------------------------------------------------


def test_squares_are_sums_of_entries_times_their_blocks_squared_scale() -> None:
    x = torch.tensor([1.0, -3.0, 0.5, 2.0, 0.0, -4.0, 1.0])
    assert float(square_of(x, 2)) == 2 * 9 + 2 * 4 + 2 * 16 + 1
    assert float(square_of(x, 7)) == float(square_of(x, 100)) == 7 * 16
    assert float(square_of(x[:0], 8)) == 0
    assert float(square_of(x.to(torch.bfloat16), 2)) == 59


def test_a_budget_bounds_the_bytes_on_the_wire() -> None:
    def body(comm: Comm) -> float:
        before = list[float]()
        strategy = DQSGD(BitBudget(3.0, 12), block=8)
        problem = Regression(2, 12, torch.float32)
        train(comm, strategy, problem, [0.1] * 12, after_step=lambda a: before.append(a.comm.meter.payload_bytes))
        return before[-1]

    codes = 12 * 34 * 3.0 / 8
    headers_and_scales = 12 * 3 * (4 * 16 + 2 * 8 + 4 * 6)
    start = 2 * 34 * 4
    assert max(thinwire.run_threads(2, body)) < codes + headers_and_scales + start


@pytest.mark.parametrize(("answer", "answered"), [(0, 9.0), (2, 15.0), (None, 96.0)])
def test_metrics_show_the_bits_spent_in_both_directions(answer: int | None, answered: float) -> None:
    def body(comm: Comm) -> dict[str, float]:
        strategy = DQSGD(FixedBits(3), block=8, answer=answer)
        worker = engine.steps(engine.attach(comm, strategy), engine.batches(comm.rank, 4))
        worker.detach()
        return worker.metrics()

    for found in thinwire.run_threads(2, body):
        assert found["spent_bits_per_entry"] == 9.0  # of three steps; the last is settled with the next
        assert found["answered_bits_per_entry"] == answered
        assert found["bits"] == 3.0
        assert found["quantisation_error"] == 0.0


# -- bytes -------------------------------------------------------------------------------------------------------------


SPENT = [(2, 0), (5, 0), (8, 0), (2, 3), (5, 1), (8, None)]


@pytest.mark.parametrize("size", fast_where(lambda size: size == 3, [2, 3, 8]))
@pytest.mark.parametrize(("bits", "answer"), fast_where(lambda each: each in ((5, 0), (2, 3), (8, None)), SPENT))
def test_bytes_are_those_of_the_formula(size: int, bits: int, answer: int | None) -> None:
    sizes, block, strategy = [840, 1680], 64, DQSGD(FixedBits(bits), 64, answer=answer)

    def nbytes(n: int, bits: int) -> int:
        return 16 + 4 * -(-n // block) + bits * -(-n // 8)

    def answered(n: int) -> int:
        return 16 + 4 * n if answer is None else nbytes(n, bits + answer)

    def expected(rank: int) -> float:
        total = 2 * (size - 1) / size * 8 * 2
        for n in sizes:
            lengths = [cut.stop - cut.start for cut in cuts_of(n, size, block)]
            total += sum(nbytes(length, bits) for each, length in enumerate(lengths) if each != rank)
            # Answers are gathered, and so as long as the longest: that of the first.
            total += (size - 1) * answered(lengths[0])
        return total

    for rank in range(size):
        run = DryRun(strategy, sizes, workers=size, rank=rank, dtype=torch.float32, bucket_bytes=1)
        assert run.step().sent == pytest.approx(expected(rank), rel=0, abs=0.01)
    # The pieces of a bucket differ by whole blocks, so that ranks do not send alike: the busiest one's bytes are told.
    card = explain(strategy, parameters=sizes, workers=size, bucket_bytes=1)
    assert card.sent_bytes_per_step == pytest.approx(max(map(expected, range(size))), rel=0, abs=0.01)
    assert Quantize(bits, block).nbytes(100) == nbytes(100, bits) - 16


def test_without_data_the_least_and_the_most_bits_of_a_step_are_told() -> None:
    card = explain(DQSGD(BitBudget(3.0, 50, most=6)), parameters=[48 * 2048], workers=4)
    for sent, bits in ((card.least_sent_bytes_per_step, 2), (card.sent_bytes_per_step, 6)):
        assert sent == pytest.approx(2 * 0.75 * 48 * 2048 * bits / 8, rel=0.02)


# -- faults, checkpoints, other buckets --------------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_on_one_rank_is_so_on_all_and_the_rule_skips_the_step() -> None:
    strategy = DQSGD(ErrorBound(1e-2, 20), block=8)

    def body(comm: Comm) -> tuple[bool, BitLedger, Tensor]:
        worker = engine.attach(comm, strategy)
        engine.steps(worker, engine.batches(comm.rank, 3))
        x, y = engine.batch(comm.rank, 3)
        worker.optimizer.zero_grad()
        (worker.model(x * (inf if comm.rank == 1 else 1.0)) - y).square().mean().backward()
        spoilt = bool(worker.replicas[0].g.isnan().all())
        engine.steps(worker, engine.batches(comm.rank, 3, first=4)).detach()
        return spoilt, BitLedger.read(worker.replicas[0].state["ledger"]), flat(worker.model)

    found = thinwire.run_threads(3, body)
    for spoilt, ledger, x in found:
        assert spoilt
        assert ledger == found[0][1]
        assert ledger.step == 6
        assert 0 < ledger.error < 1e-2
        assert torch.equal(x, found[0][2])
        assert x.isfinite().all()


def test_a_run_goes_on_in_other_buckets_than_it_began_in() -> None:
    strategy = DQSGD(BitBudget(4.0, 8), block=8)

    def body(comm: Comm) -> tuple[Tensor, Tensor, int]:
        first = engine.steps(engine.attach(comm, strategy), engine.batches(comm.rank, 3))
        second = engine.attach(comm, strategy, bucket_bytes=10**6)
        second.load_state_dict(first.state_dict(model=True, optimizer=True))
        engine.steps(second, engine.batches(comm.rank, 3, first=3))
        for each in (first, second):
            each.detach()
        (r,) = second.replicas
        return flat(second.model), r.state["sent"], BitLedger.read(r.state["ledger"]).step

    found = thinwire.run_threads(2, body)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert len(found[0][1]) == 1
    assert found[0][2] == 5


test_what_cannot_work_is_refused_with_the_value_and_the_rule = refusals(
    [
        (lambda: DQSGD(block=12), "block=12: must be a multiple of 8"),
        (lambda: DQSGD(rule=4), "rule must be a FixedBits or a ErrorBound or a BitBudget"),
        (lambda: DQSGD(rule=BitBudget), r"Write BitBudget\(\)"),
        (lambda: DQSGD(dither=1), "dither must be True or False"),
        (lambda: DQSGD(answer=-1), r"answer=-1: must lie in 0\.\.0"),
        (lambda: DQSGD(answer=1), r"answer=1: .* rule's 8 bits codes have at most 8.* BitBudget\(most=7\)"),
        (lambda: DQSGD(FixedBits(6), answer=3), "the rule's 6 bits"),
        (lambda: DQSGD(answer=1.5), "answer must be a whole number or None"),
    ]
)
