# SPDX-License-Identifier: Apache-2.0
"""The rules that choose the bits of a gradient."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reproductions.dqsgd.weights import error_weights, survivals
from tests.rules import refusals
from thinwire.methods.strategies.gradients.bit_rules import (
    BitBudget,
    BitLedger,
    ErrorBound,
    FixedBits,
    Rule,
    Step,
    skipped_step,
)
from thinwire.methods.strategies.gradients.bits import (
    best_bits,
    contraction,
    error_of,
    fewest_bits,
    levels_of,
)

SQUARES = [10.0 * 0.93**t * (1 + 0.3 * (-1) ** t) for t in range(60)]


def run(rule: Rule, squares: list[float], rates: list[float], *, share: float = 0.25) -> tuple[list[int], BitLedger]:
    """The bits of a run whose rule knows each step's own square, and the last ledger."""
    ledger, chosen = BitLedger(), list[int]()
    for square, rate in zip(squares, rates, strict=True):
        step = Step([square], [1], rate, share)
        bits = rule.choose(ledger, step)
        ledger = rule.settle(ledger, step, bits)
        chosen += bits
    return chosen, ledger


# -- the closed forms --------------------------------------------------------------------------------------------------


def test_a_code_has_as_many_levels_as_its_bits_hold_beside_zero() -> None:
    assert [levels_of(bits) for bits in range(2, 9)] == [1, 3, 7, 15, 31, 63, 127]


def test_errors_survive_by_the_product_of_the_steps_after_them() -> None:
    alphas = [contraction(rate, 2.0, 0.5) for rate in (0.1, 0.2, 0.3)]
    assert alphas[0] == pytest.approx(1 - 2 * 0.5 * 0.1 + 2.0 * 0.5 * 0.01)
    assert survivals(alphas) == pytest.approx([alphas[1] * alphas[2], alphas[2], 1.0])
    assert contraction(0.3, 5.0, 0.0) == 1.0


def test_weights_are_those_of_the_bound() -> None:
    rates, squares = [0.1, 0.2, 0.05], [3.0, 2.0, 7.0]
    found = error_weights(squares, rates, smoothness=2.0, strong_convexity=0.5, share=0.25)
    alphas = [1 - 2 * 0.5 * rate + 2.0 * 0.5 * rate**2 for rate in rates]
    left = [alphas[1] * alphas[2], alphas[2], 1.0]
    assert found == pytest.approx([2.0 * r * r / 8 / 4 * s * a for r, s, a in zip(rates, squares, left, strict=True)])


# -- whole bits --------------------------------------------------------------------------------------------------------


def every(count: int) -> list[tuple[int, ...]]:
    return list(product(range(2, 6), repeat=count))


@given(st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=4), st.floats(1e-3, 10.0))
def test_whole_bits_within_an_error_are_as_few_as_can_be(weights: list[float], error: float) -> None:
    found = fewest_bits(weights, error, most=5)
    fitting = [sum(bits) for bits in every(len(weights)) if error_of(weights, bits) <= error * (1 + 1e-12)]
    assert sum(found) == (min(fitting) if fitting else 5 * len(weights))
    assert not fitting or error_of(weights, found) <= error * (1 + 1e-9)


@given(st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=4), st.integers(0, 24))
def test_whole_bits_within_a_budget_leave_as_little_error_as_can_be(weights: list[float], budget: int) -> None:
    found = best_bits(weights, budget, most=5)
    fitting = [error_of(weights, bits) for bits in every(len(weights)) if sum(bits) <= budget]
    assert sum(found) <= max(budget, 2 * len(weights))
    assert error_of(weights, found) == pytest.approx(min(fitting, default=error_of(weights, [2] * len(weights))))


def test_parts_of_equal_squares_per_entry_share_alike_whatever_their_sizes() -> None:
    assert fewest_bits([100.0, 1.0], 101 / 49, sizes=[100, 1]) == [4, 4]
    assert best_bits([100.0, 1.0], 4 * 101, sizes=[100, 1]) == [4, 4]
    generous = best_bits([100.0, 400.0, 25.0], 3 * 5, sizes=[1, 1, 1])
    assert generous == [5, 6, 4]


def test_parts_of_nothing_get_the_least_and_an_impossible_error_the_most() -> None:
    assert fewest_bits([0.0, 5.0], 5 / 225) == [2, 5]
    assert fewest_bits([1.0, 2.0], 1e-12) == [8, 8]
    assert fewest_bits([1.0], -1.0) == [8]
    assert fewest_bits([], 1.0) == []
    assert best_bits([1.0, 1.0], 0.0) == [2, 2]
    assert best_bits([1.0], 1e9) == [8]


# -- rules over a run --------------------------------------------------------------------------------------------------


RATES = {
    "constant": [0.4] * 60,
    "halved": [0.4] * 30 + [0.2] * 30,
    "decaying": [0.5 / (1 + 0.05 * t) for t in range(60)],
}


@pytest.mark.every_case
@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
@pytest.mark.parametrize("convexity", [0.0, 0.05, 0.3])
def test_the_error_of_a_run_stays_within_its_bound(rates: list[float], convexity: float) -> None:
    weights = error_weights(SQUARES, rates, smoothness=1.0, strong_convexity=convexity, share=0.25)
    error = error_of(weights, [5] * 60)
    chosen, ledger = run(ErrorBound(error, 60, 1.0, convexity, final_lr=min(rates)), SQUARES, rates)
    assert error_of(weights, chosen) <= error * (1 + 1e-9)
    assert ledger.error == pytest.approx(error_of(weights, chosen))
    assert ledger.bits == sum(chosen)
    assert ledger.step == 60


@pytest.mark.every_case
@pytest.mark.parametrize(("convexity", "lr", "steps"), [(1.0, 1.0, 5), (0.9, 1.0, 500)])
def test_errors_that_die_at_once_or_below_the_smallest_number_are_planned_for(
    convexity: float, lr: float, steps: int
) -> None:
    rule, ledger, step = ErrorBound(1e-3, steps, strong_convexity=convexity), BitLedger(), Step([1.0], [100], lr, 1.0)
    chosen: list[int] = []
    for _ in range(steps):
        chosen += (bits := rule.choose(ledger, step))
        ledger = rule.settle(ledger, step, bits)
    assert ledger.error <= 1e-3 and chosen[0] == rule.least < chosen[-1] < rule.most


def test_under_a_bound_bits_fall_with_the_gradient_and_rise_towards_the_end() -> None:
    rule = ErrorBound(1e-3, 50, 1.0, 0.1)
    by_square = [rule.choose(BitLedger(step=10), Step([s], [1], 0.5, 1.0))[0] for s in (1e-4, 1e-2, 1.0, 100.0)]
    assert by_square == sorted(by_square)
    assert by_square[0] < by_square[-1]
    by_time, _ = run(ErrorBound(0.5, 50, 1.0, 0.1), [100.0] * 50, [0.5] * 50)
    assert all(later >= earlier - 1 for earlier, later in pairwise(by_time))
    assert sum(by_time[:10]) < sum(by_time[20:30]) < sum(by_time[40:])


@given(
    st.lists(st.floats(0.0, 1e6), min_size=1, max_size=40),
    st.floats(2.0, 8.0),
    st.floats(0.5, 1.0),
    st.lists(st.integers(1, 1000), min_size=1, max_size=5),
)
def test_a_budget_is_never_overspent(squares: list[float], bits: float, decay: float, sizes: list[int]) -> None:
    rule, ledger = BitBudget(bits, len(squares), decay), BitLedger()
    for square in squares:
        step = Step([square * (i + 1) for i in range(len(sizes))], sizes, 0.1, 1.0)
        chosen = rule.choose(ledger, step)
        assert all(2 <= b <= 8 for b in chosen)
        ledger = rule.settle(ledger, step, chosen)
    assert ledger.bits <= bits * len(squares) * (1 + 1e-9)


def test_a_budget_of_whole_bits_is_spent_to_the_last() -> None:
    chosen, ledger = run(BitBudget(4.0, 60), SQUARES, [0.1] * 60)
    assert ledger.bits == 240
    assert len(set(chosen)) > 1
    early, late = sum(chosen[:30]), sum(chosen[30:])
    assert early > late  # these gradients shrink


def test_a_decaying_past_leaves_bits_for_the_end() -> None:
    chosen, _ = run(BitBudget(4.0, 60, decay=0.95), [1.0] * 60, [0.1] * 60)
    assert sum(chosen) == 240
    assert sum(chosen[:20]) < sum(chosen[40:])


def test_spent_by_a_rule_bits_leave_less_error_than_the_same_at_every_step() -> None:
    squares = [100.0 * 0.99**t for t in range(600)]
    weights = error_weights(squares, [0.1] * 600, smoothness=1.0)
    chosen, _ = run(BitBudget(4.0, 600), squares, [0.1] * 600)
    assert sum(chosen) == 2400
    assert error_of(weights, chosen) < 0.92 * error_of(weights, [4] * 600)


def test_a_run_longer_than_planned_starts_the_plan_again() -> None:
    for rule in (BitBudget(4.0, 20), ErrorBound(1e-3, 20, 1.0, 0.05)):
        once, _ = run(rule, SQUARES[:20], [0.3] * 20)
        twice, ledger = run(rule, SQUARES[:20] * 2, [0.3] * 40)
        assert twice[:20] == once
        assert ledger.bits <= (160 if isinstance(rule, BitBudget) else 8 * 40)
        if isinstance(rule, ErrorBound):
            assert twice[20:] == once


def test_fixed_bits_are_fixed() -> None:
    chosen, ledger = run(FixedBits(3), SQUARES, [0.1] * 60)
    assert chosen == [3] * 60
    assert ledger.bits == 180


def test_a_ledger_comes_back_from_its_numbers() -> None:
    _, ledger = run(ErrorBound(1e-2, 60), SQUARES, [0.1] * 60)
    assert BitLedger.read(ledger.to_tensor()) == ledger
    assert ledger.to_tensor().dtype == torch.float64


def test_a_skipped_step_costs_bits_and_adds_no_error() -> None:
    ledger = BitLedger(3, 12.0, 0.5, 1.0, 0.2)
    after = skipped_step(ledger, Step([float("nan")], [7], 0.1, 1.0), [8])
    assert after == BitLedger(4, 20.0, 0.5, 1.0, 0.2)


test_rules_that_cannot_work_are_refused = refusals(
    [
        (lambda: FixedBits(1), r"bits=1: must lie in 2\.\.8"),
        (lambda: FixedBits(4.5), "bits must be a whole number"),
        (lambda: BitBudget(9.0), r"bits=9.0: must lie in \[2, 8\]"),
        (lambda: BitBudget(4.0, 0), "steps=0: must be at least 1"),
        (lambda: BitBudget(decay=0.0), r"decay=0.0: must lie in \(0, 1\]"),
        (lambda: BitBudget(least=6, most=4), r"most=4: must lie in 6\.\.8"),
        (lambda: ErrorBound(0.0), "error=0.0: must be positive and finite"),
        (lambda: ErrorBound(smoothness=1.0, strong_convexity=2.0), r"strong_convexity=2.0: must lie in \[0, 1.0\]"),
        (lambda: ErrorBound(most=16), "most=16"),
    ]
)


@pytest.mark.every_case
@pytest.mark.parametrize("convexity", [0.05, 0.3])
@pytest.mark.parametrize("remaining", [1, 2, 7, 30])
def test_an_earlier_error_counts_as_what_will_be_left_of_it_at_the_end(remaining: int, convexity: float) -> None:
    lr, steps, now = 0.4, 60, BitLedger(step=60 - remaining)
    survives = (1 - 2 * convexity * lr + convexity * lr**2) ** remaining
    for power in range(60):
        earlier, bound = 0.02, 0.02 * survives + 1e-5 * 1.2**power
        step = Step([1.0], [1], lr, 1.0)
        found = ErrorBound(bound, steps, 1.0, convexity).choose(replace(now, error=earlier), step)
        # As if the bound were smaller by it, and nothing had happened before.
        assert found == ErrorBound(bound - survives * earlier, steps, 1.0, convexity).choose(now, step)
