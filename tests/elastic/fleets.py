# SPDX-License-Identifier: Apache-2.0
"""Elastic workers as threads: a user's loop, in which some die at a chosen call."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import thinwire
from tests.engine import batch, momentum, net
from thinwire import Strategy, Worker
from thinwire.core.kernels.decisions import host_copy
from thinwire.elastic.membership import RunEndedError
from thinwire.elastic.sampler import ElasticSampler, MembershipInterval
from thinwire.elastic.threads import ThreadConnector, ThreadNetwork


class KilledError(BaseException):
    """Ends a thread as SIGKILL ends a process: nothing after it runs."""


@dataclass
class End:
    """How a worker's run ended.

    Attributes:
        x: its parameters.
        agreed: the consensus, if it reached the end.
        epochs: of the views that it was in.
        told: what the changes of view have cost.
        steps: taken in all.
        trace: its parameters after each step, by the step.
        batches: the step and the number of each batch that it was dealt.
        error: what ended it.
        scales: of its GradScaler, after each step.
        lost: the batches that its sampler lists as lost.
        crews: that its sampler has assigned batches by.
    """

    x: Tensor | None = None
    agreed: Tensor | None = None
    epochs: list[tuple[int, tuple[str, ...]]] = field(default_factory=list[tuple[int, tuple[str, ...]]])
    told: dict[str, float] = field(default_factory=dict[str, float])
    steps: int = 0
    trace: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    batches: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    error: BaseException | None = None
    scales: list[float] = field(default_factory=list[float])
    lost: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    crews: list[MembershipInterval] = field(default_factory=list[MembershipInterval])


@dataclass(frozen=True)
class Kill:
    """A worker dies at its n-th call of the comm, counted from a step on; before the call is made, or after."""

    rank: int
    step: int
    call: int = 0
    after: bool = False


class _Trap:
    """Stands before a worker's comm, and ends its thread in one of its calls."""

    def __init__(self, worker: Worker, kill: Kill, connector: ThreadConnector) -> None:
        self._kill, self._worker, self._connector, self._calls = kill, worker, connector, 0
        assert worker.elastic is not None
        comm: Any = worker.elastic.comm
        for name in ("_all_reduce_", "_all_gather", "_all_to_all", "_send_recv", "_broadcast_"):
            setattr(comm, name, self._trapped(getattr(comm, name)))

    def _trapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if self._worker.step < self._kill.step:
                return call(*arguments)
            self._calls += 1
            strikes = self._calls > self._kill.call
            if strikes and not self._kill.after:
                self.strike()
            work = call(*arguments)
            if strikes:
                work.wait()
                self.strike()
            return work

        return run

    def strike(self) -> None:
        self._connector.end()
        raise KilledError


def run_fleet(
    size: int,
    strategy: Strategy,
    *,
    steps: int = 12,
    kills: tuple[Kill, ...] = (),
    joins: tuple[int, ...] = (),
    timeout: float = 10.0,
    optimizer: Callable[..., torch.optim.Optimizer] = momentum,
    epoch: int = 0,
    fails: int | None = None,
    before: Callable[[Worker], None] = lambda _: None,
    after: Callable[[Worker], None] = lambda _: None,
    network: ThreadNetwork | None = None,
    device: str = "cpu",
    scale: float = 0.0,
    overflows: tuple[tuple[int, int], ...] = (),
    **settings: Any,
) -> list[End]:
    """Train on threads until every worker has taken its steps; returns how each ended.

    Args:
        size: workers at the start.
        strategy: the recipe.
        steps: optimizer steps of the run.
        kills: who dies when.
        joins: for each worker that joins, the step of the run at which it is started.
        timeout: of waits, in seconds.
        optimizer: of the model.
        epoch: batches in one, which an `ElasticSampler` deals; 0 deals none.
        fails: the step whose first backward pass fails on all workers, which then evaluate and take another batch.
        before: called at the start of each turn of the loop.
        after: called after each step.
        network: of the threads; a new one unless given.
        device: of the models; "cuda:0" needs `pretend_gpu()` where there is no GPU.
        scale: of a GradScaler at the start, which doubles every second step; 0 for none.
        overflows: workers and the steps in which their loss is infinite.
        settings: of `attach`.
    """
    network = network or ThreadNetwork()
    started = {at: threading.Event() for at in joins}

    def run(number: int) -> End:
        end = End()
        fleet = network.fleet(f"w{number}", number if number < size else 0, size, timeout=timeout)
        connector = fleet.connector
        assert isinstance(connector, ThreadConnector)
        try:
            if number >= size:
                started[joins[number - size]].wait(30)
            model = net(number).to(device)
            options: dict[str, Any] = {"bucket_bytes": 48, **settings}
            scaler = None
            if scale:
                # Those that join do not know the scale that the others have by then.
                own = scale if number < size else 4 * scale
                options["scaler"] = scaler = torch.amp.GradScaler("cpu", init_scale=own, growth_interval=2)
            worker = thinwire.attach(model, optimizer(model), strategy, elastic=fleet, timeout=timeout, **options)
            end.epochs.append((worker.view.epoch, worker.view.members))
            assert worker.elastic is not None
            worker.elastic.on_view.append(lambda view: end.epochs.append((view.epoch, view.members)))
            for kill in kills:
                if kill.rank == number:
                    _Trap(worker, kill, connector)
            sampler, has_failed = ElasticSampler(epoch) if epoch else None, False
            end.trace[worker.step] = host_copy(worker.replicas[0].x)
            while worker.step < steps:
                before(worker)
                due = [at for at in joins if worker.step >= at]
                for at in due:
                    started[at].set()
                # Who joins is heard before the run is over, however fast it is.
                limit = time.monotonic() + 20
                while fleet.membership.requests() < len(due) and time.monotonic() < limit:
                    time.sleep(0.005)
                if any(f"w{size + i}" not in worker.view.members for i in range(len(due))):
                    time.sleep(0.02)  # a state is sent meanwhile, which takes longer than a step here
                if sampler is not None:
                    end.batches.append((worker.step, sampler.share(worker)))
                x, y = (each.to(device) for each in batch(number, worker.step))
                worker.optimizer.zero_grad()
                loss = (worker.model(x) - y).square().mean()
                if worker.step == fails and not has_failed:
                    has_failed = True
                    _fail(worker, loss)
                    with worker.consensus():
                        continue
                if (number, worker.step) in overflows and not has_failed:
                    has_failed, loss = True, loss * math.inf
                (loss if scaler is None else scaler.scale(loss)).backward()
                worker.record_batch(len(x), loss=loss)
                if scaler is None:
                    worker.optimizer.step()
                else:
                    scaler.step(worker.optimizer)
                    scaler.update()
                    end.scales.append(scaler.get_scale())
                end.steps += 1
                after(worker)
                end.trace[worker.step] = host_copy(worker.replicas[0].x)
            if sampler is not None:
                assert worker.elastic is not None
                end.lost, end.crews = sampler.lost(worker), worker.elastic.crews()
            with worker.consensus():
                end.agreed = host_copy(torch.cat([p.detach().flatten() for p in model.parameters()]))
            end.x = host_copy(worker.replicas[0].x)
            assert worker.elastic is not None
            end.told = worker.elastic.costs
        except KilledError:
            end.error = KilledError()
        except Exception as error:
            end.error = error
        finally:
            connector.end()
            fleet.membership.close()
        return end

    with ThreadPoolExecutor(size + len(joins)) as pool:
        return list(pool.map(run, range(size + len(joins))))


def _fail(worker: Worker, loss: Tensor) -> None:
    """A backward pass that an exception stops when the first gradient is there."""

    def stop(_: Tensor) -> None:
        raise ArithmeticError

    handle = next(reversed(list(worker.model.parameters()))).register_post_accumulate_grad_hook(stop)
    with suppress(ArithmeticError):
        loss.backward()
    handle.remove()


def survivors(ends: list[End]) -> list[End]:
    """Those that were not killed, all of which must have reached the end; who came too late was none of them."""
    alive = [end for end in ends if not isinstance(end.error, KilledError | RunEndedError)]
    for end in alive:
        if end.error is not None:
            raise end.error
    return alive
