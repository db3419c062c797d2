# SPDX-License-Identifier: Apache-2.0
"""The calls of a comm over real processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire
from tests.core.comm.calls import CALLS, figures
from tests.engine import attach, batches, flat, steps
from tests.pool import run_processes
from thinwire import AllReduce, ConfigError, CountingComm, GroupComm, LocalSGD, ThinwireError
from thinwire.core.comm.group import _Connections, comm_for


def results_of_calls() -> tuple[dict[str, Any], dict[str, Any], dict[str, float]]:
    """All calls over the comm's own connections, then over the given group's; and the bytes of some."""
    comm = GroupComm(timeout=10)
    own = {name: call(comm) for name, (call, _) in CALLS.items()}
    over_group = GroupComm(timeout=10)
    unused = over_group._own[0]  # kept, since the others may still be connecting to it
    assert unused.timed
    over_group._own[0] = _Connections(dist.group.WORLD, timed=False)
    shared = {name: call(over_group) for name, (call, _) in CALLS.items()}
    metered = GroupComm(timeout=10)
    return own, shared, figures(metered)


# Of two, an all-gather takes another way than of three.
@pytest.mark.parametrize("size", [2, 3])
def test_processes_return_what_the_calls_promise_and_count_as_threads_do(size: int) -> None:
    for rank, (own, shared, counted) in enumerate(run_processes(size, results_of_calls)):
        expected = {name: value(rank, size) for name, (_, value) in CALLS.items()}
        assert own == expected
        assert shared == expected
        assert counted == figures(CountingComm(rank, size))


class Noted:
    """A group that notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def send(self, xs: list[torch.Tensor], peer: int, tag: int) -> object:
        self.calls.append(("send", peer, xs[0].numel()))
        return object()

    def recv(self, xs: list[torch.Tensor], peer: int, tag: int) -> object:
        self.calls.append(("receive", peer, xs[0].numel()))
        return object()


def test_a_rank_is_ready_to_receive_before_it_sends() -> None:
    # Word of it would wait behind the data otherwise, and the directions of a link would take turns.
    noted = Noted()
    parts, into = torch.zeros(6).split([1, 2, 0, 3]), torch.zeros(8).split([4, 2, 1, 1])
    assert len(_Connections(cast(Any, noted), timed=True).exchange(parts, into, 1, tag=7)) == 5
    assert noted.calls == [("receive", 0, 4), ("receive", 3, 1), ("receive", 2, 1), ("send", 3, 3), ("send", 0, 1)]


def apart() -> dict[str, Any]:
    """Four processes in two groups of two, in three ways."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = halves[rank % 2]
    comm = comm_for(mine, timeout=10)
    total = comm.all_reduce_(torch.tensor([float(rank)])).wait()
    around = comm.send_recv(torch.tensor([float(rank)]), [1 - comm.rank], [1 - comm.rank]).wait()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    lines = [comm_for(mesh[name], timeout=10) for name in ("replicate", "shard")]
    with pytest.raises(ConfigError, match=r"the mesh has shape \(2, 2\): .* as in mesh\['replicate'\]"):
        thinwire.attach(model := nn.Linear(2, 2), torch.optim.SGD(model.parameters(), lr=0.1), AllReduce(), group=mesh)
    found = {
        "place": (comm.rank, comm.size),
        "total": float(total),
        "around": float(around[0]),
        "from the first": float(comm.broadcast_(torch.tensor([float(rank)]), 0).wait()),
        "lines": [[int(x) for x in line.all_gather(torch.tensor([rank])).wait()] for line in lines],
        "group": flat(steps(attach(None, AllReduce(), group=mine), batches(rank, 3)).model).tolist(),
        "mesh": flat(steps(attach(None, AllReduce(), group=mesh["replicate"]), batches(rank, 3)).model).tolist(),
        "sharded": refusal_of_sharded_gradients(mesh),
    }
    dist.barrier()  # rank 0 hosts the store
    return found


def refusal_of_sharded_gradients(mesh: Any) -> str:
    from torch.distributed.tensor import Shard, distribute_tensor

    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh["shard"], [Shard(0)]))
    with pytest.raises(ConfigError) as refused:
        thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), AllReduce(), group=mesh["replicate"])
    return str(refused.value)


def test_groups_within_the_job_train_by_themselves() -> None:
    found = run_processes(4, apart)
    for rank, mine in enumerate(found):
        mate = (rank + 2) % 4
        assert mine["place"] == (rank // 2, 2)
        assert mine["total"] == rank + mate
        assert mine["around"] == mate
        assert mine["from the first"] == rank % 2
        assert mine["lines"] == [[rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]]
        assert mine["group"] == found[mate]["group"] == mine["mesh"]
        assert mine["group"] != found[(rank + 1) % 4]["group"]
        assert "gradients of sharded parameters are the sharder's to average" in mine["sharded"]


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(ThinwireError) as found:
        call()
    return f"{type(found.value).__name__}: {found.value}"


def errors_of_a_part(folder: str) -> dict[str, str]:
    """What two of four processes are told, of which the second does something else than the first."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, odd = groups[rank % 2], rank > 1
    found = {"apart": refused(lambda: attach(None, AllReduce(), group=mine, seed=int(odd)))}
    worker = attach(None, AllReduce(), group=mine)
    # A file where the folder of the checkpoint would be.
    Path(folder, f"{rank}").mkdir()
    if odd:
        Path(folder, f"{rank}", "step-00000000").touch()
    found["save"] = refused(lambda: worker.save(f"{folder}/{rank}"))
    steps(worker, batches(rank, 1))
    worker.comm.step += odd
    found["out of step"] = refused(lambda: worker.save(f"{folder}/other"))
    worker = attach(None, AllReduce(), group=mine)
    data = [(x * (float("nan") if odd else 1.0), y) for x, y in batches(rank, 1)]
    found["gradient"] = refused(lambda: steps(worker, data))
    worker = attach(None, LocalSGD(2), group=mine)
    found["alone"] = refused(lambda: steps(worker, data if odd else batches(rank, 2)))
    dist.barrier()
    return found


def test_errors_name_ranks_of_a_part_of_the_job_by_their_number_in_the_job_too(tmp_path: Path) -> None:
    found = run_processes(4, errors_of_a_part, str(tmp_path))
    for rank, errors in enumerate(found):
        first, second = ("rank 0", "rank 1 (rank 2 of the whole job)")
        if rank % 2:
            first, second = ("rank 0 (rank 1 of the whole job)", "rank 1 (rank 3 of the whole job)")
        assert errors["apart"].startswith(
            f"MismatchError: {first} and {second} were started differently: the seed is 0"
        )
        assert errors["save"].startswith(f"CheckpointError: {second}: ")
        calls = f"{first} is in save() at step 1, {second} is in save() at step 2"
        assert errors["out of step"].startswith(f"MismatchError: ranks are out of step: {calls}")
        for where in ("gradient", "alone"):
            assert f"the gradient of 0.weight on {second} is NaN or infinite" in errors[where]


def attached_outside() -> list[str]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = dist.new_group([0, 1]), dist.device_mesh.DeviceMesh("cpu", [0, 1])

    def refusal(group: Any) -> str:
        return refused(lambda: thinwire.attach(model, optimizer, AllReduce(), group=group))

    found = [refusal(group) for group in parts] if dist.get_rank() == 2 else []
    dist.barrier()
    return found


def test_a_rank_outside_the_group_is_told_so() -> None:
    for text in run_processes(3, attached_outside)[2]:
        assert text == (
            "ConfigError: group: rank 2 of the job is not in the group. Call attach on the group's ranks only"
        )


def unsupported_call() -> list[str]:
    """A dtype that Gloo does not support is torch's own error, and the group stays open."""
    comm = GroupComm(timeout=10)
    found = list[str]()
    try:
        comm.all_reduce_(torch.ones(2, dtype=torch.int16)).wait()
    except RuntimeError as error:
        found.append(str(error).splitlines()[0])
    found.append(str(float(comm.all_reduce_(torch.ones(1)).wait())))
    return found


def test_a_dtype_that_gloo_does_not_support_closes_nothing() -> None:
    for found in run_processes(2, unsupported_call):
        assert "Invalid scalar type" in found[0]
        assert found[1] == "2.0"


def test_one_process_alone_needs_no_group() -> None:
    comm = comm_for()
    assert (comm.rank, comm.size) == (0, 1)


_DIFFERENT: dict[str, tuple[Callable[[GroupComm], Any], Callable[[GroupComm], Any]]] = {
    "all_reduce of 10 x float32": (
        lambda comm: comm.all_reduce_(torch.ones(10)),
        lambda comm: comm.all_reduce_(torch.ones(12)),
    ),
    "all_gather of 10 x float32": (
        lambda comm: comm.all_gather(torch.ones(10)),
        lambda comm: comm.all_gather(torch.ones(10, dtype=torch.float64)),
    ),
    "broadcast of 10 x float32": (
        lambda comm: comm.broadcast_(torch.ones(10), 0),
        lambda comm: comm.broadcast_(torch.ones(12), 0),
    ),
    "all_reduce": (lambda comm: comm.all_reduce_(torch.ones(10)), lambda comm: comm.all_gather(torch.ones(10))),
}


def call_differently() -> list[str]:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    found: list[str] = []
    for usual, odd in _DIFFERENT.values():
        comm = GroupComm(timeout=20)
        call = odd if comm.rank == 1 else usual
        found.append(refused(lambda call=call, comm=comm: call(comm).wait()))
    return found


def test_a_rank_that_calls_another_collective_is_named_on_all_ranks_in_debug_mode() -> None:
    for found in run_processes(3, call_differently):
        for text, usual in zip(found, _DIFFERENT, strict=True):
            assert text.startswith("MismatchError: ")
            if usual == "all_reduce":
                assert "ranks 0, 2 are in all_reduce at step 0, rank 1 is in all_gather at step 0" in text
            else:
                assert "ranks make different calls at step 0: rank 1 makes another collective" in text
                assert usual in text or "12 x float32" in text or "10 x float64" in text


def gather_another_size_in_a_round() -> str:
    comm = GroupComm(timeout=20)
    comm.round = "an average in training"
    return refused(lambda: comm.all_gather(torch.ones(12 if comm.rank == 1 else 10)).wait())


def test_the_check_of_a_round_names_the_rank_that_sends_another_size() -> None:
    for text in run_processes(3, gather_another_size_in_a_round):
        assert "ranks make different calls at step 0: rank 1 makes another collective" in text
