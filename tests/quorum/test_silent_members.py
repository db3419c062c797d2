"""Members that fall silent: when the keeper of arrivals leaves them out, and whom it believes."""

from __future__ import annotations

from thinwire.quorum.control_messages import Kind, Note
from thinwire.quorum.coordinator import Keeper
from thinwire.quorum.rules import Rule


def here(step: int, *, attempt: int = 0) -> Note:
    return Note(Kind.HERE, step, attempt)


def under_way(size: int, least: int) -> Keeper:
    """A keeper that has named the first `least` members of step 0, where everyone is here."""
    keeper = Keeper(Rule(size, least))
    for rank in range(size):
        keeper.hear(rank, here(0), 0.0)
    return keeper


def test_a_silent_member_is_left_out_once_most_members_have_complained() -> None:
    keeper = under_way(5, 4)
    assert keeper.hear(0, here(0, attempt=1), 1.0) == []
    assert keeper.hear(2, here(0, attempt=1), 1.0) == []
    again = keeper.hear(3, here(0, attempt=1), 1.0)
    assert again == [(rank, Note(Kind.GO, 0, 2, members=(0, 2, 3, 4))) for rank in (0, 2, 3, 4)]


def test_a_member_that_was_merely_slow_may_come_again() -> None:
    keeper = Keeper(Rule(4, 3))
    for rank in range(3):
        keeper.hear(rank, here(0), 0.0)
    assert [keeper.hear(rank, here(0, attempt=1), 1.0) for rank in (0, 2)] == [[], []]
    assert (keeper.members, list(keeper.here)) == ((), [0, 2])
    again = keeper.hear(1, here(0, attempt=1), 1.1)
    assert again == [(rank, Note(Kind.GO, 0, 2, members=(0, 1, 2))) for rank in (0, 1, 2)]


def test_members_that_hold_the_mean_count_among_those_who_are_heard() -> None:
    keeper = under_way(4, 3)
    keeper.hear(0, Note(Kind.HELD, 0, 1), 0.5)
    assert {note.members for _, note in keeper.hear(1, here(0, attempt=1), 1.0)} == {(0, 1, 3)}


def test_a_member_that_is_left_alone_by_most_must_complain_twice() -> None:
    keeper = under_way(5, 3)
    assert keeper.hear(1, here(0, attempt=1), 1.0) == []
    assert {note.members for _, note in keeper.hear(1, here(0, attempt=1), 2.0)} == {(1, 3, 4)}


def test_who_does_not_know_of_the_attempt_yet_does_not_complain_of_it() -> None:
    keeper = under_way(4, 3)
    for now in range(6):
        for rank in range(3):
            assert keeper.hear(rank, here(0), now) == []
    assert (keeper.attempt, keeper.members, len(keeper.complaints)) == (1, (0, 1, 2), 0)


def test_where_all_members_are_silent_who_else_waits_is_heard() -> None:
    keeper = under_way(2, 1)
    assert keeper.members == (0,)
    for now in range(3):
        assert keeper.hear(1, here(0), now) == []
    assert keeper.hear(1, here(0), 3.0) == [(1, Note(Kind.GO, 0, 2, members=(1,)))]
    keeper = under_way(4, 3)
    keeper.hear(0, here(0, attempt=1), 0.0)
    for now in range(9):
        assert keeper.hear(3, here(0), now) == []
    assert (keeper.attempt, keeper.members) == (1, (0, 1, 2))
