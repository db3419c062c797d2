# SPDX-License-Identifier: Apache-2.0
"""Every implementation of an operation computes what torch computes, and the fastest is chosen."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.arrays.fusion import (
    Each,
    autotune,
    autotune_cache,
    autotune_choices,
    clear_autotune_cache,
    fuse,
    measuring,
    normalisation,
)
from thinwire.arrays.fusion.batch import Batch, loop
from thinwire.core.kernels.base import compiled

MODELS = 3


@pytest.fixture(autouse=True)
def nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path))
    yield
    clear_autotune_cache()


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def forced(monkeypatch: pytest.MonkeyPatch, wanted: str) -> list[str]:
    """Use the wanted implementation wherever it is a candidate; returns the operations that it was used for."""
    taken: list[str] = []

    # Small tensors are treated as large ones.
    monkeypatch.setattr("thinwire.arrays.fusion.dense.STREAM_BYTES", 0)
    if wanted == "loop in place":
        monkeypatch.setattr("thinwire.arrays.fusion.convolution._LARGE_BYTES", 0)
        wanted = "loop"

    def only(name: str, candidates: dict[str, Callable[..., Batch]], values: Any, settings: Any = ()) -> Batch:
        if wanted in candidates:
            taken.append(name)
        return candidates.get(wanted, next(iter(candidates.values())))(*values)

    for module in ("convolution", "dense", "losses", "normalisation"):
        monkeypatch.setattr(f"thinwire.arrays.fusion.{module}.run_fastest", only)
    return taken


def gradients(loss: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """First derivatives, and the derivatives of the sum of their squares."""
    first = torch.autograd.grad(loss, tensors, create_graph=True)
    second = torch.autograd.grad(sum(one.square().sum() for one in first), tensors, allow_unused=True)  # type: ignore
    return (*first, *(each for each in second if each is not None))


def changed(model: nn.Module, place: int) -> nn.Module:
    """Give a model a gain and a shift of its own."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.5 + place if name == "weight" else -1.0 * place)
    return model


class Turned(nn.Module):
    """Its output is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(-1, -2)


NORMALISED: list[tuple[str, Callable[[], nn.Module], tuple[int, ...], list[str]]] = [
    ("layer norm", lambda: nn.LayerNorm(5), (4, 2, 5), ["normalise then scale", "loop", "kernel"]),
    ("group norm", lambda: nn.GroupNorm(2, 4), (3, 4, 2, 3), ["channels", "loop"]),
    ("batch norm", lambda: nn.BatchNorm2d(4), (3, 4, 2, 3), ["channels", "loop", "kernel", "normalise once"]),
    ("batch norm of vectors", lambda: nn.BatchNorm1d(4), (6, 4), ["channels", "loop", "kernel", "normalise once"]),
]
CONVOLVED: list[tuple[str, Callable[[], nn.Module], tuple[int, ...], list[str]]] = [
    ("conv1d", lambda: nn.Conv1d(4, 2, 3, padding=1, groups=2), (3, 4, 5), ["loop", "grouped", "loop in place"]),
    ("conv1d without groups", lambda: nn.Conv1d(4, 2, 3, 1, 2, 2), (3, 4, 9), ["grouped"]),
    ("conv2d", lambda: nn.Conv2d(2, 3, 3, stride=2, bias=False), (3, 2, 5, 5), ["loop", "unfolded", "loop in place"]),
    ("conv2d with a shift", lambda: nn.Conv2d(2, 3, (3, 2), 2, 1), (3, 2, 5, 6), ["unfolded"]),
    (
        "transposed",
        lambda: nn.ConvTranspose2d(2, 3, 3, 2, 1, 1),
        (3, 2, 4, 4),
        ["loop", "grouped", "loop in place"],
    ),
    ("conv2d of one place", lambda: nn.Conv2d(4, 3, 1), (3, 4, 2, 3), ["loop", "products"]),
    ("linear", lambda: nn.Linear(4, 3), (5, 4), ["loop", "batched", "side by side", "kernel"]),
    ("linear of what is turned", lambda: nn.Sequential(Turned(), nn.Linear(4, 3)), (4, 5), ["batched", "kernel"]),
    ("linear, no shift", lambda: nn.Linear(4, 3, bias=False), (2, 5, 4), ["batched", "kernel"]),
]
# These need an input that all models share.
ONLY_SHARED = {
    ("normalise once", "batch norm"),
    ("normalise once", "batch norm of vectors"),
    ("side by side", "linear"),
}
EVERY = [
    pytest.param(factory, shape, candidate, given, id=f"{name}, {candidate}, {given}")
    for name, factory, shape, candidates in [*NORMALISED, *CONVOLVED]
    for candidate in candidates
    for given in ("models first", "samples first", "shared")
    if given == "shared" or (candidate, name) not in ONLY_SHARED
]


@pytest.mark.parametrize(("factory", "shape", "candidate", "given"), EVERY)
def test_every_implementation_has_torchs_first_and_second_derivatives(
    factory: Callable[[], nn.Module],
    shape: tuple[int, ...],
    candidate: str,
    given: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The kernels are of single precision.
    dtype, tolerance = (torch.float32, 2e-4) if candidate == "kernel" else (torch.float64, 1e-9)
    if candidate == "kernel" and compiled(torch.zeros(1)) is None:
        pytest.skip("no C compiler")
    models = [changed(factory().to(dtype), place) for place in range(MODELS)]
    own = given != "shared"
    x = drawn(*((MODELS, *shape) if own else shape)).to(dtype)
    x = (x.transpose(0, 1).contiguous().transpose(0, 1) if given == "samples first" else x).requires_grad_()
    taken, array = forced(monkeypatch, candidate), fuse(models)
    found = gradients(array(Each(x) if own else x).pow(3).sum(), [x, *array.parameters()] if own else [x])
    assert taken
    if own:
        rows = [row.detach().requires_grad_() for row in x]
        for place, (model, row) in enumerate(zip(models, rows, strict=True)):
            same(found, gradients(model(row).pow(3).sum(), [row, *model.parameters()]), place, tolerance)
    else:
        alone = x.detach().requires_grad_()
        total = torch.stack([model(alone).pow(3).sum() for model in models]).sum()
        same([one.unsqueeze(0) for one in found], gradients(total, [alone]), 0, tolerance)
    for ours, theirs in zip(
        array.parameters(), zip(*(model.parameters() for model in models), strict=True), strict=True
    ):
        slopes = torch.autograd.grad(array(Each(x) if own else x).pow(3).sum(), ours)[0]
        assert slopes.is_contiguous()
        for place, (model, parameter) in enumerate(zip(models, theirs, strict=True)):
            wanted = torch.autograd.grad(model(x[place] if own else x).pow(3).sum(), parameter)
            same([slopes], wanted, place, tolerance)


@pytest.mark.parametrize(("factory", "shape", "candidate", "given"), EVERY)
def test_what_every_implementation_returns_may_be_changed_in_place(
    factory: Callable[[], nn.Module],
    shape: tuple[int, ...],
    candidate: str,
    given: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken, own = forced(monkeypatch, candidate), given != "shared"
    models = [nn.Sequential(changed(factory(), place), nn.ReLU(inplace=True)) for place in range(MODELS)]
    x = drawn(*((MODELS, *shape) if own else shape)).float()
    x = (x.transpose(0, 1).contiguous().transpose(0, 1) if given == "samples first" else x).requires_grad_()
    array = fuse(models)
    found = array(Each(x) if own else x)
    slopes = torch.autograd.grad(found.square().sum(), list(array.parameters()))
    assert taken or compiled(x) is None
    for place, model in enumerate(models):
        wanted = model(x[place] if own else x)
        theirs = torch.autograd.grad(wanted.square().sum(), list(model.parameters()))
        same([found, *slopes], [wanted, *theirs], place, 2e-4)


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor], place: int, tolerance: float) -> None:
    """Of model `place`."""
    for one, other in zip(ours, theirs, strict=True):
        scale = float(other.detach().abs().max())
        torch.testing.assert_close(one[place], other, rtol=tolerance, atol=tolerance * max(scale, 1.0))


def test_normalisation_by_kernel_keeps_the_axis_of_the_models() -> None:
    if compiled(torch.zeros(1)) is None:
        pytest.skip("no C compiler")
    x, affine = torch.ones(MODELS, 4, 6, 5), Batch(torch.ones(MODELS, 6), 0)
    for given, axis in ((Batch(x, 0), 0), (Batch(x.transpose(0, 1).contiguous(), 1), 1), (x[0], 0)):
        found = normalisation._batch_norm_by_kernel(MODELS, 0.1, 1e-5, given, None, None, affine, affine)
        assert found.axis == axis and found.shape == (4, 6, 5) and found.tensor.is_contiguous()


class Peaks(torch.nn.Module):
    """A pointwise convolution and the maxima of its outputs, some of which are equal."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.filters = torch.nn.Conv1d(3, 2, 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        found = self.filters(x).relu()
        return found.amax(2).pow(3) + found.pow(3).sum(2)


@pytest.mark.parametrize("models_first", [True, False])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_pointwise_convolutions_by_products_have_torchs_derivatives(
    bias: bool, own: bool, models_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = forced(monkeypatch, "products")
    models = [Peaks(bias).double() for _ in range(MODELS)]
    x = drawn(MODELS, 4, 3, 5)
    x[:, :, :, 3] = x[:, :, :, 1]
    x = x if models_first else x.transpose(0, 1).contiguous().transpose(0, 1)
    given = (x if own else x[0].clone()).requires_grad_()
    array = fuse(models)
    loss = array(Each(given) if own else given).sum()
    of_x = torch.autograd.grad(loss, given, retain_graph=True)[0]
    # Of an input that is shared the first derivative is a sum over models, and the second mixes them.
    found = gradients(loss, [given, *array.parameters()] if own else list(array.parameters()))
    assert taken == ["conv1d"]
    assert found[own].is_contiguous()
    total = torch.zeros_like(x[0])
    for place, (model, row) in enumerate(zip(models, x if own else [x[0]] * MODELS, strict=True)):
        alone = row.detach().requires_grad_()
        wanted = gradients(model(alone).sum(), [alone, *model.parameters()] if own else list(model.parameters()))
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours[place], theirs, rtol=1e-10, atol=1e-10)
        total += torch.autograd.grad(model(alone).sum(), alone)[0]
    if not own:
        torch.testing.assert_close(of_x, total, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [-100, 1])
@pytest.mark.parametrize("own", [True, False])
def test_cross_entropy_in_steps_is_torchs(
    reduction: str, ignored: int, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = forced(monkeypatch, "in steps")
    array = fuse([torch.nn.Linear(1, 1) for _ in range(MODELS)])
    logits = drawn(MODELS, 6, 4, 2).requires_grad_()
    targets = torch.randint(0, 4, (MODELS, 6, 2), generator=torch.Generator().manual_seed(1))
    targets[1, 0, 0] = ignored

    def loss(output: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(output, wanted, ignore_index=ignored, reduction=reduction)

    found = array.map(loss, Each(logits), Each(targets) if own else targets[1])
    assert taken == ["cross_entropy"]
    context = loop(loss, MODELS, Batch(logits, 0), Batch(targets, 0) if own else targets[1]).tensor
    torch.testing.assert_close(found, context, rtol=1e-12, atol=1e-12)
    ours, theirs = gradients(found.square().sum(), [logits]), gradients(context.square().sum(), [logits])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_a_large_logit_does_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    forced(monkeypatch, "in steps")
    array = fuse([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])
    logits = torch.tensor([[[1000.0, 0.0]], [[0.0, -1000.0]]])
    found = array.losses(F.cross_entropy, logits, torch.tensor([1]))
    torch.testing.assert_close(found, torch.tensor([1000.0, 1000.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_subnormal_probabilities_are_zero_and_impossible_classes_are_torchs(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced(monkeypatch, "in steps")
    least = torch.finfo(dtype).tiny
    rows = [[0.0, -50.0, math.log(least) + 2, math.log(least) - 2, -2000.0], [0.0, -math.inf, 1.0, -math.inf, 2.0]]
    logits = torch.tensor([rows, rows], dtype=dtype, requires_grad=True)
    other = logits.detach().clone().requires_grad_()
    found = fuse([torch.nn.Linear(1, 1)] * 2).losses(F.cross_entropy, logits, torch.tensor([3, 2]))
    wanted = torch.stack([F.cross_entropy(row, torch.tensor([3, 2])) for row in other])
    torch.testing.assert_close(found, wanted)
    ours, theirs = (torch.autograd.grad(x.sum(), y)[0] for x, y in ((found, logits), (wanted, other)))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=4 * least)
    assert torch.equal(ours == 0, theirs.abs() <= 2 * least)


def test_under_autocast_products_are_torchs_own() -> None:
    array = fuse([torch.nn.Linear(4, 4) for _ in range(2)])
    with torch.autocast("cpu", dtype=torch.bfloat16), measuring():
        found = array(torch.ones(3, 4))
    assert found.dtype == torch.bfloat16
    found.float().sum().backward()
    assert all(parameter.grad is not None for parameter in array.parameters())
    assert autotune_choices()


# -- choosing ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Choose between candidates, the last of which is fastest, for an input of that many numbers."""
    monkeypatch.setattr(
        autotune,
        "_measure",
        lambda candidates, given, *, gpu: {name: 1 / (1 + place) for place, name in enumerate(candidates)},
    )
    taken: list[str] = []

    def implementation(name: str) -> Callable[..., Batch]:
        return lambda x: taken.append(name) or Batch(x, 0)

    def choose(count: int, *names: str) -> str:
        autotune.run_fastest("test", {name: implementation(name) for name in names}, (torch.zeros(2, count),))
        return taken.pop()

    return choose


def test_a_case_is_measured_after_as_many_uses_as_repay_it(offered: Callable[..., str]) -> None:
    clear_autotune_cache()
    assert [offered(3, "first", "best") for _ in range(autotune.USES_BEFORE_MEASURING)] == [
        "first"
    ] * autotune.USES_BEFORE_MEASURING
    assert not autotune_choices()
    assert offered(3, "first", "best") == offered(3, "first", "best") == "best"
    with torch.no_grad():  # the same case for a tensor without a gradient
        assert offered(3, "first", "best") == "best"
    assert offered(4, "first", "best") == "first"
    with autotune.without_autotuning():
        assert offered(3, "first", "best") == "first"
    with measuring():
        assert offered(4, "first", "best") == "best"
    assert list(autotune_choices().values()) == ["best", "best"]


def test_an_implementation_that_is_slow_only_at_its_first_use_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_autotune_cache()
    now, used = [0.0], Counter[str]()
    monkeypatch.setattr(autotune, "thread_time", lambda: now[0])
    monkeypatch.setattr(autotune, "perf_counter", lambda: now[0])

    def implementation(name: str, seconds: float) -> Callable[[Tensor], Batch]:
        def work(x: Tensor) -> Batch:
            now[0] += 10.0 if name == "slow at first" and not used[name] else seconds
            used[name] += 1
            return Batch(x, 0)

        return work

    candidates = {
        "steady": implementation("steady", 2.0),
        "slow at first": implementation("slow at first", 1.0),
        "slow": implementation("slow", 9.0),
    }
    with measuring():
        autotune.run_fastest("test", candidates, (torch.zeros(2, 3),))
    assert list(autotune_choices().values()) == ["slow at first"]
    assert used["slow"] == 2


@pytest.mark.parametrize(("seconds", "taken"), [((1.0, 0.99), "first"), ((1.0, 0.97), "other"), ((1.0, 1.5), "first")])
def test_of_candidates_that_hardly_differ_the_first_is_taken(
    seconds: tuple[float, float], taken: str, offered: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clear_autotune_cache()
    monkeypatch.setattr(
        autotune, "_measure", lambda candidates, given, *, gpu: dict(zip(candidates, seconds, strict=True))
    )
    with measuring():
        assert offered(3, "first", "other") == taken


def test_the_next_process_uses_what_was_measured(offered: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_chosen", "_uses"):
        getattr(autotune, name).clear()
    monkeypatch.setattr(autotune, "_cache", autotune_cache.AutotuneCache())
    with measuring():
        assert [offered(count, "first", "best") for count in (3, 4)] == ["best", "best"]
    for name in ("_chosen", "_uses"):
        getattr(autotune, name).clear()
    monkeypatch.setattr(autotune, "_cache", autotune_cache.AutotuneCache())
    assert [offered(count, "first", "best") for count in (3, 5)] == ["best", "first"]
    # With other candidates another one may be the fastest.
    assert offered(4, "first", "best", "new") == "first"
    clear_autotune_cache()
    assert offered(3, "first", "best") == "first"


def test_measurements_of_several_processes_are_merged_and_the_oldest_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune_cache, "_MAX_ENTRIES", 3)
    one, other = autotune_cache.AutotuneCache(), autotune_cache.AutotuneCache()
    for cache, cases in ((one, "abc"), (other, "cd")):
        for case in cases:
            cache.put(case, f"name of {cases}")
    assert json.loads(autotune_cache.cache_path().read_text()) == {
        "b": "name of abc",
        "c": "name of cd",
        "d": "name of cd",
    }
    assert autotune_cache.AutotuneCache().get("c") == "name of cd" and autotune_cache.AutotuneCache().get("a") is None


@pytest.mark.every_case
@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", None], ids=repr)
def test_a_file_that_cannot_be_read_is_ignored(content: bytes | None) -> None:
    path = autotune_cache.cache_path()
    path.parent.mkdir()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    cache = autotune_cache.AutotuneCache()
    assert cache.get("case") is None
    cache.put("case", "name")
    assert autotune_cache.AutotuneCache().get("case") == (None if content is None else "name")
