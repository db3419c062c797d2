"""How many models fit: doubling, then bisection."""

from __future__ import annotations

from collections.abc import Callable


def largest(fits: Callable[[int], bool], most: int) -> int:
    r"""The largest number up to `most` that fits, 0 where not even one does.

    Asks by doubling from 1, then by bisection: at most $2\log_2$ of the answer questions.

    Args:
        fits: whether so many do; where some number does, all smaller ones do.
        most: beyond which nobody asks.
    """
    if most < 1 or not fits(1):
        return 0
    low = 1
    while low < most and fits(min(2 * low, most)):
        low = min(2 * low, most)
    high = min(2 * low, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
