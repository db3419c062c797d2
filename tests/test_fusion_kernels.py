"""The ways of computing that are written by hand are torch's own mathematics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.fusion import Each, choice, fuse
from laconic.fusion.batch import Batch, each

MODELS = 3


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def by_way(monkeypatch: pytest.MonkeyPatch, wanted: str) -> list[str]:
    """From now on that way is taken wherever it is offered; returns the names of what it was taken for."""
    taken: list[str] = []

    def only(name: str, ways: dict[str, Callable[..., Batch]], values: Any, settings: Any = ()) -> Batch:
        if wanted in ways:
            taken.append(name)
        return ways.get(wanted, next(iter(ways.values())))(*values)

    for module in ("dense", "losses", "normalisation"):
        monkeypatch.setattr(f"laconic.fusion.{module}.fastest", only)
    return taken


def gradients(loss: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """First derivatives, and the derivatives of the sum of their squares."""
    first = torch.autograd.grad(loss, tensors, create_graph=True)
    second = torch.autograd.grad(sum(one.square().sum() for one in first), tensors, allow_unused=True)  # type: ignore
    return (*first, *(each for each in second if each is not None))


@pytest.mark.parametrize("way", ["apart", "loop", "by hand"])
def test_layer_norm_by_every_way_has_torchs_first_and_second_derivatives(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [torch.nn.LayerNorm(5).double() for _ in range(MODELS)]
    for place, model in enumerate(models):
        torch.nn.init.constant_(model.weight, 1.5 + place)
        torch.nn.init.constant_(model.bias, -1.0 * place)
    x, taken = drawn(MODELS, 4, 2, 5).requires_grad_(), by_way(monkeypatch, way)
    array = fuse(models)
    found = gradients(array(Each(x)).pow(3).sum(), [x, *array.parameters()])
    assert taken
    rows = [row.detach().requires_grad_() for row in x]
    for place, (model, row) in enumerate(zip(models, rows, strict=True)):
        wanted = gradients(model(row).pow(3).sum(), [row, *model.parameters()])
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours[place], theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("way", ["batched", "side by side"])
def test_linear_by_every_way_has_torchs_derivatives_laid_out_as_the_weights(
    way: str, bias: bool, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [torch.nn.Linear(5, 3, bias=bias).double() for _ in range(MODELS)]
    x = drawn(MODELS, 4, 5).requires_grad_()
    by_way(monkeypatch, way)
    array = fuse(models)
    given = x if own else x[0].detach().requires_grad_()
    found = gradients(array(Each(given) if own else given).pow(3).sum(), [given, *array.parameters()])
    assert found[1].is_contiguous()
    rows = [row.detach().requires_grad_() for row in (x if own else [x[0]] * MODELS)]
    for place, (model, row) in enumerate(zip(models, rows, strict=True)):
        wanted = gradients(model(row).pow(3).sum(), [row, *model.parameters()])
        mine = [one[place] for one in found[1 : 2 + bias]]
        for ours, theirs in zip(mine, wanted[1 : 2 + bias], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [-100, 1])
@pytest.mark.parametrize("own", [True, False])
def test_cross_entropy_by_hand_is_torchs(
    reduction: str, ignored: int, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = by_way(monkeypatch, "by hand")
    array = fuse([torch.nn.Linear(1, 1) for _ in range(MODELS)])
    logits = drawn(MODELS, 6, 4, 2).requires_grad_()
    targets = torch.randint(0, 4, (MODELS, 6, 2), generator=torch.Generator().manual_seed(1))
    targets[1, 0, 0] = ignored

    def loss(output: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(output, wanted, ignore_index=ignored, reduction=reduction)

    found = array.map(loss, Each(logits), Each(targets) if own else targets[1])
    assert taken == ["cross_entropy"]
    context = each(loss, MODELS, Batch(logits, 0), Batch(targets, 0) if own else targets[1]).tensor
    torch.testing.assert_close(found, context, rtol=1e-12, atol=1e-12)
    ours, theirs = gradients(found.square().sum(), [logits]), gradients(context.square().sum(), [logits])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_a_large_logit_does_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    by_way(monkeypatch, "by hand")
    array = fuse([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])
    logits = torch.tensor([[[1000.0, 0.0]], [[0.0, -1000.0]]])
    found = array.losses(F.cross_entropy, logits, torch.tensor([1]))
    torch.testing.assert_close(found, torch.tensor([1000.0, 1000.0]))


def test_under_autocast_products_are_torchs_own() -> None:
    array = fuse([torch.nn.Linear(4, 4) for _ in range(2)])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = array(torch.ones(3, 4))
    assert found.dtype == torch.bfloat16
    found.float().sum().backward()
    assert all(parameter.grad is not None for parameter in array.parameters())
    assert choice.choices()
