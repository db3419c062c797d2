# SPDX-License-Identifier: Apache-2.0
"""What benchmarks of elastic and unequal fleets share: workers that train, lines of JSON, processes that are killed."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "survival"


def keep(rows: Iterable[Mapping[str, Any]], name: str | None) -> None:
    """Print results as lines of JSON, each as soon as it is there, and append them to NAME.jsonl of the results."""
    for row in rows:
        line = json.dumps(row)
        print(line, flush=True)
        if name:
            RESULTS.mkdir(parents=True, exist_ok=True)
            with (RESULTS / f"{name}.jsonl").open("a") as file:
                file.write(line + "\n")


def tell(**said: Any) -> None:
    """Print a line for the parent, with the time."""
    print(json.dumps({"at": time.monotonic(), **said}), flush=True)


def kill(pids: Iterable[int]) -> None:
    """SIGKILL to processes, of which some may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Trainer:
    """A worker's model, AdamW at 1e-3, and its steps.

    Args:
        workers: among which the data are divided.
        slot: whose part of the data is used; may be set later.
        task: what is learned.
        size: of the task's model; its default unless given.
        batch: examples of a step.
        seed: of the parameters.
        order: seed of the order of the data; that of the parameters unless given.
        seconds: a step lasts at least so long. What computation leaves of that is slept before the optimizer's step,
            so that workers do not compete for the processors.
    """

    def __init__(
        self,
        workers: int,
        slot: int = 0,
        *,
        task: str = "text",
        size: str | None = "0.5m",
        batch: int = 4,
        seed: int = 0,
        order: int | None = None,
        seconds: float = 0.0,
    ) -> None:
        import torch

        from thinwire.lab import tasks

        torch.set_num_threads(1)
        self.task, self.slot, self._batch, self._seconds = tasks.load(task), slot, batch, seconds
        self._order = seed if order is None else order
        self._shards = self.task.shards(workers, split="iid", seed=0)
        self.model = self.task.model(size or self.task.default_size, seed=seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, number: int, worker: Any = None) -> None:
        """Train on one batch, and record it with the worker if one is given."""
        ends, shard = time.monotonic() + self._seconds, self._shards[self.slot]
        batch = self.task.batch(shard, number, batch_size=self._batch, seed=self._order, rank=self.slot)
        self.optimizer.zero_grad()
        self.task.loss(self.model, batch).backward()
        if worker is not None:
            worker.record_batch(self._batch)
        time.sleep(max(0.0, ends - time.monotonic()))
        self.optimizer.step()


def lighthouse(bind: str) -> Any:
    """Start torchft's lighthouse with the settings of its README; it lives as long as the object."""
    coordination: Any = importlib.import_module("torchft.coordination")
    return coordination.LighthouseServer(bind=bind, min_replicas=1, join_timeout_ms=10_000, quorum_tick_ms=100)


def torchft_steps(
    trainer: Trainer, method: str, period: int, *, lighthouse: str, name: str, address: str = "127.0.0.1"
) -> Iterator[tuple[int, int | None]]:
    """Train as a replica group of torchft; yields each step, and the batches that a commit kept; None without a commit.

    Args:
        trainer: of the group.
        method: "DiLoCo" or "LocalSGD".
        period: its `sync_every`.
        lighthouse: its URL.
        name: of the group.
        address: at which the others reach it.
    """
    import torch
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    torchft: Any = importlib.import_module("torchft")
    methods: Any = importlib.import_module("torchft.local_sgd")
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    model, optimizer, healed, committed = trainer.model, trainer.optimizer, list[bool](), list[bool]()

    def load(state: dict[str, Any]) -> None:
        healed.append(True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=name,
        hostname=address,
    )
    ask = manager.should_commit

    def should_commit(*arguments: Any, **named: Any) -> bool:
        committed.append(ask(*arguments, **named))
        return committed[-1]

    manager.should_commit = should_commit
    if method == "DiLoCo":
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        context = methods.DiLoCo(manager, [model], optimizer, outer, sync_every=period)
    else:
        context = methods.LocalSGD(manager, model, optimizer, sync_every=period)
    step = pending = 0
    with context:
        while True:
            trainer.step(step)
            step, pending = step + 1, pending + 1
            if healed:
                pending = 0  # the steps before the others' state
            kept = pending if committed and committed[-1] else None
            if committed and (committed[-1] or method == "DiLoCo"):
                pending = 0  # without a commit DiLoCo returns to the last mean
            healed.clear()
            committed.clear()
            yield step, kept


class Steps:
    """Measures how much of a fleet's summed speed is used, by when its workers' steps end.

    The window begins with the first round that ends after `warm` seconds and ends with the first one that ends `window`
    seconds later, by rank 0's steps.

    Args:
        lengths: seconds of each worker's own step.
        period: steps of a round.
        warm: seconds.
        window: seconds.
    """

    def __init__(self, lengths: Sequence[float], period: int, warm: float, window: float) -> None:
        self._lengths, self._period, self._warm, self._window = lengths, period, warm, window
        self._ends: list[list[tuple[float, int]]] = [[] for _ in lengths]

    def read(self, rank: int, stream: str, line: str) -> None:
        """A line of a worker, which tells each step's number."""
        if stream == "stdout" and line.startswith("{"):
            said = json.loads(line)
            self._ends[rank].append((said["at"], said["step"]))
        elif "Error" in line:
            print(f"rank {rank}: {line}", file=sys.stderr)

    def seen(self) -> tuple[float, float] | None:
        """When the window began and ended; None before its end."""
        ends = list(self._ends[0])
        rounds = [at for at, step in ends if step % self._period == 0]
        first = next((at for at in rounds if at > ends[0][0] + self._warm), None)
        last = next((at for at in rounds if first is not None and at > first + self._window), None)
        return None if first is None or last is None else (first, last)

    def used(self, what: str) -> dict[str, Any]:
        """The window's seconds, what each worker took in it, and their sum over what they could do alone."""
        seen = self.seen()
        assert seen is not None
        first, last = seen
        taken = [sum(1 for at, _ in each if first < at <= last) for each in self._ends]
        share = sum(taken) / (last - first) / sum(1 / each for each in self._lengths)
        return {"seconds": round(last - first, 2), what: taken, "of_summed_speed": round(share, 4)}
