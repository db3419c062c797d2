"""Colours: one per strategy, the same in every plot of every report, told apart without red and green.

Every light colour is distinct from all others, so that a drawing made with light colours can be turned into one
that follows the reader's choice of light or dark by exchanging each colour for a CSS variable.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from thinwire.report.labels import family

Line = Literal["-", "--", "-.", ":"]


@dataclass(frozen=True)
class Tone:
    """One role's colour on light and on dark paper, as `#rrggbb`, and the CSS variable that stands for both."""

    variable: str
    light: str
    dark: str


INK = Tone("--ink", "#1c2430", "#e8ecf2")
MUTED = Tone("--muted", "#5b6675", "#a3adbb")
GRID = Tone("--grid", "#e4e8ee", "#2c3440")
PAPER = Tone("--paper", "#ffffff", "#171c24")
COMPUTE = Tone("--compute", "#47586f", "#8ea2bf")
WAIT = Tone("--wait", "#eba583", "#d9805a")
ON_WAIT = Tone("--on-wait", "#2b1a10", "#22140b")
TALK = Tone("--talk", "#93a4ba", "#6d86ad")
OTHER = Tone("--other", "#d3d9e2", "#3a4453")

_SERIES = (
    Tone("--series-0", "#4e4a54", "#f0f2f6"),
    Tone("--series-1", "#0068b5", "#6da0f0"),
    Tone("--series-2", "#12965a", "#4ae3a5"),
    Tone("--series-3", "#bf3600", "#dd6218"),
    Tone("--series-4", "#c070a6", "#cb6ba5"),
    Tone("--series-5", "#d07d00", "#f3c76b"),
    Tone("--series-6", "#4c2fa8", "#736eea"),
    Tone("--series-7", "#4f97cf", "#b6d7ff"),
)
TONES = (INK, MUTED, GRID, PAPER, COMPUTE, WAIT, ON_WAIT, TALK, OTHER, *_SERIES)

_HOMES = {"ddp": 0, "AllReduce": 1, "LocalSGD": 2, "SlowMo": 3, "PushSum": 4, "Gossip": 5}
_MARKERS = "osD^vPXp"
_LINES: tuple[Line, ...] = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Look:
    """How one strategy is drawn everywhere: its colour, its marker, its line and that line's width in points."""

    tone: Tone
    marker: str
    line: Line
    width: float


def looks(recipes: Sequence[str]) -> list[Look]:
    """One look per recipe, all different up to 32 of them; a well-known family always has its own colour."""
    taken: list[int] = []
    for recipe in recipes:
        home = _HOMES.get(family(recipe))
        taken.append(home if home is not None and home not in taken else -1)
    free = [slot for slot in _by_need(len(recipes)) if slot not in taken]
    slots = [slot if slot >= 0 else free.pop(0) for slot in taken]
    return [_look(slot) for slot in slots]


def _by_need(count: int) -> list[int]:
    """Slots for those without a home: colours nobody calls home first, then the others, then dashed ones."""
    homes = sorted(_HOMES.values())
    spare = [slot for slot in range(len(_SERIES)) if slot not in homes]
    return [*spare, *homes[1:], homes[0], *range(len(_SERIES), len(_SERIES) + count)]


def _look(slot: int) -> Look:
    turn, place = divmod(slot, len(_SERIES))
    # The yardstick is the widest, so that a curve that falls upon it leaves its edges to be seen.
    width = 3.4 if slot == _HOMES["ddp"] else 1.8
    return Look(_SERIES[place], _MARKERS[place], _LINES[turn % len(_LINES)], width)
