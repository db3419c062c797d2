# SPDX-License-Identifier: Apache-2.0
"""Codecs and error feedback once more, straight from their equations: workers on the leading axis.

The plain second opinion that real runs are compared to; nothing in here knows thinwire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.oracles.common import Gradient
from tests.oracles.machines import Agree

Code = Callable[[Tensor], Tensor]
Update = Callable[[Tensor, Tensor, int], Tensor]  # what an optimizer adds, from parameters, gradients and the step
Agreed = Callable[[Tensor, int], Tensor]  # the agreed mean of all workers' rows, in the message of a step


def signs(block: int, norm: str = "l1") -> Code:
    """Each element plus or minus its block's scale; a block of zeros stays zero."""

    def scaled(piece: Tensor) -> Tensor:
        scale = piece.abs().mean() if norm == "l1" else piece.square().mean().sqrt()
        return torch.where(piece.signbit(), -scale, scale) if scale > 0 else torch.zeros_like(piece)

    return lambda x: torch.cat([scaled(piece) for piece in x.split(block)]) if len(x) else x.clone()


def largest(fraction: float) -> Code:
    """The largest elements as they are, zero elsewhere."""

    def code(x: Tensor) -> Tensor:
        kept = sorted(range(len(x)), key=lambda i: -abs(float(x[i])))[: -int(-fraction * len(x) // 1)]
        y = torch.zeros_like(x)
        y[kept] = x[kept]
        return y

    return code


def nearest(bits: int, block: int) -> Code:
    """Each element the nearest odd multiple of a step, and the multiple's size that then fits the block best."""
    steps = {1: 1.0, 2: 0.6240, 3: 0.3672, 4: 0.2101}

    def fitted(piece: Tensor) -> Tensor:
        half = steps[bits] * piece.abs().mean() if bits in steps else piece.abs().max() / 2**bits
        if half == 0:
            return torch.zeros_like(piece)
        odd = [i for i in range(-(2**bits), 2**bits) if i % 2]
        level = torch.tensor([min(odd, key=lambda i: abs(float(value / half) - i)) for value in piece]).to(piece)
        return level * (piece @ level) / (level @ level)

    return lambda x: torch.cat([fitted(piece) for piece in x.split(block)]) if len(x) else x.clone()


def largest_of_chunks(kept: int, size: int, bits: int) -> Code:
    """Of each chunk the largest elements, to the nearest level; of a shorter one as many in proportion."""

    def code(piece: Tensor) -> Tensor:
        k = -(-kept * len(piece) // size)
        places = sorted(sorted(range(len(piece)), key=lambda i: -abs(float(piece[i])))[:k])
        y = torch.zeros_like(piece)
        y[places] = nearest(bits, k)(piece[places])
        return y

    return lambda x: torch.cat([code(piece) for piece in x.split(size)])


class Decaying:
    """The mean of what all workers say, each of which keeps what it left unsaid, a little less each time.

    SparseLoCo, Algorithm 1: m = beta m + x, say C(m), m = m - C(m).
    """

    def __init__(self, code: Code, decay: float) -> None:
        self.code, self.decay = code, decay
        self.memory: Tensor | None = None

    def __call__(self, x: Tensor, k: int = 0) -> Tensor:
        """The agreed vector of n, from a row of n for each worker."""
        memory = x if self.memory is None else self.decay * self.memory + x
        said = torch.stack([self.code(row) for row in memory])
        self.memory = memory - said
        return said.mean(0)


def chunks(n: int, size: int, grain: int) -> list[int]:
    """What each of `size` ranks adds up: whole grains, as many for each, until there are no more."""
    length = grain * -(-n // (grain * size))
    return [max(0, min(length, n - rank * length)) for rank in range(size)]


class TwoStages:
    """Means of what workers say: each keeps what it left unsaid, and so does the rank that adds up a piece.

    Args:
        code: of a piece.
        grain: elements that are coded together.
        parts: elements of each part of the vector that is sent by itself.
    """

    def __init__(self, code: Code, grain: int, parts: Sequence[int]) -> None:
        self.code, self.grain, self.parts = code, grain, list(parts)
        self.residual: Tensor | None = None
        self.server_owed: Tensor | None = None

    def __call__(self, x: Tensor, k: int = 0) -> Tensor:
        """The agreed vector of n, from a row of n for each worker."""
        if self.server_owed is None:
            self.server_owed = torch.zeros_like(x[0])
        mean = self.to_servers(x) + self.server_owed
        agreed = self.coded(mean, len(x))
        self.server_owed = mean - agreed
        return agreed

    def coded(self, row: Tensor, workers: int) -> Tensor:
        """A vector as all decode it."""
        pieces = [n for part in self.parts for n in chunks(part, workers, self.grain)]
        return torch.cat([self.code(piece) for piece in row.split(pieces)])

    def to_servers(self, x: Tensor) -> Tensor:
        """The mean that the servers decode, in the first stage."""
        if self.residual is None:
            self.residual = torch.zeros_like(x)
        whole = x + self.residual
        said = torch.stack([self.coded(row, len(x)) for row in whole])
        self.residual = whole - said
        return said.mean(0)


def orthogonal(p: Tensor) -> Tensor:
    """Its columns, each made orthogonal to those before it and of length 1; twice, for what rounding leaves."""
    p = p.clone()
    for _ in range(2):
        for i in range(p.shape[1]):
            for j in range(i):
                p[:, i] -= (p[:, j] @ p[:, i]) * p[:, j]
            p[:, i] /= p[:, i].norm()
    return p


class LowRank:
    """PowerSGD, Algorithms 1 and 2: the workers' mean update, matrix by matrix, with each one's error kept.

    Args:
        rank: of the factors.
        shapes: of the tensors, end to end; those with one dimension are averaged as they are.
        first: the right factor that a matrix begins with, by its place.
    """

    def __init__(self, rank: int, shapes: Sequence[tuple[int, ...]], first: Callable[[int], Tensor]) -> None:
        self.rank, self.shapes, self.first = rank, list(shapes), first
        self.error: Tensor | None = None
        self.q: dict[int, Tensor] = {}

    def __call__(self, x: Tensor, k: int = 0) -> Tensor:
        """The agreed vector of n, from a row of n for each worker."""
        update = x if self.error is None else x + self.error
        agreed, error, place = torch.zeros_like(x[0]), torch.zeros_like(x), 0
        for shape in self.shapes:
            size = torch.Size(shape).numel()
            here = slice(place, place + size)
            if len(shape) < 2:
                agreed[here] = update[:, here].mean(0)
            else:
                m = update[:, here].reshape(len(x), shape[0], -1)
                q = self.q.get(place, self.first(place).to(x.dtype))
                p_hat = orthogonal(torch.stack([each @ q for each in m]).mean(0))
                self.q[place] = q = torch.stack([each.T @ p_hat for each in m]).mean(0)
                agreed[here] = (p_hat @ q.T).flatten()
                error[:, here] = update[:, here] - agreed[here]
            place += size
        self.error = error
        return agreed


def coded(mean: Agreed) -> Agree:
    """A mean that is agreed on as a difference to the common point."""
    return lambda rows, common, k: common + mean(rows - common, k)


class Known:
    """The mean of workers who keep places of their own, as everyone knows it: each says how far it has come.

    Args:
        mean: of coded rows; what it leaves out is said later.
    """

    def __init__(self, mean: Agreed) -> None:
        self.mean = mean
        self.sent: Tensor | None = None

    def __call__(self, rows: Tensor, common: Tensor, k: int) -> Tensor:
        """The mean of the rows; the first ones come from the common point."""
        if self.sent is None:
            self.sent, self.known = common.expand_as(rows), common
        self.known = self.known + self.mean(rows - self.sent, k)
        self.sent = rows
        return self.known


def served_overlap(
    gradient: Gradient,
    x: Tensor,
    update: Update,
    steps: int,
    stages: TwoStages,
    *,
    period: int,
    pull: float,
    momentum: float,
    delay: int | None = None,
) -> Tensor:
    """Overlap Local-SGD whose servers move the anchor, and compress the way to it from where workers believe it is."""
    mean, z, v, known, last = x.mean(0), x.mean(0), torch.zeros_like(x[0]), x.mean(0), x
    coming = known
    for k in range(1, steps + 1):
        x = x + update(x, gradient(x, k - 1), k - 1)
        if (k - (delay or period)) % period == 0:
            known = coming
            x = (1 - pull) * x + pull * known
        if k % period == 0:
            mean, last = mean + stages.to_servers(x - last), x
            v = momentum * v + mean - z
            z = z + v
            coming = known + stages.coded(z - known, len(x))
    return x
