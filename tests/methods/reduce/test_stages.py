# SPDX-License-Identifier: Apache-2.0
"""When the second stage of a mean starts, and when residuals are updated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import thinwire
from tests.methods.optimizers.one_bit_runs import begun, path, taken
from tests.problems import Regression
from thinwire import AllReduce, Codec, Comm, CommError
from thinwire.core.comm.pending import PendingMeans, Stages
from thinwire.core.comm.work import Work
from thinwire.methods.codecs.feedback import ErrorFeedback
from thinwire.methods.codecs.one_bit import OneBit
from thinwire.methods.codecs.random_k import RandomK
from thinwire.methods.optimizers import base
from thinwire.methods.reduce.compressed_all_reduce import compressed_mean_
from thinwire.methods.strategies.gradients.one_bit import CompressedMomentum

PARTS = [slice(40, 60), slice(16, 40), slice(0, 16)]
SIGNS, LINEAR = ErrorFeedback(OneBit(8)), ErrorFeedback(RandomK(0.5, unbiased=False))
OVERLAPPED = CompressedMomentum(OneBit(block=8), warmup_steps=4, overlap=True)
State = dict[str, Tensor]


def drawn(size: int, seed: int = 0) -> Tensor:
    """A vector of 60 for each rank."""
    return torch.randn(size, 60, generator=torch.Generator().manual_seed(seed))


def launched(comm: Comm, x: Tensor, codec: Codec, state: State) -> list[Work[Tensor]]:
    """The means of all parts, in flight."""
    pending = PendingMeans()
    return [
        compressed_mean_(comm, x[part], codec, state, key=part.start, offset=part.start, length=60, pending=pending)
        for part in PARTS
    ]


def test_the_second_stage_of_a_mean_starts_when_the_next_mean_is_launched() -> None:
    def body(comm: Comm) -> list[str]:
        calls: list[str] = []
        sent = comm.meter.sent
        comm.meter.sent = lambda operation, nbytes: (calls.append(operation), sent(operation, nbytes))[1]  # type: ignore[method-assign]
        works = launched(comm, drawn(3)[comm.rank].clone(), SIGNS, {})
        before = len(calls)
        works[0].wait()
        assert before == 5, "the second stage of the last mean starts with the first wait"
        works[2].wait()
        return calls

    for calls in thinwire.run_threads(3, body, timeout=20):
        assert calls == ["all_to_all", "all_to_all", "all_gather", "all_to_all", "all_gather", "all_gather"]


def test_a_linear_mean_is_not_waited_for_when_the_next_is_launched() -> None:
    def body(comm: Comm) -> float:
        works = launched(comm, drawn(2)[comm.rank].clone(), LINEAR, {})
        waited = comm.meter.exposed_seconds
        for work in works:
            work.wait()
        return waited

    assert thinwire.run_threads(2, body, timeout=20) == [0.0, 0.0]


def test_a_mean_that_fails_takes_the_others_of_its_step_with_it_and_fails_at_every_later_wait() -> None:
    def mean(x: Tensor, *, broken: bool = False) -> Stages:
        yield
        yield
        if broken:
            raise CommError("the line is cut")
        yield True
        yield
        return x

    pending, x = PendingMeans(), torch.ones(1)
    works = [pending.launch(mean(x, broken=broken)) for broken in (False, True, False)]
    with pytest.raises(CommError, match="the line is cut"):
        works[0].wait()
    for work in works:
        with pytest.raises(CommError, match="failed at an earlier wait"):
            work.wait()
    assert pending.launch(mean(x)).wait() is x


def test_the_replicas_of_a_worker_skip_a_step_together() -> None:
    def body(comm: Comm) -> list[bool]:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        worker = thinwire.attach(model, optimizer, AllReduce(SIGNS), comm=comm)
        factor = float("nan") if comm.rank else 1.0
        (model[0](torch.ones(4)).sum() + factor * model[1](torch.ones(4).double()).sum()).backward()
        worker.detach()
        return [bool(p.grad.isnan().all()) for p in model.parameters() if p.grad is not None]

    assert thinwire.run_threads(2, body, timeout=20) == [[True] * 4] * 2


@pytest.mark.parametrize("codec", [SIGNS, LINEAR], ids=str)
@pytest.mark.parametrize("bad", [0, 20, 50], ids=["last", "middle", "first"])
def test_residuals_are_kept_if_any_part_is_not_finite(codec: Codec, bad: int) -> None:
    def body(comm: Comm) -> tuple[Tensor, State, State]:
        state: State = {}
        for work in launched(comm, drawn(2)[comm.rank].clone(), codec, state):
            work.wait()
        before = {name: x.clone() for name, x in state.items()}
        x = drawn(2, 1)[comm.rank].clone()
        if comm.rank:
            x[bad] = float("inf")
        for work in launched(comm, x, codec, state):
            work.wait()
        return x, before, state

    for x, before, after in thinwire.run_threads(2, body, timeout=20):
        assert x.isnan().all()
        assert before["error"].any()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


# -- momenta sent during the backward pass -----------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_momenta_do_not_depend_on_the_size_of_parameter_batches(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, strategy = Regression(2, 10, torch.float32), replace(OVERLAPPED, overlap=overlap)
    together = path(2, strategy, problem, 10, lr=0.03)
    monkeypatch.setattr(base, "_BATCH_ELEMENTS", 5)
    assert torch.equal(path(2, strategy, problem, 10, lr=0.03), together)


@pytest.mark.parametrize(
    "change",
    [lambda g: g.neg_(), lambda g: g.view(-1)[-1:].add_(1e-3), lambda g: g.fill_(float("nan"))],
    ids=["signs alone", "one entry", "no number"],
)
def test_any_change_of_a_gradient_that_was_sent_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    problem = Regression(2, 8, torch.float32)

    def body(comm: Comm) -> None:
        worker = begun(comm, OVERLAPPED, problem.model(), lr=0.03)
        taken(worker, problem, 0, 6)
        worker.optimizer.zero_grad()
        problem.loss(worker.model, comm.rank, 6).backward()
        gradient = next(worker.model.parameters()).grad
        assert gradient is not None
        change(gradient)
        # One that is not finite is found before the strategy looks.
        words = "step 6: gradients were changed.*overlap=False|step 6: the gradient of w1 on rank [01] is NaN"
        with pytest.raises((thinwire.ConfigError, thinwire.NonFiniteError), match=words):
            worker.optimizer.step()
        # What one rank has told all of them is raised by each of its calls from then on.
        with suppress(thinwire.NonFiniteError):
            worker.detach()

    thinwire.run_threads(2, body, timeout=20)
