"""Places kept for microbatches on their way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.pipeline.reservations import (
    DISTRUST_S,
    MAX_DISTRUSTED,
    RESERVED_S,
    Reservations,
)


def test_a_place_is_kept_for_who_asked_and_lapses() -> None:
    places = Reservations(2)
    assert places.keep("a", (3, 1), 0.0)
    assert places.count(RESERVED_S - 0.1) == 1
    assert not places.take("b", (3, 1), 1.0), "it is not b's"
    assert places.take("a", (3, 1), RESERVED_S - 0.1)
    assert places.count(RESERVED_S - 0.1) == 0
    assert places.keep("a", (3, 2), 20.0)
    assert places.count(20.0 + RESERVED_S) == 0
    assert not places.take("a", (3, 2), 20.0 + RESERVED_S)


def test_asking_again_does_not_prolong_it() -> None:
    places = Reservations(2)
    for second in range(int(RESERVED_S)):
        assert places.keep("a", (3, 1), float(second))
    assert places.count(RESERVED_S) == 0
    assert not places.keep("a", (3, 1), RESERVED_S), "and who never came is not believed"
    assert places.keep("a", (3, 1), RESERVED_S + DISTRUST_S)


def test_who_comes_late_is_believed_again() -> None:
    places = Reservations(2)
    assert places.keep("a", (3, 1), 0.0)
    assert not places.take("a", (3, 1), RESERVED_S + 5)
    assert places.keep("a", (3, 2), RESERVED_S + 6)


def test_a_round_that_is_over_holds_no_place_and_blames_nobody() -> None:
    places = Reservations(2)
    places.keep("a", (3, 1), 0.0)
    places.keep("a", (4, 1), 0.0)
    places.drop_round(3)
    assert places.count(1.0) == 1
    assert places.take("a", (4, 1), 2.0)
    assert places.keep("a", (4, 2), RESERVED_S + 1)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.floats(0, 5), st.booleans()),
        max_size=60,
    )
)
def test_nobody_has_more_than_may_be_had(asks: list[tuple[str, int, float, bool]]) -> None:
    places, now, given_at = Reservations(2), 0.0, dict[tuple[str, int], float]()
    for caller, microbatch_id, wait_s, takes in asks:
        now += wait_s
        mine = (caller, microbatch_id)
        if takes:
            kept = places.take(caller, (0, microbatch_id), now)
            assert kept == (mine in given_at and now < given_at[mine] + RESERVED_S)
            given_at.pop(mine, None)
        elif not places.has(caller, (0, microbatch_id), now):
            given_at.pop(mine, None)
            if places.keep(caller, (0, microbatch_id), now):
                given_at[mine] = now
        alive = [c for (c, _), at in given_at.items() if now < at + RESERVED_S]
        assert places.count(now) == len(alive)
        assert all(alive.count(c) <= 2 for c in "abc")


def test_only_the_newest_of_a_crowd_are_remembered_as_distrusted() -> None:
    places = Reservations(2)
    for i in range(3 * MAX_DISTRUSTED):
        assert places.keep(f"peer {i}", (0, i), 0.0)
    assert places.count(RESERVED_S) == 0, "all of them lapse together"
    believed = [places.keep(f"peer {i}", (1, i), RESERVED_S) for i in range(3 * MAX_DISTRUSTED)]
    assert believed == [True] * 2 * MAX_DISTRUSTED + [False] * MAX_DISTRUSTED
