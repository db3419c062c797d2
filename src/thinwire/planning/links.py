# SPDX-License-Identifier: Apache-2.0
"""The link of one worker: a rate in each direction and a delay."""

from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.planning.quantities import entries_by_rank, in_unit, parse_duration, parse_rate

SLOWEST = 1e4
FASTEST = 1e11


@dataclass(frozen=True)
class Link:
    """One worker's cable to the switch that joins all workers.

    A message from worker a to worker b is sent at a's rate, arrives a's delay later and is received at b's rate, so
    a round trip between them takes at least the sum of their delays.

    Args:
        bits_per_second: the rate of each direction, 10 kbit/s to 100 Gbit/s; None sets no limit.
        delay_seconds: latency added to everything this worker sends: 0, or 1e-6 to 10 seconds.

    Raises:
        ConfigError: when a value is out of its range.

    Example:
        >>> str(Link(bits_per_second=1e8, delay_seconds=0.005))
        '100mbit+5ms'
    """

    bits_per_second: float | None = None
    delay_seconds: float = 0.0

    def __post_init__(self) -> None:
        rate = self.bits_per_second
        if rate is not None and not SLOWEST <= rate <= FASTEST:
            raise ConfigError(f"bits_per_second={rate}: must lie between 1e4 (10kbit) and 1e11 (100gbit), or be None")
        if self.delay_seconds and not 1e-6 <= self.delay_seconds < 10:
            raise ConfigError(f"delay_seconds={self.delay_seconds}: must be 0 or from 1e-6 to 10. 5ms is 0.005")

    def __str__(self) -> str:
        """Return the text that `parse_links` reads back."""
        delay = f"+{in_unit(self.delay_seconds, -3)}ms" if self.delay_seconds else ""
        return _rate_text(self.bits_per_second) + delay


def parse_links(text: str, workers: int) -> tuple[Link, ...]:
    """Read one link per worker from `100mbit`, `100mbit+5ms`, `none`, or `100mbit,0:10mbit`.

    An entry without a rank is for all workers that have no entry of their own; without such an entry, their links are
    not limited.

    Args:
        text: entries `[RANK:]RATE[+DELAY]` separated by commas; RATE is `none` or a number with kbit, mbit or gbit,
            DELAY a number with us, ms or s.
        workers: how many links to return.

    Raises:
        ConfigError: when an entry cannot be read, or two are for the same worker.

    Example:
        >>> [link.bits_per_second for link in parse_links("100mbit,0:10mbit", workers=3)]
        [10000000.0, 100000000.0, 100000000.0]
    """
    argument = f"link {text!r}"

    def read(entry: str) -> Link:
        rate, plus, delay = entry.partition("+")
        bits = None if rate.strip().lower() == "none" else parse_rate(rate, argument=argument)
        return Link(bits, parse_duration(delay, argument=argument) if plus else 0.0)

    return tuple(each or Link() for each in entries_by_rank(text, workers, read, argument=argument))


def describe_links(links: tuple[Link, ...]) -> str:
    """Write links as a text that `parse_links` reads back: the most common one as the entry for all."""
    texts = [str(link) for link in links]
    default = max(dict.fromkeys(texts), key=texts.count)
    others = [f"{rank}:{text}" for rank, text in enumerate(texts) if text != default]
    return ",".join([default, *others])


def _rate_text(bits_per_second: float | None) -> str:
    if bits_per_second is None:
        return "none"
    for unit, exponent in (("gbit", 9), ("mbit", 6)):
        if bits_per_second >= 10**exponent:
            return in_unit(bits_per_second, exponent) + unit
    return in_unit(bits_per_second, 3) + "kbit"
