# SPDX-License-Identifier: Apache-2.0
"""Predicted costs of some strategies on the measured links: each is simulated with its own code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median

import torch

from thinwire.errors import ConfigError
from thinwire.planning.doctor.findings import Examination, rates_of
from thinwire.planning.plan.networks import contended, fitted
from thinwire.planning.plan.search import Planner
from thinwire.planning.simulate import Network, Pair, Special
from thinwire.planning.simulate.wires import PAYLOAD_SHARE

RECIPES = (
    "AllReduce()",
    "AllReduce(codec=Bf16())",
    "PushSum(staleness=1)",
    "LocalSGD(period=8)",
    "OverlapLocalSGD(period=8)",
    "LocalSGD(period=8, codec=Quantize(4))",
    "DiLoCo(period=32)",
)
"""From those that change training least to those that send least."""

MOST_WORKERS = 32
_SLOW, _FAR = 0.8, 1.5


@dataclass(frozen=True)
class Cost:
    """The predicted cost of a recipe.

    Attributes:
        recipe: as text.
        seconds: of a training step.
        efficiency: the workers' speed divided by that of as many that do not communicate.
        speed: divided by that of one worker alone.
        payload_bytes: that a worker sends in a step, on average.
    """

    recipe: str
    seconds: float
    efficiency: float
    speed: float
    payload_bytes: float


def network_of(seen: Examination) -> Network:
    """Return the measured links as a network: the usual rate and latency, and the ranks and pairs that differ.

    Where rates are alike, rate and latency are those at which all-reduces take as long as they were measured to take.
    A slow rank's pairs have their own latencies where they are far. What a step loses to messages is measured too.

    Raises:
        ConfigError: no link was measured.
    """
    good = [pair for pair in seen.pairs if not pair.problem]
    if not good:
        raise ConfigError(f"no link of {seen.size} ranks was measured. See the findings for the reason")
    fast, best = rates_of(good)
    specials = tuple(Special((rank,), rate / PAYLOAD_SHARE) for rank, rate in best.items() if rate < _SLOW * fast)
    slow = {rank for special in specials for rank in special.ranks}
    latency = median(pair.seconds_per_round_trip for pair in good) / 2
    pairs: list[Pair] = []
    for pair in good:
        one_way = pair.seconds_per_round_trip / 2
        if {pair.a, pair.b} & slow:
            pairs += [Pair((pair.a, pair.b), latency=one_way)] if one_way > _FAR * latency else []
        elif pair.rate < _SLOW * fast:
            pairs.append(Pair((pair.a, pair.b), pair.rate / PAYLOAD_SHARE, one_way))
    network = Network(bits_per_second=fast / PAYLOAD_SHARE, latency=latency, specials=specials, pairs=tuple(pairs))
    network = fitted(network, seen.all_reduces, seen.size)
    if not seen.loaded:
        return network
    return contended(network, seen.slowed, fmean(each.bytes_per_second for each in seen.loaded.values()))


def costs_of(seen: Examination, recipes: Sequence[str] = RECIPES) -> Iterator[Cost]:
    """Simulate some recipes on the measured links, with the measured step of the slowest rank; none where it cannot be.

    Args:
        seen: with links of all ranks, and steps.
        recipes: as text.
    """
    if not 2 <= seen.size <= MOST_WORKERS or len(seen.hosts) < seen.size or not seen.steps:
        return
    if any(pair.problem for pair in seen.pairs) or not seen.pairs:
        return
    step = max(seen.steps.values(), key=lambda each: each.seconds)
    alone = min(each.seconds for each in seen.steps.values())
    job = step.job(seen.size, network_of(seen), partial(torch.optim.AdamW, lr=1e-4), sharing=seen.sharing)
    for text in recipes:
        (option,) = Planner(job, [text]).options()
        found = option.prediction
        if found is not None:  # a recipe may not exist for this number of workers
            speed = seen.size * alone / found.seconds
            yield Cost(text, found.seconds, found.efficiency, speed, found.payload_bytes)
