# SPDX-License-Identifier: Apache-2.0
"""DiLoCo and Streaming DiLoCo, straight from their papers: all workers in one tensor, a worker in each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tests.oracles.codecs import Agreed, Update
from tests.oracles.common import Gradient

Rule = Callable[[Tensor, Tensor], Tensor]


def descent(lr: float, momentum: float = 0.0, *, nesterov: bool = False) -> Callable[[], Rule]:
    """Makes SGD as an outer optimizer: from the common point and the outer gradient to the next point."""

    def begin() -> Rule:
        velocity: Tensor | float = 0.0

        def step(point: Tensor, gradient: Tensor) -> Tensor:
            nonlocal velocity
            velocity = momentum * velocity + gradient
            return point - lr * (gradient + momentum * velocity if nesterov else velocity)

        return step

    return begin


class Fragment:
    """What workers know of one fragment.

    Args:
        x: where they begin, a row for each.
        outer: its outer optimizer.
        mean: agrees on a mean of rows in code; None if they are sent as they are.
        tracks: each says how far it has come since it last spoke.
    """

    def __init__(
        self, x: Tensor, outer: Rule, mean: Agreed | None, *, tracks: bool, carry: str = "off", outliers: str = "keep"
    ) -> None:
        self.carry, self.outliers, self.launched = carry, outliers, x
        self.usual: list[float] = []
        self.point, self.outer, self.mean, self.tracks = x.mean(0), outer, mean, tracks
        self.said, self.known = x, x.mean(0)
        self.seen = torch.zeros(len(x), dtype=x.dtype)
        self.gradient: Tensor | None = None

    def guarded(self, x: Tensor) -> Tensor:
        """A factor for each worker, whose sum is the number of workers unless lengths are clipped."""
        lengths = (x - self.point).norm(dim=1)
        self.usual = [*self.usual[-7:], sorted(lengths.tolist())[(len(x) - 1) // 2]]
        limit = 4 * max(self.usual[-1], sorted(self.usual)[(len(self.usual) - 1) // 2])
        factors = torch.tensor([min(1.0, limit / float(length)) for length in lengths], dtype=x.dtype)
        if self.outliers == "leave-out":
            factors = (factors == 1).to(x.dtype)
        weights = factors * self.seen
        return len(x) * weights / (self.seen.sum() if self.outliers == "clip" else weights.sum())

    def send(self, x: Tensor, k: int) -> None:
        self.launched = x
        share = (self.seen / self.seen.mean() if self.outliers == "keep" else self.guarded(x))[:, None]
        self.seen = torch.zeros_like(self.seen)
        if self.mean is None:
            self.gradient = (share * (self.point - x)).mean(0)
        elif self.tracks:
            self.known = self.known + self.mean(share * (x - self.said), k)
            self.said = x
            self.gradient = self.point - self.known
        else:
            self.gradient = -self.mean(share * (x - self.point), k)

    def end_round(self, x: Tensor, mixing: float) -> Tensor:
        if self.gradient is None:
            return x
        before, self.point = self.point, self.outer(self.point, self.gradient)
        if self.carry != "off":
            late = x - self.launched
            step = (self.point - before).expand_as(late)
            cosines = (late * step).sum(1) / (late.norm(dim=1) * step.norm(dim=1)).clamp(min=1e-300)
            return self.point + (late if self.carry == "full" else cosines.clamp(min=0)[:, None] * late)
        self.said, self.known = (mixing * each + (1 - mixing) * self.point for each in (self.said, self.known))
        return mixing * x + (1 - mixing) * self.point


def streaming_diloco(
    gradient: Gradient,
    x: Tensor,
    update: Update,
    steps: int,
    *,
    period: int,
    outer: Callable[[], Rule],
    edges: Sequence[int] = (),
    delay: int = 0,
    mixing: float = 0.0,
    mean: Callable[[], Agreed] | None = None,
    feedback: bool = False,
    samples: Sequence[Tensor] = (),
    carry: str = "off",
    outliers: str = "keep",
) -> Tensor:
    """Streaming DiLoCo, Algorithm 2; with one fragment and no delay DiLoCo, Algorithm 1.

    Args:
        edges: where fragments begin and end in the vector; one fragment unless given.
        delay: steps from sending a fragment to its outer step.
        mixing: weight of the worker's own parameters.
        mean: agrees on means in code.
        feedback: whether what a code leaves out is said later.
        samples: for each step, what every worker has used; all alike unless given.
        carry: what becomes of the steps of the delay.
        outliers: what becomes of a worker that has moved four times as far as usual.
    """
    parts = [slice(a, b) for a, b in pairwise(edges or (0, x.shape[1]))]
    tracks = feedback and mixing > 0
    options = {"tracks": tracks, "carry": carry, "outliers": outliers}
    fragments = [Fragment(x[:, part], outer(), mean() if mean else None, **options) for part in parts]
    for k in range(1, steps + 1):
        moved = update(x, gradient(x, k - 1), k - 1)
        used = samples[k - 1] if samples else torch.ones(len(x), dtype=x.dtype)
        x = x + (used > 0)[:, None] * moved
        for f, (part, fragment) in enumerate(zip(parts, fragments, strict=True)):
            fragment.seen = fragment.seen + used
            left = ((f + 1) * period // len(parts) - k) % period
            if left == delay:
                fragment.send(x[:, part], k)
            if left == 0:
                x = x.index_copy(1, torch.arange(x.shape[1])[part], fragment.end_round(x[:, part], mixing))
    return x
