# SPDX-License-Identifier: Apache-2.0
"""An array trains like separate runs of its models, step for step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.grids import fast_where
from tests.oracles.fusion import LoopedLamb, copies, make, one_of, seeded, state_of, trained, values
from thinwire.arrays import fusion
from thinwire.arrays.fusion import Each, autotune, fuse
from thinwire.errors import ConfigError

STEPS = 50
X = values(STEPS, 12, 6)
Y = torch.randint(0, 3, (STEPS, 12), generator=torch.Generator().manual_seed(1))
RATES = [0.05, 0.01, 0.003]


class Net(nn.Module):
    """A network with batch norm, dropout and buffers."""

    def __init__(self, rate: float = 0.2) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(rate)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(autotune.DETERMINISTIC, "1")
    yield


def loss(model: nn.Module, step: int) -> Tensor:
    return F.cross_entropy(model(X[step]), Y[step])


CASES: dict[str, dict[str, Any]] = {
    "SGD": {
        "lr": RATES,
        "momentum": [0.0, 0.9, 0.5],
        "weight_decay": [0.0, 0.1, 0.01],
        "dampening": [0.1, 0.0, 0.3],
        "nesterov": [False, True, False],
    },
    "Adam": {
        "lr": RATES,
        "betas": ([0.9, 0.8, 0.7], [0.99, 0.9, 0.999]),
        "eps": [1e-8, 1e-6, 1e-4],
        "weight_decay": [0.0, 0.1, 0.01],
    },
    "AdamW": {"lr": RATES, "betas": ([0.9, 0.8, 0.7], 0.99), "weight_decay": [0.0, 0.1, 0.01], "amsgrad": True},
    "RMSprop": {
        "lr": RATES,
        "alpha": [0.9, 0.99, 0.8],
        "momentum": [0.0, 0.9, 0.1],
        "weight_decay": [0.0, 0.1, 0.01],
        "centered": True,
    },
    "Adagrad": {
        "lr": RATES,
        "lr_decay": [0.0, 0.1, 0.2],
        "weight_decay": [0.0, 0.1, 0.01],
        "initial_accumulator_value": [0.0, 0.1, 0.2],
    },
    "Adadelta": {"lr": [1.0, 0.5, 2.0], "rho": [0.9, 0.8, 0.7], "weight_decay": [0.0, 0.1, 0.01]},
}
SCHEDULES: list[Any] = [
    partial(lr_scheduler.StepLR, step_size=5, gamma=0.7),
    partial(lr_scheduler.CosineAnnealingLR, T_max=30),
    partial(lr_scheduler.ReduceLROnPlateau, patience=1),
]


def optimizer_of(name: str, array: Any, rows: bool = True, **settings: Any) -> Any:
    """An array's optimizer, by its row kernel or by torch for all models at once."""
    made = getattr(fusion, name)(array.parameters(), **settings)
    if not rows:
        made.row_kernel = False
    return made


def train(array: Any, optimizer: Any, schedules: Any = None, most: Any = None, steps: range = range(STEPS)) -> None:
    for step in steps:
        array.zero_grad()
        losses = array.losses(F.cross_entropy, array(X[step]), Y[step])
        losses.sum().backward()
        if most is not None:
            fusion.clip_grad_norm_(array.parameters(), most)
        optimizer.step()
        if schedules is not None:
            schedules.step(losses)


def close(ours: Any, theirs: Any, tolerance: float = 1e-10) -> bool:
    one, other = (torch.as_tensor(value, dtype=torch.float64) for value in (ours, theirs))
    return one.shape == other.shape and bool(torch.allclose(one, other, rtol=tolerance, atol=tolerance))


def holds(array: Any, slot: int, model: nn.Module) -> bool:
    """Whether a slot of the array has the model's tensors."""
    ours = array.extract(slot).state_dict()
    return all(close(ours[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "rows"),
    fast_where(lambda each: each in (("SGD", True), ("AdamW", False)), product(CASES, (True, False))),
)
@pytest.mark.slow
def test_fifty_steps_equal_separate_training_with_mixed_hyperparameters_and_schedules(name: str, rows: bool) -> None:
    models, most = make(Net), [0.5, 1.0, 2.0]
    array = fuse(models, seeds=range(3))
    optimizer = optimizer_of(name, array, rows, **CASES[name])
    train(array, optimizer, fusion.Schedules(optimizer, SCHEDULES), most)
    for index, model in enumerate(copies(models)):
        theirs = getattr(torch.optim, name)(model.parameters(), **one_of(CASES[name], index))
        trained(model, theirs, STEPS, loss, scheduler=SCHEDULES[index](theirs), max_norm=most[index], seed=index)
        assert holds(array, index, model)
        state, expected = optimizer.extract(index), theirs.state_dict()
        for number, entry in expected["state"].items():
            assert all(close(state["state"][number][key], value) for key, value in entry.items() if value is not None)
        for key, value in expected["param_groups"][0].items():
            if isinstance(value, float | tuple) and key != "initial_lr":
                assert close(state["param_groups"][0][key], value)
        theirs.load_state_dict(state)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam_with_the_same_numbers_for_all_is_adam(amsgrad: bool) -> None:
    models = make(Net)
    array = fuse(models, seeds=range(3))
    train(array, fusion.Adam(array.parameters(), lr=0.01, amsgrad=amsgrad), steps=range(20))
    for index, model in enumerate(copies(models)):
        trained(model, torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=amsgrad), 20, loss, seed=index)
        assert holds(array, index, model)


def test_lamb_equals_the_paper_s_loop() -> None:
    settings: dict[str, Any] = {
        "lr": RATES,
        "betas": (0.9, [0.99, 0.9, 0.999]),
        "eps": 1e-6,
        "weight_decay": [0, 0.1, 0.01],
    }
    models = make(Net)
    array = fuse(models, seeds=range(3))
    train(array, fusion.LAMB(array.parameters(), **settings))
    for index, model in enumerate(copies(models)):
        trained(model, LoopedLamb(model, **one_of(settings, index)), STEPS, loss, seed=index)  # type: ignore[arg-type]
        assert holds(array, index, model)


EVERY_SCHEDULE: list[Callable[[Any], Any]] = [
    partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 0.9**epoch),
    partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda epoch: 0.95),
    partial(lr_scheduler.MultiStepLR, milestones=[3, 6]),
    partial(lr_scheduler.ConstantLR, total_iters=3),
    partial(lr_scheduler.LinearLR, total_iters=6),
    partial(lr_scheduler.ExponentialLR, gamma=0.9),
    partial(lr_scheduler.PolynomialLR, total_iters=8),
    partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=4),
    partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=3),
    partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=20),
]


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_every_scheduler_moves_its_own_model_s_numbers(kind: str) -> None:
    count = len(EVERY_SCHEDULE)
    extra = {"momentum": 0.9} if kind == "SGD" else {}
    array = fuse(make(lambda: nn.Linear(6, 3), count))
    optimizer = optimizer_of(kind, array, lr=[0.01 * (1 + i) for i in range(count)], **extra)
    schedules = fusion.Schedules(optimizer, EVERY_SCHEDULE)
    genuine = [
        getattr(torch.optim, kind)([nn.Parameter(torch.zeros(1))], lr=0.01 * (1 + i), **extra) for i in range(count)
    ]
    theirs = [factory(one) for factory, one in zip(EVERY_SCHEDULE, genuine, strict=True)]
    for step in range(12):
        train(array, optimizer, schedules, steps=range(step, step + 1))
        for index, (one, scheduler) in enumerate(zip(genuine, theirs, strict=True)):
            one.step()
            scheduler.step()
            expected, ours = one.param_groups[0], optimizer.hyperparameters(index)
            assert ours["lr"] == expected["lr"]
            momentum = ours["momentum"] if kind == "SGD" else (ours["beta1"], ours["beta2"])
            assert momentum == expected["momentum" if kind == "SGD" else "betas"]


def test_an_edited_learning_rate_is_used_and_goes_on_from_there() -> None:
    array = fuse(make(lambda: nn.Linear(6, 3)))
    optimizer = fusion.SGD(array.parameters(), lr=0.1)
    schedules = fusion.Schedules(optimizer, partial(lr_scheduler.ExponentialLR, gamma=0.5))
    optimizer.param_groups[0]["lr"][1] = 0.4
    schedules.step()
    assert optimizer.param_groups[0]["lr"].tolist() == [0.05, 0.2, 0.05]


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "at once"])
@pytest.mark.parametrize("name", [*CASES, "LAMB"])
def test_a_model_that_diverges_leaves_the_others_bitwise_as_they_were(name: str, rows: bool) -> None:
    runs: list[Any] = []
    for broken in (False, True):
        array = fuse(make(Net, 4), seeds=range(4))
        if broken:
            with torch.no_grad():
                next(array.parameters())[2, 0, 0] = float("nan")
        train(
            array, optimizer_of(name, array, rows, lr=[0.1, 0.2, 0.3, 0.4]), most=[1.0, 2.0, 1.0, 3.0], steps=range(6)
        )
        runs.append(array)
    for index in (0, 1, 3):
        one, other = (state_of(run.extract(index)) for run in runs)
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert any(tensor.isnan().any() for tensor in state_of(runs[1].extract(2)).values())


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "at once"])
def test_a_slot_that_is_not_active_stays_as_it_is_bitwise(rows: bool) -> None:
    array = fuse(make(Net), seeds=range(3))
    optimizer = optimizer_of("Adam", array, rows, lr=RATES)
    train(array, optimizer, steps=range(3))
    held = state_of(array.extract(1)), optimizer.extract(1)
    optimizer.active[1] = False
    for parameter in array.parameters():
        parameter.grad = torch.full_like(parameter, float("nan")) if parameter.grad is None else parameter.grad
        parameter.grad[1] = float("nan")
    optimizer.step()
    now = array.extract(1).state_dict()
    assert all(torch.equal(now[name], dict(held[0])[name]) for name, _ in array.extract(1).named_parameters())
    for number, entry in held[1]["state"].items():
        assert all(torch.equal(optimizer.extract(1)["state"][number][key], value) for key, value in entry.items())
    assert optimizer.extract(0)["state"][0]["step"] == 4


def test_ignored_and_weighted_targets_have_each_model_s_own_denominator() -> None:
    models = make(lambda: nn.Linear(6, 4))
    array, x = fuse(models), values(9, 6)
    targets = torch.randint(0, 4, (3, 9), generator=torch.Generator().manual_seed(2))
    targets[0, :5] = targets[1, :1] = -1
    weight = torch.tensor([1.0, 0.2, 3.0, 0.7], dtype=torch.float64)
    for options in (
        {"ignore_index": -1},
        {"ignore_index": -1, "weight": weight},
        {"ignore_index": -1, "weight": weight, "label_smoothing": 0.1},
        {"ignore_index": -1, "reduction": "sum"},
    ):
        function = partial(F.cross_entropy, **options)
        array.zero_grad()
        found = array.losses(function, array(x), Each(targets))
        found.sum().backward()
        for index, model in enumerate(copies(models)):
            expected = function(model(x), targets[index])
            expected.backward()
            assert close(found[index].detach(), expected.detach(), 1e-12)
            for ours, theirs in zip(array.parameters(), model.parameters(), strict=True):
                assert ours.grad is not None and theirs.grad is not None
                assert close(ours.grad[index], theirs.grad, 1e-12)


@pytest.mark.parametrize("kind", ["classes", "soft", "single", "logarithms"])
def test_losses_of_every_kind_of_target_are_the_models_own(kind: str) -> None:
    models, x = make(lambda: nn.Linear(6, 4)), values(9, 6)
    function: Any = F.cross_entropy
    target = torch.randint(0, 4, (9,), generator=torch.Generator().manual_seed(2))
    if kind == "soft":
        target = values(9, 4).softmax(1)
    if kind == "single":
        x, target = x[0], target[0]
    if kind == "logarithms":
        function = lambda output, y: F.nll_loss(output.log_softmax(1), y)  # noqa: E731
    array = fuse(models)
    found = array.losses(function, array(x), target)
    assert all(close(found[i].detach(), function(model(x), target).detach(), 1e-12) for i, model in enumerate(models))


@pytest.mark.parametrize("rates", [[0.3, 0.3, 0.3], [0.0, 0.5, 0.9], [0.1, 0.2, 1.0]], ids=str)
@pytest.mark.parametrize("layer", [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout])
@pytest.mark.parametrize("loop", [False, True])
def test_dropout_draws_the_masks_of_a_run_by_itself(rates: list[float], layer: Any, loop: bool) -> None:
    models: list[nn.Module] = [nn.Sequential(nn.Conv1d(2, 3, 1).double(), layer(rate)) for rate in rates]
    if layer is nn.Dropout2d:
        models = [nn.Sequential(nn.Conv2d(2, 3, 1).double(), layer(rate)) for rate in rates]
    x = values(4, 2, 5, 5) if layer is nn.Dropout2d else values(4, 2, 5)
    array = fuse(models, seeds=[5, 6, 7], loop=loop)
    ours = [array(x), array(x)]
    for index, model in enumerate(models):
        with seeded(5 + index):
            assert all(close(found[index].detach(), model(x).detach(), 1e-12) for found in ours)
    assert torch.equal(array.eval()(x)[1], models[1].eval()(x)) or close(
        array(x)[1].detach(), models[1](x).detach(), 1e-12
    )


@pytest.mark.filterwarnings("ignore:dropout2d")
@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Dropout2d, (7, 6)),
        (nn.Dropout2d, (7, 5, 6)),
        (nn.Dropout2d, (4, 3, 5, 6)),
        (nn.Dropout1d, (7, 6)),
        (nn.Dropout1d, (4, 3, 6)),
        (nn.Dropout3d, (7, 2, 2, 6)),
        (nn.Dropout3d, (4, 3, 2, 2, 6)),
    ],
)
def test_dropout_of_channels_takes_the_axes_for_what_torch_takes_them(
    layer: Any, shape: tuple[int, ...], loop: bool
) -> None:
    array = fuse(lambda: nn.Sequential(nn.Linear(6, 6), layer(0.5)), [{}] * 3, seeds=[5, 6, 7], loop=loop)
    x = values(*shape).float()
    ours = array(x)
    for index in range(3):
        with seeded(5 + index):
            model = nn.Sequential(nn.Linear(6, 6), layer(0.5))
            assert torch.allclose(ours[index], model(x), atol=1e-6)


class Transformer(nn.Module):
    """A layer with dropout in five places, two of them within attention."""

    def __init__(self, rate: float, weights: bool) -> None:
        super().__init__()
        self.weights = weights
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=rate, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout=rate, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x := self.layer(x), x, x, need_weights=self.weights)[0]


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("loop", [(), True, ["layer"]], ids=str)
def test_dropout_within_attention_draws_the_masks_of_a_run_by_itself(weights: bool, loop: Any) -> None:
    models = [Transformer(rate, weights).double() for rate in (0.0, 0.2, 0.5)]
    x = values(3, 5, 8)
    ours = fuse(models, seeds=range(3), loop=loop)(x)
    for index, model in enumerate(models):
        with seeded(index):
            assert close(ours[index].detach(), model(x).detach(), 1e-12)


def test_without_seeds_masks_differ_between_models_and_have_their_rates() -> None:
    array = fuse([nn.Dropout(rate) for rate in (0.1, 0.5, 0.9)])
    dropped = (array(torch.ones(20000)) == 0).double().mean(1)
    assert torch.allclose(dropped, torch.tensor([0.1, 0.5, 0.9]).double(), atol=0.02)
    same = fuse([nn.Dropout(0.5) for _ in range(2)])(torch.ones(1000))
    assert not torch.equal(same[0], same[1])


def test_models_made_here_with_seeds_are_runs_by_themselves_from_the_start() -> None:
    array = fuse(Net, [{"rate": rate} for rate in (0.1, 0.2)], seeds=[8, 9])
    x = X[0].float()
    ours = array(x)
    for index, rate in enumerate((0.1, 0.2)):
        with seeded(8 + index):
            assert torch.allclose(ours[index], Net(rate)(x), atol=1e-6)


def test_a_scaler_holds_up_only_the_model_that_overflows() -> None:
    models = make(Net)
    array = fuse(models, seeds=range(3))
    optimizer, scaler = fusion.SGD(array.parameters(), lr=0.1), fusion.GradScaler(3, 8.0, growth_interval=2)
    genuine = [torch.amp.GradScaler("cpu", 8.0, growth_interval=2) for _ in models]
    alone = copies(models)
    theirs = [torch.optim.SGD(model.parameters(), lr=0.1) for model in alone]
    noise = [torch.Generator().manual_seed(index).get_state() for index in range(3)]
    for step in range(5):
        hurt = torch.tensor([1.0, float("inf") if step == 1 else 1.0, 1.0], dtype=torch.float64)
        array.zero_grad()
        losses = array.losses(F.cross_entropy, array(X[step]), Y[step])
        scaler.scale(losses * hurt).sum().backward()
        scaler.step(optimizer)
        scaler.update()
        for index, model in enumerate(alone):
            theirs[index].zero_grad()
            with torch.random.fork_rng():
                torch.set_rng_state(noise[index])
                found = loss(model, step)
                noise[index] = torch.get_rng_state()
            genuine[index].scale(found * hurt[index]).backward()
            genuine[index].step(theirs[index])
            genuine[index].update()
            assert scaler.extract(index) == genuine[index].state_dict()
    for index, model in enumerate(alone):
        assert holds(array, index, model)


def test_clipping_by_value_and_by_norm_is_every_model_s_own() -> None:
    models = make(Net)
    array = fuse(models, seeds=range(3))
    for by_norm in (True, False):
        array.zero_grad()
        array.losses(F.cross_entropy, array(X[0]), Y[0]).sum().backward()
        before = [[p.grad[index].clone() for p in array.parameters() if p.grad is not None] for index in range(3)]
        most = [0.01, 0.1, 100.0]
        norms = fusion.gradient_norms(array.parameters())
        if by_norm:
            assert torch.equal(fusion.clip_grad_norm_(array.parameters(), most), norms)
        else:
            fusion.clip_grad_value_(array.parameters(), most)
        for index in range(3):
            alone = [nn.Parameter(gradient.clone()) for gradient in before[index]]
            for parameter, gradient in zip(alone, before[index], strict=True):
                parameter.grad = gradient
            if by_norm:
                assert close(norms[index], nn.utils.clip_grad_norm_(alone, most[index]), 1e-12)
            else:
                nn.utils.clip_grad_value_(alone, most[index])
            for ours, theirs in zip(array.parameters(), alone, strict=True):
                assert ours.grad is not None and theirs.grad is not None
                assert close(ours.grad[index], theirs.grad, 1e-12)


def test_groups_of_parameters_have_hyperparameters_of_their_own() -> None:
    models = make(lambda: nn.Linear(6, 3))
    array = fuse(models)
    named = dict(array.named_parameters())
    groups = [{"params": [named["weight"]], "lr": RATES}, {"params": [named["bias"]], "weight_decay": 0.3}]
    train(array, fusion.SGD(groups, lr=0.2, weight_decay=[0.0, 0.1, 0.2]), steps=range(5))
    for index, model in enumerate(copies(models)):
        own = dict(model.named_parameters())
        alone: list[Any] = [
            {"params": [own["weight"]], "lr": RATES[index]},
            {"params": [own["bias"]], "weight_decay": 0.3},
        ]
        trained(model, torch.optim.SGD(alone, lr=0.2, weight_decay=[0.0, 0.1, 0.2][index]), 5, loss)
        assert holds(array, index, model)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": [0.1, 0.2]}, "lr of shape"),
        ({"lr": [0.1, -0.2, 0.1]}, "of model 1"),
        ({"lr": 0.1, "momentum": float("nan")}, "momentum"),
        ({"lr": 0.1, "nesterov": [False, True, False]}, "nesterov of model 1"),
    ],
)
def test_hyperparameters_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    array = fuse(make(lambda: nn.Linear(6, 3)))
    with pytest.raises(ConfigError, match=words):
        fusion.SGD(array.parameters(), **settings)


class Tempered(nn.Module):
    """A layer, and a parameter that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 3), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale.exp()


@pytest.mark.parametrize("name", ["SGD", "LAMB"])
def test_parameters_that_are_one_number_are_scaled_clipped_and_trained(name: str) -> None:
    models = make(Tempered)
    array = fuse(models)
    optimizer, scaler = getattr(fusion, name)(array.parameters(), lr=RATES), fusion.GradScaler(3, 8.0)
    for step in range(4):
        array.zero_grad()
        scaler.scale(array.losses(F.cross_entropy, array(X[step]), Y[step])).sum().backward()
        assert not scaler.unscale_(optimizer).any()
        fusion.clip_grad_norm_(array.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    for index, model in enumerate(copies(models)):
        own: Any = (
            torch.optim.SGD(model.parameters(), lr=RATES[index])
            if name == "SGD"
            else LoopedLamb(model, lr=RATES[index], betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
        )
        trained(model, own, 4, loss, max_norm=0.5)
        assert holds(array, index, model)


class Masked(nn.Module):
    """Attention with dropout, in which some queries may attend to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q = self.layer(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=0.3)


@pytest.mark.parametrize("loop", [False, True])
def test_queries_without_keys_are_zero_under_dropout_too(loop: bool) -> None:
    array = fuse(Masked, [{}] * 2, seeds=[4, 5], loop=loop)
    x, mask = values(3, 5, 6).float(), torch.ones(3, 1, 5, 5, dtype=torch.bool)
    mask[1] = mask[2, :, 3] = False
    ours = array(x, mask)
    ours.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in array.parameters())
    for index in range(2):
        with seeded(4 + index):
            assert torch.allclose(ours[index], Masked()(x, mask), atol=1e-6)


class Asking(nn.Module):
    """Computes with its rate, and drops by functions that take it."""

    def __init__(self, rate: float, how: str) -> None:
        super().__init__()
        self.drop, self.how = nn.Dropout(rate), how

    def forward(self, x: Tensor) -> Tensor:
        rate = self.drop.p
        if self.how == "compares":
            return self.drop(x) if rate > 0 else x
        if self.how == "computes":
            return x * torch.bernoulli(torch.full_like(x, 1 - rate))
        if self.how == "fills":
            return x * torch.empty_like(x).bernoulli_(rate)
        return torch.dropout(x, rate, self.training) if self.how == "drops" else F.feature_alpha_dropout(x, rate, True)


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("how", ["compares", "computes", "fills", "drops", "drops channels"])
def test_no_model_has_the_rate_of_the_first(how: str, loop: bool) -> None:
    rates, x = [0.0, 0.4, 0.9], values(6, 5, 3)
    array = fuse([Asking(rate, how) for rate in rates], seeds=[5, 6, 7], loop=loop)
    if how in ("compares", "computes") and not loop:
        with pytest.raises(ConfigError, match=r"dropout rates 0\.0, 0\.4, 0\.9.*loop="):
            array(x)
        return
    ours = array(x)
    for index, rate in enumerate(rates):
        with seeded(5 + index):
            assert torch.equal(ours[index], Asking(rate, how)(x))
