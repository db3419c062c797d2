# SPDX-License-Identifier: Apache-2.0
"""Means whose residual is final when they are launched: the same numbers, and no vector in flight."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from thinwire import Codec, Comm, run_threads
from thinwire.core.comm.threads import single_worker
from thinwire.core.comm.work import Work
from thinwire.methods.codecs.base import draw_key
from thinwire.methods.codecs.cast import Fp8
from thinwire.methods.codecs.chunked_top_k import ChunkedTopK
from thinwire.methods.codecs.feedback import ErrorFeedback
from thinwire.methods.codecs.nearest import Nearest
from thinwire.methods.codecs.one_bit import OneBit
from thinwire.methods.codecs.power_sgd import PowerSGD
from thinwire.methods.codecs.quantize import Quantize
from thinwire.methods.codecs.top_k import TopK
from thinwire.methods.reduce.compressed_all_reduce import at_once, compressed_mean_, mean_from_residual

CODECS: list[Codec] = [
    ErrorFeedback(each) for each in (OneBit(16), Nearest(4, 16), Fp8(block=16), Quantize(4, 16), TopK(0.1))
]
State = dict[str, Tensor]


@pytest.mark.parametrize("n", [1, 33, 300])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_means_and_residuals_are_those_of_the_other_way(codec: Codec, n: int) -> None:
    def body(comm: Comm) -> None:
        draw = torch.Generator().manual_seed(comm.rank)
        one: State = {}
        other: State = {}
        for step in range(4):
            comm.step = step
            x, key = torch.randn(n, generator=draw), draw_key(0, step)
            given = x.clone()
            work = mean_from_residual(comm, given, codec, one, key=key)
            given.zero_()  # it may change before the wait
            found = work.wait()
            assert torch.equal(found, compressed_mean_(comm, x, codec, other, key=key).wait())
            assert one.keys() == other.keys()
            assert all(torch.equal(each, other[name]) for name, each in one.items())

    run_threads(3, body)


def test_a_vector_that_is_not_finite_makes_the_means_of_all_nan() -> None:
    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        x = torch.ones(40)
        x[7] = torch.inf if comm.rank == 1 else 1
        state: State = {}
        return mean_from_residual(comm, x, CODECS[0], state).wait(), state["error"]

    found = run_threads(3, body)
    assert all(mean.isnan().all() for mean, _ in found)
    assert all(error.isfinite().all() for _, error in found)


def test_one_that_has_just_joined_adds_nothing_and_its_vector_stays() -> None:
    def body(comm: Comm) -> Tensor:
        comm.silent = frozenset({2})
        x, state = torch.full((40,), 1.0 + comm.rank), {"error": torch.full((40,), -float(comm.rank))}
        found = mean_from_residual(comm, x, ErrorFeedback(OneBit(40)), state).wait()
        assert torch.equal(x, torch.full((40,), 1.0 + comm.rank))
        assert not state["error"].any()
        return found

    assert all(torch.equal(found, torch.ones(40)) for found in run_threads(3, body))


@pytest.mark.parametrize("advanced", [False, True])
def test_only_payloads_are_in_flight(advanced: bool) -> None:
    n, comm, codec = 8209, single_worker(), CODECS[1]

    def vectors() -> int:
        """The memory of that size that tensors hold, whoever refers to them."""
        return len({each.data_ptr() for each in gc.get_objects() if type(each) is Tensor and each.shape == (n,)})

    def launched(state: State, kept: bool) -> Work[Tensor]:
        x = torch.ones(n)
        work = compressed_mean_(comm, x, codec, state) if kept else mean_from_residual(comm, x, codec, state)
        if advanced:
            work.advance()
        return work

    def held(kept: bool) -> int:
        state: State = {}
        launched(state, kept).wait()  # makes the residuals
        before = vectors()
        work = launched(state, kept)
        found = vectors() - before
        assert work.wait().shape == (n,)
        return found

    assert held(kept=False) == 0
    assert held(kept=True) > 0


def test_which_codecs_can() -> None:
    assert all(at_once(codec) for codec in CODECS)
    others: list[Codec] = [Nearest(4), PowerSGD(), ErrorFeedback(OneBit(), decay=0.9)]
    assert not any(at_once(codec) for codec in others)


@pytest.mark.parametrize("mean_of", [mean_from_residual, compressed_mean_])
@pytest.mark.parametrize("code", [Nearest(bits=4), ChunkedTopK()], ids=str)
def test_a_sum_that_overflows_is_nan_on_all_ranks(code: Codec, mean_of: Callable[..., Work[Tensor]]) -> None:
    def work(comm: Comm) -> Tensor:
        x = torch.full((64,), 3e38)
        x[1:] = 1.0
        return mean_of(comm, x, ErrorFeedback(code), {}).wait()

    assert all(bool(found.isnan().all()) for found in run_threads(3, work))
