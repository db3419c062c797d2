"""What a keeper makes of all-reduces: announced to all, ended by members, given up where somebody holds them up."""

from __future__ import annotations

import pytest

from thinwire.quorum.control_messages import Kind, Note
from thinwire.quorum.coordinator import Keeper
from thinwire.quorum.reduction_selector import Planes
from thinwire.quorum.rules import Rule


def here(step: int, *, attempt: int = 0) -> Note:
    return Note(Kind.HERE, step, attempt)


def summing() -> Keeper:
    """A keeper of three ranks, of which the first two are members of an all-reduce."""
    keeper = Keeper(Rule(3, 2), Planes("zeros"))
    keeper.hear(0, here(0), 0.0)
    told = keeper.hear(1, here(0), 0.0)
    assert told == [(rank, Note(Kind.GO, 0, 1, sum=1, members=(0, 1))) for rank in range(3)]
    return keeper


def held(step: int, number: int) -> Note:
    return Note(Kind.HELD, step, 1, sum=number)


def test_an_all_reduce_is_announced_to_everyone_and_ends_the_step_when_members_hold_the_mean() -> None:
    keeper = summing()
    assert keeper.hear(2, held(0, 1), 0.0) == []
    assert keeper.hear(0, held(0, 1), 0.0) == []
    assert keeper.hear(1, held(0, 1), 0.0) == [
        (rank, Note(Kind.CLOSED, 0, 1, sum=1, members=(0, 1))) for rank in (0, 1)
    ]
    assert keeper.hear(2, here(0), 0.0) == [(2, Note(Kind.LATE, 1, 0, sum=1, members=(0, 1)))]


def test_the_next_all_reduce_waits_for_everyone_to_end_the_last_and_letters_do_not() -> None:
    keeper = summing()
    for rank in (0, 1):
        keeper.hear(rank, held(0, 1), 0.0)
    keeper.hear(0, here(1), 0.0)
    assert {note.sum for _, note in keeper.hear(1, here(1), 0.0)} == {0}
    keeper.hear(2, held(0, 1), 0.0)
    for rank in (0, 1):
        keeper.hear(rank, Note(Kind.HELD, 1, 1), 0.0)
    keeper.hear(0, here(2), 0.0)
    assert {note.sum for _, note in keeper.hear(1, here(2), 0.0)} == {2}


def test_an_all_reduce_that_all_members_wait_for_is_given_up_for_letters() -> None:
    keeper = summing()
    mail = [keeper.hear(rank, here(0, attempt=1), now) for now in (1.0, 2.0) for rank in (0, 1)]
    assert mail[:2] == [[], []]
    assert mail[2] == [(rank, Note(Kind.GO, 0, 2, members=(0, 1))) for rank in (0, 1)]
    for rank in (0, 1):
        assert keeper.hear(rank, held(0, 1), 3.0) == []
    assert keeper.step == 0


def test_what_an_all_reduce_before_going_back_has_left_does_not_count() -> None:
    keeper = summing()
    keeper.hear(2, held(0, 1), 0.0)
    keeper.begin(0)
    for rank in (0, 1):
        keeper.hear(rank, here(0), 0.0)
    for rank in (0, 1):
        keeper.hear(rank, held(0, 1), 0.0)
    assert keeper.step == 0


@pytest.mark.parametrize(("summed", "lettered"), [(0.01, 0.02), (0.02, 0.01)])
def test_the_faster_of_two_planes_is_chosen_once_both_were_tried(summed: float, lettered: float) -> None:
    planes, tried = Planes("auto"), list[bool]()
    for turn in range(20):
        tried.append(planes.sums)
        # The first of each is no measure.
        planes.note(1.0 if turn < 2 else summed if planes.sums else lettered, summed=planes.sums)
    assert tried[:12] == [True, False] * 6
    assert set(tried[12:]) == {summed < lettered}


def test_all_reduces_that_are_held_up_again_and_again_are_chosen_no_more() -> None:
    planes = Planes("auto", [0.01] * 6, [0.02] * 6, given_up=2)
    assert planes.sums
    keeper = Keeper(Rule(3, 2), planes)
    for rank in (0, 1):
        keeper.hear(rank, here(0), 0.0)
    for now in (1.0, 2.0):
        for rank in (0, 1):
            keeper.hear(rank, here(0, attempt=1), now)
    assert keeper.attempt == 2
    assert not planes.sums
