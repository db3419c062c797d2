# SPDX-License-Identifier: Apache-2.0
"""Layers on a mesh are the serial layers: values, gradients, precision, bytes and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.grids import fast_where
from tests.oracles.tensor2d import MESHES, drawn, joined, serial_gradients
from tests.rules import refusals
from tests.tensor2d.helpers import block_of, gradients, run
from thinwire import ConfigError
from thinwire.tensor2d import (
    Dropout2D,
    Embedding2D,
    LayerNorm2D,
    Linear2D,
    Mesh2D,
    PositionTable2D,
    RMSNorm2D,
    cross_entropy_2d,
    parallelize_2d,
    whole_activation,
    whole_state,
)

H, T = 24, 12
X = drawn(T, 5, H, seed=9)
SHAPES = fast_where(lambda mesh: mesh in ((2, 3), (4, 1)), [(1, 1), (2, 2), (2, 3), (3, 2), (1, 4), (4, 1)])


def both(
    serial: nn.Module, make: Callable[[Mesh2D], nn.Module], rows: int, columns: int, x: Tensor = X
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Output, the input's gradient and the parameters', of the serial layer and of the joined blocks."""
    whole = x.clone().requires_grad_()
    y = serial(whole)
    weight = drawn(*y.shape, seed=77)
    serial.zero_grad()
    (y * weight).sum().backward()

    def work(mesh: Mesh2D) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        own, layer = block_of(x, mesh).requires_grad_(), make(mesh)
        found = layer(own)
        (found * block_of(weight, mesh)).sum().backward()
        assert own.grad is not None
        return found.detach(), own.grad, gradients(layer, mesh)

    blocks = run(rows, columns, work)
    assert whole.grad is not None
    ours = {"y": joined([b[0] for b in blocks], rows, columns), "x": joined([b[1] for b in blocks], rows, columns)}
    return {"y": y.detach(), "x": whole.grad, **serial_gradients(serial)}, ours | blocks[-1][2]


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias, dtype=torch.float64)
    layer.weight.data = drawn(outputs, inputs, seed=5)
    if bias:
        layer.bias.data = drawn(outputs, seed=6)
    return layer


def split(layer: nn.Linear, mesh: Mesh2D, layout: Any = "auto") -> Linear2D:
    return Linear2D(layer.weight, layer.bias, mesh, layout=layout)


@pytest.mark.parametrize("layout", ["AB", "ABT"])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_linear_layer_is_the_serial_one_in_either_storage(rows: int, columns: int, layout: Any) -> None:
    for outputs in (12, 36):
        serial = linear(H, outputs)
        expected, found = both(serial, lambda mesh, s=serial: split(s, mesh, layout), rows, columns)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_linear_layer_takes_the_storage_that_moves_less() -> None:
    def work(mesh: Mesh2D) -> list[str]:
        return [split(linear(a, b), mesh).layout for a, b in ((12, 24), (24, 24), (24, 12))]

    assert run(2, 2, work)[0] == ["AB", "AB", "ABT"]


@pytest.mark.parametrize("layout", ["AB", "ABT"])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_sections_give_each_column_its_share_of_every_part(rows: int, columns: int, layout: Any) -> None:
    serial = linear(H, 3 * H)
    parts = serial(X).chunk(3, -1)

    def work(mesh: Mesh2D) -> tuple[Tensor, Tensor]:
        layer = Linear2D(serial.weight, serial.bias, mesh, sections=(H,) * 3, layout=layout)
        ours = layer(block_of(X, mesh)).chunk(3, -1)
        errors = [(part - block_of(whole, mesh)).abs().max() for part, whole in zip(ours, parts, strict=True)]
        return torch.stack(errors).max(), whole_state(layer, mesh)["weight"]

    for error, weight in run(rows, columns, work):
        assert error < 1e-12
        assert torch.equal(weight, serial.weight)


@pytest.mark.parametrize("kind", ["layer", "layer without bias", "bare layer", "rms"])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_norms_are_the_serial_ones(rows: int, columns: int, kind: str) -> None:
    if kind == "rms":
        serial: Any = nn.RMSNorm(H, eps=1e-6, dtype=torch.float64)
    else:
        serial = nn.LayerNorm(H, 1e-5, kind != "bare layer", bias=kind == "layer", dtype=torch.float64)
    for number, parameter in enumerate(serial.parameters()):
        parameter.data = drawn(H, seed=number)

    def make(mesh: Mesh2D) -> nn.Module:
        if kind == "rms":
            return RMSNorm2D(serial.weight, mesh, size=H)
        return LayerNorm2D(serial.weight, serial.bias, mesh, size=H)

    expected, found = both(serial, make, rows, columns)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("eps", [None, 0.0, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_rms_norm_keeps_the_epsilon_of_the_serial_one(dtype: torch.dtype, eps: float | None) -> None:
    x, weight = drawn(6, H, seed=1).to(dtype), drawn(H, seed=2).to(dtype)
    # So small that the machine precision of single precision, of double precision and 1e-5 differ in their effect.
    x = x * 1e-4

    def network() -> nn.Sequential:
        model = nn.Sequential(nn.Identity(), nn.RMSNorm(H, eps=eps, dtype=dtype))
        model.get_parameter("1.weight").data.copy_(weight)
        return model

    expected = network()(x)
    for y in run(2, 2, lambda mesh: whole_activation(parallelize_2d(network(), mesh)(block_of(x, mesh)), mesh)):
        torch.testing.assert_close(y, expected)


def test_a_variance_far_from_zero_does_not_cancel() -> None:
    far = (drawn(4, H) + 4096).float()
    expected = F.layer_norm(far.double(), (H,))
    found = joined(run(2, 3, lambda mesh: LayerNorm2D(None, None, mesh, size=H)(block_of(far, mesh))), 2, 3)
    assert (found - expected).abs().max() < 2e-3
    naive = far.square().mean(-1) - far.mean(-1).square()
    assert (naive - far.double().var(-1, correction=0)).abs().max() > 0.05  # what subtracting squares would give


def test_norms_of_bf16_err_at_most_twice_as_much_as_serial_ones() -> None:
    x = X.flatten(0, 1).to(torch.bfloat16)
    exact = F.layer_norm(x.double(), (H,))
    serial = (F.layer_norm(x, (H,)).double() - exact).norm()
    found = joined(run(2, 2, lambda mesh: LayerNorm2D(None, None, mesh, size=H)(block_of(x, mesh))), 2, 2)
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).norm() <= 2 * serial


def test_positions_are_added_alike_in_all_rows() -> None:
    table = drawn(9, H).requires_grad_()
    y = X + table[:5]
    (y * X).sum().backward()

    def work(mesh: Mesh2D) -> tuple[Tensor, Tensor]:
        layer = PositionTable2D(table, mesh, parameter="table", added=True)
        own = block_of(X, mesh)
        found = layer(own)
        (found * own).sum().backward()
        return found.detach(), gradients(layer, mesh)["table"]

    found = run(3, 2, work)
    assert torch.equal(joined([each[0] for each in found], 3, 2), y.detach())
    torch.testing.assert_close(found[0][1], table.grad)


# -- dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), MESHES)
def test_dropout_is_the_same_on_every_mesh(rows: int, columns: int) -> None:
    serial = Dropout2D(0.4, None, seed=3, layer=2)
    expected = [serial(X), serial(X)]

    def work(mesh: Mesh2D) -> list[Tensor]:
        layer = Dropout2D(0.4, mesh, seed=3, layer=2)
        return [layer(block_of(X, mesh)) for _ in expected]

    found = run(rows, columns, work)
    for step, whole in enumerate(expected):
        assert torch.equal(joined([each[step] for each in found], rows, columns), whole)
    assert not torch.equal(*expected)


def test_dropout_drops_its_share_everywhere_and_blocks_have_unrelated_masks() -> None:
    ones = torch.ones(200, 100, 4)
    blocks = run(2, 2, lambda mesh: Dropout2D(0.3, mesh)(block_of(ones, mesh)))
    kept = [(block > 0).double() for block in blocks]
    for share in kept:
        assert abs(share.mean() - 0.7) < 0.01
        assert abs((share[1:] * share[:-1]).mean() - 0.49) < 0.015  # neighbours are independent
    for first in range(4):
        for second in range(first):
            assert abs((kept[first] * kept[second]).mean() - 0.49) < 0.015
    assert torch.equal(blocks[0][blocks[0] > 0], torch.full_like(blocks[0][blocks[0] > 0], 1 / 0.7))
    masks = [Dropout2D(0.3, None, seed=s, layer=n)(ones) > 0 for s, n in ((0, 0), (1, 0), (0, 1))]
    assert abs((masks[0] & masks[1]).double().mean() - 0.49) < 0.015
    assert abs((masks[0] & masks[2]).double().mean() - 0.49) < 0.015


def test_dropout_leaves_evaluation_alone() -> None:
    layer = Dropout2D(0.5, None)
    assert layer.eval()(X) is X
    assert int(layer.draws) == 0
    for wrong in (1.0, -0.1):
        with pytest.raises(ConfigError, match="probability"):
            Dropout2D(wrong, None)


# -- refusals ---------------------------------------------------------------------------------------------------------


test_what_cannot_be_cut_is_refused_with_its_size = refusals(
    [
        (lambda mesh: split(linear(20, 12), mesh), r"20 inputs: 20 % 6 must be 0.*pad to 24"),
        (lambda mesh: split(linear(12, 20), mesh), r"20 outputs: 20 % 6"),
        (lambda mesh: Linear2D(drawn(24, 12), None, mesh, sections=(20, 4)), r"sections.*20 % 3"),
        (lambda mesh: Linear2D(drawn(24, 12), None, mesh, sections=(12, 6)), "add up to its 24"),
        (lambda mesh: LayerNorm2D(None, None, mesh, size=20), r"20 % 3"),
        (lambda mesh: Embedding2D(drawn(36, 20), mesh), r"20 % 6"),
        (lambda mesh: mesh.rows_of(torch.zeros(3)), "batch of 3.*Use 4"),
        (lambda mesh: mesh.columns_of(torch.zeros(2, 4)), r"4 % 3"),
        (lambda mesh: cross_entropy_2d(torch.zeros(2, 6), torch.zeros(3), mesh), "each token needs one target"),
    ],
    lambda make: run(2, 3, make),
)


def test_a_mesh_must_be_numbered_row_by_row() -> None:
    def work(mesh: Mesh2D) -> Mesh2D:
        return Mesh2D(mesh.along_column, mesh.along_row, mesh.whole)

    with pytest.raises(ConfigError, match="row by row"):
        run(2, 3, work)


def test_the_first_failure_of_any_rank_is_the_one_that_is_raised() -> None:
    def work(mesh: Mesh2D) -> Tensor:
        if mesh.whole.rank == 4:
            raise KeyError("only here")
        return mesh.along_row.all_reduce_(mesh.along_column.all_reduce_(torch.ones(3)).wait()).wait()

    for _ in range(20):
        with pytest.raises(KeyError, match="only here"):
            run(2, 3, work)
