# SPDX-License-Identifier: Apache-2.0
"""An array under `attach`: each of its models trains as if it were attached alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import thinwire
from tests.arrays.fusion.test_life import wide
from tests.arrays.fusion.test_training import Net
from tests.grids import fast_where
from tests.oracles.fusion import copies, make
from tests.pool import run_processes
from tests.rules import refusals
from thinwire import (
    AllReduce,
    Bf16,
    Comm,
    DiLoCo,
    ErrorFeedback,
    Gossip,
    LocalSGD,
    MismatchError,
    NonFiniteError,
    OneBit,
    PowerSGD,
    PushSum,
    Quantize,
    SlowMo,
    Strategy,
    Streaming,
    TopK,
    Worker,
)
from thinwire.arrays import fusion
from thinwire.arrays.fusion import FusedArray, autotune, capture, checkpoints
from thinwire.errors import CheckpointError, ConfigError

B, STEPS = 3, 7
RATES = [0.05, 0.01, 0.1]
MOMENTA = [0.9, 0.0, 0.5]
FAST = [
    AllReduce(),
    LocalSGD(3),
    SlowMo(period=3, momentum=0.6, lr=0.8),
    DiLoCo(period=4, fragments=2, delay=1),
    AllReduce(ErrorFeedback(TopK(0.3))),
    LocalSGD(3, codec=ErrorFeedback(OneBit())),
]
STRATEGIES: list[Strategy] = [
    *FAST,
    AllReduce(Bf16()),
    AllReduce(Quantize(4)),
    AllReduce(PowerSGD(1)),
    SlowMo(AllReduce(), period=2, momentum=0.5),
    DiLoCo(period=3, codec=ErrorFeedback(TopK(0.5))),
    Streaming(LocalSGD(4), fragments=2),
    Gossip(),
    PushSum(),
    thinwire.Sharded(SlowMo(period=2)),
]


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(autotune.DETERMINISTIC, "1")


def quiet() -> nn.Module:
    """Normalised, with buffers; nothing drawn."""
    return Net(0.0)


# Threads share torch's own generator, so all models are made before there are any.
MADE, DROPPING, WIDE = make(quiet, B), make(Net, B), wide()


def data(rank: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(8, 6, generator=draw, dtype=torch.float64), torch.randint(0, 3, (8,), generator=draw)


def begun(comm: Comm | None, strategy: Strategy | str, kind: str = "SGD", **settings: Any) -> tuple[FusedArray, Worker]:
    array = fusion.fuse(copies(MADE))
    more = {"momentum": MOMENTA} if kind == "SGD" else {}
    optimizer = getattr(fusion, kind)(array.parameters(), lr=RATES, **more)
    return array, thinwire.attach(array, optimizer, strategy, comm=comm, **settings)


def trained(array: FusedArray, worker: Worker, steps: range, scaler: Any = None) -> None:
    for step in steps:
        x, y = data(worker.rank, step)
        array.zero_grad()
        losses = array.losses(F.cross_entropy, array(x), y)
        if scaler is None:
            losses.sum().backward()
            worker.optimizer.step()
        else:
            scaler.scale(losses).sum().backward()
            scaler.step(worker.optimizer)
            scaler.update()


def plain(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def ended(array: FusedArray) -> list[dict[str, Tensor]]:
    return [plain(array.extract(index)) for index in range(array.size)]


def together(strategy: Strategy, kind: str, settings: dict[str, Any], comm: Comm | None = None) -> Any:
    """One rank's run of the array: its models, its models in consensus, and the bytes that it sent."""
    array, worker = begun(comm, strategy, kind, **settings)
    before = worker.comm.meter.payload_bytes
    trained(array, worker, range(STEPS))
    sent = worker.comm.meter.payload_bytes - before
    with worker.consensus():
        agreed = ended(array)
    worker.detach()
    return ended(array), agreed, sent


def alone(index: int, strategy: Strategy, kind: str, settings: dict[str, Any], comm: Comm) -> Any:
    """One rank's run of one model by torch."""
    (model,) = copies(MADE[index : index + 1])
    more = {"momentum": MOMENTA[index]} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=RATES[index], **more)
    worker = thinwire.attach(model, optimizer, strategy, comm=comm, **settings)
    before = worker.comm.meter.payload_bytes
    for step in range(STEPS):
        x, y = data(worker.rank, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    sent = worker.comm.meter.payload_bytes - before
    with worker.consensus():
        agreed = plain(model)
    worker.detach()
    return plain(model), agreed, sent


def compare(size: int, arrays: list[Any], *given: Any) -> None:
    """Compare every rank's array with separate runs of its models."""
    singles = [thinwire.run_threads(size, partial(alone, index, *given)) for index in range(B)]
    for rank, (models, agreed, sent) in enumerate(arrays):
        for index in range(B):
            own, consensus, _ = singles[index][rank]
            torch.testing.assert_close(models[index], own, rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(agreed[index], consensus, rtol=1e-11, atol=1e-11)
        assert sent == pytest.approx(sum(singles[index][rank][2] for index in range(B)))


@pytest.mark.parametrize("kind", fast_where(lambda kind: kind == "SGD", ["SGD", "AdamW"]))
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strategy", fast_where(lambda each: each in FAST, STRATEGIES), ids=repr)
def test_every_model_trains_as_if_it_were_attached_alone(strategy: Strategy, size: int, kind: str) -> None:
    if kind == "AdamW" and any(type(each) is OneBit for each in pytree.tree_leaves(vars(strategy))):
        pytest.skip("a codec of signs")
    given = (strategy, kind, {})
    compare(size, thinwire.run_threads(size, partial(together, *given)), *given)


def test_buckets_are_cut_as_for_one_model_so_that_each_has_the_same_scales() -> None:
    given = (AllReduce(Quantize(4)), "SGD", {"bucket_bytes": 256})
    compare(2, thinwire.run_threads(2, partial(together, *given)), *given)


def on_a_rank(*given: Any) -> Any:
    """For processes: nothing is measured there either, and tensors are returned as NumPy arrays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(autotune.DETERMINISTIC, "1")
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.numpy(), together(*given))


@pytest.mark.parametrize("strategy", fast_where(lambda each: each == FAST[2], FAST[:5]), ids=repr)
def test_every_model_trains_as_if_it_were_attached_alone_on_processes(strategy: Strategy) -> None:
    given = (strategy, "SGD", {})
    arrays = run_processes(2, on_a_rank, *given)
    compare(2, pytree.tree_map_only(np.ndarray, torch.as_tensor, arrays), *given)


def test_parameter_groups_have_learning_rates_of_their_own() -> None:
    rates, strategy = [[0.05, 0.01, 0.1], [0.02, 0.01, 0.03]], SlowMo(period=2, momentum=0.6)

    def groups(parameters: list[nn.Parameter], index: int | None) -> list[dict[str, Any]]:
        own = [each if index is None else each[index] for each in rates]
        return [{"params": parameters[:2], "lr": own[0]}, {"params": parameters[2:], "lr": own[1]}]

    def fused(comm: Comm) -> list[dict[str, Tensor]]:
        array = fusion.fuse(copies(MADE))
        worker = thinwire.attach(array, fusion.SGD(groups(list(array.parameters()), None)), strategy, comm=comm)
        trained(array, worker, range(4))
        return ended(array)

    def single(index: int, comm: Comm) -> dict[str, Tensor]:
        (model,) = copies(MADE[index : index + 1])
        optimizer = torch.optim.SGD(groups(list(model.parameters()), index))
        thinwire.attach(model, optimizer, strategy, comm=comm)
        for step in range(4):
            x, y = data(comm.rank, step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return plain(model)

    singles = [thinwire.run_threads(2, partial(single, index)) for index in range(B)]
    for rank, models in enumerate(thinwire.run_threads(2, fused)):
        for index in range(B):
            torch.testing.assert_close(models[index], singles[index][rank], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("strategy", [AllReduce(), AllReduce(ErrorFeedback(TopK(0.3))), SlowMo(period=2)], ids=repr)
def test_a_model_that_diverges_leaves_the_others_bitwise_alone(strategy: Strategy, tmp_path: Path) -> None:
    def work(spoil: bool, comm: Comm) -> Any:
        array, worker = begun(comm, strategy)
        trained(array, worker, range(2))
        if spoil and comm.rank == 1:
            with torch.no_grad():
                next(array.parameters())[1] = torch.nan
        trained(array, worker, range(2, 6))
        if spoil:
            worker.save(tmp_path)
            worker.load(tmp_path)
        return ended(array)

    for ours, theirs in zip(*(thinwire.run_threads(2, partial(work, spoil)) for spoil in (True, False)), strict=True):
        assert ours[1]["first.weight"].isnan().all()
        for index in (0, 2):
            assert all(torch.equal(ours[index][name], theirs[index][name]) for name in ours[index])


def test_a_gradient_that_is_not_finite_ends_the_run_of_all_models_if_it_is_told_to() -> None:
    def work(comm: Comm) -> None:
        array, worker = begun(comm, AllReduce(), nonfinite="raise")
        trained(array, worker, range(1))
        with torch.no_grad():
            next(array.parameters())[1] = torch.nan
        with pytest.raises(NonFiniteError, match=r"gradient of first.weight on rank 0 is NaN"):
            trained(array, worker, range(1, 2))

    thinwire.run_threads(2, work)


def test_all_workers_skip_the_step_of_a_model_that_overflows() -> None:
    def work(comm: Comm) -> Any:
        array, worker = begun(comm, AllReduce(), "AdamW")
        scaler = fusion.GradScaler(B, 8.0)
        trained(array, worker, range(2), scaler)
        x, y = data(comm.rank, 2)
        array.zero_grad()
        scale = torch.tensor([1.0, torch.inf if comm.rank else 1.0, 1.0])
        (scaler.scale(array.losses(F.cross_entropy, array(x), y)) * scale).sum().backward()
        scaler.step(worker.optimizer)
        scaler.update()
        optimizer: Any = worker.optimizer
        return scaler.scales.tolist(), [optimizer.extract(i)["state"][0]["step"].item() for i in range(B)]

    for scales, steps in thinwire.run_threads(2, work):
        assert scales == [8.0, 4.0, 8.0] and steps == [3, 2, 3]


# -- checkpoints -------------------------------------------------------------------------------------------------------


def dropping(comm: Comm, strategy: Strategy, seed: int = 0) -> tuple[FusedArray, Worker]:
    """An array with random generators, two groups and a seed of its own."""
    array = fusion.fuse(copies(DROPPING), seeds=[seed + 10 * comm.rank + index for index in range(B)])
    parameters = list(array.parameters())
    optimizer = fusion.AdamW([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.01}], lr=RATES)
    return array, thinwire.attach(array, optimizer, strategy, comm=comm)


@pytest.mark.parametrize("strategy", [SlowMo(period=3), AllReduce(ErrorFeedback(TopK(0.3)))], ids=repr)
def test_training_resumes_bit_for_bit_from_the_middle_of_a_period(strategy: Strategy, tmp_path: Path) -> None:
    def work(comm: Comm) -> Any:
        array, worker = dropping(comm, strategy)
        trained(array, worker, range(4))
        worker.save(tmp_path, extra={"rank": comm.rank})
        trained(array, worker, range(4, STEPS))
        worker.detach()
        again, resumed = dropping(comm, strategy, seed=500)
        assert resumed.load(tmp_path) == {"rank": comm.rank} and resumed.step == 4
        trained(again, resumed, range(4, STEPS))
        return ended(array), ended(again)

    for ours, theirs in thinwire.run_threads(2, work):
        assert all(torch.equal(a[name], b[name]) for a, b in zip(ours, theirs, strict=True) for name in a)


@pytest.mark.parametrize("strategy", [LocalSGD(3), SlowMo(period=3)], ids=repr)
def test_another_number_of_workers_continues_from_each_model_s_average(strategy: Strategy, tmp_path: Path) -> None:
    def saved(comm: Comm) -> list[dict[str, Tensor]]:
        array, worker = dropping(comm, strategy)
        trained(array, worker, range(4))
        worker.save(tmp_path)
        with worker.consensus():
            return ended(array)

    def loaded(comm: Comm) -> list[dict[str, Tensor]]:
        array, worker = dropping(comm, strategy)
        worker.load(tmp_path)
        found = ended(array)
        trained(array, worker, range(4, STEPS))
        return found

    agreed = thinwire.run_threads(2, saved)[0]
    for found in thinwire.run_threads(3, loaded):
        torch.testing.assert_close(found, agreed, rtol=1e-11, atol=1e-11)


def test_checkpoints_of_other_arrays_and_checkpoints_of_one_worker_are_refused(tmp_path: Path) -> None:
    def work(comm: Comm) -> None:
        array, worker = dropping(comm, LocalSGD(3))
        worker.save(tmp_path)
        with pytest.raises(
            ConfigError, match=r"a checkpoint of an attached array.*save\(\) and load\(\) of the worker"
        ):
            checkpoints.save(tmp_path / "own", array)
        worker.detach()
        fewer = fusion.fuse(copies(DROPPING[:2]))
        own = checkpoints.save(tmp_path / f"array-{comm.rank}", fewer)
        other = thinwire.attach(fewer, fusion.AdamW(fewer.parameters()), LocalSGD(3), comm=comm)
        with pytest.raises(CheckpointError, match=r"models=3.* in the checkpoint and .*models=2.* in this run"):
            other.load(tmp_path)
        with pytest.raises(ConfigError, match="a checkpoint of an attached array"):
            checkpoints.load(own, fewer)

    thinwire.run_threads(2, work)


# -- what is refused ---------------------------------------------------------------------------------------------------


def attached(
    strategy: Strategy | str = "AllReduce()", array: Any = None, optimizer: Any = None, **settings: Any
) -> Any:
    array = array or fusion.fuse(copies(MADE))
    optimizer = (optimizer or partial(fusion.SGD, lr=0.1))(array.parameters())
    return thinwire.run_threads(1, lambda comm: thinwire.attach(array, optimizer, strategy, comm=comm, **settings))


def shared() -> FusedArray:
    base = nn.Linear(6, 4)
    return fusion.fuse([nn.Sequential(base, nn.Linear(4, 3)) for _ in range(2)], share_trained=True)


test_what_would_couple_models_is_refused = refusals(
    [
        (partial(attached, optimizer=torch.optim.SGD), "SGD of an array: it has one learning rate for all 3 models"),
        (partial(attached, array=fusion.fuse(copies(WIDE), loop=["body"])), "belongs to one model of the array"),
        (partial(attached, "auto"), r"attach\(array, ..., 'auto'\)"),
        (partial(attached, scaler=torch.amp.GradScaler("cpu")), r"attach\(array, ..., scaler\)"),
        (partial(attached, nonfinite="skip"), 'nonfinite="skip"'),
        (partial(attached, elastic=True), r"attach\(array, ..., elastic\)"),
        (partial(attached, rendezvous="memory://run"), r"attach\(array, ..., rendezvous\)"),
        (partial(attached, SlowMo(buffers="reset")), "resets or averages the optimizer's state"),
        (partial(attached, LocalSGD(4, moments=(4,))), "resets or averages the optimizer's state"),
        (partial(attached, "AsyncLeaderSGD()"), "results depend on timing"),
        (partial(attached, AllReduce(OneBit())), "OneBit"),
        (
            partial(attached, AllReduce(ErrorFeedback(OneBit())), optimizer=fusion.AdamW),
            "AdamW divides each element of the gradient by its size",
        ),
    ]
)


def test_parameters_that_all_models_train_are_refused() -> None:
    array = shared()
    optimizer = fusion.SGD(array.own_parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="share trained parameters"):
        thinwire.run_threads(1, lambda comm: thinwire.attach(array, optimizer, AllReduce(), comm=comm))


def test_workers_with_other_learning_rates_are_refused() -> None:
    def work(comm: Comm) -> None:
        array = fusion.fuse(copies(MADE))
        rates = [0.1, 0.1 + 1e-9 * comm.rank, 0.1]
        thinwire.attach(array, fusion.SGD(array.parameters(), lr=rates), AllReduce(), comm=comm)

    with pytest.raises(MismatchError, match="lr of optimizer group 0"):
        thinwire.run_threads(2, work)


def test_an_attached_array_refuses_what_the_other_workers_would_not_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_on_gpu", lambda _: True)

    def work(comm: Comm) -> None:
        array, worker = begun(comm, SlowMo(period=2))
        before = ended(array)
        optimizer: Any = worker.optimizer
        cases: list[tuple[Callable[[], object], str]] = [
            (lambda: array.select([0, 2]), r"select\(\) of an attached array"),
            (lambda: array.insert(0, copies(MADE)[1]), r"insert\(\) of an attached array"),
            (lambda: worker.switch("AllReduce()"), r"switch\(\) of an array"),
            (lambda: worker.export("model.safetensors"), r"export\(\) of an array"),
            (lambda: worker.record_batch(8, loss=1.0), r"record_batch\(loss=...\) of an array"),
            (lambda: thinwire.attach(array, optimizer, AllReduce(), comm=comm), "the array is attached already"),
            (lambda: array.capture(lambda: None)(), "a captured step of an attached array"),
        ]
        for call, words in cases:
            with pytest.raises(ConfigError, match=words):
                call()
        assert all(torch.equal(a[name], b[name]) for a, b in zip(before, ended(array), strict=True) for name in a)
        trained(array, worker, range(2))

    thinwire.run_threads(2, work)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda array, worker: worker.optimizer.active.__setitem__(1, False),
            r"optimizer.active=\[True, False, True\]",
        ),
        (lambda array, worker: trained(array, worker, range(1), fusion.GradScaler(B)), "workers would skip different"),
        (lambda array, worker: array.load_state_dict(fusion.fuse(copies(DROPPING)).state_dict()), "between two steps"),
    ],
    ids=["active", "scaler", "weights"],
)
def test_a_step_after_a_change_that_would_couple_models_is_refused(change: Any, words: str) -> None:
    def work(comm: Comm) -> None:
        array, worker = begun(comm, SlowMo(period=3))
        trained(array, worker, range(1))
        with pytest.raises(ConfigError, match=words):
            change(array, worker)
            worker.optimizer.step()

    thinwire.run_threads(2, work)


# -- as of a model -----------------------------------------------------------------------------------------------------


def test_weights_that_all_ranks_load_before_the_first_step_are_the_start() -> None:
    def work(late: bool, comm: Comm) -> list[dict[str, Tensor]]:
        array = fusion.fuse(copies(MADE))
        other = fusion.fuse(copies(DROPPING)).state_dict()
        if not late:
            array.load_state_dict(other)
        worker = thinwire.attach(array, fusion.SGD(array.parameters(), lr=RATES), SlowMo(period=2), comm=comm)
        if late:
            array.load_state_dict(other)
        trained(array, worker, range(4))
        return ended(array)

    late, before = (thinwire.run_threads(2, partial(work, each)) for each in (True, False))
    for ours, theirs in zip(late, before, strict=True):
        assert all(torch.equal(a[name], b[name]) for a, b in zip(ours, theirs, strict=True) for name in a)


def test_models_that_are_extracted_between_averages_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    def work(comm: Comm) -> None:
        array, worker = begun(comm, LocalSGD(4))
        trained(array, worker, range(2))
        with worker.consensus():
            array.extract(0)
        assert "outside worker.consensus()" not in caplog.text
        comm.broadcast_(torch.zeros(1), 0).wait()
        array.extract(0)

    with caplog.at_level(logging.WARNING, "thinwire"):
        thinwire.run_threads(2, work)
    assert caplog.text.count("outside worker.consensus()") == 2


def test_an_array_trains_alone_after_detach_and_is_attached_again() -> None:
    def work(comm: Comm) -> Any:
        array, worker = begun(comm, LocalSGD(2))
        trained(array, worker, range(2))
        worker.detach()
        kept, optimizer = array.select([2, 0]), worker.optimizer
        assert isinstance(optimizer, fusion.SGD)
        optimizer.select(kept)
        again = thinwire.attach(array, optimizer, LocalSGD(2), comm=comm, init="own")
        trained(array, again, range(2, 4))
        whole, all_of_them = begun(comm, LocalSGD(2))
        trained(whole, all_of_them, range(4))
        return ended(array), ended(whole)

    for ours, theirs in thinwire.run_threads(2, work):
        torch.testing.assert_close(ours, [theirs[2], theirs[0]], rtol=1e-12, atol=1e-12)


def test_figures_are_those_of_each_model() -> None:
    def work(comm: Comm) -> dict[str, float]:
        array, worker = begun(comm, Gossip())
        trained(array, worker, range(2))
        assert worker.stats().data_seconds > 0
        return worker.metrics()

    found = thinwire.run_threads(2, work)[0]
    assert set(found) == {f"model-{index}/consensus_distance" for index in range(B)}
    assert len(set(found.values())) == B
