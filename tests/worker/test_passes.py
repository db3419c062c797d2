# SPDX-License-Identifier: Apache-2.0
"""One exchange for each outermost backward pass: passes within passes, and gradients that accumulate several times."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import thinwire
from tests.engine import Tiles, attach, batch, drawn, endings, flat, momentum, net, squared_error
from tests.grids import fast_where
from tests.pool import run_processes
from thinwire import AllReduce, BackupWorkers, Comm, ConfigError, ErrorFeedback, OneBit, TopK, Worker

WIDTH = 4


def twice(x: Tensor, block: nn.Module) -> Tensor:
    for _ in range(2):
        x = checkpoint(block, x, use_reentrant=True)
    return x


def deep(x: Tensor, block: nn.Module) -> Tensor:
    """Tiles within a checkpoint, and the same layers outside of both."""
    return block(checkpoint(lambda h: Tiles.apply(h * 1, block, 2), x, use_reentrant=True))


def tiled(count: int) -> Callable[[Tensor, nn.Module], Tensor]:
    return lambda x, block: Tiles.apply(x, block, count)


def hooked(x: Tensor, block: nn.Module) -> Tensor:
    """A tensor hook adds the gradient of another loss."""
    y = block(x)

    def add(_: Tensor) -> None:
        with torch.enable_grad():
            block(x.detach()).sum().backward()

    y.register_hook(add)
    return y


WAYS: dict[str, tuple[Callable[[Tensor, nn.Module], Tensor], Callable[[Tensor, nn.Module], Tensor]]] = {
    "tiled": (tiled(4), lambda x, block: block(x)),
    "two checkpoints": (twice, lambda x, block: block(block(x))),
    "deep": (deep, lambda x, block: block(block(x))),
}


class Net(nn.Module):
    """A block that is run in some way, between layers that are run once."""

    def __init__(self, way: Callable[[Tensor, nn.Module], Tensor], *, head: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(3, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH))
        self.head = nn.Linear(WIDTH, 2) if head else nn.Identity()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.way(self.stem(x), self.block))[:, :2]


def gradients(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def mean_of_serial(make: Callable[[], nn.Module], size: int, step: int) -> list[Tensor]:
    model = make()
    for rank in range(size):
        (squared_error(model, rank, step) / size).backward()
    return gradients(model)


def one_pass(worker: Worker, step: int) -> list[Tensor]:
    x, y = batch(worker.comm.rank, step)
    worker.optimizer.zero_grad()
    (worker.model(x) - y).square().mean().backward()
    return gradients(worker.model)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("bucket_bytes", "head"),
    fast_where(lambda each: each in ((1, True), (48, False)), product((1, 48, 1 << 20), (True, False))),
)
def test_gradients_that_accumulate_several_times_in_a_pass_are_averaged_once(
    way: str, bucket_bytes: int, head: bool
) -> None:
    several, once = WAYS[way]

    def train(comm: Comm) -> list[list[Tensor]]:
        worker = attach(comm, AllReduce(), model=drawn(Net(several, head=head)), bucket_bytes=bucket_bytes)
        return [one_pass(worker, step) for step in range(3)]

    for found in thinwire.run_threads(2, train, timeout=20):
        for step, own in enumerate(found):
            wanted = mean_of_serial(lambda: drawn(Net(once, head=head)), 2, step)
            torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-6)


def test_a_backward_pass_in_a_tensor_hook_is_a_part_of_the_pass() -> None:
    def train(comm: Comm) -> list[Tensor]:
        return one_pass(attach(comm, AllReduce(), model=drawn(Net(hooked))), 0)

    model = drawn(Net(hooked))
    for rank in range(2):
        squared_error(model, rank, 0).backward()
    wanted = [grad / 2 for grad in gradients(model)]
    for found in thinwire.run_threads(2, train, timeout=20):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def whole_numbers(model: nn.Module) -> nn.Module:
    """Small integers, of which no order of sums rounds any."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * 4).round())
    return model


@pytest.mark.parametrize("codec", [ErrorFeedback(OneBit(8)), ErrorFeedback(TopK(0.25))], ids=str)
def test_codecs_and_their_residuals_see_the_whole_gradient_of_a_pass(codec: Any) -> None:
    class Linear(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.stem, self.block, self.count = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2), count

        def forward(self, x: Tensor) -> Tensor:
            return Tiles.apply(self.stem(x), self.block, self.count)

    def train(comm: Comm, count: int) -> tuple[Tensor, list[Tensor]]:
        model = whole_numbers(drawn(Linear(count)))
        worker = attach(comm, AllReduce(codec), model=model, bucket_bytes=16)
        for step in range(3):
            x, _ = batch(comm.rank, step)
            worker.optimizer.zero_grad()
            model((4 * x).round()).sum().backward()
            worker.optimizer.step()
        return flat(model), [x.clone() for name, x in worker.replicas[0].state.items() if "error" in name]

    several = thinwire.run_threads(2, lambda comm: train(comm, 4), timeout=20)
    for found, wanted in zip(several, thinwire.run_threads(2, lambda comm: train(comm, 1), timeout=20), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


COUNTS = [1, 1, 2, 4, 1, 4]


class Changing(Net):
    """The number of tiles changes from pass to pass, on one rank only."""

    def __init__(self, rank: int) -> None:
        self.step = 0
        super().__init__(lambda x, block: Tiles.apply(x, block, COUNTS[self.step] if rank else 1))


@pytest.mark.parametrize("bucket_bytes", [1, 48, 1 << 20])
def test_a_parameter_that_accumulates_more_often_than_before_is_sent_again_by_all(bucket_bytes: int) -> None:
    def train(comm: Comm) -> tuple[list[list[Tensor]], list[float]]:
        model = drawn(Changing(comm.rank))
        worker = attach(comm, AllReduce(), model=model, bucket_bytes=bucket_bytes)
        found, sent = [], []
        for model.step in range(len(COUNTS)):
            before = comm.meter.payload_bytes
            found.append(one_pass(worker, model.step))
            sent.append(comm.meter.payload_bytes - before)
        return found, sent

    for found, sent in thinwire.run_threads(2, train, timeout=20):
        for step, own in enumerate(found):
            wanted = mean_of_serial(lambda: drawn(Net(lambda x, block: block(x))), 2, step)
            torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-6)
        # Twice where the number is new, and never again for that number.
        assert sent[0] == sent[1] == sent[4] == sent[5]
        assert all(again > 1.5 * sent[0] for again in sent[2:4]) == (bucket_bytes < 1 << 20)


def test_gradients_in_the_memory_that_was_sent_cannot_be_sent_again() -> None:
    reached: list[int] = []

    def train(comm: Comm) -> None:
        model = drawn(Changing(comm.rank))
        worker = attach(comm, AllReduce(), model=model)
        for model.step in range(len(COUNTS)):
            reached.append(model.step)
            worker.optimizer.zero_grad(set_to_none=False)
            squared_error(model, comm.rank, model.step).backward()

    for text in endings(2, train):
        assert text.startswith("ConfigError: rank ") and max(reached) == 2
        assert "accumulated gradient more often in this backward pass than in any before" in text
        assert "zero_grad(set_to_none=True)" in text


def test_backup_workers_contribute_the_whole_gradient_of_a_pass() -> None:
    def train(comm: Comm) -> list[Tensor]:
        worker = attach(comm, BackupWorkers(backups=1), model=drawn(Net(tiled(4))), bucket_bytes=1)
        x, y = batch(0, 0)
        (worker.model(x) - y).square().mean().backward()
        return gradients(worker.model)

    wanted = mean_of_serial(lambda: drawn(Net(lambda x, block: block(x))), 1, 0)
    for found in thinwire.run_threads(3, train, timeout=20):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


class OutOfMemory(Exception):
    """What the outer pass may end with."""


@pytest.mark.parametrize("stepped", [False, True])
def test_a_pass_that_fails_after_an_inner_one_is_forgotten_or_refused(stepped: bool) -> None:
    class Failing(Tiles):
        fails = False

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
            found = Tiles.backward(ctx, grad)
            if Failing.fails:
                raise OutOfMemory
            return found

    def train(comm: Comm) -> list[Tensor]:
        model = drawn(Net(lambda x, block: Failing.apply(x, block, 2), head=False))
        worker = attach(comm, AllReduce(), model=model)
        x, y = batch(comm.rank, 0)
        Failing.fails = True
        kept = (model(x) - y).square().mean()  # the graph outlives the pass
        with pytest.raises(OutOfMemory):
            kept.backward()
        if stepped:
            worker.optimizer.step()
        comm.all_reduce_(torch.zeros(1)).wait()
        Failing.fails = False
        return one_pass(worker, 1)

    if stepped:
        with pytest.raises(ConfigError, match=r"called optimizer.step\(\) after a backward pass that an exception"):
            thinwire.run_threads(2, train, timeout=10)
        return
    wanted = mean_of_serial(lambda: drawn(Net(lambda x, block: block(x), head=False)), 2, 1)
    for found in thinwire.run_threads(2, train, timeout=10):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_tiled_layers_are_sent_before_the_end_of_the_pass_once_their_number_is_known() -> None:
    def train(comm: Comm) -> list[float]:
        model = drawn(Net(tiled(4)))
        worker = attach(comm, AllReduce(), model=model, bucket_bytes=1)
        one_pass(worker, 0)
        sent: list[float] = []
        model.stem.weight.register_hook(lambda _: sent.append(comm.meter.payload_bytes))
        before = comm.meter.payload_bytes
        one_pass(worker, 1)
        return [sent[0] - before, comm.meter.payload_bytes - before]

    stem = 4 * (3 * WIDTH + WIDTH)
    for early, all_bytes in thinwire.run_threads(2, train, timeout=20):
        assert early >= all_bytes - stem


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_step_inside_the_backward_pass_is_refused_on_all_ranks() -> None:
    def train(comm: Comm) -> None:
        worker = attach(comm, AllReduce())
        worker.model.get_parameter("0.weight").register_post_accumulate_grad_hook(lambda _: worker.optimizer.step())
        one_pass(worker, 0)

    for text in endings(2, train):
        assert "optimizer.step() inside a backward pass" in text


@pytest.mark.filterwarnings("ignore:Using backward")  # torch warns once a process
def test_create_graph_is_refused_on_all_ranks() -> None:
    def train(comm: Comm) -> None:
        squared_error(attach(comm, AllReduce()).model, comm.rank, 0).backward(create_graph=True)

    for text in endings(2, train):
        assert "backward(create_graph=True): averaged gradients have no graph" in text


# -- accumulation of several passes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cleared", [False, True])
def test_a_local_pass_after_an_exchanged_one_is_refused_at_the_step(cleared: bool) -> None:
    def train(comm: Comm) -> None:
        worker = attach(comm, AllReduce())
        squared_error(worker.model, comm.rank, 0).backward()
        if cleared:
            worker.optimizer.zero_grad()
        with worker.no_sync():
            squared_error(worker.model, comm.rank, 1).backward()
        with suppress(ConfigError):
            worker.optimizer.step()
        worker.optimizer.step()

    for text in endings(2, train):
        assert "that no backward pass has exchanged" in text and "let the last pass of a step run outside" in text


def test_the_attribute_of_ddp_loops_accumulates_locally() -> None:
    def train(comm: Comm) -> tuple[list[Tensor], float]:
        worker = attach(comm, AllReduce())
        before = comm.meter.payload_bytes
        for step in range(3):
            worker.model.require_backward_grad_sync = step == 2  # pyright: ignore[reportAttributeAccessIssue]
            squared_error(worker.model, comm.rank, step).backward()
        return gradients(worker.model), comm.meter.payload_bytes - before

    wanted = [sum(grads) for grads in zip(*(mean_of_serial(net, 2, step) for step in range(3)), strict=True)]
    once = 4 * sum(p.numel() for p in net().parameters())
    for found, sent in thinwire.run_threads(2, train, timeout=10):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        assert sent == once


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zeroed", [True, False])
def test_repeated_passes_without_a_step_are_hinted_at_once(
    zeroed: bool, set_to_none: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def train(comm: Comm) -> None:
        worker = attach(comm, AllReduce())
        for number in range(6):
            x, y = batch(comm.rank, number)
            if zeroed or number % 2 == 0:  # as in SAM, whose first gradient is of another point
                worker.optimizer.zero_grad(set_to_none=set_to_none)
            (worker.model(x) - y).square().mean().backward()
            if number % 2:
                worker.optimizer.step()

    with caplog.at_level(logging.WARNING, "thinwire"):
        thinwire.run_threads(2, train, timeout=10)
    hints = [record for record in caplog.records if "worker.no_sync()" in record.message]
    assert len(hints) == (0 if zeroed else 2)


# -- several workers of one model ------------------------------------------------------------------------------------


class Two(nn.Module):
    """Two blocks with an optimizer each, which the data may use in either order, or leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, path: str) -> Tensor:
        for name in path:
            x = getattr(self, name)(x).tanh()
        return x[:, :2]


# For each step, the blocks that each rank uses.
PATHS: dict[str, list[tuple[str, str]]] = {
    "order": [("ab", "ba")] * 8,
    "unused on one rank": [("ab", "a"), ("b", "ab"), ("a", "b"), ("ab", "ba")] * 2,
    "unused on all ranks": [("a", "a"), ("ab", "ba"), ("b", "b"), ("ab", "ab")] * 2,
    "unused later": [("ab", "ba")] * 6 + [("a", "ab"), ("b", "b"), ("ab", "ba")],
}


def train_two(comm: Comm | None, case: str, codec: Any = None) -> list[list[Tensor]]:
    model, rank = drawn(Two()), dist.get_rank() if comm is None else comm.rank
    workers = [
        thinwire.attach(model, torch.optim.SGD(part.parameters(), lr=0.1), AllReduce(codec), comm=comm, bucket_bytes=1)
        for part in (model.a, model.b)
    ]
    found: list[list[Tensor]] = []
    for step, paths in enumerate(PATHS[case]):
        x, y = batch(rank, step)
        for worker in workers:
            worker.optimizer.zero_grad()
        (model(x, paths[rank]) - y).square().mean().backward()
        found.append(gradients(model))
        for worker in workers:
            worker.optimizer.step()
    for worker in workers:
        worker.detach()
    return found


def serial_two(case: str) -> list[list[Tensor]]:
    model = drawn(Two())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[list[Tensor]] = []
    for step, paths in enumerate(PATHS[case]):
        optimizer.zero_grad()
        for rank, path in enumerate(paths):
            x, y = batch(rank, step)
            ((model(x, path) - y).square().mean() / 2).backward()
        found.append(gradients(model))
        optimizer.step()
    return found


@pytest.mark.parametrize("case", PATHS)
def test_two_optimizers_whose_parameters_ranks_use_in_other_orders_or_not_at_all(case: str) -> None:
    for found in thinwire.run_threads(2, lambda comm: train_two(comm, case), timeout=10):
        torch.testing.assert_close(found, serial_two(case), rtol=1e-5, atol=1e-6)


def test_two_optimizers_with_a_codec_stay_equal_on_all_ranks() -> None:
    one, other = thinwire.run_threads(2, lambda comm: train_two(comm, "unused later", ErrorFeedback(OneBit(8))))
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def on_two_processes() -> list[list[list[float]]]:
    return [[[x.tolist() for x in grads] for grads in train_two(None, case)] for case in PATHS]  # pyright: ignore


def test_processes_with_two_optimizers() -> None:
    for found in run_processes(2, on_two_processes):
        for own, case in zip(found, PATHS, strict=True):
            wanted = serial_two(case)
            torch.testing.assert_close(
                [[torch.tensor(x) for x in grads] for grads in own], wanted, rtol=1e-5, atol=1e-6
            )


def test_a_failed_pass_of_two_optimizers_is_forgotten_by_both() -> None:
    def train(comm: Comm) -> list[Tensor]:
        model = drawn(Two())
        _workers = [
            attach(comm, AllReduce(), model=model, optimizer=lambda _, part=part: momentum(part), bucket_bytes=1)
            for part in (model.a, model.b)
        ]
        x, y = batch(comm.rank, 0)

        def fail(_: Tensor) -> None:
            raise OutOfMemory

        # On rank 0 the pass fails before it has used block a.
        undo = model.b.weight.register_post_accumulate_grad_hook(fail)
        with pytest.raises(OutOfMemory):
            (model(x, "ab" if comm.rank == 0 else "ba") - y).square().mean().backward()
        undo.remove()
        model.zero_grad()
        (model(x, "ab") - y).square().mean().backward()
        return gradients(model)

    model = drawn(Two())
    for rank in range(2):
        x, y = batch(rank, 0)
        ((model(x, "ab") - y).square().mean() / 2).backward()
    for found in thinwire.run_threads(2, train, timeout=10):
        torch.testing.assert_close(found, gradients(model), rtol=1e-5, atol=1e-6)
