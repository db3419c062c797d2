# SPDX-License-Identifier: Apache-2.0
"""LAMB, 1-bit LAMB and 1-bit Adam once more, straight from the papers: workers on the leading axis.

The plain second opinion that real runs are compared to; nothing in here knows thinwire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Gradient = Callable[[Tensor, int], Tensor]
Code = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Hyperparameters:
    """Everything that the update is told, by the symbols of the papers."""

    rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.0
    c_min: float = 0.01
    c_max: float = 10.0
    beta3: float = 0.9
    r_min: float = 0.5
    r_max: float = 4.0
    tau: float = 0.1
    corrected: bool = False


def signs(block: int, norm: str = "l1", *, parts: Sequence[int] = ()) -> Code:
    """C: each entry becomes plus or minus its block's scale, a block without anything becomes nothing.

    Args:
        block: entries of a block; the last of a part may have fewer.
        norm: the scale is the mean absolute value, "l1", or the root of the mean square, "l2".
        parts: entries of each part of the vector, within which blocks are counted; one part of all unless given.
    """

    def scaled(piece: Tensor) -> Tensor:
        scale = piece.abs().mean() if norm == "l1" else piece.square().mean().sqrt()
        scale = scale.float().to(piece.dtype)
        return torch.copysign(scale.expand_as(piece), piece) if scale > 0 else torch.zeros_like(piece)

    def code(x: Tensor) -> Tensor:
        pieces = x.split(list(parts)) if parts else (x,)
        return torch.cat([scaled(block_of) for piece in pieces for block_of in piece.split(block)])

    return code


@dataclass
class TwoStages:
    """The mean of what workers say in signs: each keeps what it left unsaid, and so does who adds up."""

    worker: Code
    server: Code
    residual: Tensor | None = None
    unsaid_by_servers: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The agreed vector of n, from one row of n for each worker."""
        if self.residual is None or self.unsaid_by_servers is None:
            self.residual, self.unsaid_by_servers = torch.zeros_like(x), torch.zeros_like(x[0])
        whole = x + self.residual
        said = torch.stack([self.worker(row) for row in whole])
        self.residual = whole - said
        mean = said.sum(0) / len(x) + self.unsaid_by_servers
        agreed = self.server(mean)
        self.unsaid_by_servers = mean - agreed
        return agreed


def lamb(gradient: Gradient, x: Tensor, sizes: Sequence[int], steps: int, hyperparameters: Hyperparameters) -> Tensor:
    """LAMB, Algorithm 2, on the mean of gradients."""
    m, v = torch.zeros_like(x[0]), torch.zeros_like(x[0])
    for t in range(1, steps + 1):
        g = gradient(x, t - 1).mean(0)
        m = hyperparameters.beta1 * m + (1 - hyperparameters.beta1) * g
        v = hyperparameters.beta2 * v + (1 - hyperparameters.beta2) * g * g
        first, second = (
            (1 - hyperparameters.beta1**t, 1 - hyperparameters.beta2**t) if hyperparameters.corrected else (1.0, 1.0)
        )
        u = (m / first) / ((v / second).sqrt() + hyperparameters.eps) + hyperparameters.decay * x[0]
        moved = [p - hyperparameters.rate * _ratio(p, w, hyperparameters) * w for p, w in _layers(sizes, x[0], u)]
        x = torch.cat(moved).expand_as(x)
    return x


def _ratio(p: Tensor, u: Tensor, hyperparameters: Hyperparameters) -> float:
    lengths = float(p.norm()), float(u.norm())
    return 1.0 if 0.0 in lengths else min(max(lengths[0] / lengths[1], hyperparameters.c_min), hyperparameters.c_max)


def _layers(sizes: Sequence[int], *vectors: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(vector.split(list(sizes)) for vector in vectors), strict=True))


@dataclass
class OneBit:
    """1-bit LAMB (or, with `adam`, 1-bit Adam), warm-up and compressed stage, on all workers' gradients.

    Attributes:
        path: the parameters after each step, equal on all workers.
        factors: r of every layer after each step of the second stage.
    """

    sizes: Sequence[int]
    hyperparameters: Hyperparameters
    warmup: int
    agree: TwoStages
    adam: bool = False
    rescale: bool = False
    max_norm: float | None = None
    path: list[Tensor] = field(default_factory=list[Tensor])
    factors: list[list[float]] = field(default_factory=list[list[float]])

    def run(self, gradient: Gradient, x: Tensor, steps: int) -> Tensor:
        """Train; returns the parameters after every step, (steps, n)."""
        k = self.hyperparameters
        p = x[0]
        m, v = torch.zeros_like(p), torch.zeros_like(p)
        c_mean, c_weight = [0.0] * len(self.sizes), [0.0] * len(self.sizes)
        frozen: dict[str, Any] = {}
        for t in range(steps):
            g = gradient(p.expand_as(x), t)
            if t < self.warmup:
                g = self._clipped(g.mean(0), g.mean(0).norm())
                m = k.beta1 * m + (1 - k.beta1) * g
                v = k.beta2 * v + (1 - k.beta2) * g * g
                u = m / (v.sqrt() + k.eps) + k.decay * p
                moved: list[Tensor] = []
                for i, (q, w) in enumerate(_layers(self.sizes, p, u)):
                    c = 1.0 if self.adam else _ratio(q, w, k)
                    if float(q.norm()) and float(w.norm()):
                        c_mean[i] = k.beta3 * c_mean[i] + (1 - k.beta3) * c
                        c_weight[i] = k.beta3 * c_weight[i] + (1 - k.beta3)
                    moved.append(q - k.rate * c * w)
                p = torch.cat(moved)
            else:
                if not frozen:
                    frozen = self._freeze(m, v, c_mean, c_weight)
                g = self._clipped(g, g.square().sum(1).mean().sqrt())
                m, p = self._second(g, m, p, frozen)
            self.path.append(p)
        return torch.stack(self.path)

    def _clipped(self, g: Tensor, norm: Tensor) -> Tensor:
        return g if self.max_norm is None or norm <= self.max_norm else g * (self.max_norm / norm)

    def _freeze(self, m: Tensor, v: Tensor, c_mean: list[float], c_weight: list[float]) -> dict[str, Any]:
        full = v[v > 0].mean()
        layers = [torch.where(w > 0, w, w[w > 0].mean() if (w > 0).any() else full) for w in v.split(list(self.sizes))]
        sizes = [float(w.norm()) / len(w) ** 0.5 for w in m.split(list(self.sizes))]
        mean = sum(sizes) / len(sizes)
        scale = [mean / size if size else 1.0 for size in sizes]
        spread = torch.cat([torch.full((n,), s, dtype=m.dtype) for n, s in zip(self.sizes, scale, strict=True)])
        return {
            "v": torch.cat(layers),
            "fresh": torch.cat(layers),
            "c": [c / w if w else 1.0 for c, w in zip(c_mean, c_weight, strict=True)],
            "r": [1.0] * len(self.sizes),
            "scale": spread if self.rescale else torch.ones_like(m),
        }

    def _second(self, g: Tensor, m: Tensor, p: Tensor, frozen: dict[str, Any]) -> tuple[Tensor, Tensor]:
        k = self.hyperparameters
        local = k.beta1 * m + (1 - k.beta1) * g
        after = self.agree(local * frozen["scale"]) / frozen["scale"]
        innovation = (after - k.beta1 * m) / (1 - k.beta1)
        frozen["fresh"] = k.beta2 * frozen["fresh"] + (1 - k.beta2) * innovation.square()
        moved: list[Tensor] = []
        for i, (q, n, v, w) in enumerate(_layers(self.sizes, p, after, frozen["v"], frozen["fresh"])):
            plain = n / (v.sqrt() + k.eps)
            u = plain + k.decay * q
            if self.adam:
                moved.append(q - k.rate * u)
                continue
            r = float(((v.sqrt() + k.eps) / (w.sqrt() + k.eps)).max())
            if k.decay:
                share = min(1.0, float(plain.norm() / u.norm()))
                r = r * share + 1 - share
            r = min(max(r, k.r_min), k.r_max)
            r = min(max(r, (1 - k.tau) * frozen["r"][i]), (1 + k.tau) * frozen["r"][i])
            frozen["r"][i] = r
            moved.append(q - k.rate * r * frozen["c"][i] * u)
        self.factors.append(list(frozen["r"]))
        return after, torch.cat(moved)


@dataclass
class ZeroOne:
    """0/1 Adam, Algorithm 1: momenta alone, the sum u of what they moved, and two sets of steps.

    Attributes:
        averages: the steps whose gradients are averaged, for the variance and the momentum alike.
        agrees: the steps after which all hold the same.
        path: the parameters of all workers after each step.
    """

    sizes: Sequence[int]
    hyperparameters: Hyperparameters
    averages: frozenset[int]
    agrees: frozenset[int]
    agree: TwoStages
    rates: Sequence[float]
    path: list[Tensor] = field(default_factory=list[Tensor])

    def run(self, gradient: Gradient, x: Tensor) -> Tensor:
        """Train for as many steps as there are rates; the parameters after every step, (steps, workers, n)."""
        k, x = self.hyperparameters, x.clone()
        m, u, v = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x[0])
        anchor, far = x.clone(), 0.0
        for t, rate in enumerate(self.rates):
            g = gradient(x, t)
            if t in self.averages:
                g = g.mean(0).expand_as(g)
                v = k.beta2 * v + (1 - k.beta2) * g[0] ** 2
            else:
                v = torch.cat([torch.where(w > 0, w, w[w > 0].mean()) for w in v.split(list(self.sizes))])
            spread = v.sqrt() + k.eps
            m = k.beta1 * m + (1 - k.beta1) * g
            shrunk = 1 - rate * k.decay
            if t in self.averages:
                x = shrunk * x - rate * m / spread
                anchor = x
            else:
                u, far = u + rate * m, far + rate
                anchor = shrunk * anchor
                x = shrunk * x - rate * m / spread
                if t in self.agrees:
                    said = self.agree(u / far)
                    m = said.expand_as(m)
                    x = (anchor[0] - far * said / spread).expand_as(x)
                    anchor, u, far = x, torch.zeros_like(u), 0.0
            self.path.append(x)
        return torch.stack(self.path)
