"""Rates and durations as people write them: `100mbit`, `200ms`."""

import re
from decimal import Decimal

from thinwire.errors import ConfigError

_BITS = {"kbit": 3, "mbit": 6, "gbit": 9}
_SECONDS = {"us": -6, "ms": -3, "s": 0}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([a-z]+)")

RATE_RULE = "a rate is a number and kbit, mbit or gbit"
DURATION_RULE = "a duration is a number and us, ms or s"


def parse_rate(text: str, *, asked: str) -> float:
    """Read `10mbit` as 1e7 bits per second.

    Args:
        text: the rate, in lower or upper case.
        asked: the whole argument it stands in, for the error.

    Raises:
        ConfigError: when it is no positive rate.
    """
    return _parse(text, _BITS, asked=asked, rule=RATE_RULE, example="100mbit")


def parse_duration(text: str, *, asked: str) -> float:
    """Read `200ms` as 0.2 seconds.

    Args:
        text: the duration, in lower or upper case.
        asked: the whole argument it stands in, for the error.

    Raises:
        ConfigError: when it is no positive duration.
    """
    return _parse(text, _SECONDS, asked=asked, rule=DURATION_RULE, example="200ms")


def in_unit(value: float, exponent: int) -> str:
    """Write ``value`` as a plain decimal multiple of ten to the ``exponent``, such that it is read back exactly."""
    text = format(Decimal(repr(value)).scaleb(-exponent), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def parse_rank(text: str, workers: int, *, asked: str) -> int:
    """Read a worker's number, 0 to ``workers - 1``.

    Raises:
        ConfigError: when it is no such number.
    """
    if text.isdecimal() and int(text) < workers:
        return int(text)
    raise ConfigError(f"{asked}: there is no worker {text!r}; with {workers} they are 0 to {workers - 1}")


def split_rank(text: str, workers: int, *, asked: str) -> tuple[int | None, str]:
    """Take the rank off `2:3x`; without one the rest is meant for all workers and the rank is None.

    Raises:
        ConfigError: when the rank is none of the workers.
    """
    rank, colon, rest = text.partition(":")
    if not colon:
        return None, text
    return parse_rank(rank, workers, asked=asked), rest


def _parse(text: str, exponents: dict[str, int], *, asked: str, rule: str, example: str) -> float:
    match = _QUANTITY.fullmatch(text.strip().lower())
    if match is None or match[2] not in exponents or float(match[1]) <= 0:
        raise ConfigError(f"{asked}: {text!r} cannot be read; {rule}, such as {example}")
    return float(f"{match[1]}e{exponents[match[2]]}")
