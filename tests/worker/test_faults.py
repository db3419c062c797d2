# SPDX-License-Identifier: Apache-2.0
"""Workers that are killed, stopped or lost: the others end in time, with an error that names them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock

from tests.engine import attach, batches, steps
from tests.pool import start_processes
from thinwire import (
    ADPSGD,
    AllReduce,
    AsyncLeaderSGD,
    CommError,
    EagerPushSum,
    Gossip,
    GroupComm,
    LocalSGD,
    SlowMo,
    Strategy,
)
from thinwire.core.comm import roll_call

SICK_STEP = 5
Report = tuple[str, str, str]
"""The class and the text of an error, and the text of that of a second call on the same comm."""


def reported(work: Callable[[], object], victims: Sequence[int] = ()) -> Report:
    """How a rank's work ends; with victims, every rank stays until all others have reported."""
    report = "nothing", "", ""
    try:
        work()
    except CommError as error:
        report = type(error).__name__, str(error), ""
    if victims:
        stay_for_others(victims)
    return report


def train(
    strategy: Strategy, victims: Sequence[int], sign: int, timeout: float, groups: Sequence[Sequence[int]] = ()
) -> Report:
    """Train until something happens to the victims, within a backward pass."""
    rank = dist.get_rank()
    made = {tuple(members): dist.new_group(members) for members in groups}
    group = next((made[members] for members in made if rank in members), None)
    worker = attach(None, strategy, group=group, timeout=timeout)
    steps(worker, batches(rank, SICK_STEP))
    dist.barrier()
    if rank in victims:
        weight = worker.model[2].weight
        weight.register_post_accumulate_grad_hook(lambda _: os.kill(os.getpid(), sign))
    kind, text, _ = reported(lambda: steps(worker, batches(rank, 30, first=SICK_STEP)), victims if groups else ())
    if kind == "nothing":
        return kind, f"step {worker.step}", ""
    return kind, text, reported(lambda: worker.comm.all_reduce_(torch.ones(1)).wait())[1]


def careless() -> Report:
    """Rank 1 has an error of its own."""
    worker = attach(None, AllReduce(), timeout=30.0)

    def work() -> None:
        for step, data in enumerate(batches(dist.get_rank(), 10)):
            if step == 2 and dist.get_rank() == 1:
                raise ZeroDivisionError
            steps(worker, [data])

    return reported(work)


def absent() -> Report:
    """Rank 1 never attaches."""
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(60)
    return reported(lambda: GroupComm(timeout=1.5))


def late() -> Report:
    """Rank 1 makes the second call after the others have timed out."""
    comm = GroupComm(timeout=1.0)
    comm.all_reduce_(torch.ones(1)).wait()
    comm.step = 9
    if comm.rank == 1:
        time.sleep(1.8)
    return reported(lambda: comm.all_reduce_(torch.ones(1)).wait())


def around() -> Report:
    """Several messages fly around a ring when rank 2 is killed; rank 0 is not its neighbour."""
    comm = GroupComm(timeout=30.0)
    ends = [(comm.rank - 1) % 4, (comm.rank + 1) % 4]
    dist.barrier()

    def work() -> None:
        for comm.step in range(30):
            flying = [comm.send_recv(torch.ones(1000), ends, ends) for _ in range(3)]
            if comm.rank == 2 and comm.step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            for each in flying:
                each.wait()

    return reported(work)


def exchange(strategy: Strategy, victims: Sequence[int]) -> Report:
    """Train at each worker's own pace until the victims, which are killed, are missed."""
    rank, processes = dist.get_rank(), processes_of(victims)
    worker = attach(None, strategy, timeout=30.0)

    def work() -> None:
        for step, data in enumerate(batches(rank, 300)):
            if step == SICK_STEP and rank in victims:
                kill_all(processes)
            worker.record_batch(loss=float(rank))
            steps(worker, [data])
        with worker.consensus():
            pass

    return reported(work, victims)


def computing(seconds: float, stays: bool) -> Report:
    """Rank 1 is killed while rank 2 computes for longer than a roll call lasts; rank 0 hosts the store."""
    roll_call._ROLL_CALL_SECONDS = seconds
    if not stays:
        roll_call._LINGER_SECONDS = seconds
    comm = GroupComm(timeout=30.0)
    comm.all_reduce_(torch.ones(1)).wait()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 2:
        time.sleep(2)
    return reported(lambda: comm.all_reduce_(torch.ones(1)).wait(), [1] if stays else ())


def attaching(victims: Sequence[int]) -> Report:
    """The victims are killed while they attach, before their second message; the others miss both at once."""
    processes = processes_of(victims)
    gathered = GroupComm._gather_rows

    def gather(comm: GroupComm, row: bytes) -> list[bytes]:
        rows = gathered(comm, row)
        if dist.get_rank() in victims:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_until_ended(processes)
        return rows

    GroupComm._gather_rows = gather  # type: ignore[method-assign]
    return reported(lambda: attach(None, AllReduce(), timeout=30.0))


def stay_for_others(victims: Sequence[int]) -> None:
    """Rank 0 hosts the store that failed ranks query about each other; it must outlive them."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    store.set(f"reported/{rank}", "1")
    if rank == 0:
        others = [f"reported/{other}" for other in range(dist.get_world_size()) if other not in victims]
        store.wait(others, timedelta(seconds=30))


def processes_of(ranks: Sequence[int]) -> list[int]:
    """The ids of other ranks' processes, this one's last if it is among them."""
    store, own = dist.distributed_c10d._get_default_store(), dist.get_rank()  # pyright: ignore[reportPrivateUsage]
    store.set(f"process/{own}", str(os.getpid()))
    return [int(store.get(f"process/{rank}")) for rank in sorted(ranks, key=lambda rank: rank == own)]


def kill_all(processes: Sequence[int]) -> None:
    """The first victim that comes here takes all with it: else one is missed before the other is lost."""
    for process in processes:
        os.kill(process, signal.SIGKILL)


def wait_until_ended(processes: Sequence[int]) -> None:
    """Until the processes are gone, or wait for their parent to ask how they ended."""
    for process in processes:
        stat = Path(f"/proc/{process}/stat")
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
            time.sleep(0.005)


@dataclass(frozen=True)
class Scenario:
    """What happens to which ranks."""

    size: int
    victims: Sequence[int]
    work: Callable[..., Report]
    arguments: tuple[Any, ...] = ()


def fault(strategy: Strategy, victims: Sequence[int], sign: int, timeout: float, *groups: Any) -> Scenario:
    return Scenario(4, victims, train, (strategy, victims, sign, timeout, *groups))


KILLED = {
    "any rank": (fault(AllReduce(), [1], signal.SIGKILL, 30.0), "rank 1 is lost"),
    "the first rank": (fault(AllReduce(), [0], signal.SIGKILL, 30.0), "rank 0 is lost"),
    "a neighbour": (fault(SlowMo(Gossip(), period=4), [2], signal.SIGKILL, 30.0), "rank 2 is lost"),
    "two ranks": (fault(LocalSGD(4), [1, 2], signal.SIGKILL, 30.0), "rank 1, rank 2 are lost"),
}
# Their messages go over mailboxes.
ASYNCHRONOUS = {
    "ADPSGD": (Scenario(4, [2], exchange, (ADPSGD(), [2])), "rank 2 is lost"),
    "AsyncLeaderSGD": (Scenario(4, [1], exchange, (AsyncLeaderSGD(period=2), [1])), "rank 1 is lost"),
    "EagerPushSum": (Scenario(4, [3], exchange, (EagerPushSum(), [3])), "rank 3 is lost"),
    "two of AsyncLeaderSGD": (
        Scenario(4, [1, 3], exchange, (AsyncLeaderSGD(period=2), [1, 3])),
        "rank 1, rank 3 are lost",
    ),
}
STOPPED = {
    f"{name} {victim}": (fault(strategy, [victim], signal.SIGSTOP, 1.5), victim)
    for name, strategy in {"all_reduce": AllReduce(), "send_recv": Gossip(order="after")}.items()
    for victim in (1, 0)
}
SCENARIOS = {
    **{name: scenario for name, (scenario, _) in KILLED.items()},
    "one group of two": fault(AllReduce(), [3], signal.SIGKILL, 30.0, [[0, 2], [1, 3]]),
    "careless": Scenario(3, [1], careless),
    "around": Scenario(4, [2], around),
    **{name: scenario for name, (scenario, _) in STOPPED.items()},
    **{name: scenario for name, (scenario, _) in ASYNCHRONOUS.items()},
    "busy": Scenario(3, [1], computing, (0.6, True)),
    "slow": Scenario(3, [1], computing, (0.2, False)),
    "absent": Scenario(3, [1], absent),
    "attaching": Scenario(4, [0, 2], attaching, ([0, 2],)),
    "late": Scenario(3, [], late),
}


@pytest.fixture(scope="session")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, Report]]:
    """The errors of the survivors of every scenario. Most of the time is waiting, so several run at once.

    Where tests run side by side, the first of their processes runs them for all.
    """
    base, names = tmp_path_factory.getbasetemp(), list(SCENARIOS)
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "survivors.json"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            path.write_text(json.dumps({**survivors(names[:7]), **survivors(names[7:])}))
    found = json.loads(path.read_text())
    return {name: {int(rank): tuple(report) for rank, report in each.items()} for name, each in found.items()}


def survivors(names: Sequence[str]) -> dict[str, dict[int, Report]]:
    running = {name: start_processes(s.size, s.work, *s.arguments) for name, s in ((n, SCENARIOS[n]) for n in names)}
    others = {name: [w for w in workers if w.rank not in SCENARIOS[name].victims] for name, workers in running.items()}
    deadline = time.monotonic() + 60
    try:
        for worker in (worker for workers in others.values() for worker in workers):
            worker.finish(deadline)
    finally:
        for worker in (worker for workers in running.values() for worker in workers):
            worker.process.kill()
            worker.process.join()
    return {name: {w.rank: w.result or ("failed", str(w.error), "") for w in ws} for name, ws in others.items()}


@pytest.mark.parametrize("name", list(KILLED))
def test_a_killed_rank_ends_all_others_and_is_named(name: str, failures: dict[str, dict[int, Report]]) -> None:
    for rank, (kind, text, again) in failures[name].items():
        assert kind == "PeerLostError"
        assert text.startswith(f"rank {rank}, step ")
        assert KILLED[name][1] in text
        assert SICK_STEP <= int(text.split("step ")[1].split(",")[0]) <= SICK_STEP + 3
        assert again.startswith("the connections are closed after an earlier failure: ")


@pytest.mark.parametrize("name", list(ASYNCHRONOUS))
def test_the_ranks_that_were_killed_are_named_by_all_that_exchange_messages(
    name: str, failures: dict[str, dict[int, Report]]
) -> None:
    for rank, (kind, text, *_) in failures[name].items():
        assert kind == "PeerLostError"
        assert text.startswith(f"rank {rank}, step ")
        assert ASYNCHRONOUS[name][1] in text


@pytest.mark.parametrize("name", ["busy", "slow"])
def test_neither_a_rank_that_computes_nor_the_store_s_host_is_blamed_for_one_that_is_killed(
    name: str, failures: dict[str, dict[int, Report]]
) -> None:
    for rank, (kind, text, *_) in failures[name].items():
        assert kind == "PeerLostError"
        assert text.startswith(f"rank {rank}, step 0, all_reduce: rank 1 is lost (")


@pytest.mark.parametrize("name", list(STOPPED))
def test_a_stopped_rank_ends_all_others_at_the_timeout_and_is_named(
    name: str, failures: dict[str, dict[int, Report]]
) -> None:
    for rank, (kind, text, _) in failures[name].items():
        assert kind == "CommTimeoutError"
        assert text.startswith(f"rank {rank}, step ")
        assert f"no answer within 1.5 s; rank {STOPPED[name][1]} is not answering" in text


def test_a_lost_rank_ends_its_own_group_only_and_is_named_by_both_its_ranks(
    failures: dict[str, dict[int, Report]],
) -> None:
    reports = failures["one group of two"]
    assert reports[1][0] == "PeerLostError"
    assert (
        "rank 0 (rank 1 of the whole job), step 5, all_reduce: rank 1 (rank 3 of the whole job) is lost"
        in reports[1][1]
    )
    assert reports[0][:2] == reports[2][:2] == ("nothing", "step 35")


def test_a_rank_that_ends_with_an_error_of_its_own_ends_the_others(failures: dict[str, dict[int, Report]]) -> None:
    for kind, text, *_ in failures["careless"].values():
        assert kind == "PeerLostError"
        assert "step 2, all_reduce: rank 1 is lost" in text


def test_a_failure_reaches_ranks_that_are_not_neighbours_despite_messages_in_flight(
    failures: dict[str, dict[int, Report]],
) -> None:
    for kind, text, _ in failures["around"].values():
        assert kind == "PeerLostError"
        assert "rank 2 is lost" in text


def test_ranks_that_are_lost_during_attach_are_all_named_the_store_s_host_among_them(
    failures: dict[str, dict[int, Report]],
) -> None:
    for rank, (kind, text, _) in failures["attaching"].items():
        assert kind == "PeerLostError"
        assert text.startswith(f"rank {rank}, step 0, ")
        # Without the store nobody can say whether rank 2 ended before or because of rank 0.
        assert ": rank 0 is lost; rank 2 ended too (" in text


def test_a_rank_that_never_attaches_is_named(failures: dict[str, dict[int, Report]]) -> None:
    for kind, text, *_ in failures["absent"].values():
        assert kind == "CommTimeoutError"
        assert "connecting: no answer within 1.5 s; rank 1 is not answering" in text


def test_a_rank_that_is_too_late_fails_once_the_others_have_timed_out(failures: dict[str, dict[int, Report]]) -> None:
    for kind, text, _ in failures["late"].values():
        assert kind == "CommTimeoutError"
        assert "step 9, all_reduce: no answer within 1 s" in text
