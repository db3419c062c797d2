# SPDX-License-Identifier: Apache-2.0
"""Casts: rounding, and sums."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from tests.problems import Regression, distance, together
from thinwire import AllReduce, Bf16, Codec, Comm, Fp16, Fp32, run_threads
from thinwire.methods.codecs.base import State
from thinwire.methods.reduce.compressed_all_reduce import compressed_mean_

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
    assert codec.linear
    assert torch.equal(codec.encode(a, {}) + codec.encode(b, {}), codec.encode(a + b, {}))


@pytest.mark.parametrize("codec", CASTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_cast_keeps_no_state_and_decodes_into_the_dtype_that_it_got(codec: Codec, dtype: torch.dtype) -> None:
    state: State = {}
    x = torch.tensor([1.0, -0.5, 0.0, 2.0], dtype=dtype)
    back = codec.decode(codec.encode(x, state), x)
    assert torch.equal(back, x)
    assert back.dtype == dtype
    assert state == {}


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
