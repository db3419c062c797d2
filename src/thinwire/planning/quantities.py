# SPDX-License-Identifier: Apache-2.0
"""Rates and durations as people write them: `100mbit`, `200ms`."""

import re
from collections.abc import Callable
from decimal import Decimal
from typing import TypeVar

from thinwire.errors import ConfigError

T = TypeVar("T")

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


def entries_by_rank(
    text: str, workers: int, read: Callable[[str], T], *, argument: str, parts: int = 1
) -> list[T | None]:
    """Return each worker's entry of a text such as `100mbit,0:10mbit`; None where it has none.

    Args:
        text: entries separated by commas, each for the rank in front of it, or for all workers that have none.
        workers: how many.
        read: reads an entry without its rank.
        argument: the whole argument, for errors.
        parts: how many parts an entry itself has between colons.

    Raises:
        ConfigError: there is no such worker, or one has two entries.

    Example:
        >>> entries_by_rank("100mbit,0:10mbit", 3, str, argument="link")
        ['10mbit', '100mbit', '100mbit']
    """
    found: dict[int | None, T] = {}
    for entry in map(str.strip, text.split(",")):
        rank, rest = None, entry
        if entry.count(":") >= parts:
            first, _, rest = entry.partition(":")
            rank = parse_rank(first, workers, argument=argument)
        if rank in found:
            whose = "all workers" if rank is None else f"worker {rank}"
            raise ConfigError(f"{argument}: has {whose} twice. Keep one of the entries")
        found[rank] = read(rest)
    return [found.get(rank, found.get(None)) for rank in range(workers)]


def _parse(text: str, exponents: dict[str, int], *, argument: str, rule: str, example: str) -> float:
    match = _QUANTITY.fullmatch(text.strip().lower())
    if match is None or match[2] not in exponents or float(match[1]) <= 0:
        raise ConfigError(f"{argument}: {text!r} cannot be read; {rule}, such as {example}")
    value = float(f"{match[1]}e{exponents[match[2]]}")
    if value == float("inf"):
        raise ConfigError(f"{argument}: {text[:20]!r}... is too large; {rule}, such as {example}")
    return value
