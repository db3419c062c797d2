# SPDX-License-Identifier: Apache-2.0
"""Models under FSDP2: each rank holds a shard, and averages it with the ranks that hold the same shard."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire
from tests.engine import attach, batch, drawn, flat, steps
from tests.pool import run_processes
from thinwire import (
    AllReduce,
    CheckpointError,
    ConfigError,
    DiLoCo,
    Gossip,
    LeaderSGD,
    LocalSGD,
    MismatchError,
    NonFiniteError,
    OverlapLocalSGD,
    Probe,
    PushSum,
    SlowMo,
    Strategy,
)
from thinwire.worker.worker import internals_of

Make = Callable[[nn.Module], torch.optim.Optimizer]
STRATEGIES: list[Strategy] = [
    *(LocalSGD(2), SlowMo(period=3), SlowMo(PushSum(), period=2), Gossip(), PushSum()),
    *(PushSum(staleness=1), OverlapLocalSGD(period=2)),
]


def net() -> nn.Sequential:
    """Rows that two ranks cannot divide evenly, and one parameter of a single row."""
    return drawn(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), nn.Linear(2, 1)))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, foreach=False)


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02, foreach=False)


def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def sharded(mesh: DeviceMesh, strategy: Strategy, make: Make) -> thinwire.Worker:
    """Two groups that hold a model each, half of it per rank; both halves see the same data."""
    model = net()
    for layer in model:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return thinwire.attach(model, make(model), strategy, group=mesh["replicate"], timeout=20)


def whole(model: nn.Module) -> Tensor:
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])  # type: ignore[attr-defined]


def data(group: int, count: int, first: int = 0) -> list[tuple[Tensor, Tensor]]:
    return [batch(group, step, classes=1) for step in range(first, first + count)]


def compared_with_unsharded() -> list[tuple[str, float, float]]:
    """How far sharded training ends from unsharded training by two threads."""
    mesh = two_by_two()
    group = mesh.get_local_rank("replicate")
    found: list[tuple[str, float, float]] = []
    for make in (momentum, adam):
        for strategy in STRATEGIES:
            worker = steps(sharded(mesh, strategy, make), data(group, 7))
            mine = whole(worker.model)
            with worker.consensus() as model:
                agreed = whole(model)
                output = model(batch(9, 0, classes=1)[0])
            after = whole(worker.model)
            assert torch.equal(after, mine), "evaluation leaves the parameters as they were"
            worker.detach()
            theirs, their_agreed, their_output = expected(strategy, make)[group]
            distance = max(float((mine - theirs).abs().max()), float((agreed - their_agreed).abs().max()))
            found.append((f"{strategy}, {make.__name__}", distance, float((output - their_output).abs().max())))
    return found


def expected(strategy: Strategy, make: Make) -> list[tuple[Tensor, Tensor, Tensor]]:
    def work(comm: thinwire.Comm) -> tuple[Tensor, Tensor, Tensor]:
        model = net()
        worker = steps(thinwire.attach(model, make(model), strategy, comm=comm), data(comm.rank, 7))
        own = flat(model).clone()
        with worker.consensus() as agreed:
            output = agreed(batch(9, 0, classes=1)[0]).detach()
            return own, flat(agreed).clone(), output

    return thinwire.run_threads(2, work, timeout=20)


@pytest.mark.slow
def test_sharded_training_equals_unsharded_training() -> None:
    for found in run_processes(4, compared_with_unsharded):
        assert len(found) == 2 * len(STRATEGIES)
        for name, distance, output in found:
            assert distance < 1e-6, (name, distance)
            assert output < 1e-6, (name, output)


def over_hybrid_shards() -> float:
    """Slow momentum where torch itself averages gradients between the groups, beside the unsharded run."""
    mesh, strategy = two_by_two(), SlowMo(period=3)
    model = net()
    fully_shard(model, mesh=mesh)
    worker = thinwire.attach(model, momentum(model), strategy, group=mesh["replicate"], timeout=20)
    # Torch's mean is over all four ranks, of which pairs see the same data.
    steps(worker, data(mesh.get_local_rank("replicate"), 7))
    mine = whole(model)
    worker.detach()
    alone = thinwire.run_threads(2, lambda comm: flat(steps(both(comm), data(comm.rank, 7)).model), timeout=20)
    return float((mine - alone[0]).abs().max())


def both(comm: thinwire.Comm) -> thinwire.Worker:
    model = net()
    return thinwire.attach(model, momentum(model), SlowMo(AllReduce(), period=3), comm=comm)


def test_slow_momentum_over_hybrid_shards_is_slow_momentum_over_averaged_gradients() -> None:
    assert all(distance < 1e-6 for distance in run_processes(4, over_hybrid_shards))


def saved_and_refused(folder: str) -> dict[str, Any]:
    """Saving, resuming, bytes, and what is refused."""
    mesh = two_by_two()
    group = mesh.get_local_rank("replicate")
    found: dict[str, Any] = {"resumed": []}
    for strategy, make in ((SlowMo(PushSum(), period=4), momentum), (Gossip(), adam)):
        where = Path(folder) / type(strategy).__name__
        worker = steps(sharded(mesh, strategy, make), data(group, 3))
        worker.save(where)
        through = whole(steps(worker, data(group, 4, first=3)).model)
        worker.save(where)
        worker.detach()
        again = sharded(mesh, strategy, make)
        dist.barrier()
        if dist.get_rank() == 0:
            # As if the run had ended after it had saved one shard of the two.
            shutil.rmtree(where / "shard-1-of-2/step-00000007")
        dist.barrier()
        again.load(where)
        found["resumed"].append(torch.equal(whole(steps(again, data(group, 4, first=3)).model), through))
        again.detach()
    worker = sharded(mesh, LocalSGD(1), momentum)
    before = worker.comm.meter.payload_bytes
    steps(worker, data(group, 1))
    found["bytes"] = worker.comm.meter.payload_bytes - before
    found["elements"] = sum(r.x.numel() for r in worker.replicas)
    # Whole tensors, as the only rank that holds the first shard of the first copy writes them.
    exported = worker.export(Path(folder) / "model.safetensors")
    alone = net()
    with worker.consensus() as agreed:
        expected = whole(agreed)
    dist.barrier()
    alone.load_state_dict(load_file(exported))
    found["exported"] = torch.equal(flat(alone), expected)
    worker.detach()
    for name, wrong in (
        ("gradients", lambda: sharded(mesh, AllReduce(), momentum)),
        ("loss", lambda: sharded(mesh, LeaderSGD(period=2), momentum)),
        ("norms", lambda: sharded(mesh, DiLoCo(period=2, outliers="clip"), momentum)),
        ("figures", lambda: sharded(mesh, Probe(LocalSGD(2)), plain)),
        ("group", lambda: over_the_wrong_dimension(mesh)),
    ):
        with pytest.raises((ConfigError, MismatchError)) as refused:
            wrong()
        found[name] = str(refused.value)
    return found


def over_the_wrong_dimension(mesh: DeviceMesh) -> None:
    """Averaging with ranks that hold another shard."""
    model = net()
    fully_shard(model, mesh=mesh["shard"])
    thinwire.attach(model, momentum(model), LocalSGD(), group=mesh["shard"], timeout=20)


def test_shards_are_saved_counted_and_never_mixed_up() -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = run_processes(4, saved_and_refused, folder)
        assert {path.name for path in (Path(folder) / "SlowMo").iterdir()} == {"shard-0-of-2", "shard-1-of-2"}
    for found in results:
        assert found["resumed"] == [True, True]
        assert found["exported"]
        assert found["bytes"] == 4 * found["elements"]
        assert "fully_shard" in found["gradients"]
        assert "the shards of one model might follow different leaders" in found["loss"]
        assert "left out of the mean of one shard only" in found["norms"]
        assert "sums over the whole gradient" in found["figures"]
        assert "part 0 of 2" in found["group"]
        assert "part 1 of 2" in found["group"]
    assert sum(found["elements"] for found in results) == 2 * sum(p.numel() for p in net().parameters())


def damaged_and_not_finite(folder: str) -> list[tuple[str, bool]]:
    """What each rank raises if one rank's part cannot be read or saved, and whether its parameters stay unchanged."""
    mesh = two_by_two()
    found: list[tuple[str, bool]] = []
    for pattern in ("rank-0000-*.safetensors", "rank-0000.json"):
        where = Path(folder) / pattern.rpartition(".")[2]
        worker = steps(sharded(mesh, LocalSGD(2), momentum), data(0, 2))
        home = worker.save(where)
        dist.barrier()
        if dist.get_rank() == 1:
            file = next(home.glob(pattern))
            file.write_bytes(file.read_bytes()[:-9])
        dist.barrier()
        before = whole(worker.model).clone()
        with pytest.raises(CheckpointError) as refused:
            worker.load(where)
        found.append((str(refused.value), torch.equal(whole(worker.model), before)))
        worker.detach()
    worker = sharded(mesh, LocalSGD(2), momentum)
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(worker.model.parameters()).to_local().fill_(torch.nan)  # type: ignore[attr-defined]
    with pytest.raises((CheckpointError, NonFiniteError)) as failed:
        worker.save(Path(folder) / "bad")
    found.append((str(failed.value), not (Path(folder) / "bad").exists()))
    worker.detach()
    return found


def test_a_part_that_cannot_be_read_or_saved_is_refused_on_the_ranks_of_all_parts() -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = run_processes(4, damaged_and_not_finite, folder)
    for rank, found in enumerate(results):
        for (text, unchanged), cause in zip(found, ("checksum", "cannot be read", "not finite"), strict=True):
            assert (cause if rank % 2 else "another part of the model") in text, (rank, text)
            assert unchanged


def test_checkpoints_of_unsharded_models_need_no_subfolder() -> None:
    def work(comm: thinwire.Comm) -> str:
        worker = attach(comm, LocalSGD(2))
        return str(internals_of(worker).own_folder("here"))

    assert thinwire.run_threads(2, work) == ["here", "here"]
