# SPDX-License-Identifier: Apache-2.0
"""Models are inserted, removed, deactivated and copied; what an array does not support is refused by name."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.profiler import ProfilerActivity, profile

from tests.arrays.fusion.test_training import Net, X, Y, close, holds, loss, train
from tests.oracles.fusion import copies, make, seeded, state_of, trained, values, weighed
from tests.rules import for_each, refusals
from thinwire.arrays import fusion
from thinwire.arrays.fusion import Each, autotune, autotune_cache, clear_autotune_cache, fuse
from thinwire.errors import ConfigError

RATES = [0.05, 0.01, 0.003, 0.1]


@pytest.fixture(autouse=True)
def nothing_is_measured_or_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(autotune.DETERMINISTIC, "1")
    monkeypatch.setattr(autotune_cache, "cache_path", lambda: tmp_path / "autotune.json")
    yield
    clear_autotune_cache()


def whole(array: Any, optimizer: Any, index: int) -> dict[str, Tensor]:
    """All that a slot holds."""
    found = state_of(array.extract(index))
    for number, entry in optimizer.extract(index)["state"].items():
        found.update({f"{number}.{name}": value for name, value in entry.items()})
    numbers = optimizer.hyperparameters(index)
    found.update({name: torch.tensor(value) for name, value in numbers.items()})
    if array.generators is not None:
        found["generator"] = array.generators[index].get_state()
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def started(count: int = 4, **settings: Any) -> tuple[Any, Any, Any, Any]:
    array = fuse(make(Net, count), seeds=range(count))
    optimizer = fusion.Adam(array.parameters(), lr=RATES[:count], **settings)
    schedules = fusion.Schedules(optimizer, partial(lr_scheduler.StepLR, step_size=2, gamma=0.5))
    scaler = fusion.GradScaler(count)
    train(array, optimizer, schedules, steps=range(5))
    return array, optimizer, schedules, scaler


def test_what_is_extracted_is_a_plain_model_and_what_is_packed_again_is_the_array() -> None:
    array, *_ = started()
    models = [array.extract(index) for index in range(4)]
    assert all(type(model) is Net for model in models)
    array.eval()
    for index, model in enumerate(models):
        assert close(array(X[0])[index].detach(), model.eval()(X[0]).detach(), 1e-12)
    again = fuse(models).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in array.state_dict().items() if name in again)


def test_compaction_is_bitwise_and_the_survivors_train_on_as_by_themselves() -> None:
    array, optimizer, schedules, scaler = started()
    before = [whole(array, optimizer, index) for index in range(4)]
    kept = array.select([3, 1])
    for follower in (optimizer, schedules, scaler):
        follower.select(kept)
    assert array.size == optimizer.models == len(schedules.schedulers) == len(scaler.scales) == 2
    assert same(whole(array, optimizer, 0), before[3]) and same(whole(array, optimizer, 1), before[1])
    train(array, optimizer, schedules, steps=range(5, 20))
    for slot, index in enumerate((3, 1)):
        model = make(Net, 4)[index]
        theirs = torch.optim.Adam(model.parameters(), lr=RATES[index])
        trained(model, theirs, 20, loss, scheduler=lr_scheduler.StepLR(theirs, 2, 0.5), seed=index)
        assert holds(array, slot, model)


def test_a_graph_that_is_still_alive_does_not_disturb_the_selected_array() -> None:
    array, optimizer, *_ = started()
    alive = array.losses(F.cross_entropy, array(X[0]), Y[0])
    alive.sum().backward(retain_graph=True)
    optimizer.select(array.select([0, 2]))
    train(array, optimizer, steps=range(2))
    assert alive.shape == (4,) and array.size == 2


def test_a_model_that_is_copied_over_another_goes_its_own_way_from_there() -> None:
    array, optimizer, schedules, _ = started()
    before = whole(array, optimizer, 2)
    kept = array.select([0, 2, 2, 3])
    optimizer.select(kept)
    schedules.select(kept)
    assert same(whole(array, optimizer, 1), before) and same(whole(array, optimizer, 2), before)
    optimizer.param_groups[0]["lr"][1] *= 3
    train(array, optimizer, schedules, steps=range(5, 8))
    assert not torch.equal(array.state_dict()["first.weight"][1], array.state_dict()["first.weight"][2])
    assert schedules.schedulers[1] is not schedules.schedulers[2]
    assert array.generators is not None and array.generators[1] is not array.generators[2]
    assert close(optimizer.hyperparameters(1)["lr"], 3 * optimizer.hyperparameters(2)["lr"])


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "at once"])
def test_an_inserted_model_trains_as_a_separate_run_and_the_others_do_not_change(rows: bool) -> None:
    array, optimizer, schedules, scaler = started()
    if not rows:
        optimizer.row_kernel = False
    before = [whole(array, optimizer, index) for index in range(4)]
    fresh = make(Net, 1, seed=9)[0]
    array.insert(1, fresh, seed=77)
    optimizer.reset(1, lr=0.02)
    schedules.insert(1, partial(lr_scheduler.ExponentialLR, gamma=0.9))
    scaler.insert(1)
    assert all(same(whole(array, optimizer, index), before[index]) for index in (0, 2, 3))
    train(array, optimizer, schedules, steps=range(12))
    alone = copy.deepcopy(fresh)
    theirs = torch.optim.Adam(alone.parameters(), lr=0.02)
    trained(alone, theirs, 12, loss, scheduler=lr_scheduler.ExponentialLR(theirs, 0.9), seed=77)
    assert holds(array, 1, alone)
    assert close(optimizer.extract(1)["state"][0]["exp_avg_sq"], theirs.state_dict()["state"][0]["exp_avg_sq"])


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "RMSprop", "Adadelta"])
def test_a_run_by_itself_goes_on_in_a_slot(name: str) -> None:
    settings = {"lr": 0.05, **({"momentum": 0.9} if name == "SGD" else {})}
    model = make(Net, 1, seed=4)[0]
    theirs = getattr(torch.optim, name)(model.parameters(), **settings)
    trained(model, theirs, 7, loss)
    array = fuse(make(Net), seeds=range(3))
    optimizer = getattr(fusion, name)(array.parameters(), lr=0.01)
    train(array, optimizer, steps=range(3))
    array.insert(2, model, seed=5)
    optimizer.insert(2, theirs.state_dict())
    train(array, optimizer, steps=range(10))
    trained(model, theirs, 10, loss, seed=5)
    assert holds(array, 2, model)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        return self.first(x) + self.second(x) if both else self.first(x)


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad"])
def test_a_run_that_stepped_only_some_parameters_goes_on_in_a_slot(name: str) -> None:
    settings = {"lr": 0.05, **({"momentum": 0.9} if name == "SGD" else {})}
    x, models = values(5, 4).double(), [model.double() for model in make(Pair, 3, seed=4)]
    alone = models.pop()
    theirs = getattr(torch.optim, name)(alone.parameters(), **settings)
    alone(x, both=False).square().sum().backward()
    theirs.step()
    array = fuse(models)
    optimizer = getattr(fusion, name)(array.parameters(), **settings)

    def step(model: Any, own: Any) -> None:
        own.zero_grad()
        model(x).square().sum().backward()
        own.step()

    for _ in range(5):
        step(array, optimizer)
    array.insert(0, copy.deepcopy(alone))
    optimizer.insert(0, theirs.state_dict())
    for _ in range(2):
        step(array, optimizer)
        step(alone, theirs)
    assert all(map(close, array.extract(0).parameters(), alone.parameters()))


@for_each(
    [
        *(("Adam", "amsgrad"), ("Adam", "maximize"), ("SGD", "maximize")),
        *(("Adam", "decoupled_weight_decay"), ("RMSprop", "centered")),
    ]
)
def test_a_run_with_another_formula_is_refused_and_changes_nothing(case: tuple[str, str]) -> None:
    name, option = case
    model = make(Net, 1, seed=4)[0]
    theirs = getattr(torch.optim, name)(model.parameters(), lr=0.05, **{option: True})
    trained(model, theirs, 2, loss)
    array = fuse(make(Net), seeds=range(3))
    optimizer = getattr(fusion, name)(array.parameters(), lr=0.01)
    train(array, optimizer, steps=range(2))
    before = optimizer.extract(1)
    with pytest.raises(ConfigError, match=f"{option}=True in the state and False here"):
        optimizer.insert(1, theirs.state_dict())
    assert repr(optimizer.extract(1)) == repr(before)


def test_a_checkpoint_of_the_whole_array_resumes_bitwise(tmp_path: Path) -> None:
    array, optimizer, schedules, scaler = started()
    save_file({name: tensor.contiguous() for name, tensor in array.state_dict().items()}, tmp_path / "array")
    held = copy.deepcopy((optimizer.state_dict(), schedules.state_dict(), scaler.state_dict()))
    train(array, optimizer, schedules, steps=range(5, 9))
    other = fuse(make(Net, 4, seed=3), seeds=[0] * 4)
    theirs = fusion.Adam(other.parameters(), lr=1.0)
    again = fusion.Schedules(theirs, partial(lr_scheduler.StepLR, step_size=2, gamma=0.5))
    scale = fusion.GradScaler(4, 2.0)
    other.load_state_dict(load_file(tmp_path / "array"))
    theirs.load_state_dict(held[0])
    again.load_state_dict(held[1])
    scale.load_state_dict(held[2])
    train(other, theirs, again, steps=range(5, 9))
    assert all(same(whole(array, optimizer, index), whole(other, theirs, index)) for index in range(4))
    assert torch.equal(scale.scales, scaler.scales)


# -- layers that differ, and loops -------------------------------------------------------------------------------------


class Wide(nn.Module):
    """A body of any width between two layers that are alike."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4, bias=False)
        self.body = nn.Sequential(
            nn.Linear(4, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 4)
        )
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self.first(x)))


def wide() -> list[nn.Module]:
    return [make(partial(Wide, width), 1, seed=width)[0] for width in (3, 5, 8)]


def test_layers_that_differ_are_looped_over_and_train_as_by_themselves() -> None:
    models = wide()
    array = fuse(models, loop=["body"])
    optimizer = fusion.Adam(array.parameters(), lr=RATES[:3], weight_decay=[0.0, 0.1, 0.2])
    train(array, optimizer, most=[1.0, 0.5, 2.0], steps=range(20))
    for index, model in enumerate(copies(models)):
        theirs = torch.optim.Adam(model.parameters(), lr=RATES[index], weight_decay=0.1 * index)
        trained(model, theirs, 20, loss, max_norm=[1.0, 0.5, 2.0][index])
        assert holds(array, index, model)
        for number, entry in theirs.state_dict()["state"].items():
            assert all(close(optimizer.extract(index)["state"][number][key], value) for key, value in entry.items())


def test_layers_that_differ_follow_a_selection_and_a_new_model() -> None:
    models = wide()
    array = fuse(models, loop=["body"])
    optimizer, scaler = fusion.Adam(array.parameters(), lr=RATES[:3]), fusion.GradScaler(3)
    train(array, optimizer, steps=range(3))
    before = [whole(array, optimizer, index) for index in range(3)]
    kept = array.select([2, 0, 2])
    optimizer.select(kept)
    scaler.select(kept)
    assert all(same(whole(array, optimizer, slot), before[index]) for slot, index in enumerate((2, 0, 2)))
    array.losses(F.cross_entropy, array(X[0]), Y[0]).sum().backward()
    assert not scaler.unscale_(optimizer).any()
    array.insert(1, wide()[0])
    assert same(state_of(array.extract(1)), state_of(wide()[0]))
    with pytest.raises(ConfigError, match="slot 1 cannot hold"):
        array.insert(1, wide()[1])


def test_one_layer_in_a_loop_changes_nothing() -> None:
    models = make(Wide)
    one, other = fuse(models), fuse(models, loop=["body.1", "body.3"])
    assert [name for name, _ in one.named_parameters()] == [name for name, _ in other.named_parameters()]
    for array in (one, other):
        train(array, fusion.SGD(array.parameters(), lr=0.1), steps=range(4))
    assert all(close(one.state_dict()[name], tensor, 1e-12) for name, tensor in other.state_dict().items())


class Choosing(nn.Module):
    """Decides by a number that it reads from a tensor."""

    def __init__(self, how: str = "if") -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(6, 3), how

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.how == "if" and y.sum() > 0:
            return -y
        if self.how == "item":
            return y * y.mean().item()
        if self.how == "inplace":
            return torch.zeros(len(x), 3, dtype=x.dtype).add_(y)
        return y


class Holder(nn.Module):
    """Holds a layer that decides."""

    def __init__(self, how: str = "if") -> None:
        super().__init__()
        self.chooses, self.head = Choosing(how), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.chooses(x))


@pytest.mark.parametrize(("how", "cause"), [("if", "path depends"), ("item", "reads"), ("inplace", "writes")])
def test_what_cannot_be_done_for_all_at_once_is_named_with_its_layer_and_can_be_looped(how: str, cause: str) -> None:
    models = make(partial(Holder, how), 3)
    with pytest.raises(ConfigError, match=rf"layer 'chooses'.*{cause}.*loop=\[\"chooses\"\]"):
        fuse(models)(X[0])
    for loop in (True, ["chooses"]):
        found = fuse(models, loop=loop)(X[0])
        assert all(close(found[i].detach(), model(X[0]).detach(), 1e-12) for i, model in enumerate(models))
    with pytest.raises(ConfigError, match=r"the model's own forward.*loop=True"):
        fuse(make(partial(Choosing, how), 2))(X[0])


class ReplacingBuffer(nn.Module):
    """Replaces a buffer instead of writing to it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones(6))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * (self.scale * x).mean(0).detach()
        return x * self.scale - self.mean


@pytest.mark.parametrize("loop", [False, True])
def test_buffers_that_are_replaced_are_kept(loop: bool) -> None:
    models = make(ReplacingBuffer)
    array, alone = fuse(models, loop=loop), copies(models)
    for step in range(3):
        array(X[step])
        for model in alone:
            model(X[step])
    assert all(
        close(array.extract(i).state_dict()["mean"], model.state_dict()["mean"], 1e-12) for i, model in enumerate(alone)
    )


def changed(**settings: Any) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, settings.pop("channels", 4), 3, **settings), nn.ReLU())


test_models_that_differ_are_refused_with_the_layer_and_the_difference = refusals(
    [
        (lambda: changed(stride=2), r"layer '0' \(Conv2d\): stride is \(1, 1\) in one and \(2, 2\)"),
        (lambda: changed(channels=5), r"layer '0' \(Conv2d\): parameter bias is float32\[4\]"),
        (lambda: changed(bias=False), "parameter bias is float32.*absent"),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh()), r"layer '1' \(ReLU\): the other's is Tanh"),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ReLU()), "layer '2'.* in one of them only"),
        (lambda: changed().requires_grad_(False), "frozen"),
        (lambda: changed().eval(), "training is True in one and False"),
        (lambda: changed().double(), "models 0 and 2 differ in structure.*float64"),
    ],
    lambda other: fuse([changed(), changed(), other()]),
)


class Constant(nn.Module):
    """Holds a tensor that is no buffer, and a function."""

    def __init__(self, value: float = 1.0, tied: bool = False) -> None:
        super().__init__()
        self.offset = torch.full((3,), value)
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        if tied:
            self.other.weight = self.one.weight
        self.act = lambda x: x * value

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.other(self.one(x)) + self.offset)


def test_what_differs_without_being_a_weight_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="act is"):
        fuse([Constant(), Constant(2.0)])
    with pytest.raises(ConfigError, match=r"tie their weights differently|parameter"):
        fuse([Constant(), Constant(tied=True)])
    assert fuse([Constant(tied=True), Constant(tied=True)]).size == 2


class Mode(Enum):
    """How a model computes."""

    FAST = 1
    EXACT = 2


class Slotted:
    """Compares by value, and has no dictionary of attributes."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slotted) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]


class Holding(nn.Module):
    """Holds anything as an attribute, and refers to itself in several ways."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.layer, self.held = nn.Linear(2, 2), held
        self.method, self.behind = self.forward, [weakref.ref(self), weakref.WeakSet([self])]
        self.circle: list[Any] = [SimpleNamespace(mark=object(), layers=[self.layer]), self]
        self.circle.append(self.circle)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


UNLIKE: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "a configuration": (lambda: SimpleNamespace(scale=1.0), lambda: SimpleNamespace(scale=5.0)),
    "a nested configuration": (
        lambda: [SimpleNamespace(own=SimpleNamespace(values=[1, 2]))],
        lambda: [SimpleNamespace(own=SimpleNamespace(values=[1, 3]))],
    ),
    "a function of torch": (lambda: torch.relu, lambda: torch.tanh),
    "a function": (lambda: F.relu, lambda: F.gelu),
    "an enumeration": (lambda: Mode.FAST, lambda: Mode.EXACT),
    "a set": (lambda: {1, 2}, lambda: {1, 3}),
    "an array": (lambda: np.arange(3), lambda: np.arange(3) + 1),
    "arrays of two lengths": (lambda: np.arange(3), lambda: np.arange(4)),
    "a value": (lambda: Slotted(1), lambda: Slotted(2)),
    "a range": (lambda: range(3), lambda: range(4)),
    "layers in a list": (lambda: [make(lambda: nn.Linear(2, 2), 1)[0]], lambda: [make(lambda: nn.Linear(2, 2), 2)[1]]),
}


@for_each(UNLIKE)
def test_objects_and_functions_that_differ_are_refused(name: str) -> None:
    one, other = UNLIKE[name]
    assert fuse([Holding(one()), Holding(one())]).size == 2
    with pytest.raises(ConfigError, match=r"models 0 and 1 differ in structure.*held[^ ]* is"):
        fuse([Holding(one()), Holding(other())])


def test_the_attribute_that_differs_within_an_object_is_named() -> None:
    one, other = (SimpleNamespace(own=SimpleNamespace(values=1, scale=scale)) for scale in (1.0, 5.0))
    one.circle, other.circle = one, other
    with pytest.raises(ConfigError, match=r"held\.own\.scale is 1\.0 in one and 5\.0 in the other"):
        fuse([Holding(one), Holding(other)])


def test_calls_that_cannot_be_are_refused_with_what_to_do() -> None:
    models = make(lambda: nn.Linear(6, 3))
    array = fuse(models)
    adam = lambda count: fusion.Adam(fuse(models[:count]).parameters())  # noqa: E731
    for call, words in (
        (lambda: fuse([]), "at least one model"),
        (lambda: fuse(models, [{}]), "made already"),
        (lambda: fuse(Net), "one mapping of arguments per model"),
        (lambda: fuse(models, seeds=[1]), "seeds of length 1: there are 3"),
        (lambda: fuse(Net, [{}, {}], seeds=[1]), "seeds of length 1: there are 2"),
        (lambda: fuse(models, loop=["body"]), "no such layer"),
        (lambda: array(Each(X[0][:2])), "Each of length 2"),
        (lambda: array.losses(lambda output: output, array(X[0])), "must be a scalar"),
        (lambda: array.extract(3), "slot 3: there are 3"),
        (lambda: array.select([]), "at least one model"),
        (lambda: array.select([-1]), "slot -1"),
        (lambda: array.insert(0, nn.Linear(6, 4)), "slot 0 cannot hold"),
        (lambda: array.set_dropout_rates("p", [0.1] * 3), "no dropout rate"),
        (lambda: array.load_state_dict({}), "not in both"),
        (lambda: array.load_state_dict(fuse(models[:2]).state_dict()), "Fuse as many models"),
        (lambda: fusion.Adam([]), "without parameters"),
        (lambda: fusion.Adam(array.parameters(), betas=(0.9,)), "a pair"),  # type: ignore[arg-type]
        (lambda: fusion.Adam(array.parameters()).reset(0, size=1.0), "has lr, beta1"),
        (lambda: fusion.Schedules(fusion.Adam(array.parameters()), []), "factories of length 0"),
        (lambda: fusion.GradScaler(2, growth_factor=0.5), "grow by more than 1"),
        (lambda: adam(3).load_state_dict(adam(2).state_dict()), "of 2 models, and there are 3"),
        (lambda: adam(3).load_state_dict(adam(3).extract(0)), "of one model's optimizer"),
        (lambda: array.losses(partial(F.cross_entropy, reduction="average"), array(X[0]), Y[0]), "reduction='average'"),
        (lambda: fusion.clip_grad_norm_(array.parameters(), -1.0, models=3), "positive"),
    ):
        with pytest.raises(ConfigError, match=words):
            call()
    with pytest.raises(ConfigError, match="Embedding"):
        fuse([nn.Embedding(3, 2, max_norm=1.0)])(torch.tensor([1]))


def test_dropout_rates_are_read_and_changed() -> None:
    array = fuse([Net(0.1), Net(0.3)], seeds=[0, 1])
    assert array.dropout_rates() == {"drop.p": (0.1, 0.3)}
    array.set_dropout_rates("drop.p", [0.6, 0.0])
    alone: Any = array.extract(0)
    assert alone.drop.p == 0.6
    with seeded(0):
        expected = alone(X[0].float())
    assert torch.allclose(array(X[0].float())[0], expected, atol=1e-6)
    with pytest.raises(ConfigError, match="probability"):
        array.set_dropout_rates("drop.p", [0.6, 1.5])


# -- choosing ----------------------------------------------------------------------------------------------------------


def test_candidates_are_measured_once_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(autotune.DETERMINISTIC)
    clear_autotune_cache()
    counted: list[str] = []
    measure: Any = autotune._measure

    def counting(candidates: Any, given: Any, *, gpu: torch.device | None) -> Any:
        counted.append(" ".join(candidates))
        return measure(candidates, given, gpu=gpu)

    monkeypatch.setattr(autotune, "_measure", counting)
    array = fuse(make(lambda: nn.Linear(6, 3)))
    with fusion.measuring():
        for _ in range(3):
            array(X[0])
        assert counted == ["side by side batched loop"]
        array(X[0][:5])
    assert len(counted) == 2 and len(fusion.autotune_choices()) == 2
    clear_autotune_cache()
    assert not fusion.autotune_choices()


def test_measuring_leaves_statistics_and_gradients_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[dict[str, Tensor]] = []
    for pinned in (True, False):
        monkeypatch.setenv(autotune.DETERMINISTIC, "1" if pinned else "0")
        clear_autotune_cache()
        array = fuse(make(lambda: nn.BatchNorm1d(6)))
        with fusion.measuring():
            array.losses(weighed, array(X[0])).sum().backward()
        runs.append(array.state_dict())
        assert array.state_dict()["num_batches_tracked"].tolist() == [1, 1, 1]
    assert all(close(runs[0][name], runs[1][name], 1e-12) for name in runs[0])


def test_the_number_of_calls_does_not_grow_with_the_number_of_models() -> None:
    counts: list[int] = []
    for size in (2, 12):
        array = fuse(make(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3)), size))
        optimizer = fusion.Adam(array.parameters(), lr=0.1)
        train(array, optimizer, steps=range(1))
        with profile(activities=[ProfilerActivity.CPU]) as found:
            train(array, optimizer, steps=range(1, 2))
        counts.append(sum(event.count for event in found.key_averages()))
    assert counts[1] <= counts[0] * 1.1


def test_views_work_wherever_the_models_axis_is() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x.view(2, 3, 2, 6))
            return y.view(2, 3, -1).view((6, 8)).view(-1)

    models = [Views().double() for _ in range(1)] * 3
    assert all(close(row.detach(), models[0](X[0]).detach(), 1e-12) for row in fuse(models)(X[0]))


def test_values_are_given_and_returned_in_trees() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, given: dict[str, Tensor], scale: float = 1.0) -> dict[str, Any]:
            return {"found": self.layer(given["x"]) * scale, "kind": "pair", "rest": [given["y"]]}

    models = [Pair().double()] * 2
    for loop in (False, True):
        found = fuse(models, loop=loop)({"x": X[0], "y": Each(values(2, 5))}, scale=2.0)
        assert found["kind"] == "pair" and found["found"].shape == (2, 12, 4)
        assert torch.equal(found["rest"][0], values(2, 5))


def test_a_trainable_layer_that_models_share_is_refused_and_copies_are_not() -> None:
    trunk = nn.Linear(3, 3)
    models = [nn.Sequential(trunk, nn.Linear(3, 2)) for _ in range(2)]
    with pytest.raises(ConfigError, match=r"models share the trainable parameter 0\.weight: .*copy\.deepcopy"):
        fuse(models)
    assert fuse([copy.deepcopy(model) for model in models]).size == 2
    trunk.requires_grad_(False)
    assert fuse(models).size == 2
