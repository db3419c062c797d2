# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests of meshes: threads, blocks, and small models on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tests.oracles.tensor2d import LENGTH, VOCABULARY, Encoder, drawn, tokens
from thinwire.lab.tasks.models.base import build
from thinwire.lab.tasks.models.gpt import GPT, GPTSize
from thinwire.tensor2d import Mesh2D, Panels, cross_entropy_2d, parallelize_2d, run_mesh_threads, whole_state
from thinwire.tensor2d.plan import Untouched

T = TypeVar("T")


def block_of(x: Tensor, mesh: Mesh2D) -> Tensor:
    """Rows of the first dimension, columns of the last."""
    return x.chunk(mesh.rows)[mesh.row].chunk(mesh.columns, -1)[mesh.column].contiguous()


def run(rows: int, columns: int, work: Callable[[Mesh2D], T], panels: Panels | None = None) -> list[T]:
    return run_mesh_threads(rows, columns, work, panels=panels, timeout=20)


def gpt(seed: int = 0) -> GPT:
    """Two blocks; twelve heads of two features."""
    size = GPTSize(layers=2, width=24, heads=12)
    model = build(lambda: GPT(size, context=LENGTH, vocabulary=VOCABULARY), seed=seed).double()
    with torch.no_grad():  # so that biases and gains differ
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(0.1 * drawn(*parameter.shape, seed=100 + number))
    return model


def mesh_loss(model: nn.Module, mesh: Mesh2D, step: int = 0) -> Tensor:
    ids, targets = (mesh.rows_of(x) for x in tokens(step))
    return cross_entropy_2d(model(ids), targets, mesh)


def parallelized(mesh: Mesh2D, model: nn.Module | None = None, **settings: Any) -> nn.Module:
    if isinstance(model, Encoder):
        settings = {"plan": {Encoder: Untouched()}, **settings}
    return parallelize_2d(gpt() if model is None else model, mesh, **settings)


def gradients(model: nn.Module, mesh: Mesh2D) -> dict[str, Tensor]:
    """The whole gradients by name; overwrites the model's parameters with them."""
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    return whole_state(model, mesh)
