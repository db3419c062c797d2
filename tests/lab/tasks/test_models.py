# SPDX-License-Identifier: Apache-2.0
"""Models: sizes that match their names, and initial parameters that depend on a generator alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from thinwire.errors import ConfigError
from thinwire.lab.tasks.models.base import Network, build
from thinwire.lab.tasks.models.classifiers import (
    BinaryLogistic,
    Convolutional,
    Logistic,
    Perceptron,
    ResNet,
    WordBag,
)
from thinwire.lab.tasks.models.gpt import GPT, GPT_SIZES, GPTSize

TINY = GPTSize(layers=2, width=16, heads=2)
NETWORKS: dict[str, Callable[[], Network]] = {
    "gpt": partial(GPT, TINY, context=8),
    "resnet": partial(ResNet, 8),
    "logistic": partial(Logistic, 4, 3),
    "binary": partial(BinaryLogistic, 4),
    "perceptron": partial(Perceptron, 4, 5, 3),
    "convolutional": partial(Convolutional, channels=1, side=8, width=4, classes=3),
    "bag": partial(WordBag, 20, 8, 4),
}


def count(network: Callable[[], Network]) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(network, seed=0).parameters())


@pytest.mark.parametrize("size", ["0.5m", "1m", "6m", "25m"])
def test_a_gpt_has_the_parameters_of_its_name_within_a_tenth(size: str) -> None:
    assert count(partial(GPT, GPT_SIZES[size])) == pytest.approx(1e6 * float(size[:-1]), rel=0.1)


def test_the_largest_gpt_has_the_blocks_of_gpt2_small() -> None:
    with torch.device("meta"):
        model = build(partial(GPT, GPT_SIZES["124m"]), seed=0)
    trunk = sum(parameter.numel() for parameter in (*model.blocks.parameters(), *model.norm.parameters()))
    assert trunk + (50257 + 1024) * 768 == 124_439_808
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(85.5e6, rel=0.01)


@pytest.mark.parametrize(("depth", "parameters"), [(8, 77_850), (20, 272_282)])
def test_a_resnet_has_the_layers_of_its_name(depth: int, parameters: int) -> None:
    model = build(partial(ResNet, depth), seed=0)
    deep = [
        m for m in model.modules() if isinstance(m, nn.Linear) or (isinstance(m, nn.Conv2d) and m.padding == (1, 1))
    ]
    assert len(deep) == depth
    assert count(partial(ResNet, depth)) == parameters


@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_and_buffer_comes_from_the_generator(name: str) -> None:
    model = NETWORKS[name]()
    for tensor in model.state_dict().values():
        tensor.fill_(77)
    model.initialise_(torch.Generator().manual_seed(0))
    again = build(NETWORKS[name], seed=0)
    for (key, tensor), other in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), key
        assert torch.isfinite(tensor.float()).all(), key


@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model = build(NETWORKS[name], seed=0)
    words = torch.arange(24).reshape(4, 6) % 19 + 1
    inputs = {
        "gpt": (words,),
        "resnet": (torch.rand(4, 3, 32, 32),),
        "convolutional": (torch.rand(4, 1, 8, 8),),
        "bag": (words,),
    }.get(name, (torch.rand(4, 4),))
    logits = model(*inputs)
    F.cross_entropy(logits.flatten(0, -2), torch.zeros(logits.flatten(0, -2).shape[0], dtype=torch.int64)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_gpt_attends_to_the_past_and_not_to_the_future() -> None:
    model = build(partial(GPT, TINY, context=8), seed=0)
    symbols = torch.arange(8)[None]
    changed = symbols.clone()
    changed[0, 5] = 200
    before, after = model(symbols), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_padding_changes_nothing() -> None:
    model = build(NETWORKS["bag"], seed=0)
    short = torch.tensor([[3, 1, 4]])
    torch.testing.assert_close(model(F.pad(short, (0, 3))), model(short))


def test_binary_logistic_regression_has_the_binary_loss() -> None:
    model = build(partial(BinaryLogistic, 4), seed=0)
    with torch.no_grad():
        model.linear.weight.copy_(torch.tensor([[1.0, -2.0, 0.5, 0.25]]))
    x, labels = torch.eye(4), torch.tensor([0, 1, 1, 0])
    expected = F.binary_cross_entropy_with_logits(model.linear(x)[:, 0], labels.float())
    torch.testing.assert_close(F.cross_entropy(model(x), labels), expected)


def test_a_model_has_the_dtype_of_the_tasks_data_whatever_the_default_is() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model = build(NETWORKS["gpt"], seed=0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"heads=3\): all must be at least 1 and heads must divide width"):
        GPTSize(layers=1, width=16, heads=3)
