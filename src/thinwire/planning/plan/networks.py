# SPDX-License-Identifier: Apache-2.0
"""Networks as users describe them, and as they were measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from thinwire.errors import ConfigError
from thinwire.planning.links import Link
from thinwire.planning.simulate import Network, Special
from thinwire.planning.simulate.wires import PAYLOAD_SHARE, Wires

_LATENCY = 1e-4
_FASTEST = 1e11
_LEAST_RATIO = 16
_ENTRIES = {"compute": "[compute] time", "device": "[compute] device"}
_LEAST_SHARE, _MOST_SHARE, _PRECISION = 0.2, 1.05, 1e-4
_LEAST_BUSY, _MOST_CONTENTION = 0.5, 0.9


def network_of_links(links: Sequence[Link]) -> Network:
    """Emulated links, as `parse_links` reads them, as a network to be simulated with Gloo's rings.

    Besides the delays of links, a message takes 0.1 ms from one worker to another.

    Args:
        links: one for each worker; one without a rate has 100 Gbit/s.

    Example:
        >>> from thinwire.planning.links import parse_links
        >>> from thinwire.planning.plan.networks import network_of_links
        >>> network = network_of_links(parse_links("100mbit+5ms,2:10mbit+5ms", 3))
        >>> network.bits_per_second, network.specials[0].ranks, network.specials[0].bits_per_second
        (100000000.0, (2,), 10000000.0)
    """
    usual, _ = Counter(links).most_common(1)[0]
    rate, least = usual.bits_per_second or _FASTEST, min(each.delay_seconds for each in links)
    specials = tuple(
        # Half of it, because a simulated delay is of both directions, and a link's of what its worker sends.
        Special((rank,), each.bits_per_second or _FASTEST, (each.delay_seconds - least) / 2)
        for rank, each in enumerate(links)
        if each != replace(usual, delay_seconds=least)
    )
    return Network(bits_per_second=rate, latency=_LATENCY + least, specials=specials, all_reduce="gloo")


def check_entries(network: Network, argument: str, reasons: Mapping[str, str]) -> None:
    """Refuse entries of a network file that would be ignored.

    Args:
        network: as it was read.
        argument: the option and its value, for errors.
        reasons: why an entry is of no use, by the field: `compute`, `device`, `deaths` or `pauses`.

    Raises:
        ConfigError: with the entry and the reason.

    Example:
        >>> from thinwire.planning.simulate import Network
        >>> check_entries(Network(bits_per_second=1e8), "--network n.toml", {"deaths": "nobody dies here"})
    """
    usual = Network()
    for field, reason in reasons.items():
        if getattr(network, field) != getattr(usual, field):
            entry = _ENTRIES.get(field) or f"[[{field}]]"
            raise ConfigError(f"{argument}: {entry}: {reason}. Leave it out")


def fitted(network: Network, all_reduces: Mapping[int, float], workers: int) -> Network:
    """Return the network on which Gloo's simulated ring takes as long as all-reduces were measured to take.

    What one TCP stream reaches is not what Gloo does, which copies, adds and waits for processors in between. The
    largest all-reduce gives the rate, and the smallest one the latency, of which each hop has two. A fit with less than
    a fifth of the rate of the links is not used.

    Args:
        network: of measured links; where some differ from the others it is returned as it is.
        all_reduces: seconds by bytes of the vector.
        workers: that took part.
    """
    if workers < 2 or len(all_reduces) < 2 or network.specials or network.pairs:
        return network
    small, large = min(all_reduces), max(all_reduces)
    if large < _LEAST_RATIO * small or all_reduces[large] <= all_reduces[small]:
        return network
    _, hop = _ring(all_reduces, workers, all_reduces[large] - all_reduces[small])
    gloo = replace(network, all_reduce="gloo", latency=max(network.latency, hop / 2))

    def at(share: float) -> Network:
        return replace(gloo, bits_per_second=share * network.bits_per_second)

    def is_too_slow(share: float) -> bool:
        return max(Wires(at(share), workers).all_reduce([0.0] * workers, large)) > all_reduces[large]

    low, high = _LEAST_SHARE, _MOST_SHARE
    if not is_too_slow(low):
        return network
    if is_too_slow(high):
        return at(high)
    while high - low > _PRECISION * low:
        middle = (low + high) / 2
        low, high = (middle, high) if is_too_slow(middle) else (low, middle)
    return at(high)


def contended(network: Network, slowed: float, bytes_per_second: float) -> Network:
    """Return the network on which steps take as many times as long while messages pass as they were measured to take.

    Interfaces are not busy all along where a processor limits what they carry, or where rounds of messages have pauses;
    the loss is then of the time in which they are.

    Args:
        network: of the links.
        slowed: how many times as long a step took while each worker sent all along; 1 is no contention.
        bytes_per_second: of payload that a worker sent meanwhile.

    Example:
        Steps took 1.25 times as long, so that a fifth of the computation was lost, beside 100 Mbit/s of messages.

        >>> from thinwire.planning.plan.networks import contended
        >>> from thinwire.planning.simulate import Network
        >>> round(contended(Network(bits_per_second=1e8), 1.25, 12e6).contention, 3)
        0.2
    """
    busy = min(1.0, max(_LEAST_BUSY, 8 * bytes_per_second / (network.slowest * PAYLOAD_SHARE)))
    return replace(network, contention=min(_MOST_CONTENTION, (1 - 1 / max(1.0, slowed)) / busy))


def network_of_all_reduces(all_reduces: Mapping[int, float], workers: int) -> Network:
    """Return the network on which the simulated ring takes as long as two or more all-reduces were measured to take.

    Raises:
        ConfigError: fewer than two sizes, or one worker.
    """
    if workers < 2 or len(all_reduces) < 2:
        raise ConfigError(f"{len(all_reduces)} sizes on {workers} workers: two sizes are needed, and two workers")
    small, large = (all_reduces[size] for size in (min(all_reduces), max(all_reduces)))
    bits_per_second, latency = _ring(all_reduces, workers, max(large - small, 1e-3 * large, 1e-9))
    return Network(bits_per_second=min(_FASTEST, bits_per_second), latency=max(0.0, latency))


def _ring(all_reduces: Mapping[int, float], workers: int, taken: float) -> tuple[float, float]:
    """The rate and the latency at which the largest all-reduce of a ring takes so much longer than the smallest."""
    small, large, hops = min(all_reduces), max(all_reduces), 2 * (workers - 1)
    seconds_per_byte = taken / (large - small)
    latency = (all_reduces[small] - small * seconds_per_byte) / hops
    return 8 * hops / workers / seconds_per_byte / PAYLOAD_SHARE, latency
