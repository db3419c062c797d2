# SPDX-License-Identifier: Apache-2.0
"""One rank of a race of tensor parallelisms; a program, started once per rank with the race as JSON and a folder.

Every scheme's model is there at once, and steps are taken in turn, so that all meet the same weather.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from reproductions.optimus.meter import Counted
from reproductions.optimus.transformer_layers import SCHEMES, Scheme, Stem, blocks_of, cut, share
from thinwire.core.storage.files import write_atomically
from thinwire.tensor2d.mesh import Mesh2D, mesh_2d
from thinwire.tensor2d.panels import Panels
from thinwire.tensor2d.products import multiply_ab


@dataclass(frozen=True)
class Race:
    """What the ranks do.

    Args:
        stem: the layers and the batch.
        rows: of the mesh.
        columns: of the mesh.
        rounds: how often each scheme takes its steps; 0 is no measurement of time.
        steps: of one round.
        product: rows and columns of the matrices whose product is watched panel by panel; 0 is none.
        panels: of that product.
    """

    stem: Stem
    rows: int
    columns: int
    rounds: int
    steps: int = 1
    product: int = 0
    panels: int = 4


@dataclass(frozen=True)
class Counts:
    """What one rank counted in one step of one scheme.

    Args:
        payload_bytes: sent in forward and backward pass and by the optimizer.
        peak_bytes: of tensors alive together.
        loss: of the whole batch, in the third step.
        seconds: of each round's steps, per step.
        inference_payload_bytes: sent in a forward pass alone.
        inference_peak_bytes: of tensors alive together in it.
        inference_seconds: of each round's forward passes, per pass.
    """

    payload_bytes: float
    peak_bytes: int
    loss: float
    seconds: list[float]
    inference_payload_bytes: float
    inference_peak_bytes: int
    inference_seconds: list[float]


class Runner:
    """One scheme's model, optimizer and part of the batch on this rank."""

    def __init__(self, scheme: Scheme, race: Race, line: Any, mesh: Mesh2D) -> None:
        self._mesh, self._ranks = mesh, line.size()
        self._model = cut(blocks_of(race.stem), scheme, line, mesh)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1, momentum=0.9)
        draw = torch.Generator().manual_seed(1)
        shape = (race.stem.sequences, race.stem.length, race.stem.hidden)
        batch = [torch.randn(shape, generator=draw) for _ in range(2)]
        self._input, self._target = (share(x, scheme, mesh) for x in batch)
        self._elements = batch[0].numel()
        self._copies = self._ranks if scheme == "1d" else 1

    def step(self) -> Tensor:
        """Forward, backward, update; returns this rank's part of the loss."""
        self._optimizer.zero_grad()
        loss = F.mse_loss(self._model(self._input.requires_grad_()), self._target, reduction="sum") / self._elements
        loss.backward()
        self._input.grad = None
        self._optimizer.step()
        return loss.detach()

    def counted(self) -> tuple[float, int, float]:
        """Bytes, peak memory and the whole batch's loss of one more step."""
        before = self._mesh.payload_bytes
        with Counted(self._held(), ranks=self._ranks) as counted:
            loss = self.step()
        dist.all_reduce(loss)
        sent = counted.payload_nbytes + self._mesh.payload_bytes - before
        return sent, counted.peak_nbytes, float(loss) / self._copies

    @torch.no_grad()
    def infer(self) -> Tensor:
        """A forward pass alone."""
        return self._model(self._input)

    def counted_inference(self) -> tuple[float, int]:
        """Bytes and peak memory of a forward pass, beside parameters and input alone."""
        before = self._mesh.payload_bytes
        held = [_local(x.detach()) for x in (*self._model.parameters(), self._input)]
        with Counted(held, ranks=self._ranks) as counted:
            self.infer()
        return counted.payload_nbytes + self._mesh.payload_bytes - before, counted.peak_nbytes

    def seconds(self, steps: int, *, inference: bool = False) -> float:
        """The mean time of so many steps, or of forward passes alone."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.infer() if inference else self.step()
        dist.barrier()
        return (time.perf_counter() - start) / steps

    def _held(self) -> list[Tensor]:
        self._optimizer.zero_grad()
        momenta = [each["momentum_buffer"] for each in self._optimizer.state.values()]
        return [_local(x.detach()) for x in (*self._model.parameters(), *momenta, self._input, self._target)]


def waits(mesh: Mesh2D, size: int, panels: int, rounds: int) -> dict[str, list[list[float]]]:
    """Seconds exposed and seconds altogether of each round of a product of square matrices and its two gradients.

    In each round panels overlap once and once do not, so that both meet the same weather; who begins changes.
    """
    draw = torch.Generator().manual_seed(dist.get_rank())
    block = size // mesh.rows, size // mesh.columns
    a, b, grad = (torch.randn(block, generator=draw) for _ in range(3))
    a.requires_grad_()
    b.requires_grad_()
    found: dict[str, list[list[float]]] = {"hidden": [], "exposed": []}
    for number in range(rounds + 1):
        for way in found if number % 2 == 0 else reversed(found):
            before = _exposed(mesh)
            dist.barrier()
            start = time.perf_counter()
            product = multiply_ab(a, b, mesh, Panels(panels, overlap=way == "hidden"))
            torch.autograd.grad(product, (a, b), grad)
            end = time.perf_counter()
            found[way].append([_exposed(mesh) - before, end - start])
    return {way: each[1:] for way, each in found.items()}


def _exposed(mesh: Mesh2D) -> float:
    return mesh.along_row.meter.exposed_seconds + mesh.along_column.meter.exposed_seconds


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def run(race: Race) -> dict[Scheme, Counts]:
    """Two steps to warm up, one that is counted, then rounds that are timed; for every scheme."""
    line = init_device_mesh("cpu", (dist.get_world_size(),))
    mesh = mesh_2d((race.rows, race.columns))
    runners: dict[Scheme, Runner] = {scheme: Runner(scheme, race, line, mesh) for scheme in SCHEMES}
    for runner in runners.values():
        runner.step()
        runner.step()
    counts = {scheme: runner.counted() for scheme, runner in runners.items()}
    inferred = {scheme: runner.counted_inference() for scheme, runner in runners.items()}
    times: dict[Scheme, tuple[list[float], list[float]]] = {scheme: ([], []) for scheme in SCHEMES}
    for _ in range(race.rounds):
        for scheme, runner in runners.items():
            times[scheme][0].append(runner.seconds(race.steps))
        for scheme, runner in runners.items():
            times[scheme][1].append(runner.seconds(race.steps, inference=True))
    return {
        scheme: Counts(*counts[scheme], times[scheme][0], *inferred[scheme], times[scheme][1]) for scheme in SCHEMES
    }


def main(text: str, folder: Path) -> None:
    """Join the others, run, and leave this rank's counts in the folder."""
    content: dict[str, Any] = json.loads(text)
    race = Race(Stem(**content.pop("stem")), **content)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        found: dict[str, Any] = {scheme: asdict(counts) for scheme, counts in run(race).items()}
        if race.product:
            mesh = mesh_2d((race.rows, race.columns))
            found |= waits(mesh, race.product, race.panels, race.rounds)
        write_atomically(folder / f"rank-{dist.get_rank()}.json", json.dumps(found).encode())
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
