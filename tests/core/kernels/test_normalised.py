# SPDX-License-Identifier: Apache-2.0
"""Normalisation of many models: C and torch give the same bits, and torch's own functions the same for each model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.core.kernels.natives import agree, same
from thinwire.core.kernels import normalised
from thinwire.errors import ConfigError

MODELS, SAMPLES, CHANNELS, EPS = 3, 5, 6, 1e-2


def rows_to_normalise(n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An input, a gain, a shift and a gradient; one row hardly varies."""
    draw = torch.Generator().manual_seed(n)
    x, gradient = (torch.randn(3, 6, n, generator=draw) * 5 + 2 for _ in range(2))
    x[1, 2] = 7.0
    gain, shift = (torch.randn(3, n, generator=draw) for _ in range(2))
    return x, gain, shift, gradient


def layer_norms(n: int, shared: bool) -> list[Tensor]:
    x, gain, shift, gradient = rows_to_normalise(n)
    x = x[:1].expand_as(x) if shared else x
    found = normalised.layer_norm(x, gain, shift, eps=1e-5)
    whole = normalised.layer_norm_back(gradient, x, gain, *found[1:])
    nothing, *others = normalised.layer_norm_back(gradient, x, gain, *found[1:], trained=False)
    assert nothing is None and all(map(same, others, whole[1:]))
    return [*found, *whole]  # type: ignore[list-item]


@pytest.mark.usefixtures("by_c")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("n", [1, 7, 16, 33, 64, 112, 128, 200, 1000])
def test_layer_normalisation_is_bit_by_bit_that_of_torch(n: int, shared: bool) -> None:
    agree(layer_norms, n, shared)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("n", [3, 64, 2000])
def test_layer_normalisation_and_its_gradients_are_torch_s_for_each_model(n: int) -> None:
    x, gain, shift, gradient = rows_to_normalise(n)
    found, mean, scale = normalised.layer_norm(x, gain, shift, eps=1e-2)
    ours = normalised.layer_norm_back(gradient, x, gain, mean, scale)
    for place in range(len(x)):
        own = [tensor[place].double().requires_grad_() for tensor in (x, gain, shift)]
        wanted = torch.nn.functional.layer_norm(own[0], (n,), own[1], own[2], 1e-2)
        torch.testing.assert_close(found[place].double(), wanted.detach(), rtol=1e-5, atol=1e-5)
        for mine, theirs in zip(ours, torch.autograd.grad(wanted, own, gradient[place].double()), strict=True):
            torch.testing.assert_close(mine[place].double(), theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


def test_rows_that_cannot_be_normalised_are_refused() -> None:
    x, gain = torch.zeros(2, 4, 3), torch.ones(2, 3)
    for wrong, words in (
        ((x[0], gain, gain), "shapes"),
        ((x, gain[:1], gain), r"\[1, 3\]"),
        ((x.double(), gain, gain), "float64"),
        ((x.transpose(0, 1)[:2], gain, gain), "contiguous"),
        ((x[:, :0], gain, gain), "no numbers"),
    ):
        with pytest.raises(ConfigError, match=words):
            normalised.layer_norm(*wrong, eps=1e-5)
    found = normalised.layer_norm(x, gain, gain, eps=1e-5)
    with pytest.raises(ConfigError, match=r"gradient of \[2, 1, 3\]"):
        normalised.layer_norm_back(x[:, :1], x, gain, *found[1:])
    for moments, words in (((found[1].double(), found[2]), "float64"), ((found[1], found[2][:1]), "moments of")):
        with pytest.raises(ConfigError, match=words):
            normalised.layer_norm_back(x, x, gain, *moments)


@pytest.mark.usefixtures("implementation")
def test_rows_of_several_axes_are_normalised_as_flat_ones() -> None:
    x, gain, shift, gradient = rows_to_normalise(12)
    deep, own, moved = x.view(3, 2, 3, 4, 3), gain.view(3, 4, 3), shift.view(3, 4, 3)
    flat, apart = normalised.layer_norm(x, gain, shift, eps=1e-5), normalised.layer_norm(deep, own, moved, eps=1e-5)
    assert apart[0].shape == deep.shape and all(
        same(one.view_as(other), other) for one, other in zip(apart, flat, strict=True)
    )
    strided = gradient.transpose(0, 1).contiguous().transpose(0, 1).unflatten(1, (2, 3)).unflatten(3, (4, 3))
    back = normalised.layer_norm_back(gradient, x, gain, *flat[1:])
    found = normalised.layer_norm_back(strided, deep, own, *apart[1:])
    assert [each.shape for each in found] == [deep.shape, own.shape, own.shape]
    assert all(same(one.reshape(other.shape), other) for one, other in zip(found, back, strict=True))


# -- by channels ------------------------------------------------------------------------------------------------------

LAYOUTS = {"models first": 0, "samples first": 1, "shared": 1, "shared, models first": 0}


def blocks_to_normalise(places: int, layout: str, samples: int = SAMPLES) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An input, a gain, a shift and a gradient, as the layout has them; one sample, and one channel, hardly vary."""
    draw = torch.Generator().manual_seed(places)
    shape = (MODELS, samples, CHANNELS, places)
    x, gradient = (torch.randn(shape, generator=draw) * 5 + 2 for _ in range(2))
    x[0, 0], x[1, :, 2] = 7.0, -3.0
    gain, shift = (torch.randn(MODELS, CHANNELS, generator=draw) for _ in range(2))
    axis = LAYOUTS[layout]
    lying = x[:1].contiguous().expand(shape) if layout.startswith("shared") else x
    lying, gradient = (each.transpose(0, axis) for each in (lying, gradient))
    return lying if layout.startswith("shared") else lying.contiguous(), gain, shift, gradient.contiguous()


def settings_of(layout: str) -> dict[str, Any]:
    return {"axis": LAYOUTS[layout], "eps": EPS}


def batch_norms(layout: str, places: int) -> list[Tensor]:
    settings, back = settings_of(layout), normalised.batch_norm_back
    x, gain, shift, gradient = blocks_to_normalise(places, layout)
    found = normalised.batch_norm(x, gain, shift, **settings)
    whole = back(gradient, x, gain, *found[1:], **settings)
    apart = torch.stack([gradient, gradient], -1)[..., 0]
    assert all(map(same, back(apart, x, gain, *found[1:], **settings), whole))
    nothing, *others = back(gradient, x, gain, *found[1:], **settings, trained=False)
    assert nothing is None and all(map(same, others, whole[1:]))
    return [*found, *whole]  # type: ignore[list-item]


@pytest.mark.usefixtures("by_c")
@pytest.mark.parametrize("places", [1, 7, 33, 300])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_channels_are_bit_by_bit_those_of_torch(layout: str, places: int) -> None:
    agree(batch_norms, layout, places)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("samples", [1, SAMPLES])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_channels_and_their_gradients_are_torch_s_for_each_model(layout: str, samples: int) -> None:
    settings, axis = settings_of(layout), LAYOUTS[layout]
    x, gain, shift, gradient = blocks_to_normalise(40, layout, samples)
    found, *moments = normalised.batch_norm(x, gain, shift, **settings)
    of_x, *others = normalised.batch_norm_back(gradient, x, gain, *moments, **settings)
    for place in range(MODELS):
        given, back = (each.select(axis, place).double() for each in (x, gradient))
        own = [given.requires_grad_(), *(each[place].double().requires_grad_() for each in (gain, shift))]
        wanted = F.batch_norm(own[0], None, None, own[1], own[2], True, 0.0, EPS)
        torch.testing.assert_close(found.select(axis, place).double(), wanted.detach(), rtol=1e-5, atol=1e-5)
        ours = of_x.select(axis, place), *(each[place] for each in others)
        for mine, theirs in zip(ours, torch.autograd.grad(wanted, own, back), strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.usefixtures("by_c")
def test_places_of_several_axes_are_one_after_another() -> None:
    settings = settings_of("samples first")
    forward, backward = normalised.batch_norm, normalised.batch_norm_back
    x, gain, shift, gradient = blocks_to_normalise(12, "samples first")
    deep, back = x.unflatten(3, (3, 4)), gradient.unflatten(3, (3, 4))
    flat, found = forward(x, gain, shift, **settings), forward(deep, gain, shift, **settings)
    assert found[0].shape == deep.shape and all(same(a.view_as(b), b) for a, b in zip(found, flat, strict=True))
    flat, found = (
        backward(gradient, x, gain, *flat[1:], **settings),
        backward(back, deep, gain, *flat[1:], **settings),
    )
    assert found[0].shape == deep.shape and all(same(a.view_as(b), b) for a, b in zip(found, flat, strict=True))


def test_blocks_that_cannot_be_normalised_are_refused() -> None:
    x, gain, shift, gradient = blocks_to_normalise(4, "models first")
    for wrong, words in (
        ((x[0, 0], gain, shift), "shapes"),
        ((x, gain[:, :1], shift), r"\[3, 1\]"),
        ((x.double(), gain, shift), "float64"),
        ((x[:, :0], gain, shift), "no numbers"),
        ((x.transpose(2, 3).contiguous().transpose(2, 3), gain, shift), "contiguous"),
        ((torch.stack([x, x], 2)[:, :, 0], gain, shift), "contiguous"),
    ):
        with pytest.raises(ConfigError, match=words):
            normalised.batch_norm(*wrong, axis=0, eps=EPS)
    with pytest.raises(ConfigError, match="samples, models, channels"):
        normalised.batch_norm(x, gain, shift, axis=1, eps=EPS)
    with pytest.raises(ConfigError, match="axis=2"):
        normalised.batch_norm(x, gain, shift, axis=2, eps=EPS)
    moments = normalised.batch_norm(x, gain, shift, axis=0, eps=EPS)[1:]
    with pytest.raises(ConfigError, match="gradient of"):
        normalised.batch_norm_back(gradient[:, :1], x, gain, *moments, axis=0, eps=EPS)
    with pytest.raises(ConfigError, match="float64"):
        normalised.batch_norm_back(gradient, x, gain, *(each.double() for each in moments), axis=0, eps=EPS)
