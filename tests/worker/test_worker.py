# SPDX-License-Identifier: Apache-2.0
"""What users see of a worker: its members, its repr, and the end of a `with` block."""

from __future__ import annotations

import time

import pytest

import thinwire
from tests.engine import attach, batches, steps
from thinwire import AllReduce, Comm, ConfigError, LocalSGD, PeerLostError

MEMBERS = {
    *("model", "optimizer", "strategy", "comm", "replicas", "rank", "size", "step", "view", "elastic"),
    *("record_batch", "sampler", "join", "no_sync", "switch", "metrics", "stats", "consensus", "detach"),
    *("save", "load", "export", "state_dict", "load_state_dict"),
}


def test_a_worker_has_only_what_users_need() -> None:
    worker = attach(None, LocalSGD(4))
    assert {name for name in dir(worker) if not name.startswith("_")} == MEMBERS
    assert len(MEMBERS) <= 24


def test_a_worker_shows_its_strategy_and_where_it_is() -> None:
    def work(comm: Comm) -> list[str]:
        worker = steps(attach(comm, LocalSGD(4)), batches(comm.rank, 3))
        shown = [repr(worker)]
        worker.detach()
        return [*shown, repr(worker)]

    running = "<Worker rank 1 of 2, step 3, LocalSGD(period=4)"
    assert thinwire.run_threads(2, work)[1] == [f"{running}>", f"{running}, detached>"]


def test_a_with_block_detaches_and_a_second_detach_does_nothing() -> None:
    def work(comm: Comm) -> bool:
        with attach(comm, LocalSGD(2)) as worker:
            steps(worker, batches(comm.rank, 3))
            worker.detach()
        steps(worker, batches(comm.rank, 2))
        return worker.step == 3

    assert all(thinwire.run_threads(2, work))


@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(2)], ids=str)
def test_an_exception_in_a_with_block_ends_all_ranks_without_a_timeout(strategy: thinwire.Strategy) -> None:
    others: list[BaseException] = []
    hooks: list[int] = []

    def work(comm: Comm) -> None:
        try:
            with attach(comm, strategy) as worker:
                hook = worker.optimizer
                steps(worker, batches(comm.rank, 2))
                if comm.rank == 1:
                    raise ConfigError("the data are damaged")
                steps(worker, batches(comm.rank, 4))
        except PeerLostError as error:
            others.append(error)
            raise
        finally:
            hooks.append(len(hook._optimizer_step_pre_hooks))  # pyright: ignore[reportPrivateUsage]

    start = time.monotonic()
    with pytest.raises(ConfigError, match="the data are damaged"):
        thinwire.run_threads(2, work, timeout=20)
    assert time.monotonic() - start < 15
    assert len(others) == 1 and hooks == [0, 0]


def test_a_view_is_of_elastic_workers() -> None:
    worker = attach(None, LocalSGD(4))
    assert worker.elastic is None
    with pytest.raises(ConfigError, match="only workers of attach"):
        _ = worker.view


def test_a_batch_may_have_no_samples_and_not_less() -> None:
    worker = attach(None, LocalSGD(4))
    worker.record_batch(0)
    assert worker.replicas[0].samples == 0
    for number in (-1, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match=f"num_samples={number}: must be finite and not negative"):
            worker.record_batch(number)
