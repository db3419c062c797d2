# SPDX-License-Identifier: Apache-2.0
"""The same over Gloo, on every shape of mesh: serial models, threads and DTensor are the oracles."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from reproductions.optimus.costs import product_elements
from tests.oracles.tensor2d import Encoder, drawn, joined, serial_loss
from tests.pool import run_processes
from tests.tensor2d.helpers import block_of, gpt, mesh_loss, parallelized, run
from tests.tensor2d.test_products import PRODUCTS, K, M, N, operands, product_and_gradients
from thinwire import ConfigError
from thinwire.tensor2d import (
    Mesh2D,
    Panels,
    checkpoint_,
    clip_gradient_norm_,
    load_whole_,
    mesh_2d,
    multiply_ab,
    multiply_abt,
    multiply_atb,
    whole_state,
)

Tensors = dict[str, Tensor]


def steps(mesh: Mesh2D) -> tuple[list[Tensor], dict[str, Tensor], float, float]:
    """Three checkpointed steps with dropout, a tied head and clipping; their losses, parameters, norm and bytes."""
    model = parallelized(mesh, Encoder(dropout=0.1).double(), seed=7)
    for layer in model.encoder.layers:
        checkpoint_(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[Tensor] = []
    norm, before = torch.zeros(()), mesh.payload_bytes
    for step in range(3):
        optimizer.zero_grad()
        loss = mesh_loss(model, mesh, step)
        loss.backward()
        norm = clip_gradient_norm_(model, 1.0, mesh)
        optimizer.step()
        losses.append(loss.detach())
    nbytes = mesh.payload_bytes - before
    return losses, whole_state(model, mesh), float(norm), nbytes


def products_equal_dtensor_s(mesh: Mesh2D) -> None:
    devices = init_device_mesh("cpu", (2, 2))
    a, b = drawn(8, 12, seed=1), drawn(12, 20, seed=2)
    pairs = (
        (multiply_ab, a, b, lambda x, y: x @ y),
        (multiply_abt, a, b.T.contiguous(), lambda x, y: x @ y.T),
        (multiply_atb, a.T.contiguous(), b, lambda x, y: x.T @ y),
    )
    for multiply, first, second, whole in pairs:
        x, y = (distribute_tensor(each, devices, [Shard(0), Shard(1)]) for each in (first, second))
        oracle = whole(x, y).redistribute(devices, [Shard(0), Shard(1)]).to_local()
        for panels in (Panels(), Panels(3), Panels(2, overlap=False)):
            ours = multiply(block_of(first, mesh), block_of(second, mesh), mesh, panels)
            torch.testing.assert_close(ours, oracle, rtol=1e-12, atol=1e-12)


def everything(folder: str) -> tuple[list[Tensor], dict[str, Tensor], float, float]:
    mesh = mesh_2d((2, 2), panels=Panels(2), timeout=20)
    rank = dist.get_rank()
    assert (mesh.row, mesh.column) == divmod(rank, 2)
    assert dist.get_process_group_ranks(init_device_mesh("cpu", (2, 2)).get_group(1)) == [
        rank // 2 * 2,
        rank // 2 * 2 + 1,
    ]
    products_equal_dtensor_s(mesh)
    found = steps(mesh)
    model = parallelized(mesh)
    load_whole_(model, gpt(seed=5).state_dict(), mesh)
    torch.save(model.state_dict(), Path(folder, f"{rank}.pt"))
    again = parallelized(mesh)
    again.load_state_dict(torch.load(Path(folder, f"{rank}.pt")))
    assert torch.equal(mesh_loss(model, mesh), mesh_loss(again, mesh))
    for kind in (torch.bfloat16, torch.float16):
        x, y = drawn(8, 12, seed=1, dtype=kind), drawn(12, 20, seed=2, dtype=kind)
        ours = multiply_ab(block_of(x, mesh), block_of(y, mesh), mesh)
        torch.testing.assert_close(ours, block_of((x.double() @ y.double()).to(kind), mesh))
    return found


@pytest.mark.slow
def test_four_processes_train_like_four_threads_and_count_the_same_bytes() -> None:
    expected = run(2, 2, steps, Panels(2))
    with tempfile.TemporaryDirectory() as folder:
        found = run_processes(4, everything, folder)
    for (our_losses, our_state, *ours), (losses, state, *theirs) in zip(found, expected, strict=True):
        torch.testing.assert_close(our_losses, losses, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(our_state, state, rtol=1e-10, atol=1e-12)
        assert ours == pytest.approx(theirs, rel=1e-12)  # the norm and the bytes


def on_meshes(shapes: list[tuple[int, int]]) -> list[tuple[Tensors, dict[str, float], float, Tensors]]:
    """On each mesh: the products with their gradients, what they sent, and one step of a model."""
    return [on_mesh(mesh_2d(shape, panels=Panels(2), timeout=20)) for shape in shapes]


def on_mesh(mesh: Mesh2D) -> tuple[Tensors, dict[str, float], float, Tensors]:
    assert (mesh.row, mesh.column) == divmod(dist.get_rank(), mesh.columns)
    products: Tensors = {}
    sent: dict[str, float] = {}
    for kind in PRODUCTS:
        before = mesh.payload_bytes
        found = product_and_gradients(kind, mesh, Panels(2), torch.float64)
        sent[kind] = mesh.payload_bytes - before
        products.update({f"{kind}{place}": block for place, block in enumerate(found)})
    model = parallelized(mesh)
    loss = mesh_loss(model, mesh)
    loss.backward()
    clip_gradient_norm_(model, 0.5, mesh)
    torch.optim.SGD(model.parameters(), lr=0.1, foreach=False).step()
    return products, sent, float(loss.detach()), whole_state(model, mesh)


def serial_step() -> tuple[float, dict[str, Tensor]]:
    model = gpt()
    loss = serial_loss(model)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.SGD(model.parameters(), lr=0.1, foreach=False).step()
    return float(loss.detach()), {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize(
    "shapes",
    [[(1, 4), (4, 1), (2, 2)], *(pytest.param(each, marks=pytest.mark.slow) for each in ([(1, 1)], [(2, 3), (3, 2)]))],
    ids=repr,
)
def test_processes_on_every_mesh_multiply_and_train_like_one(shapes: list[tuple[int, int]]) -> None:
    all_ranks = run_processes(shapes[0][0] * shapes[0][1], on_meshes, shapes)
    loss, state = serial_step()
    for place, (rows, columns) in enumerate(shapes):
        found = [each[place] for each in all_ranks]
        for kind, (_, _, _, multiply) in PRODUCTS.items():
            a, b, weight = operands(kind)
            a.requires_grad_(), b.requires_grad_()
            c = multiply(a, b)
            for number, whole in enumerate((c, *torch.autograd.grad((c * weight).sum(), (a, b)))):
                blocks = [products[f"{kind}{number}"] for products, *_ in found]
                torch.testing.assert_close(joined(blocks, rows, columns), whole.detach(), rtol=1e-12, atol=1e-12)
        # Forward and both gradients send the same, except that the two gradients of ABT share one gather along the row.
        for layout, once in (("AB", 0.0), ("ABT", M * N / rows * (columns - 1) / columns)):
            nbytes = 8 * (3 * product_elements(M, K, N, rows, columns, layout=layout) - once)
            assert [sent[layout] for _, sent, _, _ in found] == pytest.approx([nbytes] * len(found), rel=1e-12)
        for _, _, ours, parameters in found:
            assert ours == pytest.approx(loss, rel=1e-12)
            torch.testing.assert_close(parameters, state, rtol=1e-10, atol=1e-12)


def wrong_meshes() -> None:
    for shape in ((3, 1), (2, 2), (0, 2)):
        try:
            mesh_2d(shape)
        except ConfigError as error:
            assert "their product 2" in str(error)
        else:
            raise AssertionError(shape)
    devices = init_device_mesh("cpu", (2, 1), mesh_dim_names=("row", "column"))
    mesh = mesh_2d(devices, timeout=20)
    assert (mesh.rows, mesh.columns, mesh.row) == (2, 1, dist.get_rank())
    try:
        mesh_2d(devices["row"])
    except ConfigError as error:
        assert "2 dimensions" in str(error)
    else:
        raise AssertionError("a mesh of one dimension was taken")


def test_a_mesh_is_made_from_a_device_mesh_and_checks_its_shape() -> None:
    run_processes(2, wrong_meshes)
