# SPDX-License-Identifier: Apache-2.0
"""An array on a GPU gives what separate runs give there, and its layers are measured and chosen there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.arrays import fusion
from thinwire.arrays.fusion import Each, autotune_choices, fuse, measuring

STEPS = 5
RATES = [1e-3, 3e-3, 1e-2]
# On a machine without a GPU the same is asked of the CPU, so that these tests are known to run.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_autotune_cache"),
    # Torch says so where the first product of a process is in a backward pass.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(8, 12, batch_first=True), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


def convolutional() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3, groups=8), nn.GroupNorm(2, 8), nn.Hardswish(), nn.Conv2d(8, 12, 1)),
        *(nn.ConvTranspose2d(12, 6, 4, 2, 1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 5)),
    )


def attentive() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(11, 16), layer, nn.LayerNorm(16), nn.Flatten(), nn.Linear(96, 5))


def drawn(step: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(DEVICE)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "convolutional": (convolutional, lambda step: drawn(step, 6, 3, 12, 12)),
    "attentive": (attentive, lambda step: (4 * drawn(step, 6, 6)).long().remainder(11)),
    "recurrent": (Recurrent, lambda step: drawn(step, 6, 7, 8)),
}


def three(make: Callable[[], nn.Module]) -> list[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [make().double().to(DEVICE) for _ in RATES]


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
@pytest.mark.parametrize("name", NETWORKS)
def test_an_array_trains_as_separate_runs_do(name: str, kind: str) -> None:
    make, batch = NETWORKS[name]
    more: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}
    models, labels = three(make), torch.arange(6, device=DEVICE) % 5
    array = fuse(three(make))
    optimizer = getattr(fusion, kind)(array.parameters(), lr=RATES, **more)
    alone = [getattr(torch.optim, kind)(m.parameters(), lr=lr, **more) for m, lr in zip(models, RATES, strict=True)]
    with measuring():
        for step in range(STEPS):
            x = batch(step)
            array.zero_grad()
            losses = array.losses(F.cross_entropy, array(x), labels)
            losses.sum().backward()
            optimizer.step()
            for place, (model, own) in enumerate(zip(models, alone, strict=True)):
                own.zero_grad()
                loss = F.cross_entropy(model(x), labels)
                loss.backward()
                own.step()
                assert abs(losses[place].item() - loss.item()) < 1e-9 * abs(loss.item())
    assert losses.device.type == DEVICE
    assert any(DEVICE in case for case in autotune_choices())


def test_dropout_is_that_of_a_run_by_itself() -> None:
    model = nn.Sequential(nn.Dropout(0.4), nn.Linear(6, 3).double()).to(DEVICE)
    array, x = fuse([model] * 3, seeds=[5, 6, 7]), drawn(0, 50, 6)
    first, second = array(x), array(x)
    for place in range(3):
        with torch.random.fork_rng():
            torch.manual_seed(5 + place)
            assert torch.allclose(first[place], model(x), rtol=1e-12)
            assert torch.allclose(second[place], model(x), rtol=1e-12)
    assert not torch.equal(first[0], second[0])


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, None, self.shift, training=True)


@pytest.mark.parametrize("deterministic", ["0", "1"])
def test_a_shift_of_batches_without_a_gain_has_a_gradient(deterministic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_DETERMINISTIC", deterministic)
    array, x = fuse(three(Shifted)), drawn(0, 5, 4)
    with measuring():
        array(x).sum().backward()
        array(Each(x.expand(3, 5, 4) + 0.0)).sum().backward()
    for parameter in array.parameters():
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, torch.full_like(parameter.grad, 10.0))


def test_an_array_that_moves_trains_on() -> None:
    models = three(convolutional)
    x, labels = drawn(0, 6, 3, 12, 12), torch.arange(6, device=DEVICE) % 5
    array = fuse([model.cpu() for model in models])
    array.losses(F.cross_entropy, array(x.cpu()), labels.cpu()).sum().backward()
    array.to(DEVICE)  # with its gradients
    optimizer = fusion.Adam(array.parameters(), lr=RATES)
    array.losses(F.cross_entropy, array(x), labels).sum().backward()
    optimizer.step()
    kept = array.extract(1)
    assert all(p.device.type == DEVICE for p in kept.parameters())
    with torch.no_grad():
        assert torch.allclose(kept.train()(x), array(x)[1], rtol=1e-9)
