# SPDX-License-Identifier: Apache-2.0
"""Sketched SGD, local top-k, FetchSGD and DQ-SGD once more, straight from the papers: workers on the leading axis.

A sketch is a matrix here, (rows, columns, n), and the plain second opinion knows nothing of thinwire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Gradient = Callable[[Tensor, int], Tensor]
Matrix = Callable[[int], Tensor]


def estimates(table: Tensor, matrix: Tensor) -> Tensor:
    """Of every element: the median over rows of the cell it went to, with its sign."""
    return torch.einsum("qc,qcn->qn", table, matrix.to(table.dtype)).median(0).values


def largest(x: Tensor, k: int) -> list[int]:
    """The places of the k largest magnitudes, the first of equal ones, in order."""
    return sorted(sorted(range(len(x)), key=lambda i: (-abs(float(x[i])), i))[:k])


@dataclass
class Sketched:
    """Workers' momenta and what they have not said, step by step.

    Attributes:
        matrix: of each step.
        small: places that travel whole.
        moved: the places moved at each step.
        steps: what the parameters were moved by at each step.
    """

    k: int
    candidates: int
    momentum: float
    matrix: Matrix | None
    small: Sequence[int] = ()
    masking: bool = True
    inside: bool = True
    moved: list[list[int]] = field(default_factory=list[list[int]])
    steps: list[Tensor] = field(default_factory=list[Tensor])
    u: Tensor = field(default_factory=lambda: torch.zeros(0))
    v: Tensor = field(default_factory=lambda: torch.zeros(0))

    def run(self, gradient: Gradient, x: Tensor, rates: Sequence[float], *, decay: float = 0.0) -> Tensor:
        """All parameters after every step: (steps, n)."""
        self.u, self.v = torch.zeros_like(x), torch.zeros_like(x)
        loud = [i for i in range(x.shape[1]) if i not in set(self.small)]
        path: list[Tensor] = []
        for t, rate in enumerate(rates):
            self.u = self.momentum * self.u + gradient(x, t) / len(x) * (rate if self.inside else 1.0)
            self.v = self.v + self.u
            change = self._recover(t, loud) if self.matrix is not None else self._everyones_own(loud)
            change[list(self.small)] = self.v[:, list(self.small)].sum(0)
            self.v[:, list(self.small)] = 0
            self.steps.append(change)
            x = x - (change if self.inside else rate * change) - rate * decay * x
            path.append(x[0])
        return torch.stack(path)

    def _recover(self, t: int, loud: list[int]) -> Tensor:
        assert self.matrix is not None
        matrix, change = self.matrix(t), torch.zeros_like(self.v[0])
        table = torch.einsum("qcn,n->qc", matrix.to(self.v.dtype), self.v[:, loud].sum(0))
        guess = estimates(table, matrix)
        chosen = largest(guess, self.candidates or self.k)
        if self.candidates:
            exact = self.v[:, loud].sum(0)
            chosen = [chosen[i] for i in largest(exact[chosen], self.k)]
            guess = exact
        places = [loud[i] for i in chosen]
        change[places] = guess[chosen]
        self._forget(slice(None), places)
        self.moved.append(places)
        return change

    def _everyones_own(self, loud: list[int]) -> Tensor:
        change = torch.zeros_like(self.v[0])
        for worker in range(len(self.v)):
            places = [loud[i] for i in largest(self.v[worker, loud], self.k)]
            change[places] += self.v[worker, places]
            self._forget(worker, places)
        return change

    def _forget(self, worker: int | slice, places: list[int]) -> None:
        self.v[worker, places] = 0
        if self.masking:
            self.u[worker, places] = 0


def fetch_sgd(
    gradient: Gradient,
    x: Tensor,
    rates: Sequence[float],
    *,
    k: int,
    momentum: float,
    matrix: Tensor,
    decay: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """FetchSGD as published, with cells emptied: parameters after every step, and the table of errors at the end."""
    matrix = matrix.to(x.dtype)
    speed = error = torch.zeros(matrix.shape[:2], dtype=x.dtype)
    path: list[Tensor] = []
    for t, rate in enumerate(rates):
        speed = momentum * speed + torch.einsum("qcn,n->qc", matrix, rate * gradient(x, t).mean(0))
        error = error + speed
        guess = estimates(error, matrix)
        chosen = largest(guess, k)
        touched = (matrix[:, :, chosen] != 0).any(2)
        error, speed = error.masked_fill(touched, 0), speed.masked_fill(touched, 0)
        change = torch.zeros_like(guess)
        change[chosen] = guess[chosen]
        x = x - change - rate * decay * x
        path.append(x[0])
    return torch.stack(path), error


def coded(x: Tensor, bits: int, block: int, draws: Tensor, *, dither: bool) -> Tensor:
    """Random rounding to 2^(bits-1) - 1 levels to each side, relative to the largest entry of each block."""
    levels, pieces = 2 ** (bits - 1) - 1, list[Tensor]()
    for piece, u in zip(x.split(block), draws.split(block), strict=True):
        top = piece.abs().max()
        code = torch.floor(piece * levels / top + levels + u) - levels
        pieces.append((code - u + 0.5 if dither else code) * top / levels if top > 0 else torch.zeros_like(piece))
    return torch.cat(pieces)


def squares(rows: Tensor, block: int) -> float:
    """Sums of every entry's block's squared scale, meaned over workers."""
    return float(sum(len(b) * b.abs().max().double() ** 2 for row in rows for b in row.split(block))) / len(rows)
