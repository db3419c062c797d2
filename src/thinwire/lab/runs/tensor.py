# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism in a run: each copy of the model is split over a mesh of rows and columns of workers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.core.comm.counting import CountingComm
from thinwire.errors import ConfigError
from thinwire.lab.runs.engine import ThinwireEngine
from thinwire.lab.runs.optimizer import make_optimizer
from thinwire.lab.runs.settings import Settings
from thinwire.lab.tasks import Task
from thinwire.lab.tasks.base import IGNORED
from thinwire.lab.tasks.models.gpt import GPT
from thinwire.methods.strategies.base import Strategy
from thinwire.tensor2d.collectives import whole_activation
from thinwire.tensor2d.lamb import Lamb2D
from thinwire.tensor2d.loss import cross_entropy_2d
from thinwire.tensor2d.mesh import Mesh2D, Mesh3D, mesh_3d
from thinwire.tensor2d.parallelize import parallelize_2d
from thinwire.worker.attach import attach


def check_tensor_parallel(settings: Settings, task: Task, recipe: object) -> None:
    """Refuse settings that cannot train on their mesh, before any worker starts.

    Raises:
        ConfigError: a recipe, an optimizer, a batch or a model that cannot be split.
    """
    if settings.tensor_parallel is None:
        return
    rows, columns = settings.mesh_shape
    here = f"tensor_parallel={settings.tensor_parallel!r}"
    if not isinstance(recipe, Strategy):
        raise ConfigError(f"{here} with {settings.strategy}: torch's own methods hold whole models. Use AllReduce()")
    if settings.coreset is not None:
        raise ConfigError(
            f"{here} with coreset={settings.coreset!r}: choosing asks whole models. Leave one of them out"
        )
    if settings.optimizer == "onebit-lamb":
        raise ConfigError(f"{here} with optimizer='onebit-lamb': needs norms of whole tensors. Use onebit-adam or lamb")
    if settings.batch_size % rows:
        fix = f"Use {-(-settings.batch_size // rows) * rows}"
        raise ConfigError(f"{here} with batch_size={settings.batch_size}: {rows} rows must share it evenly. {fix}")
    problem = _why_not(task, settings.model, rows, columns)
    if problem is not None:
        fitting = [size for size in task.sizes if _why_not(task, size, rows, columns) is None]
        fix = f". Use --model-size {' or '.join(fitting)}" if fitting else ""
        raise ConfigError(f"{here} with model={settings.model!r}: {problem}{fix}")


def size_for(task: Task, rows: int, columns: int) -> str:
    """Return the first size of a task's models that a mesh divides; the default one where there is none."""
    return next((size for size in task.sizes if _why_not(task, size, rows, columns) is None), task.default_size)


def _why_not(task: Task, size: str, rows: int, columns: int) -> str | None:
    """Why a mesh cannot split a task's model; None if it can."""
    with torch.device("meta"):
        model = task.model(size, seed=0)
    if not isinstance(model, GPT):
        return f"only language models are cut, and task {task.name!r} has none. Use text or shakespeare"
    try:
        parallelize_2d(model, Mesh2D(CountingComm(0, columns), CountingComm(0, rows), CountingComm(0, rows * columns)))
    except ConfigError as error:
        return str(error)
    return None


class TensorParallel:
    """The loss and the evaluation of a worker that holds blocks of a model.

    Args:
        mesh: the ranks.
        vocabulary: number of symbols, without padding.
        shape: of the mesh, as in the settings.
    """

    def __init__(self, mesh: Mesh3D, vocabulary: int, shape: str) -> None:
        self.mesh = mesh
        self.vocabulary = vocabulary
        self.shape = shape

    @property
    def copy(self) -> int:
        """The copy of the model that this worker's blocks belong to; all workers of a copy see the same data."""
        return self.mesh.data.rank

    def loss(self, network: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the mean cross entropy of the copy's whole batch, in nats; equal to the task's own loss."""
        device = next(network.parameters()).device
        symbols, targets = (self.mesh.block.rows_of(each).to(device) for each in batch)
        return cross_entropy_2d(
            network(symbols), targets, self.mesh.block, vocabulary=self.vocabulary, ignore_index=IGNORED
        )

    def whole(self, network: nn.Module) -> nn.Module:
        """Return the model as a module of whole batches; all ranks of the copy must call it together."""
        return _Whole(network, self.mesh.block, self.vocabulary)

    def summary(self) -> dict[str, Any]:
        """Return the mesh and the number of copies, for the run's summary."""
        return {"tensor_parallel": self.shape, "copies": self.mesh.data.size}


class _Whole(nn.Module):
    def __init__(self, network: nn.Module, mesh: Mesh2D, vocabulary: int) -> None:
        super().__init__()
        self.network, self._mesh, self._vocabulary = network, mesh, vocabulary

    def forward(self, symbols: Tensor) -> Tensor:
        """[b, s] to [b, s, v]; a batch that the rows cannot share evenly is padded with its last sample."""
        lacking = -len(symbols) % self._mesh.rows
        filled = torch.cat([symbols, symbols[-1:].expand(lacking, -1)])
        logits = self.network(self._mesh.rows_of(filled))
        return whole_activation(logits, self._mesh, size=self._vocabulary)[: len(symbols)]


def tensor_parallel_engine(
    recipe: Strategy, model: nn.Module, settings: Settings
) -> tuple[ThinwireEngine, TensorParallel]:
    """Return this worker's blocks of a model under a recipe; all workers of the default group call together.

    Args:
        recipe: trains the copies together.
        model: the whole model, on its device.
        settings: of the run.
    """
    rows, columns = settings.mesh_shape
    vocabulary = model.get_submodule("embedding").get_parameter("weight").shape[0]
    mesh = mesh_3d((settings.copies, rows, columns), device=settings.device, timeout=settings.timeout)
    # Copies draw different dropout masks; the ranks of one copy must draw the same ones.
    parallelize_2d(model, mesh.block, seed=settings.seed + mesh.data.rank)
    optimizer: Optimizer = make_optimizer(model, settings)
    if settings.optimizer == "lamb":
        optimizer = Lamb2D(
            model.parameters(), settings.lr, model=model, mesh=mesh.block, weight_decay=settings.weight_decay
        )
    worker = attach(model, optimizer, recipe, mesh=mesh, seed=settings.seed, nonfinite=settings.nonfinite)
    # Bytes and waits are those within copies and between them.
    engine = ThinwireEngine(
        worker, optimizer, (mesh.data, mesh.block.along_row, mesh.block.along_column, mesh.block.whole)
    )
    return engine, TensorParallel(mesh, vocabulary, f"{rows}x{columns}")
