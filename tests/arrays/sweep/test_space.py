# SPDX-License-Identifier: Apache-2.0
"""Search spaces, early stopping, and how many trials fit into memory."""

from __future__ import annotations

import math

import numpy as np

from tests.rules import for_each, refusals
from thinwire.arrays.sweep.space import Choices, Range, Space, parse_domain
from thinwire.arrays.sweep.trials import Halving, Outcome, Trial, partition, ranked


def outcome(number: int, loss: float, steps: int = 10) -> Outcome:
    return Outcome(Trial(number, {}), loss, 0.0, steps)


@for_each(
    [
        ("log:1e-4:1e-1", Range(1e-4, 1e-1, "log")),
        ("0:0.95", Range(0, 0.95)),
        ("linear:0:0.95", Range(0, 0.95)),
        ("whole:8:64", Range(8, 64, "whole")),
        ("16,32, 64", Choices((16, 32, 64))),
        ("sgd,adamw", Choices(("sgd", "adamw"))),
        ("0.1", Choices((0.1,))),
    ],
)
def test_domains_are_read_and_written(case: tuple[str, Range | Choices]) -> None:
    text, domain = case
    assert parse_domain(text) == domain
    assert parse_domain(str(domain)) == domain


test_text_that_is_not_a_domain_is_refused = refusals(
    [
        ("log:0:1", "begins above 0"),
        ("1:0", "must be finite and rise"),
        ("log:a:b", "are numbers"),
        ("cubic:0:1", "is not a range"),
        ("log:1:2:3", "is not a range"),
        ("whole:1.5:2", "must be whole numbers"),
        ("1,1", "is listed twice"),
        ("1,,2", "an empty value"),
        ("0:inf", "must be finite"),
    ],
    parse_domain,
)


def test_a_trial_s_draw_depends_on_its_number_only() -> None:
    space = Space({"lr": Range(1e-4, 1e-1, "log"), "momentum": Range(0, 0.95), "batch_size": Choices((16, 32))})
    assert [space.draw(3, number) for number in range(5)] == [space.draw(3, number) for number in range(5)]
    assert space.draw(3, 0) != space.draw(4, 0)
    assert len({space.draw(3, number)["lr"] for number in range(50)}) == 50


def test_draws_cover_their_domains_evenly() -> None:
    space = Space({"lr": Range(1e-4, 1e-1, "log"), "size": Range(3, 5, "whole"), "kind": Choices(("a", "b"))})
    drawn = [space.draw(0, number) for number in range(600)]
    logs = np.log10([float(each["lr"]) for each in drawn])
    assert logs.min() >= -4 and logs.max() <= -1
    assert abs(logs.mean() + 2.5) < 0.15
    for name, values in (("size", [3, 4, 5]), ("kind", ["a", "b"])):
        counts = [sum(each[name] == value for each in drawn) for value in values]
        assert sum(counts) == 600
        assert min(counts) > 600 / len(values) * 0.8


def test_the_lowest_loss_is_best_and_diverged_trials_come_last() -> None:
    outcomes = [outcome(0, math.nan), outcome(1, 0.5), outcome(2, 0.2), outcome(3, 0.2), outcome(4, math.inf)]
    assert [each.trial.number for each in ranked(outcomes)] == [2, 3, 1, 0, 4]


def test_trials_with_more_steps_rank_before_stopped_ones() -> None:
    assert [each.trial.number for each in ranked([outcome(0, 0.1, 10), outcome(1, 0.3, 30)])] == [1, 0]


def test_rungs_are_apart_by_the_factor_and_end_before_the_sweep_does() -> None:
    assert Halving(first=10, keep=3).rungs(270) == [10, 30, 90]
    assert Halving(first=10, keep=3).rungs(271) == [10, 30, 90, 270]
    assert Halving(first=10).rungs(10) == []


def test_a_third_rounded_up_is_promoted() -> None:
    outcomes = [outcome(number, loss) for number, loss in enumerate([0.4, math.nan, 0.1, 0.3, 0.2, 0.9, 0.8])]
    assert [each.trial.number for each in Halving(first=1).promoted(outcomes)] == [2, 4, 3]


def test_trials_equal_in_what_cannot_be_fused_share_an_array() -> None:
    trials = [Trial(i, {"lr": 0.1 * i, "batch_size": size}) for i, size in enumerate([16, 32, 16, 32, 16])]
    groups = partition(trials, {"lr"})
    assert [[trial.number for trial in group] for group in groups] == [[0, 2, 4], [1, 3]]
