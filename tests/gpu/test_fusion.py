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
from thinwire.errors import ConfigError

STEPS = 5
RATES = [1e-3, 3e-3, 1e-2]
# On a machine without a GPU the same is asked of the CPU, so that these tests are known to run.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_autotune_cache"),
    # Torch says so where the first product of a process is in a backward pass.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    # The error of a refused step holds its graph, whose nodes belong to the stream of the capture.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
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


# -- captured steps ----------------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.1), nn.Flatten()),
            *(nn.Linear(800, 16), nn.LayerNorm(16), nn.Dropout(0.3), nn.Linear(16, 5)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def dropping() -> fusion.FusedArray:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        models = [Dropping().double().to(DEVICE) for _ in RATES]
    array = fuse(models, seeds=[5, 6, 7])
    array.set_dropout_rates("body.7.p", [0.3, 0.2, 0.5])
    return array


def training_step(
    array: fusion.FusedArray, optimizer: fusion.FusedOptimizer, scaler: fusion.GradScaler | None = None
) -> Callable[[Tensor, Tensor], Tensor]:
    def step(x: Tensor, labels: Tensor) -> Tensor:
        array.zero_grad()
        losses = array.losses(F.cross_entropy, array(x), labels)
        if scaler is None:
            losses.sum().backward()
            optimizer.step()
            return losses
        scaler.scale(losses).sum().backward()
        scaler.unscale_(optimizer)
        fusion.clip_grad_norm_(array.parameters(), [0.5, 1.0, 2.0])
        scaler.step(optimizer)
        scaler.update()
        return losses

    return step


def halving(one: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(one, 5, 0.5)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop", "LAMB"])
@pytest.mark.slow
def test_a_captured_step_is_the_eager_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With schedules, dropout, a slot that stops, and one that leaves."""
    monkeypatch.setenv("THINWIRE_DETERMINISTIC", "1")  # both compute by the same implementations
    more: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}
    arrays, labels = (dropping(), dropping()), torch.arange(6, device=DEVICE) % 5
    optimizers = [getattr(fusion, kind)(each.parameters(), lr=RATES, **more) for each in arrays]
    schedules = [fusion.Schedules(optimizer, halving) for optimizer in optimizers]
    before = {name: tensor.clone() for name, tensor in arrays[0].state_dict().items()}
    replay = arrays[0].capture(training_step(arrays[0], optimizers[0]), drawn(0, 6, 3, 12, 12), labels)
    assert all(torch.equal(before[name], tensor) for name, tensor in arrays[0].state_dict().items())
    steps = [replay, training_step(arrays[1], optimizers[1])]
    for number in range(20):
        if number == 6:
            for optimizer in optimizers:
                optimizer.active[1] = False
        if number == 13:
            for array, optimizer, each in zip(arrays, optimizers, schedules, strict=True):
                kept = array.select([2, 0])
                optimizer.select(kept)
                each.select(kept)
        found, wanted = (step(drawn(number, 6, 3, 12, 12), labels).detach() for step in steps)
        assert torch.allclose(found, wanted, rtol=1e-6), number
        for each in schedules:
            each.step()
    for name, tensor in arrays[0].state_dict().items():
        assert torch.allclose(tensor.double(), arrays[1].state_dict()[name].double(), rtol=1e-5, atol=1e-8), name
    counts = [[float(optimizer.extract(slot)["state"][0]["step"]) for slot in range(2)] for optimizer in optimizers]
    assert counts[0] == counts[1] == [20.0, 20.0]


def test_a_captured_step_scales_losses_and_clips_gradients() -> None:
    arrays, labels = (dropping(), dropping()), torch.arange(6, device=DEVICE) % 5
    optimizers = [fusion.AdamW(each.parameters(), lr=RATES) for each in arrays]
    scalers = [fusion.GradScaler(3, init_scale=8.0, growth_interval=4) for _ in arrays]
    steps = [training_step(*each) for each in zip(arrays, optimizers, scalers, strict=True)]
    steps[0] = arrays[0].capture(steps[0], drawn(0, 6, 3, 12, 12), labels)
    for number in range(8):
        x = drawn(number, 6, 3, 12, 12)
        x = x * torch.inf if number == 3 else x
        found, wanted = (step(x, labels).detach() for step in steps)
        assert torch.allclose(found, wanted, rtol=1e-6, equal_nan=True), number
    assert scalers[0].scales.tolist() == scalers[1].scales.tolist() == [8.0] * 3
    assert all(optimizer.active.all() for optimizer in optimizers)


@pytest.mark.parametrize("captured", [False, True])
def test_a_step_does_not_wait_for_the_gpu(captured: bool) -> None:
    array, labels = dropping(), torch.arange(6, device=DEVICE) % 5
    optimizer, scaler = fusion.Adam(array.parameters(), lr=RATES), fusion.GradScaler(3)
    step, batches = training_step(array, optimizer, scaler), [drawn(number, 6, 3, 12, 12) for number in range(4)]
    step = array.capture(step, batches[0], labels) if captured else step
    for x in batches:
        step(x, labels)
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        for x in batches:
            optimizer.param_groups[0]["lr"][0] *= 0.9
            step(x, labels)
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def test_a_captured_step_in_bf16_learns_as_the_eager_step() -> None:
    losses: list[Tensor] = []
    labels = torch.arange(6, device=DEVICE) % 5
    for captured in (False, True):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            models = [convolutional().to(DEVICE, memory_format=torch.channels_last) for _ in RATES]
        array = fuse(models)
        optimizer = fusion.Adam(array.parameters(), lr=RATES)

        def step(x: Tensor, labels: Tensor, array: Any = array, optimizer: Any = optimizer) -> Tensor:
            array.zero_grad()
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                found = array.losses(F.cross_entropy, array(x), labels)
            found.sum().backward()
            optimizer.step()
            return found

        x = drawn(0, 6, 3, 12, 12).float().contiguous(memory_format=torch.channels_last)
        run = array.capture(step, x, labels) if captured else step
        losses.append(torch.stack([run(x, labels).detach() for _ in range(20)]))
    assert torch.allclose(losses[0], losses[1], rtol=0.1, atol=0.05)
    assert bool((losses[1][-1] < losses[1][0]).all())


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: a CPU has nothing to wait for")
def test_a_step_that_waits_is_refused_and_training_continues() -> None:
    array, labels, x = dropping(), torch.arange(6, device=DEVICE) % 5, drawn(0, 6, 3, 12, 12)
    optimizer = fusion.Adam(array.parameters(), lr=RATES)
    step, read = training_step(array, optimizer), list[float]()

    def waits(x: Tensor, labels: Tensor) -> Tensor:
        losses = step(x, labels)
        read.append(losses.sum().item())
        return losses

    with pytest.raises(ConfigError, match=r"waits for the GPU.*\.item\(\)"):
        array.capture(waits, x, labels)
    assert torch.isfinite(step(x, labels)).all()
    assert torch.isfinite(array.capture(step, x, labels)(x, labels)).all()
    torch.rand(2, device=DEVICE)


def test_an_image_s_layout_passes_through_convolutions() -> None:
    x = torch.randn(4, 3, 8, 8, device=DEVICE).contiguous(memory_format=torch.channels_last)
    models = [nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)) for _ in RATES]
    array = fuse([model.to(DEVICE, memory_format=torch.channels_last) for model in models])
    found = array(x)
    assert found.shape == (3, 4, 8, 4, 4)
    # Channels are next to each other in memory.
    assert found.stride(2) == 1
