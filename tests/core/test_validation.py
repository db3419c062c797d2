# SPDX-License-Identifier: Apache-2.0
"""The ranges in the annotations of fields are those of new instances."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args, get_type_hints

import pytest

from thinwire import ConfigError
from thinwire.core.validation import Range, check_fields
from thinwire.registry import recipe_classes


@dataclass(frozen=True)
class Delayed:
    period: Annotated[int, Range("1..", "8 is usual")] = 8
    delay: Annotated[int | None, Range("[0, {period})", "None takes {period} steps")] = None
    note: Annotated[str, "another annotation"] = ""

    def __post_init__(self) -> None:
        check_fields(self)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"period": 0}, "period=0: must be at least 1. 8 is usual"),
        ({"period": 4, "delay": 4}, r"delay=4: must lie in \[0, 4\). None takes 4 steps"),
        ({"period": "4", "delay": 4}, r"Delayed\(period='4'\): period must be a whole number"),
        ({"delay": 0.5}, r"Delayed\(delay=0.5\): delay must be a whole number or None"),
        ({"note": 1}, "note must be a str"),
    ],
)
def test_types_are_checked_first_and_then_ranges(given: dict[str, Any], words: str) -> None:
    assert Delayed(4, 3).delay == 3 and Delayed().delay is None
    with pytest.raises(ConfigError, match=words):
        Delayed(**given)


def ranges() -> list[tuple[type, str, Any, str]]:
    """Each class, field, type and range of the registered classes."""
    found: list[tuple[type, str, Any, str]] = []
    for kind in recipe_classes().values():
        hints = get_type_hints(kind, include_extras=True)
        for name in (field.name for field in fields(kind)):  # type: ignore[arg-type]
            hint, *others = get_args(hints[name]) or (hints[name],)
            found += [(kind, name, hint, each.within) for each in others if isinstance(each, Range)]
    return found


def test_every_hyperparameter_is_refused_below_its_range() -> None:
    assert len(ranges()) > 70
    for kind, name, hint, within in ranges():
        text = within.format_map(vars(kind()))
        least = float(text.partition("..")[0] if ".." in text else text[1:].partition(",")[0])
        wrong = [least - 1, float("nan")] if hint in (float, float | None) else [int(least) - 1]
        for value in wrong:
            with pytest.raises(ConfigError, match=rf"^{name}={value}: must "):
                kind(**{name: value})
