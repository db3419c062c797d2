# SPDX-License-Identifier: Apache-2.0
"""Even or odd: 25 machines, each of which separates one even digit from one odd digit, by logistic regression.

All machines have the same labels, only their pictures differ, so that the mean of their losses is one function whatever
share of pictures they draw from the pool of all: heterogeneity changes, the optimum does not.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from thinwire.lab.tasks import load
from thinwire.lab.tasks.data.examples import ExampleSet
from thinwire.methods.strategies.wrappers.heterogeneity import NAMES

MACHINES = 25
_PIECES = 16


@dataclass(frozen=True, eq=False)
class EvenOdd:
    """Pictures in principal components, as many of each digit.

    Args:
        title: where they come from.
        features: float64, [10 * each, width]; digit after digit, of mean square norm one.
        each: pictures of a digit.
    """

    title: str
    features: Tensor
    each: int

    @cached_property
    def even(self) -> Tensor:
        """1 for pictures of even digits, 0 for others: [10 * each]."""
        return (torch.arange(len(self.features)) // self.each % 2 == 0).double()

    def losses(self, points: Tensor) -> Tensor:
        """The mean loss over all pictures at each point: [points, width] to [points]."""
        logits = self.features @ points.T
        return softplus(logits).mean(0) - (self.even @ logits) / len(self.features)

    @cached_property
    def optimum(self) -> Tensor:
        """Where the mean loss is least, by Newton's method: [width]."""
        point = self.features.new_zeros(self.features.shape[1])
        for _ in range(100):
            chances = torch.sigmoid(self.features @ point)
            gradient = self.features.T @ (chances - self.even) / len(self.features)
            if float(gradient.norm()) < 1e-14:
                break
            weights = (chances * (1 - chances) / len(self.features))[:, None]
            step = torch.linalg.solve(self.features.T @ (weights * self.features), gradient)
            if float(gradient @ step) < 1e-30:
                break
            point = point - step
        return point

    def gaps(self, points: Tensor) -> Tensor:
        """How far the loss is above its least: [points, width] to [points]."""
        return self.losses(points) - self.losses(self.optimum[None])

    def figures(self, own: float, point: Tensor) -> dict[str, float]:
        """What a probe of exact gradients would find: dissimilarity of the machines, noise of a picture, gradient.

        Args:
            own: the share that a machine draws of its own two digits.
            point: where, [width].
        """
        off = (torch.sigmoid(self.features @ point) - self.even)[:, None] * self.features
        digits = off.view(10, self.each, -1).mean(1)
        pairs = (digits[0::2, None] + digits[None, 1::2]).flatten(0, 1) / 2
        apart = float((own * (pairs - pairs.mean(0))).square().sum(1).mean())
        common = float(pairs.mean(0).square().sum())
        noise = float(off.square().sum(1).mean()) - apart - common
        return dict(zip(NAMES, (apart, noise, common), strict=True))

    def draws(self, own: float, steps: int, seed: int) -> Tensor:
        """Which picture each machine sees at each step: int64, [steps, MACHINES].

        Args:
            own: the share that a machine draws of its own two digits; the rest comes from all pictures.
            steps: how many.
            seed: of the draws; shares do not change which random numbers are used.
        """
        draw = torch.Generator().manual_seed(seed)
        shape = (steps, MACHINES)
        machine = torch.arange(MACHINES)
        odd = torch.randint(2, shape, generator=draw)
        digit = torch.where(odd == 1, 2 * (machine % 5) + 1, 2 * (machine // 5))
        mine = digit * self.each + torch.randint(self.each, shape, generator=draw)
        anyone = torch.randint(len(self.features), shape, generator=draw)
        return torch.where(torch.rand(shape, generator=draw) < own, mine, anyone)


def even_odd(width: int = 100) -> EvenOdd:
    """MNIST where its files are named by THINWIRE_DATA, else scikit-learn's digits; in at most `width` components."""
    task = load("mnist" if os.environ.get("THINWIRE_DATA") else "digits")
    data = task.data
    assert isinstance(data, ExampleSet)
    pieces = [data.train.take(rows) for rows in np.array_split(np.arange(len(data.train)), _PIECES)]
    pictures = torch.cat([piece[0].flatten(1) for piece in pieces]).double()
    classes = torch.cat([piece[1] for piece in pieces])
    each = int(classes.bincount().min())
    rows = torch.cat([(classes == digit).nonzero()[:each, 0] for digit in range(10)])
    return EvenOdd(task.title, _components(pictures[rows], width), each)


def _components(pictures: Tensor, width: int) -> Tensor:
    centred = pictures - pictures.mean(0)
    spectrum, directions = torch.linalg.eigh(centred.T @ centred / len(centred))
    kept = directions[:, spectrum > 1e-6 * spectrum[-1]][:, -width:]
    features = centred @ kept
    return features / features.square().sum(1).mean().sqrt()
