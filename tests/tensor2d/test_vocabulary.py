# SPDX-License-Identifier: Apache-2.0
"""Vocabularies on a mesh: looking tokens up, reading logits off, and the loss, against the serial ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reproductions.optimus.costs import embedding_elements, head_elements, id_elements, loss_elements
from tests.grids import fast_where
from tests.oracles.tensor2d import drawn, joined
from tests.tensor2d.helpers import block_of, gradients, run
from thinwire import ConfigError
from thinwire.tensor2d import Embedding2D, Mesh2D, Panels, TiedHead2D, cross_entropy_2d

H, T = 24, 12
X = drawn(T, 5, H, seed=9)
SHAPES = fast_where(lambda mesh: mesh in ((2, 3), (4, 1)), [(1, 1), (2, 2), (2, 3), (3, 2), (1, 4), (4, 1)])


@pytest.mark.parametrize("algorithm", ["table", "tokens"])
@pytest.mark.parametrize("vocabulary", [36, 29])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_both_algorithms_of_an_embedding_are_the_serial_embedding(
    rows: int, columns: int, vocabulary: int, algorithm: Any
) -> None:
    table = drawn(vocabulary, H).requires_grad_()
    ids = torch.randint(vocabulary, (T, 5), generator=torch.Generator().manual_seed(1))
    ids[0] = 7
    y = F.embedding(ids, table, padding_idx=4)
    weight = drawn(*y.shape, seed=77)
    (y * weight).sum().backward()

    def work(mesh: Mesh2D) -> tuple[Tensor, Tensor]:
        layer = Embedding2D(table, mesh, algorithm=algorithm, padding=4)
        found = layer(mesh.rows_of(ids))
        (found * block_of(weight, mesh)).sum().backward()
        return found.detach(), gradients(layer, mesh)["weight"]

    blocks = run(rows, columns, work, Panels(2))
    assert torch.equal(joined([each[0] for each in blocks], rows, columns), y.detach())
    torch.testing.assert_close(blocks[0][1], table.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("algorithm", ["table", "tokens"])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_an_embedding_sends_the_bytes_of_its_formula(rows: int, columns: int, algorithm: Any) -> None:
    ids = torch.zeros(T, 5, dtype=torch.int64)

    def work(mesh: Mesh2D) -> tuple[float, float]:
        layer = Embedding2D(drawn(36, H), mesh, algorithm=algorithm)
        layer.weight.requires_grad_()
        y = layer(mesh.rows_of(ids))
        forward = mesh.payload_bytes
        y.sum().backward()
        return forward, mesh.payload_bytes - forward

    elements = embedding_elements(T * 5, 36, H, rows, columns, algorithm=algorithm)
    expected = 8 * elements + (4 * id_elements(T * 5, rows) if algorithm == "tokens" else 0)
    for sent in run(rows, columns, work):
        assert sent == pytest.approx((expected, expected))


def test_tokens_travel_where_there_are_fewer_than_rows_of_the_table() -> None:
    def work(mesh: Mesh2D) -> list[float]:
        layer, sent = Embedding2D(drawn(36, H), mesh), [0.0]
        for length in (2, 4):
            layer(torch.zeros(6, length, dtype=torch.int64))
            sent.append(mesh.payload_bytes)
        return [sent[1], sent[2] - sent[1]]

    few = 8 * embedding_elements(24, 36, H, 2, 2, algorithm="tokens") + 4 * id_elements(24, 2)
    assert run(2, 2, work)[0] == [few, 8 * embedding_elements(48, 36, H, 2, 2, algorithm="table")]


@pytest.mark.parametrize("algorithm", ["table", "tokens"])
@pytest.mark.parametrize("wrong", [-1, 36])
def test_an_id_of_one_row_that_is_not_in_the_table_is_refused_on_all_ranks(wrong: int, algorithm: Any) -> None:
    def work(mesh: Mesh2D) -> str:
        with pytest.raises(ConfigError) as caught:
            Embedding2D(drawn(36, H), mesh, algorithm=algorithm)(mesh.rows_of(torch.tensor([[0, 1], [0, wrong]])))
        return str(caught.value)

    for message in run(2, 2, work):
        assert "row 1 of the mesh has token ids from" in message and "0..35" in message


class Tied(nn.Module):
    def __init__(self, vocabulary: int, mesh: Mesh2D | None) -> None:
        super().__init__()
        table, bias = drawn(vocabulary, H).requires_grad_(), drawn(vocabulary, seed=1).requires_grad_()
        self.mesh = mesh
        if mesh is None:
            self.table, self.bias = nn.Parameter(table), nn.Parameter(bias)
        else:
            self.embedding = Embedding2D(table, mesh)
            self.head = TiedHead2D(self.embedding, bias, mesh)

    def forward(self, ids: Tensor) -> Tensor:
        if self.mesh is None:
            return F.linear(F.embedding(ids, self.table), self.table, self.bias)
        return self.head(self.embedding(ids))


@pytest.mark.parametrize("vocabulary", [36, 29])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_tied_head_and_its_loss_are_the_serial_ones(rows: int, columns: int, vocabulary: int) -> None:
    draw = torch.Generator().manual_seed(2)
    ids, targets = (torch.randint(vocabulary, (T, 5), generator=draw) for _ in range(2))
    targets[:3] = -100
    serial = Tied(vocabulary, None)
    loss = F.cross_entropy(serial(ids).flatten(0, 1), targets.flatten())
    loss.backward()

    def work(mesh: Mesh2D) -> tuple[Tensor, dict[str, Tensor]]:
        model = Tied(vocabulary, mesh)
        logits = model(mesh.rows_of(ids))
        ours = cross_entropy_2d(logits, mesh.rows_of(targets), mesh, vocabulary=vocabulary, tokens_at_a_time=4)
        ours.backward()
        return ours.detach(), gradients(model, mesh)

    for ours, grads in run(rows, columns, work):
        torch.testing.assert_close(ours, loss.detach(), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(grads["embedding.weight"], serial.table.grad, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(grads["head.bias"], serial.bias.grad, rtol=1e-11, atol=1e-13)


def test_a_tied_head_sends_the_hidden_stream_and_not_the_logits() -> None:
    def work(mesh: Mesh2D) -> tuple[bool, float]:
        table = Embedding2D(drawn(36, H), mesh)
        TiedHead2D(table, None, mesh)(block_of(X, mesh))
        return mesh.row == mesh.column, mesh.payload_bytes

    for diagonal, sent in run(2, 2, work):
        assert sent == 8 * head_elements(T * 5, 36, H, 2, 2, tied=not diagonal)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_the_loss_is_over_the_whole_batch_whatever_rows_ignore(rows: int, columns: int, reduction: Any) -> None:
    logits = (20 * drawn(T, 36)).requires_grad_()
    targets = torch.arange(T) % 36
    targets[: T // 2 + 1] = -100  # with two rows and more, one has no token at all
    expected = F.cross_entropy(logits, targets, reduction=reduction)
    expected.sum().backward()

    def work(mesh: Mesh2D) -> tuple[Tensor, Tensor, float]:
        own = block_of(logits.detach(), mesh).requires_grad_()
        loss = cross_entropy_2d(own, mesh.rows_of(targets), mesh, reduction=reduction)
        loss.sum().backward()
        assert own.grad is not None
        return loss.detach(), own.grad, sum(mesh.along_row.meter.by_operation.values())

    found = run(rows, columns, work)
    torch.testing.assert_close(joined([grad for _, grad, _ in found], rows, columns), logits.grad, rtol=1e-12, atol=0)
    for rank, (loss, _, sent) in enumerate(found):
        whole = expected.detach()
        own = whole if reduction != "none" else whole.chunk(rows)[rank // columns]
        torch.testing.assert_close(loss, own, rtol=1e-13, atol=1e-13)
        assert sent == 8 * loss_elements(T, rows, columns)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("wrong", [36, -1, 10**12, 34])
def test_a_target_outside_the_vocabulary_is_refused_on_all_ranks(wrong: int, reduction: Any) -> None:
    targets = torch.arange(T)
    targets[:2], targets[T - 2] = 50, wrong  # 50 is ignored; the other one is in the last row of the mesh

    def work(mesh: Mesh2D) -> str:
        settings: dict[str, Any] = {"reduction": reduction, "ignore_index": 50}
        with pytest.raises(ConfigError) as caught:
            cross_entropy_2d(
                block_of(drawn(T, 36), mesh),
                mesh.rows_of(targets),
                mesh,
                vocabulary=34 if wrong == 34 else None,
                **settings,
            )
        targets_of_row = mesh.rows_of(torch.arange(T) % 34)
        loss = cross_entropy_2d(block_of(drawn(T, 36), mesh), targets_of_row, mesh, vocabulary=34, **settings)
        assert loss.isfinite().all()
        return str(caught.value)

    limit = 33 if wrong == 34 else 35
    expected = f"targets from {wrong} to {wrong} in rows [1] of the mesh: they must lie in 0..{limit}"
    for message in run(2, 3, work):
        assert expected in message and "ignore_index=50" in message


def test_logits_that_are_not_numbers_are_not_blamed_on_the_targets() -> None:
    logits = drawn(T, 36)
    logits[3, 20] = torch.nan
    found = run(2, 2, lambda mesh: cross_entropy_2d(block_of(logits, mesh), mesh.rows_of(torch.arange(T)), mesh))
    assert all(loss.isnan() for loss in found)


def test_half_precision_logits_have_a_loss_of_single_precision() -> None:
    logits, targets = (8 * drawn(T, 36)).to(torch.bfloat16), torch.arange(T)
    expected = F.cross_entropy(logits.float(), targets)
    found = run(2, 2, lambda mesh: cross_entropy_2d(block_of(logits, mesh), mesh.rows_of(targets), mesh))[0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)


def test_a_column_of_padding_alone_takes_part_in_the_loss() -> None:
    logits = drawn(T, 3).requires_grad_()
    targets = torch.arange(T) % 3
    expected = F.cross_entropy(logits, targets)
    expected.backward()
    padded = torch.cat([logits.detach(), torch.full((T, 1), 99.0, dtype=torch.float64)], -1)

    def work(mesh: Mesh2D) -> tuple[Tensor, Tensor]:
        own = block_of(padded, mesh).requires_grad_()
        loss = cross_entropy_2d(own, mesh.rows_of(targets), mesh, vocabulary=3)
        loss.backward()
        assert own.grad is not None
        return loss.detach(), own.grad

    found = run(1, 4, work)
    torch.testing.assert_close(found[3][0], expected.detach())
    grads = joined([grad for _, grad in found], 1, 4)
    torch.testing.assert_close(grads[:, :3], logits.grad)
    assert not grads[:, 3].any()
