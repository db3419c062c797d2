# SPDX-License-Identifier: Apache-2.0
"""Payloads of codecs: edge cases, what each code sends, sums and casts. The battery has bytes and means of all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

from tests.oracles import codecs as oracles
from tests.problems import Regression, distance, normal, together
from tests.rules import for_each, refusals
from thinwire import AllReduce, Bf16, Codec, Comm, Fp16, Fp32, run_threads
from thinwire.core.kernels import clip_outliers
from thinwire.methods.codecs.base import DrawKey, draw_key, worker_key
from thinwire.methods.codecs.cast import Fp8
from thinwire.methods.codecs.feedback import ErrorFeedback
from thinwire.methods.codecs.majority import MajorityVote
from thinwire.methods.codecs.natural import Natural
from thinwire.methods.codecs.one_bit import OneBit
from thinwire.methods.codecs.qsgd import QSGD
from thinwire.methods.codecs.quantize import Quantize
from thinwire.methods.codecs.random_k import RandomK
from thinwire.methods.codecs.sketch import Sketch
from thinwire.methods.codecs.terngrad import TernGrad
from thinwire.methods.codecs.top_k import TopK
from thinwire.methods.reduce.compressed_all_reduce import compressed_mean_

SIZES = [0, 1, 7, 8, 9, 63, 64, 65, 1000]
CODECS: list[Codec] = [
    *(Fp32(), Bf16(), Fp16(), Fp8(block=64), Fp8("e5m2", 64), OneBit(64), OneBit(64, norm="l2"), OneBit(whole=True)),
    *(Quantize(1, 64), Quantize(2, 64), Quantize(3, 64, dither=True), Quantize(4, 64, correlated=True)),
    *(Quantize(5, 64), Quantize(6, 64), Quantize(7, 64), Quantize(8, 64), QSGD(4, 64), TernGrad(64), Natural()),
    *(MajorityVote(), TopK(0.1), RandomK(0.1), RandomK(0.1, unbiased=False), Sketch(3, 64, 2)),
]


def decoded(codec: Codec, x: Tensor, key: int = 5) -> Tensor:
    return codec.decode(codec.encode(x, {}, key), x, key)


@for_each(CODECS)
def test_a_vector_of_zeros_is_decoded_as_zeros_even_with_minus_signs(codec: Codec) -> None:
    for zero in (0.0, -0.0):
        y = decoded(codec, torch.full((130,), zero))
        if isinstance(codec, MajorityVote):
            assert torch.equal(y, torch.full((130,), 1.0 if str(zero) == "0.0" else -1.0))
        elif isinstance(codec, Quantize) and codec.dither:
            assert not y.abs().max()
        else:
            assert torch.equal(y, torch.zeros(130))


@for_each([c for c in CODECS if not isinstance(c, MajorityVote)])
def test_a_block_of_zeros_is_decoded_as_zeros_beside_others(codec: Codec) -> None:
    if isinstance(codec, (MajorityVote, Sketch)) or (isinstance(codec, OneBit) and codec.whole):
        return
    x = torch.cat([normal(64), torch.zeros(64), normal(64, 1)])
    assert not decoded(codec, x)[64:128].any()


@for_each(CODECS)
def test_subnormal_numbers_are_decoded_as_finite_ones(codec: Codec) -> None:
    x = torch.full((70,), 1e-42)
    x[::3] = -2e-42
    x[1] = 1e-45
    y = decoded(codec, x)
    assert y.isfinite().all()
    if not isinstance(codec, (MajorityVote, RandomK)):
        assert y.abs().max() <= 2.0**-126


# -- keys --------------------------------------------------------------------------------------------------------------


def test_keys_differ_by_everything_that_goes_into_them() -> None:
    keys = {
        draw_key(seed, step, rank, stage, offset)
        for seed in range(3)
        for step in range(3)
        for rank in range(3)
        for stage in range(3)
        for offset in (0, 8, 64)
    }
    keys |= {worker_key(7, rank, 4, piece) for rank in range(4) for piece in range(6)}
    assert len(keys) == 3**5 + 24
    assert all(0 <= key < 1 << 63 for key in keys)


def test_workers_share_a_key_and_their_shifts_divide_the_unit_interval() -> None:
    keys = [worker_key(draw_key(1, 2), rank, 4, 9) for rank in range(4)]
    assert len({key.shared for key in keys}) == 1
    assert [key.shift for key in keys] == [0.0, 0.25, 0.5, 0.75]
    assert isinstance(draw_key(1, 2), DrawKey)
    assert draw_key(1, 2).shared == draw_key(1, 2)


# -- means and variances -----------------------------------------------------------------------------------------------


@for_each([2, 3, 5, 8])
def test_the_largest_element_and_whole_levels_are_sent_exactly(bits: int) -> None:
    levels = 2 ** (bits - 1) - 1
    x = torch.arange(-levels, levels + 1, dtype=torch.float32)[:64] * 0.25
    x[0], x[-1] = -levels * 0.25, levels * 0.25
    for key in range(20):
        assert torch.allclose(decoded(Quantize(bits, 256), x, key), x, rtol=1e-6, atol=0)


def test_errors_of_independent_draws_average_out_and_those_of_correlated_draws_cancel() -> None:
    x, size = normal(512), 8

    def error(codec: Codec) -> float:
        means = [
            torch.stack([decoded(codec, x, worker_key(draw_key(0, t), rank, size)) for rank in range(size)]).mean(0)
            for t in range(40)
        ]
        return float((torch.stack(means) - x).square().mean())

    one = float((torch.stack([decoded(Quantize(3, 64), x, t) for t in range(40)]) - x).square().mean())
    assert error(Quantize(3, 64)) == pytest.approx(one / size, rel=0.1)
    assert error(Quantize(3, 64, correlated=True)) < 0.4 * one / size


def test_terngrad_sends_three_values_per_block_and_clips_outliers() -> None:
    x = normal(128)
    x[5] = 40.0
    y = decoded(TernGrad(64), x)
    for block, rows in zip(y.split(64), x.split(64), strict=True):
        scale = min(2.5 * float(rows.std(correction=0)), float(rows.abs().max()))
        values = block.abs().unique()
        assert torch.allclose(values[values > 0], torch.tensor(scale), rtol=1e-5)
    assert decoded(TernGrad(64, clip=None), x)[5] == 40.0


@for_each([64, 256, 300, 5])
def test_terngrad_clips_each_block_at_its_number_of_standard_deviations(elements: int) -> None:
    x = 3.0 + normal(elements)
    x[1], x[-1] = -50.0, 1e4
    x[64:128] = 0.1
    x[128:192] *= 1e-12
    x[200:201] = torch.nan
    wanted = x.clone()
    for rows in wanted.split(64):
        deviation = float(rows.double().std(correction=0))
        if deviation > 1e-15:
            rows.clamp_(-1.5 * deviation, 1.5 * deviation)
    found = clip_outliers(x, block=64, deviations=1.5)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0.0, equal_nan=True)
    assert torch.equal(found[64:128], x[64:128])


def test_natural_compression_rounds_to_the_powers_of_two_around_a_number() -> None:
    x = torch.tensor([3.0, -3.0, 4.0, -0.7, 1e-30, 3e38, 0.0, 1.0])
    found = decoded(Natural(), x.repeat(3000), draw_key(0, 1)).view(3000, -1)
    assert found[:, 0].unique().tolist() == [2.0, 4.0]
    assert found[:, 1].unique().tolist() == [-4.0, -2.0]
    assert found[:, 2].unique().tolist() == [4.0]
    assert found[:, 3].unique().tolist() == [-1.0, -0.5]
    assert found.isfinite().all()


# -- biased codecs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("n", SIZES)
def test_one_bit_sends_signs_and_scales(n: int, norm: str) -> None:
    x = normal(n)
    for codec, block in ((OneBit(64, norm=norm), 64), (OneBit(norm=norm, whole=True), max(n, 1))):  # type: ignore[arg-type]
        assert torch.allclose(decoded(codec, x), oracles.signs(block, norm)(x), rtol=1e-6, atol=0)


@for_each([*CODECS])
def test_encoding_with_a_residual_leaves_exactly_the_new_residual(codec: Codec) -> None:
    if codec.traits.residual_after_sum or isinstance(codec, MajorityVote):
        return
    for n in (0, 1, 9, 200):
        x, residual = normal(n), normal(n, 1)
        kept, updated = residual.clone(), x.clone()
        payload = codec.encode_with_residual_(updated, residual, 9)
        assert torch.equal(residual, kept)
        assert torch.equal(payload, codec.encode(x + residual, {}, 9))
        assert torch.equal(updated, x + residual - codec.decode(payload, x, 9))


@for_each([OneBit(64), OneBit(64, norm="l2"), OneBit(whole=True)])
def test_pieces_are_encoded_as_they_would_be_one_by_one(codec: OneBit) -> None:
    x, residual, cuts = normal(300), normal(300, 1), [slice(0, 128), slice(128, 256), slice(256, 300), slice(300, 300)]
    updated = x.clone()
    found = codec.encode_pieces_with_residual_(updated, residual, cuts, [0] * 4)
    for cut, payload in zip(cuts, found, strict=True):
        y = codec.decode(payload, x[cut])
        assert payload.numel() == codec.nbytes(cut.stop - cut.start)
        assert torch.equal(updated[cut], (x + residual)[cut] - y)
        if not codec.whole:
            assert torch.equal(payload, codec.encode((x + residual)[cut], {}))
    total = codec.decode_sum([found[0], found[1]], x[:128], [0, 0])
    assert torch.equal(total, codec.decode(found[0], x[:128]) + codec.decode(found[1], x[:128]))


def test_top_k_sends_the_largest_elements_exactly() -> None:
    x = normal(200)
    assert torch.equal(decoded(TopK(0.1), x), oracles.largest(0.1)(x))
    assert torch.equal(decoded(TopK(1.0), x), x)


def test_payloads_of_random_k_add_up_and_have_the_same_indices_on_all_ranks() -> None:
    a, b, codec = normal(300), normal(300, 1), RandomK(0.2, unbiased=False)
    total = codec.encode(a, {}, 4) + codec.encode(b, {}, 4)
    y = codec.decode(total, a, 4)
    assert torch.equal(y != 0, decoded(codec, a, 4) != 0)
    assert torch.equal(y[y != 0], (a + b)[y != 0])
    assert int((y != 0).sum()) == 60
    assert torch.allclose(decoded(RandomK(0.2), a, 4), 5 * decoded(codec, a, 4))


def test_fp8_keeps_the_largest_element_and_rounds_others_to_its_mantissa() -> None:
    x = normal(640)
    for kind, unit in (("e4m3", 2.0**-4), ("e5m2", 2.0**-3)):
        y = decoded(Fp8(kind, 64), x)  # type: ignore[arg-type]
        seen = x.abs() > 2.0**-6 * x.view(-1, 64).abs().amax(1).repeat_interleave(64)
        assert ((y - x).abs()[seen] <= unit * x.abs()[seen] * 1.001).all()
        top = x.view(-1, 64).abs().argmax(1)
        assert torch.allclose(y.view(-1, 64).gather(1, top[:, None]), x.view(-1, 64).gather(1, top[:, None]), rtol=1e-6)


def test_sketches_add_up_and_the_largest_elements_are_decoded() -> None:
    codec = Sketch(5, 256, 4)
    x, y = 0.01 * normal(3000), 0.01 * normal(3000, 1)
    x[[7, 900, 2999]] = torch.tensor([5.0, -4.0, 3.0])
    y[[7, 1500]] = torch.tensor([1.0, 2.0])
    table = codec.encode(x, {}, 3) + codec.encode(y, {}, 3)
    assert torch.allclose(table, codec.encode(x + y, {}, 3), atol=1e-5)
    found = codec.decode(table, x, 3)
    assert found.nonzero().view(-1).tolist() == [7, 900, 1500, 2999]
    assert torch.allclose(found[[7, 900, 1500, 2999]], (x + y)[[7, 900, 1500, 2999]], atol=0.1)


def test_a_sketch_sends_vectors_as_they_are_where_its_table_is_no_smaller() -> None:
    x = normal(1280)
    assert torch.equal(decoded(Sketch(5, 256, 4), x), x)


# -- what is refused ---------------------------------------------------------------------------------------------------


test_codecs_out_of_range_are_refused = refusals(
    [
        (lambda: OneBit(block=12), "block=12: must be a multiple of 8"),
        (lambda: OneBit(norm="max"), "norm must be 'l1' or 'l2'"),  # type: ignore[arg-type]
        (lambda: Quantize(bits=9), r"bits=9: must lie in 1\.\.8"),
        (lambda: Quantize(block=4), "block=4"),
        (lambda: QSGD(bits=1), r"bits=1: must lie in 2\.\.8"),
        (lambda: QSGD(bucket=9), "bucket=9"),
        (lambda: TernGrad(clip=0.0), r"clip=0\.0"),
        (lambda: TernGrad(block=1), "block=1"),
        (lambda: TopK(0.0), r"fraction=0\.0"),
        (lambda: RandomK(1.5), r"fraction=1\.5"),
        (lambda: Sketch(rows=4), "rows=4: must be odd for a median"),
        (lambda: Sketch(columns=100), "large elements would collide"),
        (lambda: Fp8(block=0), "block=0"),
        (lambda: Fp8("e3m4"), "kind must be"),  # type: ignore[arg-type]
        (lambda: ErrorFeedback(ErrorFeedback()), "already has error feedback"),
        (lambda: ErrorFeedback(TernGrad()), "could grow without bound"),
        (lambda: ErrorFeedback(RandomK()), "could grow without bound"),
        (lambda: ErrorFeedback(Quantize(4)), "could grow without bound"),
        (lambda: ErrorFeedback(QSGD(4)), "could grow without bound"),
    ]
)


META: list[Codec] = [
    *(Fp32(), Bf16(), Fp16(), Fp8(block=16), OneBit(16), OneBit(whole=True), TopK(0.1), RandomK(0.1), MajorityVote()),
    *(Quantize(3, 16), QSGD(3, 16), TernGrad(16), TernGrad(16, clip=None), Natural(), Sketch(3, 64, 2)),
]


@pytest.mark.parametrize("codec", META, ids=str)
@pytest.mark.parametrize("n", [0, 5, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_vectors_without_data_have_payloads_of_the_same_size(codec: Codec, n: int, dtype: torch.dtype) -> None:
    shapes: list[list[tuple[object, ...]]] = []
    for device in ("cpu", "meta"):
        x, residual = torch.ones(n, dtype=dtype, device=device), torch.zeros(n, device=device)
        payload, single, like = codec.encode(x, {}, 3), torch.ones(n, device=device), torch.empty(n, device=device)
        results = [payload, codec.decode(payload, x, 3), codec.encode_with_residual_(single, residual, 3)]
        results += codec.encode_pieces_with_residual_(single, residual, [slice(0, n), slice(n, n)], [3, 4])
        none = payload[: codec.nbytes(0) // payload.element_size()]
        codec.decode_pieces_([payload, none], single, [slice(0, n), slice(n, n)], [3, 3])
        shapes.append([(y.shape, y.dtype) for y in (*results, single, codec.decode_sum([payload] * 2, like, [3, 4]))])
        assert all(y.device.type == device for y in results)
        assert payload.nbytes == codec.nbytes(n)
    assert shapes[0] == shapes[1]


CASTS = [Bf16(), Fp16()]
UNIT = {Bf16(): 2.0**-8, Fp16(): 2.0**-11}
"""The largest relative rounding error of numbers in the normal range."""

numbers = some.floats(min_value=2.0**-13, max_value=60000.0, width=32)
vectors = some.lists(some.tuples(numbers, some.sampled_from([-1.0, 1.0])).map(lambda p: p[0] * p[1]), max_size=40)


@pytest.mark.parametrize("codec", CASTS, ids=str)
@given(values=vectors)
def test_a_cast_rounds_to_the_nearest_number_of_its_dtype(codec: Codec, values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    back = codec.decode(codec.encode(x, {}), x)
    assert back.dtype == x.dtype
    assert ((back - x).abs() <= UNIT[codec] * x.abs()).all()
    assert torch.equal(codec.decode(codec.encode(back, {}), back), back)


@pytest.mark.parametrize("codec", CASTS, ids=str)
@given(values=some.lists(some.tuples(some.integers(-64, 64), some.integers(-64, 64)), min_size=1, max_size=20))
def test_the_payload_of_a_sum_is_the_sum_of_payloads(codec: Codec, values: list[tuple[int, int]]) -> None:
    a, b = torch.tensor(values, dtype=torch.float32).T / 8
    assert codec.traits.linear
    assert torch.equal(codec.encode(a, {}) + codec.encode(b, {}), codec.encode(a + b, {}))


def test_half_precision_overflows_where_brain_float_does_not() -> None:
    x = torch.tensor([65504.0, 70000.0])
    assert Fp16().decode(Fp16().encode(x, {}), x).tolist() == [65504.0, float("inf")]
    assert Bf16().decode(Bf16().encode(x, {}), x).isfinite().all()


@pytest.mark.parametrize("codec", CASTS, ids=str)
@pytest.mark.parametrize("n", [1, 3, 4])
def test_gradients_that_travel_as_casts_train_nearly_the_same(codec: Codec, n: int) -> None:
    problem = Regression(n, 20, torch.float32)
    plain = together(n, AllReduce(), problem, [0.1] * 20)
    cast = together(n, AllReduce(codec), problem, [0.1] * 20)
    assert distance(cast, plain) < 10 * UNIT[codec]
    assert torch.equal(cast, cast[:1].expand_as(cast))
    assert n == 1 or not torch.equal(cast, plain)


def test_sums_of_sixteen_bits_in_fp32_are_rounded_once() -> None:
    xs = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()

    def run(comm: Comm) -> torch.Tensor:
        return compressed_mean_(comm, xs[comm.rank].clone(), Fp32(), {}).wait()

    assert all(torch.equal(each, xs.float().mean(0).bfloat16()) for each in run_threads(4, run))
