# SPDX-License-Identifier: Apache-2.0
"""Elastic workers that are groups of real processes: each group trains one model under FSDP2."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire
from tests.core.replica.test_shards import momentum, net, whole
from tests.engine import batch, drawn
from tests.pool import RankProcess, start_processes
from thinwire.core.comm.rendezvous import host_store, view_store
from thinwire.core.replica.shards import local
from thinwire.core.view import View
from thinwire.elastic.notice import Notice

RANKS = 2


@dataclass
class Rank:
    """How one rank's run ended.

    Attributes:
        trace: the whole model after each step, by the step.
        views: the number and the size of each view.
        agreed: the consensus at the end.
        begins: the step at which it started.
        seconds: the longest step.
        scales: of the `GradScaler`, after each step.
        left: who left with notice and why, by the ids of groups, as the others saw it.
        reasons: why this rank's group left with notice; empty if it stayed.
    """

    trace: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    views: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    agreed: list[float] | None = None
    begins: int = 0
    seconds: list[float] = field(default_factory=list[float])
    scales: dict[int, float] = field(default_factory=dict[int, float])
    left: dict[str, str] = field(default_factory=dict[str, str])
    reasons: dict[int | str, str] = field(default_factory=dict[int | str, str])


@dataclass(frozen=True)
class Kill:
    """A rank ends itself by SIGKILL, in a call of its comm.

    Attributes:
        group: the number of its group.
        rank: its rank in the group.
        step: the number of steps before it.
        call: the name of the call.
        late: how long it waits before it ends, so that the other ranks of its group finish theirs.
    """

    group: int
    rank: int
    step: int
    call: str = "_all_reduce_"
    late: float = 0.0


class Groups:
    """Groups of processes around one store, which this process hosts.

    Args:
        recipe: of all of them.
        size: groups at the start.
        steps: optimizer steps of the run.
        options: of the ranks: `kills`, which of them end; `wrong`, called before they attach, to break something;
            `rate`, of the usual learning rate; `pause`, how long a step takes at least; `last_view`, after which they
            take `steps` steps more, instead of in all; `ends_by_store`, whether they end at the step that `test/end` in
            the store has; `traced`, whether they keep the model after each step; `timeout`, of waits; `notice`, the
            steps between messages of a `Notice`; `folder`, where all save if all leave, and from which they continue;
            `overflows`, the (group, rank, step) whose shard of a gradient overflows under a `GradScaler`; `small`,
            whether the second rank's shard is empty; `where`, how the groups meet, as arguments of `attach` (default:
            elastic, in this store).
    """

    def __init__(self, recipe: str, size: int, *, steps: int, **options: Any) -> None:
        self.store = host_store("127.0.0.1", 0)
        self._environment = {"THINWIRE_STORE": f"127.0.0.1:{self.store.port}", "THINWIRE_WORKERS": str(size)}
        self._recipe, self._steps, self._options = recipe, steps, options
        self.groups: list[list[RankProcess]] = []
        for _ in range(size):
            self.start()

    def start(self, **options: Any) -> int:
        """Start one more group; returns its number."""
        number = len(self.groups)
        environment = dict(self._environment)
        if number < int(environment["THINWIRE_WORKERS"]):
            environment["THINWIRE_RANK"] = str(number)
        options = {**self._options, **options}
        self.groups.append(
            start_processes(RANKS, train, environment, number, self._recipe, self._steps, options, group_seconds=20.0)
        )
        return number

    def until(self, number: int, step: int, *, seconds: float = 60.0) -> None:
        """Wait until a group has done so many steps."""
        end = time.monotonic() + seconds
        while self.step(number) < step:
            assert time.monotonic() < end, f"group {number} is at step {self.step(number)}"
            time.sleep(0.01)

    def step(self, number: int) -> int:
        """The steps that a group has done; 0 before it has joined."""
        key = f"test/{number}"  # as `view_store` has it
        return int(self.store.get(key)) if self.store.check([key]) else 0

    def longest(self, numbers: list[int], since: float, enough: Callable[[], bool]) -> list[float]:
        """The longest interval between two steps of each group, from a time on."""
        last, step, found = (
            dict.fromkeys(numbers, since),
            {each: self.step(each) for each in numbers},
            dict[int, float](),
        )
        while not enough() or any(last[each] == since for each in numbers):
            assert time.time() < since + 60.0, "a group has taken no step for a minute"
            for each in numbers:
                if (now := self.step(each)) != step[each]:
                    found[each] = max(found.get(each, 0.0), time.time() - last[each])
                    last[each], step[each] = time.time(), now
            time.sleep(0.005)
        return list(found.values())

    def kill(self, number: int, rank: int) -> None:
        """SIGKILL one rank."""
        self.groups[number][rank].process.kill()

    def signal(self, number: int, rank: int) -> None:
        """SIGTERM to one rank."""
        self.groups[number][rank].process.terminate()

    def finish(self, *, seconds: float = 60.0) -> list[list[Rank | str]]:
        """Wait until all have ended; returns how each rank of each group ended, or its error."""
        end = time.monotonic() + seconds
        for group in self.groups:
            for rank in group:
                rank.finish(end)
        return [[rank.result or rank.error or "" for rank in group] for group in self.groups]


def train(environment: dict[str, str], number: int, recipe: str, steps: int, options: dict[str, Any]) -> Rank:
    """The script of one rank of a group; an error holds what it has logged."""
    logged = list[str]()
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("thinwire").addHandler(handler)
    try:
        return _train(environment, number, recipe, steps, options)
    except RuntimeError as error:
        raise AssertionError("\n".join(logged)) from error


def _train(environment: dict[str, str], number: int, recipe: str, steps: int, options: dict[str, Any]) -> Rank:
    os.environ.update(environment)
    wrong: Callable[[], None] | None = options.get("wrong")
    if wrong is not None:
        wrong()
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("shard",))
    # All parameters of the small model are on rank 0.
    model = drawn(torch.nn.Sequential(torch.nn.Linear(3, 1))) if options.get("small") else net()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = momentum(model)
    optimizer.param_groups[0]["lr"] *= options.get("rate", 1.0)
    overflows: set[tuple[int, int, int]] | None = options.get("overflows")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=overflows is not None)
    timeout = options.get("timeout", 10.0)
    where: dict[str, Any] = options.get("where", {"elastic": True})
    worker = thinwire.attach(model, optimizer, recipe, **where, group=mesh, timeout=timeout, scaler=scaler)
    folder = options.get("folder")
    if folder is not None:
        worker.load(folder, missing_ok=True)
    end = Rank(begins=worker.step)

    def seen(view: View) -> None:
        end.views.append((view.epoch, view.size))
        end.left.update(view.left)

    if worker.elastic is not None:
        end.views.append((worker.view.epoch, worker.size))
        worker.elastic.on_view.append(seen)
    notice = Notice(worker, every=options["notice"]) if "notice" in options else None
    for kill in options.get("kills", ()):
        if (kill.group, kill.rank) == (number, mesh.get_local_rank()):
            _trap(worker, kill)
    store = view_store("test", None, several=True, timeout=10.0)
    traced = options.get("traced", True)
    last_view = options.get("last_view", 0)

    def ended() -> bool:
        if options.get("ends_by_store"):
            return store.check(["end"]) and worker.step >= int(store.get("end"))
        if not last_view:
            return worker.step >= steps
        begins = max((each.step for each in worker.view.progress.values()), default=0)
        return worker.view.epoch >= last_view and worker.step >= begins + steps

    with worker:
        while not ended():
            start = time.monotonic()
            x, y = batch(number, worker.step, classes=1)
            optimizer.zero_grad()
            scaler.scale((model(x) - y).square().mean()).backward()
            if (number, mesh.get_local_rank(), worker.step) in (overflows or ()):
                grad = next(model.parameters()).grad
                assert grad is not None
                local(grad)[0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            end.scales[worker.step] = scaler.get_scale()
            end.seconds.append(time.monotonic() - start)
            if traced:
                end.trace[worker.step] = whole(model).tolist()
            if mesh.get_local_rank() == 0:
                store.set(f"{number}", str(worker.step))
            time.sleep(options.get("pause", 0.0))
            if notice is not None and notice.leave():
                end.reasons = notice.reasons
                if folder is not None and len(notice.reasons) == worker.size:
                    worker.save(folder)
                return end
        with worker.consensus():
            end.agreed = whole(model).tolist()
    return end


def _trap(worker: thinwire.Worker, kill: Kill) -> None:
    assert worker.elastic is not None
    comm: Any = worker.elastic.comm
    call = getattr(comm, kill.call)

    def run(*arguments: Any) -> Any:
        if worker.step >= kill.step:
            time.sleep(kill.late)
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments)

    setattr(comm, kill.call, run)
