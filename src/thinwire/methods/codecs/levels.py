# SPDX-License-Identifier: Apache-2.0
"""The settings of a codec that a budget can choose, from the fewest bytes to the most."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec, CodecWrapper

# By the field that controls how much a codec sends; the first match is used. Fields with many values have steps of at
# most 20 %, so that little of a budget is left over.
_VALUES: dict[str, tuple[float, ...]] = {
    "rank": (*range(1, 8), *(2**i * j for i in range(1, 5) for j in (4, 5, 6, 7)), 128),
    "kept": (*range(1, 8), *(2**i * j for i in range(1, 12) for j in (4, 5, 6, 7)), 16384),
    "fraction": tuple(float(f"{2 ** (-i / 4):.2g}") for i in range(72, 3, -1)),
    "bits": tuple(range(1, 9)),
}


class Levels(NamedTuple):
    """The settings to choose from.

    Attributes:
        name: the name of the field.
        values: the values of the field, ascending.
        codecs: the codecs with these values.
    """

    name: str
    values: tuple[float, ...]
    codecs: tuple[Codec, ...]


@lru_cache(maxsize=64)
def levels_of(codec: Codec) -> Levels | None:
    """Return the codec with other values of its size field; None if it has no such field.

    Size fields are `rank`, `kept`, `fraction` and `bits`, of the codec or of one inside it. Values that the codec
    refuses are left out.

    Args:
        codec: the codec, with any value of that field.

    Example:
        >>> from thinwire import ErrorFeedback, Nearest, OneBit
        >>> from thinwire.methods.codecs.levels import levels_of
        >>> levels = levels_of(ErrorFeedback(Nearest(bits=4, block=64)))
        >>> levels.name, levels.values[:3], levels.codecs[0].codec
        ('bits', (1, 2, 3), Nearest(bits=1, block=64))
        >>> levels_of(OneBit()) is None
        True
    """
    name = next((name for name in _VALUES if _with(codec, name, None) is not None), None)
    if name is None:
        return None
    made = [(value, changed) for value in _VALUES[name] if (changed := _with(codec, name, value)) is not None]
    return Levels(name, tuple(value for value, _ in made), tuple(changed for _, changed in made))


def _with(codec: Codec, name: str, value: float | None) -> Codec | None:
    """Replace the field's value in the codec or the one inside it; None if the field or value is invalid."""
    made: Any = codec
    try:
        if isinstance(codec, CodecWrapper):
            changed = _with(codec.codec, name, value)
            return None if changed is None else replace(made, codec=changed)
        if name not in getattr(made, "__dataclass_fields__", ()):
            return None
        return codec if value is None else replace(made, **{name: value})
    except ConfigError:
        return None
