# SPDX-License-Identifier: Apache-2.0
"""Rates and durations as people write them: `100mbit`, `200ms`."""

import re
from decimal import Decimal

from thinwire.errors import ConfigError

_BITS = {"kbit": 3, "mbit": 6, "gbit": 9}
_SECONDS = {"us": -6, "ms": -3, "s": 0}
_RANK_DIGITS = 9  # Python refuses to read integers of thousands of digits
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([a-z]+)")

RATE_RULE = "a rate is a number and kbit, mbit or gbit"
DURATION_RULE = "a duration is a number and us, ms or s"


def parse_rate(text: str, *, argument: str) -> float:
    """Read `10mbit` as 1e7 bits per second.

    Args:
        text: the rate, in lower or upper case.
        argument: the whole argument that it is part of, for the error.

    Raises:
        ConfigError: it is not a positive rate.
    """
    return _parse(text, _BITS, argument=argument, rule=RATE_RULE, example="100mbit")


def parse_duration(text: str, *, argument: str) -> float:
    """Read `200ms` as 0.2 seconds.

    Args:
        text: the duration, in lower or upper case.
        argument: the whole argument that it is part of, for the error.

    Raises:
        ConfigError: it is not a positive duration.
    """
    return _parse(text, _SECONDS, argument=argument, rule=DURATION_RULE, example="200ms")


def in_unit(value: float, exponent: int) -> str:
    """Write ``value`` as a decimal multiple of ten to the ``exponent``, without loss: ``in_unit(1e8, 6)`` is '100'."""
    # Decimal, because a division of floats would round: the text must read back to the same value.
    text = format(Decimal(repr(value)).scaleb(-exponent), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def parse_rank(text: str, workers: int, *, argument: str) -> int:
    """Read a worker's number, 0 to ``workers - 1``.

    Raises:
        ConfigError: there is no such worker.
    """
    if text.isdecimal() and len(text) <= _RANK_DIGITS and int(text) < workers:
        return int(text)
    raise ConfigError(f"{argument}: there is no worker {text!r}. With {workers} they are 0 to {workers - 1}")


def split_rank(text: str, workers: int, *, argument: str) -> tuple[int | None, str]:
    """Split `2:3x` into 2 and `3x`; a text without a rank is for all workers, and the rank is None.

    Raises:
        ConfigError: there is no such worker.
    """
    rank, colon, rest = text.partition(":")
    if not colon:
        return None, text
    return parse_rank(rank, workers, argument=argument), rest


def _parse(text: str, exponents: dict[str, int], *, argument: str, rule: str, example: str) -> float:
    match = _QUANTITY.fullmatch(text.strip().lower())
    if match is None or match[2] not in exponents or float(match[1]) <= 0:
        raise ConfigError(f"{argument}: {text!r} cannot be read; {rule}, such as {example}")
    value = float(f"{match[1]}e{exponents[match[2]]}")
    if value == float("inf"):
        raise ConfigError(f"{argument}: {text[:20]!r}... is too large; {rule}, such as {example}")
    return value
