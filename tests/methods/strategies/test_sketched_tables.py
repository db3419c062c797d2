# SPDX-License-Identifier: Apache-2.0
"""Count sketches: they add up, and the errors of their estimates are bounded."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from tests.problems import normal
from thinwire.core.kernels import heavy, sketch_, unsketch
from thinwire.methods.strategies.gradients.sketches import Split, Table


def table_of(x: Tensor, rows: int, columns: int, key: int) -> Tensor:
    table = torch.zeros(rows, columns)
    sketch_(x, table, key=key)
    return table


def test_one_row_is_off_by_nothing_on_average_and_by_no_more_than_its_variance() -> None:
    x = normal(600, 1)
    off = torch.stack([unsketch(table_of(x, 1, 32, key), None, 600, key=key) - x for key in range(400)])
    deviation = float(x.norm()) / sqrt(32)
    assert off.mean(0).abs().max() < 5 * deviation / sqrt(400)
    assert off.square().mean() < 1.05 * deviation**2


def test_two_elements_share_a_cell_no_more_often_than_at_random() -> None:
    columns, rows, keys = 16, 5, 200
    for i, j in ((0, 1), (0, 16), (3, 35), (5, 21), (15, 16)):
        x = torch.zeros(40)
        x[i], x[j] = 1.0, 4.0
        lines = torch.cat([table_of(x, rows, columns, key) for key in range(keys)])
        met = (lines != 0).sum(1) == 1
        assert not (i // columns == j // columns and met.any())
        alike = lines.sum(1).abs() - 4  # 5 in all where signs are equal, otherwise 3
        assert float(met.double().mean()) < 1 / columns + 4 * sqrt(1 / columns / (rows * keys))
        assert abs(float(alike.mean())) < 5 / sqrt(rows * keys)


def test_four_candidates_for_each_hold_nearly_all_of_the_largest() -> None:
    n, k, found = 20_000, 50, 0
    for key in range(5):
        ranks = torch.randperm(n, generator=torch.Generator().manual_seed(key)) + 1
        x = normal(n, key).sign() * ranks.double().pow(-1.0).float()
        true = set(x.abs().topk(k).indices.tolist())
        found += len(true & set(heavy(table_of(x, 5, 32 * k, key), n, 4 * k, key=key).tolist()))
    assert found >= 0.98 * 5 * k


def test_the_cells_of_elements_are_those_that_any_of_them_alone_would_fill() -> None:
    where, table = torch.arange(0, 300, 29), Table(torch.zeros(5, 40), 300, 1)
    filled = torch.zeros(5, 40, dtype=torch.bool)
    for i in where.tolist():
        unit = torch.zeros(300)
        unit[i] = 1.0
        filled |= table_of(unit, 5, 40, 1) != 0
    assert table.cells_of(where).equal(filled)
    assert not filled.all()


def test_a_few_values_are_subtracted_bit_by_bit_as_the_sketch_of_the_whole_vector() -> None:
    where = torch.arange(3, 300, 7)
    values, whole = normal(len(where), 1), torch.zeros(300)
    whole[where] = values
    before = table_of(normal(300, 2), 5, 8, 1)
    table = Table(before.clone(), 300, 1)
    table.subtract_(where, values)
    assert table.cells.equal(before - table_of(whole, 5, 8, 1))
    nothing = torch.empty(0, dtype=torch.int64)
    table.subtract_(nothing, torch.empty(0))
    assert not table.cells_of(nothing).any()


def test_positions_in_a_split_vector_are_found_again() -> None:
    split = Split([slice(2, 5), slice(9, 12), slice(14, 15)], [slice(0, 2), slice(5, 9), slice(12, 14)])
    x = torch.arange(15.0)
    assert (
        split.large_of(x)[torch.arange(7)].tolist()
        == split.positions(torch.arange(7)).tolist()
        == [2, 3, 4, 9, 10, 11, 14]
    )
    assert split.small_of(x).tolist() == [0, 1, 5, 6, 7, 8, 12, 13]
    whole = Split([slice(0, 15)], [])
    assert whole.large_of(x) is x
    assert whole.positions(torch.tensor([4])).tolist() == [4]
