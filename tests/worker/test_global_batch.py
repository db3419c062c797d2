# SPDX-License-Identifier: Apache-2.0
"""The global batch stays the same, however many workers share it."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import thinwire
from tests.elastic.fleets import Kill, run_fleet, survivors
from tests.engine import attach, batch, batches, endings, flat, net, steps
from tests.rules import for_each
from thinwire import AllReduce, Comm, ConfigError, LocalSGD, Paced, Worker, run_threads
from thinwire.elastic.sampler import batch_share
from thinwire.worker.state import GlobalBatch, shares

GLOBAL, STEPS, RATE = 13, 5, 0.1


def whole_batch(step: int) -> tuple[Tensor, Tensor]:
    return batch(0, step, rows=GLOBAL)


def take_steps(worker: Worker, until: int, *, passes: int = 1) -> list[tuple[int, range]]:
    read: list[tuple[int, range]] = []
    while worker.step < until:
        share = batch_share(worker)
        read.append((worker.step, share))
        x, y = whole_batch(worker.step)
        worker.optimizer.zero_grad()
        parts = torch.arange(share.start, share.stop).tensor_split(min(passes, len(share)))
        for number, part in enumerate(parts):
            loss = (worker.model(x[part]) - y[part]).square().mean() * len(part) / len(share)
            if number + 1 < len(parts):
                with worker.no_sync():
                    loss.backward()
            else:
                loss.backward()
        worker.optimizer.step()
    return read


def alone() -> Tensor:
    """One model on the whole batches."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        x, y = whole_batch(step)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return flat(model)


@for_each(product([1, 2, 3, 5], [1, 2]))
def test_means_are_over_samples_for_any_number_of_workers(case: tuple[int, int]) -> None:
    size, passes = case

    def train(comm: Comm) -> tuple[Tensor, list[tuple[int, range]]]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        worker = thinwire.attach(model, optimizer, AllReduce(), comm=comm, global_batch=GLOBAL, bucket_bytes=48)
        read = take_steps(worker, STEPS, passes=passes)
        return flat(model), read

    found = run_threads(size, train)
    for x, _ in found:
        assert torch.allclose(x, alone(), atol=1e-6)
    for step in range(STEPS):
        read = [position for _, steps in found for at, share in steps if at == step for position in share]
        assert sorted(read) == list(range(GLOBAL))


@given(st.integers(1, 300), st.integers(1, 40))
def test_shares_are_a_partition_and_even(samples: int, size: int) -> None:
    parts = shares(samples, size)
    assert [position for part in parts for position in part] == list(range(samples))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(2, 60), st.integers(2, 9), st.data())
def test_after_a_loss_the_mean_is_over_the_samples_of_the_rest(samples: int, size: int, data: st.DataObject) -> None:
    size = min(size, samples)
    there = data.draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True).map(sorted))
    parts, sums = shares(samples, size), torch.rand(samples, dtype=torch.float64)
    mean = 0.0
    for own in there:
        batch = GlobalBatch(samples)
        part = batch.share(3, range(size), own)
        mean += batch.factor(3, there, own) * float(sums[part.start : part.stop].mean()) / len(there)
    rows = [position for own in there for position in parts[own]]
    assert mean == pytest.approx(float(sums[rows].mean()))


def test_twenty_losses_and_joins_keep_the_global_batch() -> None:
    """Every step that no worker is lost in reads each position once."""
    losses, joins = 10, 10
    read: dict[int, list[int]] = {}

    def before(worker: Worker) -> None:
        assert worker.elastic is not None
        read.setdefault(worker.step, []).extend(batch_share(worker))

    kills = tuple(Kill(3 + number, 4 + 3 * number) for number in range(losses))
    ends = survivors(
        run_fleet(
            3,
            AllReduce(),
            steps=60,
            kills=kills,
            joins=tuple(2 + 3 * number for number in range(joins)),
            before=before,
            global_batch=GLOBAL,
            timeout=20.0,
        )
    )
    assert len(ends) == 3
    assert sum(len(epoch[1]) for epoch in ends[0].epochs) > 0
    changes = len(ends[0].epochs) - 1
    assert changes >= 15
    for step, positions in read.items():
        assert sorted(positions) == list(range(GLOBAL)), step


def test_what_cannot_have_a_global_batch_is_refused_on_all_ranks() -> None:
    for size, strategy, samples, words in (
        (3, AllReduce(), 2, "global_batch=2 with 3 workers: each worker needs at least one sample"),
        (2, AllReduce(), 0, "global_batch=0: must be at least 1"),
        (2, Paced(LocalSGD(4)), 8, "do not take each step together"),
    ):
        attached = lambda comm, strategy=strategy, n=samples: attach(comm, strategy, global_batch=n)  # noqa: E731
        assert all(words in text for text in endings(size, attached))


def test_a_step_whose_share_was_not_read_is_refused() -> None:
    for text in endings(2, lambda comm: steps(attach(comm, AllReduce(), global_batch=8), batches(comm.rank, 1))):
        assert "Call batch_share(worker) of thinwire.elastic.sampler before each step" in text
    with pytest.raises(ConfigError, match="attach got no global batch"):
        batch_share(attach(None, AllReduce()))
