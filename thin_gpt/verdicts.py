# SPDX-License-Identifier: Apache-2.0
"""The bars and how they are judged, written before any long run. The functions are pure; `bars` applies them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

AVERAGED, KENDALL, FINAL_LOSS, COPIES = 3, 0.9, 0.01, 2.5
RATIOS = {"20mbit/equal": 1.5, "100mbit-50ms/equal": 1.3, "100mbit-50ms/uneven": 1.5, "1gbit/equal": 1.0}
"""By track: the least time of the best peer, or of `torchft-diloco` where it is uneven, over that of ours."""


@dataclass(frozen=True)
class Bar:
    """A demand and what was measured; None is not run."""

    what: str
    asked: str
    measured: float | None
    met: bool | None

    def line(self) -> str:
        """As a row of a table."""
        outcome = "not run" if self.met is None else "met" if self.met else "**not met**"
        return f"| {self.what} | {self.asked} | {'' if self.measured is None else f'{self.measured:.3g}'} | {outcome} |"


def target_of(curve: Sequence[Sequence[float]], trunk: int) -> float:
    """DDP's mean held-out loss over the last three snapshots of the trunk."""
    losses = [loss for step, loss, *_ in curve if step <= trunk][-AVERAGED:]
    return sum(losses) / len(losses)


def steps_to(curve: Sequence[Sequence[float]], target: float, trunk: int) -> float | None:
    """The step at which the mean of three successive snapshots of the trunk reaches the target, interpolated.

    A mean belongs to the last of its three steps, as the target does. None if it is not reached.
    """
    marks = [(step, loss) for step, loss, *_ in curve if step <= trunk]
    means = [
        (marks[i][0], sum(loss for _, loss in marks[i - AVERAGED + 1 : i + 1]) / AVERAGED)
        for i in range(AVERAGED - 1, len(marks))
    ]
    before: tuple[float, float] | None = None
    for step, mean in means:
        if mean <= target:
            if before is None or before[1] == mean:
                return step
            return before[0] + (before[1] - target) / (before[1] - mean) * (step - before[0])
        before = (step, mean)
    return None


def seconds_at(ends: Sequence[float], step: float) -> float:
    """The clock at a step between two whole ones."""
    whole = int(step)
    before = ends[whole - 1] if whole else 0.0
    after = ends[min(whole, len(ends) - 1)]
    return before + (step - whole) * (after - before)


def kendall(first: Sequence[str], second: Sequence[str]) -> float:
    """Kendall's tau of two rankings of the same names: 1 if equal, -1 if reversed.

    Raises:
        ValueError: the rankings do not have the same names.
    """
    if sorted(first) != sorted(second) or len(set(first)) != len(first) or len(first) < 2:
        raise ValueError(f"rankings {first} and {second} must have the same names, each once, at least two")
    places = {name: place for place, name in enumerate(second)}
    pairs = list(combinations(first, 2))
    return sum(1 if places[a] < places[b] else -1 for a, b in pairs) / len(pairs)


def ratio_bar(track: str, ours: Mapping[str, float], peers: Mapping[str, float]) -> Bar:
    """The best peer's time to the target over our best one's; racers that did not reach it have none."""
    asked = RATIOS[track]
    against = "torchft-diloco" if track.endswith("uneven") else "the best peer"
    found = {name: time for name, time in peers.items() if against in ("the best peer", name)}
    what = f"{track}: time of {against} over the best of thinwire"
    if not ours or not found:
        return Bar(what, f"at least {asked:g}", None, None)
    measured = min(found.values()) / min(ours.values())
    return Bar(what, f"at least {asked:g}", measured, measured >= asked)


def final_bar(name: str, own: Sequence[float], ddp: Sequence[float]) -> Bar:
    """The mean over seeds of the final loss at equal tokens over DDP's; at least three seeds each."""
    what, asked = f"{name}: final loss over DDP's", f"at most {1 + FINAL_LOSS:g}"
    if min(len(own), len(ddp)) < AVERAGED:
        return Bar(what, asked, None, None)
    measured = (sum(own) / len(own)) / (sum(ddp) / len(ddp))
    return Bar(what, asked, measured, math.isfinite(measured) and measured <= 1 + FINAL_LOSS)


def memory_bar(name: str, own: float | None, ddp: float | None, parameters: int) -> Bar:
    """Copies of the parameters in fp32 that a worker has more than one of DDP."""
    if own is None or ddp is None:
        return Bar(f"{name}: extra copies of the parameters", f"at most {COPIES:g}", None, None)
    copies = (own - ddp) / (4 * parameters)
    return Bar(f"{name}: extra copies of the parameters", f"at most {COPIES:g}", copies, copies <= COPIES)


def rank_bar(first: Sequence[str], second: Sequence[str], track: str) -> Bar:
    """Agreement of two days, or of two machines."""
    what = f"{track}: Kendall's tau of two rankings of eight racers"
    common = [name for name in first if name in second][:8]
    if len(common) < 8:
        return Bar(what, f"at least {KENDALL:g}", None, None)
    tau = kendall(common, [name for name in second if name in common])
    return Bar(what, f"at least {KENDALL:g}", tau, tau >= KENDALL)
