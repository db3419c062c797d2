# SPDX-License-Identifier: Apache-2.0
"""Steps of adaptive optimizers: C and torch give the same bits, and both what the equations give."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.core.kernels.natives import agree, drawn, same_bits
from tests.rules import for_each
from thinwire import ConfigError
from thinwire.core.kernels import adaptive

SIZES = (1, 7, 15, 16, 17, 127, 128, 129, 1000, 5001)
SETTINGS = {"betas": (0.9, 0.99), "eps": 1e-6}


def strange(n: int, seed: int) -> Tensor:
    """Numbers of many sizes, with both zeros and denormals."""
    x = drawn(n, seed) * 10 ** (3 * drawn(n, seed + 1))
    x[1::11], x[2::13], x[3::17], x[4::19] = -0.0, 1e-42, 0.0, 1e15
    return x


def states(n: int) -> list[Tensor]:
    """A momentum, the one before, a frozen and a fresh variance, and a parameter."""
    momentum, before, frozen, fresh, x = (strange(n, 10 * n + seed) for seed in range(0, 10, 2))
    return [momentum, before, frozen.abs(), fresh.abs(), x]


def directions_of(kinds: list[list[Tensor]], decay: float) -> list[Tensor]:
    found = adaptive.lamb_direction_(*kinds, **SETTINGS, decay=decay)  # type: ignore[arg-type]
    return [*found, *(x for kind in kinds for x in kind)]


def copied(tensors: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[x.clone() for x in each] for each in tensors]


def kinds_of(sizes: tuple[int, ...]) -> list[list[Tensor]]:
    return [list(kind) for kind in zip(*map(states, sizes), strict=True)]


def three_directions(decay: float) -> list[Tensor]:
    kinds, found = kinds_of(SIZES), list[Tensor]()
    for turn in range(3):
        found += [x.clone() for x in directions_of(kinds, decay)]
        kinds[0] = [strange(n, n + turn) for n in SIZES]
    return found


def two_steps(decay: float) -> list[Tensor]:
    directions, before, frozen, _, parameters = kinds_of(SIZES)
    adaptive.scaled_step_(parameters, directions, drawn(len(SIZES), 3).abs(), rate=0.3)
    momenta = kinds_of(SIZES)[0]
    adaptive.frozen_adam_step_(parameters, before, momenta, frozen, eps=1e-6, decay=decay, rate=0.3)
    assert all(same_bits(one, other) for one, other in zip(before, momenta, strict=True))
    return [*parameters, *before]


@pytest.mark.usefixtures("by_c")
@for_each(product([three_directions, two_steps], [0.0, 0.1]))
def test_c_and_torch_give_the_same_bits(case: tuple[Callable[[float], list[Tensor]], float]) -> None:
    agree(*case)


def gentle(n: int) -> list[Tensor]:
    """States without anything strange, in fp64."""
    momentum, before, frozen, fresh, x = (drawn(n, n + seed).double() for seed in range(5))
    return [momentum, before, frozen.square(), fresh.square(), x]


@pytest.mark.usefixtures("implementation")
@for_each(product([1, 7, 500], [torch.float32, torch.float64]))
def test_directions_are_those_of_the_equations(case: tuple[int, torch.dtype]) -> None:
    n, dtype = case
    m, old, v, w, x = gentle(n)
    gradient = (m - 0.9 * old) / (1 - 0.9)
    w = 0.99 * w + (1 - 0.99) * gradient.square()
    plain = m / (v.sqrt() + 1e-6)
    whole = plain + 0.1 * x
    expected = [(v.sqrt() + 1e-6).div(w.sqrt() + 1e-6).max(), plain.norm(), whole.norm(), whole, m, v, w, x]
    found = directions_of([[each.to(dtype)] for each in gentle(n)], 0.1)
    assert all(each.dtype == dtype for each in found)
    loose = 1e-5 if dtype == torch.float32 else 1e-12
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.reshape(-1).double(), other.reshape(-1), rtol=loose, atol=loose)


@pytest.mark.usefixtures("implementation")
def test_steps_are_those_of_the_equations() -> None:
    m, old, v, _, x = (each.float() for each in gentle(300))
    far, ratio = x.clone(), torch.tensor([0.7])
    adaptive.scaled_step_([far], [m.clone()], ratio, rate=0.01)
    torch.testing.assert_close(far, x - 0.01 * 0.7 * m)
    near = x.clone()
    adaptive.frozen_adam_step_([near], [old], [m], [v], eps=1e-6, decay=0.1, rate=0.01)
    torch.testing.assert_close(near, x - 0.01 * (m / (v.sqrt() + 1e-6) + 0.1 * x))
    assert same_bits(old, m)


@pytest.mark.usefixtures("implementation")
@for_each([3, 16, 21, 150])
def test_the_largest_ratio_is_found_wherever_it_is_and_elements_that_do_not_exist_have_none(n: int) -> None:
    for place in range(n):
        frozen, fresh = torch.full((n,), 0.25), torch.full((n,), 100.0)
        frozen[place] = 1.0
        nothing = torch.zeros(n)
        ratio, *_ = directions_of([[nothing.clone()], [nothing.clone()], [frozen], [fresh], [nothing]], 0.0)
        assert float(ratio) == pytest.approx(1 / (100 * 0.99) ** 0.5, rel=1e-5)


@pytest.mark.usefixtures("implementation")
@for_each([0, 5, 40, 199])
def test_nan_reaches_every_result(place: int) -> None:
    kinds = [[each.float(), each.float()] for each in gentle(200)]
    kinds[0][1][place] = math.nan
    ratio, plain, whole, *_ = directions_of(copied(kinds), 0.1)
    for each in (ratio, plain, whole):
        assert bool(each[0].isfinite()) and bool(each[1].isnan())


@pytest.mark.usefixtures("implementation")
@for_each([0.0, 0.1])
def test_tensors_may_lie_anywhere_and_in_any_order(decay: float) -> None:
    plain = [[each.float().view(2, 3, 5, 5)] for each in gentle(150)]
    apart = [[torch.cat([torch.zeros(1), x.reshape(-1)])[1:].view(x.shape) for x in each] for each in plain]
    last = [[x.clone(memory_format=torch.channels_last) for x in each] for each in plain]
    expected = directions_of(plain, decay)
    for one, other in zip(directions_of(apart, decay), expected, strict=True):
        assert same_bits(one.contiguous(), other)
    # Only the order in which norms are summed is another.
    for one, other in zip(directions_of(last, decay), expected, strict=True):
        torch.testing.assert_close(one.contiguous(), other, rtol=1e-6, atol=0)


@pytest.mark.usefixtures("implementation")
def test_the_dtype_that_new_tensors_have_makes_no_difference() -> None:
    kinds = [[each.float()] for each in gentle(40)]
    expected = directions_of(copied(kinds), 0.1)
    torch.set_default_dtype(torch.float64)
    try:
        found = directions_of(kinds, 0.1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))


def test_lists_that_do_not_fit_are_refused() -> None:
    x, y = torch.zeros(3), torch.zeros(4)
    with pytest.raises(ConfigError, match="2 elements: must be 1"):
        adaptive.scaled_step_([x], [x, x], torch.ones(1), rate=1.0)
    with pytest.raises(ConfigError, match=r"shape \[4\] for a tensor of shape \[3\]"):
        adaptive.frozen_adam_step_([x], [x], [y], [x], eps=1e-6, decay=0.0, rate=1.0)
    with pytest.raises(ConfigError, match="ratios has 2 elements: must be 1"):
        adaptive.scaled_step_([x], [x], torch.ones(2), rate=1.0)
    with pytest.raises(ConfigError, match=r"shape \[4\] for a tensor of shape \[3\]"):
        adaptive.lamb_direction_([x], [x], [x], [x], [y], betas=(0.9, 0.99), eps=1e-6, decay=0.0)
