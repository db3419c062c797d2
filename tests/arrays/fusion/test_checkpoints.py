# SPDX-License-Identifier: Apache-2.0
"""An array continues from disk bit for bit, and one of its models continues as a separate run."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.arrays.fusion.test_life import Wide, same, whole, wide
from tests.arrays.fusion.test_training import CASES, Net, X, Y, close, holds, loss, train
from tests.oracles.fusion import make, seeded
from thinwire.arrays import fusion
from thinwire.arrays.fusion import autotune, checkpoints, fuse
from thinwire.errors import CheckpointError, ConfigError

RATES = [0.05, 0.01, 0.003, 0.1, 0.02]
FACTORIES: list[Any] = [
    partial(lr_scheduler.StepLR, step_size=2, gamma=0.5),
    partial(lr_scheduler.MultiStepLR, milestones=[3, 7, 9], gamma=0.7),
    partial(lr_scheduler.ReduceLROnPlateau, patience=0),
    lambda one: lr_scheduler.SequentialLR(
        one, [lr_scheduler.LinearLR(one, 0.1, total_iters=3), lr_scheduler.MultiStepLR(one, [2, 5], 0.5)], [4]
    ),
]
REFILLED = partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=40, cycle_momentum=False)


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(autotune.DETERMINISTIC, "1")


class Run:
    """An array with everything that trains it, in two groups of parameters."""

    def __init__(self, name: str, factories: list[Any], seed: int = 0) -> None:
        count = len(factories)
        self.array = fuse(make(Net, count, seed=seed), seeds=range(count))
        parameters = list(self.array.parameters())
        settings = {key: value for key, value in CASES[name].items() if key in ("amsgrad", "centered")}
        groups = [{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.01}]
        self.optimizer = getattr(fusion, name)(groups, lr=RATES[:count], **settings)
        self.schedules = fusion.Schedules(self.optimizer, factories)
        self.scaler = fusion.GradScaler(count, 8.0, growth_interval=3)

    @property
    def parts(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "schedules": self.schedules, "scaler": self.scaler}

    def train(self, steps: range, spoil: int | None = None) -> None:
        for step in steps:
            self.array.zero_grad()
            losses = self.array.losses(F.cross_entropy, self.array(X[step]), Y[step])
            self.scaler.scale(losses).sum().backward()
            if spoil is not None:
                next(iter(self.array.parameters())).grad[spoil] = torch.inf
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.schedules.step(losses)

    def life(self) -> None:
        """Overflow, deactivate, drop, insert and copy models, so that slots have different step counts."""
        self.train(range(4))
        self.train(range(4, 5), spoil=2)
        self.optimizer.active[0] = False
        self.train(range(5, 7))
        kept = self.array.select([3, 1, 1, 0, 2])
        for follower in self.parts.values():
            follower.select(kept)
        self.array.insert(1, make(partial(Net, 0.4), 1, seed=9)[0], seed=77)
        self.optimizer.reset(1, lr=0.02)
        self.schedules.insert(1, REFILLED)
        self.scaler.insert(1)
        self.train(range(7, 10))

    def slot(self, index: int) -> dict[str, Tensor]:
        """All that a slot holds; torch's SGD has None for no momentum."""
        return {name: value for name, value in whole(self.array, self.optimizer, index).items() if value is not None}

    def everything(self) -> list[Any]:
        slots = [self.slot(index) for index in range(self.array.size)]
        rest = [self.schedules.state_dict(), self.scaler.state_dict(), self.array.dropout_rates()]
        return [*slots, repr(rest), self.optimizer.active.tolist()]


# The scheduler's values in the groups must be read from disk, not kept from this factory.
OTHER_PEAK = partial(REFILLED, max_lr=0.1)
NOW = [FACTORIES[3], OTHER_PEAK, FACTORIES[1], FACTORIES[0], FACTORIES[2]]


def equal(one: list[Any], other: list[Any]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(same(a, b) if isinstance(a, dict) else a == b for a, b in pairs)


@pytest.mark.parametrize("name", CASES)
def test_an_array_with_different_step_counts_continues_from_disk_bit_for_bit(name: str, tmp_path: Path) -> None:
    run = Run(name, FACTORIES)
    run.life()
    checkpoints.save(tmp_path / "array", run.array, **run.parts, extra={"step": 10, "order": (3, 1)})
    other = Run(name, NOW, seed=5)
    extra = checkpoints.load(tmp_path / "array", other.array, **other.parts)
    assert extra == {"step": 10, "order": (3, 1)}
    assert equal(run.everything(), other.everything())
    for each in (run, other):
        each.train(range(10, 18))
    assert equal(run.everything(), other.everything())


def test_an_array_is_resized_to_the_one_that_was_saved(tmp_path: Path) -> None:
    for now, before in ((2, 4), (4, 2)):
        run, other = (Run("Adam", [FACTORIES[0]] * count, seed=count) for count in (now, before))
        run.train(range(6))
        checkpoints.save(tmp_path / "array", run.array, **run.parts)
        checkpoints.load(tmp_path / "array", other.array, **other.parts)
        for each in (run, other):
            each.train(range(6, 10))
        assert other.array.size == now and equal(run.everything(), other.everything())


def test_models_without_generators_continue_with_torch_s(tmp_path: Path) -> None:
    array = fuse(make(Net))
    optimizer = fusion.SGD(array.parameters(), lr=0.1)
    with torch.random.fork_rng():
        checkpoints.save(tmp_path / "array", array, optimizer=optimizer)
        train(array, optimizer, steps=range(3))
        after = array.state_dict()
        other = fuse(make(Net, seed=3))
        theirs = fusion.SGD(other.parameters(), lr=1.0)
        checkpoints.load(tmp_path / "array", other, optimizer=theirs)
        train(other, theirs, steps=range(3))
    assert all(torch.equal(after[name], tensor) for name, tensor in other.state_dict().items())


def test_layers_that_differ_continue_from_disk_too(tmp_path: Path) -> None:
    array, other = (fuse(wide(), loop=["body"]) for _ in range(2))
    optimizer, theirs = (fusion.Adam(each.parameters(), lr=RATES[:3]) for each in (array, other))
    train(array, optimizer, steps=range(3))
    checkpoints.save(tmp_path / "array", array, optimizer=optimizer)
    checkpoints.load(tmp_path / "array", other, optimizer=theirs)
    for each, mover in ((array, optimizer), (other, theirs)):
        train(each, mover, steps=range(3, 6))
    assert all(same(whole(array, optimizer, index), whole(other, theirs, index)) for index in range(3))
    optimizer.select(array.select([2, 0]))
    with pytest.raises(CheckpointError, match="Fuse the models that are left"):
        checkpoints.load(tmp_path / "array", array, optimizer=optimizer)


class Dropping(nn.Module):
    """A body of any width with dropout."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.Dropout(rate), nn.Linear(width, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_rates_of_layers_that_differ_are_changed_put_in_and_read_back(tmp_path: Path) -> None:
    def array(*rates: float) -> Any:
        return fuse([make(partial(Dropping, 3 + i, rate), 1, seed=i)[0] for i, rate in enumerate(rates)], loop=["body"])

    ours, dropped = array(0.0, 0.0), array(0.0, 1.0)
    ours.set_dropout_rates("body.1.p", [0.0, 1.0])
    assert torch.equal(ours(X[0]), dropped(X[0]))
    checkpoints.save(tmp_path, ours)
    read = array(0.5, 0.5)
    checkpoints.load(tmp_path, read)
    assert torch.equal(read(X[0]), dropped(X[0]))
    read.insert(1, make(partial(Dropping, 4, 0.0), 1, seed=1)[0])
    assert torch.equal(read(X[0]), array(0.0, 0.0)(X[0]))
    assert not torch.equal(read(X[0]), dropped(X[0]))


def test_saving_again_replaces_the_checkpoint_and_a_failed_write_changes_nothing(tmp_path: Path) -> None:
    folder, array = tmp_path / "array", fuse(make(Wide))
    checkpoints.save(folder, array, extra={"step": 1})
    checkpoints.save(folder, fuse(make(Wide, seed=2)), extra={"step": 2})
    assert len(list(folder.iterdir())) == 2
    with pytest.raises(CheckpointError, match="only tensors"):
        checkpoints.save(folder, array, extra={"step": object()})
    assert checkpoints.load(folder, array) == {"step": 2}
    assert same(array.state_dict(), fuse(make(Wide, seed=2)).state_dict())


@pytest.mark.parametrize("file", ["*.json", "*.safetensors"])
def test_a_damaged_checkpoint_is_refused_by_the_name_of_its_file(file: str, tmp_path: Path) -> None:
    array = fuse(make(Wide))
    checkpoints.save(tmp_path, array)
    (found,) = tmp_path.glob(file)
    content = bytearray(found.read_bytes())
    content[len(content) // 2] ^= 1
    found.write_bytes(content)
    with pytest.raises(CheckpointError, match=found.name.replace("[", r"\[")):
        checkpoints.load(tmp_path, array)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoints.load(tmp_path / "nothing", array)


@pytest.mark.parametrize("missing", ["generators", "rates", "tensors", "optimizer"])
def test_a_checkpoint_of_an_older_version_is_refused_by_the_missing_part(missing: str, tmp_path: Path) -> None:
    run = Run("Adam", FACTORIES)
    state = checkpoints.state_of(run.array, **run.parts)
    checkpoints.write(tmp_path, {"array": {name: part for name, part in state.items() if name != missing}, "extra": {}})
    before = run.array.state_dict()
    with pytest.raises(CheckpointError, match=f"has no '{missing}': another version of thinwire wrote it"):
        checkpoints.load(tmp_path, run.array, **run.parts)
    assert same(before, run.array.state_dict())


def test_a_checkpoint_of_other_models_is_refused_by_name_and_nothing_is_changed(tmp_path: Path) -> None:
    run = Run("Adam", FACTORIES)
    run.train(range(3))
    checkpoints.save(tmp_path / "array", run.array, **run.parts)
    checkpoints.save(tmp_path / "bare", fuse(make(lambda: nn.Linear(6, 3), 4)))
    plain = fuse(make(Net, 4))
    for words, array, parts in (
        ("the generator of each model: cpu in the checkpoint and none", plain, {}),
        ("the optimizer: Adam over groups", run.array, {}),
        ("the schedules: one for each", run.array, {"optimizer": run.optimizer}),
        ("the optimizer: Adam .* and SGD", *_swapped("SGD", FACTORIES)),
        ("slot 1 has a MultiStepLR in the checkpoint and a StepLR", *_swapped("Adam", FACTORIES[:1] * 4)),
    ):
        before = {name: tensor.clone() for name, tensor in array.state_dict().items()}
        with pytest.raises(CheckpointError, match=words):
            checkpoints.load(tmp_path / "array", array, **parts)
        assert same(before, array.state_dict())
    for factory, words in (
        (lambda: nn.Linear(6, 4), r"tensor weight: float64\[3, 6\] in the checkpoint and float64\[4, 6\] here"),
        (lambda: nn.Linear(6, 3, bias=False), "tensor bias is in the checkpoint only"),
        (Net, "tensor first.weight is in the array only"),
    ):
        with pytest.raises(CheckpointError, match=words):
            checkpoints.load(tmp_path / "bare", fuse(make(factory, 4)))
    checkpoints.write(tmp_path / "one", {"model": {}})
    with pytest.raises(CheckpointError, match="holds no array"):
        checkpoints.load(tmp_path / "one", run.array)
    with pytest.raises(ConfigError, match="optimiser: an array is saved with its optimizer"):
        checkpoints.save(tmp_path / "array", run.array, optimiser=run.optimizer)  # type: ignore[call-arg]


def _swapped(name: str, factories: list[Any]) -> tuple[Any, dict[str, Any]]:
    run = Run(name, factories)
    return run.array, run.parts


# -- one model ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta"])
@pytest.mark.parametrize("slot", [0, 1, 3])
def test_one_model_of_an_array_continues_as_a_separate_run(name: str, slot: int) -> None:
    settings = {"momentum": 0.9} if name == "SGD" else {}
    array = fuse(make(Net, 4), seeds=range(4))
    optimizer = getattr(fusion, name)(array.parameters(), lr=RATES[:4], **settings)
    schedules = fusion.Schedules(optimizer, FACTORIES)
    train(array, optimizer, schedules, steps=range(5))
    model, state, generator = array.extract(slot), optimizer.extract(slot), array.generators[slot].get_state()
    theirs = getattr(torch.optim, name)(model.parameters(), lr=1.0, **settings)
    scheduler = FACTORIES[slot](theirs)
    theirs.load_state_dict(state)
    scheduler.load_state_dict(schedules.extract(slot))
    train(array, optimizer, schedules, steps=range(5, 12))
    with seeded(0):
        torch.set_rng_state(generator)
        for step in range(5, 12):
            trained_once(model, theirs, scheduler, step)
    assert holds(array, slot, model)
    assert theirs.param_groups[0]["lr"] == optimizer.hyperparameters(slot)["lr"]


def trained_once(model: nn.Module, optimizer: Any, scheduler: Any, step: int) -> None:
    optimizer.zero_grad()
    found = loss(model, step)
    found.backward()
    optimizer.step()
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(float(found.detach()))
    else:
        scheduler.step()


def test_one_model_s_scale_is_that_of_torch_s_scaler() -> None:
    run = Run("Adam", FACTORIES)
    run.train(range(3))
    run.train(range(3, 4), spoil=2)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    scaler.load_state_dict(run.scaler.extract(2))
    assert scaler.get_scale() == float(run.scaler.scales[2]) == 8.0


def test_a_model_goes_into_a_slot_of_another_array() -> None:
    run, other = Run("Adam", FACTORIES), Run("Adam", FACTORIES, seed=4)
    run.train(range(4))
    before = [whole(other.array, other.optimizer, index) for index in range(4)]
    for theirs, ours in zip((other.array, *other.parts.values()), (run.array, *run.parts.values()), strict=True):
        theirs.insert(1, ours.extract(1))
    other.array.generators[1].set_state(run.array.generators[1].get_state())
    for each in (run, other):
        each.train(range(4, 8))
    assert same(whole(run.array, run.optimizer, 1), whole(other.array, other.optimizer, 1))
    again = Run("Adam", FACTORIES, seed=4)
    again.train(range(4, 8))
    for index in (0, 2, 3):
        assert same(whole(again.array, again.optimizer, index), whole(other.array, other.optimizer, index))
        assert not same(before[index], whole(other.array, other.optimizer, index))


def test_a_checkpoint_is_tensors_and_json_alone(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run = Run("SGD", FACTORIES)
    run.train(range(2))
    checkpoints.save(tmp_path, run.array, **run.parts)
    (tree,), (tensors,) = tmp_path.glob("*.json"), tmp_path.glob("*.safetensors")
    assert "identity" in json.loads(tree.read_text())["tree"]["array"]
    assert any(name.endswith("first.weight") for name in load_file(tensors))


class Activated(nn.Module):
    """Bodies with the same shapes, which differ in what follows them."""

    def __init__(self, activation: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.body = nn.Sequential(nn.Linear(5, 5), activation())
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self.first(x)))


def activated(*kinds: type[nn.Module]) -> Any:
    return fuse([make(partial(Activated, kind), 1, seed=seed)[0] for seed, kind in enumerate(kinds)], loop=["body"])


def test_copies_of_a_model_with_layers_of_its_own_count_their_own_steps() -> None:
    array = activated(nn.Tanh, nn.Sigmoid)
    optimizer = fusion.Adam(array.parameters(), lr=0.1)
    train(array, optimizer, steps=range(2))
    optimizer.select(array.select([1, 1, 0]))
    train(array, optimizer, steps=range(2, 5))
    assert {float(count) for parameter in array.parameters() for count in optimizer.state[parameter]["step"]} == {5.0}
    model = array.extract(0)
    alone = torch.optim.Adam(model.parameters())
    alone.load_state_dict(optimizer.extract(0))
    train(array, optimizer, steps=range(5, 8))
    for step in range(5, 8):
        alone.zero_grad()
        loss(model, step).backward()
        alone.step()
    assert holds(array, 1, model)


def test_layers_that_differ_continue_from_disk_after_their_models_have_changed_places(tmp_path: Path) -> None:
    array = activated(nn.Tanh, nn.Sigmoid)
    optimizer = fusion.Adam(array.parameters(), lr=0.1)
    train(array, optimizer, steps=range(3))
    optimizer.select(array.select([1, 0, 1]))
    checkpoints.save(tmp_path / "array", array, optimizer=optimizer)
    other = activated(nn.Sigmoid, nn.Tanh, nn.Sigmoid)
    theirs = fusion.Adam(other.parameters(), lr=0.1)
    checkpoints.load(tmp_path / "array", other, optimizer=theirs)
    for each, mover in ((array, optimizer), (other, theirs)):
        train(each, mover, steps=range(3, 6))
    assert all(same(whole(array, optimizer, index), whole(other, theirs, index)) for index in range(3))


def test_layers_that_are_kept_in_evaluation_mode_stay_in_it(tmp_path: Path) -> None:
    def frozen() -> nn.Module:
        model = Net(0.0)
        model.norm.eval()
        return model

    array, alone = fuse(make(frozen)), make(frozen, 1, seed=8)[0]
    checkpoints.save(tmp_path, array)
    checkpoints.load(tmp_path, array)
    array.insert(1, alone)
    array.insert(0, array.extract(2))
    before = array.state_dict()["norm.running_mean"].clone()
    assert close(array(X[0])[1], alone(X[0]))
    assert torch.equal(array.state_dict()["norm.running_mean"], before) and array.training
