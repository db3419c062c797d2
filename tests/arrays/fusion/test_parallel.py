# SPDX-License-Identifier: Apache-2.0
"""An array of models on several workers: one message carries all, and each is a data-parallel run of its own."""

from __future__ import annotations

from functools import partial
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
    Fp16,
    Gossip,
    LocalSGD,
    MismatchError,
    PushSum,
    SlowMo,
    Strategy,
    TopK,
    Worker,
)
from thinwire.arrays import fusion
from thinwire.arrays.fusion import FusedArray, autotune
from thinwire.arrays.sweep.parallel import ParallelArray, attach_array
from thinwire.errors import ConfigError
from thinwire.worker.worker import internals_of

B, STEPS = 3, 7
RATES = [0.05, 0.01, 0.1]
STRATEGIES: list[Strategy] = [
    AllReduce(),
    AllReduce(Bf16()),
    LocalSGD(3),
    SlowMo(period=3, momentum=0.6, lr=0.8),
    SlowMo(AllReduce(), period=2, momentum=0.5),
    Gossip(),
    PushSum(),
]


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(autotune.DETERMINISTIC, "1")


def data(rank: int, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(8, 6, generator=draw, dtype=torch.float64).to(dtype), torch.randint(0, 3, (8,), generator=draw)


def quiet() -> nn.Module:
    """Normalised, with buffers; nothing drawn."""
    return Net(0.0)


# Threads share torch's own generator, so all models are made before there are any.
MADE = {dtype: make(quiet, 12, dtype) for dtype in (torch.float64, torch.float32)}
FRESH, WIDE = [make(quiet, 1, seed=seed)[0] for seed in (5, 6)], wide()


def models(dtype: torch.dtype, count: int = B) -> list[nn.Module]:
    return copies(MADE[dtype][:count])


def begun(comm: Comm | None, strategy: Strategy, dtype: torch.dtype, kind: str = "SGD", **settings: Any) -> Any:
    array = fusion.fuse(models(dtype))
    more = {"momentum": [0.9, 0.0, 0.5]} if kind == "SGD" else {}
    optimizer = getattr(fusion, kind)(array.parameters(), lr=RATES, **more)
    return attach_array(array, optimizer, strategy, comm=comm, **settings)


def trained(run: ParallelArray, rank: int, steps: range, scaler: Any = None, spoil: Any = None) -> Tensor:
    dtype = next(iter(run.array.parameters())).dtype
    losses = torch.zeros(())
    for step in steps:
        x, y = data(rank, step, dtype)
        run.array.zero_grad()
        losses = run.array.losses(F.cross_entropy, run.array(x), y)
        if scaler is None:
            losses.sum().backward()
            run.optimizer.step()
            continue
        scaler.scale(losses).sum().backward()
        if (rank, step) == spoil:
            next(iter(run.array.parameters())).grad[1] = torch.inf
        scaler.step(run.optimizer)
        scaler.update()
    return losses


def ended(array: FusedArray) -> list[dict[str, Tensor]]:
    return [_plain(array.extract(index)) for index in range(array.size)]


def _plain(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def together(strategy: Strategy, dtype: torch.dtype, kind: str, comm: Comm | None = None) -> Any:
    """One rank's run of the array: models as they are, models in consensus, messages, bytes."""
    run = begun(comm, strategy, dtype, kind)
    meter = run.worker.comm.meter
    before = meter.messages, meter.payload_bytes
    trained(run, run.worker.comm.rank, range(STEPS))
    sent = meter.messages - before[0], meter.payload_bytes - before[1]
    with run.consensus() as array:
        agreed = ended(array)
    run.detach()
    return ended(run.array), agreed, sent


def trained_alone(worker: Worker, steps: range) -> Worker:
    """One rank's run of a plain model."""
    dtype = next(worker.model.parameters()).dtype
    for step in steps:
        x, y = data(worker.rank, step, dtype)
        worker.optimizer.zero_grad()
        F.cross_entropy(worker.model(x), y).backward()
        worker.optimizer.step()
    return worker


def alone(index: int, strategy: Strategy, dtype: torch.dtype, kind: str, comm: Comm | None = None) -> Any:
    """One rank's run of one model, plainly."""
    model = models(dtype)[index]
    more = {"momentum": [0.9, 0.0, 0.5][index]} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=RATES[index], **more)
    worker = thinwire.attach(model, optimizer, strategy, comm=comm)
    meter = worker.comm.meter
    before = meter.messages, meter.payload_bytes
    trained_alone(worker, range(STEPS))
    sent = meter.messages - before[0], meter.payload_bytes - before[1]
    with worker.consensus() as agreed:
        found = _plain(agreed)
    worker.detach()
    return _plain(model), found, sent


def equal(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=tolerance, atol=tolerance)


def compare(arrays: list[Any], singles: list[list[Any]], tolerance: float) -> None:
    """Every rank's array against the runs of its models by themselves, by model and rank."""
    for rank, (models, agreed, sent) in enumerate(arrays):
        for index in range(B):
            own, consensus, small = singles[index][rank]
            equal(models[index], own, tolerance)
            equal(agreed[index], consensus, tolerance)
            assert sent == (small[0], pytest.approx(B * small[1]))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_model_is_a_run_of_its_own_and_one_message_carries_all(strategy: Strategy, kind: str, size: int) -> None:
    arrays = thinwire.run_threads(size, lambda comm: together(strategy, torch.float64, kind, comm))
    singles = [
        thinwire.run_threads(size, lambda comm, i=i: alone(i, strategy, torch.float64, kind, comm)) for i in range(B)
    ]
    # A gradient that is rounded to bf16 may fall to the other side.
    compare(arrays, singles, 1e-12 if getattr(strategy, "codec", None) is None else 1e-2)


@pytest.mark.parametrize("strategy", STRATEGIES[::3], ids=repr)
def test_every_model_is_a_run_of_its_own_in_single_precision(strategy: Strategy) -> None:
    arrays = thinwire.run_threads(2, lambda comm: together(strategy, torch.float32, "SGD", comm))
    singles = [
        thinwire.run_threads(2, lambda comm, i=i: alone(i, strategy, torch.float32, "SGD", comm)) for i in range(B)
    ]
    compare(arrays, singles, 1e-6)


def on_a_rank(work: str, *arguments: Any) -> Any:
    """For processes: nothing is measured there either, and tensors are returned as numpy arrays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(autotune.DETERMINISTIC, "1")
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.numpy(), globals()[work](*arguments))


@pytest.mark.parametrize(("size", "strategy"), [(2, AllReduce()), (4, SlowMo(period=3, momentum=0.6))], ids=repr)
def test_every_model_is_a_run_of_its_own_on_processes(size: int, strategy: Strategy) -> None:
    given = (strategy, torch.float64, "SGD")
    arrays = run_processes(size, on_a_rank, "together", *given)
    arrays = pytree.tree_map_only(np.ndarray, torch.as_tensor, arrays)
    singles = [
        thinwire.run_threads(size, lambda comm, i=i: alone(i, *given, comm))  # type: ignore[misc]
        for i in range(B)
    ]
    compare(arrays, singles, 1e-12)


def test_messages_do_not_grow_with_the_models() -> None:
    def sent(count: int, comm: Comm) -> tuple[int, float]:
        array = fusion.fuse(models(torch.float64, count))
        run = attach_array(array, fusion.SGD(array.parameters(), lr=0.1), AllReduce(), comm=comm, bucket_bytes=256)
        before = comm.meter.messages, comm.meter.payload_bytes
        trained(run, comm.rank, range(4))
        run.detach()
        return comm.meter.messages - before[0], comm.meter.payload_bytes - before[1]

    (few, small), (many, large) = (thinwire.run_threads(2, partial(sent, count))[0] for count in (1, 12))
    assert many == few > 4 and large == 12 * small


# -- models are inserted and removed -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
@pytest.mark.parametrize("when", [3, *fast_where(lambda _: False, [2, 4])])
def test_models_that_are_left_do_not_notice_that_others_have_gone(strategy: Strategy, when: int) -> None:
    def work(comm: Comm) -> Any:
        run = begun(comm, strategy, torch.float64)
        trained(run, comm.rank, range(when))
        whole = begun(comm, strategy, torch.float64)
        trained(whole, comm.rank, range(when))
        kept = run.select([2, 0])
        assert kept.indices == (2, 0) and run.worker.step == when
        before = comm.meter.payload_bytes
        trained(run, comm.rank, range(when, STEPS))
        few, before = comm.meter.payload_bytes - before, comm.meter.payload_bytes
        trained(whole, comm.rank, range(when, STEPS))
        many = comm.meter.payload_bytes - before
        return ended(run.array), ended(whole.array), few, many

    for ours, theirs, few, many in thinwire.run_threads(2, work):
        # On some processors torch's products of two matrices at once differ from those of three in the last bit.
        for mine, whole in ((ours[0], theirs[2]), (ours[1], theirs[0])):
            torch.testing.assert_close(mine, whole, rtol=1e-13, atol=1e-15)
        assert 3 * few == pytest.approx(2 * many)


@pytest.mark.parametrize("strategy", STRATEGIES[:4], ids=repr)
def test_a_slot_that_is_filled_anew_begins_as_rank_0_has_it_and_the_others_do_not_notice(strategy: Strategy) -> None:
    period = getattr(strategy, "period", 1)

    def work(comm: Comm) -> Any:
        run, whole = (begun(comm, strategy, torch.float64) for _ in range(2))
        for each in (run, whole):
            trained(each, comm.rank, range(2 * period))
        run.insert(1, FRESH[comm.rank], lr=0.02, momentum=0.0)
        for each in (run, whole):
            trained(each, comm.rank, range(2 * period, 4 * period))
        return ended(run.array), ended(whole.array)

    def solo(comm: Comm) -> Any:
        (model,) = copies(FRESH[:1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        worker = thinwire.attach(model, optimizer, strategy, comm=comm)
        trained_alone(worker, range(2 * period, 4 * period)).detach()
        return _plain(model)

    alone = thinwire.run_threads(2, solo)
    for rank, (ours, theirs) in enumerate(thinwire.run_threads(2, work)):
        for index in (0, 2):
            assert all(torch.equal(ours[index][name], theirs[index][name]) for name in ours[index])
        equal(ours[1], alone[rank], 1e-12 if getattr(strategy, "codec", None) is None else 1e-2)


def test_a_slot_that_is_filled_within_a_period_counts_only_its_own_rates() -> None:
    def work(comm: Comm) -> Any:
        run = begun(comm, SlowMo(period=4, momentum=0.6), torch.float64)
        run.optimizer.param_groups[0]["lr"].fill_(0.05)
        trained(run, comm.rank, range(2))
        run.insert(1, FRESH[0], lr=0.05)
        (replica,), ((_, segments),) = run.worker.replicas, internals_of(run.worker).layouts
        return [segment.of(replica.state["lr_sum"]).flatten(1).unique(dim=1).flatten() for segment in segments]

    for rates in thinwire.run_threads(2, work)[0]:
        assert rates.tolist() == pytest.approx([0.1, 0.0, 0.1])


def test_layers_that_differ_between_models_travel_and_come_and_go_too() -> None:
    def work(comm: Comm) -> Any:
        array = fusion.fuse(WIDE, loop=["body"])
        run = attach_array(array, fusion.SGD(array.parameters(), lr=RATES), SlowMo(period=2), comm=comm)
        trained(run, comm.rank, range(3))
        run.select([2, 0])
        trained(run, comm.rank, range(3, 6))
        run.detach()
        return ended(run.array)

    def solo(index: int, comm: Comm) -> Any:
        (model,) = copies(WIDE[index : index + 1])
        optimizer = torch.optim.SGD(model.parameters(), lr=RATES[index])
        worker = thinwire.attach(model, optimizer, SlowMo(period=2), comm=comm)
        trained_alone(worker, range(6)).detach()
        return _plain(model)

    singles = {index: thinwire.run_threads(2, partial(solo, index)) for index in (2, 0)}
    for rank, found in enumerate(thinwire.run_threads(2, work)):
        for slot, index in enumerate((2, 0)):
            equal(found[slot], singles[index][rank], 1e-12)


def test_a_model_that_diverges_on_one_worker_leaves_the_others_bitwise_alone() -> None:
    def work(spoil: bool, comm: Comm) -> Any:
        run = begun(comm, AllReduce(), torch.float64)
        trained(run, comm.rank, range(1))
        if spoil and comm.rank == 1:
            with torch.no_grad():
                next(iter(run.array.parameters()))[1] = torch.nan
        trained(run, comm.rank, range(1, 4))
        return ended(run.array)

    for ours, theirs in zip(*(thinwire.run_threads(2, partial(work, spoil)) for spoil in (True, False)), strict=True):
        assert ours[1]["first.weight"].isnan().all()
        for index in (0, 2):
            assert all(torch.equal(ours[index][name], theirs[index][name]) for name in ours[index])


@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(2)], ids=repr)
def test_all_workers_skip_a_step_of_the_model_that_overflowed_on_one(strategy: Strategy) -> None:
    def work(comm: Comm) -> Any:
        array = fusion.fuse(models(torch.float64))
        optimizer, scaler = fusion.Adam(array.parameters(), lr=RATES), fusion.GradScaler(B, 8.0)
        run = attach_array(array, optimizer, strategy, comm=comm, scaler=scaler)
        trained(run, comm.rank, range(4), scaler, spoil=(1, 2) if isinstance(strategy, LocalSGD) else None)
        if isinstance(strategy, AllReduce):
            x, y = data(comm.rank, 4, torch.float64)
            array.zero_grad()
            scale = torch.tensor([1.0, torch.inf if comm.rank else 1.0, 1.0])
            (scaler.scale(array.losses(F.cross_entropy, array(x), y)) * scale).sum().backward()
            scaler.step(optimizer)
            scaler.update()
        steps = [optimizer.extract(index)["state"][0]["step"].item() for index in range(B)]
        return scaler.scales.tolist(), steps

    count = 5 if isinstance(strategy, AllReduce) else 4
    for scales, steps in thinwire.run_threads(2, work):
        assert scales == [8.0, 4.0, 8.0] and steps == [count, count - 1, count]


# -- errors ------------------------------------------------------------------------------------------------------------


def test_workers_that_would_do_different_things_are_told_before_anything_is_done() -> None:
    def work(comm: Comm) -> None:
        run = begun(comm, AllReduce(), torch.float64)
        before = ended(run.array)
        with pytest.raises(MismatchError, match=r"the models that are kept is \[0\] on rank 0 and \[1\] on rank 1"):
            run.select([comm.rank])
        with pytest.raises(MismatchError, match="the slot that is filled"):
            run.insert(comm.rank, models(torch.float64)[0])
        with pytest.raises(MismatchError, match=r"0\.2"):
            run.insert(0, models(torch.float64)[0], lr=0.1 * (1 + comm.rank))
        with pytest.raises(MismatchError, match="the model that is put in"):
            run.insert(0, nn.Linear(6, 3 + comm.rank))
        with pytest.raises(ConfigError, match="slot 0 cannot hold this model"):
            run.insert(0, nn.Linear(6, 3))
        with pytest.raises(ConfigError, match="slot 3: there are 3"):
            run.select([0, 3])
        assert all(torch.equal(a[name], b[name]) for a, b in zip(before, ended(run.array), strict=True) for name in a)
        trained(run, comm.rank, range(2))

    thinwire.run_threads(2, work)

    def other(comm: Comm) -> None:
        array = fusion.fuse(models(torch.float64, 2 + comm.rank))
        attach_array(array, fusion.SGD(array.parameters(), lr=0.1), AllReduce(), comm=comm)

    with pytest.raises(MismatchError, match="ranks 0 and 1 were started differently"):
        thinwire.run_threads(2, other)


test_recipes_that_would_mix_models_are_refused = refusals(
    [
        (AllReduce(thinwire.ErrorFeedback(TopK())), "mixes models"),
        (LocalSGD(codec=thinwire.ErrorFeedback(TopK())), "mixes models"),
        (SlowMo(AllReduce(thinwire.ErrorFeedback(TopK()))), "mixes models"),
        (thinwire.Sharded(), "treats every element by itself"),
        (thinwire.DiLoCo(), "treats every element by itself"),
        (SlowMo(buffers="average"), "treats every element by itself"),
        (thinwire.LeaderSGD(), "such as AllReduce, LocalSGD"),
    ],
    lambda strategy: begun(None, strategy, torch.float64),
)


def test_casts_are_allowed() -> None:
    for codec in (Bf16(), Fp16()):
        assert thinwire.run_threads(2, lambda comm, c=codec: begun(comm, AllReduce(c), torch.float32).array.size) == [
            B,
            B,
        ]
