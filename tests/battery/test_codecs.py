# SPDX-License-Identifier: Apache-2.0
"""Every registered codec is asked the same questions."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.battery.cases import CODECS, FAULTS, CodecCase
from tests.battery.runs import Case, begin, case, with_
from tests.battery.test_strategies import saved_and_resumed
from tests.grids import fast_where, one_of_each
from tests.problems import normal
from thinwire import AllReduce, BetweenNodes, Codec, Comm, ErrorFeedback, LocalSGD, OneBit, PowerSGD, Strategy
from thinwire.methods.codecs.base import draw_key

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LENGTH = 320
EVERY_CASE = pytest.mark.every_case
TWICE = (OneBit, PowerSGD, BetweenNodes)


def kind(each: CodecCase) -> type:
    return type(each.codec)


def every(question: str = "", *, forms: bool = True) -> pytest.MarkDecorator:
    """All cases, but for the faults that are known.

    Args:
        question: the name of the fault.
        forms: whether other forms of a class are asked each time; else only where there is time for slow tests.
    """
    cases: list[Any] = []
    for each, asked in zip(CODECS, one_of_each(CODECS, kind), strict=True):
        fault = FAULTS.get((question, each.codec))
        marks = [pytest.mark.xfail(strict=True, reason=fault)] if fault else []
        marks += [] if forms else asked.marks
        cases.append(pytest.param(each, id=str(each), marks=marks))
    return pytest.mark.parametrize("each", cases)


def decoded(codec: Codec, x: Tensor, key: int = 5) -> Tensor:
    return codec.decode(codec.encode(x, {}, draw_key(0, key)), x, draw_key(0, key))


@EVERY_CASE
@every()
def test_a_vector_of_any_size_and_dtype_has_a_payload_of_the_bytes_of_its_formula(each: CodecCase) -> None:
    for n, dtype in product((0, 1, 7, 15, 16, 17, 63, 64, 65, 1000), DTYPES):
        x = normal(n).to(dtype)
        kept, codec, state = x.clone(), each.codec, dict[str, Tensor]()
        payload = codec.encode(x, state, 1)
        assert payload.numel() * payload.element_size() == codec.nbytes(n) == each.nbytes(n)
        assert payload.dtype == codec.traits.dtype
        y = codec.decode(payload, x, 1)
        assert (y.shape, y.dtype) == (x.shape, dtype)
        assert y.isfinite().all()
        assert torch.equal(x, kept)
        assert state.keys() == ({"error"} if isinstance(codec, ErrorFeedback) else set())


@EVERY_CASE
@every()
def test_the_mean_squared_error_is_within_its_bound_and_the_one_that_it_states(each: CodecCase) -> None:
    bound = min(each.error, each.codec.traits.error_bound or each.error)
    for x in (normal(LENGTH), normal(LENGTH, 1).pow(3), torch.ones(LENGTH)):
        errors = [(decoded(each.codec, x, key) - x).square().sum() for key in range(30)]
        assert torch.stack(errors).mean() <= 1.05 * bound * x.square().sum() + 1e-12


@EVERY_CASE
@pytest.mark.parametrize("each", [each for each in CODECS if each.unbiased], ids=str)
def test_the_mean_of_decoded_vectors_is_the_vector(each: CodecCase) -> None:
    # No element is so small that it is rarely anything but zero, since its spread could not be seen.
    x, draws = normal(64, 2), 600
    x += 0.1 * x.sign()
    found = torch.stack([decoded(each.codec, x, key) for key in range(draws)]).double()
    spread = found.std(0) / draws**0.5
    assert ((found.mean(0) - x).abs() <= 5 * spread + 1e-6 * x.abs().max()).all()


@EVERY_CASE
@every()
def test_the_key_alone_decides_what_is_random(each: CodecCase) -> None:
    x = normal(500)
    first, again, other = (each.codec.encode(x, {}, draw_key(1, 2, rank)) for rank in (3, 3, 4))
    assert torch.equal(first, again)
    if each.unbiased:
        assert not torch.equal(first, other)


# -- in strategies -----------------------------------------------------------------------------------------------------


def using(codec: Codec, strategy: type[Strategy]) -> Case:
    """A strategy with a codec, with the error feedback that it needs."""
    safe = ErrorFeedback(codec) if codec.traits.needs_feedback and not isinstance(codec, ErrorFeedback) else codec
    recipe = AllReduce(safe) if strategy is AllReduce else LocalSGD(3, codec=safe)
    return case(recipe, lambda s: s.start)


def is_asked(pair: tuple[CodecCase, type[Strategy]]) -> bool:
    """Whether a case is the first of its class, in parameters, or in gradients where there are two stages or none."""
    each, strategy = pair
    first = next(other for other in CODECS if kind(other) is kind(each)) is each
    return first and (strategy is LocalSGD or not each.codec.traits.keeps_size or isinstance(each.codec, TWICE))


@pytest.mark.parametrize(("each", "strategy"), fast_where(is_asked, product(CODECS, (AllReduce, LocalSGD))), ids=str)
def test_training_resumes_bitwise(each: CodecCase, strategy: type[Strategy], tmp_path: Path) -> None:
    if strategy is LocalSGD and not each.codec.traits.keeps_size:
        with pytest.raises(thinwire.ConfigError, match="the gradient of one step only"):
            using(each.codec, strategy).strategy.check(2)
        return
    saved_and_resumed(with_(using(each.codec, strategy), dtype=torch.float32), tmp_path)


@pytest.mark.parametrize("value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)], ids=str)
@every("not finite")
def test_a_gradient_that_is_not_finite_on_one_rank_is_not_finite_on_all(each: CodecCase, value: float) -> None:
    setting = with_(using(each.codec, AllReduce), dtype=torch.float32)

    def body(comm: Comm) -> bool:
        worker = begin(comm, setting)
        loss = setting.loss(worker.model, comm.rank, 0)
        if comm.rank == 1:
            # One element of the gradient alone.
            loss = loss + value * next(worker.model.parameters()).flatten()[3]
        loss.backward()
        found = all(p.grad is not None and bool(p.grad.isfinite().all()) for p in worker.model.parameters())
        worker.detach()
        return found

    assert thinwire.run_threads(2, body, timeout=20) == [False, False]
