# SPDX-License-Identifier: Apache-2.0
"""The exact average in a few steps for any number of workers, with few peers at each step."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Annotated

from thinwire.core.validation import Range
from thinwire.methods.topology.base import Peers, Topology
from thinwire.registry import registered

Ranks = Sequence[int]
Edges = dict[tuple[int, int], float]  # the weights of one step, with each edge once


@registered
class BaseGraph(Topology):
    r"""The base-(k+1) graph: exact after at most $2 \log_{k+1}(n) + 2$ steps, for any number of workers.

    If no prime factor of n is larger than k+1, groups of at most k+1 workers average, one factor of n at a step.
    Otherwise n is written in base k+1, as $\sum_l a_l (k+1)^{p_l}$: part $l$ of the workers consists of $a_l$ blocks of
    $(k+1)^{p_l}$. Each part first averages within itself. Then, part after part, the workers of all later parts
    exchange with one worker in each of its $a_l$ blocks, with the weight
    $(k+1)^{p_l} / \sum_{m \ge l} a_m (k+1)^{p_m}$, which moves the mean of every block to the mean of all; last, blocks
    average within themselves. With $n = p q$ and $p$ the factor of n without larger prime factors, this is done for q
    workers p times at once, unless that takes more steps.

    Symmetric at every step; at most k vectors sent per worker and step, and none at some.

    Takezawa et al., Beyond Exponential Graph, NeurIPS 2023, arXiv:2305.11420, Algorithms 1 to 3.

    Args:
        degree: k, the most peers of a worker at a step, at least 1; more agree in fewer steps.

    Example:
        The exact average of six workers in four steps, with one peer at a time:

        >>> graph = BaseGraph()
        >>> graph.period(6)
        4
        >>> [graph.peers(rank=0, size=6, step=step).dst for step in range(4)]
        [(1,), (2,), (1,), (3,)]
    """

    degree: Annotated[int, Range("1..", "1 sends least")] = 1

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """Return this step's partners, with the weights of their edges."""
        rounds = _rounds(size, self.degree)
        return rounds[step % len(rounds)][rank]

    def period(self, size: int) -> int:
        """Return the number of steps to the exact average."""
        return len(_rounds(size, self.degree))


@lru_cache(maxsize=64)
def _rounds(size: int, degree: int) -> tuple[tuple[Peers, ...], ...]:
    """Return every rank's peers at every step of a period."""
    rounds: list[tuple[Peers, ...]] = []
    for edges in _base(range(size), degree + 1) or [{}]:
        near: list[dict[int, float]] = [{} for _ in range(size)]
        for (one, other), weight in edges.items():
            near[one][other] = near[other][one] = weight
        rounds.append(
            tuple(Peers(tuple(each), tuple(each), 1.0 - sum(each.values()), tuple(each.values())) for each in near)
        )
    return tuple(rounds)


def _base(ranks: Ranks, base: int) -> list[Edges]:
    """Run Algorithm 3: the simple graph on parts whose size has only large prime factors, then across the parts."""
    divisors = (divisor for divisor in range(1, len(ranks) + 1) if len(ranks) % divisor == 0)
    smooth = max(divisor for divisor in divisors if _factors(divisor, base) is not None)
    rough = len(ranks) // smooth
    parts = [ranks[start : start + rough] for start in range(0, len(ranks), rough)]
    across = [[part[place] for part in parts] for place in range(rough)]
    split = [
        *_side_by_side(_simple(part, base) for part in parts),
        *_side_by_side(_cube(each, base) for each in across),
    ]
    # Splitting takes fewer steps for most sizes, but not for all.
    return min(_simple(ranks, base), split, key=len)


def _simple(ranks: Ranks, base: int) -> list[Edges]:
    """Run Algorithm 2: average within parts, exchange between each part and all later ones, average within blocks."""
    if _factors(len(ranks), base) is not None:
        return _cube(ranks, base)
    parts = _parts(ranks, base)
    rounds = _side_by_side(_cube(_joined(part), base) for part in parts)
    later_steps: list[list[Edges]] = []
    for place, part in enumerate(parts[:-1]):
        later = _joined(_joined(each) for each in parts[place + 1 :])
        weight = len(part[0]) / (len(_joined(part)) + len(later))
        exchange = {(rank, block[i]): weight for i, rank in enumerate(later) for block in part}
        # Parts exchange one after another, so that a worker has at most k peers at a step; this makes some steps empty.
        later_steps.append([*([{}] * place), exchange, *_side_by_side(_cube(block, base) for block in part)])
    return rounds + _side_by_side(later_steps)


def _cube(ranks: Ranks, base: int) -> list[Edges]:
    """Run Algorithm 1, the hyper-hypercube: at each step groups of one factor of the size average."""
    rounds: list[Edges] = []
    stride = 1
    for factor in _factors(len(ranks), base) or ():
        starts = [start for start in range(len(ranks)) if start // stride % factor == 0]
        groups = [[ranks[start + i * stride] for i in range(factor)] for start in starts]
        rounds.append({pair: 1.0 / factor for group in groups for pair in combinations(group, 2)})
        stride *= factor
    return rounds


def _side_by_side(graphs: Iterable[list[Edges]]) -> list[Edges]:
    """Merge graphs of different workers, step by step."""
    rounds: list[Edges] = []
    for graph in graphs:
        rounds += [{} for _ in range(len(graph) - len(rounds))]
        for edges, more in zip(rounds, graph, strict=False):
            edges.update(more)
    return rounds


def _parts(ranks: Ranks, base: int) -> list[list[Ranks]]:
    """Cut ranks into blocks whose sizes are powers of the base, by the digits of their number, largest first."""
    power = max(base**i for i in range(len(ranks).bit_length()) if base**i <= len(ranks))
    parts: list[list[Ranks]] = []
    while ranks:
        count = len(ranks) // power
        if count:
            parts.append([ranks[i * power : (i + 1) * power] for i in range(count)])
        ranks, power = ranks[count * power :], power // base
    return parts


def _joined(blocks: Iterable[Ranks]) -> list[int]:
    return [rank for block in blocks for rank in block]


@lru_cache(maxsize=4096)
def _factors(size: int, largest: int) -> tuple[int, ...] | None:
    """Return the fewest factors of `size` that are at most `largest`, descending; None if there are none."""
    if size == 1:
        return ()
    found: list[tuple[int, ...]] = []
    for factor in range(min(size, largest), 1, -1):
        rest = _factors(size // factor, factor) if size % factor == 0 else None
        if rest is not None:
            found.append((factor, *rest))
    return min(found, key=len, default=None)
