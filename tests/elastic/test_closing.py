# SPDX-License-Identifier: Apache-2.0
"""Rounds close once, with a quorum and a grace window; no work counts twice and none is forgotten."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.oracles.late import replay
from tests.rules import refusals
from thinwire.elastic.closing import Closer, CloseRule, Closing, Contribution, Phase, discount, owner
from thinwire.planning.plan.late import Fleet, simulate


class Record:
    """A write-once record that all workers share."""

    def __init__(self) -> None:
        self.closings: list[Closing] = []

    def propose(self, closing: Closing) -> None:
        if closing.round == len(self.closings):
            self.closings.append(closing)


def run_events(seed: int, size: int, rule: CloseRule, events: int = 300) -> tuple[Record, set[tuple[str, int]], int]:
    """Random orders: workers send, hear of each other late, are lost and join; several may think that they own a round.

    Returns:
        The record, what was sent by workers, and how many proposals there were.
    """
    draw = random.Random(seed)
    names = [f"w{i}" for i in range(size)]
    record, now, proposals = Record(), 0.0, 0
    closers = {name: Closer(rule, name, names, now=0.0) for name in names}
    messages: list[tuple[str, Contribution]] = []
    sent: set[tuple[str, int]] = set()
    known: list[Contribution] = []
    for _ in range(events):
        now += draw.random()
        alive = list(closers)
        name = draw.choice(alive)
        kind = draw.choice(["send", "send", "hear", "hear", "hear", "propose", "propose", "apply", "lose", "join"])
        if kind == "send" and (name, closers[name].round) not in sent:
            contribution = Contribution(closers[name].round, name, draw.choice([1.0, 2.0, 5.0]))
            sent.add((name, contribution.started))
            known.append(contribution)
            messages += [(other, contribution) for other in alive for _ in range(draw.choice([1, 1, 2]))]
        elif kind == "hear" and messages:
            to, contribution = messages.pop(draw.randrange(len(messages)))
            if to in closers:
                closers[to].arrive(contribution, seconds=draw.random())
        elif kind == "propose" and (closing := closers[name].propose(now)) is not None:
            proposals += 1
            record.propose(closing)
        elif kind == "apply" and closers[name].round < len(record.closings):
            closers[name].apply(record.closings[closers[name].round], now)
        elif kind == "lose" and len(closers) > 2 and draw.random() < 0.3:
            del closers[name]
            messages = [each for each in messages if each[0] != name]
            # Others hear of it at different times.
            for other in draw.sample(list(closers), draw.randint(0, len(closers))):
                closers[other].lose(name)
        elif kind == "join" and draw.random() < 0.2:
            new = f"w{len(names)}"
            names.append(new)
            closers[new] = Closer(rule, new, [*closers, new], now=now)
            for closing in record.closings:
                closers[new].apply(closing, now)
            for contribution in known:  # a new worker finds in the store what was sent before
                closers[new].arrive(contribution, seconds=1.0)
            for other in closers.values():
                other.join(new)
    # In the end all hear of everything, and rounds close until nothing waits.
    for to, contribution in messages:
        if to in closers:
            closers[to].arrive(contribution, seconds=1.0)
    for _ in range(4 * len(names) + 50):
        now += 100.0
        for closer in closers.values():
            for gone in set(closer.workers) - set(closers):
                closer.lose(gone)
            while closer.round < len(record.closings):
                closer.apply(record.closings[closer.round], now)
            contribution = Contribution(closer.round, closer.own, 1.0)
            if (closer.own, closer.round) not in sent:
                sent.add((closer.own, closer.round))
                for other in closers.values():
                    other.arrive(contribution, seconds=1.0)
        for closer in closers.values():
            if (closing := closer.propose(now)) is not None:
                record.propose(closing)
    return record, sent, proposals


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(2, 6), st.sampled_from([0.3, 0.5, 0.75, 1.0]))
def test_each_round_closes_once_and_takes_each_contribution_once(seed: int, size: int, quorum: float) -> None:
    record, sent, _ = run_events(seed, size, CloseRule(quorum=quorum))
    assert [closing.round for closing in record.closings] == list(range(len(record.closings)))
    assert len(record.closings) > 10  # the end phase closes a round each time: nobody waits forever
    taken = Counter((each.worker, each.started) for closing in record.closings for each in closing.contributions)
    assert set(taken.values()) == {1}
    assert set(taken) <= sent
    for closing in record.closings:
        assert closing.contributions == tuple(sorted(closing.contributions))
        assert all(each.started <= closing.round for each in closing.contributions)
        assert sum(closing.weights("full").values()) == pytest.approx(1.0)


def test_a_round_waits_for_its_quorum_and_then_for_the_usual_time() -> None:
    closer = Closer(CloseRule(quorum=0.5, deviations=3.0), owner(0, "abcd"), "abcd", now=0.0)
    for number in range(3):  # three rounds of equal workers: a contribution takes one second
        closer.own = owner(number, "abcd")
        for name in "abcd":
            closer.arrive(Contribution(number, name, 1.0), seconds=1.0)
        closing = closer.propose(now=float(number + 1))
        assert closing is not None
        closer.apply(closing, now=float(number + 1))
    closer.own = owner(3, "ab")  # the owner is one of the workers that wait
    closer.arrive(Contribution(3, "a", 1.0), seconds=1.0)
    assert closer.seconds_to_wait(3.5) is None  # one of four
    closer.arrive(Contribution(3, "b", 1.0), seconds=1.0)
    assert closer.seconds_to_wait(4.0) == pytest.approx(0.02)  # 1.02 seconds from the last closing
    assert closer.propose(now=4.0) is None
    assert closer.propose(now=4.25) == Closing(3, (Contribution(3, "a", 1.0), Contribution(3, "b", 1.0)))
    closer.arrive(Contribution(3, "c", 1.0), seconds=1.0)
    closer.arrive(Contribution(3, "d", 1.0), seconds=1.0)
    assert closer.seconds_to_wait(4.0) == 0.0  # all have arrived


def test_a_round_may_need_tokens_and_the_next_worker_takes_over() -> None:
    first = owner(0, "abc")
    second = owner(0, set("abc") - {first})
    closer = Closer(CloseRule(quorum=0.3, tokens=10.0), second, "abc", now=0.0)
    closer.arrive(Contribution(0, second, 6.0), seconds=1.0)
    assert closer.seconds_to_wait(9.0) is None
    closer.arrive(Contribution(0, first, 5.0), seconds=1.0)
    assert closer.seconds_to_wait(9.0) == 0.0 and closer.propose(9.0) is None
    closer.lose(first)
    closing = closer.propose(9.0)
    assert closing is not None and len(closing.contributions) == 2  # what the lost worker has sent counts


def test_ages_discount_weights_as_in_the_paper() -> None:
    assert [discount(age, "discounted") for age in (0, 3, 8)] == [1.0, 0.5, pytest.approx(1 / 3)]
    assert [discount(age, "full") for age in (0, 5)] == [1.0, 1.0]
    assert [discount(age, "off") for age in (0, 1)] == [1.0, 0.0]


@pytest.mark.parametrize("late", ["off", "discounted", "full"])
@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_arrivals_equals_the_oracle(late: str, coded: bool, seed: int) -> None:
    """Closings and their weights, applied to displacements as workers send them; error feedback keeps the rest."""
    record, _, _ = run_events(seed, 4, CloseRule(quorum=0.5), events=120)
    targets = torch.randn(1000, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    start, rate = torch.zeros(5, dtype=torch.float64), 0.7

    def displacement(worker: int, started: int, point: Tensor) -> Tensor:
        return 0.3 * (targets[worker] + 0.1 * started - point)

    def code(x: Tensor) -> Tensor:
        return (8 * x).round() / 8

    # A worker compresses when it sends; whatever becomes of the message, its error stays with the worker.
    points, errors = [start], dict[str, Tensor]()
    for closing in record.closings:
        step = torch.zeros_like(start)
        for each, weight in closing.weights(late).items():  # type: ignore[arg-type]
            message = displacement(int(each.worker[1:]), each.started, points[each.started])
            if coded:
                message = message + errors.get(each.worker, 0.0)
                errors[each.worker] = message - code(message)
                message = code(message)
            step += weight * message
        points.append(points[-1] + rate * step)
    rounds = [
        [(int(each.worker[1:]), each.started, each.tokens) for each in closing.contributions]
        for closing in record.closings
    ]
    exponent = {"off": None, "discounted": 0.5, "full": 0.0}[late]
    found = replay(displacement, start, rounds, rate=rate, exponent=exponent, code=code if coded else None)
    assert torch.allclose(points[-1], found, atol=1e-12)


test_what_is_wrong_is_refused = refusals(
    [
        (lambda: CloseRule(quorum=0.0), r"quorum=0.0: must lie in \(0, 1\]"),
        (lambda: CloseRule(tokens=-1.0), "tokens=-1.0: must be finite"),
        (lambda: CloseRule(deviations=-1.0), "deviations=-1.0: must be finite"),
        (
            lambda: Closer(CloseRule(), "a", "a", now=0.0).apply(Closing(2, ()), 0.0),
            "Apply those of the rounds between",
        ),
    ]
)


def test_one_slow_worker_of_four_costs_little_and_its_work_counts() -> None:
    fleet = Fleet(speeds=(1.0, 1.0, 1.0, 5.0))
    waiting = simulate(fleet, CloseRule(quorum=1.0), rounds=100)
    quorum = simulate(fleet, CloseRule(quorum=0.5), rounds=100)
    assert waiting.goodput < 0.6
    assert quorum.goodput > 0.93
    assert quorum.dropped == 0 and 3 <= quorum.oldest <= 5


@pytest.mark.parametrize("size", [64, 1024])
def test_large_fleets_with_losses_keep_closing_rounds(size: int) -> None:
    fleet = Fleet.drawn(size, seed=1, failure_seconds=30.0)
    found = simulate(fleet, CloseRule(quorum=0.75), rounds=12)
    assert found.rounds == 12
    assert found.goodput > 0.6
    assert found.dropped == 0


def test_a_round_takes_only_work_on_its_fragment() -> None:
    closer = Closer(CloseRule(quorum=0.5), "a", ["a", "b"], now=0.0, fragments=2)
    early = Contribution(1, "b", 4.0, (0,))
    closer.arrive(early, seconds=1.0)
    assert closer.seconds_to_wait(1.0) is None and closer.missing() == ["a", "b"]
    own = Contribution(0, "a", 4.0, (1,))
    closer.arrive(own, seconds=1.0)
    closing = closer.propose(now=1.0)
    assert closing == Closing(0, (own,))
    closer.apply(closing, now=1.0)
    assert closer.missing() == ["a"] and list(closer.waiting.values()) == [early]
    late = Closing(5, (early, Contribution(5, "a", 4.0, (4,))))
    assert [each.age(5) for each in late.contributions] == [2, 0]
    assert late.weights()[early] == pytest.approx(3**-0.5 / (1 + 3**-0.5))
    assert Closing.read(5, late.content()) == late


def test_a_worker_that_was_late_once_is_in_time_again() -> None:
    fleets = [Fleet([1.0] * 12, stop_seconds=20.0, seed=seed) for seed in range(4)]
    assert max(simulate(fleet, CloseRule(), rounds=200).mean_age for fleet in fleets) < 0.1


def test_a_worker_that_is_slow_by_itself_takes_whole_rounds() -> None:
    phase = Phase(16)
    phase.record_step(1.0)
    assert [phase.end(seconds=20.0, rounds=1, in_time=True) for _ in range(8)] == [0] * 8
    for _ in range(8):
        phase.record_step(2.0)
    assert phase.end(seconds=32.0, rounds=1, in_time=False) == 0
    phase.record_step(1.0)
    assert phase.end(seconds=24.0, rounds=1, in_time=False) == 12  # 12 of 20 seconds before, and 4 more
    assert phase.end(seconds=23.0, rounds=1, in_time=False) == 0  # too few steps are left
    assert phase.end(seconds=20.0, rounds=1, in_time=True) == 0


def test_a_worker_that_joins_in_the_middle_of_a_round_ends_it_with_the_others() -> None:
    assert Phase(16).join(elapsed=5.0, interval=20.0) == 4
    assert Phase(16).join(elapsed=5.0, interval=None) == 0


def test_the_grace_window_has_room_for_transfers_and_for_rounds_that_vary() -> None:
    def window(durations: Sequence[float], late: float) -> float:
        closer = Closer(CloseRule(quorum=0.5), "a", ["a", "b"], now=0.0)
        for number, seconds in enumerate(durations):
            for name in "ab":
                closer.arrive(Contribution(number, name, 1.0), seconds, 10.0 * number + seconds + late)
            closer.apply(Closing(number, tuple(sorted(closer.waiting.values()))), 10.0 * (number + 1))
        closer.arrive(Contribution(len(durations), "a", 1.0), seconds=1.0)
        found = closer.seconds_to_wait(10.0 * len(durations))
        assert found is not None
        return found

    assert window([1.0] * 8, 0.0) == pytest.approx(1.02)
    assert window([1.0] * 8, 0.5) == pytest.approx(1.53)
    assert window([0.9, 1.1] * 4, 0.0) == pytest.approx(1.3)
    assert window([0.5, 1.5] * 4, 0.0) == pytest.approx(1.5)
