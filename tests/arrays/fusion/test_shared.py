# SPDX-License-Identifier: Apache-2.0
"""Modules that all models of an array share: one tensor if frozen, summed gradients on request if trained."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from thinwire import ConfigError
from thinwire.arrays.fusion import SGD, AdamW, Each, checkpoints, fuse

COUNT = 3


class Adapted(nn.Module):
    """A trained layer around a base that all models may share."""

    def __init__(self, base: nn.Module, seed: int) -> None:
        super().__init__()
        self.base = base
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.own = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.base(x).flatten(1)[:, :4])


class Counting(nn.Module):
    """Replaces one buffer by each model's own value, and another by a number that does not depend on the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("scale", torch.full((1,), 2.0, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(1, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.5 + x.mean()
        return x * self.scale * self.frozen + self.mean


BASES = {
    "linear": lambda: (nn.Linear(5, 4), torch.randn(COUNT, 6, 5)),
    "conv": lambda: (nn.Conv2d(2, 2, 3, padding=1), torch.randn(COUNT, 6, 2, 4, 4)),
    "transposed conv": lambda: (nn.ConvTranspose2d(2, 2, 2), torch.randn(COUNT, 6, 2, 4, 4)),
    "layer norm": lambda: (nn.LayerNorm(5), torch.randn(COUNT, 6, 5)),
    "batch norm": lambda: (nn.BatchNorm1d(5), torch.randn(COUNT, 6, 5)),
    "group norm": lambda: (nn.GroupNorm(2, 4), torch.randn(COUNT, 6, 4, 3)),
    "embedding": lambda: (nn.Embedding(7, 4), torch.randint(7, (COUNT, 6, 1))),
    "bilinear": lambda: (Twice(), torch.randn(COUNT, 6, 5)),
    "prelu": lambda: (nn.PReLU(5), torch.randn(COUNT, 6, 5)),
    "recurrent": lambda: (Last(), torch.randn(COUNT, 6, 3, 5)),
    "attention": lambda: (nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), torch.randn(COUNT, 6, 3, 4)),
    "counting": lambda: (Counting(), torch.randn(COUNT, 6, 5)),
}


class Twice(nn.Module):
    """A bilinear form of its input with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(5, 5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, x)


class Last(nn.Module):
    """A recurrent layer's last output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(5, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0][:, -1]


def base_of(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    base, x = BASES[kind]()
    x = x if x.dtype == torch.int64 else x.double()
    return base.double().requires_grad_(False), x


@pytest.mark.parametrize("loop", [False, True], ids=["together", "looped"])
@pytest.mark.parametrize("kind", BASES)
def test_models_over_one_frozen_base_are_those_of_separate_bases(kind: str, loop: bool) -> None:
    base, inputs = base_of(kind)
    alone = [Adapted(copy.deepcopy(base), seed) for seed in range(COUNT)]
    array = fuse([Adapted(base, seed) for seed in range(COUNT)], loop=["base"] if loop else ())
    before = copy.deepcopy(base.state_dict())
    frozen = {name: tensor for name, tensor in array.named_parameters() if not tensor.requires_grad}
    for name, parameter in base.named_parameters():
        assert frozen[f"base.{name}"].data_ptr() == parameter.data_ptr()
    optimizer = AdamW(array.parameters(), lr=[0.1, 0.2, 0.3], weight_decay=[0.0, 0.1, 0.2])
    own = [
        torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)
        for model, lr, decay in zip(alone, [0.1, 0.2, 0.3], [0.0, 0.1, 0.2], strict=True)
    ]
    for _ in range(3):
        array.zero_grad()
        losses = array.losses(lambda y: y.square().mean(), array(Each(inputs)))
        losses.sum().backward()
        optimizer.step()
        for slot, (model, each) in enumerate(zip(alone, own, strict=True)):
            model.zero_grad()
            loss = model(inputs[slot]).square().mean()
            loss.backward()
            each.step()
            torch.testing.assert_close(losses[slot], loss, rtol=0, atol=1e-12)
    for slot, model in enumerate(alone):
        found = array.extract(slot).state_dict()
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12)
        # The numbering of parameters is that of a plain optimizer, frozen ones included.
        own[slot].load_state_dict(optimizer.extract(slot))
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())


def test_extracted_models_share_the_base_and_the_optimizer_holds_no_state_of_it() -> None:
    base, x = base_of("linear")
    array = fuse([Adapted(base, seed) for seed in range(COUNT)])
    one, other = array.extract(0), array.extract(1)
    weights = [each.get_submodule("base").get_parameter("weight") for each in (one, other)]
    assert weights[0].data_ptr() == weights[1].data_ptr() == base.get_parameter("weight").data_ptr()
    optimizer = SGD(array.parameters(), lr=0.1, momentum=0.9)
    array(Each(x)).sum().backward()
    optimizer.step()
    assert len(optimizer.state) == 2


def test_selected_inserted_and_restored_arrays_keep_one_base(tmp_path: Path) -> None:
    base, x = base_of("linear")
    array = fuse([Adapted(base, seed) for seed in range(COUNT)])
    optimizer = AdamW(array.parameters(), lr=[0.1, 0.2, 0.3])

    def step() -> None:
        array.zero_grad()
        array(Each(x[: array.size])).square().sum().backward()
        optimizer.step()

    step()
    optimizer.select(array.select([2, 0]))
    array.insert(1, Adapted(copy.deepcopy(base), 7))
    optimizer.reset(1)
    step()
    checkpoints.save(tmp_path / "array", array, optimizer=optimizer)
    step()
    wanted = {name: tensor.clone() for name, tensor in array.state_dict().items()}
    checkpoints.load(tmp_path / "array", array, optimizer=optimizer)
    step()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in array.state_dict().items())
    assert array.state_dict()["base.weight"].data_ptr() == base.get_parameter("weight").data_ptr()
    other, _ = base_of("linear")
    other.get_parameter("weight").add_(1)
    with pytest.raises(ConfigError, match=r"slot 1 cannot hold this model: its base\.weight differs"):
        array.insert(1, Adapted(other, 7))


def test_a_restored_base_does_not_change_the_models_that_were_given() -> None:
    base, _ = base_of("linear")
    array = fuse([Adapted(base, seed) for seed in range(COUNT)])
    weight = base.get_parameter("weight").clone()
    state = {name: tensor + 1 for name, tensor in array.state_dict().items()}
    array.load_state_dict(state)
    assert torch.equal(base.get_parameter("weight"), weight)
    assert torch.equal(array.state_dict()["base.weight"], weight + 1)
    assert torch.equal(array.extract(1).state_dict()["base.weight"], weight + 1)


@pytest.mark.parametrize("loop", [False, True], ids=["together", "looped"])
def test_a_trained_trunk_is_shared_on_request_and_gets_the_sum_of_the_gradients(loop: bool) -> None:
    torch.manual_seed(0)
    trunk, x = nn.Linear(5, 4).double(), torch.randn(COUNT, 6, 5).double()
    models = [Adapted(trunk, seed) for seed in range(COUNT)]
    with pytest.raises(ConfigError, match=r"share the trainable parameter base\.weight.*share_trained=True"):
        fuse(models)
    array = fuse(models, share_trained=True, loop=["base"] if loop else ())
    initial = trunk.weight.detach().clone()
    shared = list(array.shared_parameters())
    assert [tuple(each.shape) for each in shared] == [(4, 5), (4,)]
    with pytest.raises(ConfigError, match=r"shared by all models.*own_parameters\(\)"):
        AdamW(array.parameters(), lr=0.1)
    optimizers = AdamW(array.own_parameters(), lr=[0.1, 0.2, 0.3]), torch.optim.AdamW(array.shared_parameters(), lr=0.1)
    for _ in range(3):
        array.zero_grad()
        array.losses(lambda y: y.square().mean(), array(Each(x))).sum().backward()
        for each in optimizers:
            each.step()
    assert torch.equal(trunk.weight, initial)
    plain = [
        torch.optim.AdamW(model.own.parameters(), lr=lr) for model, lr in zip(models, [0.1, 0.2, 0.3], strict=True)
    ]
    plain.append(torch.optim.AdamW(trunk.parameters(), lr=0.1))
    for _ in range(3):
        for each in plain:
            each.zero_grad()
        torch.stack([model(rows).square().mean() for model, rows in zip(models, x, strict=True)]).sum().backward()
        for each in plain:
            each.step()
    torch.testing.assert_close(shared[0].detach(), trunk.weight.detach(), rtol=0, atol=1e-12)
    for slot, model in enumerate(models):
        torch.testing.assert_close(array.extract(slot)(x[slot]), model(x[slot]), rtol=0, atol=1e-12)


def test_a_trunk_that_only_some_models_share_is_refused() -> None:
    trunk = nn.Linear(5, 4).double()
    models = [Adapted(trunk, 0), Adapted(trunk, 1), Adapted(copy.deepcopy(trunk), 2)]
    with pytest.raises(ConfigError, match=r"some models share the trainable parameter base\.weight, and others do not"):
        fuse(models, share_trained=True)


def test_copies_of_one_model_keep_their_own_buffers() -> None:
    model = nn.Sequential(Counting(), nn.Linear(5, 1, dtype=torch.float64))
    array = fuse([model] * COUNT)
    shapes = {name: tuple(tensor.shape) for name, tensor in array.named_buffers()}
    assert shapes == {"0.mean": (COUNT, 1), "0.scale": (COUNT, 1)}
