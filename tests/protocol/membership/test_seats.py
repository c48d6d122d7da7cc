from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import ProtocolViolation
from swarmnet.identity import verify
from swarmnet.protocol.membership.assignment import (
    Move,
    choose_stage,
    is_worth_it,
    propose_move,
)
from swarmnet.protocol.membership.peer_ids import MAX_SEATS, machine_of, seat_id, split_seat
from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, Record
from swarmnet.protocol.membership.seats import room_for
from swarmnet.protocol.membership.view import View
from tests.protocol.making import record
from tests.transport.streams import identity

GB = 1e9


def view_of(own_peer_id: str, *found: Record) -> View:
    view = View(own_peer_id)
    for r in found:
        view.merge(r, 0.0)
    return view


@given(st.integers(0, MAX_SEATS - 1))
def test_a_seat_has_one_name(seat: int) -> None:
    peer_id = seat_id("machine", seat)
    assert split_seat(peer_id) == ("machine", seat)
    assert machine_of(peer_id) == "machine"


@given(st.text(alphabet="0123456789 +-_./x\u0663", max_size=5))
def test_no_other_text_is_a_seat(text: str) -> None:
    try:
        machine, seat = split_seat(f"machine/{text}")
    except ProtocolViolation:
        return
    assert seat_id(machine, seat) == f"machine/{text}"


def test_one_key_signs_for_all_seats_of_its_machine() -> None:
    key = identity(1)
    signature = key.sign(b"record")
    assert verify(key.peer_id, b"record", signature)
    assert verify(f"{key.peer_id}/3", b"record", signature)
    for wrong in (f"{key.peer_id}/0", f"{key.peer_id}/03", f"{key.peer_id}/64", key.peer_id + "/"):
        assert not verify(wrong, b"record", signature)
    assert not verify(f"{identity(2).peer_id}/3", b"record", signature)


# -- which stage ---------------------------------------------------------------------------------


def test_a_machine_serves_no_stage_twice() -> None:
    view = view_of("m/1", record("m", stage=0, samples_per_s=1.0), record("b", stage=1))
    rng = random.Random(0)
    view.merge(record("b", 1, stage=1, samples_per_s=50.0), 0.0)
    assert {choose_stage(view, 2, 0.0, rng) for _ in range(20)} == {1}


def test_neighbouring_stages_come_first_among_equals() -> None:
    view = view_of("m/1", record("m", stage=3, state=JOINING))
    rng = random.Random(0)
    assert {choose_stage(view, 6, 0.0, rng) for _ in range(40)} == {2, 4}


def test_a_seat_that_leaves_is_no_obstacle() -> None:
    view = view_of("m/1", record("m", stage=0, state=LEAVING), record("b", stage=1))
    assert choose_stage(view, 2, 0.0, random.Random(0)) == 0


@pytest.mark.parametrize("state", [ACTIVE, LEAVING])
def test_a_seat_is_where_it_moves_to(state: str) -> None:
    crowd = [record(p, stage=0, samples_per_s=1.0) for p in "abc"]
    moving = record("m", stage=0, samples_per_s=1.0, state=state, moving_to=1)
    view = view_of("m/1", *crowd, moving, record("d", stage=2))
    assert choose_stage(view, 3, 0.0, random.Random(0)) != 1
    late = view_of("m", *crowd, moving, record("m/1", stage=1, state=JOINING))
    assert not is_worth_it(late, 2, 0.0, Move("m", 0, 1, 1.0))


def test_no_move_brings_a_machine_to_a_stage_of_its_own() -> None:
    crowd = [record(f"p{i}", stage=0, samples_per_s=1.0) for i in range(3)]
    seat = record("m", stage=0, samples_per_s=9.0)
    beside = record("m/1", stage=1, samples_per_s=0.5)
    move = propose_move(view_of("x", *crowd, seat, beside), 2, 0.0, margin=0.1)
    assert move is not None
    assert machine_of(move.peer_id) != "m"
    moved = propose_move(
        view_of("x", *crowd, seat, record("q", stage=1, samples_per_s=0.5)), 2, 0.0, margin=0.1
    )
    assert moved is not None
    assert moved.peer_id == "m"


# -- how many ------------------------------------------------------------------------------------


def test_memory_is_the_bound() -> None:
    alone = [[], [], [], []]
    assert room_for([1 * GB] * 4, 100 * GB, 5.0, alone).num_seats == 4
    assert room_for([1 * GB] * 4, 3 * GB, 5.0, alone).num_seats == 2
    assert room_for([1 * GB] * 4, 0.1 * GB, 5.0, alone).num_seats == 1


def test_what_is_free_now_bounds_the_stages_to_come() -> None:
    def seats(num_here: int, left: float) -> int:
        return room_for([GB] * 9, 6 * GB, 5.0, [[]] * 9, num_here, left).num_seats

    assert [seats(k, (6 - k) * GB) for k in range(5)] == [4] * 5, "as before the first was built"
    assert seats(2, 0.5 * GB) == 2, "others have taken the rest"
    assert seats(2, 1.5 * GB) == 3
    assert seats(2, 50 * GB) == 4


def test_a_fast_machine_serves_more_and_an_ordinary_one_does_not() -> None:
    others = [[2.0, 2.0], [2.0], [2.0]]
    assert room_for([GB] * 3, 100 * GB, 2.1, others).num_seats == 1
    assert room_for([GB] * 3, 100 * GB, 4.5, others).num_seats == 2
    assert room_for([GB] * 3, 100 * GB, 900.0, others).num_seats == 3
    assert room_for([GB] * 3, 100 * GB, 0.0, others).num_seats == 1


@given(
    st.lists(st.floats(0, 1e12), min_size=1, max_size=8),
    st.floats(0, 1e12),
    st.floats(0, 1e6),
    st.data(),
)
def test_there_is_always_at_least_one_and_never_more_than_stages(
    stages: list[float], free: float, speed: float, data: st.DataObject
) -> None:
    rates = [data.draw(st.lists(st.floats(0, 1e6), max_size=3)) for _ in stages]
    room = room_for(stages, free, speed, rates)
    assert 1 <= room.num_seats <= len(stages)
    assert room.num_seats == 1 or room.num_seats * max(stages) <= free


@pytest.mark.parametrize("uncovered", [0, 1, 2])
def test_stages_without_anybody_are_taken(uncovered: int) -> None:
    rates = [[] if k < uncovered else [3.0] for k in range(3)]
    assert room_for([GB] * 3, 100 * GB, 3.0, rates).num_seats == max(1, uncovered)
