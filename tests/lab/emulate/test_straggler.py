# SPDX-License-Identifier: Apache-2.0
"""Slow workers: their text, their draws, their pauses."""

import pytest

from tests.rules import for_each
from thinwire.errors import ConfigError
from thinwire.lab.emulate import Straggler, parse_stragglers, straggler_environment


def test_slow_and_stall_go_to_the_workers_they_name():
    slow, stalled, both = parse_stragglers("0:3x,2:1.5x", "0.1:1s,1:0.15:200ms", workers=3, seed=7)
    assert slow == Straggler(3, 0.1, 1, seed=7, rank=0)
    assert stalled == Straggler(1, 0.15, 0.2, seed=7, rank=1)
    assert both == Straggler(1.5, 0.1, 1, seed=7, rank=2)


def test_a_workers_own_entry_wins_over_that_for_all():
    assert [one.factor for one in parse_stragglers("1:4x,2x", None, workers=3)] == [2, 4, 2]


def test_what_is_asked_reaches_the_worker_through_its_environment():
    environment = straggler_environment("2:3x", "0.15:200ms", seed=5) | {"RANK": "2", "WORLD_SIZE": "4"}
    assert Straggler.from_environment(environment) == Straggler(3, 0.15, 0.2, seed=5, rank=2)


def test_an_environment_that_asks_nothing_means_no_delay():
    assert Straggler.from_environment({}) == Straggler()
    assert Straggler().pause(0, 10.0) == 0


def test_stalls_depend_on_seed_rank_and_step_alone():
    def stalls(seed, rank):
        worker = Straggler(stall_probability=0.5, stall_seconds=1, seed=seed, rank=rank)
        return [worker.stall(step) for step in range(64)]

    assert stalls(1, 2) == stalls(1, 2)
    assert stalls(1, 2) != stalls(1, 3)
    assert stalls(1, 2) != stalls(2, 2)


def test_stalls_are_as_frequent_as_asked():
    worker = Straggler(stall_probability=0.15, stall_seconds=1)
    assert 0.13 < sum(worker.stall(step) for step in range(4000)) / 4000 < 0.17


def test_a_pause_is_what_is_missing_to_the_factor_and_the_stall():
    worker = Straggler(factor=3, stall_probability=1, stall_seconds=0.002)
    assert worker.pause(0, 0.001) == pytest.approx(0.004)


@for_each(
    [
        ("fast", None, ["slow 'fast'", "RANK:FACTORx", "2:3x"]),
        ("2:3", None, ["'3'", "2:3x"]),
        ("2:0.5x", None, ["'0.5x'", "FACTOR >= 1"]),
        ("4:3x", None, ["no worker '4'", "0 to 3"]),
        ("2:3x,2:4x", None, ["slow '2:3x,2:4x'", "has worker 2 twice"]),
        ("3x,1:4x,2x", None, ["has all workers twice"]),
        (None, "1:0.5:2s,1:0.1:1s", ["has worker 1 twice"]),
        (None, "often", ["stall 'often'", "PROBABILITY:DURATION"]),
        (None, "1.5:200ms", ["'1.5:200ms'", "PROBABILITY 0 to 1"]),
        (None, "0.1:long", ["'long'", "us, ms or s"]),
        (None, "9:0.1:200ms", ["no worker '9'"]),
    ],
)
def test_a_straggler_that_cannot_be_is_refused_with_value_and_rule(case):
    slow, stall, words = case
    with pytest.raises(ConfigError) as refusal:
        parse_stragglers(slow, stall, workers=4)
    assert all(word in str(refusal.value) for word in words)


@for_each([{"factor": 0.5}, {"stall_probability": 2}, {"stall_seconds": -1}])
def test_values_out_of_range_are_refused_by_name(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        Straggler(**values)


def test_a_rank_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match="RANK='one'"):
        Straggler.from_environment({"RANK": "one"})
