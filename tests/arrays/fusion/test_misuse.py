# SPDX-License-Identifier: Apache-2.0
"""What an array of models cannot do as separate runs would is done right or refused, and never wrong in silence."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.oracles.fusion import copies, make, seeded
from tests.rules import refusals
from thinwire.arrays import fusion
from thinwire.errors import ConfigError

X = torch.linspace(-1, 1, 6, dtype=torch.float64).view(3, 2)


def pairs(count: int = 2) -> list[nn.Module]:
    return make(lambda: nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), count)


# -- hooks -------------------------------------------------------------------------------------------------------------


def double(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return 2 * output


def shift(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0] + 1,)


@pytest.mark.parametrize("path", ["", "0"])
@pytest.mark.parametrize("loop", [False, ["0"], True], ids=str)
def test_hooks_run_as_in_separate_models(path: str, loop: Any) -> None:
    models = pairs()
    for model in models:
        model.get_submodule(path).register_forward_hook(double)
        model.get_submodule(path).register_forward_pre_hook(shift)
    array = fusion.fuse(copies(models), loop=loop)
    torch.testing.assert_close(array(X), torch.stack([model(X) for model in models]))


def hooked(register: Callable[[nn.Module, int], object]) -> list[nn.Module]:
    models = pairs()
    for index, model in enumerate(models):
        register(model, index)
    return models


def scaled(model: nn.Module, index: int) -> None:
    model[0].register_forward_hook(lambda module, inputs, output: output * (index + 1))


def masked(model: nn.Module, index: int) -> None:
    model[0].weight.register_hook(lambda gradient: gradient * index)


test_hooks_that_an_array_would_lose_are_refused = refusals(
    [
        (lambda: fusion.fuse(hooked(scaled)), r"layer '0' \(Linear\): its hooks are others in the other"),
        (lambda: fusion.fuse(hooked(lambda model, i: i and model[0].register_forward_hook(double))), "its hooks"),
        (lambda: fusion.fuse(hooked(masked)), r"0.weight of model 0 has a hook of its gradient"),
        (
            lambda: fusion.fuse(hooked(lambda model, i: model[0].register_full_backward_hook(lambda *_: None))),
            "layer '0' of model 0 has a backward hook",
        ),
        (lambda: fusion.fuse([torch.compile(model, backend="eager") for model in pairs()]), "is compiled"),
        (lambda: copy.deepcopy(fusion.fuse(pairs())), "cannot be copied. Fuse its models again"),
        (lambda: fusion.fuse(pairs()).insert(1, hooked(scaled)[0]), "slot 1 cannot hold this model"),
        (
            lambda: fusion.fuse(
                differing(lambda model, i: model[0].register_forward_hook(double) if i else 0), loop=["0"]
            ),
            "layer '0' has other hooks",
        ),
    ]
)


def differing(register: Callable[[nn.Module, int], object]) -> list[nn.Module]:
    models = [nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1)) for width in (3, 4)]
    models = [nn.Sequential(model) for model in models]
    for index, model in enumerate(models):
        register(model, index)
    return models


def test_a_forward_that_replaces_a_layer_s_own_runs_in_a_loop_too() -> None:
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return -nn.functional.linear(x, self.weight, self.bias)

    models = pairs()
    for model in models:
        model[0].forward = types.MethodType(forward, model[0])
    expected = torch.stack([model(X) for model in models])
    for loop in ([], ["0"], True):
        array = fusion.fuse(copies(models), loop=loop)
        torch.testing.assert_close(array(X), expected)
        array.select([0, 1])
        torch.testing.assert_close(array(X), expected)


# -- optimizers --------------------------------------------------------------------------------------------------------


def test_an_optimizer_that_did_not_follow_a_selection_is_refused() -> None:
    array = fusion.fuse(pairs(3))
    optimizer = fusion.SGD(array.parameters(), lr=0.1)
    kept = array.select([2, 0])
    array(X).sum().backward()
    with pytest.raises(ConfigError, match="no longer has a parameter of shape"):
        optimizer.step()
    optimizer.select(kept)
    before = array.state_dict()["0.weight"].clone()
    optimizer.step()
    assert not torch.equal(before, array.state_dict()["0.weight"])


def test_a_scaler_of_torch_which_has_one_scale_for_all_models_is_refused() -> None:
    array = fusion.fuse(pairs())
    optimizer, scaler = fusion.SGD(array.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(array(X).sum()).backward()
    before = array.state_dict()["0.weight"].clone()
    with pytest.raises(ConfigError, match=r"one scale for all models.*fusion.GradScaler\(2\)"):
        scaler.step(optimizer)
    assert torch.equal(before, array.state_dict()["0.weight"])
    optimizer.step()
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)


def test_a_scheduler_of_torch_which_knows_one_rate_for_all_models_is_refused() -> None:
    array = fusion.fuse(pairs())
    optimizer = fusion.SGD(array.parameters(), lr=[0.1, 0.2])
    with pytest.raises(ConfigError, match=r"has one for each model\. Use fusion\.Schedules"):
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    fusion.Schedules(optimizer, lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.5)).step()
    assert optimizer.param_groups[0]["lr"].tolist() == [0.05, 0.1]


def test_hyperparameters_may_be_set_to_a_number_or_a_list() -> None:
    models = pairs()
    array = fusion.fuse(copies(models))
    optimizer = fusion.SGD(array.parameters(), lr=0.1)
    array(X).sum().backward()
    optimizer.param_groups[0].update(lr=[0.5, 0.25], weight_decay=0.1)
    optimizer.step()
    for index, model in enumerate(models):
        single = torch.optim.SGD(model.parameters(), lr=[0.5, 0.25][index], weight_decay=0.1)
        model(X).sum().backward()
        single.step()
        torch.testing.assert_close(array.extract(index).state_dict(), model.state_dict())
    optimizer.param_groups[0]["lr"] = [0.5, 0.25, 0.1]
    with pytest.raises(ConfigError, match=r"lr of shape \[3\]"):
        optimizer.step()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).abs().sum()


def test_complex_parameters_are_refused() -> None:
    array = fusion.fuse([Complex(), Complex()])
    with pytest.raises(ConfigError, match="is complex"):
        fusion.Adam(array.parameters(), lr=0.1)


# -- attention ---------------------------------------------------------------------------------------------------------


class Causal(nn.Module):
    """Asks for the causal mask, and gives another one."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.weight = rate, nn.Parameter(torch.randn(2, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        q, mask = x[None] @ self.weight, torch.eye(len(x), dtype=torch.bool)
        return nn.functional.scaled_dot_product_attention(q, q, q, mask, self.rate, is_causal=True)


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_mask_besides_the_causal_one_is_refused_as_in_torch(rate: float, loop: bool) -> None:
    with pytest.raises(RuntimeError, match="attn_mask"):
        Causal(rate)(X)
    with pytest.raises(ConfigError, match=r"attn_mask and is_causal=True.*Put the causal mask into attn_mask"):
        fusion.fuse([Causal(rate), Causal(rate)], loop=loop)(X)


# -- parameters that are reached in another way than by their module -----------------------------------------------


class Aliased(nn.Module):
    """Keeps its parameter in a list too, which no tool that replaces parameters can find."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.weights = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[0].t()


class Checkpointed(nn.Module):
    """Computes its layer again in the backward pass."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(2, 4), nn.Linear(4, 1)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(lambda y: torch.tanh(self.layer(y)), x, use_reentrant=self.reentrant))


def test_a_parameter_that_is_held_in_an_attribute_is_refused() -> None:
    array = fusion.fuse([Aliased()] * 2)
    with pytest.raises(ConfigError, match="in another way than by its module"):
        array(torch.ones(1, 2))


@pytest.mark.parametrize("loop", [False, True])
def test_activation_checkpoints_within_models_are_refused(loop: bool) -> None:
    array = fusion.fuse([Checkpointed() for _ in range(2)], loop=loop)
    with pytest.raises(ConfigError, match=r"torch\.utils\.checkpoint within the models of an array"):
        array(torch.ones(1, 2))
    # Torch reports this one.
    old = fusion.fuse([Checkpointed(reentrant=True) for _ in range(2)], loop=loop)
    with pytest.raises(ConfigError, match="the second pass of a checkpoint" if loop else "autograd.Function"):
        old(torch.ones(1, 2, requires_grad=True)).sum().backward()


def test_a_checkpoint_around_an_array_computes_the_same_gradients() -> None:
    models = make(lambda: nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1)), 2)
    found: list[list[Tensor]] = []
    for run in (lambda array: array(X), lambda array: checkpoint(array, X, use_reentrant=False)):
        array = fusion.fuse(copies(models))
        with seeded(3):
            run(array).sum().backward()
        found.append([parameter.grad for parameter in array.parameters()])
    torch.testing.assert_close(found[0], found[1])
    with pytest.raises(ConfigError, match="would draw other numbers"):
        checkpoint(fusion.fuse(models, seeds=[1, 2]), X, use_reentrant=False)
