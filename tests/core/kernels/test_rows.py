# SPDX-License-Identifier: Apache-2.0
"""Optimizers over rows: C and torch give the same bits, and torch's own functions the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.kernels.natives import agree, by_both, same
from thinwire.core.kernels import rows
from thinwire.errors import ConfigError

MODELS = 5
SIZES = (1, 7, 16, 33, 1000)
ACTIVE = torch.tensor([True, True, False, True, True])


def drawn(n: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[models, n], with all that is special about floats in every row."""
    x = torch.randn(MODELS, n, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    x[:, 1::11], x[:, 2::13], x[:, 3::17], x[:, 5::23] = -0.0, 1e-42, 3e38, float("inf")
    return x


def adam_numbers() -> Tensor:
    """Every row takes other branches: with and without decay, of either kind, by both formulas of a mean."""
    first = torch.tensor([0.9, 0.3, 0.9, 0.5, 0.0], dtype=torch.float64)
    second = torch.tensor([0.999, 0.9, 0.9, 0.0, 0.99], dtype=torch.float64)
    decay = torch.tensor([0.0, 0.1, 0.0, 0.3, 0.0], dtype=torch.float64)
    shrink = torch.tensor([1.0, 1.0, 0.9, 1.0, 0.99], dtype=torch.float64)
    scale, eps, rate = (
        torch.linspace(low, high, MODELS, dtype=torch.float64) for low, high in ((1, 9), (0, 1), (1, 2))
    )
    return torch.stack([shrink, decay, 1 - first, first, second, 1 - second, scale, eps, rate], 1)


def sgd_numbers() -> Tensor:
    columns = ([0.0, 0.1, 0.0, 0.2, 0.0], [0.0, 0.9, 0.9, 0.5, 0.9], [1, 1, 1, 0.7, 1], [0, 0, 1, 0, 1], [0.1] * 5)
    return torch.tensor(columns, dtype=torch.float64).t().contiguous()


def adam(n: int, dtype: torch.dtype, amsgrad: bool) -> list[Tensor]:
    state = [drawn(n, seed, dtype) for seed in range(5)]
    state[3].abs_(), state[4].abs_()
    for _ in range(3):
        most = state[4] if amsgrad else None
        rows.adam_rows_(*state[:4], most, numbers=adam_numbers(), active=ACTIVE)
    return state


def sgd(n: int, dtype: torch.dtype) -> list[Tensor]:
    state = [drawn(n, seed, dtype) for seed in range(3)]
    for _ in range(3):
        rows.sgd_rows_(*state, numbers=sgd_numbers(), active=ACTIVE)
    return state


@pytest.mark.usefixtures("by_c")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("n", SIZES)
def test_c_and_torch_give_the_same_bits(n: int, dtype: torch.dtype) -> None:
    found = agree(sgd, n, dtype)
    for amsgrad in (False, True):
        ours, theirs = by_both(adam, n, dtype, amsgrad)
        # Torch's own roots in fp64 may miss the last bit, and weight decay passes that on to the moments.
        exact = dtype == torch.float32
        limits = {"rtol": 0.0 if exact else 1e-13, "atol": 0.0 if exact else 1e-15}
        torch.testing.assert_close(ours, theirs, **limits, equal_nan=True)
        assert not same(ours[0][:2], drawn(n, 0, dtype)[:2])
    assert not same(found[0][:2], drawn(n, 0, dtype)[:2])


@pytest.mark.usefixtures("implementation")
def test_inactive_rows_and_neighbours_of_a_row_with_nan_are_unchanged_bitwise() -> None:
    found: list[list[Tensor]] = []
    for broken in (False, True):
        state = [torch.rand(MODELS, 3, 7, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
        if broken:
            state[1][1:3] = float("nan")
        rows.adam_rows_(*state, None, numbers=adam_numbers(), active=ACTIVE)
        rows.sgd_rows_(*state[:3], numbers=sgd_numbers(), active=ACTIVE)
        found.append(state)
    for place, (one, other) in enumerate(zip(*found, strict=True)):
        assert same(one[[0, 3, 4]], other[[0, 3, 4]])
        if place != 1:
            assert same(one[2], torch.rand(MODELS, 3, 7, generator=torch.Generator().manual_seed(place))[2])
            assert same(other[2], one[2])
    assert found[1][0][1].isnan().all()


@pytest.mark.parametrize("threads", [2, 3])
def test_the_number_of_threads_changes_no_bit(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [drawn(1000, seed) for seed in range(4)]
    shared = [tensor.clone() for tensor in alone]
    rows.adam_rows_(*alone, None, numbers=adam_numbers(), active=ACTIVE)
    rows.sgd_rows_(*alone[:3], numbers=sgd_numbers(), active=ACTIVE)
    monkeypatch.setattr(rows, "_ELEMENTS_PER_THREAD", 900)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    rows.adam_rows_(*shared, None, numbers=adam_numbers(), active=ACTIVE)
    rows.sgd_rows_(*shared[:3], numbers=sgd_numbers(), active=ACTIVE)
    assert all(same(one, other) for one, other in zip(alone, shared, strict=True))


@pytest.mark.parametrize(("decoupled", "amsgrad"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.usefixtures("implementation")
def test_adam_over_rows_is_torch_s_optimizer_for_each(decoupled: bool, amsgrad: bool) -> None:
    x, *gradients = (drawn(9, seed, torch.float64)[:, :1].expand(-1, 6).contiguous() for seed in range(5))
    mean, square, most = (torch.zeros_like(x) for _ in range(3))
    kind: Any = torch.optim.AdamW if decoupled else torch.optim.Adam
    settings = [(0.1 * (1 + row), (0.2 * row, 0.9 - 0.2 * row), 10.0**-row, 0.1 * row) for row in range(MODELS)]
    alone = [row.clone().requires_grad_() for row in x]
    theirs = [
        kind([row], lr=lr, betas=betas, eps=eps, weight_decay=decay, amsgrad=amsgrad)
        for row, (lr, betas, eps, decay) in zip(alone, settings, strict=True)
    ]
    for age, gradient in enumerate(gradients, 1):
        numbers = [_adam_row(*each, age, decoupled=decoupled) for each in settings]
        table = torch.tensor(numbers, dtype=torch.float64)
        everyone = torch.ones(MODELS, dtype=torch.bool)
        rows.adam_rows_(x, gradient, mean, square, most if amsgrad else None, numbers=table, active=everyone)
        for row, own, optimizer in zip(alone, gradient, theirs, strict=True):
            row.grad = own.clone()
            optimizer.step()
    torch.testing.assert_close(x, torch.stack([row.detach() for row in alone]), rtol=1e-12, atol=1e-12)


def _adam_row(
    lr: float, betas: tuple[float, float], eps: float, decay: float, age: int, *, decoupled: bool
) -> list[float]:
    """The nine numbers of a model after `age` steps, this one included, straight from the paper."""
    first, second = betas
    shrink, pull = (1 - lr * decay, 0.0) if decoupled else (1.0, decay)
    scale = (1 - second**age) ** -0.5
    return [shrink, pull, 1 - first, first, second, 1 - second, scale, eps, lr / (1 - first**age)]


def test_tensors_that_do_not_fit_are_refused() -> None:
    x, numbers, everyone = torch.zeros(2, 3), torch.zeros(2, 5, dtype=torch.float64), torch.ones(2, dtype=torch.bool)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"gradient": torch.zeros(2, 4)}, r"\[2, 4\].*\[2, 3\]"),
        ({"gradient": torch.zeros(2, 3).double()}, "float64"),
        ({"momentum": torch.zeros(3, 2).t()}, "not contiguous"),
        ({name: x.half() for name in ("x", "gradient", "momentum")}, "float16: rows must be fp32 or fp64"),
        ({"numbers": numbers[:, :4]}, "numbers has 8 elements: must be 10"),
        ({"numbers": numbers.float()}, "must be contiguous and torch.float64"),
        ({"active": everyone[:1]}, "active has 1 elements: must be 2"),
        ({"active": everyone.int()}, "must be contiguous and torch.bool"),
    ]
    for change, words in wrong:
        given = {"x": x, "gradient": x, "momentum": x, "numbers": numbers, "active": everyone, **change}
        with pytest.raises(ConfigError, match=words):
            rows.sgd_rows_(**given)
