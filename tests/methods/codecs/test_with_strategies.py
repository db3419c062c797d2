# SPDX-License-Identifier: Apache-2.0
"""Strategies with codecs: oracles, bytes, checkpoints, and what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.engine import attach, batches, flat, net, steps
from tests.oracles import codecs as oracles
from tests.pool import run_processes
from tests.problems import Regression, average_outside, distance, quadratic, together, train, watched
from thinwire import (
    EASGD,
    AllReduce,
    BetweenNodes,
    Bf16,
    Budget,
    CoCoD,
    Codec,
    Comm,
    Complete,
    CompressedMomentum,
    ConfigError,
    DecentLaM,
    DiLoCo,
    ExactDiffusion,
    Fp16,
    Fp32,
    Gathered,
    Gossip,
    LocalSGD,
    MinibatchLocalSGD,
    NoLoCo,
    NonFiniteError,
    Offloaded,
    OnePeerExponential,
    OverlapLocalSGD,
    Replica,
    Ring,
    Sharded,
    SlowMo,
    Strategy,
    ZeroOne,
)
from thinwire.core.comm.group import comm_for
from thinwire.methods.codecs.feedback import ErrorFeedback
from thinwire.methods.codecs.majority import MajorityVote
from thinwire.methods.codecs.natural import Natural
from thinwire.methods.codecs.one_bit import OneBit
from thinwire.methods.codecs.quantize import Quantize
from thinwire.methods.codecs.random_k import RandomK
from thinwire.methods.codecs.sketch import Sketch
from thinwire.methods.codecs.terngrad import TernGrad
from thinwire.methods.codecs.top_k import TopK
from thinwire.methods.strategies.gossip.choco import Choco
from thinwire.planning.plan import explain
from thinwire.registry import recipe_classes

RATES = [0.1] * 16
PARTS = [24, 10]  # the buckets of a perceptron of 34 parameters, in the vector's order
SMALL = ErrorFeedback(OneBit(8))
CODED: list[Strategy] = [
    *(AllReduce(SMALL), AllReduce(ErrorFeedback(TopK(0.2))), AllReduce(Quantize(4, 8, dither=True, correlated=True))),
    *(AllReduce(ErrorFeedback(RandomK(0.3, unbiased=False))), AllReduce(ErrorFeedback(Sketch(1, 32, 1)))),
    *(LocalSGD(3, codec=SMALL), SlowMo(period=3, codec=SMALL), SlowMo(AllReduce(SMALL), period=3)),
    *(Choco(codec=OneBit(8)), Choco(codec=TopK(0.2)), SlowMo(Choco(codec=OneBit(8)), period=3)),
    *(CoCoD(3, SMALL), OverlapLocalSGD(3, codec=SMALL), OverlapLocalSGD(3, delay=1, codec=Quantize(8, 8))),
    *(EASGD(3, codec=SMALL), MinibatchLocalSGD(3, codec=SMALL), SlowMo(CoCoD(2, SMALL), period=3)),
]


def signs(parts: list[int]) -> oracles.TwoStages:
    return oracles.TwoStages(oracles.signs(8), 8, parts)


# -- oracles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.slow
def test_gradients_in_one_bit_equal_their_oracle_bucket_by_bucket(n: int) -> None:
    problem = Regression(n, len(RATES), torch.float32)
    found = together(n, AllReduce(SMALL), problem, RATES)
    expected = oracles.coded_sgd(problem.gradient, problem.start.expand(n, -1), RATES, signs(PARTS))
    assert distance(found, expected) < 2e-5
    assert torch.equal(found, found[:1].expand_as(found))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_gradients_in_top_k_equal_their_oracle(n: int) -> None:
    problem = quadratic(n, torch.float32, width=40)
    found = together(n, AllReduce(ErrorFeedback(TopK(0.2))), problem, RATES)
    mean = oracles.TwoStages(oracles.largest(0.2), 1, [1, 39])
    expected = oracles.coded_sgd(
        problem.gradient, problem.start.expand(n, -1), RATES, mean if n > 1 else lambda g: g.mean(0)
    )
    assert distance(found, expected) < 2e-5


@pytest.mark.parametrize("n", [1, 2, 4])
def test_coded_local_sgd_equals_its_oracle(n: int) -> None:
    problem = Regression(n, len(RATES), torch.float32)
    found = together(n, LocalSGD(4, codec=SMALL), problem, RATES)
    expected = oracles.coded_local_sgd(problem.gradient, problem.start.expand(n, -1), RATES, signs([34]), 4)
    assert distance(found, expected) < 2e-5


@pytest.mark.parametrize("n", [1, 2, 4])
def test_coded_slow_momentum_equals_its_oracle(n: int) -> None:
    problem = Regression(n, len(RATES), torch.float32)
    found = together(n, SlowMo(period=4, momentum=0.5, codec=SMALL), problem, RATES)
    expected = oracles.coded_slow_momentum(
        problem.gradient, problem.start.expand(n, -1), 0.1, len(RATES), signs([34]), period=4, momentum=0.5
    )
    assert distance(found, expected) < 2e-5


@pytest.mark.parametrize("n", [1, 2, 4])
def test_coded_diloco_equals_its_oracle(n: int) -> None:
    problem = Regression(n, len(RATES), torch.float32)
    found = together(n, DiLoCo(period=4, codec=SMALL), problem, RATES)
    start = problem.start.expand(n, -1)
    expected = oracles.coded_diloco(problem.gradient, start, RATES, signs([34]), period=4, lr=0.7, momentum=0.9)
    assert distance(found, expected) < 2e-5


@pytest.mark.parametrize("base", [DecentLaM(), ExactDiffusion(), Choco(codec=OneBit(8))], ids=str)
def test_over_any_base_whose_average_is_the_plain_mean_a_codec_without_loss_changes_nothing(base: Strategy) -> None:
    problem = quadratic(4, torch.float64, width=12)
    coded, plain = (together(4, SlowMo(base, period=3, codec=c), problem, RATES[:12]) for c in (Fp32(), None))
    assert distance(coded, plain) < 1e-6


@pytest.mark.parametrize(
    ("codec", "code"),
    [
        pytest.param(OneBit(8), oracles.signs(8), id="signs"),
        pytest.param(TopK(0.2), oracles.largest(0.2), id="largest"),
    ],
)
@pytest.mark.parametrize("topology", [Ring(), Complete()], ids=str)
def test_choco_equals_its_oracle(codec: Codec, code: oracles.Code, topology: Any) -> None:
    problem = Regression(4, len(RATES), torch.float32)
    found = together(4, Choco(topology, codec, 0.3), problem, RATES)
    mixing = torch.from_numpy(topology.matrix(4, 0)).float()
    start = problem.start.expand(4, -1)
    expected = oracles.choco(problem.gradient, start, RATES, code, mixing=mixing, step_size=0.3)
    assert distance(found, expected) < 2e-5
    assert not torch.equal(found[0], found[1])


def test_choco_starts_from_the_workers_own_parameters() -> None:
    problem = Regression(3, len(RATES), torch.float32)
    starts = torch.randn(3, 34, generator=torch.Generator().manual_seed(5))
    found = together(3, Choco(codec=OneBit(8)), problem, RATES, starts=starts)
    mixing = torch.from_numpy(Ring().matrix(3, 0)).float()
    code = oracles.signs(8)
    expected = oracles.choco(problem.gradient, starts, RATES, code, mixing=mixing, step_size=0.3)
    assert distance(found, expected) < 2e-5


def test_choco_with_an_exact_codec_and_step_size_one_is_gossip() -> None:
    problem = Regression(4, len(RATES), torch.float32)
    exact = together(4, Choco(codec=TopK(1.0), step_size=1.0), problem, RATES)
    assert distance(exact, together(4, Gossip(order="after"), problem, RATES)) < 1e-5


@pytest.mark.slow
def test_choco_converges_to_the_mean_and_keeps_it() -> None:
    starts = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
    problem = quadratic(4, torch.float32, width=64)
    for codec in (OneBit(8), TopK(0.1), Quantize(4, 8), Natural()):
        step_size = 0.1 if isinstance(codec, TopK) else 0.3
        seen = watched(4, Choco(codec=codec, step_size=step_size), problem, [0.0] * 60, starts=starts)
        assert (seen.mean(1) - starts.mean(0)).abs().max() < 1e-4
        assert (seen[-1] - starts.mean(0)).norm() < 0.2 * (starts - starts.mean(0)).norm()


def test_choco_s_mixed_vector_is_the_neighbours_public_copies() -> None:
    problem = Regression(4, 10, torch.float32)
    kept = lambda r: torch.stack([r.state["public"], r.state["mixed"]])  # noqa: E731
    public, mixed = watched(4, Choco(codec=TopK(0.2)), problem, RATES[:10], kept)[-1].unbind(1)
    assert torch.allclose(mixed, torch.from_numpy(Ring().matrix(4, 0)).float() @ public, atol=1e-6)


def test_workers_with_different_starts_are_equal_after_the_first_compressed_average() -> None:
    problem = Regression(3, 8, torch.float32)
    starts = torch.randn(3, 34, generator=torch.Generator().manual_seed(5))
    for strategy in (LocalSGD(4, codec=SMALL), SlowMo(period=4, codec=SMALL)):
        found = together(3, strategy, problem, RATES[:8], starts=starts)
        assert torch.equal(found, found[:1].expand_as(found))


@pytest.mark.slow
@pytest.mark.parametrize("codec", [Bf16(), Fp16(), Quantize(8, 8), Natural(), SMALL, ErrorFeedback(TopK(0.3))], ids=str)
@pytest.mark.parametrize("make", [AllReduce, lambda c: LocalSGD(2, codec=c), lambda c: SlowMo(period=2, codec=c)])
def test_training_with_a_codec_ends_near_training_without(codec: Codec, make: Any) -> None:
    problem = quadratic(3, torch.float32, width=24)
    rates = [0.3 * 0.9**k for k in range(50)]
    found, plain = together(3, make(codec), problem, rates), together(3, make(None), problem, rates)
    assert (found[0] - plain[0]).norm() < 0.2 * (problem.start - plain[0]).norm()
    assert torch.equal(found, found[:1].expand_as(found))


KEEPING: list[Any] = [
    lambda c: CoCoD(2, c),
    lambda c: OverlapLocalSGD(4, codec=c),
    lambda c: OverlapLocalSGD(4, pull=0.3, delay=2, codec=c),
    lambda c: EASGD(2, codec=c),
    lambda c: EASGD(2, momentum=0.5, codec=c),
]
"""Methods whose workers do not all return to the mean."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec",
    [ErrorFeedback(OneBit(24)), ErrorFeedback(TopK(0.1))],
    ids=str,
)
@pytest.mark.parametrize("make", KEEPING)
def test_coded_means_of_workers_that_stay_apart_converge_where_exact_ones_do(codec: Codec, make: Any) -> None:
    """Residuals of differences from the anchor or the centre would make it overshoot ever further."""
    problem = quadratic(3, torch.float32, width=24)
    rates = [0.1] * 300 + [0.1 * 0.97**k for k in range(150)]

    def body(comm: Comm, strategy: Strategy) -> Tensor:
        with train(comm, strategy, problem, rates).consensus() as model:
            return flat(model)

    def ended(strategy: Strategy) -> Tensor:
        found = thinwire.run_threads(3, lambda comm: body(comm, strategy), timeout=60)
        assert all(torch.equal(x, found[0]) for x in found)
        return found[0]

    plain = ended(make(None))
    assert (ended(make(codec)) - plain).norm() < 0.2 * (problem.start - plain).norm()


@pytest.mark.parametrize(
    "strategy",
    [
        *(OverlapLocalSGD(3, codec=SMALL), EASGD(3, codec=SMALL), EASGD(3, momentum=0.5, codec=SMALL)),
        # Begun anew after ten steps.
        *(SlowMo(OverlapLocalSGD(3, codec=SMALL), period=10), SlowMo(EASGD(2, codec=SMALL), period=10)),
    ],
    ids=str,
)
def test_a_mean_with_feedback_is_exact_but_for_what_the_residuals_hold(strategy: Strategy) -> None:
    problem = Regression(3, 13, torch.float32)

    def see(r: Replica) -> Tensor:
        r.wait_pending()
        r = r.parts.get("base", r)
        held = torch.zeros_like(r.x)
        for name, x in r.state.items():
            if name.startswith("server_error/"):
                start, stop = map(int, name.removeprefix("server_error/").split("-"))
                held[start:stop] += 3 * x  # the server's is no mean over workers
        mean = r.state.get("mean")
        if mean is None:  # each rank has a piece
            mean = torch.zeros_like(r.x)
            for name, x in r.state.items():
                if name.startswith("server_mean/"):
                    mean[slice(*map(int, name.removeprefix("server_mean/").split("-")))] = x
            mean = r.comm.all_reduce_(mean).wait()
        # The state is the residual minus what was sent, in one vector.
        return torch.stack([mean, r.state.get("position", r.x), r.state["error"] + held])

    *_, before, last = watched(3, strategy, problem, RATES[:13], see)
    sent, (mean, _, held) = before[:, 1], last.unbind(1)
    assert torch.equal(mean, mean[:1].expand_as(mean))
    held = held + sent
    assert 1e-3 < held.norm() < 0.9 * (sent - problem.start).norm()
    assert torch.allclose(mean[0] + held.mean(0), sent.mean(0), atol=1e-5)


@pytest.mark.parametrize("steps", [5, 7, 8])
def test_an_average_of_coded_cocod_lacks_what_the_residuals_hold_and_nothing_else(steps: int) -> None:
    strategy = CoCoD(3, SMALL)

    def body(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        draw = torch.Generator().manual_seed(comm.rank)
        r = Replica(torch.zeros(40), torch.empty(0), comm, lr=lambda: 0.1)
        total, held = torch.zeros(40), torch.zeros(40)
        strategy.start(r)
        for _ in range(steps):
            move = torch.randn(40, generator=draw)
            total += move
            r.x += move
            r.step += 1
            strategy.after_step(r)
        average_outside(strategy, r)
        for name, x in r.state.items():
            if name.startswith("server_error/"):
                start, stop = map(int, name.removeprefix("server_error/").split("-"))
                held[start:stop] += 3 * x  # the server's is no mean over workers
        return r.x, total, r.state["error"] + held

    x, total, held = (torch.stack(rows) for rows in zip(*thinwire.run_threads(3, body), strict=True))
    assert torch.equal(x, x[:1].expand_as(x))
    assert held.norm() > 1e-2
    assert torch.allclose(x[0] + held.mean(0), total.mean(0), atol=1e-5)


@pytest.mark.slow
def test_majority_votes_and_ternary_gradients_reduce_the_loss() -> None:
    problem = quadratic(3, torch.float32, width=24)
    best = (problem.curvature[:, None] * problem.centre).sum(0) / problem.curvature.sum()
    rates = [0.1 * 0.93**k for k in range(50)]
    for strategy in (AllReduce(MajorityVote()), AllReduce(TernGrad(8))):
        found = together(3, strategy, problem, rates)
        assert (found[0] - best).norm() < 0.6 * (problem.start - best).norm()


# -- processes and checkpoints -----------------------------------------------------------------------------------------


def on_processes() -> list[list[float]]:
    comm, problem = comm_for(), Regression(2, 8, torch.float32)
    return [flat(train(comm, strategy, problem, RATES[:8]).model).tolist() for strategy in CODED]


@pytest.mark.slow  # threads are asked always, and tests/battery/test_processes.py has the strategy on processes
def test_processes_train_as_threads_do() -> None:
    problem = Regression(2, 8, torch.float32)
    found = run_processes(2, on_processes)
    for place, strategy in enumerate(CODED):
        expected = together(2, strategy, problem, RATES[:8])
        for rank in range(2):
            assert found[rank][place] == expected[rank].tolist(), strategy


def test_slow_momentum_on_coded_averages_resumes_bit_by_bit_from_a_checkpoint(tmp_path: Path) -> None:
    strategy = SlowMo(period=3, codec=SMALL)

    def whole(comm: Comm) -> Tensor:
        worker = steps(attach(comm, strategy), batches(comm.rank, 5))
        worker.save(tmp_path)
        steps(worker, batches(comm.rank, 5, first=5))
        worker.detach()
        return flat(worker.model)

    def resumed(comm: Comm) -> Tensor:
        worker = attach(comm, strategy, model=net(seed=9))
        worker.load(tmp_path)
        steps(worker, batches(comm.rank, 5, first=5))
        worker.detach()
        return flat(worker.model)

    expected = thinwire.run_threads(2, whole, timeout=20)
    for found, wanted in zip(thinwire.run_threads(2, resumed, timeout=20), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("strategy", [AllReduce(SMALL), AllReduce(ErrorFeedback(Sketch(1, 32, 1)))], ids=str)
def test_a_step_that_a_scaler_skips_keeps_the_residual(strategy: Strategy) -> None:
    def body(comm: Comm) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        worker = steps(attach(comm, strategy), batches(comm.rank, 2))
        x, error = flat(worker.model), worker.replicas[0].state["error"].clone()
        (inputs, targets) = batches(comm.rank, 1, first=2)[0]
        if comm.rank == 1:
            inputs[0, 0] = float("inf")
        worker.optimizer.zero_grad()
        (worker.model(inputs) - targets).square().mean().backward()
        gradients = torch.cat([p.grad.reshape(-1) for p in worker.model.parameters() if p.grad is not None])
        worker.detach()
        return x, flat(worker.model), gradients, worker.replicas[0].state["error"] - error

    for before, after, gradients, change in thinwire.run_threads(2, body, timeout=20):
        assert torch.equal(before, after)
        assert gradients.isnan().all(), "buckets that are finite are skipped too"
        assert not change.any()


def test_choco_names_the_rank_whose_parameters_are_not_finite() -> None:
    def body(comm: Comm) -> str:
        worker = attach(comm, Choco(codec=OneBit(8)))
        if comm.rank == 1:
            with torch.no_grad():
                worker.replicas[0].x[3] = float("nan")
        with pytest.raises(NonFiniteError) as found:
            worker.strategy.after_step(worker.replicas[0])
        worker.detach()
        return str(found.value)

    for words in thinwire.run_threads(2, body, timeout=20):
        assert "the parameters of rank 1 are NaN or infinite" in words


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_a_step_in_one_bit_sends_a_thirty_first_of_the_bytes() -> None:
    card = explain(AllReduce(ErrorFeedback(OneBit())), parameters=[1 << 20] * 4, workers=4)
    assert 31 < card.all_reduce_bytes_per_step / card.sent_bytes_per_step < 32


def test_the_savings_of_periods_and_codecs_multiply() -> None:
    plain = explain(LocalSGD(8), parameters=[1 << 20] * 4, workers=4)
    coded = explain(LocalSGD(8, codec=Quantize(4)), parameters=[1 << 20] * 4, workers=4)
    assert plain.sent_bytes_per_step / coded.sent_bytes_per_step == pytest.approx(8, rel=0.02)
    slow = explain(SlowMo(period=8, codec=Quantize(4)), parameters=[1 << 20] * 4, workers=4)
    assert slow.sent_bytes_per_step == coded.sent_bytes_per_step


def test_choco_sends_a_payload_and_a_header_to_each_neighbour() -> None:
    n = 1000
    card = explain(Choco(codec=OneBit(8)), parameters=[n], workers=4)
    assert card.sent_bytes_per_step == 2 * (16 + OneBit(8).nbytes(n))


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [OneBit(), TopK(), RandomK(unbiased=False), Sketch()], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        *(AllReduce, lambda c: LocalSGD(2, codec=c), lambda c: SlowMo(period=2, codec=c), lambda c: DiLoCo(codec=c)),
        *(*KEEPING, lambda c: MinibatchLocalSGD(2, codec=c)),
    ],
)
def test_a_biased_codec_without_feedback_is_refused_and_the_fix_is_named(codec: Codec, make: Any) -> None:
    with pytest.raises(ConfigError, match=r"may diverge. Use ErrorFeedback\("):
        make(codec).check(2)
    make(ErrorFeedback(codec)).check(2)


@pytest.mark.parametrize(
    "vote", [MajorityVote(), Gathered(MajorityVote()), BetweenNodes(MajorityVote())], ids=lambda codec: str(codec)[:12]
)
@pytest.mark.parametrize(
    "make",
    [
        *(lambda c: LocalSGD(2, codec=c), lambda c: SlowMo(period=2, codec=c), lambda c: DiLoCo(codec=c)),
        lambda c: DiLoCo(period=2, mixing=0.5, codec=c),
        lambda c: Budget(LocalSGD(2, codec=c), "1MB/step"),
        *(*KEEPING, lambda c: MinibatchLocalSGD(2, codec=c)),
    ],
)
def test_a_vote_is_refused_where_anything_but_a_gradient_is_coded(vote: Codec, make: Any) -> None:
    with pytest.raises(ConfigError, match=r"plus or minus one.*Use AllReduce\(.*, or .* such as ErrorFeedback\(OneBit"):
        make(vote).check(2)
    words = "Put ErrorFeedback inside" if isinstance(vote, BetweenNodes) else "without bound. Use AllReduce"
    with pytest.raises(ConfigError, match=words):
        ErrorFeedback(vote)
    AllReduce(vote).check(2)
    SlowMo(AllReduce(vote), period=2).check(2)


@pytest.mark.parametrize("make", [lambda c: Choco(codec=c), CompressedMomentum, ZeroOne])
def test_a_vote_is_refused_where_feedback_is_the_strategy_s_own(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"Use AllReduce\(MajorityVote\(\)\), or .* such as OneBit\(\)"):
        make(MajorityVote())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LocalSGD(2, codec=Bf16(), weights="samples"), "codecs need equal weights"),
        (lambda: SlowMo(LocalSGD(2), codec=Bf16()), "Use base=Local"),
        (lambda: Sharded(SlowMo(codec=Bf16())).check(2), "Use codec=None"),
        (lambda: Sharded(Offloaded(DiLoCo(codec=Bf16()))).check(2), "Use codec=None"),
        (lambda: SlowMo(exact=False, codec=Bf16()), "Use base=Local"),
        (lambda: AllReduce(3), "codec must be a Codec or None"),
        (lambda: Choco(step_size=0.0), r"step_size=0\.0: must lie in \(0, 1\]"),
        (lambda: Choco(codec=ErrorFeedback(OneBit())), r"Use OneBit\("),
        (lambda: Choco(codec=RandomK()), "copies would diverge"),
        (lambda: Choco(codec=Sketch()), "copies would diverge"),
        (lambda: Choco(OnePeerExponential()).check(4), "changes from step to step"),
    ],
)
def test_pairs_that_cannot_work_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("outer", [SlowMo, DiLoCo])
@pytest.mark.parametrize("base", [Gossip(), NoLoCo(period=3), OverlapLocalSGD(period=3)], ids=str)
def test_a_coded_outer_step_is_the_plain_one_but_for_rounding(outer: Any, base: Strategy) -> None:
    """Also around bases whose workers differ after a round, as their average is a plain mean."""

    def body(comm: Comm, strategy: Strategy) -> Tensor:
        model = torch.nn.Linear(20, 10)
        for p in model.parameters():
            torch.nn.init.constant_(p, 0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        worker = thinwire.attach(model, optimizer, strategy, comm=comm)
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(12):
            x = torch.randn(8, 20, generator=generator)
            optimizer.zero_grad()
            (model(x) - 3 * x[:, :10]).pow(2).mean().backward()
            optimizer.step()
        with worker.consensus():
            return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()

    plain, coded = (
        thinwire.run_threads(3, partial(body, strategy=strategy))
        for strategy in (outer(base, period=6), outer(base, period=6, codec=Bf16()))
    )
    assert all(torch.equal(coded[0], each) for each in coded)
    assert 0 < (coded[0] - plain[0]).norm() < 5e-3 * (plain[0] - 0.1).norm()


@pytest.mark.parametrize(
    "kind", [kind for kind in recipe_classes().values() if issubclass(kind, Codec)], ids=lambda kind: kind.__name__
)
def test_a_codec_s_repr_is_read_back_as_it_is(kind: Any) -> None:
    for recipe in (AllReduce(kind()), LocalSGD(3, codec=kind()), SlowMo(codec=kind())):
        assert thinwire.parse(repr(recipe)) == recipe
