"""Backup workers and asynchronous SGD from their algorithm boxes; crowds to feed a keeper with; and loops."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

import pytest
import torch
from torch import Tensor, nn

from tests.engine import batch, flat, net
from thinwire import Worker
from thinwire.quorum.control_messages import Kind, Note
from thinwire.quorum.coordinator import Keeper, Mail
from thinwire.quorum.log import memberships
from thinwire.strategies.stragglers.backup_workers import BackupWorkers

Optimizing = Callable[[nn.Module], torch.optim.Optimizer]
Loss = Callable[[nn.Module, int, int], Tensor]
"""Of (model, rank, step)."""


def backup_workers(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, log: Sequence[Sequence[int]], *, clip: float = inf
) -> Tensor:
    """Algorithms 3 and 4 by one process: at every step the mean of the members' gradients, at the same parameters."""
    parameters = list(model.parameters())
    for step, members in enumerate(log):
        rows = [torch.autograd.grad(loss(model, rank, step), parameters) for rank in members]
        for parameter, *gradients in zip(parameters, *rows, strict=True):
            total = gradients[0].clone()
            for gradient in gradients[1:]:
                total += gradient
            parameter.grad = total / len(members)
        if clip < inf:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
    return torch.cat([parameter.detach().view(-1) for parameter in parameters])


def async_sgd(
    gradient: Callable[[int, Tensor], Tensor], x: Tensor, rate: float, order: Sequence[int], *, scaled: bool = False
) -> tuple[Tensor, list[int]]:
    """Async-Opt, event by event: a gradient is of what its worker read when it last came. Returns x and stalenesses."""
    read, seen, ages = dict[int, Tensor](), dict[int, int](), list[int]()
    for version, rank in enumerate(order):
        age = version - seen.get(rank, 0)
        ages.append(age)
        x = x - rate / (max(1, age) if scaled else 1) * gradient(rank, read.get(rank, torch.zeros_like(x)))
        read[rank], seen[rank] = x, version + 1
    return x, ages


@dataclass
class Crowd:
    """Ranks that come, add up and stop at random, and a keeper among them; notes of each pair come in their order.

    Attributes:
        closed: how each rank saw steps closed.
        steps: the step that each rank is at.
        under_way: notes to each rank.
        asked: all-reduces that each rank was asked to take part in.
        joined: which ranks take part in each, by its number.
    """

    keeper: Keeper
    draw: random.Random
    stopped: set[int] = field(default_factory=set[int])
    closed: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict[int, dict[int, tuple[int, ...]]])
    steps: dict[int, int] = field(default_factory=dict[int, int])
    attempts: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict[int, tuple[int, tuple[int, ...]]])
    under_way: dict[int, Mail] = field(default_factory=dict[int, Mail])
    sums: set[tuple[int, int, tuple[int, ...]]] = field(default_factory=set[tuple[int, int, tuple[int, ...]]])
    asked: dict[int, Mail] = field(default_factory=dict[int, Mail])
    joined: dict[int, set[int]] = field(default_factory=dict[int, set[int]])

    def act(self, rank: int, now: float) -> None:
        """One rank does one thing: reads a note, says that it is here, or holds the mean if all members are awake."""
        if rank in self.stopped:
            return
        mail = self.under_way.setdefault(rank, [])
        if mail:
            self._read(rank, mail.pop(0)[1])
            return
        step = self.steps.setdefault(rank, 0)
        attempt, members = self.attempts.get(rank, (0, ()))
        if self.asked.get(rank) and self.draw.random() < 0.5:
            self._sum(rank, self.asked[rank], now)
        elif attempt and members and not self.stopped & set(members) and self.draw.random() < 0.9:
            self.sums.add((step, attempt, members))
            self._tell(rank, Note(Kind.HELD, step, attempt), now)
        elif not attempt or self.draw.random() < 0.2:
            self._tell(rank, Note(Kind.HERE, step, attempt), now)

    def _sum(self, rank: int, asked: Mail, now: float) -> None:
        """Take part in an all-reduce, whatever else this rank does; it ends for whoever asks when all have begun it."""
        note = asked[0][1]
        joined = self.joined.setdefault(note.sum, set())
        joined.add(rank)
        if len(joined) == self.keeper.rule.size:
            asked.pop(0)
            self.sums.add((note.step, note.attempt, note.members))
            self._tell(rank, Note(Kind.HELD, note.step, note.attempt, sum=note.sum), now)

    def _tell(self, rank: int, note: Note, now: float) -> None:
        for dst, answer in self.keeper.hear(rank, note, now):
            self.under_way.setdefault(dst, []).append((dst, answer))

    def _read(self, rank: int, note: Note) -> None:
        step = self.steps.setdefault(rank, 0)
        if note.kind is Kind.GO and note.sum:
            self.asked.setdefault(rank, []).append((rank, note))
        if note.kind is Kind.LATE and note.attempt == step:
            self.steps[rank] = note.step
        elif note.step != step:
            return
        elif note.kind is Kind.GO:
            if rank in note.members:
                self.attempts[rank] = (note.attempt, () if note.sum else note.members)
            return
        elif note.kind is Kind.CLOSED:
            self.closed.setdefault(rank, {})[step] = note.members
            self.steps[rank] = step + 1
        self.attempts.pop(rank, None)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    return (model(x) - y).square().mean()


def on_time(rank: int, step: int) -> float:
    return 0.0


class Run:
    """What one rank has seen: its own steps, and a digest of the parameters after each."""

    def __init__(self, worker: Worker) -> None:
        self.digests: dict[int, str] = {}
        self.metrics: list[dict[str, float]] = []
        self.log: list[tuple[int, ...]] = []
        self.values = list[float]()
        self.sent = 0.0

    @property
    def x(self) -> Tensor:
        return torch.tensor(self.values)


def train(
    worker: Worker,
    count: int,
    pause: Callable[[int, int], float] = on_time,
    *,
    ends: bool = True,
    clip: float = inf,
) -> Run:
    """A loop as it is written for backup workers."""
    seen, rank, optimizer = Run(worker), worker.comm.rank, worker.optimizer
    while worker.step < count:
        optimizer.zero_grad()
        loss = loss_of(worker.model, rank, worker.step)
        time.sleep(pause(rank, worker.step))
        loss.backward()
        if clip < inf:
            nn.utils.clip_grad_norm_(worker.model.parameters(), clip)
        optimizer.step()
        seen.digests[worker.step] = hashlib.sha256(flat(worker.model).numpy().tobytes()).hexdigest()
        seen.metrics.append(worker.metrics())
    if ends:
        worker.detach()
    seen.values, seen.log = flat(worker.model).tolist(), list(memberships(worker.replicas[0]))
    seen.sent = worker.comm.meter.payload_bytes
    return seen


def stalls(rank: int, step: int) -> float:
    """One step in five takes longer."""
    return 0.02 if random.Random(100 * rank + step).random() < 0.2 else 0.0


def slow_last(rank: int, step: int) -> float:
    return 0.03 if rank == 3 else 0.001


def together(
    runs: Sequence[Run], strategy: BackupWorkers, optimizing: Optimizing, *, exact: bool = True, clip: float = inf
) -> None:
    """All ranks held the same bits at every step, and those are what one process makes of the log.

    To the bit where sums are in the order of ranks, to rounding where the wire has an order of its own.
    """
    first, size = runs[0], len(runs)
    digests: dict[int, str] = {}
    for run in runs:
        assert run.log == first.log
        assert torch.equal(run.x, first.x)
        for step, digest in run.digests.items():
            assert digests.setdefault(step, digest) == digest
    if strategy.choice == "fixed":
        assert {len(members) for members in first.log} == {size - strategy.backups}
    model = net()
    expected = backup_workers(model, optimizing(model), loss_of, first.log, clip=clip)
    assert first.x.tolist() == (expected.tolist() if exact else pytest.approx(expected.tolist(), abs=2e-6))
