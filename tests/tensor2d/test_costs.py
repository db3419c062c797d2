# SPDX-License-Identifier: Apache-2.0
"""The cost formulas are those of the papers, and show where each scheme sends least."""

from __future__ import annotations

import pytest

from reproductions.optimus.costs import (
    Layer,
    best_rows,
    checkpoints_held,
    layer_elements,
    one_dimensional_elements,
    parameters_held,
    product_elements,
)
from thinwire import ConfigError

SHAPES = [(r, c) for r in (1, 2, 3, 4, 8) for c in (1, 2, 3, 4, 8)]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_layer_moves_the_closed_form(rows: int, columns: int) -> None:
    t, h = 1536, 96
    layer, p = Layer(tokens=t, hidden=h, rows=rows, columns=columns), rows * columns
    weights = 12 * h * h * (rows - 1) / p
    assert layer_elements(layer, "forward") == pytest.approx(4 * t * h * (columns - 1) / p + weights)
    assert layer_elements(layer, "forward", layout="AB") == pytest.approx(7 * t * h * (columns - 1) / p + weights)
    # Both gradients of the narrow layer need one gather of T h activations.
    assert layer_elements(layer, "backward") == pytest.approx(7 * t * h * (columns - 1) / p + 2 * weights)
    assert layer_elements(layer) == pytest.approx(11 * t * h * (columns - 1) / p + 3 * weights)
    assert layer_elements(layer, layout="AB") == pytest.approx(3 * layer_elements(layer, "forward", layout="AB"))
    assert one_dimensional_elements(layer) == pytest.approx(8 * t * h * (p - 1) / p)
    assert one_dimensional_elements(layer, sequence_parallel=True) == pytest.approx(10 * t * h * (p - 1) / p)
    kept = one_dimensional_elements(layer, sequence_parallel=True, keeps_gathered=True)
    assert kept == pytest.approx(8 * t * h * (p - 1) / p)
    assert parameters_held(layer) == pytest.approx(12 * h * h / p + 13 * h / columns)
    assert checkpoints_held(layer) == t * h / p
    assert checkpoints_held(layer, scheme="1d") == t * h


@pytest.mark.parametrize("q", [2, 3, 4, 8])
def test_two_dimensions_win_from_the_number_of_tokens_that_the_paper_s_formulas_give(q: int) -> None:
    h = 512
    crossover = 36 * h / (8 * (q + 1) - 11)
    for tokens, wins in ((int(crossover * 1.02), True), (int(crossover * 0.98), False)):
        layer = Layer(tokens=tokens, hidden=h, rows=q, columns=q)
        assert (layer_elements(layer) < one_dimensional_elements(layer)) == wins


def test_two_by_two_beats_one_dimension_where_tokens_are_eight_times_the_hidden_size() -> None:
    layer = Layer(tokens=8 * 1024, hidden=1024, rows=2, columns=2)
    assert layer_elements(layer) < 0.75 * one_dimensional_elements(layer)
    # The paper's storage moves half as much again.
    assert layer_elements(layer, layout="AB") > 1.5 * layer_elements(layer)


@pytest.mark.parametrize("tokens", [100, 4096, 32768, 10**6])
def test_the_best_number_of_rows_moves_least(tokens: int) -> None:
    h, p = 4096, 16
    shapes = {r: layer_elements(Layer(tokens=tokens, hidden=h, rows=r, columns=p // r)) for r in (1, 2, 4, 8, 16)}
    best = best_rows(Layer(tokens=tokens, hidden=h, rows=4, columns=4))
    near = min(shapes, key=lambda r: shapes[r])
    assert near / 2 <= best <= near * 2


def test_one_row_moves_no_weights_and_one_column_no_activations() -> None:
    assert product_elements(64, 24, 96, 1, 4, layout="AB") == 64 * 24 * 3 / 4
    assert product_elements(64, 24, 96, 4, 1, layout="AB") == 24 * 96 * 3 / 4


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Layer(tokens=0, hidden=8, rows=1, columns=1)
