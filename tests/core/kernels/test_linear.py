# SPDX-License-Identifier: Apache-2.0
"""Gradients of linear layers of many models: torch's in double precision, except for rounding."""

from __future__ import annotations

import pytest
import torch

from thinwire.core.kernels import base, linear
from thinwire.errors import ConfigError

SIZES = [(5, 7, 9), (1, 1, 1), (48, 64, 64), (17, 50, 33), (130, 16, 4), (3, 100, 70)]


@pytest.mark.usefixtures("by_c")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("n", "width", "out"), SIZES)
def test_gradients_of_weights_are_torch_s_in_double_precision(n: int, width: int, out: int, shared: bool) -> None:
    draw = torch.Generator().manual_seed(n)
    x, gradient = torch.randn(3, n, width, generator=draw), torch.randn(3, n, out, generator=draw)
    x = x[:1].expand(3, n, width) if shared else x
    wanted = torch.bmm(gradient.double().transpose(1, 2), x.double()), gradient.double().sum(1)
    for ours, theirs in zip(linear.weight_gradients(x, gradient), wanted, strict=True):
        assert ours.shape == theirs.shape and ours.is_contiguous()
        assert (ours - theirs).abs().max() <= 2e-6 * theirs.abs().max()


def test_threads_and_non_temporal_stores_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    x, gradient = torch.randn(3, 20, 32, generator=draw), torch.randn(3, 20, 24, generator=draw)
    wanted, threads = linear.weight_gradients(x, gradient), torch.get_num_threads()
    for change in ("WORK_PER_THREAD", "STREAM_BYTES"):
        with monkeypatch.context() as patch:
            patch.setattr(linear, change, 1)
            torch.set_num_threads(2)
            try:
                found = linear.weight_gradients(x, gradient)
            finally:
                torch.set_num_threads(threads)
        assert all(map(torch.equal, found, wanted))


def test_torch_alone_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, gradient = torch.arange(24.0).view(2, 3, 4), torch.arange(30.0).view(2, 3, 5)
    ours = linear.weight_gradients(x, gradient)
    monkeypatch.setenv("THINWIRE_NATIVE", "0")
    assert all(map(torch.equal, ours, linear.weight_gradients(x, gradient)))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("threads", ["torch's own", "others"])
def test_what_fails_in_a_thread_fails_and_all_is_done(
    threads: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    if threads == "others":
        monkeypatch.setattr(base, "gnu_openmp", lambda: None)
    done: list[tuple[int, int]] = []

    def some(begin: int, end: int) -> None:
        done.append((begin, end))
        if begin == 0:
            raise error("the first")

    with pytest.raises(error, match="the first"):
        base.parallel_for(10, 3, some)
    assert sorted(done) == [(0, 3), (3, 6), (6, 10)]


def test_tensors_that_do_not_fit_a_layer_are_refused() -> None:
    x, gradient = torch.zeros(2, 3, 4), torch.zeros(2, 3, 5)
    for one, other, words in (
        (x[0], gradient, "shapes"),
        (x, gradient[:, :2], r"\[2, 2, 5\]"),
        (x[..., :0], gradient, r"\[2, 3, 0\]"),
        (x.double(), gradient, "float64"),
        (x, gradient.transpose(0, 1).contiguous().transpose(0, 1), "contiguous"),
    ):
        with pytest.raises(ConfigError, match=words):
            linear.weight_gradients(one, other)
