# SPDX-License-Identifier: Apache-2.0
"""A worker leaves with notice: the others go on without it, and nothing of what it had is lost."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.battery.cases import STRATEGIES, is_first
from tests.battery.runs import Case
from tests.engine import batch, momentum, net
from tests.grids import fast_where
from tests.problems import Irregular
from thinwire import AllReduce, ErrorFeedback, Gossip, LocalSGD, OneBit, PushSum, SketchedSGD, SlowMo, Strategy, Worker
from thinwire.elastic.notice import Notice
from thinwire.elastic.sampler import ElasticSampler
from thinwire.elastic.threads import ThreadConnector, ThreadNetwork
from thinwire.methods.strategies.base import nested
from thinwire.methods.strategies.push_sum.mass import numerator, weight


@dataclass
class Part:
    """What one worker saw.

    Attributes:
        left_at: the step after which it left; None if it stayed.
        before: its vectors just before somebody left, and in flight; `after`: just after that.
        views: who left and why, by view.
    """

    left_at: int | None = None
    resumed_at: int | None = None
    before: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    after: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    views: list[tuple[tuple[str, ...], dict[str, str]]] = field(default_factory=list[Any])
    batches: list[int] = field(default_factory=list[int])
    agreed: Tensor | None = None
    told: dict[str, float] = field(default_factory=dict[str, float])


def vectors(worker: Worker) -> dict[str, Tensor]:
    r = worker.replicas[0]
    flying = {f"{name}, {i}": x.clone() for name, work in r.inflight.items() for i, x in enumerate(work.wait())}
    return {"x": r.x.clone(), **{name: x.clone() for name, x in r.state.items()}, **flying}


def run(
    size: int,
    strategy: Strategy,
    *,
    leaves: dict[int, int],
    steps: int = 16,
    every: int = 4,
    batches: int = 0,
    optimizer: Any = momentum,
    folder: Path | None = None,
    joins: int | None = None,
    slow: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Part]:
    """Train on threads; `leaves` says after which step a worker has notice, `joins` after which one more comes.

    `slow` is the worker that lets it come; after `joins` it waits until the others can go no further.
    """
    network = ThreadNetwork()
    comes = threading.Event()

    def work(number: int) -> Part:
        part = Part()
        if number == size:
            assert comes.wait(20)
        fleet = network.fleet(f"w{number}", number % size, size)
        connector = fleet.connector
        assert isinstance(connector, ThreadConnector)
        try:
            model = net(number).to(dtype)
            worker = thinwire.attach(model, optimizer(model), strategy, elastic=fleet, timeout=10, bucket_bytes=48)
            worker.elastic.on_view.append(lambda view: part.views.append((view.members, dict(view.left))))
            notice = Notice(worker, every=every, signals=())
            if folder is not None and any(folder.iterdir()):
                worker.load(folder)
                part.resumed_at = worker.step
            sampler = ElasticSampler(batches) if batches else None
            while worker.step < steps:
                if sampler is not None:
                    part.batches.append(sampler.share(worker))
                x, y = batch(number, worker.step)
                worker.optimizer.zero_grad()
                loss = (worker.model(x.to(dtype)) - y.to(dtype)).square().mean()
                loss.backward()
                worker.record_batch(len(x), loss=loss)
                worker.optimizer.step()
                if leaves.get(number) == worker.step:
                    notice.received = "SIGUSR1"
                if joins is not None and worker.step == joins and not comes.is_set() and slow in (None, number):
                    time.sleep(0.0 if slow is None else 0.5)
                    comes.set()
                    end = time.monotonic() + 20
                    while not fleet.membership.requests() and time.monotonic() < end:
                        time.sleep(0.005)
                due = (
                    joins is None
                    and worker.step % every == 0
                    and not part.before
                    and worker.step >= min(leaves.values(), default=steps)
                )
                if due:
                    part.before = vectors(worker)
                if notice.leave():
                    part.left_at = worker.step
                    if folder is not None and len(notice.reasons) == worker.size:
                        worker.save(folder)
                    return part
                if due:
                    part.after = vectors(worker)
            with worker.consensus():
                part.agreed = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
            assert worker.elastic is not None
            part.told = worker.elastic.costs
        finally:
            connector.end()
            fleet.membership.close()
        return part

    count = size + (joins is not None)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


ELASTIC = [each for each in STRATEGIES if not any(part.traits.inelastic_reason for part in nested(each.strategy))]


@pytest.mark.parametrize("each", fast_where(is_first, ELASTIC), ids=lambda each: str(each.strategy))
def test_the_others_go_on_after_the_agreed_step(each: Case) -> None:
    kind: Any = each.optimizer or torch.optim.SGD
    parts = run(
        3,
        each.strategy,
        leaves={1: 5},
        every=6,
        steps=12,
        optimizer=lambda model: kind(model.parameters(), lr=each.rate / 5),
    )
    assert parts[1].left_at is not None and parts[1].left_at >= 6
    for part in (parts[0], parts[2]):
        assert part.left_at is None
        assert part.views == [(("w0", "w2"), {"w1": "SIGUSR1"})]
        assert part.agreed is not None and torch.isfinite(part.agreed).all()
    assert torch.equal(parts[0].agreed, parts[2].agreed)  # type: ignore[arg-type]


@pytest.mark.parametrize("leaves", [{1: 3}, {0: 2, 3: 2}, {2: 3, 1: 4}], ids=str)
def test_push_sums_mass_is_accounted_for(leaves: dict[int, int]) -> None:
    """Numerators, over the number of workers, and weights add up to what they were, messages in flight included."""
    strategy = PushSum(Irregular(), staleness=1)
    parts = run(5, strategy, leaves=leaves, dtype=torch.float64)
    stay = [part for number, part in enumerate(parts) if number not in leaves]
    # Messages of one step are on the way, to each from its neighbours.
    total = torch.stack([numerator(part.before["mass"]) for part in parts]).sum(0)
    flying = [{name: x for name, x in part.before.items() if name.startswith("shares of step")} for part in parts]
    assert any(flying)
    for rank, messages in enumerate(flying):
        for name, message in messages.items():
            step, number = re.findall(r"\d+", name)
            total = total + strategy.topology.peers(rank, 5, int(step)).weights[int(number)] * numerator(message)
    after = torch.stack([numerator(part.after["mass"]) for part in stay]).sum(0)
    assert torch.allclose(after / len(stay), total / 5, rtol=1e-12, atol=1e-14)
    assert sum(float(weight(part.after["mass"])) for part in stay) == pytest.approx(len(stay), rel=1e-12)
    assert not any("shares of step" in name for part in stay for name in part.after)
    assert all(part.told["lost_weight"] == 0 for part in stay)


def test_residuals_keep_their_effect_on_the_mean() -> None:
    """The mean lacks the mean of the workers' residuals and those of the servers; after somebody has left, the same."""
    parts = run(4, AllReduce(codec=ErrorFeedback(OneBit(8))), leaves={2: 4})

    def lacking(found: list[dict[str, Tensor]]) -> Tensor:
        lacks = torch.stack([each["error"] for each in found]).mean(0)
        for each in found:
            for name, x in each.items():
                if name.startswith("server_error"):
                    start, stop = map(int, re.findall(r"\d+", name))
                    lacks[start:stop] += x
        return lacks

    before = lacking([part.before for part in parts])
    after = lacking([part.after for part in parts if part.left_at is None])
    assert before.abs().max() > 0
    assert torch.allclose(after, before, atol=1e-6)


def test_sketched_residuals_keep_their_sum() -> None:
    parts = run(4, SketchedSGD(0.2, columns=2, rows=3, dense_below=0), leaves={2: 4}, optimizer=plain)
    for name in ("unsent", "momentum"):
        before = torch.stack([part.before[name] for part in parts]).sum(0)
        after = torch.stack([part.after[name] for part in parts if part.left_at is None]).sum(0)
        assert before.abs().max() > 0 and torch.allclose(after, before, atol=1e-6)


@pytest.mark.parametrize("strategy", [LocalSGD(period=7), SlowMo(period=7), Gossip()], ids=str)
def test_local_steps_since_the_last_average_are_not_lost(strategy: Strategy) -> None:
    """In the middle of a round, all take the mean of their parameters with the one that leaves."""
    parts = run(3, strategy, leaves={0: 9}, every=4)
    mean = torch.stack([part.before["x"] for part in parts]).mean(0)
    assert parts[0].left_at == 12
    assert not torch.equal(parts[0].before["x"], parts[1].before["x"])
    assert all(torch.allclose(part.after["x"], mean) for part in parts[1:])


def test_no_batch_is_lost_or_used_twice() -> None:
    parts = run(3, AllReduce(), leaves={1: 4}, steps=10, every=1, batches=24)
    dealt = [batch for part in parts for batch in part.batches]
    assert len(dealt) == 4 * 3 + 6 * 2 == len(set(dealt))


@pytest.mark.parametrize(
    ("strategy", "joins"),
    # Each strategy at one of the two steps.
    fast_where(
        lambda each: isinstance(each[0], SlowMo) == (each[1] == 8),
        product([AllReduce(), SlowMo(period=3), PushSum(Irregular(), staleness=1)], (6, 8)),
    ),
    ids=str,
)
def test_one_leaves_while_another_joins(strategy: Strategy, joins: int) -> None:
    parts = run(3, strategy, leaves={1: 5}, joins=joins, every=4, steps=60, batches=50)
    assert parts[1].left_at in (8, 12)  # who joins at step 8 does not ask then, so that nobody does
    stay = [parts[0], parts[2], parts[3]]
    assert parts[0].views[-1][0] == ("w0", "w2", "w3")
    assert all(torch.equal(part.agreed, stay[0].agreed) for part in stay)  # type: ignore[arg-type]


def test_who_joins_while_the_others_ask_is_not_waited_for() -> None:
    """Ranks that are a step ahead under push-sum ask for notices, and are still asking when the last hears of it."""
    parts = run(3, PushSum(Irregular(), staleness=1), leaves={1: 10}, joins=7, slow=1, every=4, steps=24)
    assert [part.left_at for part in parts] == [None, 12, None, None]
    stay = [parts[0], parts[2], parts[3]]
    assert all(torch.equal(part.agreed, stay[0].agreed) for part in stay)  # type: ignore[arg-type]


def test_where_all_have_notice_all_leave_after_the_same_step_and_can_save(tmp_path: Path) -> None:
    parts = run(3, SlowMo(period=3), leaves={0: 1, 1: 3, 2: 2}, every=6, folder=tmp_path)
    assert [part.left_at for part in parts] == [6, 6, 6]
    again = run(2, SlowMo(period=3), leaves={}, steps=9, folder=tmp_path)
    assert [part.resumed_at for part in again] == [6, 6]
    assert all(part.agreed is not None for part in again)


def test_one_of_two_leaves_and_the_other_trains_alone() -> None:
    gone, stays = run(2, LocalSGD(period=3), leaves={0: 1}, every=5)
    assert (gone.left_at, stays.left_at) == (5, None) and stays.agreed is not None


def test_only_elastic_workers_leave() -> None:
    model = net(0)
    worker = thinwire.attach(model, momentum(model), AllReduce())
    with pytest.raises(thinwire.ConfigError, match="only workers of attach"):
        Notice(worker, signals=()).leave()


def plain(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)
