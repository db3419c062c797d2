# SPDX-License-Identifier: Apache-2.0
"""Each worker's time is divided by its causes, and the worker that costs the others time is named."""

from __future__ import annotations

import json
import logging
import sys
import time
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import thinwire
from tests.rules import for_each
from tests.worker.slowed import LONG, PERIOD, USUAL, Slowed, train
from thinwire import Comm, run_threads
from thinwire.lab.emulate import Network, available, parse_links, run_workers
from thinwire.worker.times import Report, find_slow_worker, split


def slowed(comm: Comm, rank: int, cause: str, strategy: thinwire.Strategy) -> thinwire.Worker:
    model = Slowed(LONG if (comm.rank, cause) == (rank, "compute") else USUAL)
    return thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=1e-3), strategy, comm=comm)


STRATEGIES = [
    thinwire.LocalSGD(period=PERIOD),
    thinwire.DiLoCo(period=PERIOD),
    thinwire.Paced(thinwire.LocalSGD(period=PERIOD), steps=(PERIOD,)),
    thinwire.SlowMo(thinwire.Local(), period=PERIOD),
]
CASES = [
    (rank, cause, strategy)
    for place, strategy in enumerate(STRATEGIES)
    for cause in ("data", "compute")
    for rank in ((place % 3,) if place else (0, 1, 2))
]


@pytest.mark.parametrize(("rank", "cause", "strategy"), CASES, ids=repr)
def test_a_planted_slow_worker_is_named_within_two_rounds(rank: int, cause: str, strategy: thinwire.Strategy) -> None:
    def work(comm: Comm) -> tuple[thinwire.Stats, thinwire.Stats]:
        worker = slowed(comm, rank, cause, strategy)
        data = LONG if (comm.rank, cause) == (rank, "data") else USUAL
        train(worker, data, until=PERIOD)
        first = worker.stats()
        train(worker, data, until=2 * PERIOD)
        return first, worker.stats()

    for first, second in run_threads(3, work):
        for found in (first.slow_worker, second.slow_worker):
            assert found is not None
            assert (found.rank, found.cause) == (rank, cause)
            assert 0.1 < found.cost < 1
        times = second.workers[rank]
        longest = times.data_seconds if cause == "data" else times.compute_seconds
        assert longest > PERIOD * LONG
        others = [second.workers[other] for other in range(3) if other != rank]
        assert all(each.waiting_seconds > times.waiting_seconds == 0.0 for each in others)


def test_equal_workers_are_not_named_and_evaluation_is_no_time_for_data(caplog: pytest.LogCaptureFixture) -> None:
    def work(comm: Comm) -> thinwire.Stats:
        worker = slowed(comm, 0, "none", thinwire.LocalSGD(period=PERIOD))
        train(worker, USUAL, until=PERIOD)
        with worker.consensus() as model:
            if comm.rank == 0:
                model.eval()
                with torch.no_grad():
                    model(torch.ones(1, 4))
                time.sleep(10 * LONG)
                model.train()
        train(worker, USUAL, until=2 * PERIOD)
        return worker.stats()

    with caplog.at_level(logging.WARNING, "thinwire"):
        found = run_threads(3, work)
    assert all(each.data_seconds < 8 * LONG for each in found)
    assert found[0].workers == found[1].workers
    assert "costs the other workers" not in caplog.text


def test_a_slow_worker_is_logged_once_by_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    def work(comm: Comm) -> None:
        worker = slowed(comm, 2, "compute", thinwire.LocalSGD(period=PERIOD))
        train(worker, 0.0, until=8 * PERIOD)

    with caplog.at_level(logging.WARNING, "thinwire"):
        run_threads(3, work)
    lines = [line for line in caplog.messages if "costs the other workers" in line]
    assert len(lines) == 1
    assert "rank 2 costs the other workers" in lines[0] and lines[0].endswith("its computation takes longer")


def test_gradient_accumulation_and_loops_without_a_forward_pass_count_as_computation() -> None:
    model = Slowed(USUAL)
    worker = thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "AllReduce()")
    for _ in range(3):
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
        worker.optimizer.step()
    found = worker.stats()
    assert found.compute_seconds >= 6 * USUAL
    assert found.data_seconds < found.compute_seconds
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    time.sleep(LONG)
    worker.optimizer.step()
    assert worker.stats().compute_seconds >= found.compute_seconds + LONG
    assert worker.stats().data_seconds == found.data_seconds


# -- the figures -------------------------------------------------------------------------------------------------------

seconds = st.floats(0, 1e5)
hashes = st.integers(0, 2**31 - 1)


@given(st.builds(Report, seconds, seconds, seconds, seconds, hashes, hashes))
def test_a_report_is_packed_to_a_thousandth(report: Report) -> None:
    packed = report.pack()
    back = Report.unpack(packed)
    assert all(0 <= each < 2**63 for each in packed)
    assert (back.address, back.peer) == (report.address, report.peer)
    for name in ("data", "compute", "blocked", "sending"):
        assert getattr(back, name) == pytest.approx(getattr(report, name), rel=1e-3, abs=1e-6)


@given(st.lists(st.builds(Report, seconds, seconds, seconds, seconds), min_size=1, max_size=6))
def test_every_set_of_reports_has_a_finding_in_bounds(reports: list[Report]) -> None:
    found = find_slow_worker(reports)
    assert found is None or (0.1 < found.cost <= 1 and 0 <= found.rank < len(reports))
    assert all(each.waiting_seconds >= 0 for each in split(reports))
    late = find_slow_worker(reports, may_be_late=True)
    assert late is None or (0.1 < late.cost <= 1 and 0 <= late.rank < len(reports))


def test_a_late_worker_costs_the_others_at_most_their_waits() -> None:
    slow = Report(0.1, 5.0, 0.0)
    assert find_slow_worker([Report(0.1, 1.0, 0.01), slow, Report(0.1, 1.0, 0.02)], may_be_late=True) is None
    found = find_slow_worker([Report(0.1, 1.0, 1.1), slow, Report(0.1, 1.0, 1.0)], may_be_late=True)
    assert found is not None and (found.rank, found.cause) == (1, "compute")
    assert found.cost == pytest.approx(1.0 / 2.1, rel=1e-2)
    # A slow upload blocks its own worker too.
    link = [Report(0.1, 1.0, 1.1, 0.1), Report(0.1, 1.0, 1.1, 1.0), Report(0.1, 1.0, 1.1, 0.1)]
    found = find_slow_worker(link, may_be_late=True)
    assert found is not None and (found.rank, found.cause) == (1, "link")


def ring(slow: int, size: int, *, out: float, into: float) -> list[Report]:
    """A ring of workers, one of which has a slow link out, in, or both."""
    sending = [out if rank == slow else into if (rank + 1) % size == slow else 0.05 for rank in range(size)]
    return [Report(0.0, 1.0, 2.0, sending[rank], 1 + rank, 1 + (rank + 1) % size) for rank in range(size)]


@for_each(product([3, 4, 8], [0.05, 1.9]))
def test_a_slow_link_is_told_from_its_neighbors(case: tuple[int, float]) -> None:
    size, into = case
    for slow in range(size):
        found = find_slow_worker(ring(slow, size, out=1.9, into=into))
        assert found is not None
        assert (found.rank, found.cause) == (slow, "link")


def test_a_slow_link_to_which_all_others_send_most_is_named() -> None:
    reports = [
        Report(0.0, 0.07, 0.5, sending, own, to) for sending, own, to in ((0.59, 1, 3), (0.13, 2, 3), (0.65, 3, 2))
    ]
    found = find_slow_worker(reports)
    assert found is not None
    assert (found.rank, found.cause) == (2, "link")


def test_equally_slow_links_and_hidden_communication_name_nobody() -> None:
    assert find_slow_worker([Report(0.0, 1.0, 2.0, 1.9, 1 + r, 1 + (r + 1) % 4) for r in range(4)]) is None
    assert find_slow_worker([Report(0.0, 1.0, 0.01, 1.9 * (r == 1), 1 + r, 0) for r in range(4)]) is None


# -- links -------------------------------------------------------------------------------------------------------------


def named(workers: int, link: str, cause: str, rank: int) -> dict[str, Any]:
    lines: list[str] = []
    command = [sys.executable, "-m", "tests.worker.slowed", cause, str(rank)]
    with Network(parse_links(link, workers)) as network:
        run_workers(command, workers, network=network, on_line=lambda *each: lines.append(each[2]), timeout=300)
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(found) == workers, lines
    assert all(each == found[0] for each in found)
    return found[0]


needs_network = pytest.mark.skipif(available() is not None, reason=f"no emulated links: {available()}")
PLANTED = [
    *((4, f"1gbit,{rank}:40mbit", "link", rank) for rank in range(4)),
    *((3, f"200mbit,{rank}:20mbit", "link", rank) for rank in range(3)),
    (4, "1gbit,2:80mbit", "link", 2),
    *((4, "500mbit", "data", rank) for rank in range(4)),
    *((3, "200mbit", "data", rank) for rank in range(2)),
    *((4, "500mbit", "compute", rank) for rank in range(4)),
    *((3, "200mbit", "compute", rank) for rank in range(2)),
]


@pytest.mark.slow
@pytest.mark.timeout(320)
@needs_network
@pytest.mark.parametrize(("workers", "link", "cause", "rank"), PLANTED)
def test_twenty_planted_workers_are_named_in_processes(workers: int, link: str, cause: str, rank: int) -> None:
    assert named(workers, link, cause, rank) == {"rank": rank, "cause": cause}


@needs_network
@pytest.mark.slow
@pytest.mark.timeout(320)
def test_equal_processes_are_not_named() -> None:
    assert named(3, "200mbit", "none", 0) == {}
