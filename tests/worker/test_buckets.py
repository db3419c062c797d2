# SPDX-License-Identifier: Apache-2.0
"""Gradient buckets: gathered as they are final, sent in one order."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.engine import attach, batches, drawn, flat, serial, squared_error, steps
from thinwire import AllReduce, Comm, CountingComm, Quantize, run_threads
from thinwire.core.comm.work import Work, completed
from thinwire.core.replica.flat import lay_out, views
from thinwire.core.replica.replica import Replica
from thinwire.worker.buckets import Backward, cut


def replica_of(sizes: list[int], comm: Comm | None = None) -> tuple[Replica, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.full((n,), float(i))) for i, n in enumerate(sizes)]
    n = sum(sizes)
    replica = Replica(torch.zeros(n), torch.full((n,), torch.nan), comm or CountingComm(0, 2), lr=lambda: 0.1)
    return replica, parameters


@dataclass
class Recorder:
    """Records which parts are exchanged, in which order."""

    parts: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def __call__(self, r: Replica, part: slice) -> Work[Tensor]:
        self.parts.append((part.start, part.stop))
        return completed(r.g[part])


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(1, 400))
def test_buckets_tile_the_vector_from_its_end(sizes: list[int], bucket_bytes: int) -> None:
    replica, parameters = replica_of(sizes)
    buckets = cut(replica, parameters, lay_out([(str(i), p) for i, p in enumerate(parameters)]), bucket_bytes)
    assert [p for bucket in reversed(buckets) for p in bucket.parameters] == parameters
    edges = [(bucket.part.start, bucket.part.stop) for bucket in reversed(buckets)]
    assert edges[0][0] == 0 and edges[-1][1] == sum(sizes)
    assert all(left[1] == right[0] for left, right in pairwise(edges))
    for bucket in buckets:
        smallest = bucket.parameters[0].numel() * 4
        assert (bucket.part.stop - bucket.part.start) * 4 - smallest < bucket_bytes


def test_the_first_bucket_is_small_and_later_ones_fill_the_limit() -> None:
    mega = 1 << 18
    replica, parameters = replica_of([mega] * 20)
    layout = lay_out([(str(i), p) for i, p in enumerate(parameters)])
    buckets = cut(replica, parameters, layout, 4 << 20)
    assert [len(bucket.parameters) for bucket in buckets] == [1, 4, 4, 4, 4, 3]


def watched(sizes: list[int], bucket_bytes: int = 1) -> tuple[Backward, Recorder, list[nn.Parameter], Replica]:
    replica, parameters = replica_of(sizes)
    recorder = Recorder()
    segments = lay_out([(str(i), p) for i, p in enumerate(parameters)])
    backward = Backward(cut(replica, parameters, segments, bucket_bytes), recorder)
    list(backward.watch())
    return backward, recorder, parameters, replica


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_buckets_are_sent_last_first_whatever_order_their_gradients_are_ready_in(order: list[int]) -> None:
    _, recorder, parameters, _ = watched([2, 3, 1, 4])
    total = torch.zeros((), requires_grad=True)
    for i in order:
        total = torch.tanh(total + parameters[i].sum())
    total.backward()
    assert recorder.parts == [(6, 10), (5, 6), (2, 5), (0, 2)]


def test_a_bucket_is_sent_as_soon_as_it_and_those_before_it_are_final_and_the_last_at_the_end() -> None:
    backward, recorder, parameters, _ = watched([2, 3, 1, 4])
    seen: list[int] = []
    parameters[0].register_post_accumulate_grad_hook(lambda _: seen.append(len(recorder.parts)))
    parameters[3].register_post_accumulate_grad_hook(lambda _: seen.append(len(recorder.parts)))
    total = parameters[0].sum()
    for parameter in parameters[1:]:
        total = torch.tanh(total + parameter.sum())
    total.backward()
    assert seen == [0, 3]  # hooks of the tensor run before
    assert len(recorder.parts) == 4
    assert all(bucket.work is None for bucket in backward.buckets)


def test_gradients_end_up_in_the_flat_vector_and_missing_ones_are_zero() -> None:
    _, _, parameters, replica = watched([2, 3, 1])
    (3 * parameters[2].sum() + parameters[0].square().sum()).backward()
    assert replica.g.tolist() == [0, 0, 0, 0, 0, 3]
    assert all(p.grad is not None for p in parameters)
    gradients = views(replica.g, lay_out([(str(i), p) for i, p in enumerate(parameters)]))
    assert [p.grad.data_ptr() for p in parameters] == [g.data_ptr() for g in gradients]


def test_nothing_is_sent_while_gradients_accumulate() -> None:
    backward, recorder, parameters, replica = watched([2, 3])
    backward.syncing = False
    sum(p.sum() for p in parameters).backward()
    assert recorder.parts == []
    backward.syncing = True
    parameters[0].sum().backward()
    assert recorder.parts == [(2, 5), (0, 2)]
    assert replica.g.tolist() == [2, 2, 1, 1, 1]


class Contrary(nn.Module):
    """Ranks go through the layers in opposite orders."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers if self.rank % 2 else reversed(self.layers):
            x = torch.tanh(layer(x))
        return x[:, :2]


def contrary(comm: Comm) -> Tensor:
    """Each rank's gradients are ready in an order of their own."""
    return flat(steps(attach(comm, AllReduce(), model=drawn(Contrary(comm.rank))), batches(comm.rank, 3)).model)


def oracle_contrary(size: int) -> Tensor:
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        contrary.rank = rank
        return squared_error(model, rank, step)

    contrary = drawn(Contrary(0))
    return flat(serial(3, contrary, size=size, loss=loss))


def test_ranks_whose_layers_run_in_opposite_orders_exchange_the_same_buckets() -> None:
    found = run_threads(3, contrary, timeout=20)
    assert all(torch.equal(found[0], x) for x in found)
    torch.testing.assert_close(found[0], oracle_contrary(3), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("outside", [True, False])
def test_reentrant_checkpoints_code_gradients_once(outside: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Again(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.head = nn.Linear(4, 2, bias=False).requires_grad_(outside)
            self.reentrant = reentrant

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = checkpoint(part, x.requires_grad_(), use_reentrant=self.reentrant)
            return self.head(x)

    def train(comm: Comm, reentrant: bool) -> tuple[float, Tensor]:
        model = drawn(Again(reentrant))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        worker = attach(comm, AllReduce(codec=Quantize(8)), model=model, optimizer=lambda _: optimizer)
        before = comm.meter.payload_bytes
        model(torch.ones(3, 4) + comm.rank).square().mean().backward()
        optimizer.step()
        worker.detach()
        return comm.meter.payload_bytes - before, flat(model)

    plain = run_threads(2, lambda comm: train(comm, False))
    for (sent, x), (least, y) in zip(run_threads(2, lambda comm: train(comm, True)), plain, strict=True):
        assert sent == least and torch.equal(x, y)
