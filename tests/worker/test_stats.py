# SPDX-License-Identifier: Apache-2.0
"""What a worker says that it has sent and waited for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.engine import attach, batches, net, steps
from tests.rules import for_each
from thinwire import AllReduce, Comm, DiLoCo, Gossip, LocalSGD, SlowMo, Stats, Strategy, run_threads
from thinwire.integrations.session import figures_of

VECTOR = 4.0 * sum(p.numel() for p in net().parameters())  # what an all-reduce of two ranks sends


@for_each(
    [
        (AllReduce(), 8, 8 * VECTOR),
        (LocalSGD(3), 2, 2 * VECTOR),
        (DiLoCo(period=4, delay=2), 2, 2 * VECTOR),
        (Gossip(), 8, 8 * VECTOR),
        (SlowMo(Gossip(), period=4), 8, 10 * VECTOR),
    ]
)
def test_steps_averages_and_bytes_are_counted_and_not_cleared(case: tuple[Strategy, int, float]) -> None:
    strategy, averages, sent = case

    def work(comm: Comm) -> Stats:
        worker = attach(comm, strategy)
        assert worker.stats() == Stats(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
        steps(worker, batches(comm.rank, 8))
        found = worker.stats()
        assert worker.stats() == found
        assert found.wait_seconds > 0
        return found

    for found in run_threads(2, work):
        assert (found.steps, found.averages, found.payload_bytes, found.evaluation_bytes) == (8, averages, sent, 0.0)


def test_evaluation_and_checkpoints_are_counted_apart(tmp_path: Path) -> None:
    def work(comm: Comm) -> list[Stats]:
        worker, found = steps(attach(comm, LocalSGD(4)), batches(comm.rank, 3)), list[Stats]()
        for call in (worker.stats, lambda: worker.save(tmp_path), lambda: worker.load(tmp_path)):
            call()
            found.append(worker.stats())
        with worker.consensus():
            found.append(worker.stats())
        worker.export(tmp_path / "model.safetensors")
        found.append(worker.stats())
        steps(worker, batches(comm.rank, 1))
        with worker.consensus():
            pass
        return [*found, worker.stats()]

    for trained, *later, last in run_threads(2, work):
        evaluated = 0.0
        for found in later:
            assert found.evaluation_bytes > evaluated
            evaluated = found.evaluation_bytes
            assert found.evaluation_wait_seconds > 0
            assert found.check_bytes > 0
            apart = ("evaluation_bytes", "evaluation_wait_seconds", "check_bytes")
            assert replace(trained, **{name: getattr(found, name) for name in apart}) == found
        assert later[2].evaluation_bytes - later[1].evaluation_bytes == VECTOR
        assert (last.steps, last.averages, last.payload_bytes) == (4, 1, VECTOR)
        assert last.evaluation_bytes == evaluated  # it has just averaged


def test_a_worker_alone_sends_nothing() -> None:
    found = steps(attach(None, AllReduce()), batches(0, 3)).stats()
    assert (found.steps, found.averages, found.payload_bytes) == (3, 0, 0.0)


def test_logs_have_the_bytes_of_evaluation_in_a_row_of_their_own() -> None:
    def work(comm: Comm) -> dict[str, float]:
        worker = attach(comm, LocalSGD(2))
        read = figures_of(worker)
        steps(worker, batches(comm.rank, 5))
        with worker.consensus():
            pass
        return read()

    for figures in run_threads(2, work):
        assert figures["thinwire/bytes"] == 2 * VECTOR
        assert figures["thinwire/bytes_per_step"] == 2 * VECTOR / 5
        assert figures["thinwire/evaluation_bytes"] == VECTOR
