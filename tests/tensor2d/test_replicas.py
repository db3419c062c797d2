# SPDX-License-Identifier: Apache-2.0
"""Copies of a model, each on a mesh, train under a strategy as whole models do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

from tests.oracles.tensor2d import BATCH, LENGTH, VOCABULARY, serial_loss
from tests.pool import run_processes
from tests.problems import flat
from tests.tensor2d.helpers import gpt, mesh_loss, parallelized, run
from thinwire import ConfigError, MismatchError
from thinwire.core.comm.base import Comm
from thinwire.core.comm.threads import run_threads
from thinwire.methods.codecs.cast import Bf16
from thinwire.methods.codecs.one_bit import OneBit
from thinwire.methods.optimizers.lamb import Lamb
from thinwire.methods.optimizers.one_bit_adam import OneBitAdam
from thinwire.methods.strategies.base import Strategy
from thinwire.methods.strategies.gradients.all_reduce import AllReduce
from thinwire.methods.strategies.gradients.one_bit import CompressedMomentum
from thinwire.methods.strategies.local.local_sgd import LocalSGD
from thinwire.methods.strategies.local.slow_momentum import SlowMo
from thinwire.methods.strategies.push_sum.eager_push_sum import EagerPushSum
from thinwire.methods.strategies.push_sum.push_sum import PushSum
from thinwire.tensor2d import clip_gradient_norm_, whole_state
from thinwire.tensor2d.lamb import Lamb2D
from thinwire.tensor2d.mesh import Mesh2D, Mesh3D, mesh_3d, run_mesh_3d_threads
from thinwire.worker.attach import attach

STEPS = 5
Make = Callable[[nn.Module, Mesh2D | None], Optimizer]


def sgd(model: nn.Module, mesh: Mesh2D | None) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module, mesh: Mesh2D | None) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False)


def lamb(model: nn.Module, mesh: Mesh2D | None) -> Optimizer:
    settings: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
    if mesh is None:
        return Lamb(model.parameters(), **settings)
    return Lamb2D(model.parameters(), model=model, mesh=mesh, **settings)


def one_bit_adam(model: nn.Module, mesh: Mesh2D | None) -> Optimizer:
    return OneBitAdam(model.parameters(), lr=0.01)


RECIPES: dict[str, tuple[Strategy, Make]] = {
    "all-reduce": (AllReduce(), adamw),
    "all-reduce-lamb": (AllReduce(), lamb),
    "slow-momentum": (SlowMo(LocalSGD(2), period=2), sgd),
    "push-sum": (PushSum(), sgd),
    "slow-push-sum": (SlowMo(PushSum(), period=3), adamw),
    # A codec that rounds every element independently, so that splitting a vector changes nothing.
    "momentum": (CompressedMomentum(codec=Bf16(), warmup_steps=2), one_bit_adam),
}


def trained(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Callable[[int], Tensor],
    clip: Callable[[], Any],
    *,
    copy: int,
    steps: int = STEPS,
    first: int = 0,
) -> list[Tensor]:
    losses: list[Tensor] = []
    for step in range(first, steps):
        optimizer.zero_grad()
        losses.append(loss(10 * step + copy))
        losses[-1].backward()
        clip()
        optimizer.step()
    return [each.detach() for each in losses]


def whole(recipe: str, comm: Comm) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, this copy's parameters, and what all copies agree on, of a model that is not split."""
    strategy, make = RECIPES[recipe]
    model = gpt()
    optimizer = make(model, None)
    worker = attach(model, optimizer, strategy, comm=comm)
    losses = trained(
        model,
        optimizer,
        lambda step: serial_loss(model, step),
        lambda: clip_grad_norm_(model.parameters(), 0.5),
        copy=comm.rank,
    )
    own = {name: x.clone() for name, x in model.state_dict().items()}
    with worker.consensus():
        return losses, own, {name: x.clone() for name, x in model.state_dict().items()}


def cut(
    recipe: str, mesh: Mesh3D, *, by_torch: bool = False
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The same of a model of which every rank holds a block, clipped by torch's function or thinwire's."""
    strategy, make = RECIPES[recipe]
    model = parallelized(mesh.block)
    optimizer = make(model, mesh.block)
    worker = attach(model, optimizer, strategy, mesh=mesh)
    losses = trained(
        model,
        optimizer,
        lambda step: mesh_loss(model, mesh.block, step),
        lambda: clip_grad_norm_(model.parameters(), 0.5) if by_torch else clip_gradient_norm_(model, 0.5, mesh.block),
        copy=mesh.data.rank,
    )
    own = whole_state(model, mesh.block)
    with worker.consensus():
        return losses, own, whole_state(model, mesh.block)


def assert_equal(found: list[Any], expected: list[Any], blocks: int) -> None:
    for rank, (losses, *parameters) in enumerate(found):
        their_losses, *theirs = expected[rank // blocks]
        torch.testing.assert_close(losses, their_losses, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(parameters, theirs, rtol=1e-7, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_copies_on_meshes_train_like_whole_ones(recipe: str) -> None:
    expected = run_threads(2, lambda comm: whole(recipe, comm), timeout=20)
    found = run_mesh_3d_threads(2, 2, 2, lambda mesh: cut(recipe, mesh), timeout=20)
    assert_equal(found, expected, 4)


@pytest.mark.parametrize("recipe", ["all-reduce", "slow-momentum"])
def test_torch_clips_by_the_norm_of_the_whole_gradient(recipe: str) -> None:
    expected = run_threads(2, lambda comm: whole(recipe, comm), timeout=20)
    found = run_mesh_3d_threads(2, 1, 2, lambda mesh: cut(recipe, mesh, by_torch=True), timeout=20)
    assert_equal(found, expected, 2)


def in_processes(rows: int, columns: int) -> list[Any]:
    mesh = mesh_3d((2, rows, columns), timeout=20)
    return [cut(recipe, mesh) for recipe in RECIPES]


@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (2, 1)])
@pytest.mark.slow
def test_copies_on_meshes_of_processes_train_like_whole_ones(rows: int, columns: int) -> None:
    found = run_processes(4, in_processes, rows, columns)
    for k, recipe in enumerate(RECIPES):
        expected = run_threads(2, lambda comm, recipe=recipe: whole(recipe, comm), timeout=20)
        assert_equal([each[k] for each in found], expected, 2)


@pytest.mark.slow
def test_replicated_parameters_keep_the_same_bits_under_a_codec_with_scales() -> None:
    def work(mesh: Mesh3D) -> tuple[dict[str, Tensor], Tensor]:
        model = parallelized(mesh.block)
        optimizer = one_bit_adam(model, mesh.block)
        attach(model, optimizer, CompressedMomentum(codec=OneBit(norm="l2"), warmup_steps=2), mesh=mesh)
        trained(model, optimizer, lambda step: mesh_loss(model, mesh.block, step), lambda: None, copy=mesh.data.rank)
        alike = {name: p.detach() for name, p in model.named_parameters() if p.dim() == 1 or "table" in name}
        return alike, torch.cat([p.detach().flatten() for p in model.parameters()])

    found = run_mesh_3d_threads(2, 2, 2, work, timeout=20)
    for rank, (alike, everything) in enumerate(found):
        for name, x in alike.items():
            assert torch.equal(x, found[rank % 2][0][name]), name
        assert torch.equal(everything, found[rank % 4][1])  # copies agree on every bit of their blocks


def test_a_block_sends_other_copies_its_share_of_the_model() -> None:
    def work(mesh: Mesh3D) -> tuple[float, float]:
        model = parallelized(mesh.block)
        optimizer = sgd(model, None)
        attach(model, optimizer, AllReduce(), mesh=mesh)
        before = mesh.data.meter.payload_bytes
        trained(model, optimizer, lambda step: mesh_loss(model, mesh.block, step), lambda: None, copy=0, steps=1)
        sent = mesh.data.meter.payload_bytes - before
        assert mesh.payload_bytes > sent
        return sent, sum(p.numel() for p in model.parameters())

    held = 0.0
    for sent, held in run_mesh_3d_threads(2, 2, 2, work, timeout=20):
        assert sent == 8 * held  # 2 (d - 1) / d of fp64, for d = 2
    serial = gpt()
    vectors = sum(p.numel() for p in serial.parameters() if p.dim() == 1) + LENGTH * 24
    assert held == (sum(p.numel() for p in serial.parameters()) - vectors) / 4 + vectors / 2
    assert (BATCH, VOCABULARY) == (12, 36)


@pytest.mark.slow
def test_a_run_resumes_from_each_block_s_own_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    def work(mesh: Mesh3D) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
        def fresh() -> tuple[nn.Module, Optimizer, Any]:
            model = parallelized(mesh.block)
            optimizer = sgd(model, None)
            return model, optimizer, attach(model, optimizer, SlowMo(LocalSGD(2), period=2), mesh=mesh)

        def go(model: nn.Module, optimizer: Optimizer, first: int, steps: int) -> None:
            copy = mesh.data.rank
            trained(
                model,
                optimizer,
                lambda step: mesh_loss(model, mesh.block, step),
                lambda: None,
                copy=copy,
                first=first,
                steps=steps,
            )

        model, optimizer, worker = fresh()
        go(model, optimizer, 0, 3)
        worker.save(tmp_path)
        go(model, optimizer, 3, 6)
        again, other, resumed = fresh()
        resumed.load(tmp_path)
        go(again, other, 3, 6)
        return dict(model.named_parameters()), dict(again.named_parameters()), [p.name for p in tmp_path.iterdir()]

    for straight, resumed, folders in run_mesh_3d_threads(2, 2, 1, work, timeout=20):
        assert all(torch.equal(x, resumed[name]) for name, x in straight.items())
        assert sorted(folders) == ["mesh-2x1-row-0-column-0", "mesh-2x1-row-1-column-0"]


@pytest.mark.parametrize(
    ("strategy", "make", "message"),
    [
        (EagerPushSum(), sgd, "EagerPushSum on 2x2 blocks: its results depend on timing"),
        (SlowMo(EagerPushSum(), period=4), sgd, "EagerPushSum on 2x2 blocks"),
        (CompressedMomentum(max_norm=1.0), one_bit_adam, "knows the norm of its own block only"),
        (CompressedMomentum(warmup_steps=None), one_bit_adam, "Set warmup_steps to a number"),
        (AllReduce(), lambda model, _: Lamb(model.parameters()), "Use Lamb2D"),
    ],
)
def test_what_would_make_blocks_differ_is_refused(strategy: Strategy, make: Make, message: str) -> None:
    def work(mesh: Mesh3D) -> None:
        model = parallelized(mesh.block)
        attach(model, make(model, None), strategy, mesh=mesh)

    with pytest.raises(ConfigError, match=message):
        run_mesh_3d_threads(1, 2, 2, work, timeout=20)


def test_a_scaler_is_refused_on_blocks() -> None:
    def work(mesh: Mesh3D) -> None:
        model = parallelized(mesh.block)
        attach(model, sgd(model, None), AllReduce(), mesh=mesh, scaler=torch.amp.GradScaler("cpu"))

    with pytest.raises(ConfigError, match="Train in bf16"):
        run_mesh_3d_threads(1, 1, 2, work, timeout=20)


def test_blocks_of_one_copy_must_be_started_alike() -> None:
    def work(mesh: Mesh3D) -> None:
        model = parallelized(mesh.block)
        attach(model, sgd(model, None), AllReduce(), mesh=mesh, seed=mesh.block.row)

    with pytest.raises(MismatchError, match="the seed"):
        run_mesh_3d_threads(2, 2, 1, work, timeout=20)


def test_lamb_without_a_mesh_is_lamb_and_half_a_mesh_is_refused() -> None:
    ours, theirs = gpt(), gpt()
    pairs = (ours, Lamb2D(ours.parameters(), lr=0.02)), (theirs, Lamb(theirs.parameters(), lr=0.02))
    for model, optimizer in pairs:
        serial_loss(model).backward()
        optimizer.step()
    assert all(torch.equal(x, y) for x, y in zip(ours.parameters(), theirs.parameters(), strict=True))
    with pytest.raises(ConfigError, match="belong together"):
        Lamb2D(ours.parameters(), model=ours)


def test_lamb_on_a_mesh_does_not_undo_what_was_done_to_sixteen_bits_between_steps() -> None:
    def work(mesh: Mesh2D) -> None:
        model = parallelized(mesh).bfloat16()
        optimizer = Lamb2D(model.parameters(), model=model, mesh=mesh, lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        halved = flat(model)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        assert torch.equal(flat(model), halved)

    run(2, 2, work)


def wrong_sizes() -> None:
    for shape, message in (((2, 2, 2), "2x2x2 with 2 processes"), ((0, 1, 2), "must be at least 1")):
        with pytest.raises(ConfigError, match=message):
            mesh_3d(shape)


def test_a_mesh_of_copies_needs_as_many_processes() -> None:
    run_processes(2, wrong_sizes)
