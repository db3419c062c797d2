"""Budgets of classes, and their picks in one order."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from thinwire.errors import ConfigError


def shares(sizes: Sequence[int], budget: int) -> list[int]:
    """A budget shared out to classes in proportion to their sizes, by largest remainders.

    The shares sum to the budget; each is at least 1 and at most the class's size. Worked out in whole numbers.

    Args:
        sizes: points of each class, at least 1.
        budget: in all.

    Raises:
        ConfigError: fewer than one for each class, or more than there are points.
    """
    n = sum(sizes)
    if not len(sizes) <= budget <= n:
        raise ConfigError(
            f"budget={budget}: {len(sizes)} classes of {n} points need at least 1 point each and have no more; "
            f"take {len(sizes)} to {n}, or select without labels"
        )
    given = [max(1, size * budget // n) for size in sizes]
    while (over := sum(given) - budget) != 0:
        residual = [(size * budget - n * share, -i) for i, (size, share) in enumerate(zip(sizes, given, strict=True))]
        if over < 0:
            chosen = max(debt for debt, size, share in zip(residual, sizes, given, strict=True) if share < size)
        else:
            chosen = min(debt for debt, share in zip(residual, given, strict=True) if share > 1)
        given[-chosen[1]] += 1 if over < 0 else -1
    return given


def interleaved(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(class, place within it) so that every beginning holds the classes in about the ratio of these sizes."""
    lanes = [[((2 * place + 1) / (2 * size), i, place) for place in range(size)] for i, size in enumerate(sizes)]
    return [(i, place) for _, i, place in heapq.merge(*lanes)]
