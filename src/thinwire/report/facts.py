"""Facts as they come out of JSON: looked up by name, missing ones said to be missing."""

import math
from collections.abc import Mapping

Facts = Mapping[str, object]


def number(facts: Facts, key: str) -> float | None:
    """The finite number under a key; None when it is absent, null, not a number, NaN or infinite."""
    value = facts.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def text(facts: Facts, key: str, missing: str = "") -> str:
    """The text under a key, or `missing` when it is absent or null; a number is written out."""
    value = facts.get(key)
    return missing if value is None else str(value)


def diverged(facts: Facts, key: str) -> bool:
    """Whether the number under a key is there and is NaN or infinite."""
    value = facts.get(key)
    return isinstance(value, float) and not math.isfinite(value)
