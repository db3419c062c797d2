# SPDX-License-Identifier: Apache-2.0
"""Golden-section search in the logarithm of a rate. The next try is a pure function of the earlier ones.

Every racer starts from the same three rates and has the same number of tries. If the best one is at an edge, the grid
grows there, beyond that number if need be, so that the chosen rate always lies between two worse ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

GOLDEN = (1 + 5**0.5) / 2
RATIO = GOLDEN**2  # between neighbors at the start
TRIES, MOST_TRIES = 7, 16
OUTER_RATIO, OUTER_TRIES = GOLDEN, 5


def first_rates(start: float, ratio: float = RATIO) -> tuple[float, ...]:
    """The rates that everyone tries first."""
    return tuple(rounded(start * ratio**power) for power in (-1, 0, 1))


def rounded(rate: float) -> float:
    """To four digits, so that a rate in a file is the one that was tried."""
    return float(f"{rate:.4g}")


def best_rate(losses: Mapping[float, float]) -> float:
    """The rate with the lowest loss. A loss that is not finite is the worst; equal ones: the lowest rate."""
    return min(sorted(losses), key=lambda rate: _value(losses[rate]))


def at_edge(losses: Mapping[float, float]) -> bool:
    """Whether the best rate has no worse one on both sides."""
    return best_rate(losses) in (min(losses), max(losses))


def next_rate(
    losses: Mapping[float, float], start: float, *, ratio: float = RATIO, tries: int = TRIES, most: int = MOST_TRIES
) -> float | None:
    """The rate to try next, or None when the search has ended.

    Args:
        losses: of the rates that were tried.
        start: the rate in the middle of the first three.
        ratio: between neighbors at the start, and where the grid grows.
        tries: number of tries, unless the best rate is then at an edge.
        most: number of tries after which the search ends in any case; `at_edge` is then still true.
    """
    for rate in first_rates(start, ratio):
        if rate not in losses:
            return rate
    tried, best = sorted(losses), best_rate(losses)
    if at_edge(losses):
        if len(losses) >= most:
            return None
        return rounded(best / ratio if best == tried[0] else best * ratio)
    if len(losses) >= tries:
        return None
    place = tried.index(best)
    below, above = math.log(best / tried[place - 1]), math.log(tried[place + 1] / best)
    # The point of golden section in the wider of the two intervals, nearer to the best rate.
    step = max(below, above) / RATIO
    rate = rounded(best * math.exp(step if above >= below else -step))
    return None if rate in losses else rate


def _value(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf
