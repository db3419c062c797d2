# SPDX-License-Identifier: Apache-2.0
"""Signs, few bits and random numbers: what they compute, by C and by torch."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from torch import Tensor

from tests.core.kernels.natives import drawn, mixed, same_bits
from tests.rules import for_each
from thinwire import ConfigError
from thinwire.core.kernels import (
    decode_signs_,
    dequantize_,
    encode_signs_,
    mix64,
    quantize_,
    quantized_nbytes,
    sign_nbytes,
    sum_signs_,
    uniform,
)

pytestmark = pytest.mark.usefixtures("implementation")

SIZES = (0, 1, 7, 8, 9, 15, 16, 17, 130, 2048, 5001)


def special(n: int) -> Tensor:
    """Numbers with all that is special about floats: both zeros, denormals, whole blocks of zeros."""
    x = drawn(n, n)
    x[1::11], x[2::13], x[3::17] = -0.0, 1e-42, 0.0
    x[n // 2 : n // 2 + 40] = 0
    return x


def encoded(x: Tensor, error: Tensor | None, *, block: int, norm: str = "l1", scale_bytes: int = 4) -> Tensor:
    payload = torch.full((sign_nbytes(x.numel(), block, scale_bytes),), 0xAA, dtype=torch.uint8)
    encode_signs_(x, error, payload, block=block, norm=norm, scale_bytes=scale_bytes)  # type: ignore[arg-type]
    return payload


def scales_of(payload: Tensor, count: int, scale_bytes: int) -> list[float]:
    raw = bytes(payload[: count * scale_bytes].tolist())
    if scale_bytes == 4:
        return list(struct.unpack(f"<{count}f", raw))
    return [struct.unpack("<f", b"\0\0" + raw[2 * i : 2 * i + 2])[0] for i in range(count)]


# -- signs -------------------------------------------------------------------------------------------------------------


@for_each([(8, "l1", 4), (13, "l2", 2), (2048, "l2", 4), (64, "l1", 2)])
def test_signs_and_scales_are_those_of_the_formula(case: tuple[int, str, int]) -> None:
    block, norm, scale_bytes = case
    for n in SIZES:
        x, error = special(n), 0.3 * special(n + 1)[:n]
        residual, rest = x + error, error.clone()
        payload = encoded(x, rest, block=block, norm=norm, scale_bytes=scale_bytes)
        blocks = residual.double().split(block) if n else ()
        assert len(payload) == -(-n // block) * scale_bytes + -(-n // 8)
        found = scales_of(payload, len(blocks), scale_bytes)
        for scale, part in zip(found, blocks, strict=True):
            true = part.abs().mean() if norm == "l1" else part.square().mean().sqrt()
            assert scale == pytest.approx(float(true), rel=1e-6 if scale_bytes == 4 else 2**-8, abs=1e-44)
        stream = payload[len(blocks) * scale_bytes :].tolist()
        assert [stream[i // 8] >> i % 8 & 1 for i in range(n)] == torch.signbit(residual).int().tolist()
        decoded = torch.empty(n)
        decode_signs_(payload, decoded, block=block, scale_bytes=scale_bytes)
        expected = [
            math.copysign(found[i // block], value) if found[i // block] else 0.0 for i, value in enumerate(residual)
        ]
        assert same_bits(decoded, torch.tensor(expected, dtype=torch.float32))
        assert same_bits(rest, residual - decoded)


def test_what_is_left_of_the_last_byte_is_zero() -> None:
    for n in range(1, 33):
        assert int(encoded(-torch.ones(n), None, block=64)[-1]) == 0xFF >> -n % 8


def test_a_block_of_zeros_stays_zero_and_leaves_no_residual() -> None:
    x = drawn(48)
    x[16:32] = 0
    x[17] = -0.0
    error, decoded = torch.zeros(48), torch.empty(48)
    for _ in range(3):
        decode_signs_(encoded(x, error, block=16), decoded, block=16)
        assert same_bits(decoded[16:32], torch.zeros(16)) and not error[16:32].any()


@for_each(["l1", "l2"])
def test_a_scale_of_bf16_is_the_nearest_and_the_residual_is_measured_from_it(norm: str) -> None:
    x, error, decoded = drawn(4096), torch.zeros(4096), torch.empty(4096)
    wide = scales_of(encoded(x, None, block=256, norm=norm), 16, 4)
    payload = encoded(x, error, block=256, norm=norm, scale_bytes=2)
    assert scales_of(payload, 16, 2) == torch.tensor(wide).bfloat16().float().tolist()
    decode_signs_(payload, decoded, block=256, scale_bytes=2)
    assert same_bits(error, x - decoded)


@for_each([(1, 8, 4), (1000, 128, 2), (9001, 9001, 4), (5000, 11, 4)])
def test_payloads_are_added_up_in_their_order(case: tuple[int, int, int]) -> None:
    n, block, scale_bytes = case
    payloads = torch.stack([encoded(drawn(n, seed), None, block=block, scale_bytes=scale_bytes) for seed in range(5)])
    total, part, expected = torch.full((n,), 7.0), torch.empty(n), torch.zeros(n)
    for payload in payloads:
        decode_signs_(payload, part, block=block, scale_bytes=scale_bytes)
        expected += part
    sum_signs_(payloads, total, block=block, scale_bytes=scale_bytes)
    assert same_bits(total, expected)
    sum_signs_(payloads[:0], total, block=block, scale_bytes=scale_bytes)
    assert not total.any()


@for_each([torch.bfloat16, torch.float16, torch.float64])
def test_other_floats_and_strides_are_converted(dtype: torch.dtype) -> None:
    x, error = drawn(200).to(dtype)[::2], torch.zeros(200, dtype=dtype)[::2]
    rest = torch.zeros(100)
    payload = encoded(x, error, block=16)
    assert payload.equal(encoded(x.float(), rest, block=16))
    assert error.equal(rest.to(dtype))
    decoded, wide = torch.zeros(200, dtype=dtype)[1::2], torch.empty(100)
    decode_signs_(payload, decoded, block=16)
    decode_signs_(payload, wide, block=16)
    assert decoded.equal(wide.to(dtype))


def test_nan_makes_its_block_nan() -> None:
    x = drawn(64)
    x[20] = math.nan
    decoded = torch.empty(64)
    decode_signs_(encoded(x, None, block=16), decoded, block=16)
    assert decoded.isnan().tolist() == [16 <= i < 32 for i in range(64)]


# -- random numbers ----------------------------------------------------------------------------------------------------


def test_random_numbers_are_two_rounds_of_mixing_of_index_and_key() -> None:
    seed = mix64(2**70 + 12345)
    expected = [(mixed(mixed(i ^ seed % 2**32) ^ seed >> 32) >> 8) * 2.0**-24 for i in range(100)]
    assert uniform(100, 2**70 + 12345).tolist() == expected


def test_the_mixing_of_64_bits_is_murmur_s() -> None:
    assert [mix64(key) for key in (0, 1)] == [0, 0xB456BCFC34C2CB2C]
    assert mix64(2**64 + 1) == mix64(1)


def test_a_random_number_depends_on_its_index_alone() -> None:
    whole = uniform(1000, 5)
    assert torch.cat([uniform(123, 5), uniform(877, 5, 123)]).equal(whole)
    assert not uniform(1000, 6).equal(whole)
    assert uniform(0, 5).shape == (0,)


def test_random_numbers_are_uniform_and_uncorrelated() -> None:
    x, y = uniform(1 << 18, 1).double(), uniform(1 << 18, 2).double()
    assert float(x.min()) >= 0 and float(x.max()) < 1
    error = (1 << 18) ** -0.5
    assert abs(float(x.mean()) - 0.5) < 4 * error * 12**-0.5
    counts = torch.histc(x, 256, 0, 1)
    assert float(((counts - 1024) ** 2 / 1024).sum()) < 255 + 5 * (2 * 255) ** 0.5
    for a, b in ((x, y), (x[1:], x[:-1])):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 5 * error


# -- few bits ----------------------------------------------------------------------------------------------------------


def quantized(x: Tensor, *, bits: int, block: int, key: int = 3, **how: object) -> tuple[Tensor, Tensor]:
    """The payload, and what it stands for."""
    scale_bytes = int(how.get("scale_bytes", 4))  # type: ignore[call-overload]
    payload = torch.full((quantized_nbytes(x.numel(), bits, block, scale_bytes),), 0xAA, dtype=torch.uint8)
    decoded, dither = torch.empty(x.numel()), bool(how.pop("dither", False))
    quantize_(x, payload, bits=bits, block=block, key=key, **how)  # type: ignore[arg-type]
    how.pop("norm", None)
    dequantize_(payload, decoded, bits=bits, block=block, key=key, dither=dither, **how)  # type: ignore[arg-type]
    return payload, decoded


def codes_of(payload: Tensor, n: int, bits: int, head: int) -> list[int]:
    plane = -(-n // 8)
    at = payload[head:].tolist()
    return [sum((at[bit * plane + i // 8] >> i % 8 & 1) << bit for bit in range(bits)) for i in range(n)]


@for_each(range(1, 9))
def test_codes_are_those_of_the_formula(bits: int) -> None:
    for n in (0, 1, 7, 8, 9, 130, 1100):
        x, levels = special(n), 2 ** (bits - 1) - 1
        payload, decoded = quantized(x, bits=bits, block=40)
        draws, count = uniform(n, 3).double(), -(-n // 40)
        assert len(payload) == 4 * count + bits * -(-n // 8)
        for i, code in enumerate(codes_of(payload, n, bits, 4 * count)):
            scale = float(x[i // 40 * 40 : i // 40 * 40 + 40].abs().max())
            ratio = float(x[i]) / scale if scale else 0.0
            place = (ratio + 1) / 2 if bits == 1 else ratio * levels + levels
            # fp32 may round a sum up to the next level.
            assert math.floor(place + float(draws[i])) in (code, code - 1)
            assert abs(place + float(draws[i]) - code) < 1 + 1e-4
            assert 0 <= code <= max(1, 2 * levels)
            centre, half = (0.5, 0.5) if bits == 1 else (levels, levels)
            assert float(decoded[i]) == pytest.approx((code - centre) / half * scale, rel=1e-6, abs=1e-44)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("scale_bytes", [2, 4])
def test_the_largest_element_is_exact_except_for_its_scale(bits: int, scale_bytes: int) -> None:
    for key in range(50):
        x = drawn(33, key)
        payload, decoded = quantized(x, bits=bits, block=64, key=key, scale_bytes=scale_bytes)
        place = int(x.abs().argmax())
        (scale,) = scales_of(payload, 1, scale_bytes)
        assert abs(float(x[place])) <= scale <= abs(float(x[place])) * (1 if scale_bytes == 4 else 1 + 2**-7)
        if scale_bytes == 4:
            assert float(decoded[place]) == pytest.approx(float(x[place]), rel=2e-7)


@for_each([2, 3, 5, 8])
def test_with_dither_the_error_is_uniform_whatever_the_input(bits: int) -> None:
    for x in (drawn(1 << 15), torch.linspace(-1, 1, 1 << 15)):
        x[0] = 1.01 * x.abs().max()
        _, decoded = quantized(x, bits=bits, block=1 << 15, dither=True)
        step = float(x[0]) / (2 ** (bits - 1) - 1)
        error = (decoded - x)[1:].double() / step
        assert float(error.abs().max()) < 0.5 + 1e-4
        assert float(error.square().mean()) == pytest.approx(1 / 12, rel=0.03)
        assert abs(float(torch.corrcoef(torch.stack([error, x[1:].double()]))[0, 1])) < 0.05


def test_shifted_draws_of_several_workers_complement_each_other() -> None:
    x, workers = drawn(4096), 8
    alone = sum(quantized(x, bits=3, block=4096, key=key)[1] for key in range(workers)) / workers - x
    shared = sum(quantized(x, bits=3, block=4096, key=1, shift=w / workers)[1] for w in range(workers)) / workers - x
    assert float(shared.square().mean()) < float(alone.square().mean()) / 4
    step = float(x.abs().max()) / 3
    assert float(shared.abs().max()) <= step / workers * 1.001


def test_few_bits_take_other_floats_and_blocks_of_zeros() -> None:
    x = drawn(100).bfloat16()
    assert quantized(x, bits=4, block=32)[0].equal(quantized(x.float(), bits=4, block=32)[0])
    assert not quantized(torch.zeros(40), bits=4, block=16)[1].any()
    payload, wide = quantized(drawn(100), bits=4, block=32)
    narrow = torch.zeros(200, dtype=torch.float64)[::2]
    dequantize_(payload, narrow, bits=4, block=32, key=3)
    assert narrow.float().equal(wide)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    x, payload = torch.ones(16), torch.zeros(6, dtype=torch.uint8)
    wrong = [
        (lambda: encode_signs_(x, None, payload[:5], block=16), "must be 6 bytes"),
        (lambda: encode_signs_(x, None, payload.float(), block=16), "uint8"),
        (lambda: encode_signs_(x, x[:3].clone(), payload, block=16), "residual has 3"),
        (lambda: encode_signs_(x, None, payload, block=0), "block=0"),
        (lambda: encode_signs_(x, None, payload, block=16, scale_bytes=3), "scale_bytes=3"),
        (lambda: encode_signs_(x, None, payload, block=16, norm="l3"), "norm='l3'"),  # type: ignore[arg-type]
        (lambda: decode_signs_(payload[1:], x, block=16), "must be 6 bytes"),
        (lambda: sum_signs_(payload[None, :4], x, block=16), "must be 6 bytes"),
        (lambda: quantize_(x, payload, bits=9, block=16, key=0), "bits=9"),
        (lambda: quantize_(x, payload, bits=0, block=16, key=0), "bits=0"),
        (lambda: quantize_(x, payload, bits=1, block=16, key=0, shift=1.0), "shift=1.0"),
        (lambda: quantize_(x, payload, bits=2, block=16, key=0), "must be 8 bytes"),
        (lambda: dequantize_(payload, x, bits=3, block=16, key=0), "must be 10 bytes"),
        (lambda: encode_signs_(x, None, payload.to("meta"), block=16), "one device"),
    ]
    for call, reason in wrong:
        with pytest.raises(ConfigError, match=reason):
            call()
