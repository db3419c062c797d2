# SPDX-License-Identifier: Apache-2.0
"""Backward passes that an exception stops, and loops that catch it and go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from tests.engine import attach, batch, batches, endings, flat, one_bit_adam, steps
from tests.pool import run_processes
from tests.rules import for_each
from thinwire import (
    DQSGD,
    AllReduce,
    BackupWorkers,
    Comm,
    CommError,
    CompressedMomentum,
    CountingComm,
    ErrorFeedback,
    LocalSGD,
    MismatchError,
    OneBit,
    Strategy,
    Worker,
)
from thinwire.core.comm.work import Work
from thinwire.worker.worker import internals_of

FIRST, LAST = "0.weight", "2.bias"
COUNT = 6


class OutOfMemory(Exception):
    """What a batch may end with."""


def stop_at(worker: Worker, name: str) -> Callable[[], None]:
    """Let the next backward pass fail when this parameter's gradient is there; returns what undoes it."""

    def fail(_: Tensor) -> None:
        raise OutOfMemory

    return worker.model.get_parameter(name).register_post_accumulate_grad_hook(fail).remove


def careless(
    worker: Worker, failing: dict[int, str], *, count: int = COUNT, none: bool = True, step_anyway: bool = False
) -> Worker:
    """A loop that leaves out the batches whose backward pass fails.

    Args:
        worker: of this rank.
        failing: the parameter at which it fails, by batch.
        count: batches.
        none: whether gradients are freed before each batch.
        step_anyway: whether the optimizer's step is not left out.
    """
    for number in range(count):
        x, y = batch(worker.comm.rank, number)
        worker.optimizer.zero_grad(set_to_none=none)
        undo = stop_at(worker, failing[number]) if number in failing else None
        try:
            (worker.model(x) - y).square().mean().backward()
        except OutOfMemory:
            if not step_anyway:
                continue
        finally:
            if undo is not None:
                undo()
        worker.optimizer.step()
    return worker


def together(
    size: int, strategy: Strategy, failing: Callable[[int], dict[int, str]], **settings: Any
) -> list[tuple[Tensor, int]]:
    """The parameters and the steps of threads that leave out failing batches."""

    def work(comm: Comm) -> tuple[Tensor, int]:
        worker = careless(attach(comm, strategy, **settings), failing(comm.rank))
        return flat(worker.model), worker.step

    return thinwire.run_threads(size, work, timeout=10)


def without(strategy: Strategy, left_out: Iterable[int], size: int = 3, **settings: Any) -> list[Tensor]:
    """The parameters of threads that never see those batches."""
    numbers = [number for number in range(COUNT) if number not in left_out]

    def work(comm: Comm) -> Tensor:
        return flat(steps(attach(comm, strategy, **settings), [batch(comm.rank, n) for n in numbers]).model)

    return thinwire.run_threads(size, work, timeout=10)


STRATEGIES: list[tuple[Strategy, dict[str, Any]]] = [
    (AllReduce(), {}),
    (AllReduce(), {"find_unused": True}),
    (AllReduce(), {"bucket_bytes": 1 << 20}),
    (AllReduce(ErrorFeedback(OneBit(8))), {}),
    (BackupWorkers(backups=0), {}),
    (CompressedMomentum(OneBit(8), warmup_steps=2), {"optimizer": one_bit_adam}),
    (CompressedMomentum(OneBit(8), warmup_steps=2, overlap=True), {"optimizer": one_bit_adam}),
]


@pytest.mark.parametrize(
    ("strategy", "settings"), STRATEGIES, ids=lambda value: ",".join(value) if isinstance(value, dict) else str(value)
)
@pytest.mark.parametrize("where", [FIRST, LAST])
def test_a_batch_that_fails_on_all_ranks_is_as_if_it_had_not_been(
    strategy: Strategy, settings: dict[str, Any], where: str
) -> None:
    expected = without(strategy, {2, 4}, **settings)
    for (x, step), y in zip(together(3, strategy, lambda _: {2: where, 4: where}, **settings), expected, strict=True):
        assert step == COUNT - 2
        torch.testing.assert_close(x, y)


def test_ranks_may_fail_at_different_places_of_the_same_pass() -> None:
    expected = without(AllReduce(), {1})
    found = together(3, AllReduce(), lambda rank: {1: [FIRST, "0.bias", LAST][rank]})
    torch.testing.assert_close([x for x, _ in found], expected)


def test_a_quantizer_that_plans_by_earlier_passes_keeps_its_replicas_equal() -> None:
    found = together(3, DQSGD(block=8), lambda rank: {1: FIRST, 3: LAST})
    assert all(step == COUNT - 2 for _, step in found)
    assert all(torch.equal(x, found[0][0]) and bool(x.isfinite().all()) for x, _ in found)


@for_each(product([FIRST, LAST], [None, ErrorFeedback(OneBit(8))]))
def test_a_batch_that_fails_on_some_ranks_only_is_an_error_that_names_them_on_all(case: tuple[str, Any]) -> None:
    where, codec = case

    def work(comm: Comm) -> None:
        careless(attach(comm, AllReduce(codec)), {2: where} if comm.rank == 1 else {})

    for rank, text in enumerate(endings(3, work)):
        assert text.startswith(f"MismatchError: rank {rank}, step 2: the backward pass of rank 1 was stopped")


def evaluate(worker: Worker) -> None:
    with worker.consensus():
        pass


@for_each([evaluate, lambda worker: worker.load("nowhere"), Worker.detach])
def test_a_failed_rank_that_evaluates_or_goes_back_or_ends_next_is_named_too(act: Callable[[Worker], object]) -> None:
    def work(comm: Comm) -> None:
        act(careless(attach(comm, AllReduce()), {2: LAST} if comm.rank == 2 else {}, count=3))

    for rank, text in enumerate(endings(3, work)):
        assert f"rank {rank}, step 2: the backward pass of rank 2 was stopped" in text


def test_a_failed_rank_whose_data_end_is_named_too() -> None:
    def work(comm: Comm) -> None:
        worker = attach(comm, AllReduce())
        for number, (x, y) in enumerate(worker.join(iter([batch(comm.rank, n) for n in range(3)]))):
            worker.optimizer.zero_grad()
            undo = stop_at(worker, LAST) if comm.rank == 1 and number == 2 else lambda: None
            try:
                (worker.model(x) - y).square().mean().backward()
            except OutOfMemory:
                undo()
                continue
            worker.optimizer.step()

    for text in endings(3, work):
        assert "step 2: the backward pass of rank 1 was stopped" in text


@pytest.mark.parametrize("ranks", [[1], [0, 1, 2]], ids=["on one rank", "on all ranks"])
def test_a_step_after_a_failed_pass_is_an_error_on_all_ranks(ranks: Sequence[int]) -> None:
    def work(comm: Comm) -> None:
        careless(attach(comm, AllReduce()), {2: LAST} if comm.rank in ranks else {}, step_anyway=True)

    for rank, text in enumerate(endings(3, work)):
        assert text.startswith(f"ConfigError: rank {rank}, step 2: rank {ranks[0]} called optimizer.step() after")


def test_gradients_that_were_not_freed_after_a_failed_pass_are_refused() -> None:
    def work(comm: Comm) -> None:
        careless(attach(comm, AllReduce()), {2: FIRST}, none=False)

    for text in endings(2, work):
        assert text.startswith("ConfigError: ")
        assert "Call optimizer.zero_grad(set_to_none=True)" in text


def test_passes_that_fail_while_gradients_accumulate_locally_are_the_ranks_own_matter() -> None:
    def work(comm: Comm) -> Tensor:
        worker = attach(comm, AllReduce())
        for number in range(3):
            (x, y), optimizer = batch(comm.rank, number), worker.optimizer
            optimizer.zero_grad()
            undo = stop_at(worker, LAST) if comm.rank == number else lambda: None
            try:
                with worker.no_sync():
                    (worker.model(x) - y).square().mean().backward()
            except OutOfMemory:
                optimizer.zero_grad()
            undo()
            (worker.model(x) - y).square().mean().backward()
            optimizer.step()
        return flat(worker.model)

    found = thinwire.run_threads(3, work, timeout=10)
    assert all(torch.equal(x, found[0]) for x in found)


def test_local_methods_leave_out_a_failed_batch() -> None:
    found = together(2, LocalSGD(2), lambda _: {2: LAST})
    assert [step for _, step in found] == [COUNT - 1] * 2
    torch.testing.assert_close([x for x, _ in found], without(LocalSGD(2), {2}, size=2))


def test_a_pass_that_was_interrupted_while_it_waited_is_not_continued() -> None:
    worker = attach(comm := CountingComm(0, 2), AllReduce())
    x, y = batch(0, 0)
    launch = comm.all_reduce_

    def interrupted() -> Tensor:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "all_reduce_", lambda x: Work(interrupted))
        with pytest.raises(KeyboardInterrupt) as kept:
            (worker.model(x) - y).square().mean().backward()
        patch.setattr(comm, "all_reduce_", launch)
    for bucket in internals_of(worker).backward.buckets if internals_of(worker).backward else []:
        bucket.work = None
    with pytest.raises(CommError, match="step 0: a backward pass was interrupted while it waited"):
        (worker.model(x) - y).square().mean().backward()
    assert kept.traceback


def test_an_average_that_was_interrupted_is_not_continued(tmp_path: Path) -> None:
    worker = attach(comm := CountingComm(0, 2), LocalSGD(2))
    steps(worker, batches(0, 1))

    def interrupted(x: Tensor) -> Work[Tensor]:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "all_reduce_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            steps(worker, batches(0, 1))
    for act in (lambda: steps(worker, batches(0, 1)), lambda: worker.save(tmp_path), worker.consensus().__enter__):
        with pytest.raises(CommError, match=r"step 2: an exception ended this step while LocalSGD\(period=2\)"):
            act()
    assert not list(tmp_path.iterdir())


def on_processes() -> dict[str, Any]:
    """On Gloo: all ranks leave out two batches; then rank 1 alone leaves out one."""
    rank = dist.get_rank()
    worker = careless(attach(None, AllReduce()), {1: LAST, 3: FIRST})
    found: dict[str, Any] = {"x": flat(worker.model).tolist(), "step": worker.step}
    try:
        careless(attach(None, AllReduce()), {2: LAST} if rank == 1 else {})
    except MismatchError as error:
        found["error"] = str(error)
    return found


def test_processes_leave_out_a_batch_together_or_name_the_one_that_did_alone() -> None:
    found = run_processes(3, on_processes)
    for rank, mine in enumerate(found):
        assert mine["x"] == found[0]["x"]
        assert mine["step"] == COUNT - 2
        assert mine["error"].startswith(f"rank {rank}, step 2: the backward pass of rank 1 was stopped")
