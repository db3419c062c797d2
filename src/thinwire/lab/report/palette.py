# SPDX-License-Identifier: Apache-2.0
"""Colours: one per strategy, the same in every plot of every report, distinguishable without red and green.

No two light colours are equal. So a drawing made with light colours follows the reader's choice of light or dark once
each colour in it is replaced by a CSS variable.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from thinwire.lab.report.labels import family

Line = Literal["-", "--", "-.", ":"]


@dataclass(frozen=True)
class Tone:
    """One role's colour on a light and on a dark page, as `#rrggbb`, and the CSS variable for both."""

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
COMMUNICATION = Tone("--communication", "#93a4ba", "#6d86ad")
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
TONES = (INK, MUTED, GRID, PAPER, COMPUTE, WAIT, ON_WAIT, COMMUNICATION, OTHER, *_SERIES)

# Well-known strategies always have the same colour.
_FIXED = {"ddp": 0, "AllReduce": 1, "LocalSGD": 2, "SlowMo": 3, "PushSum": 4, "Gossip": 5}
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
    """Return one look per recipe, all different up to 32 of them; well-known strategies always have the same colour.

    Example:
        >>> [look.tone.variable for look in looks(["ddp", "LocalSGD(period=8)", "DecentLaM()"])]
        ['--series-0', '--series-2', '--series-6']
    """
    taken: list[int] = []
    for recipe in recipes:
        fixed = _FIXED.get(family(recipe))
        taken.append(fixed if fixed is not None and fixed not in taken else -1)
    # The others get colours that are nobody's first, then those of strategies that are not here, then dashed lines.
    reserved = sorted(_FIXED.values())
    spare = [slot for slot in range(len(_SERIES)) if slot not in reserved]
    order = [*spare, *reserved[1:], reserved[0], *range(len(_SERIES), len(_SERIES) + len(recipes))]
    free = [slot for slot in order if slot not in taken]
    return [_look(slot if slot >= 0 else free.pop(0)) for slot in taken]


def _look(slot: int) -> Look:
    turn, place = divmod(slot, len(_SERIES))
    # The baseline is the widest line, so that its edges stay visible under a curve that coincides with it.
    width = 3.4 if slot == _FIXED["ddp"] else 1.8
    return Look(_SERIES[place], _MARKERS[place], _LINES[turn % len(_LINES)], width)
