# SPDX-License-Identifier: Apache-2.0
"""Elastic workers as real processes over Gloo, which are killed."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.pool import context
from tests.pretend_gpu import REAL, pretend_gpu

WIDTHS = (3, 16, 2)


@dataclass
class Report:
    """What a worker said: when each step ended, its views, its parameters at the end, and push-sum's weights."""

    steps: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    views: list[tuple[float, int, int]] = field(default_factory=list[tuple[float, int, int]])
    agreed: list[float] | None = None
    weights: list[float] = field(default_factory=list[float])
    told: dict[str, float] = field(default_factory=dict[str, float])
    error: str = ""


class Processes:
    """Elastic worker processes around one store, which this process hosts.

    Args:
        recipe: of all of them, as text.
        size: workers at the start.
        steps: optimizer steps of the run.
        widths: of the model's layers.
        environment: variables of all of them.
        seconds: how long a step computes at least.
        device: of the models; a pretended GPU where there is none.
        last_view: the number of a view; if given, workers take `steps` steps more after it, instead of in all.
    """

    def __init__(
        self,
        recipe: str,
        size: int,
        *,
        steps: int,
        widths: tuple[int, ...] = WIDTHS,
        environment: dict[str, str] | None = None,
        seconds: float = 0.0,
        store: str | None = None,
        device: str = "cpu",
        last_view: int = 0,
    ) -> None:
        from thinwire.core.comm.rendezvous import host_store

        self._store = None if store else host_store("127.0.0.1", 0)
        address = store or f"127.0.0.1:{self._store.port}"  # pyright: ignore[reportOptionalMemberAccess]
        self._environment = {
            "THINWIRE_STORE": address,
            "THINWIRE_WORKERS": str(size),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }
        self._task = (recipe, steps, widths, seconds, device, last_view)
        # Where a GPU was looked for before a fork, the fork cannot use it.
        self._context: Any = multiprocessing.get_context("spawn") if REAL and device != "cpu" else context
        self.reports: list[Report] = []
        self._inboxes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            self.start(rank)

    def start(self, rank: int) -> None:
        """Start one more worker."""
        inbox, outbox = self._context.Pipe(duplex=False)
        environment = {**self._environment, "THINWIRE_RANK": str(rank)}
        process = self._context.Process(target=_main, args=(outbox, environment, *self._task))
        process.start()
        outbox.close()
        self.reports.append(Report())
        self._inboxes.append(inbox)
        self._processes.append(process)

    def until(self, number: int, step: int, *, seconds: float = 60.0) -> None:
        """Wait until a worker has done so many steps."""
        self._read(lambda: any(at >= step for _, at in self.reports[number].steps), seconds)

    def until_view(self, number: int, epoch: int, *, seconds: float = 60.0) -> None:
        """Wait until a worker is in a view."""
        self._read(lambda: any(at >= epoch for _, at, _ in self.reports[number].views), seconds)

    def kill(self, number: int) -> float:
        """SIGKILL; returns the time."""
        now = time.monotonic()
        self._processes[number].kill()
        return now

    def end_store(self) -> None:
        """The process that hosts the store ends."""
        self._store = None

    def finish(self, *, seconds: float = 60.0) -> list[Report]:
        """Wait until all have ended; kills who has not, and says so."""
        ended = self._read(lambda: False, seconds)
        for number, process in enumerate(self._processes):
            process.join(1.0)
            if process.is_alive():
                self.reports[number].error += "did not end"
                process.kill()
                process.join()
        assert ended or any(report.error for report in self.reports)
        return self.reports

    def _read(self, enough: Any, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not enough() and time.monotonic() < end:
            open_ones: list[Any] = [inbox for inbox in self._inboxes if not inbox.closed]
            if not open_ones:
                return True
            for inbox in wait(open_ones, timeout=0.1):
                assert isinstance(inbox, Connection)
                report = self.reports[self._inboxes.index(inbox)]
                try:
                    kind, *content = inbox.recv()
                except (EOFError, OSError):
                    inbox.close()
                    continue
                if kind == "step":
                    report.steps.append((content[0], content[1]))
                elif kind == "view":
                    report.views.append((content[0], content[1], content[2]))
                elif kind == "error":
                    report.error = content[0]
                else:
                    report.agreed, report.told, report.weights = content
        return enough() or time.monotonic() < end


def _main(
    outbox: Connection,
    environment: dict[str, str],
    recipe: str,
    steps: int,
    widths: tuple[int, ...],
    seconds: float,
    device: str,
    last_view: int,
) -> None:
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    try:
        with nullcontext() if device == "cpu" else pretend_gpu():
            _train(outbox, recipe, steps, widths, seconds, device, last_view)
    except BaseException:
        outbox.send(("error", traceback.format_exc()))


def _train(
    outbox: Connection,
    recipe: str,
    steps: int,
    widths: tuple[int, ...],
    seconds: float,
    device: str,
    last_view: int,
) -> None:
    import torch
    from torch import nn

    import thinwire

    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    worker = thinwire.attach(model, optimizer, recipe, elastic=True, timeout=20)
    outbox.send(("view", time.monotonic(), worker.view.epoch, worker.size))
    assert worker.elastic is not None
    worker.elastic.on_view.append(lambda view: outbox.send(("view", time.monotonic(), view.epoch, view.size)))
    draw = torch.Generator().manual_seed(int(os.environ["THINWIRE_RANK"]))

    def ended() -> bool:
        if worker.view.epoch < last_view:
            return False
        begins = max(each.step for each in worker.view.progress.values()) if last_view else 0
        return worker.step >= begins + steps

    while not ended():
        x = torch.randn(8, widths[0], generator=draw).to(device)
        y = x[:, :1].expand(8, widths[-1])
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        if seconds:
            time.sleep(seconds)
        optimizer.step()
        outbox.send(("step", time.monotonic(), worker.step))
    with worker.consensus():
        agreed = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    assert worker.elastic is not None
    weights = weights_of(worker)
    outbox.send(("end", agreed if len(agreed) < 10_000 else agreed[:100], worker.elastic.costs, weights))


def weights_of(worker: Any) -> list[float]:
    """The sum of all push-sum weights, those in flight too, and the number of workers; empty without weights."""

    from thinwire import PushSum
    from thinwire.methods.strategies.push_sum.mass import mix_mass_, weight

    strategy, r = worker.strategy, worker.replicas[0]
    found: list[float] = []

    def add() -> None:
        found.clear()
        if isinstance(strategy, PushSum) and "mass" in r.state:
            mass = r.state["mass"].clone()
            for name, shares in strategy.in_flight(r):
                mix_mass_(mass, r.inflight[name].wait(), shares)
            total = worker.comm.all_reduce_(weight(mass).view(1)).wait()
            found.extend([float(total), float(worker.size)])

    worker._together(add)
    return found
