# SPDX-License-Identifier: Apache-2.0
"""Ranks that get out of step are told so on all ranks, and nothing of one call is taken for another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engine import attach, batches, drawn, endings, flat, steps
from tests.pool import run_processes
from thinwire import (
    AllReduce,
    Comm,
    CountingComm,
    LocalSGD,
    MismatchError,
    OverlapLocalSGD,
    PushSum,
    SlowMo,
    Strategy,
    Streaming,
    run_threads,
)

AVERAGING = [LocalSGD(period=4), OverlapLocalSGD(period=4), SlowMo(period=4), Streaming(fragments=2)]


def alone_in_consensus(strategy: Strategy, **settings: Any) -> Callable[[Comm | None], None]:
    """Rank 0 evaluates after step 9, the others do not."""

    def train(comm: Comm | None) -> None:
        worker = attach(comm, strategy, **settings)
        for step, data in enumerate(batches(worker.rank, 60)):
            if step == 9 and worker.rank == 0:
                with worker.consensus():
                    pass
            steps(worker, [data])
        with worker.consensus():
            pass

    return train


@pytest.mark.parametrize("strategy", AVERAGING, ids=str)
def test_a_rank_alone_in_consensus_is_named_on_all_ranks(strategy: Strategy) -> None:
    found = endings(3, alone_in_consensus(strategy))
    assert len(set(found)) == 1
    assert found[0].startswith("MismatchError: ranks are out of step: rank 0 ")


@pytest.mark.parametrize("strategy", [*AVERAGING, PushSum(), AllReduce()], ids=str)
def test_a_rank_that_skips_a_step_is_named_on_all_ranks(strategy: Strategy) -> None:
    def train(comm: Comm) -> None:
        worker = attach(comm, strategy)
        for step, data in enumerate(batches(comm.rank, 10)):
            if comm.rank == 1 and step == 3:
                continue
            steps(worker, [data])
        with worker.consensus():
            pass

    found = endings(2, train, timeout=1)
    assert all(found)
    if strategy in AVERAGING[:1]:
        where = "rank 0 is in consensus() at step 10, rank 1 is in consensus() at step 9"
        assert found == [f"MismatchError: ranks are out of step: {where}; {RULE}"] * 2


RULE = "all ranks must make the same calls after the same steps"


def test_calls_that_need_all_ranks_meet_each_other(tmp_path: Path) -> None:
    def train(comm: Comm) -> None:
        worker = attach(comm, LocalSGD(period=4))
        steps(worker, batches(comm.rank, 2))
        if comm.rank == 0:
            worker.save(tmp_path)
        elif comm.rank == 1:
            list(worker.join([]))
        else:
            worker.load(tmp_path)

    found = endings(3, train)
    where = "rank 0 is in save() at step 2, rank 1 is in join() at step 2, rank 2 is in load() at step 2"
    assert found == [f"MismatchError: ranks are out of step: {where}; {RULE}"] * 3


def test_a_rank_that_detaches_alone_is_named() -> None:
    def train(comm: Comm) -> None:
        worker = attach(comm, LocalSGD(period=4))
        steps(worker, batches(comm.rank, 2))
        if comm.rank == 1:
            worker.detach()
        steps(worker, batches(comm.rank, 2))

    where = "ranks 0, 2 are in a check of the data at step 2, rank 1 is in detach() at step 2"
    assert endings(3, train) == [f"MismatchError: ranks are out of step: {where}; {RULE}"] * 3


def test_a_rank_that_detaches_because_of_an_error_waits_for_nobody() -> None:
    def train(comm: Comm) -> None:
        worker = attach(comm, LocalSGD(period=4))
        try:
            steps(worker, batches(comm.rank, 2))
            if comm.rank == 1:
                raise ValueError("of its own")
            steps(worker, batches(comm.rank, 2))
        finally:
            worker.detach()

    with pytest.raises(ValueError, match="of its own"):
        run_threads(3, train, timeout=5)


def test_states_of_different_steps_are_found_at_the_next_average() -> None:
    def train(comm: Comm) -> None:
        worker = attach(comm, LocalSGD(period=2))
        steps(worker, batches(comm.rank, 2))
        kept = worker.state_dict(model=True, optimizer=True)
        steps(worker, batches(comm.rank, 2))
        if comm.rank == 0:
            worker.load_state_dict(kept)
        steps(worker, batches(comm.rank, 4))

    found = endings(2, train)
    where = "rank 0 is in an average in training at step 3, rank 1 is in an average in training at step 5"
    assert found == [f"MismatchError: ranks are out of step: {where}; {RULE}"] * 2


def moved(x: Tensor) -> None:
    x[0] += 1e-3


def swapped(x: Tensor) -> None:
    x[:2] = x[:2].flip(0)


@pytest.mark.parametrize("change", [moved, swapped])
def test_a_rank_whose_parameters_have_changed_is_named(change: Callable[[Tensor], None]) -> None:
    def train(comm: Comm) -> None:
        worker = attach(comm, AllReduce())
        steps(worker, batches(comm.rank, 2))
        if comm.rank == 2:
            with torch.no_grad():
                change(next(worker.model.parameters()).view(-1))
        with worker.consensus():
            pass

    found = endings(4, train)
    assert len(set(found)) == 1
    assert found[0].startswith("MismatchError: step 2: the parameters of rank 2 differ from those of the others")


def test_parameters_that_differ_by_rounding_become_equal_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def train(comm: Comm) -> tuple[Tensor, Tensor]:
        worker = attach(comm, AllReduce())
        steps(worker, batches(comm.rank, 2))
        with torch.no_grad():
            before = flat(worker.model).clone()
            if comm.rank == 2:
                for parameter in worker.model.parameters():
                    parameter.copy_(torch.nextafter(parameter, torch.tensor(9.0)))
        with worker.consensus():
            pass
        steps(worker, batches(comm.rank, 2, first=2))
        return before, flat(worker.model)

    found = run_threads(4, train)
    alone = run_threads(4, lambda comm: flat(steps(attach(comm, AllReduce()), batches(comm.rank, 4)).model))
    assert all(torch.equal(after, alone[0]) for _, after in found)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "step 2: the parameters of rank 2 differ from those of the others by rounding"
    )


@pytest.mark.parametrize(("digits", "error"), [(1, ""), (4, "MismatchError")])
def test_in_sixteen_bits_one_digit_of_each_parameter_may_differ(digits: int, error: str) -> None:
    """Beside parameters in 32 bits, which have a vector of their own."""

    def train(comm: Comm) -> None:
        model = drawn(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2).bfloat16()))
        worker = attach(comm, AllReduce(), model=model)
        sum(p.double().sum() for p in model.parameters()).backward()
        worker.optimizer.step()  # before the first step, weights that one rank alone changes are refused
        with torch.no_grad():
            for parameter in model[1].parameters() if comm.rank == 1 else ():
                for _ in range(digits):
                    parameter.copy_(torch.nextafter(parameter, 9 * parameter.sign()))
        with worker.consensus():
            pass
        assert len(worker.replicas) == 2
        parameters = torch.cat([replica.x.double() for replica in worker.replicas])
        assert all(torch.equal(theirs, parameters) for theirs in comm.all_gather(parameters).wait())

    assert {text.partition(":")[0] for text in endings(3, train)} == {error}


def test_a_check_is_counted_apart_alike_on_threads_and_on_the_counter() -> None:
    def train(comm: Comm) -> tuple[float, float]:
        worker = steps(attach(comm, LocalSGD(period=2)), batches(comm.rank, 4))
        before, checks = comm.meter.payload_bytes, comm.meter.check_bytes
        steps(worker, batches(comm.rank, 4))
        return comm.meter.payload_bytes - before, comm.meter.check_bytes - checks

    parameters = sum(p.numel() for p in attach(None, LocalSGD()).model.parameters())
    expected = 2 * 2 * 2 / 3 * 4 * parameters, 2 * 2 * 56.0
    assert run_threads(3, train) == [pytest.approx(expected)] * 3
    assert train(CountingComm(0, 3)) == pytest.approx(expected)


def in_processes() -> list[str]:
    """Rank 0 evaluates alone: where averages are collective, and where only messages to neighbours are sent."""
    found: list[str] = []
    for strategy, timeout in ((LocalSGD(period=4), 30.0), (PushSum(), 1.0)):
        try:
            alone_in_consensus(strategy, timeout=timeout)(None)
        except MismatchError as error:
            found.append(str(error))
        dist.barrier()
    return found


def test_processes_that_are_out_of_step_are_told_so_without_a_hang() -> None:
    for found in run_processes(2, in_processes):
        for text, place in zip(found, ("an average in training", "send_recv with ranks "), strict=True):
            assert "rank 0 is in consensus() at step 9, rank 1 is in " + place in text
