# SPDX-License-Identifier: Apache-2.0
"""The largest elements, indices as bits, and count sketches, by C and by torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.core.kernels.natives import drawn, mixed
from tests.rules import for_each
from thinwire import ConfigError, NonFiniteError
from thinwire.core.kernels import (
    heavy,
    mix64,
    pack_indices,
    packed_nbytes,
    sketch_,
    top_k,
    uniform,
    unpack_indices,
    unsketch,
)

pytestmark = pytest.mark.usefixtures("implementation")


def by_sorting(x: Tensor, k: int) -> list[int]:
    values = x.abs().tolist()
    return sorted(sorted(range(len(values)), key=lambda i: (-values[i], i))[: max(k, 0)])


# -- the largest -------------------------------------------------------------------------------------------------------


@for_each([0, 1, 7, 8, 9, 16, 17, 100, 3001])
def test_the_largest_are_those_that_sorting_finds(n: int) -> None:
    tied, tiny = (2 * drawn(n)).round(), drawn(n) * 1e-42
    special = drawn(n)
    special[: n // 4], special[n // 2 : n // 2 + 2] = -0.0, math.inf
    for x in (drawn(n), tied, tiny, special, torch.zeros(n), drawn(n).abs().sort().values):
        for k in (0, 1, 5, n // 2, n - 1, n, n + 3):
            assert top_k(x, k).tolist() == by_sorting(x, k)


def test_the_first_among_equals_is_taken() -> None:
    assert top_k(torch.tensor([1.0, -2.0, 2.0, 2.0, -1.0]), 2).tolist() == [1, 2]
    assert top_k(torch.ones(100_000), 70_000).equal(torch.arange(70_000))


def test_ascending_numbers_are_handled() -> None:
    n = 400_000
    rising = torch.arange(n, dtype=torch.float32)
    assert top_k(rising, 10).equal(torch.arange(n - 10, n))
    assert top_k(rising.flip(0), 10).equal(torch.arange(10))
    in_steps = (rising / 1000).floor()
    assert top_k(in_steps, 1500).equal(torch.cat([torch.arange(n - 2000, n - 1500), torch.arange(n - 1000, n)]))


@for_each([1, 2000, 150_000, 299_999])
def test_the_largest_of_many_are_those_that_torch_finds(k: int) -> None:
    x = drawn(300_000, k)
    assert top_k(x, k).equal(torch.topk(x.abs(), k).indices.sort().values)


@for_each([torch.bfloat16, torch.float16, torch.float64])
def test_the_largest_of_other_floats_are_found(dtype: torch.dtype) -> None:
    x = drawn(200).to(dtype)[::2]
    assert top_k(x, 7).tolist() == by_sorting(x.float(), 7)


def test_nan_is_refused() -> None:
    for n, place in ((1, 0), (100, 99), (200_000, 3), (200_000, 199_999)):
        x = drawn(n)
        x[place] = math.nan
        for k in (0, 1, n):
            with pytest.raises(NonFiniteError, match=f"1 of {n}"):
                top_k(x, k)


# -- indices as bits ---------------------------------------------------------------------------------------------------


@for_each([0, 1, 2, 7, 100])
def test_indices_take_the_bits_they_need_and_are_restored(k: int) -> None:
    for n in (1, 2, 3, 8, 9, 1000, 2**31, 2**40 + 1, 2**62 + 1):
        places = (uniform(k, n).double() * n).long().clamp(max=n - 1)
        packed = pack_indices(places, n)
        width = math.ceil(math.log2(n)) if n < 2**50 else 63
        assert packed.dtype == torch.uint8
        assert packed.numel() == packed_nbytes(k, n) == math.ceil(k * width / 8)
        assert unpack_indices(packed, n, k).equal(places)


def test_indices_are_end_to_end_with_their_lowest_bits_first() -> None:
    packed = pack_indices(torch.tensor([1, 4, 2]), 5)
    assert packed.tolist() == [1 | 4 << 3 | (2 << 6) % 256, 2 >> 2]


def test_indices_of_another_vector_are_refused() -> None:
    with pytest.raises(ConfigError, match="index 7: must be below 5"):
        unpack_indices(torch.tensor([7], dtype=torch.uint8), 5, 1)
    with pytest.raises(ConfigError, match="must be 2 bytes"):
        unpack_indices(torch.zeros(1, dtype=torch.uint8), 5, 3)


# -- sketches ----------------------------------------------------------------------------------------------------------


def table_of(x: Tensor, rows: int, columns: int, key: int = 0) -> Tensor:
    table = torch.zeros(rows, columns)
    sketch_(x, table, key=key)
    return table


def cell_of(i: int, row: int, columns: int, key: int) -> tuple[int, float]:
    """The column and the sign, from the definition."""

    def word(place: int, stream: int) -> int:
        seed = mix64(mix64(key) + 2 * row + stream)
        return mixed(mixed(place ^ seed % 2**32) ^ seed >> 32)

    return (i + word(i // columns, 0)) % columns, 1.0 - 2 * (word(i // 32, 1) >> i % 32 & 1)


@for_each(
    [(0, 3, 5), (1, 1, 1), (9, 3, 7), (100, 5, 100), (300, 5, 64), (700, 2, 33), (900, 9, 600), (40, 3, 5000)],
)
def test_a_sketch_is_the_sum_that_defines_it(case: tuple[int, int, int]) -> None:
    n, rows, columns = case
    x = (5 * drawn(n)).round()
    expected, estimates = torch.ones(rows, columns), list[float]()
    for i in range(n):
        for row in range(rows):
            column, sign = cell_of(i, row, columns, 77)
            expected[row, column] += 2 * sign * x[i]
    table = torch.ones(rows, columns)
    sketch_(x, table, key=77, scale=2.0)
    assert table.equal(expected)
    for i in range(n):
        cells = [cell_of(i, row, columns, 77) for row in range(rows)]
        found = sorted(float(table[row, column]) * sign for row, (column, sign) in enumerate(cells))
        estimates.append(found[(rows - 1) // 2])
    assert unsketch(table, None, n, key=77).tolist() == estimates
    some = torch.arange(n).flip(0)[::3]
    assert unsketch(table, some, n, key=77).tolist() == [estimates[i] for i in some.tolist()]
    for k in (0, 1, n // 3, n, n + 1):
        assert heavy(table, n, k, key=77).tolist() == by_sorting(torch.tensor(estimates), k)


def test_sketches_add_up() -> None:
    x, y = (9 * drawn(3000)).round(), (9 * drawn(3000, 1)).round()
    together = table_of(x, 5, 200)
    sketch_(y, together, key=0, scale=-3.0)
    assert together.equal(table_of(x - 3 * y, 5, 200))


def test_a_table_as_long_as_the_vector_loses_nothing() -> None:
    x = drawn(1000)
    for columns in (1000, 1500):
        assert unsketch(table_of(x, 3, columns), None, 1000, key=0).equal(x)
        assert heavy(table_of(x, 3, columns), 1000, 20, key=0).tolist() == by_sorting(x, 20)


def test_few_estimates_are_far_off() -> None:
    n, columns = 40_000, 500
    x = drawn(n) * torch.linspace(0, 3, n).exp()
    error = unsketch(table_of(x, 5, columns, 9), None, n, key=9) - x
    assert float((error.abs() > 2 * x.norm() / columns**0.5).double().mean()) < 0.1035
    assert abs(float(error.mean())) < 5 * float(error.std()) / columns**0.5


def test_heavy_hitters_are_found_among_many() -> None:
    n, k = 300_000, 100
    x = 0.01 * drawn(n)
    true = torch.randperm(n, generator=torch.Generator().manual_seed(1))[:k].sort().values
    x[true] = 5.0
    assert set(true.tolist()) <= set(heavy(table_of(x, 5, 64 * k, 4), n, 4 * k, key=4).tolist())


@for_each([-1, 1000, 2**40])
def test_estimates_of_elements_that_do_not_exist_are_refused(wrong: int) -> None:
    with pytest.raises(ConfigError, match=r"must lie in 0\.\.999"):
        unsketch(table_of(drawn(1000), 3, 60), torch.tensor([5, wrong]), 1000, key=0)


def test_another_key_is_another_sketch() -> None:
    x = drawn(500)
    assert not table_of(x, 3, 60, 1).equal(table_of(x, 3, 60, 2))
    assert table_of(x, 3, 60, 2**64 + 1).equal(table_of(x, 3, 60, 1))


def test_sketches_take_other_floats_and_strides() -> None:
    x, wide = drawn(100).half(), torch.zeros(3, 40, dtype=torch.float64)
    sketch_(x[::2], wide[:, ::2], key=3)
    assert wide[:, ::2].float().equal(table_of(x[::2].float(), 3, 20, 3))
    assert not wide[:, 1::2].any()
    assert unsketch(wide[:, ::2], None, 50, key=3).equal(unsketch(wide[:, ::2].float().contiguous(), None, 50, key=3))


def test_a_table_with_nan_has_no_largest() -> None:
    table = table_of(drawn(400), 5, 30)
    table[:, 3] = math.nan
    assert bool(unsketch(table, None, 400, key=0).isnan().any())
    with pytest.raises(NonFiniteError, match="NaN"):
        heavy(table, 400, 5, key=0)


def test_an_empty_table_is_refused() -> None:
    for shape in ((0, 5), (3, 0), (5,)):
        with pytest.raises(ConfigError, match="table of shape"):
            sketch_(torch.ones(3), torch.zeros(shape), key=0)
        with pytest.raises(ConfigError, match="table of shape"):
            heavy(torch.zeros(shape), 3, 1, key=0)
