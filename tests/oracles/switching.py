# SPDX-License-Identifier: Apache-2.0
"""Runs that change their method on the way: all workers in one tensor, the worker on the leading axis."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tests.oracles.common import Descent, Gradient


def in_turns(gradient: Gradient, x: Tensor, descend: Descent, turns: Sequence[tuple[int, int]]) -> Tensor:
    """Methods in turn; after each, all workers go on from their mean. Before a method with the mean
    of gradients momenta become their mean too.

    Args:
        gradient: of all workers at a step.
        x: a row for each worker.
        descend: every worker's own SGD.
        turns: (last step, period) of each method; a period of 0 takes the mean of the gradients at every step.
    """
    k = 0
    for last, period in turns:
        if not period and k:
            descend.average()
        while k < last:
            g = gradient(x, k)
            x = x + descend(x, g if period else g.mean(0).expand_as(g), k)
            k += 1
            if period and k % period == 0:
                x = x.mean(0).expand_as(x)
        x = x.mean(0).expand_as(x)
    return x
