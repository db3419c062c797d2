# SPDX-License-Identifier: Apache-2.0
"""Cut a vector into pieces for the ranks."""

from collections.abc import Sequence
from itertools import pairwise


def pieces(n: int, size: int, alignment: int) -> list[slice]:
    """Cut a vector of n elements into `size` pieces, end to end at multiples of `alignment`; the last are shorter."""
    length = -(-n // (size * alignment)) * alignment
    return [slice(min(rank * length, n), min((rank + 1) * length, n)) for rank in range(size)]


def pieces_at(edges: Sequence[int], size: int) -> list[slice]:
    """Cut a vector into `size` pieces, end to end and nearly even, at some of the edges; the last of them is its end.

    Example:
        >>> pieces_at([6, 7, 12], size=2), pieces_at([12], size=2)
        ([slice(0, 6, None), slice(6, 12, None)], [slice(0, 0, None), slice(0, 12, None)])
    """
    n = edges[-1]
    cuts = [min([0, *edges], key=lambda edge: abs(edge * size - rank * n)) for rank in range(size + 1)]
    return [slice(start, stop) for start, stop in pairwise(cuts)]
