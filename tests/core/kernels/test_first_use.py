# SPDX-License-Identifier: Apache-2.0
"""The first results of a GPU's kernels are compared with the CPU's; kernels that differ or fail are not used."""

from __future__ import annotations

import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pretend_gpu import GPU, REAL, pretend_gpu
from thinwire.core import kernels
from thinwire.core.kernels import base, chunks, floats, native, quantized, rows, signs, sketched
from thinwire.core.kernels import rounded as nearest
from thinwire.core.kernels.reference import rounded

pytestmark = pytest.mark.skipif(REAL, reason="there is a GPU, with kernels of its own")
HOW = {"bits": 4, "block": 64}


def encoded(device: str) -> Tensor:
    payload = torch.zeros(kernels.quantized_nbytes(300, **HOW), dtype=torch.uint8, device=device)
    kernels.encode_rounded_(torch.linspace(-1, 1, 300).to(device), None, payload, **HOW)
    return payload.cpu()


def replace_kernels(monkeypatch: pytest.MonkeyPatch, encode: Any) -> None:
    monkeypatch.setattr(base, "_has_triton", lambda: True)
    monkeypatch.setattr(base, "_agreeing", {})
    native.warn_of_slow_path.cache_clear()  # each text is a warning once
    module = SimpleNamespace(encode_rounded_=encode, sum_rounded_=rounded.sum_rounded_)
    monkeypatch.setitem(sys.modules, "thinwire.core.kernels.triton_rounded", module)


def test_kernels_that_agree_are_used_and_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def encode(x: Tensor, *more: Any, **how: Any) -> None:
        sizes.append(x.numel())
        rounded.encode_rounded_(x, *more, **how)

    with pretend_gpu():
        replace_kernels(monkeypatch, encode)
        assert torch.equal(encoded(GPU), encoded("cpu"))
        assert torch.equal(encoded(GPU), encoded("cpu"))
    assert sizes == [base._SAMPLE_SIZE, base._SAMPLE_SIZE, 300, 300]


def test_other_threads_wait_for_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def encode(x: Tensor, residual: Tensor | None, out: Tensor, **how: Any) -> None:
        begun.set()
        assert may_end.wait(20)
        one_wrong_bit(x, residual, out, **how)

    with pretend_gpu(), warnings.catch_warnings(), ThreadPoolExecutor(2) as threads:
        warnings.simplefilter("ignore")
        replace_kernels(monkeypatch, encode)
        first = threads.submit(encoded, GPU)
        assert begun.wait(20)
        second = threads.submit(encoded, GPU)
        with pytest.raises(TimeoutError):
            second.result(0.3)
        may_end.set()
        assert torch.equal(first.result(20), encoded("cpu"))
        assert torch.equal(second.result(20), encoded("cpu"))


def one_wrong_bit(x: Tensor, residual: Tensor | None, out: Tensor, **how: Any) -> None:
    rounded.encode_rounded_(x, residual, out, **how)
    out[-1:].bitwise_xor_(1)


def fails(*_: Any, **__: Any) -> None:
    raise RuntimeError("no code for this GPU")


@pytest.mark.parametrize(
    ("encode", "problem"), [(one_wrong_bit, "differ from the CPU's"), (fails, "no code for this GPU")]
)
def test_kernels_that_differ_or_fail_are_replaced_by_torch_with_a_warning(
    encode: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretend_gpu():
        replace_kernels(monkeypatch, encode)
        with pytest.warns(RuntimeWarning, match=f"GPU kernels of rounded are not used on cuda:0: .*{problem}"):
            found = encoded(GPU)
        assert torch.equal(found, encoded("cpu"))
        assert torch.equal(encoded(GPU), encoded("cpu")), "and no second warning"


@pytest.mark.parametrize(
    "kind", [signs, quantized, nearest, chunks, floats, sketched, rows], ids=lambda kind: kind.__name__
)
def test_what_is_compared_is_equal_where_torch_computes_it_on_a_gpu(kind: Any) -> None:
    with pretend_gpu():
        assert base._problem_of(kind._sample, GPU) == ""
    assert all(x.count_nonzero() for x in kind._sample(torch.device("cpu")))
