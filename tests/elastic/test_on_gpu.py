# SPDX-License-Identifier: Apache-2.0
"""Elastic workers with models on a GPU: the same events give the same models as on the CPU.

The GPU is a pretended one where there is none; tests/gpu has processes that share a real one.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore

import thinwire
from tests.elastic.fleets import End, Kill, run_fleet, survivors
from tests.elastic.processes import Processes
from tests.elastic.test_elastic import agree
from tests.elastic.test_kills import finished
from tests.faults import kills
from tests.grids import fast_where
from tests.pool import run_processes
from tests.pretend_gpu import REAL, Pretended, host_waits, pretend_gpu
from thinwire import Comm, GroupComm, Worker
from thinwire.core.comm.group import _Launcher
from thinwire.core.comm.view_group import ViewComm
from thinwire.elastic.notice import Notice
from thinwire.elastic.rounds import Elastic

ON_GPU = "cuda:0"
RECIPES = [
    "AllReduce()",
    "LocalSGD(period=3)",
    "DiLoCo(period=3)",
    "OverlapLocalSGD(period=3)",
    "Paced(LocalSGD(period=3), steps=(3, 1, 2))",
    "SlowMo(period=3)",
    "DiLoCo(period=6, fragments=2, delay=1)",
    "Offloaded(DiLoCo(period=3))",
    "NoLoCo(period=3)",
    "PushSum(staleness=1)",
    "AllReduce(codec=ErrorFeedback(OneBit(8)))",
    "AllReduce(codec=PowerSGD(2))",
]
# Their survivors continue at the step of the one that is furthest, which depends on the time of the loss.
TIMED = ("NoLoCo(period=3)", "PushSum(staleness=1)")
EVENTS: dict[str, dict[str, Any]] = {
    "kill": {"kills": (Kill(1, 4, 1),)},
    "kill after a message": {"kills": (Kill(0, 5, 0, after=True),)},
    "join": {"joins": (3,)},
    # Not while the state is sent, which the loss may end or not.
    "kill and join": {"kills": (Kill(2, 4, 1),), "joins": (9,)},
}


def arrive(worker: Worker) -> None:
    """Wait until an early part of a state has arrived, so that its worker joins after the same step in every run."""
    arrivals = worker.elastic._arrivals
    if arrivals is not None and arrivals._sends:
        arrivals._wants_late.wait(10)


def run(recipe: str, device: str, **events: Any) -> list[End]:
    return run_fleet(3, thinwire.parse(recipe), device=device, steps=24, before=arrive, **events)


def check_equal(found: list[End], expected: list[End]) -> None:
    """Bitwise on a pretended GPU; a real one adds in another order."""
    assert [each.epochs for each in found] == [each.epochs for each in expected]
    for a, b in zip(survivors(found), survivors(expected), strict=True):
        assert a.x is not None and b.x is not None and a.agreed is not None and b.agreed is not None
        assert a.trace.keys() == b.trace.keys()
        pairs = [(a.x, b.x), (a.agreed, b.agreed), *((a.trace[step], b.trace[step]) for step in a.trace)]
        assert all(torch.allclose(*pair, atol=1e-4) if REAL else torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize(
    ("recipe", "event"),
    fast_where(
        lambda each: RECIPES.index(each[0]) < 5 and list(EVENTS).index(each[1]) == RECIPES.index(each[0]) % 4,
        [(recipe, event) for recipe in RECIPES for event in EVENTS],
    ),
)
def test_workers_are_lost_and_join_as_on_the_cpu(recipe: str, event: str) -> None:
    with pretend_gpu():
        found = run(recipe, ON_GPU, **EVENTS[event])
    if recipe not in TIMED or not EVENTS[event].get("kills"):
        check_equal(found, run(recipe, "cpu", **EVENTS[event]))
    agree(survivors(found))


@pytest.mark.parametrize(
    ("kind", "recipe"),
    fast_where(
        lambda each: each[0] == "AdamW", product(("AdamW", "SGD", "Lamb"), ("AllReduce()", "LocalSGD(period=3)"))
    ),
)
def test_a_joining_worker_gets_the_optimizer_s_state_on_its_gpu(kind: str, recipe: str) -> None:
    """Whether the others wait for the copy or train meanwhile."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        more = {"momentum": 0.9} if kind == "SGD" else {}
        return getattr(thinwire if kind == "Lamb" else torch.optim, kind)(model.parameters(), lr=0.01, **more)

    places: dict[str, set[str]] = {}

    def look(worker: Worker) -> None:
        for p, state in worker.optimizer.state.items():
            tensors = {name: x for name, x in state.items() if isinstance(x, Tensor) and x.shape == p.shape}
            assert tensors
            places.setdefault(worker.elastic.worker_id, set()).update(str(x.device) for x in tensors.values())

    with pretend_gpu():
        strategy = thinwire.parse(recipe)
        ends = run_fleet(
            2, strategy, device=ON_GPU, joins=(3,), steps=15, optimizer=optimizer, before=arrive, after=look
        )
    agree(survivors(ends))
    assert places == {f"w{i}": {ON_GPU} for i in range(3)}


def test_a_worker_leaves_with_notice_and_a_checkpoint_loads_on_the_other_device(tmp_path: Path) -> None:
    def run(size: int, device: str, folder: Path, steps: int) -> list[End]:
        notices: dict[int, Notice] = {}

        def before(worker: Worker) -> None:
            if id(worker) not in notices:
                notices[id(worker)] = Notice(worker, every=2, signals=())
                worker.load(folder, missing_ok=True)

        def after(worker: Worker) -> None:
            notice = notices[id(worker)]
            if worker.step == 4 and worker.elastic.worker_id == "w2":
                notice.received = "SIGTERM"
            if notice.leave():
                raise LeftError
            if worker.step == 8:
                worker.save(folder)

        with pretend_gpu():
            recipe = thinwire.parse("DiLoCo(period=2)")
            return run_fleet(size, recipe, device=device, steps=steps, before=before, after=after)

    first = {device: run(3, device, tmp_path / device, 8) for device in ("cpu", ON_GPU)}
    assert all(isinstance(ends[2].error, LeftError) for ends in first.values())
    check_equal(first[ON_GPU][:2], first["cpu"][:2])
    later = [run(2, device, tmp_path / other, 12) for device, other in (("cpu", ON_GPU), (ON_GPU, "cpu"))]
    assert all(end.steps == 4 for ends in later for end in ends)
    check_equal(*later)


class LeftError(Exception):
    """Ends the loop of a worker that has left."""


@pytest.mark.parametrize("recipe", fast_where(lambda each: "Local" in each, ["LocalSGD(period=4)", "AllReduce()"]))
def test_of_two_processes_one_is_killed_and_the_other_continues(recipe: str) -> None:
    processes = Processes(recipe, 2, steps=12, seconds=0.01, device=ON_GPU)
    processes.until(0, 5)
    processes.kill(0)
    finished(processes.finish()[1:], 1)


# -- memory ------------------------------------------------------------------------------------------------------------


def bytes_on_gpu() -> int:
    """Of the pretended GPU's tensors that are alive, each memory once."""
    memories = {
        x.held.untyped_storage().data_ptr(): x.held.untyped_storage().nbytes()
        for x in gc.get_objects()
        if isinstance(x, Pretended)
    }
    return sum(memories.values())


@pytest.mark.skipif(REAL, reason="counts the pretended GPU's tensors")
@pytest.mark.parametrize("recipe", ["DiLoCo(period=2)", "AllReduce(codec=ErrorFeedback(OneBit(8)))"])
def test_what_a_round_keeps_to_be_repeated_is_not_on_the_gpu(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    round_ = Elastic.round

    def watched(self: Elastic, body: Callable[[], Any], **how: Any) -> Any:
        gc.collect()
        before = bytes_on_gpu()

        def measured() -> Any:
            seen.append((before, bytes_on_gpu()))
            return body()

        return round_(self, measured, **how)

    monkeypatch.setattr(Elastic, "round", watched)
    with pretend_gpu():
        survivors(run_fleet(1, thinwire.parse(recipe), device=ON_GPU, steps=4))
    assert seen and all(before == within for before, within in seen), seen


# -- messages ----------------------------------------------------------------------------------------------------------


def in_view(size: int, work: Callable[[ViewComm], Any]) -> list[Any]:
    """Call `work` on threads that are connected with Gloo as the workers of a view."""
    store, body = HashStore(), threading.local()

    def run(rank: int) -> Any:
        body.comm = ViewComm(store, rank, size, timeout=20, lost=lambda: False)
        try:
            return work(body.comm)
        finally:
            body.comm.disconnect()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def calls(comm: Comm, device: str) -> list[Tensor]:
    """The results of every call, of tensors that are no multiples of anything, a view and an integer among them."""

    def x(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return (torch.arange(n) * (comm.rank + 1)).to(dtype).to(device)

    strided = x(20)[::2]
    found = [
        comm.all_reduce_(x(37)).wait(),
        comm.all_reduce_(x(5, torch.int64), op="min").wait(),
        comm.broadcast_(x(300_000), 1).wait(),
        comm.broadcast_(strided, 0).wait(),
        *comm.all_gather(x(7, torch.bfloat16)).wait(),
        *comm.all_gather(strided).wait(),
        *comm.all_to_all([x(3 + j) for j in range(comm.size)], [3 + comm.rank] * comm.size).wait(),
        *comm.send_recv(x(9), [(comm.rank + 1) % comm.size], [(comm.rank - 1) % comm.size]).wait(),
    ]
    reduced = x(11)
    work = comm.all_reduce_(reduced)
    assert torch.equal(reduced.cpu(), x(11).cpu()), "an abandoned call must not write to the caller's memory"
    work.wait()
    assert {str(each.device) for each in found} == {device}
    comm.check_in_step("a check").wait()
    return [each.cpu() for each in (*found, reduced, strided)]


@pytest.mark.parametrize("size", [2, 3])
def test_messages_from_a_gpu_go_through_the_host_s_memory(size: int) -> None:
    expected = in_view(size, lambda comm: calls(comm, "cpu"))
    with pretend_gpu():
        found = in_view(size, lambda comm: calls(comm, ON_GPU))
    for mine, theirs in zip(found, expected, strict=True):
        assert len(mine) == len(theirs)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def in_group() -> list[Any]:
    with pretend_gpu():
        return [x.tolist() for x in calls(GroupComm(timeout=20), ON_GPU)]


def test_messages_over_the_gloo_of_a_group_go_through_the_host_s_memory_too() -> None:
    expected = in_view(2, lambda comm: calls(comm, "cpu"))
    for mine, theirs in zip(run_processes(2, in_group), expected, strict=True):
        assert mine == [x.tolist() for x in theirs]


@pytest.mark.parametrize("size", [2, 3])
def test_only_the_thread_that_launches_messages_waits_for_their_copies_to_the_host(size: int) -> None:
    def work(comm: ViewComm) -> list[str]:
        waits: list[str] = []
        x = torch.arange(37.0).to(ON_GPU)
        with host_waits(waits):
            reduced = comm.all_reduce_(x)
            gathered = comm.all_gather(torch.ones(5, device=ON_GPU))
            checked = comm.check_in_step("a check")
            swapped = comm.all_to_all([x[:3]] * size, [3] * size)
            for each in (reduced, gathered, checked, swapped, comm.broadcast_(x, 1)):
                each.wait()
        return waits

    with pretend_gpu():
        assert in_view(size, work) == [[]] * size


def test_a_failed_launch_holds_no_connection() -> None:
    """Connections close with their last reference, so that the waits of all other workers fail at once."""
    held: list[weakref.ref[Any]] = []
    launcher = _Launcher(lambda run: threading.Thread(target=run, daemon=True).start())

    def launch() -> None:
        connection = threading.Event()
        held.append(weakref.ref(connection))
        raise RuntimeError("Connection closed by peer")

    begun = launcher.launch(lambda: None, launch, 10.0)
    assert begun() == "Connection closed by peer"
    assert held[0]() is None
    launcher.end()


# -- chance ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", fast_where(lambda seed: seed in (2, 3), range(60)))
def test_random_kills_and_joins_leave_one_model(seed: int) -> None:
    with pretend_gpu():
        kills.run(seed, ON_GPU)
