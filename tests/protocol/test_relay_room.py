"""A relay stays open to others, whoever holds places there and says nothing."""

from __future__ import annotations

import random

from swarmnet.protocol.relay_room import (
    MAX_GREETING,
    MAX_GREETING_EACH,
    SILENT_CIRCUIT_S,
    GreetingRoom,
    gives_place,
    network_of,
    silent_circuit,
)


def test_a_name_takes_no_more_than_its_part() -> None:
    room: GreetingRoom[int] = GreetingRoom()
    for n in range(MAX_GREETING_EACH):
        assert room.has_room_for("liar")
        assert room.enter(n, "liar") is None
    assert not room.has_room_for("liar")
    assert room.has_room_for("other")
    room.leave(0)
    room.leave(0)
    assert room.has_room_for("liar")


def test_the_oldest_silent_stream_gives_way_and_one_that_spoke_does_not() -> None:
    room: GreetingRoom[int] = GreetingRoom()
    room.enter(-1, "honest")
    room.spoke(-1)
    ended = [room.enter(n, f"liar-{n}") for n in range(3 * MAX_GREETING)]
    assert [e for e in ended if e is not None] == list(range(2 * MAX_GREETING + 1))
    assert len(room) == MAX_GREETING


def test_there_is_room_whatever_is_done() -> None:
    rng = random.Random(3)
    room: GreetingRoom[int] = GreetingRoom()
    inside: set[int] = set()
    for n in range(2000):
        key = rng.choice(sorted(inside)) if inside else 0
        match rng.randrange(4):
            case 0:
                room.leave(key)
                inside.discard(key)
            case 1:
                room.spoke(key)
            case _:
                remote = f"name-{rng.randrange(40)}"
                if room.has_room_for(remote):
                    inside.discard(room.enter(n, remote))  # type: ignore[arg-type]
                    inside.add(n)
        assert len(room) == len(inside) <= MAX_GREETING


def test_only_a_silent_circuit_gives_way() -> None:
    assert silent_circuit({}, 100.0) is None
    heard_at = {"a": 50.0, "b": 20.0, "c": 90.0}
    assert silent_circuit(heard_at, 20.0 + SILENT_CIRCUIT_S - 1) is None
    assert silent_circuit(heard_at, 20.0 + SILENT_CIRCUIT_S) == "b"


def test_a_machine_with_many_names_gives_places_up_to_others() -> None:
    liars = {f"liar-{n}": "200.5.5.99/32" for n in range(62)}
    holders = {"first": "200.5.5.1/32", **liars, "last": "200.5.5.2/32"}
    assert gives_place(holders, "200.5.5.3/32") == "liar-61"
    assert gives_place(holders, "200.5.5.1/32") == "liar-61"
    assert gives_place(holders, "200.5.5.99/32") is None, "it has most of them"
    assert gives_place({"a": "x", "b": "y"}, "z") is None, "all have equal parts"
    assert gives_place({}, "z") is None


def test_an_address_of_ipv6_is_worth_no_more_than_its_network() -> None:
    assert network_of("2a01:4f8::1") == network_of("2a01:4f8::ffff:1") == "2a01:4f8::/64"
    assert network_of("200.5.5.1") != network_of("200.5.5.2")
