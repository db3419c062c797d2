# SPDX-License-Identifier: Apache-2.0
"""Strategies with codecs: what residuals hold, bytes, and what is refused."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.engine import attach
from tests.problems import Regression, together, watched
from tests.rules import for_each, refusals
from thinwire import (
    EASGD,
    AllReduce,
    BetweenNodes,
    Bf16,
    Budget,
    CoCoD,
    Codec,
    Comm,
    CompressedMomentum,
    ConfigError,
    DiLoCo,
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
    Sharded,
    SlowMo,
    Strategy,
    ZeroOne,
)
from thinwire.methods.codecs.feedback import ErrorFeedback
from thinwire.methods.codecs.majority import MajorityVote
from thinwire.methods.codecs.one_bit import OneBit
from thinwire.methods.codecs.quantize import Quantize
from thinwire.methods.codecs.random_k import RandomK
from thinwire.methods.codecs.sketch import Sketch
from thinwire.methods.codecs.top_k import TopK
from thinwire.methods.strategies.gossip.choco import Choco
from thinwire.planning.plan import explain

RATES = [0.1] * 16
SMALL = ErrorFeedback(OneBit(8))


def test_workers_with_different_starts_are_equal_after_the_first_compressed_average() -> None:
    problem = Regression(3, 8, torch.float32)
    starts = torch.randn(3, 34, generator=torch.Generator().manual_seed(5))
    for strategy in (LocalSGD(4, codec=SMALL), SlowMo(period=4, codec=SMALL)):
        found = together(3, strategy, problem, RATES[:8], starts=starts)
        assert torch.equal(found, found[:1].expand_as(found))


KEEPING: list[Any] = [
    lambda c: CoCoD(2, c),
    lambda c: OverlapLocalSGD(4, codec=c),
    lambda c: OverlapLocalSGD(4, pull=0.3, delay=2, codec=c),
    lambda c: EASGD(2, codec=c),
    lambda c: EASGD(2, momentum=0.5, codec=c),
]
"""Methods whose workers do not all return to the mean."""


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


CODED: list[Any] = [
    *(lambda c: LocalSGD(2, codec=c), lambda c: SlowMo(period=2, codec=c), lambda c: DiLoCo(codec=c)),
    *(*KEEPING, lambda c: MinibatchLocalSGD(2, codec=c)),
]


@for_each(product([OneBit(), TopK(), RandomK(unbiased=False), Sketch()], [AllReduce, *CODED]))
def test_a_biased_codec_without_feedback_is_refused_and_the_fix_is_named(pair: tuple[Codec, Any]) -> None:
    codec, make = pair
    with pytest.raises(ConfigError, match=r"may diverge. Use ErrorFeedback\("):
        make(codec).check(2)
    make(ErrorFeedback(codec)).check(2)


MIXED: list[Any] = [lambda c: DiLoCo(period=2, mixing=0.5, codec=c), lambda c: Budget(LocalSGD(2, codec=c), "1MB/step")]


@for_each(product([MajorityVote(), Gathered(MajorityVote()), BetweenNodes(MajorityVote())], [*CODED, *MIXED]))
def test_a_vote_is_refused_where_anything_but_a_gradient_is_coded(pair: tuple[Codec, Any]) -> None:
    vote, make = pair
    with pytest.raises(ConfigError, match=r"plus or minus one.*Use AllReduce\(.*, or .* such as ErrorFeedback\(OneBit"):
        make(vote).check(2)
    words = "Put ErrorFeedback inside" if isinstance(vote, BetweenNodes) else "without bound. Use AllReduce"
    with pytest.raises(ConfigError, match=words):
        ErrorFeedback(vote)
    AllReduce(vote).check(2)
    SlowMo(AllReduce(vote), period=2).check(2)


@for_each([lambda c: Choco(codec=c), CompressedMomentum, ZeroOne])
def test_a_vote_is_refused_where_feedback_is_the_strategy_s_own(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"Use AllReduce\(MajorityVote\(\)\), or .* such as OneBit\(\)"):
        make(MajorityVote())


test_pairs_that_cannot_work_are_refused = refusals(
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
    ]
)


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
