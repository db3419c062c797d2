# SPDX-License-Identifier: Apache-2.0
"""What a training loop does around the first steps: loads weights late, reads equal batches, evaluates one worker."""

from __future__ import annotations

import copy
import io
import logging
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import DataLoader

import thinwire
from tests.engine import attach, batch, batches, drawn, endings, flat, net, sgd, steps
from tests.pool import run_processes
from tests.problems import Irregular
from tests.rules import for_each
from thinwire import (
    EASGD,
    AllReduce,
    Comm,
    ConfigError,
    DiLoCo,
    ErrorFeedback,
    LocalSGD,
    OneBit,
    PushSum,
    SlowMo,
    Strategy,
    Worker,
)

CODED = LocalSGD(period=2, codec=ErrorFeedback(OneBit(8)))


# -- weights that are loaded after attach ------------------------------------------------------------------------------


@for_each(product([AllReduce(), CODED, DiLoCo(period=2), PushSum()], ["load_state_dict", "in place", "frozen"]))
def test_weights_that_one_rank_has_loaded_are_refused_on_all(case: tuple[Strategy, str]) -> None:
    strategy, how = case

    def work(comm: Comm) -> None:
        model = net()
        model[0].requires_grad_(how != "frozen")
        worker = attach(comm, strategy, model=model)
        if comm.rank == 1 and how == "load_state_dict":
            model.load_state_dict(net(1).state_dict())
        elif comm.rank == 1:
            model[0].weight.data.mul_(2)
        steps(worker, batches(comm.rank, 2))

    error = (
        "MismatchError: step 0: the parameters of rank 1 were changed after attach, and now differ between ranks. "
        "Every rank must start from the same parameters. Load or edit the weights before attach"
    )
    assert endings(3, work) == [error] * 3


@for_each([AllReduce(), DiLoCo(period=2)])
def test_weights_that_ranks_have_loaded_differently_are_refused(strategy: Strategy) -> None:
    def work(comm: Comm) -> None:
        worker = attach(comm, strategy)
        worker.model.load_state_dict(net(1 + comm.rank).state_dict())
        steps(worker, batches(comm.rank, 2))

    found = endings(2, work)
    assert len(set(found)) == 1
    assert "the parameters of all ranks were changed after attach, and now differ" in found[0]


def test_with_own_starts_ranks_may_load_different_weights() -> None:
    def work(comm: Comm, *, late: bool) -> Tensor:
        model = net(1 + comm.rank)
        worker = attach(comm, SlowMo(period=2), model=net(5) if late else model, init="own")
        if late:
            worker.model.load_state_dict(model.state_dict())
        return flat(steps(worker, batches(comm.rank, 5)).model)

    early, late = (thinwire.run_threads(2, lambda comm, late=late: work(comm, late=late)) for late in (False, True))
    assert all(torch.equal(x, y) for x, y in zip(early, late, strict=True))


def test_a_worker_alone_starts_from_what_it_has_loaded() -> None:
    def train(*, late: bool) -> Tensor:
        worker = attach(None, SlowMo(period=2), model=net(3) if late else net(1))
        if late:
            worker.model.load_state_dict(net(1).state_dict())
        return flat(steps(worker, batches(0, 5)).model)

    assert torch.equal(train(late=True), train(late=False))


@for_each([CODED, SlowMo(period=3), DiLoCo(period=3), PushSum(Irregular())])
def test_weights_loaded_between_steps_are_refused_where_copies_are_kept(strategy: Strategy) -> None:
    def work(comm: Comm) -> None:
        worker = steps(attach(comm, strategy), batches(comm.rank, 4))
        worker.model[0].load_state_dict(net(1)[0].state_dict())
        steps(worker, batches(comm.rank, 1))

    found = endings(3, work)
    assert len(set(found)) == 1
    assert re.search(r"step 4: load_state_dict\(\) of the model between two steps.*Use worker.load\(\)", found[0])


@for_each(product([EASGD(), DiLoCo(period=3), LocalSGD(period=3)], [False, True]))
def test_weights_loaded_before_the_first_step_are_evaluated_or_refused(case: tuple[Strategy, bool]) -> None:
    strategy, alone = case

    def work(comm: Comm) -> None:
        worker, loaded = attach(comm, strategy), net(1)
        if comm.rank == 0 or not alone:
            worker.model.load_state_dict(loaded.state_dict())
        with worker.consensus() as model:
            assert torch.equal(flat(model), flat(loaded))
        worker.model.load_state_dict(net(2).state_dict())
        steps(worker, batches(comm.rank, 2))

    for text in endings(2, work):
        assert ("the parameters of rank 0 were changed after attach" in text) if alone else not text


@pytest.mark.parametrize("call", ["consensus", "export", "save", "state_dict", "switch"])
def test_weights_loaded_after_the_last_step_are_refused_where_copies_are_kept(call: str, tmp_path: Path) -> None:
    def work(comm: Comm) -> None:
        worker = steps(attach(comm, DiLoCo(period=3)), batches(comm.rank, 4))
        worker.model.load_state_dict(net(1).state_dict())  # the best ones, after early stopping
        calls: dict[str, Callable[[], object]] = {
            "consensus": lambda: worker.consensus().__enter__(),
            "export": lambda: worker.export(tmp_path / "model.safetensors"),
            "save": lambda: worker.save(tmp_path),
            "state_dict": worker.state_dict,
            "switch": lambda: worker.switch("AllReduce()"),
        }
        calls[call]()

    for text in endings(2, work):
        assert re.search(r"step 4: load_state_dict\(\) of the model between two steps.*worker\.detach\(\)", text)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(period=3)], ids=str)
def test_weights_loaded_between_steps_are_a_local_update_elsewhere(strategy: Strategy) -> None:
    def work(comm: Comm) -> None:
        worker = steps(attach(comm, strategy), batches(comm.rank, 4))
        worker.model.load_state_dict(net(1).state_dict())
        steps(worker, batches(comm.rank, 4))

    assert endings(2, work) == ["", ""]


def test_weights_loaded_between_steps_on_one_rank_are_refused_on_all() -> None:
    def work(comm: Comm) -> None:
        worker = steps(attach(comm, LocalSGD(period=3)), batches(comm.rank, 4))
        if comm.rank == 0:
            worker.model.load_state_dict(net(1).state_dict())
        steps(worker, batches(comm.rank, 4))

    for text in endings(2, work):
        assert "rank 0 is in model.load_state_dict() at step 4, rank 1 is in an average in training" in text


def test_weights_that_are_put_back_or_edited_in_place_are_no_load(tmp_path: Any) -> None:
    def work(comm: Comm) -> None:
        worker = steps(attach(comm, DiLoCo(period=3)), batches(comm.rank, 4))
        own = copy.deepcopy(worker.model.state_dict())
        worker.model.load_state_dict(net(1).state_dict())  # averaged weights, to be evaluated
        worker.model.load_state_dict(own)
        steps(worker, batches(comm.rank, 1))
        with torch.no_grad():
            for parameter in worker.model.parameters():
                parameter.clamp_(-0.2, 0.2)
        worker.optimizer.load_state_dict(worker.optimizer.state_dict())
        steps(worker, batches(comm.rank, 1))
        with worker.consensus() as model:
            model.load_state_dict(net(1).state_dict())
        steps(worker, batches(comm.rank, 1))
        worker.save(tmp_path)
        worker.model.load_state_dict(net(1).state_dict())
        worker.load(tmp_path)
        steps(worker, batches(comm.rank, 1))

    assert endings(2, work) == ["", ""]


def test_after_a_checkpoint_of_the_worker_other_weights_are_refused(tmp_path: Any) -> None:
    def work(comm: Comm) -> None:
        worker = steps(attach(comm, DiLoCo(period=3)), batches(comm.rank, 4))
        worker.save(tmp_path)
        worker.detach()
        worker = attach(comm, DiLoCo(period=3))
        worker.load(tmp_path)
        worker.model.load_state_dict(net(1).state_dict())
        steps(worker, batches(comm.rank, 1))

    found = endings(2, work)
    assert found[0] == found[1]
    assert "step 4: the parameters of all ranks were changed after worker.load()" in found[0]


# -- steps in which torch allocates the optimizer's state --------------------------------------------------------------


@pytest.mark.parametrize("strategy", [AllReduce(), SlowMo(period=2), PushSum()], ids=str)
@pytest.mark.parametrize("scheduled", [False, True])
def test_get_state_dict_of_torch_is_no_step(strategy: Strategy, scheduled: bool) -> None:
    def work(comm: Comm, *, asks: bool) -> tuple[int, Tensor]:
        worker = attach(comm, strategy, optimizer=sgd)  # whose state is always empty, so that torch steps every time
        if scheduled:  # wraps optimizer.step
            torch.optim.lr_scheduler.ConstantLR(worker.optimizer, 0.5)
        for step in range(4):
            if asks and comm.rank == 0:
                get_state_dict(worker.model, worker.optimizer)
            steps(worker, [batch(comm.rank, step)])
            worker.optimizer.zero_grad()
        return worker.step, flat(worker.model)

    plain, asked = (thinwire.run_threads(2, lambda comm, asks=asks: work(comm, asks=asks)) for asks in (False, True))
    for (step, x), (other_step, y) in zip(plain, asked, strict=True):
        assert step == other_step == 4
        assert torch.equal(x, y)


def test_set_state_dict_of_torch_resumes_from_its_weights_and_optimizer() -> None:
    def work(comm: Comm) -> bool:
        worker = steps(attach(comm, AllReduce()), batches(comm.rank, 3))
        model, optimizer = (copy.deepcopy(state) for state in get_state_dict(worker.model, worker.optimizer))
        steps(worker, batches(comm.rank, 2, 3))
        worker.detach()
        other = attach(comm, AllReduce(), model=net(7))
        set_state_dict(other.model, other.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        assert other.step == 0
        steps(other, batches(comm.rank, 2, 3))
        return torch.equal(flat(worker.model), flat(other.model))

    assert thinwire.run_threads(2, work, timeout=20) == [True, True]


def test_a_first_step_with_a_learning_rate_of_zero_is_a_step() -> None:
    def work(comm: Comm) -> int:
        worker = attach(comm, LocalSGD(period=2))
        worker.optimizer.param_groups[0]["lr"] = 0.0
        return steps(worker, batches(comm.rank, 2)).step

    assert thinwire.run_threads(2, work) == [2, 2]


# -- the same batches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(period=2), PushSum()], ids=str)
@pytest.mark.parametrize("closure", [False, True])
def test_equal_batches_are_reported_once(strategy: Strategy, closure: bool, caplog: pytest.LogCaptureFixture) -> None:
    def work(comm: Comm) -> None:
        worker = attach(comm, strategy)
        steps(worker, batches(comm.rank % 2, 6), closed=closure)  # ranks 0 and 2 read the same

    with caplog.at_level(logging.WARNING, "thinwire"):
        thinwire.run_threads(3, work)
    found = [record.getMessage() for record in caplog.records if "same gradients" in record.getMessage()]
    # Gossip and push-sum on three ranks part those two after the first step.
    if not isinstance(strategy, PushSum):
        assert len(found) == 1
        assert "step 2: ranks 0, 2 computed the same gradients" in found[0]
        assert "worker.sampler(dataset)" in found[0]


@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(period=2)], ids=str)
def test_different_batches_and_missing_ones_are_not_reported(
    strategy: Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    def work(comm: Comm) -> None:
        worker = attach(comm, strategy)
        for x, y in worker.join(batches(comm.rank, 5 if comm.rank == 0 else 0)):
            steps(worker, [(x, y)])

    with caplog.at_level(logging.WARNING, "thinwire"):
        thinwire.run_threads(3, work)
        thinwire.run_threads(2, lambda comm: steps(attach(comm, strategy), batches(comm.rank, 5)))
    assert not caplog.records


def test_a_sampler_gives_each_worker_its_own_samples() -> None:
    def work(comm: Comm) -> list[list[int]]:
        worker = attach(comm, LocalSGD(period=2))
        data = list(range(10))
        sampler = worker.sampler(data, seed=3, drop_last=True)
        epochs: list[list[int]] = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            epochs.append([int(x) for each in DataLoader(data, batch_size=2, sampler=sampler) for x in each])
        return epochs

    found = thinwire.run_threads(3, work)
    for epoch in range(2):
        seen = [x for rank in found for x in rank[epoch]]
        assert len(seen) == len(set(seen)) == 9
    assert found[0][0] != found[0][1]


# -- optimizers that communicate ---------------------------------------------------------------------------------------


class Sharing(torch.optim.Optimizer):
    """Each rank updates its share of the parameters, and sends them."""

    def __init__(self, params: Any, send: Callable[[Tensor, int], object]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.send = send

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for k, p in enumerate(self.param_groups[0]["params"]):
            p.sub_(p.grad, alpha=0.1)
            self.send(p, k % 2)


def with_an_optimizer_that_sends(strategy: str, closure: bool) -> str:
    """In a process: how training with it ends."""
    model = drawn(nn.Linear(3, 2))
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thinwire").addHandler(handler)
    optimizer = Sharing(model.parameters(), dist.broadcast)
    worker = thinwire.attach(model, optimizer, strategy)
    try:
        steps(worker, batches(worker.rank, 2), closed=closure)
        worker.detach()
    except ConfigError as error:
        return str(error)
    finally:
        logging.getLogger("thinwire").removeHandler(handler)
    return " ".join(records)


@pytest.mark.parametrize("closure", [False, True])
def test_an_optimizer_that_sends_parameters_is_refused_or_reported(closure: bool) -> None:
    for text in run_processes(2, with_an_optimizer_that_sends, "LocalSGD(period=4)", closure):
        assert "Sharing.step() makes collective calls of its own (2 in this step)" in text
        assert "Under LocalSGD(period=4) ranks have different parameters" in text
    first, second = run_processes(2, with_an_optimizer_that_sends, "AllReduce()", closure)
    assert first.count("which worker.comm.meter does not count") == 2
    assert not second


# -- one worker's model in place of the consensus model ----------------------------------------------------------------


def evaluates(worker: Worker) -> None:
    worker.model.eval()
    with torch.no_grad():
        worker.model(batch(0, 0)[0])
    worker.model.train()


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (evaluates, "evaluation of the model"),
        (lambda worker: worker.model.state_dict(), "model.state_dict()"),
        (lambda worker: copy.deepcopy(worker.model), "a copy of the model"),
        (lambda worker: torch.save(worker.model, io.BytesIO()), "a copy of the model"),
    ],
    ids=["evaluate", "state_dict", "copy", "pickle"],
)
def test_use_of_one_drifted_model_is_reported_once(
    use: Callable[[Worker], object], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    def work(comm: Comm) -> None:
        worker = attach(comm, LocalSGD(period=4))
        use(worker)  # all start from one point
        steps(worker, batches(comm.rank, 4))
        use(worker)  # and have just taken their mean
        with worker.consensus():
            use(worker)
        steps(worker, batches(comm.rank, 1))
        with worker.consensus():
            use(worker)
        if comm.rank == 0:
            use(worker)
            use(worker)

    with caplog.at_level(logging.WARNING, "thinwire"):
        thinwire.run_threads(2, work)
    (found,) = [record.getMessage() for record in caplog.records]
    assert found.startswith(f"rank 0, step 5: {words} outside worker.consensus()")


def test_equal_replicas_training_passes_and_own_checkpoints_are_not_reported(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def work(comm: Comm) -> None:
        worker = steps(attach(comm, AllReduce()), batches(comm.rank, 3))
        evaluates(worker)
        worker.model.state_dict()
        worker.detach()
        worker = steps(attach(comm, DiLoCo(period=2)), batches(comm.rank, 3))
        worker.model.eval()  # as some train with frozen statistics
        steps(worker, batches(comm.rank, 2))
        worker.save(tmp_path / "a")
        worker.export(tmp_path / "b.safetensors")
        worker.load(tmp_path / "a")

    with caplog.at_level(logging.WARNING, "thinwire"):
        thinwire.run_threads(2, work)
    assert not caplog.records
