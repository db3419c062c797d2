# SPDX-License-Identifier: Apache-2.0
"""A network in words: what differs from its usual link."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from thinwire.planning.units import digits, rate, seconds

if TYPE_CHECKING:
    from thinwire.planning.simulate import Network, Special

_MOST_NAMED = 8


def rates_differ(network: Network) -> bool:
    """Return True if one rate does not say how fast all links are."""
    limits = [each.bits_per_second for each in network.specials if each.bits_per_second is not None]
    limits += [each.bits_per_second for each in network.pairs if each.bits_per_second < network.bits_per_second]
    uplinks = network.racks is not None and network.racks.bits_per_second < inf
    return uplinks or any(limit != network.bits_per_second for limit in limits)


def differences(network: Network) -> str:
    """The workers, racks and links that differ from the usual link, such as `rank 3: 5 Mbit/s`; "" where none do."""
    found = [*_workers(network), *_pairs(network)]
    more = [f"and {len(found) - _MOST_NAMED} more"] * (len(found) > _MOST_NAMED)
    return "; ".join([*_racks(network), *found[:_MOST_NAMED], *more])


def _workers(network: Network) -> Iterator[str]:
    alike: dict[Special, list[int]] = {}
    for each in network.specials:
        alike.setdefault(replace(each, ranks=()), []).extend(each.ranks)
    for each, ranks in alike.items():
        limit = each.bits_per_second
        facts = [rate(limit)] if limit is not None and limit != network.bits_per_second else []
        facts += [f"{seconds(each.latency)} more one way"] if each.latency else []
        facts += [f"computes {digits(each.slowdown)} times as long"] if each.slowdown != 1 else []
        if facts:
            yield f"rank{'s' * (len(ranks) > 1)} {_named(ranks)}: {', '.join(facts)}"


def _pairs(network: Network) -> Iterator[str]:
    for each in network.pairs:
        facts = [rate(each.bits_per_second)] if each.bits_per_second < network.bits_per_second else []
        facts += [] if each.latency in (None, network.latency) else [f"{seconds(each.latency)} one way"]
        if facts:
            yield f"between ranks {each.between[0]} and {each.between[1]}: {', '.join(facts)}"


def _racks(network: Network) -> Iterator[str]:
    racks = network.racks
    if racks is not None:
        uplink = "" if racks.bits_per_second == inf else f", whose uplinks have {rate(racks.bits_per_second)}"
        later = f", {seconds(racks.latency)} more between them" if racks.latency else ""
        yield f"racks of {racks.size}{uplink}{later}"


def _named(ranks: Iterable[int]) -> str:
    """Ranks as in a network file: 0-15, 20."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
