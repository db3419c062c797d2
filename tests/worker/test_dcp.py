# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint keeps every rank's state, and every strategy goes on with another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import thinwire
from tests.battery.cases import STRATEGIES
from tests.battery.runs import begin, go_on, with_
from tests.pool import run_processes
from thinwire import CheckpointError
from thinwire.core.comm.group import comm_for
from thinwire.integrations import dcp as ours
from thinwire.worker.replica_state import pack, same
from thinwire.worker.worker import internals_of

MIDDLE, SECOND, LAST = 5, 8, 11


def cases(*, of_three: bool) -> list[Any]:
    return [each for each in STRATEGIES if (3 not in each.refuses) == of_three]


def stage(folder: str, last: int, resume: bool, of_three: bool) -> list[str]:
    """One number of ranks: load, train and save every strategy, in both ways; returns what differs between them."""
    wrong: list[str] = []
    torch.set_num_threads(1)
    for i, each in enumerate(cases(of_three=of_three)):
        setting = with_(each, size=dist.get_world_size(), dtype=torch.float32, steps=LAST)
        at, own = f"{folder}/{i}-{last}", f"{folder}/{i}-own"
        worker = begin(comm_for(timeout=20), setting, elsewhere=resume)
        if resume:
            before = MIDDLE if last == SECOND else SECOND
            ours.load(worker, f"{folder}/{i}-{before}")
            loaded = pack(internals_of(worker))
            worker.load(own)
            if worker.step != before or not same(loaded, pack(internals_of(worker))):
                wrong.append(str(each))
        go_on(worker, setting, last)
        internals_of(worker).wait_pending()
        dist.barrier()
        if last < LAST:
            dcp.save({"worker": worker.state_dict(model=True, optimizer=True)}, checkpoint_id=at)
            worker.save(own)
        worker.detach()
        dist.barrier()
    return wrong


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("many", [3, 4])
def test_every_strategy_goes_on_with_more_ranks_and_with_fewer(many: int, tmp_path: Path) -> None:
    of_three = many == 3
    assert cases(of_three=of_three)
    for size, last in ((2, MIDDLE), (many, SECOND), (2, LAST)):
        found = run_processes(size, stage, str(tmp_path), last, last > MIDDLE, of_three, seconds=280)
        assert found == [[]] * size


def steps(worker: Any, first: int, last: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(10 * worker.comm.rank)
    inputs = torch.randn(20, 3, 4, generator=draw)
    for step in range(first, last):
        worker.model(inputs[step]).square().mean().backward()
        worker.optimizer.step()
        worker.optimizer.zero_grad()
    return [p.detach().clone() for p in worker.model.parameters()]


def begun(recipe: str = "DiLoCo(period=4)") -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return thinwire.attach(model, torch.optim.AdamW(model.parameters(), lr=0.1), recipe)


def by_plain_calls(folder: str) -> list[bool]:
    worker = begun()
    steps(worker, 0, 6)
    state = worker.state_dict(model=True, optimizer=True)
    dcp.save({"app": {"worker": state, "epoch": 3}}, checkpoint_id=f"{folder}/nested")
    dcp.save({"worker": state, "epoch": 3}, checkpoint_id=f"{folder}/saved")
    # As worker.state_dict() was before it was flat.
    earlier = {f"rank-{worker.comm.rank:04d}": (pack(internals_of(worker)),)}
    dcp.save({"worker": earlier}, checkpoint_id=f"{folder}/earlier")
    writing = dcp.async_save({"worker": state}, checkpoint_id=f"{folder}/async")
    whole = steps(worker, 6, 12)
    writing.result()
    worker.detach()
    found: list[bool] = []
    for name, within in (("saved", "worker"), ("async", "worker"), ("earlier", "worker"), ("nested", "app.worker")):
        again = begun()
        ours.load(again, f"{folder}/{name}", name=within)
        found.append(again.step == 6 and all(map(torch.equal, steps(again, 6, 12), whole)))
        again.detach()
    return found


def test_torch_s_own_calls_save_every_rank_s_state(tmp_path: Path) -> None:
    assert run_processes(2, by_plain_calls, str(tmp_path)) == [[True] * 4] * 2


def beside_the_model(folder: str) -> list[bool]:
    def begun(seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.Linear(4, 2)
        return thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "SlowMo(period=4)")

    worker = begun(0)
    steps(worker, 0, 4)
    dcp.save({"model": worker.model.state_dict(), "worker": worker}, checkpoint_id=folder)
    whole = steps(worker, 4, 12)
    worker.detach()
    again = begun(1)
    dcp.load({"model": again.model.state_dict(), "worker": again}, checkpoint_id=folder)
    found = [again.step == 4, all(map(torch.equal, steps(again, 4, 12), whole))]
    again.detach()
    again = begun(1)
    try:
        dcp.load({"worker": again}, checkpoint_id=folder)
    except CheckpointError as error:
        found.append("Load the model before the worker" in str(error))
    again.detach()
    return found


def test_torch_s_own_calls_save_and_load_a_worker_beside_its_model(tmp_path: Path) -> None:
    assert run_processes(2, beside_the_model, str(tmp_path)) == [[True] * 3] * 2


def by_fewer(folder: str) -> list[str]:
    worker = begun()
    said: list[str] = []
    for attempt in (
        lambda: dcp.load({"worker": worker}, checkpoint_id=f"{folder}/saved"),
        lambda: ours.load(worker, f"{folder}/saved", name="walker"),
        lambda: ours.load(worker, f"{folder}/none"),
    ):
        try:
            attempt()
        except CheckpointError as error:
            said.append(str(error))
    ours.load(worker, f"{folder}/saved")
    worker.detach()
    return [*said, str(worker.step)]


def test_what_torch_s_own_call_cannot_load_is_refused_with_the_call_to_use(tmp_path: Path) -> None:
    run_processes(2, by_plain_calls, str(tmp_path))
    ((number, name, nothing, step),) = run_processes(1, by_fewer, str(tmp_path))
    assert "reads only what the new worker has already. Use thinwire.integrations.dcp.load(worker, folder)" in number
    assert "no worker with rank-0000 under 'walker', but epoch, worker" in name
    assert "holds no checkpoint" in nothing and step == "6"


def of_shards(folder: str) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def begun() -> Any:
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(4, 4), mesh=mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        return thinwire.attach(model, optimizer, "DiLoCo(period=4)", group=mesh["replicate"])

    worker = begun()
    steps(worker, 0, 5)
    dcp.save({"worker": worker.state_dict(model=True, optimizer=True)}, checkpoint_id=folder)
    saved = pack(internals_of(worker))
    worker.detach()
    again = begun()
    steps(again, 0, 2)
    ours.load(again, folder)
    found = same(pack(internals_of(again)), saved)
    again.detach()
    return found


@pytest.mark.slow
def test_every_shard_is_kept(tmp_path: Path) -> None:
    assert run_processes(4, of_shards, str(tmp_path)) == [True] * 4
