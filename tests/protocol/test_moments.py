"""Points in time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.moments import LONG_AGO, NEVER, Deadline, Since, Stalls

MOMENTS = st.floats(min_value=0.0, max_value=1e6)


@given(MOMENTS, MOMENTS, MOMENTS)
def test_a_deadline_is_over_where_nothing_is_left(now: float, seconds: float, later: float) -> None:
    deadline = Deadline.after(now, seconds)
    assert deadline.is_over(later) == (deadline.left_s(later) == 0.0)
    assert deadline.is_over(now) == (now + seconds <= now)


def test_a_deadline_is_over_at_its_moment() -> None:
    deadline = Deadline.after(10.0, 2.0)
    assert [deadline.is_over(t) for t in (10.0, 11.9, 12.0, 13.0)] == [False, False, True, True]
    assert [deadline.left_s(t) for t in (10.0, 11.5, 13.0)] == [2.0, 0.5, 0.0]
    assert not Deadline(NEVER).is_over(1e12)
    assert Deadline(LONG_AGO).is_over(0.0)


@pytest.mark.parametrize(("one", "other", "first"), [(1, 2, 1), (2, 1, 1), (3, 3, 3)])
def test_the_earlier_of_two_deadlines_is_the_first(one: float, other: float, first: float) -> None:
    assert Deadline(one).first(Deadline(other)) == Deadline(first)


def test_what_has_never_been_is_overdue() -> None:
    since = Since()
    assert since.s(5.0) == float("inf")
    assert since.is_older(5.0, 1e9)


def test_what_is_done_each_second_is_due_a_second_after_it_was_done() -> None:
    since = Since()
    due = [since.is_due(t, 1.0) for t in (0.0, 0.5, 0.99, 1.0, 1.5, 3.0, 3.5)]
    assert due == [True, False, False, True, False, True, False]
    assert since.s(3.5) == 0.5
    since.begin(3.5)
    assert [since.is_older(t, 1.0) for t in (3.5, 4.4, 4.5)] == [False, False, True]


def test_more_is_left_of_a_deadline_only_before_its_last_seconds() -> None:
    deadline = Deadline(10.0)
    assert [deadline.has_more_than(2.0, now) for now in (7.0, 8.0, 9.0, 12.0)] == [
        True,
        False,
        False,
        False,
    ]


def test_a_process_has_stood_still_where_it_has_for_longer_than_was_seen() -> None:
    stalls = Stalls(3.0)
    assert [stalls.is_new(s) for s in (3.0, 4.0, 4.0, 9.0, 9.0)] == [
        False,
        True,
        False,
        True,
        False,
    ]
