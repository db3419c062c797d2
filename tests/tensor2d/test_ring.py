# SPDX-License-Identifier: Apache-2.0
"""Attention to a sequence that is split over rows is attention to the whole of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.grids import fast_where
from tests.oracles.tensor2d import Rotary, drawn
from tests.pool import run_processes
from tests.tensor2d.helpers import run
from thinwire import ConfigError
from thinwire.tensor2d import Attention2D, Mesh2D, checkpoint_
from thinwire.tensor2d.ring import positions_of, ring_attend, ring_elements

RINGS = fast_where(lambda mesh: mesh in ((2, 2), (4, 1)), [(1, 1), (2, 1), (2, 2), (4, 1), (3, 2)])
SAMPLES, HEADS, LENGTH, SIZE = 2, 4, 24, 6


def operands(key_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = [(SAMPLES, heads, LENGTH, SIZE) for heads in (HEADS, key_heads, key_heads, HEADS)]
    return [drawn(*shape, seed=k, dtype=dtype) for k, shape in enumerate(shapes)]


def serial(key_heads: int, causal: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The output of torch's own attention, and the gradients of queries, keys and values."""
    *inputs, back = operands(key_heads, dtype)
    inputs = [x.requires_grad_() for x in inputs]
    query, key, value = inputs
    output = F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
    return [output.detach(), *torch.autograd.grad(output, inputs, back)]


def block(x: Tensor, mesh: Mesh2D) -> Tensor:
    """This column's heads, at this row's positions."""
    places = positions_of(LENGTH, mesh.row, mesh.rows)
    return x.chunk(mesh.columns, 1)[mesh.column][:, :, places].contiguous()


def ringed(mesh: Mesh2D, key_heads: int, causal: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    *inputs, back = (block(x, mesh) for x in operands(key_heads, dtype))
    inputs = [x.requires_grad_() for x in inputs]
    output = ring_attend(inputs[0], inputs[1], inputs[2], mesh.along_column, causal=causal)
    return [output.detach(), *torch.autograd.grad(output, inputs, back)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize(("rows", "columns"), RINGS)
def test_ring_attention_and_its_gradients_are_those_of_whole_attention(
    rows: int, columns: int, key_heads: int, causal: bool
) -> None:
    expected = serial(key_heads, causal)

    def work(mesh: Mesh2D) -> None:
        for ours, theirs in zip(ringed(mesh, key_heads, causal), expected, strict=True):
            torch.testing.assert_close(ours, block(theirs, mesh), rtol=1e-12, atol=1e-12)

    run(rows, columns, work)


@pytest.mark.parametrize(("rows", "columns"), RINGS)
def test_a_ring_sends_the_bytes_of_its_formula(rows: int, columns: int) -> None:
    forward, again, gradients = ring_elements(SAMPLES, LENGTH, 2 * SIZE, rows, columns)

    def work(mesh: Mesh2D, dtype: torch.dtype) -> tuple[float, float]:
        *inputs, back = (block(x, mesh).to(dtype).requires_grad_() for x in operands(2))
        output = ring_attend(inputs[0], inputs[1], inputs[2], mesh.along_column)
        sent = mesh.payload_bytes
        output.backward(back)
        return sent, mesh.payload_bytes - sent

    for dtype, size in ((torch.float64, 8), (torch.bfloat16, 2)):
        for sent in run(rows, columns, lambda mesh, dtype=dtype: work(mesh, dtype)):
            assert sent == (size * forward, size * again + max(4, size) * gradients)


@pytest.mark.parametrize("causal", [False, True])
def test_bf16_errs_at_most_twice_as_much_as_whole_attention(causal: bool) -> None:
    exact = serial(4, causal)
    rounded = serial(4, causal, torch.bfloat16)

    def work(mesh: Mesh2D) -> None:
        for ours, theirs, expected in zip(ringed(mesh, 4, causal, torch.bfloat16), rounded, exact, strict=True):
            error = (ours.double() - block(expected, mesh)).norm()
            assert error <= 2 * (theirs.double() - expected).norm() + 1e-6

    run(4, 1, work)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_rows_hold_every_position_once_and_have_equal_work(rows: int) -> None:
    places = [positions_of(LENGTH, row, rows) for row in range(rows)]
    assert torch.equal(torch.cat(places).sort().values, torch.arange(LENGTH))
    work = {int((each + 1).sum()) for each in places}
    assert len(work) == 1


def rotary_layer(mesh: Mesh2D | None, seed: int = 3) -> Any:
    """Rotary positions, shared key heads and a causal mask."""
    whole = Rotary(24, 4, 2).double()
    with torch.no_grad():
        for number, parameter in enumerate(whole.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=seed + number) / 4)
    if mesh is None:
        return whole
    query, key, value, out = ((x.weight, x.bias) for x in (whole.query, whole.key, whole.value, whole.out))
    return Attention2D(query, key, value, out, mesh, heads=4, causal=True, rotary_base=10000.0, ring=True)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("rows", "columns"), fast_where(lambda mesh: mesh == (2, 2), [(2, 1), (2, 2), (4, 1)]))
def test_a_layer_with_ring_attention_is_the_serial_layer(rows: int, columns: int, checkpointed: bool) -> None:
    stream, back = drawn(SAMPLES, LENGTH, 24, seed=1), drawn(SAMPLES, LENGTH, 24, seed=2)
    whole = stream.clone().requires_grad_()
    output = rotary_layer(None)(whole)
    output.backward(back)
    expected = whole.grad
    assert expected is not None

    def work(mesh: Mesh2D) -> float:
        layer = rotary_layer(mesh)
        if checkpointed:
            checkpoint_(layer)
        places = positions_of(LENGTH, mesh.row, rows)
        mine = mesh.columns_of(stream[:, places]).requires_grad_()
        ours = layer(mine)
        ours.backward(mesh.columns_of(back[:, places]))
        assert mine.grad is not None
        torch.testing.assert_close(ours.detach(), mesh.columns_of(output.detach()[:, places]), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(mine.grad, mesh.columns_of(expected[:, places]), rtol=1e-11, atol=1e-11)
        return mesh.payload_bytes

    sent = run(rows, columns, work)
    assert len(set(sent)) == 1


def in_processes() -> list[Any]:
    from thinwire.tensor2d import mesh_2d

    mesh = mesh_2d((2, 2), timeout=20)
    return [x.numpy() for x in ringed(mesh, 2, True)]


def test_processes_compute_what_threads_do() -> None:
    expected = run(2, 2, lambda mesh: ringed(mesh, 2, True))
    for found, theirs in zip(run_processes(4, in_processes), expected, strict=True):
        for ours, other in zip(found, theirs, strict=True):
            torch.testing.assert_close(torch.from_numpy(ours.copy()), other, rtol=1e-12, atol=1e-12)


def test_sequences_and_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"4 chunks of 2 rows must divide it. Use 8"):
        positions_of(6, 0, 2)

    def odd_length(mesh: Mesh2D) -> None:
        x = torch.zeros(1, 2, 3, 4)
        ring_attend(x, x, x, mesh.along_column)

    with pytest.raises(ConfigError, match="a sequence of 6 over 2 rows"):
        run(2, 1, odd_length)
    x = torch.zeros(1, 3, 4, 4)
    with pytest.raises(ConfigError, match="3 query heads and 2 key heads"):
        run(1, 1, lambda mesh: ring_attend(x, x[:, :2], x[:, :2], mesh.along_column))
    with pytest.raises(ConfigError, match="ring"):
        run(2, 1, lambda mesh: rotary_layer(mesh)(torch.zeros(1, 4, 24).double(), torch.ones(4, 4).bool()))
