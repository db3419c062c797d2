"""Backup workers and asynchronous SGD once more, from their algorithm boxes; and crowds to feed a keeper with."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from laconic.arrivals.keeper import Keeper, Mail
from laconic.arrivals.notes import Kind, Note

Loss = Callable[[nn.Module, int, int], Tensor]
"""Of (model, rank, step)."""


def backup_workers(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, log: Sequence[Sequence[int]]
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
    """

    keeper: Keeper
    draw: random.Random
    stopped: set[int] = field(default_factory=set[int])
    closed: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict[int, dict[int, tuple[int, ...]]])
    steps: dict[int, int] = field(default_factory=dict[int, int])
    attempts: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict[int, tuple[int, tuple[int, ...]]])
    under_way: dict[int, Mail] = field(default_factory=dict[int, Mail])
    sums: set[tuple[int, int, tuple[int, ...]]] = field(default_factory=set[tuple[int, int, tuple[int, ...]]])

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
        if attempt and not self.stopped & set(members) and self.draw.random() < 0.9:
            self.sums.add((step, attempt, members))
            self._tell(rank, Note(Kind.HELD, step, attempt), now)
        elif not attempt or self.draw.random() < 0.2:
            self._tell(rank, Note(Kind.HERE, step, attempt), now)

    def _tell(self, rank: int, note: Note, now: float) -> None:
        for to, answer in self.keeper.hear(rank, note, now):
            self.under_way.setdefault(to, []).append((to, answer))

    def _read(self, rank: int, note: Note) -> None:
        step = self.steps[rank]
        if note.kind is Kind.LATE and note.attempt == step:
            self.steps[rank] = note.step
        elif note.step != step:
            return
        elif note.kind is Kind.GO:
            self.attempts[rank] = (note.attempt, note.members)
            return
        elif note.kind is Kind.CLOSED:
            self.closed.setdefault(rank, {})[step] = note.members
            self.steps[rank] = step + 1
        self.attempts.pop(rank, None)
