"""Normalisation of many models: C and torch give the same bits, and torch's own functions the same for each model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.errors import ConfigError
from laconic.kernels import normalised
from laconic.kernels.reference import normalised as reference
from tests.kernels import by_c as by_c
from tests.kernels import library as library
from tests.kernels import same

MODELS, SAMPLES, CHANNELS, EPS = 3, 5, 6, 1e-2


def rows_to_normalise(n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An input, a gain, a shift and a gradient; one row hardly varies."""
    draw = torch.Generator().manual_seed(n)
    x, gradient = (torch.randn(3, 6, n, generator=draw) * 5 + 2 for _ in range(2))
    x[1, 2] = 7.0
    gain, shift = (torch.randn(3, n, generator=draw) for _ in range(2))
    return x, gain, shift, gradient


@pytest.mark.usefixtures("by_c")
@pytest.mark.parametrize("n", [1, 7, 16, 33, 128, 200, 1000])
def test_layer_normalisation_is_bit_by_bit_that_of_torch(n: int) -> None:
    x, gain, shift, gradient = rows_to_normalise(n)
    ours = normalised.layer_norm(x, gain, shift, eps=1e-5)
    theirs = reference.layer_norm(x, gain, shift, 1e-5)
    assert all(same(one, other) for one, other in zip(ours, theirs, strict=True))
    ours = normalised.layer_norm_back(gradient, x, gain, *ours[1:])
    theirs = reference.layer_norm_back(gradient, x, gain, *theirs[1:])
    assert all(same(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("n", [3, 64, 2000])
def test_layer_normalisation_and_its_gradients_are_torch_s_for_each_model(
    n: int, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LACONIC_NATIVE", native)
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
    ):
        with pytest.raises(ConfigError, match=words):
            normalised.layer_norm(*wrong, eps=1e-5)
    found = normalised.layer_norm(x, gain, gain, eps=1e-5)
    with pytest.raises(ConfigError, match="gradient of shape"):
        normalised.layer_norm_back(x[:, :1], x, gain, *found[1:])


# -- by groups and by channels -----------------------------------------------------------------------------------------

LAYOUTS = ("models first", "samples first", "shared", "apart")


def blocks_to_normalise(places: int, layout: str, samples: int = SAMPLES) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An input, a gain, a shift and a gradient; one group, and one channel, hardly vary."""
    draw = torch.Generator().manual_seed(places)
    shape = (MODELS, samples, CHANNELS, places)
    x, gradient = (torch.randn(shape, generator=draw) * 5 + 2 for _ in range(2))
    x[0, 0], x[1, :, 2] = 7.0, -3.0
    if layout == "samples first":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "shared":
        x = x[:1].expand(shape)
    elif layout == "apart":
        x = torch.stack([x, x], 2)[:, :, 0]
    gain, shift = (torch.randn(MODELS, CHANNELS, generator=draw) for _ in range(2))
    return x, gain, shift, gradient


def functions(groups: int | None) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], dict[str, Any]]:
    """Forward, backward, torch's own for one model, and the settings; None are the channels over all samples."""

    def batched(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, gain, shift, True, 0.0, EPS)

    def grouped(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        return F.group_norm(x, groups or 1, gain, shift, EPS)

    if groups is None:
        return normalised.batch_norm, normalised.batch_norm_back, batched, {"eps": EPS}
    return normalised.group_norm, normalised.group_norm_back, grouped, {"groups": groups, "eps": EPS}


@pytest.mark.usefixtures("by_c")
@pytest.mark.parametrize("places", [1, 7, 33, 300])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("groups", [1, 2, CHANNELS, None])
def test_groups_and_channels_are_bit_by_bit_those_of_torch(groups: int | None, layout: str, places: int) -> None:
    forward, backward, _, settings = functions(groups)
    theirs, back = getattr(reference, forward.__name__), getattr(reference, backward.__name__)
    x, gain, shift, gradient = blocks_to_normalise(places, layout)
    found, wanted = forward(x, gain, shift, **settings), theirs(x, gain, shift, *settings.values())
    assert all(same(one.contiguous(), other.contiguous()) for one, other in zip(found, wanted, strict=True))
    ours, wanted = (
        backward(gradient, x, gain, *found[1:], **settings),
        back(gradient, x, gain, *found[1:], *settings.values()),
    )
    assert all(same(one.contiguous(), other.contiguous()) for one, other in zip(ours, wanted, strict=True))
    apart = [torch.stack([each, each], -1)[..., 0] for each in found[1:]]
    assert all(map(same, backward(gradient, x, gain, *apart, **settings)[1:], ours[1:]))
    nothing, *others = backward(gradient, x, gain, *found[1:], **settings, trained=False)
    assert nothing is None and all(map(same, others, ours[1:]))


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("samples", [1, SAMPLES])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("groups", [1, 2, CHANNELS, None])
def test_groups_and_channels_and_their_gradients_are_torch_s_for_each_model(
    groups: int | None, layout: str, samples: int, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LACONIC_NATIVE", native)
    forward, backward, by_torch, settings = functions(groups)
    x, gain, shift, gradient = blocks_to_normalise(40, layout, samples)
    found, *moments = forward(x, gain, shift, **settings)
    ours = backward(gradient, x, gain, *moments, **settings)
    for place in range(MODELS):
        own = [tensor[place].double().requires_grad_() for tensor in (x, gain, shift)]
        wanted = by_torch(*own)
        torch.testing.assert_close(found[place].double(), wanted.detach(), rtol=1e-5, atol=1e-5)
        for mine, theirs in zip(ours, torch.autograd.grad(wanted, own, gradient[place].double()), strict=True):
            torch.testing.assert_close(mine[place].double(), theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.usefixtures("by_c")
def test_what_is_normalised_lies_as_it_was_given() -> None:
    for layout, samples_first in zip(LAYOUTS, (False, True, True, False), strict=True):
        x, gain, shift, _ = blocks_to_normalise(4, layout)
        found = normalised.group_norm(x, gain, shift, groups=2, eps=EPS)[0]
        assert (found.transpose(0, 1) if samples_first else found).is_contiguous()


def test_blocks_that_cannot_be_normalised_are_refused() -> None:
    x, gain, shift, gradient = blocks_to_normalise(4, "models first")
    for wrong, words in (
        ((x[0], gain, shift), "shapes"),
        ((x, gain[:, :1], shift), r"\[3, 1\]"),
        ((x.double(), gain, shift), "float64"),
        ((x[:, :0], gain, shift), "no numbers"),
        ((x.transpose(2, 3).contiguous().transpose(2, 3), gain, shift), "contiguous"),
    ):
        with pytest.raises(ConfigError, match=words):
            normalised.group_norm(*wrong, groups=2, eps=EPS)
        with pytest.raises(ConfigError, match=words):
            normalised.batch_norm(*wrong, eps=EPS)
    with pytest.raises(ConfigError, match="groups=4 of 6 channels"):
        normalised.group_norm(x, gain, shift, groups=4, eps=EPS)
    moments = normalised.batch_norm(x, gain, shift, eps=EPS)[1:]
    with pytest.raises(ConfigError, match="gradient of"):
        normalised.batch_norm_back(gradient[:, :1], x, gain, *moments, eps=EPS)
