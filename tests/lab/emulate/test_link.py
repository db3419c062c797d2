# SPDX-License-Identifier: Apache-2.0
"""Links: their text, their rules and their errors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import ConfigError
from thinwire.lab.emulate import Link, describe_links, parse_links

LINKS = st.builds(
    Link,
    st.none() | st.integers(10, 10**8).map(lambda kilobits: 1e3 * kilobits),
    st.integers(0, 9_999_999).map(lambda microseconds: microseconds / 1e6),
)


@pytest.mark.parametrize(
    ("text", "bits_per_second", "delay_seconds"),
    [
        ("none", None, 0),
        ("56kbit", 56e3, 0),
        ("100mbit", 1e8, 0),
        ("2.5gbit", 2.5e9, 0),
        ("100Mbit+5ms", 1e8, 0.005),
        ("none+250us", None, 0.00025),
        (" 1gbit + 1s ", 1e9, 1),
    ],
)
def test_a_link_is_read_in_bits_per_second_and_seconds(text, bits_per_second, delay_seconds):
    assert parse_links(text, 2) == (Link(bits_per_second, delay_seconds),) * 2


def test_a_worker_with_an_entry_of_its_own_is_no_default():
    assert parse_links("100mbit,0:10mbit,2:none", 4) == (Link(1e7), Link(1e8), Link(), Link(1e8))


def test_workers_without_an_entry_have_no_limit():
    assert parse_links("1:10mbit+5ms", 2) == (Link(), Link(1e7, 0.005))


@given(st.lists(LINKS, min_size=1, max_size=5).map(tuple))
def test_described_links_are_read_back(links):
    assert parse_links(describe_links(links), len(links)) == links


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fast", ["link 'fast'", "a number and kbit, mbit or gbit", "such as 100mbit"]),
        ("100", ["'100'", "100mbit"]),
        ("100mb", ["'100mb'"]),
        ("-5mbit", ["'-5mbit'"]),
        ("0mbit", ["'0mbit'"]),
        ("", ["link ''"]),
        ("100mbit+soon", ["'soon'", "a number and us, ms or s", "such as 200ms"]),
        ("4:10mbit", ["no worker '4'", "0 to 3"]),
        ("x:10mbit", ["no worker 'x'"]),
        ("10mbit,20mbit", ["twice", "all workers"]),
        ("0:10mbit,0:20mbit", ["twice", "worker 0"]),
        ("1kbit", ["1000", "between"]),
        ("10mbit+11s", ["delay_seconds=11", "10"]),
    ],
)
def test_a_link_that_cannot_be_is_refused_with_value_and_rule(text, words):
    with pytest.raises(ConfigError) as refusal:
        parse_links(text, 4)
    assert all(word in str(refusal.value) for word in words)
