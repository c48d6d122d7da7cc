"""Whose records go first where there is no room for all, and whose are forgotten."""

from __future__ import annotations

import random

from swarmnet.protocol.membership.preference import in_order, matters, num_that_fit
from swarmnet.protocol.membership.records import ACTIVE, OBSERVING, Record
from swarmnet.protocol.membership.stranger_room import ROOM_BYTES, SENDER_BYTES, StrangerRoom
from swarmnet.protocol.membership.view import View

RUN = "run"
PART = ROOM_BYTES // 64


def view_of(*records: Record) -> View:
    view = View("own")
    view.merge(Record("own", RUN, 1, 1, state=ACTIVE, stage=0), 0.0)
    for record in records:
        view.merge(record, 0.0)
    return view


def serving(name: str) -> Record:
    return Record(name, RUN, 1, 1, state=ACTIVE, stage=0)


def test_a_peer_matters_that_serves_and_is_reached() -> None:
    looks = Record("looks", RUN, 1, 1, state=OBSERVING)
    view = view_of(serving("a"), serving("b"), serving("c"), looks)
    for machine in ("a", "c", "looks", "nobody"):
        view.detector.opened(machine)
    view.reach.unanswered("c", (1, 1), 0.0)
    assert matters(view, "own", 0.0)
    assert [p for p in ("a", "b", "c", "looks", "nobody") if matters(view, p, 0.0)] == ["a"]
    assert not matters(view, "a", 1e6), "it has fallen silent"


def test_members_come_first_and_all_others_have_their_turn() -> None:
    names = [f"fresh-{i}" for i in range(50)]
    view = view_of(serving("z"), *(Record(n, RUN, 1, 1) for n in names))
    view.detector.opened("z")
    rng, firsts = random.Random(0), set()
    for _ in range(300):
        found = in_order(view, [*names, "z", "own"], rng, 0.0)
        assert found[:2] == ["own", "z"]
        assert sorted(found[2:]) == sorted(names)
        firsts.add(found[2])
    assert len(firsts) > 45


def test_as_many_fit_as_there_is_room_for() -> None:
    assert num_that_fit([5, 5, 5], 10, 99) == 2
    assert num_that_fit([5, 5, 5], 100, 2) == 2
    assert num_that_fit([5, 5, 5], 100, 99) == 3
    assert num_that_fit([], 10, 99) == 0


def test_the_longest_without_a_channel_go_first_and_of_equals_the_newest() -> None:
    view, room = View("own"), StrangerRoom()
    view.detector.opened("met")
    room.put("met", 2 * PART, "s0")
    room.put("long", 2 * PART, "s1")
    for n in range(60):
        room.put(f"p{n:02}", PART, f"s{n}")
        assert room.make_room(f"s{n}", view) == []
    room.put("new", PART, "new")
    gone = room.make_room("new", view)
    assert gone[:2] == ["long", "new"]
    assert gone[2] == "p59"
    assert "met" in room
    assert "p00" in room
    assert room.num_bytes <= 0.875 * ROOM_BYTES
    assert all(p not in room for p in gone)


def test_one_sender_has_less_than_all() -> None:
    view, room, part = View("own"), StrangerRoom(), SENDER_BYTES // 10
    room.put("other", 5 * part, "other")
    for n in range(10):
        room.put(f"p{n}", part, "flood")
        assert room.make_room("flood", view) == []
    room.put("p10", part, "flood")
    assert room.make_room("flood", view) == ["p10", "p9", "p8"]
    assert "other" in room


def test_what_is_dropped_or_replaced_takes_nothing() -> None:
    room = StrangerRoom()
    for num_bytes in (10, 20):
        room.put("a", num_bytes, "s")
    assert room.num_bytes == 20
    for _ in range(2):
        room.drop("a")
    assert room.num_bytes == 0
