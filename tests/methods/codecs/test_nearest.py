# SPDX-License-Identifier: Apache-2.0
"""Nearest levels, the largest of chunks, decaying residuals, and means in one round."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import thinwire
from tests.oracles import codecs as oracles
from tests.oracles.common import Descent
from tests.oracles.machines import Means, path
from tests.problems import Regression, distance, normal, together
from tests.rules import for_each, refusals
from thinwire import (
    EASGD,
    AllReduce,
    BetweenNodes,
    Choco,
    ChunkedTopK,
    Codec,
    Comm,
    CommError,
    CompressedMomentum,
    ConfigError,
    DiLoCo,
    ErrorFeedback,
    Gathered,
    LocalSGD,
    Nearest,
    NonFiniteError,
    OneBit,
    OverlapLocalSGD,
    Quantize,
    RandomK,
    TopK,
)
from thinwire.methods.reduce.compressed_all_reduce import compressed_mean_
from thinwire.planning.plan import explain


def decoded(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x, {}), x)


# -- nearest levels ----------------------------------------------------------------------------------------------------


@for_each(range(1, 9))
def test_values_are_those_of_the_oracle(bits: int) -> None:
    for n in (1, 16, 100):
        x = normal(n, n)
        assert torch.allclose(decoded(Nearest(bits, 16), x), oracles.nearest(bits, 16)(x), atol=1e-5)


@pytest.mark.parametrize(("bits", "lost"), [(1, 0.37), (2, 0.122), (3, 0.039), (4, 0.0125), (8, 2e-4)])
def test_of_normal_numbers_little_is_lost(bits: int, lost: float) -> None:
    x = normal(1 << 16)
    assert (decoded(Nearest(bits), x) - x).square().sum() < lost * x.square().sum()


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(
    "x", [torch.eye(2048)[3], normal(2048).pow(9), 1e-20 * normal(2048), torch.full((2048,), -3.0)]
)
def test_no_vector_has_an_error_as_large_as_itself(bits: int, x: Tensor) -> None:
    x = x / x.abs().max() * x.abs().max().clamp(max=1.0)
    assert (decoded(Nearest(bits), x) - x).norm() < x.norm()


# -- the largest of each chunk -----------------------------------------------------------------------------------------


def test_of_each_chunk_the_largest_are_sent() -> None:
    x, codec = normal(100), ChunkedTopK(3, 16, 8)
    y = decoded(codec, x)
    assert int(y.count_nonzero()) == codec.count(100) == 6 * 3 + 1
    for begin in range(0, 100, 16):
        here, k = x[begin : begin + 16], 3 if begin < 96 else 1
        assert set(y[begin : begin + 16].nonzero().flatten().tolist()) == set(here.abs().topk(k).indices.tolist())
    kept = y != 0
    assert torch.allclose(y[kept], x[kept], rtol=0.02)


def test_a_message_is_141_times_smaller_than_fp32() -> None:
    assert ChunkedTopK().nbytes(4096) == 4 + 64 * 12 // 8 + 64 * 2 // 8 == 116
    codec = ErrorFeedback(Gathered(ChunkedTopK()), decay=0.95)
    card = explain(DiLoCo(period=10, codec=codec), parameters=[1 << 20] * 4, workers=4)
    assert card.sent_bytes_per_step * 10 == 3 * (16 + 116 * 1024)


def test_places_beyond_a_chunk_are_refused_before_anything_is_written() -> None:
    codec, total = ChunkedTopK(2, 100), torch.zeros(130)
    payload = codec.encode(normal(130), {})
    payload[4:6] = 255  # the first place is 127
    with pytest.raises(ConfigError, match="a position is outside its chunk"):
        codec.decode(payload, total)
    with pytest.raises(ConfigError, match="must be"):
        codec.decode(payload[1:], total)


def test_a_vector_with_nan_has_no_largest() -> None:
    x = normal(64)
    x[5] = torch.nan
    with pytest.raises(NonFiniteError, match=r"some of \d+ elements are NaN"):
        ChunkedTopK(3, 16).encode(x, {})


# -- decay -------------------------------------------------------------------------------------------------------------


def test_a_residual_decays_between_messages() -> None:
    codec, state = ErrorFeedback(TopK(0.5), decay=0.5), dict[str, Tensor]()
    x = torch.tensor([3.0, 1.0])
    assert codec.decode(codec.encode(x, state), x).tolist() == [3.0, 0.0]
    assert state["error"].tolist() == [0.0, 0.5]
    y = torch.tensor([1.0, 1.0])
    assert codec.decode(codec.encode(y, state), y).tolist() == [0.0, 1.5]


@pytest.mark.parametrize("inner", [Gathered(TopK(0.3)), RandomK(0.3, unbiased=False), TopK(0.3)], ids=str)
def test_every_kind_of_mean_lets_the_residual_decay(inner: Codec) -> None:
    def body(comm: Comm, decay: float) -> Tensor:
        state: dict[str, Tensor] = {}
        compressed_mean_(comm, normal(40, comm.rank), ErrorFeedback(inner, decay), state).wait()
        return state["error"]

    for whole, less in zip(*(thinwire.run_threads(2, lambda c, d=d: body(c, d)) for d in (1.0, 0.25)), strict=True):
        assert whole.norm() > 0.1
        assert torch.allclose(0.25 * whole, less)


# -- one round ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 4])
def test_sparse_loco_equals_its_oracle(n: int) -> None:
    problem = Regression(n, 16, torch.float32)
    codec = ErrorFeedback(Gathered(ChunkedTopK(3, 16)), decay=0.9)
    found = together(n, LocalSGD(4, codec=codec), problem, [0.1] * 16)
    mean = oracles.Decaying(oracles.largest_of_chunks(3, 16, 2), 0.9)
    start, rates = problem.start.expand(n, -1), [0.1] * 16
    expected = path(Means(4, agree=oracles.coded(mean)), problem.gradient, start, Descent(rates), rates)[-1]
    assert distance(found, expected) < 2e-5
    assert torch.equal(found, found[:1].expand_as(found))


def test_a_gathered_mean_is_that_of_the_decoded_vectors() -> None:
    codec = ErrorFeedback(Gathered(Nearest(4, 16)))
    expected = torch.stack([decoded(Nearest(4, 16), normal(40, rank)) for rank in range(3)]).mean(0)
    for mean in thinwire.run_threads(3, lambda c: compressed_mean_(c, normal(40, c.rank), codec, {}).wait()):
        assert torch.allclose(mean, expected, atol=1e-6)


def test_eight_bits_in_one_round_send_what_two_stages_do_between_two_workers() -> None:
    for workers in (2, 4):
        one, two = (
            explain(AllReduce(codec), parameters=[1 << 20], workers=workers)
            for codec in (Gathered(Quantize(8)), Quantize(8))
        )
        assert one.sent_bytes_per_step / two.sent_bytes_per_step == pytest.approx(workers / 2, rel=1e-3)
        assert one.messages_per_step == two.messages_per_step / 2


def test_workers_with_different_codecs_are_told() -> None:
    def body(comm: Comm) -> str:
        with pytest.raises(CommError, match="of another codec") as found:
            codec = Nearest(2, 16) if comm.rank else Quantize(2, 16)
            compressed_mean_(comm, normal(40), Gathered(codec), {}).wait()
        return str(found.value)

    assert all("All ranks must run the same recipe" in text for text in thinwire.run_threads(2, body))


test_wrong_values_are_refused_with_the_fix = refusals(
    [
        (lambda: Nearest(0), r"bits=0: must lie in 1\.\.8"),
        (lambda: Nearest(4, 12), "block=12: must be a multiple of 8"),
        (lambda: AllReduce(Nearest()).check(2), r"Use ErrorFeedback\(Nearest"),
        (lambda: AllReduce(ChunkedTopK()).check(2), r"Use ErrorFeedback\(ChunkedTopK"),
        (lambda: ChunkedTopK(0), r"kept=0: must lie in 1\.\.4096"),
        (lambda: ChunkedTopK(chunk=1 << 20), r"chunk=1048576: must lie in 2\.\.16384"),
        (lambda: ChunkedTopK(bits=9), r"bits=9: must lie in 1\.\.8"),
        (lambda: ErrorFeedback(decay=1.5), r"decay=1\.5: must lie in \(0, 1\]"),
        (lambda: ErrorFeedback(decay=0.0), r"decay=0\.0: must lie in \(0, 1\]. 1 keeps the whole residual"),
        (lambda: Choco(codec=Gathered(OneBit())), "Use the codec inside it"),
        (lambda: CompressedMomentum(BetweenNodes(OneBit())), "Use the codec inside it"),
        (lambda: Gathered(RandomK()), "an all-reduce can add its payloads"),
        (lambda: Gathered(ErrorFeedback()), r"Use ErrorFeedback\(Gathered\(OneBit\(\)\)\)"),
        (lambda: OverlapLocalSGD(2, codec=ErrorFeedback(decay=0.9)).check(2), "Use decay=1"),
        (lambda: EASGD(2, codec=ErrorFeedback(decay=0.9)).check(2), "Use decay=1"),
        (lambda: DiLoCo(mixing=1.0, codec=ErrorFeedback(decay=0.9)).check(2), "Use decay=1"),
    ]
)
