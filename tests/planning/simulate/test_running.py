# SPDX-License-Identifier: Apache-2.0
"""Virtual time, deaths, pauses and deadlocks of simulated workers."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.rules import refusals
from thinwire import CommError, CommTimeoutError, MismatchError, NonFiniteError, PeerLostError
from thinwire.planning import simulate
from thinwire.planning.simulate import DeadlockError, Death, Duration, Network, SimulatedComm, Special
from thinwire.planning.simulate.record import NETWORK
from thinwire.worker.worker import internals_of


def sums(comm: SimulatedComm, steps: int = 10, seconds: float = 1.0) -> float:
    """Steps of a second, with an all-reduce after each; the time at the end."""
    for step in range(steps):
        comm.step = step
        comm.compute(seconds)
        comm.all_reduce_(torch.ones(2)).wait()
    return comm.now


def failures(size: int, network: Network, work: Any = sums, **settings: Any) -> dict[int, str]:
    ended = simulate.simulate(size, work, network=network, **settings)
    return {rank: f"{type(error).__name__}: {error}" for rank, error in ended.failures.items()}


def test_hours_of_virtual_time_pass_at_once() -> None:
    start = time.monotonic()
    assert simulate.run(2, lambda comm: sums(comm, seconds=3600.0))[0] > 36_000
    assert time.monotonic() - start < 30


def test_no_thread_is_left_over() -> None:
    before = set(threading.enumerate())
    simulate.run(3, sums)
    with pytest.raises(DeadlockError):
        simulate.run(3, lambda comm: comm.rank or comm.send_recv(torch.ones(1), [], [1]).wait())
    failures(3, Network(deaths=(Death(1, at=2.5),)))
    end = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < end:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before


def test_a_deadlock_is_found_at_once_and_says_who_waits_for_whom() -> None:
    def work(comm: SimulatedComm) -> None:
        comm.send_recv(torch.ones(2), [], [(comm.rank + 1) % comm.size]).wait()

    with pytest.raises(DeadlockError) as found:
        simulate.run(3, work)
    for rank in range(3):
        assert f"rank {rank}, step 0, send_recv with ranks {(rank + 1) % 3}, waits for rank {(rank + 1) % 3}" in str(
            found.value
        )


def test_a_deadlock_of_mailboxes_names_the_ranks_too() -> None:
    def work(comm: SimulatedComm) -> None:
        box = comm.open_mailbox(comm, torch.zeros(2))
        box.expect(1 - comm.rank, torch.zeros(2)).wait()

    with pytest.raises(DeadlockError, match=r"rank 0, step 0, waits for a message from rank 1; rank 1, .* from rank 0"):
        simulate.run(2, work)


def test_who_waits_for_a_worker_that_has_ended_is_told() -> None:
    with pytest.raises(DeadlockError, match=r"all_reduce of 2 x float32, waits for rank 0 \(which has ended\)"):
        simulate.run(2, lambda comm: comm.rank and comm.all_reduce_(torch.ones(2)).wait())


def test_a_death_is_named_on_all_ranks_at_the_step_where_it_is_found() -> None:
    found = failures(3, Network(deaths=(Death(1, at=2.5),)))
    assert set(found) == {0, 2}
    for rank, words in found.items():
        expected = f"PeerLostError: rank {rank}, step 2, all_reduce of 2 x float32: rank 1 is lost (died at 2.5 s)"
        assert words == expected


def test_a_worker_dies_in_a_step() -> None:
    found = failures(3, Network(deaths=(Death(2, step=4),)))
    assert all("step 4" in words and "rank 2 is lost" in words for words in found.values())
    assert set(found) == {0, 1}


def test_after_a_silent_death_all_ranks_name_it_when_their_time_is_up() -> None:
    ended = simulate.simulate(3, sums, network=Network(deaths=(Death(1, at=2.5, silent=True),)), timeout=7.0)
    assert set(ended.failures) == {0, 2}
    for error in ended.failures.values():
        assert isinstance(error, CommTimeoutError)
        assert "no answer within 7 s; rank 1 is not answering" in str(error)
    assert ended.seconds == pytest.approx(10, abs=0.1)
    assert ended.died == {1: 2.5}


def test_a_death_that_nobody_waits_for_is_no_failure() -> None:
    network = Network(deaths=(Death(1, at=0.5),))
    ended = simulate.simulate(3, lambda comm: comm.compute(1.0), network=network)
    assert not ended.failures
    assert ended.died == {1: 0.5}
    # Of which `run` has no result.
    with pytest.raises(PeerLostError, match=r"rank 1 died at 0.5 s and has no result"):
        simulate.run(3, lambda comm: comm.compute(1.0), network=network)


def test_a_failure_of_the_work_is_raised_and_named_to_the_others() -> None:
    def work(comm: SimulatedComm) -> None:
        if comm.rank == 1:
            raise RuntimeError("out of memory")
        comm.all_reduce_(torch.ones(2)).wait()

    with pytest.raises(RuntimeError, match="out of memory"):
        simulate.run(3, work)
    found = failures(3, Network(), work)
    assert found[0] == (
        "PeerLostError: rank 0, step 0, all_reduce of 2 x float32: rank 1 is lost (RuntimeError: out of memory)"
    )


def test_an_error_that_one_rank_has_found_is_raised_on_all() -> None:
    def work(comm: SimulatedComm) -> str:
        comm.all_reduce_(torch.ones(1)).wait()
        try:
            if comm.rank == 1:
                comm.compute(0.1)
                comm.raise_on_all(NonFiniteError("rank 1, step 7: the loss is nan"))
            comm.all_reduce_(torch.ones(1000)).wait()
        except NonFiniteError as error:
            return str(error)
        return "none"

    assert simulate.run(3, work) == ["rank 1, step 7: the loss is nan"] * 3


def test_different_calls_are_refused() -> None:
    def work(comm: SimulatedComm) -> None:
        comm.all_reduce_(torch.ones(2 + comm.rank)).wait()

    with pytest.raises(MismatchError, match="all_reduce of 2 x float32 on rank 0 and all_reduce of 3 x float32"):
        simulate.run(2, work)


def test_what_ranks_were_started_with_is_compared() -> None:
    def work(comm: SimulatedComm) -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + (comm.rank == 2)))
        thinwire.attach(model, optimizer, "AllReduce()", comm=comm)

    with pytest.raises(MismatchError, match="ranks 0 and 2 were started differently: lr of optimizer group 0"):
        simulate.run(3, work)


def test_a_pause_comes_on_top_of_the_computation() -> None:
    network = Network(latency=0.0, bits_per_second=1e12, pauses=(simulate.Pause(1, at=2.5, seconds=7.0),))
    assert simulate.run(2, lambda comm: sums(comm, 4), network=network)[0] == pytest.approx(11.0)


def test_a_pause_holds_up_what_is_no_step_too() -> None:
    def work(comm: SimulatedComm) -> float:
        for _ in range(2):
            comm.sleep(2.0)
        return comm.now

    network = Network(pauses=(simulate.Pause(1, at=0.5, seconds=1.0), simulate.Pause(1, at=4.0, seconds=0.25)))
    assert simulate.run(2, work, network=network) == [4.0, 5.25]


def test_messages_reach_a_paused_worker_when_it_goes_on() -> None:
    def work(comm: SimulatedComm) -> float:
        box = comm.open_mailbox(comm, torch.zeros(2))
        arrived: list[float] = []
        box.on_message(1, lambda _: bool(arrived.append(comm.now)) or True, like=torch.zeros(2), src=[1 - comm.rank])
        if comm.rank == 0:
            box.send(1, torch.zeros(2), topic=1)
        comm.compute(9.0)
        return arrived[0] if arrived else -1.0

    network = Network(pauses=(simulate.Pause(1, at=0.0, seconds=5.0),))
    assert simulate.run(2, work, network=network)[1] == 5.0


def test_handlers_run_while_their_worker_computes() -> None:
    def work(comm: SimulatedComm) -> list[float]:
        box = comm.open_mailbox(comm, torch.zeros(1))
        arrived: list[float] = []
        box.on_message(1, lambda m: bool(arrived.append(comm.now)) or True, like=torch.zeros(1), src=[0])
        comm.compute(2.0)
        if comm.rank == 0:
            box.send(1, torch.zeros(1), topic=1)
        comm.compute(5.0)
        return arrived

    (arrived,) = simulate.run(2, work)[1]
    assert 2.0 < arrived < 2.01


def test_the_record_tells_who_was_waited_for() -> None:
    network = Network(specials=(Special((2,), slowdown=3.0),))
    waited = simulate.simulate(3, lambda comm: sums(comm, 5), network=network).record.waited
    assert waited[0, 2] == pytest.approx(10.0, abs=0.01)
    assert waited[1, 2] == pytest.approx(10.0, abs=0.01)
    assert (2, 0) not in waited
    assert 0 < waited[2, NETWORK] < 0.1


def test_the_meter_counts_virtual_seconds_and_real_bytes() -> None:
    def work(comm: SimulatedComm) -> tuple[float, float]:
        sums(comm, 5, seconds=1.0 + comm.rank)
        return comm.meter.exposed_seconds, comm.meter.payload_bytes

    (waiting, nbytes), (late, _) = simulate.run(2, work)
    assert waiting == pytest.approx(5.0, abs=0.01)
    assert late < 0.01
    assert nbytes == 5 * 8


def test_steps_are_written_down_with_their_times() -> None:
    ended = simulate.simulate(2, lambda comm: sums(comm, 3), compute_time=Duration("constant", 0.5))
    assert [(each.rank, each.step) for each in sorted(ended.record.steps)] == [(r, s) for r in (0, 1) for s in range(3)]
    assert all(each.end > each.start + each.computed for each in ended.record.steps)


def test_draws_of_one_worker_do_not_depend_on_the_others() -> None:
    def times(size: int) -> float:
        def work(comm: SimulatedComm) -> float:
            comm.compute()
            return comm.now

        return simulate.run(size, work, compute_time=Duration("pareto", 0.1, 2.0), seed=3)[1]

    assert times(2) == times(5)


def test_a_handler_that_waits_is_refused() -> None:
    def work(comm: SimulatedComm) -> None:
        box = comm.open_mailbox(comm, torch.zeros(1), capacity=1)

        def forward(_: Any) -> bool:
            box.expect(0, torch.zeros(1)).wait()
            return True

        box.on_message(1, forward, like=torch.zeros(1), src=[0])
        if comm.rank == 0:
            box.send(1, torch.zeros(1), topic=1)
        comm.compute(1.0)
        box.process_deferred()

    with pytest.raises(CommError, match="a handler of messages must not wait"):
        simulate.run(2, work)


test_bad_settings_are_refused = refusals(
    [
        (0, {}, "workers=0: must be 1 to"),
        (100_000, {}, "workers=100000"),
        (2, {"timeout": 0.0}, "timeout=0.0: must be positive"),
        (2, {"network": Network(deaths=(Death(2, at=1.0),))}, "there is no rank 2. With 2 workers they are 0 to 1"),
    ],
    lambda workers, settings: simulate.run(workers, lambda comm: None, **settings),
)


def test_meta_tensors_have_the_times_and_bytes_of_real_ones() -> None:
    def work(comm: SimulatedComm, device: str) -> tuple[float, float]:
        model = torch.nn.ParameterList([torch.zeros(1000, device=device)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = thinwire.attach(model, optimizer, thinwire.SlowMo(thinwire.PushSum(staleness=1), period=3), comm=comm)
        for _ in range(6):
            comm.compute(0.01 * (1 + comm.rank))
            model[0].grad = torch.zeros_like(model[0])
            optimizer.step()
        with worker.consensus():
            pass
        worker.detach()
        return comm.now, comm.meter.payload_bytes

    real = simulate.run(4, lambda comm: work(comm, "cpu"))
    assert simulate.run(4, lambda comm: work(comm, "meta")) == real


def test_a_worker_alone_needs_no_network() -> None:
    def work(comm: SimulatedComm) -> Tensor:
        box = comm.open_mailbox(comm, torch.zeros(1))
        box.close()
        return comm.all_gather(torch.ones(1)).wait()[0]

    assert simulate.run(1, work)[0].item() == 1.0


def test_peers_of_mailboxes_are_lost_after_the_time_that_zeromq_takes() -> None:
    def work(comm: SimulatedComm) -> None:
        box = comm.open_mailbox(comm, torch.zeros(1))
        box.expect((comm.rank + 1) % 3, torch.zeros(1)).wait()

    ended = simulate.simulate(3, work, network=Network(deaths=(Death(1, at=2.0),)))
    first = next(iter(ended.failures.values()))
    assert isinstance(first, PeerLostError)
    assert str(first) == "rank 0, step 0: rank 1 is lost (died at 2 s)"
    assert 3.0 <= ended.seconds < 5.0


def test_a_quorum_names_the_rank_that_did_not_come_to_the_end() -> None:
    def work(comm: SimulatedComm) -> None:
        model = torch.nn.ParameterList([torch.zeros(4)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = thinwire.attach(model, optimizer, thinwire.BackupWorkers(), comm=comm)
        while worker.step < 4:
            comm.compute(1.0)
            model[0].grad = torch.ones_like(model[0])
            if (backward := internals_of(worker).backward) is not None:
                backward.flush()
            optimizer.step()
        with worker.consensus():
            pass

    ended = simulate.simulate(4, work, network=Network(deaths=(Death(2, at=3.5, silent=True),)), timeout=9.0)
    assert set(ended.failures) == {0, 1, 3}
    for rank, error in ended.failures.items():
        assert str(error) == f"rank {rank} waited 9 s for rank 2 to end step 4 at step 4"
