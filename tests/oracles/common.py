# SPDX-License-Identifier: Apache-2.0
"""Workers' own SGD, and the mixing matrices of graphs: all workers in one tensor, the worker on the leading axis.

Nothing in here knows thinwire.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Gradient = Callable[[Tensor, int], Tensor]
Mixing = Callable[[int], Tensor]


class Descent:
    """Every worker's own SGD: what it adds to the parameters, given the gradients and where they were taken."""

    def __init__(
        self, rates: Sequence[float | Tensor], *, momentum: float = 0.0, nesterov: bool = False, decay: float = 0.0
    ) -> None:
        self.rates, self.momentum, self.nesterov, self.decay = rates, momentum, nesterov, decay
        self.forget()

    def forget(self) -> None:
        self.velocity = torch.zeros(())

    def average(self) -> None:
        self.velocity = self.velocity.mean(0).expand_as(self.velocity)

    def __call__(self, x: Tensor, g: Tensor, k: int) -> Tensor:
        g = g + self.decay * x
        self.velocity = self.momentum * self.velocity + g
        return -self.rates[k] * (g + self.momentum * self.velocity if self.nesterov else self.velocity)


def shares(n: int, targets: Callable[[int], set[int]], dtype: torch.dtype) -> Tensor:
    """The matrix in which every worker splits its vector evenly among itself and its targets; columns sum to one."""
    matrix = torch.zeros(n, n, dtype=dtype)
    for source in range(n):
        receivers = [source, *targets(source)]
        for target in receivers:
            matrix[target, source] = 1 / len(receivers)
    return matrix


def periodic(graph: Callable[[int, torch.dtype], Mixing], every: int) -> Callable[[int, torch.dtype], Mixing]:
    """A graph at the last of every few steps, and each worker by itself at the others."""

    def made(n: int, dtype: torch.dtype) -> Mixing:
        mixing, alone = graph(n, dtype), torch.eye(n, dtype=dtype)
        return lambda k: mixing(k // every) if k % every == every - 1 else alone

    return made


def ring(n: int, dtype: torch.dtype) -> Mixing:
    """Both neighbours, always."""
    matrix = shares(n, lambda i: {(i - 1) % n, (i + 1) % n} - {i}, dtype)
    return lambda k: matrix


def complete(n: int, dtype: torch.dtype) -> Mixing:
    """Everyone, always."""
    return lambda k: torch.full((n, n), 1 / n, dtype=dtype)


def one_peer(n: int, dtype: torch.dtype) -> Mixing:
    """1, 2, 4, ... places ahead in turn."""
    hops = [2**i for i in range(n) if 2**i < n] or [0]
    return lambda k: shares(n, lambda i: {(i + hops[k % len(hops)]) % n} - {i}, dtype)


def cube(n: int, dtype: torch.dtype) -> Mixing:
    """Across one dimension of a cube in turn."""
    bits = [2**i for i in range(n) if 2**i < n] or [0]
    return lambda k: shares(n, lambda i: {i ^ bits[k % len(bits)]} - {i}, dtype)


def breathing(n: int, dtype: torch.dtype) -> Mixing:
    """A ring whose workers give each neighbour a fifth of themselves, and in every other step three tenths."""
    edges = sum(
        (torch.eye(n, dtype=dtype).roll(hop, 0) for hop in {1 % n, -1 % n} - {0}), torch.zeros(n, n, dtype=dtype)
    )

    def mixing(k: int) -> Tensor:
        given = (0.3 if k % 2 else 0.2) * edges
        return given + torch.diag(1 - given.sum(0))

    return mixing


def irregular(n: int, dtype: torch.dtype) -> Mixing:
    """The graph of `irregular_targets`."""
    return lambda k: shares(n, lambda i: irregular_targets(i, n, k), dtype)


def irregular_targets(i: int, n: int, k: int) -> set[int]:
    """A directed graph that changes from step to step, in which workers send to nobody, one or two others."""
    if k % 2 == 0:
        return ({(i + 1) % n} | ({(i + 2) % n} if i % 2 == 0 else set())) - {i}
    return ({i - 1} if i % 3 else set()) | ({0} if i == n - 1 else set()) - {i}
