# SPDX-License-Identifier: Apache-2.0
"""The calls of a comm over threads, and on the comm that only counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.comm.calls import CALLS, SIZES, figures
from tests.rules import for_each, refusals
from thinwire import (
    Comm,
    CommTimeoutError,
    CountingComm,
    MismatchError,
    PeerLostError,
    ThinwireError,
    ThreadComm,
    run_threads,
)
from thinwire.core.comm.work import Meter, Work, completed

# -- values ------------------------------------------------------------------------------------------------------------


@for_each(product(CALLS, SIZES))
def test_threads_return_what_the_call_promises(case: tuple[str, int]) -> None:
    (call, expected), size = CALLS[case[0]], case[1]
    found = run_threads(size, lambda comm: call(comm), timeout=10)
    assert found == [expected(rank, size) for rank in range(size)]


def test_sums_are_added_in_the_order_of_ranks_whichever_is_first() -> None:
    parts = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8]), torch.tensor([1e-3])]

    def work(comm: Comm, delays: list[float]) -> float:
        time.sleep(delays[comm.rank])
        return float(comm.all_reduce_(parts[comm.rank].clone()).wait())

    expected = float(parts[0] + parts[1] + parts[2] + parts[3])
    for delays in ([0, 0.01, 0.02, 0.03], [0.03, 0.02, 0.01, 0]):
        assert run_threads(4, lambda comm, d=delays: work(comm, d)) == [expected] * 4


def test_what_a_rank_receives_is_its_own_to_change() -> None:
    def work(comm: Comm) -> list[float]:
        rows = comm.all_gather(torch.full((2,), float(comm.rank))).wait()
        for row in rows:
            row.add_(10 * (comm.rank + 1))
        total = comm.all_reduce_(torch.ones(1)).wait()
        total.add_(comm.rank)
        comm.all_gather(torch.zeros(1)).wait()
        return [float(row[0]) for row in rows] + [float(total)]

    assert run_threads(3, work) == [[10 * (r + 1) + i for i in range(3)] + [3 + r] for r in range(3)]


def test_messages_wait_for_each_other_and_keep_their_order() -> None:
    def work(comm: Comm) -> list[float]:
        other = 1 - comm.rank
        in_flight = [comm.send_recv(torch.tensor([float(10 * comm.rank + i)]), [other], [other]) for i in range(4)]
        total = comm.all_reduce_(torch.ones(1))
        return [float(work.wait()[0]) for work in in_flight] + [float(total.wait())]

    assert run_threads(2, work) == [[10, 11, 12, 13, 2], [0, 1, 2, 3, 2]]


def test_a_message_can_be_waited_for_twice_and_used_once() -> None:
    used: list[int] = []
    work = Work(lambda: used.append(1) or 5).then(lambda x: x + 1)
    assert used == []
    assert work.wait() == work.wait() == 6
    assert used == [1]
    assert completed("here").wait() == "here"


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def outcomes(size: int, work: Callable[[Comm], Any], **settings: Any) -> list[Exception | None]:
    """How each thread ended."""
    ends: list[Exception | None] = [None] * size

    def recorded(comm: Comm) -> None:
        try:
            work(comm)
        except Exception as error:
            ends[comm.rank] = error
            raise

    with pytest.raises(Exception):  # noqa: B017
        run_threads(size, recorded, **settings)
    return ends


def test_different_calls_are_named_on_both_sides() -> None:
    def work(comm: Comm) -> None:
        x = torch.zeros(3)
        (comm.all_reduce_(x) if comm.rank == 0 else comm.broadcast_(x, 0)).wait()

    with pytest.raises(MismatchError, match=r"call 0 is (all_reduce|broadcast) of 3 x float32.* on rank \d and "):
        run_threads(2, work)
    assert [type(end) for end in outcomes(2, work)] == [MismatchError, MismatchError]


@for_each(product(("all_reduce_", "broadcast_", "all_gather"), (torch.zeros(4), torch.zeros(3, dtype=torch.float64))))
def test_different_vectors_are_named(case: tuple[str, Tensor]) -> None:
    name, other = case

    def work(comm: Comm) -> None:
        x = other.clone() if comm.rank else torch.zeros(3)
        getattr(comm, name)(x, *[0] * (name == "broadcast_")).wait()

    with pytest.raises(MismatchError, match=r"3 x float32"):
        run_threads(2, work)


def test_messages_that_do_not_fit_are_named() -> None:
    def work(comm: Comm) -> None:
        other = 1 - comm.rank
        comm.send_recv(torch.zeros(3 + comm.rank), [other], [other]).wait()

    with pytest.raises(MismatchError, match=r"rank \d sent \d x float32, rank \d expects \d x float32"):
        run_threads(2, work)


def test_scattered_sizes_that_do_not_fit_are_named() -> None:
    def work(comm: Comm) -> None:
        comm.all_to_all([torch.zeros(2), torch.zeros(2)], [2, 3] if comm.rank else [2, 2]).wait()

    with pytest.raises(MismatchError, match=r"rank 1 sends 2 x float32 to rank 1, which expects 3"):
        run_threads(2, work)


@pytest.mark.parametrize("call", ["all_reduce", "send_recv"])
def test_a_thread_that_fails_ends_the_others_with_its_name_and_the_step(call: str) -> None:
    def work(comm: Comm) -> None:
        comm.step = 7
        if comm.rank == 1:
            raise ZeroDivisionError("on purpose")
        if call == "all_reduce":
            comm.all_reduce_(torch.zeros(1)).wait()
        else:
            comm.send_recv(torch.zeros(1), [1], [1]).wait()

    ends = outcomes(3, work, timeout=30)
    assert isinstance(ends[1], ZeroDivisionError)
    for rank in (0, 2):
        assert isinstance(ends[rank], PeerLostError)
        assert str(ends[rank]) == "rank 1 was lost at step 7 (ZeroDivisionError: on purpose)"


def test_the_first_failure_is_the_one_that_is_raised() -> None:
    def work(comm: Comm) -> None:
        if comm.rank == 2:
            raise KeyError("first")
        comm.all_reduce_(torch.zeros(1)).wait()

    with pytest.raises(KeyError, match="first"):
        run_threads(3, work, timeout=30)


@pytest.mark.parametrize("call", ["all_reduce", "send_recv"])
def test_a_wait_times_out_with_rank_step_and_reason(call: str) -> None:
    def work(comm: Comm) -> None:
        comm.step = 3
        if comm.rank == 1:
            return
        if call == "all_reduce":
            comm.all_reduce_(torch.zeros(2)).wait()
        else:
            comm.send_recv(torch.zeros(2), [1], [1]).wait()

    reason = "all ranks to join the all_reduce of 2 x float32" if call == "all_reduce" else "a message from rank 1"
    with pytest.raises(CommTimeoutError, match=rf"rank 0 waited 0\.2 s for {reason} at step 3"):
        run_threads(2, work, timeout=0.2)


@pytest.mark.parametrize("late", range(3))
def test_where_all_wait_for_each_other_every_rank_is_named_with_its_step_whoever_times_out_first(late: int) -> None:
    ends: dict[int, BaseException] = {}

    def work(comm: Comm) -> None:
        assert isinstance(comm, ThreadComm)
        # Rank 0 has left out a step: it gathers where rank 1 expects a message, for which rank 2 waits in the gather.
        comm.step = 4 if comm.rank == 0 else 5
        comm.timeout = 0.3 if comm.rank == late else 20.0
        while comm.rank == late and len(comm._hub.waiting) < 2:
            time.sleep(0.01)
        try:
            if comm.rank == 1:
                comm.send_recv(torch.zeros(2), [], [0]).wait()
            comm.all_gather(torch.zeros(2)).wait()
        except ThinwireError as error:
            ends[comm.rank] = error
            raise

    with pytest.raises(MismatchError):
        run_threads(3, work)
    gather = "all ranks to join the all_gather of 2 x float32"
    for error in ends.values():
        assert isinstance(error, MismatchError)
        assert str(error) == (
            f"ranks are out of step: rank 0 waits for {gather} at step 4, rank 1 waits for a message from rank 0 at "
            f"step 5, rank 2 waits for {gather} at step 5; all ranks must make the same calls after the same steps (no "
            "answer within 0.3 s)"
        )


@pytest.mark.parametrize("call", ["all_reduce", "send_recv", "mailbox"])
def test_a_timeout_names_the_rank_that_does_not_answer_and_none_that_waits_itself(call: str) -> None:
    ended, words = [threading.Event() for _ in range(3)], ["", "", ""]

    def work(comm: Comm) -> None:
        box = comm.open_mailbox(comm, torch.zeros(2)) if call == "mailbox" else None
        if comm.rank == 0:
            assert all(event.wait(20) for event in ended[1:])
            return
        # Rank 1 waits for rank 0, and rank 2 for rank 1.
        try:
            if call == "all_reduce":
                comm.all_reduce_(torch.zeros(2)).wait()
            elif box is None:
                comm.send_recv(torch.zeros(2), [], [comm.rank - 1]).wait()
            else:
                box.expect(comm.rank - 1, torch.zeros(2)).wait()
        except CommTimeoutError as error:
            words[comm.rank] = str(error)
        ended[comm.rank].set()

    run_threads(3, work, timeout=0.2)
    assert words[1].endswith(
        "; rank 0 is not answering" if call == "all_reduce" else " a message from rank 0 at step 0"
    )
    assert words[2].endswith("; rank 0 is not answering")


test_calls_that_cannot_work_are_refused = refusals(
    [
        (lambda: CountingComm(4, 4), r"rank=4: must lie in 0\.\.3 for 4 workers"),
        (lambda: CountingComm(-1, 4), r"rank=-1"),
        (lambda: CountingComm(0, 1, timeout=0), r"timeout=0: must be positive"),
        (lambda: CountingComm(0, 2).all_to_all([torch.zeros(1)], [1]), r"all_to_all got 1 vectors and 1 sizes"),
        (lambda: CountingComm(0, 2).send_recv(torch.zeros(1), [0], [1]), r"rank 0 sends to itself in send_recv"),
        (lambda: CountingComm(1, 2).send_recv(torch.zeros(1), [0], [1]), r"rank 1 sends to itself in send_recv"),
    ]
)


# -- bytes and seconds -------------------------------------------------------------------------------------------------


@for_each([2, 3, 5])
def test_bytes_are_those_of_the_formulas_and_counting_and_threads_count_alike(n: int) -> None:
    expected = {
        "all_reduce": 2 * (n - 1) / n * 40 + 2 * (n - 1) / n * 20,
        "broadcast": (n - 1) / n * 40,
        "all_gather": (n - 1) * 12.0,
        "all_to_all": 4.0 * sum(j + 1 for j in range(n) if j != n - 1),
        "send_recv": 24.0,
    }
    counted = [figures(CountingComm(rank, n)) for rank in range(n)]
    assert counted[-1] == pytest.approx(expected)
    assert run_threads(n, figures) == counted


def test_counting_works_on_a_billion_elements_that_do_not_exist() -> None:
    comm = CountingComm(1, 4)
    x = torch.empty(1_000_000_000, device="meta")
    comm.all_reduce_(x).wait()
    comm.broadcast_(x, 0).wait()
    assert [row.shape for row in comm.all_gather(x).wait()] == [x.shape] * 4
    assert [part.numel() for part in comm.all_to_all(list(x.split(250_000_000)), [5, 6, 7, 8]).wait()] == [5, 6, 7, 8]
    assert [y.device.type for y in comm.send_recv(x, [0, 2], [3]).wait()] == ["meta"]
    assert comm.meter.by_operation == {
        "all_reduce": 6e9,
        "broadcast": 3e9,
        "all_gather": 12e9,
        "all_to_all": 3e9,
        "send_recv": 8e9,
    }
    assert comm.meter.payload_bytes == 32e9
    assert comm.meter.messages == 5


def test_counting_assumes_that_every_rank_holds_the_same() -> None:
    comm = CountingComm(0, 3)
    x = torch.tensor([1.0, 2.0])
    assert comm.all_reduce_(x).wait().tolist() == [3, 6]
    assert [row.tolist() for row in comm.all_gather(x).wait()] == [[3, 6]] * 3
    assert [y.tolist() for y in comm.send_recv(x, [1], [1, 2]).wait()] == [[3, 6]] * 2


def test_one_worker_alone_sends_nothing_and_waits_for_nothing() -> None:
    def work(comm: Comm) -> tuple[list[float], Meter]:
        x = torch.tensor([4.0])
        received = [
            comm.all_reduce_(x).wait(),
            comm.broadcast_(x, 0).wait(),
            *comm.all_gather(x).wait(),
            *comm.all_to_all([x], [1]).wait(),
            *comm.send_recv(x, [], []).wait(),
        ]
        return [float(y) for y in received], comm.meter

    ((values, meter),) = run_threads(1, work)
    assert values == [4.0] * 4
    assert meter == Meter()


def test_waiting_is_timed_and_traced_by_operation_and_step() -> None:
    def work(comm: Comm) -> Meter:
        comm.meter.tracing, comm.step = True, 5
        if comm.rank == 1:
            time.sleep(0.05)
        comm.all_reduce_(torch.zeros(1)).wait()
        return comm.meter

    waiting, late = run_threads(2, work)
    assert waiting.exposed_seconds > 0.02
    assert late.exposed_seconds < waiting.exposed_seconds
    assert [(i.kind, i.name, i.step) for i in waiting.intervals] == [
        ("communication", "all_reduce", 5),
        ("wait", "all_reduce", 5),
    ]
    assert all(i.start <= i.end for i in waiting.intervals)
