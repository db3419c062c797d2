# SPDX-License-Identifier: Apache-2.0
"""PowerSGD: what a mean of matrices equals, what it sends, and where it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.engine import attach, batches, drawn, flat, steps
from tests.oracles import codecs as oracles
from tests.problems import Regression, distance, together
from tests.rules import refusals
from thinwire import (
    EASGD,
    AllReduce,
    Choco,
    Codec,
    Comm,
    CompressedMomentum,
    DiLoCo,
    ErrorFeedback,
    Fp32,
    LocalSGD,
    PowerSGD,
    SlowMo,
    Strategy,
    ZeroOne,
    ddp_hook,
    fsdp_hook,
)
from thinwire.core.kernels import uniform
from thinwire.core.replica.flat import Segment, lay_out
from thinwire.methods.codecs.base import Matrix, draw_key
from thinwire.methods.reduce.compressed_all_reduce import compressed_mean_
from thinwire.planning.plan import explain

SHAPES = [(6, 5), (5,), (4, 3, 2), (7,)]
NAMED = [(str(i), torch.zeros(shape)) for i, shape in enumerate(SHAPES)]
SEGMENTS = lay_out(NAMED)
LENGTH = SEGMENTS[-1].stop


def rows(size: int, step: int, length: int = LENGTH) -> Tensor:
    return torch.randn(size, length, generator=torch.Generator().manual_seed(step))


def means(size: int, codec: Codec, messages: int, segments: tuple[Segment, ...] = SEGMENTS) -> Any:
    """Of each rank: the means of all messages, and the state in the end."""

    def body(comm: Comm) -> tuple[list[Tensor], dict[str, Tensor]]:
        state: dict[str, Tensor] = {}
        xs = [rows(size, step, segments[-1].stop)[comm.rank].clone() for step in range(messages)]
        return [compressed_mean_(comm, x, codec, state, segments=segments).wait() for x in xs], state

    return thinwire.run_threads(size, body, timeout=20)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("rank", [1, 2])
def test_means_equal_those_of_the_paper_s_algorithm(size: int, rank: int) -> None:
    columns = {0: 5, 35: 6}
    oracle = oracles.LowRank(
        rank, SHAPES, lambda at: uniform(columns[at] * rank, draw_key(0, at)).sub(0.5).view(columns[at], rank)
    )
    found = means(size, PowerSGD(rank, 0), 6)
    for step in range(6):
        expected = oracle(rows(size, step))
        for each, _ in found:
            assert torch.equal(each[step], found[0][0][step])
            assert (each[step] - expected).norm() < 1e-4 * expected.norm()


def test_of_full_rank_the_mean_is_exact_and_nothing_is_left_out() -> None:
    for xs, _ in means(3, PowerSGD(8, 0), 4):
        for step, x in enumerate(xs):
            assert torch.allclose(x, rows(3, step).mean(0), atol=1e-5)
    # A worker's own vector differs from the mean, and its residual is that: in the mean it is nothing.
    left = torch.stack([state["error"] for _, state in means(3, PowerSGD(8, 0), 1)])
    assert left.mean(0).abs().max() < 1e-5


def test_what_one_worker_sends_and_its_residual_add_up_to_its_vector() -> None:
    ((xs, state),) = means(1, PowerSGD(2, 0), 1)
    assert state["error"].norm() > 0.1
    assert torch.allclose(xs[0] + state["error"], rows(1, 0)[0], atol=1e-6)


def test_repeated_messages_follow_the_largest_singular_vectors() -> None:
    codec, m = PowerSGD(2, 0), torch.randn(40, 30, generator=torch.Generator().manual_seed(1))
    u, _, v = torch.linalg.svd(m)
    m = u[:, :30] * 0.5 ** torch.arange(30) @ v
    segments = lay_out([("m", m)])

    def body(comm: Comm) -> Tensor:
        state: dict[str, Tensor] = {}
        for _ in range(10):
            x = m.flatten().clone()
            compressed_mean_(comm, x, codec, state, segments=segments).wait()
            state["error"].zero_()
        return x

    (found,) = thinwire.run_threads(1, body)
    best = (m - (u[:, :2] * 0.5 ** torch.arange(2)) @ v[:2]).norm()
    assert (found.view(40, 30) - m).norm() < 1.001 * best


def test_tensors_of_zeros_stay_zero_and_the_next_message_is_as_good_as_the_first() -> None:
    last = lay_out([("", torch.zeros(LENGTH // 4, 4))])

    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        state: dict[str, Tensor] = {}
        xs = [torch.zeros(LENGTH // 4 * 4), torch.arange(LENGTH // 4 * 4) - 20.0]
        zero, x = [compressed_mean_(comm, x, PowerSGD(4, 0), state, segments=last).wait() for x in xs]
        return zero, x

    for zero, x in thinwire.run_threads(2, body):
        assert not zero.any()
        assert torch.allclose(x, torch.arange(LENGTH // 4 * 4) - 20.0, atol=1e-3)


def test_the_matrix_of_a_tensor_is_as_its_memory_lies() -> None:
    x = torch.randn(6, 4, 3, 3).to(memory_format=torch.channels_last)
    segments = lay_out([("conv", x), ("linear", torch.randn(5, 7).T)])
    seen: list[tuple[int, int]] = []

    class Seen(PowerSGD):
        def compresses(self, matrix: Matrix) -> bool:
            seen.append((matrix.rows, matrix.columns))
            return super().compresses(matrix)

    compressed_mean_(thinwire.CountingComm(0, 2), torch.zeros(251), Seen(), {}, segments=segments).wait()
    assert set(seen) == {(6, 36), (5, 7)}


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_step_sends_the_bytes_of_the_formula(rank: int) -> None:
    shapes = [(256, 64), (256,), (10, 256), (10,)]
    sent = 4 * (rank * (256 + 64) + 256 + rank * (10 + 256) + 10)
    if 2 * rank * 266 >= 2560:
        sent = 4 * (rank * (256 + 64) + 256 + 2560 + 10)
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 10))
    for strategy, period in ((AllReduce(PowerSGD(rank)), 1), (LocalSGD(4, codec=PowerSGD(rank)), 4)):
        card = explain(strategy, parameters=model, workers=4)
        assert card.sent_bytes_per_step * period == 2 * 3 / 4 * sent
    matrices = [Matrix(0, shape[0] if len(shape) > 1 else 1, shape[-1], 0) for shape in shapes]
    assert 4 * PowerSGD(rank).count(matrices) == sent


USES: list[Callable[[Codec | None], Strategy]] = [
    AllReduce,
    lambda c: LocalSGD(3, codec=c),
    lambda c: SlowMo(period=2, codec=c),
    lambda c: DiLoCo(period=2, codec=c),
    lambda c: EASGD(2, codec=c),
    lambda c: SlowMo(AllReduce(c), period=3),
]


@pytest.mark.parametrize("use", USES)
def test_of_full_rank_training_is_that_without_a_codec(use: Callable[[Codec | None], Strategy]) -> None:
    problem = Regression(3, 8, torch.float32)
    found, plain = (together(3, use(codec), problem, [0.1] * 8) for codec in (PowerSGD(9, 0), Fp32()))
    assert distance(found, plain) < 1e-4


def test_buckets_do_not_change_what_is_kept() -> None:
    def body(comm: Comm, nbytes: int) -> tuple[set[str], Tensor]:
        worker = steps(attach(comm, AllReduce(PowerSGD(1, 0)), bucket_bytes=nbytes), batches(comm.rank, 3))
        worker.detach()
        return set(worker.replicas[0].state), flat(worker.model)

    (names, _), (whole, _) = (thinwire.run_threads(2, lambda c, n=n: body(c, n))[0] for n in (16, 1 << 20))
    assert names == whole == {"error", "factor/0", "factor/20"}


def test_half_precision_parameters_keep_a_residual_in_fp32() -> None:
    def body(comm: Comm) -> Tensor:
        model = drawn(nn.Linear(8, 6)).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = thinwire.attach(model, optimizer, AllReduce(PowerSGD(1, 0)), comm=comm)
        model(torch.ones(2, 8, dtype=torch.bfloat16) * comm.rank).square().sum().backward()
        optimizer.step()
        worker.detach()
        assert worker.replicas[0].state["error"].dtype == torch.float32
        return flat(model)

    first, second = thinwire.run_threads(2, body)
    assert torch.equal(first, second)


test_wrong_uses_are_refused_with_the_fix = refusals(
    [
        (lambda: PowerSGD(0), "rank=0: must be at least 1"),
        (lambda: PowerSGD(1, -1), "min_ratio=-1: must be finite and not negative"),
        (lambda: ErrorFeedback(PowerSGD()), "already has error feedback. Use it without"),
        (lambda: Choco(codec=PowerSGD()), "the shapes of tensors are not known here. Use it as AllReduce"),
        (lambda: CompressedMomentum(PowerSGD()), "the shapes of tensors are not known here"),
        (lambda: ZeroOne(PowerSGD()), "the shapes of tensors are not known here"),
        (lambda: fsdp_hook(PowerSGD(), thinwire.CountingComm(0, 2)), "the shapes of tensors are not known here"),
        (lambda: ddp_hook(PowerSGD()), "the shapes of tensors are not known here"),
    ]
)
