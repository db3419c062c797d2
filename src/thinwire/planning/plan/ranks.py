# SPDX-License-Identifier: Apache-2.0
"""Which worker sends most, and what workers send on average: dry runs of as few ranks as differ.

Most recipes let all ranks send alike. Not all do: a compressed mean cuts a vector into whole blocks of its codec, so
that the last rank's piece may be shorter, and it sends the others; a graph may be irregular; a rank may be a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isclose, lcm

from thinwire.methods.strategies.base import Strategy
from thinwire.planning.plan.traffic import DryRun, StepTraffic, sizes_of_nodes, topologies

_MOST_KINDS = 16
"""Kinds of ranks that are looked at; in a graph with more, only the busiest by the graph is."""


@dataclass(frozen=True)
class Look:
    """The dry run of one rank.

    Attributes:
        rank: it.
        run: with the state of its worker.
        steps: a period of its traffic.
    """

    rank: int
    run: DryRun
    steps: tuple[StepTraffic, ...]

    @property
    def sent(self) -> float:
        """Bytes a step, mean."""
        return sum(step.sent for step in self.steps) / len(self.steps)

    @property
    def received(self) -> float:
        """Bytes a step, mean."""
        return sum(step.received for step in self.steps) / len(self.steps)

    @property
    def load(self) -> tuple[float, float]:
        """Return what the busiest has most of: sent or received, where a collective counts by what is sent in it.

        In a mean of uneven pieces, the rank that sends most is not the one that receives most; runs report sent bytes.
        """
        received = sum(step.received_from_named for step in self.steps) / len(self.steps)
        collectives = sum(sum(step.collectives) for step in self.steps) / len(self.steps)
        return max(self.sent, collectives + received), self.sent

    def like(self, other: Look) -> bool:
        """Return True if both ranks carry the same; the periods of the two may be of different lengths."""
        pairs = (self.sent, other.sent), (self.received, other.received)
        return all(isclose(a, b, rel_tol=1e-12) for a, b in pairs)


@dataclass(frozen=True)
class Looks:
    """The dry runs of all kinds of ranks.

    Attributes:
        looks: one at least of each kind.
        mean_sent: bytes a step, over all workers; None if there are too many kinds.
    """

    looks: tuple[Look, ...]
    mean_sent: float | None

    @property
    def busiest(self) -> Look:
        """The rank that sends or receives most; the first of several."""
        return max(self.looks, key=lambda look: (*(round(each, 6) for each in look.load), -look.rank))


def look_at_ranks(dry: Callable[[int], DryRun], strategy: Strategy, workers: int) -> Looks:
    """Run as many ranks as differ.

    Args:
        dry: makes the run of a rank.
        strategy: the recipe.
        workers: number of workers.
    """
    kinds = _kinds(strategy, workers)
    if len(kinds) > _MOST_KINDS:
        rank = _busiest_of_graphs(strategy, workers)
        run = dry(rank)
        return Looks((Look(rank, run, run.period()),), None)
    period = 0

    def look(rank: int) -> Look:
        nonlocal period
        run = dry(rank)
        # To find a period takes many steps; that of the first rank helps the others.
        steps = run.period_like(period) if period else run.period()
        period = period or (len(steps) if run.repeats else 0)
        return Look(rank, run, steps)

    spans = [span for ranks in kinds for span in _alike(look, ranks)]
    looks = tuple(look for look, _ in spans)
    if all(look.like(looks[0]) for look in looks):
        return Looks(looks, max(look.sent for look in looks))
    return Looks(looks, sum(look.sent * count for look, count in spans) / workers)


def _kinds(strategy: Strategy, workers: int) -> list[Sequence[int]]:
    """Ranks with as many neighbours at every step, and with the same place in their node."""
    node = lcm(*(size for size in sizes_of_nodes(strategy) if workers % size == 0))
    graphs = list(topologies(strategy))
    if not graphs:
        return [range(place, workers, node) for place in range(min(node, workers))]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(workers):
        peers = [t.peers(rank, workers, step) for t in graphs for step in range(t.period(workers))]
        kind = (rank % node, *(len(ranks) for each in peers for ranks in (each.dst, each.src)))
        found.setdefault(kind, []).append(rank)
    return list(found.values())


def _alike(look: Callable[[int], Look], ranks: Sequence[int]) -> Iterator[tuple[Look, int]]:
    """Runs of ranks, and how many ranks are like each.

    Pieces become shorter from rank to rank, so that ranks between two that are alike are like them.
    """
    first = look(ranks[0])
    if len(ranks) == 1:
        yield first, 1
        return
    last = look(ranks[-1])
    yield first, 1
    between = [(first, last, ranks[1:-1])]
    while between:
        low, high, inner = between.pop()
        if not len(inner):
            continue
        if low.like(high):
            yield low, len(inner)
            continue
        place = len(inner) // 2
        middle = look(inner[place])
        yield middle, 1
        between += [(low, middle, inner[:place]), (middle, high, inner[place + 1 :])]
    yield last, 1


def _busiest_of_graphs(strategy: Strategy, workers: int) -> int:
    """Return the rank that has most neighbours in a recipe's topologies."""
    loads = [0] * workers
    for topology in topologies(strategy):
        for rank in range(workers):
            peers = [topology.peers(rank, workers, step) for step in range(topology.period(workers))]
            loads[rank] += max(sum(len(each.dst) for each in peers), sum(len(each.src) for each in peers))
    return loads.index(max(loads))
