# SPDX-License-Identifier: Apache-2.0
"""Networks from links and from measured all-reduces."""

from __future__ import annotations

import pytest

from thinwire import ConfigError
from thinwire.lab.emulate import parse_links
from thinwire.planning.plan.networks import contended, fitted, network_of_all_reduces, network_of_links
from thinwire.planning.simulate import Network, Special
from thinwire.planning.simulate.wires import PAYLOAD_SHARE, Wires


def measured(network: Network, workers: int, sizes: tuple[int, ...] = (4 << 10, 1 << 20)) -> dict[int, float]:
    """What the simulated ring takes."""
    return {size: max(Wires(network, workers).all_reduce([0.0] * workers, size)) for size in sizes}


def test_the_network_that_was_measured_is_found_again() -> None:
    true = Network(bits_per_second=3e8, latency=2e-3)
    found = network_of_all_reduces(measured(true, 5), 5)
    assert found.bits_per_second == pytest.approx(3e8, rel=1e-6) and found.latency == pytest.approx(2e-3, rel=1e-6)


@pytest.mark.parametrize(("workers", "latency"), [(2, 0.05), (4, 3e-4), (4, 0.01), (8, 2e-3)])
def test_a_fit_lowers_the_rate_of_links_to_that_of_gloo(workers: int, latency: float) -> None:
    links = Network(bits_per_second=1e9, latency=1e-4)
    true = Network(bits_per_second=7e8, latency=latency, all_reduce="gloo")
    found = fitted(links, measured(true, workers, (4 << 10, 256 << 10, 4 << 20)), workers)
    assert found.all_reduce == "gloo"
    assert found.latency == pytest.approx(latency, rel=0.02)
    assert found.bits_per_second == pytest.approx(7e8, rel=0.02)


def test_a_fit_has_at_most_a_little_more_than_the_rate_of_the_links() -> None:
    links = Network(bits_per_second=1e9, latency=1e-4)
    found = fitted(links, measured(Network(bits_per_second=2e9, latency=1e-4, all_reduce="gloo"), 4), 4)
    assert found.bits_per_second == 1.05e9


def test_a_fit_is_not_used_where_links_differ_or_nothing_explains_it() -> None:
    uneven = Network(bits_per_second=1e9, specials=(Special((1,), 1e8),))
    assert fitted(uneven, {4096: 1.0, 1 << 20: 2.0}, 4) is uneven
    even = Network(bits_per_second=1e9)
    assert fitted(even, measured(Network(bits_per_second=1e7), 4), 4) is even
    assert fitted(even, {}, 4) is fitted(even, {4096: 1.0, 1 << 20: 1.0}, 4) is even


def test_links_with_delays_take_the_delays_of_both_ways_for_a_round_trip() -> None:
    network = network_of_links(parse_links("100mbit+2ms,1:10mbit+12ms,2:10mbit", 4))
    wires = Wires(network, 4)
    trips = {(a, b): wires.latency(a, b) + wires.latency(b, a) for a, b in ((0, 1), (0, 3), (0, 2), (1, 2))}
    assert trips == pytest.approx({(0, 1): 0.0142, (0, 3): 0.0042, (0, 2): 0.0022, (1, 2): 0.0122})


def test_one_size_is_not_enough() -> None:
    with pytest.raises(ConfigError, match="two sizes"):
        network_of_all_reduces({4096: 0.1}, 4)


def test_what_messages_take_from_computing_is_of_the_time_in_which_they_passed() -> None:
    links = Network(bits_per_second=8e8 / PAYLOAD_SHARE)
    assert contended(links, 1.25, 1e8).contention == pytest.approx(0.2)
    # The link was busy for 0.8 of the time only.
    assert contended(links, 1.25, 8e7).contention == pytest.approx(0.25)
    assert contended(links, 0.98, 1e8).contention == 0.0
    assert contended(links, 100.0, 1e6).contention < 1
