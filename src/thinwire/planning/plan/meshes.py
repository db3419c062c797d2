# SPDX-License-Identifier: Apache-2.0
"""How long a training step takes on a mesh: the real split model, simulated on meta tensors.

As in `thinwire.planning.plan.predict` no formula describes what is sent. Each rank of the simulation splits the
model with `parallelize_2d` and runs its forward and backward pass with all of their messages. Every product that it
computes lets as much virtual time pass as the measured step of the whole model took for as many operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from thinwire.core.comm.counting import CountingComm
from thinwire.core.torch_internals import TorchDispatchMode
from thinwire.errors import ConfigError
from thinwire.methods.strategies.gradients.all_reduce import AllReduce
from thinwire.planning.plan.predict import PATIENCE, ModelTime, Prediction
from thinwire.planning.plan.traffic import MakeOptimizer, default_optimizer
from thinwire.planning.simulate import Network, SimulatedComm, simulate
from thinwire.planning.simulate.durations import Duration
from thinwire.tensor2d.loss import cross_entropy_2d
from thinwire.tensor2d.mesh import Mesh2D, Mesh3D
from thinwire.tensor2d.parallelize import parallelize_2d
from thinwire.worker.attach import attach
from thinwire.worker.worker import internals_of

_WARM_UP, _COUNTED = 1, 1


@dataclass(frozen=True)
class LanguageModel:
    """What is split: a language model, and one worker's batch where nothing is split.

    Attributes:
        make: makes the whole model, on the meta device.
        samples: of a batch.
        length: symbols of a sample.
        vocabulary: number of symbols.
    """

    make: Callable[[], nn.Module]
    samples: int
    length: int
    vocabulary: int

    def symbols(self, samples: int) -> Tensor:
        """Return a batch without numbers."""
        return torch.zeros(samples, self.length, dtype=torch.long, device="meta")

    def operations(self) -> float:
        """Floating-point operations of the products in a forward and a backward pass of one worker's batch."""
        counted, symbols, model = list[float](), self.symbols(self.samples), self.make()
        with _Products(counted.append):
            nn.functional.cross_entropy(model(symbols).flatten(0, -2), symbols.flatten()).backward()
        return sum(counted)


@dataclass(frozen=True)
class MeshShape:
    """Copies of a model, each split over rows and columns of workers.

    Attributes:
        copies: which average their gradients.
        rows: of a copy's mesh.
        columns: of a copy's mesh.
    """

    copies: int
    rows: int
    columns: int

    @property
    def workers(self) -> int:
        """All of them."""
        return self.copies * self.rows * self.columns

    def __str__(self) -> str:
        """Rows and columns, as `thinwire train --tensor-parallel` takes them."""
        return f"{self.rows}x{self.columns}"


def mesh_shapes(model: LanguageModel, workers: int) -> Iterator[MeshShape]:
    """Yield the meshes of two ranks and more that can split a model, from the smallest; all workers hold copies."""
    for ranks in range(2, workers + 1):
        if workers % ranks:
            continue
        for rows in (rows for rows in range(1, ranks + 1) if ranks % rows == 0):
            if _fits(model, shape := MeshShape(workers // ranks, rows, ranks // rows)):
                yield shape


def _fits(model: LanguageModel, shape: MeshShape) -> bool:
    """Return True if a mesh divides the model's sizes; the batch of a whole copy it always does."""
    counting = (CountingComm(0, size) for size in (shape.columns, shape.rows, shape.rows * shape.columns))
    try:
        parallelize_2d(model.make(), Mesh2D(*counting))
    except ConfigError:
        return False
    return True


def predict_mesh(
    model: LanguageModel,
    shape: MeshShape,
    *,
    network: Network,
    model_time: ModelTime,
    optimizer: MakeOptimizer | None = None,
) -> Prediction:
    """Simulate training steps of a model that is split over a mesh, on as large a batch as all workers have otherwise.

    Args:
        model: the model, and one worker's batch.
        shape: of the mesh, and the number of copies.
        network: rates and latencies, slow workers.
        model_time: of the whole model's step on one worker, with its own batch.
        optimizer: makes the optimizer from the parameters; SGD unless given.

    Returns:
        The costs of a step; a copy trains on the batches of all of its workers.

    Example:
        A model of two small layers over two workers. On a fast link they train on the batches of both in the time that
        each would need for its own.

        >>> import torch
        >>> from thinwire.planning.plan.meshes import LanguageModel, MeshShape, predict_mesh
        >>> from thinwire.planning.plan.predict import ModelTime
        >>> from thinwire.planning.simulate import Network
        >>> from thinwire.lab.tasks.models.gpt import GPT, GPTSize
        >>> def make():
        ...     with torch.device("meta"):
        ...         return GPT(GPTSize(layers=2, width=64, heads=2), context=32, vocabulary=64)
        >>> model = LanguageModel(make, samples=4, length=32, vocabulary=64)
        >>> found = predict_mesh(model, MeshShape(1, 1, 2), network=Network(bits_per_second=1e15, latency=0.0),
        ...                      model_time=ModelTime(0.02, 0.04))
        >>> round(found.seconds, 2)
        0.06
    """
    per_operation = (model_time.forward + model_time.backward) / model.operations()
    blocks = shape.rows * shape.columns
    samples = model.samples * blocks
    sent, held = [0.0] * shape.workers, [0.0] * shape.workers
    spans: list[tuple[float, float]] = [(0.0, 0.0)] * shape.workers

    def work(comm: SimulatedComm) -> None:
        mesh = _mesh(comm, shape)
        split = model.make()
        parallelize_2d(split, mesh.block)
        made = default_optimizer(AllReduce(), split, shape.workers, make=optimizer)
        worker = attach(split, made, AllReduce(), mesh=mesh)
        comms = (mesh.data, mesh.block.along_row, mesh.block.along_column, mesh.block.whole)
        symbols = mesh.block.rows_of(model.symbols(samples))
        begin = before = 0.0
        for step in range(_WARM_UP + _COUNTED):
            if step == _WARM_UP:
                begin, before = comm.now, sum(each.meter.payload_bytes for each in comms)
            made.zero_grad()
            with _Products(lambda operations: comm.sleep(operations * per_operation * comm.slowdown)):
                cross_entropy_2d(split(symbols), symbols, mesh.block, vocabulary=model.vocabulary).backward()
            comm.sleep(model_time.update / blocks * comm.slowdown)
            worker.record_batch(samples)
            made.step()
        internals_of(worker).wait_pending()
        spans[comm.rank] = begin, comm.now
        sent[comm.rank] = sum(each.meter.payload_bytes for each in comms) - before
        held[comm.rank] = float(sum(x.nbytes for r in worker.replicas for x in (r.x, r.g)))

    ended = simulate(shape.workers, work, network=network, compute_time=Duration(), timeout=PATIENCE)
    for failure in ended.failures.values():
        raise failure
    slowest = max(comm.slowdown for comm in ended.comms)
    return Prediction(
        strategy=AllReduce(),
        seconds=(max(end for _, end in spans) - max(begin for begin, _ in spans)) / _COUNTED,
        alone=model_time.seconds * slowest,
        own_seconds=0.0,
        payload_bytes=sum(sent) / shape.workers / _COUNTED,
        busiest_bytes=max(sent) / _COUNTED,
        memory_bytes=max(held),
    )


def _mesh(comm: SimulatedComm, shape: MeshShape) -> Mesh3D:
    """Return this worker's place: copy by copy, row by row."""
    blocks = shape.rows * shape.columns
    copy, block = divmod(comm.rank, blocks)
    row, column = divmod(block, shape.columns)
    first = copy * blocks

    return Mesh3D(
        comm.among(range(block, shape.workers, blocks)),
        Mesh2D(
            comm.among(range(first + row * shape.columns, first + (row + 1) * shape.columns)),
            comm.among(range(first + column, first + blocks, shape.columns)),
            comm.among(range(first, first + blocks)),
        ),
    )


class _Products(TorchDispatchMode):
    """Tells how many floating-point operations each product computes, as it is computed."""

    def __init__(self, tell: Callable[[float], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        # A sum of products may be in place.
        name = func.overloadpacket.__name__.rstrip("_")
        count = flop_registry.get(getattr(torch.ops.aten, name, None))
        if count is not None:
            self._tell(float(count(*args, **(kwargs or {}), out_val=found)))
        return found
