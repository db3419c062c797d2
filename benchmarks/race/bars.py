# SPDX-License-Identifier: Apache-2.0
"""What was asked of the race, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from benchmarks.race.racers import LINKS, SIZES, ddp_of
from benchmarks.race.results import PAIRED, result
from benchmarks.race.table import Row, first, rows
from thin_gpt.verdicts import Bar

AHEAD = 0.98
"""A peer is ahead if it is at the target in less than so much of the time: less is noise of the clock."""


def judged(place: str, asked: str, figure: float | None, limit: float, *, most: bool = False) -> Bar:
    """Judge a demand.

    Args:
        place: the link and the number of workers.
        asked: what, in words.
        figure: what was measured; None where it has not been run.
        limit: the least that was asked; the most, where `most`.
        most: whether less is better.
    """
    met = None if figure is None else figure <= limit if most else figure >= limit
    return Bar(f"{place}, {asked}", f"{'at most' if most else 'at least'} {limit:g}", figure, met)


def bars() -> list[Bar]:
    """All of them."""
    found = [bar for limits in _LIMITS for bar in _of_link(*limits)]
    return [*found, *_eight(), *_unlimited()]


# Link; the least that is asked: of the wall's speed, of DDP's time over that of the fastest thinwire recipe, and of the
# time of the fastest of the others over it.
_LIMITS = (
    ("100mbit", 0.9, 6.0, 1.3),
    ("20mbit", 0.85, 25.0, 1.5),
    ("1gbit", None, 1.5, AHEAD),
    ("100mbit+50ms", None, None, AHEAD),
)
assert {link for link, *_ in _LIMITS} <= set(LINKS)


def winner(link: str) -> Row | None:
    """The fastest thinwire recipe among those with all seeds, with 4 workers."""
    return first([row for row in rows(link, SIZES[0]) if row.racer.whose == "thinwire" and row.racer.headline])


def _of_link(link: str, wall: float | None, over_ddp: float | None, over_peer: float) -> Iterator[Bar]:
    own, found, place = winner(link), rows(link, SIZES[0]), f"{link}, {SIZES[0]} workers"
    ddp = next(row for row in found if row.racer is ddp_of("text"))
    peer = first([row for row in found if row.racer.whose != "thinwire"])
    name = own.racer.name if own else "fastest thinwire recipe"
    if wall is not None:
        asked = f"{name}: time of a step of `Local()` (no communication) divided by its time of a step"
        yield judged(place, asked, own.of_wall if own else None, wall)
    if over_ddp is not None:
        yield judged(place, f"{name}: seconds to the target of DDP divided by its own", _over(ddp, own), over_ddp)
    named = peer.racer.name if peer else "the fastest of the others"
    yield judged(place, f"{name}: seconds to the target of {named} divided by its own", _over(peer, own), over_peer)
    asked = f"{name}: held-out loss at equal tokens divided by DDP's"
    yield judged(place, asked, _loss_over(own, ddp), 1.01, most=True)
    yield judged(place, f"{name}: memory, in copies of the parameters", own.copies if own else None, 4.0, most=True)


def _over(row: Row | None, own: Row | None) -> float | None:
    if row is None or own is None or row.to_target == float("inf"):
        return None
    return row.to_target / own.to_target


def _loss_over(own: Row | None, ddp: Row) -> float | None:
    if own is None or not own.final or not ddp.final:
        return None
    # Both have the same seeds, in the same order, as far as they have been run.
    return median(a / b for a, b in zip(own.final, ddp.final, strict=False))


def _eight() -> Iterator[Bar]:
    own = winner("20mbit")
    at_eight = {row.racer.name: row for row in rows("20mbit", SIZES[1])}
    row = at_eight[own.racer.name] if own else None
    share = row.exposed / row.seconds if row and row.seconds and row.exposed is not None else None
    name = own.racer.name if own else "fastest thinwire recipe with 4 workers"
    asked = f"{name}: exposed communication divided by its time of a step"
    yield judged(f"20mbit, {SIZES[1]} workers", asked, share, 0.15, most=True)


def _unlimited() -> Iterator[Bar]:
    found = result(PAIRED)
    share = found["contenders"]["thinwire"]["speed_vs_ddp"]["median"] if found else None
    asked = "AllReduce, the planner's choice: DDP's time of a step divided by its time of a step, in turns"
    yield judged(f"no limit, {SIZES[0]} workers", asked, share, 0.98)
