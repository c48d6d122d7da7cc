"""When a peer needs places at relays, and where it keeps them."""

from __future__ import annotations

from swarmnet.protocol.membership.reachability import (
    DOUBTED_FOR_S,
    DOUBTED_S,
    KEPT_DOUBTS,
    MAX_ACCUSERS,
    MAX_TOLD,
    NUM_RELAYS,
    Doubts,
    RelayPlaces,
    Sight,
    ToldUnreached,
    forwarded_addresses,
    is_reachable,
    possible_relays,
)
from swarmnet.protocol.membership.records import LEFT
from swarmnet.protocol.timing import CONNECT_S, UPKEEP_S
from tests.protocol.making import record

AT = ("/ip4/198.51.100.7/tcp/1",)


MEMBERS = ["x", "y"]


def doubted(*times: float, by: str = "x") -> Doubts:
    doubts = Doubts()
    for now in times:
        doubts.add(by, now)
    return doubts


def test_one_bad_moment_is_no_reason_for_relays() -> None:
    assert not Doubts().are_serious(0.0, MEMBERS)
    assert not doubted(0.0, DOUBTED_S - 1.0).are_serious(DOUBTED_S, MEMBERS)
    assert doubted(0.0, DOUBTED_S).are_serious(DOUBTED_S, MEMBERS)
    two_moments = doubted(0.0, UPKEEP_S + 1.0)
    assert not two_moments.are_serious(UPKEEP_S + 1.0, MEMBERS)


def test_bad_moments_of_many_are_none_of_one() -> None:
    doubts = doubted(0.0)
    doubts.add("y", DOUBTED_S)
    assert not doubts.are_serious(DOUBTED_S, MEMBERS)


def test_relays_are_kept_for_long_after_the_last_doubt_while_the_accuser_stays() -> None:
    doubts = doubted(0.0, DOUBTED_S)
    assert doubts.are_serious(DOUBTED_S, MEMBERS)
    assert doubts.are_serious(DOUBTED_S + DOUBTED_FOR_S, MEMBERS)
    assert not doubts.are_serious(DOUBTED_S + DOUBTED_FOR_S + 1.0, MEMBERS)
    doubts = doubted(0.0, DOUBTED_S)
    assert not doubts.are_serious(DOUBTED_S, ["y"])


def test_only_the_newest_doubts_are_remembered() -> None:
    doubts = doubted(*map(float, range(2 * KEPT_DOUBTS)))
    assert len(doubts) == KEPT_DOUBTS
    for n in range(2 * MAX_ACCUSERS):
        doubts.add(f"liar {n}", 0.0)
    assert len(doubts) <= MAX_ACCUSERS


def test_a_peer_is_told_that_it_cannot_be_reached_now_and_then() -> None:
    told = ToldUnreached()
    assert told.may_tell("x", "a", 0.0)
    assert not told.may_tell("x", "a", CONNECT_S - 0.1)
    assert told.may_tell("x", "b", CONNECT_S - 0.1)
    assert told.may_tell("y", "a", CONNECT_S - 0.1), "nobody speaks in place of another"
    assert told.may_tell("x", "a", CONNECT_S)
    assert sum(told.may_tell("liar", str(n), 0.0) for n in range(999)) == MAX_TOLD


def sight(peer_id: str, host: str, *reached: int, is_outside: bool = True) -> Sight:
    return Sight(peer_id, host, 4001, reached, is_outside)


def test_a_neighbour_is_no_outsider_by_what_it_says() -> None:
    inside = [sight(p, "192.168.1.5", 4001, is_outside=False) for p in "ab"]
    liar = sight("liar", "200.5.5.99", is_outside=False)
    assert is_reachable([*inside, liar])
    assert not is_reachable([*inside, sight("outside", "200.5.5.1")])


def test_one_peer_alone_does_not_say_where_others_dial_this_one() -> None:
    honest = [sight(p, "200.5.5.1", 4001) for p in "ab"]
    liar = sight("liar", "200.5.5.99", 8080)
    assert forwarded_addresses([], [*honest, liar]) == ["/ip4/200.5.5.1/tcp/4001"]


def test_places_are_kept_at_a_few_relays_and_not_asked_for_where_refused() -> None:
    places = RelayPlaces()
    assert places.may_ask("a", 0.0)
    places.refused("a", 0.0)
    assert not places.may_ask("a", UPKEEP_S - 1.0)
    assert places.may_ask("a", UPKEEP_S)
    assert places.granted("b", AT)
    assert not places.granted("b", AT), "it was renewed"
    assert not places.may_ask("b", 0.0)
    assert not places.are_enough
    for i in range(NUM_RELAYS - 1):
        places.granted(f"c-{i}", AT)
    assert places.are_enough
    assert "b" in places
    assert places.circuits("me")[0] == f"{AT[0]}/p2p/b/p2p-circuit/p2p/me"
    assert places.lost("b")
    assert not places.lost("b")
    places.clear()
    assert len(places) == 0


def test_a_relay_can_be_dialled_itself() -> None:
    live = [
        record("me", addresses=AT),
        record("open", addresses=AT),
        record("open/1", addresses=AT),
        record("gone", addresses=AT, state=LEFT),
        record("silent"),
        record("hidden", addresses=("/ip4/198.51.100.7/tcp/1/p2p/x/p2p-circuit/p2p/hidden",)),
    ]
    assert [r.peer_id for r in possible_relays(live, ["me"])] == ["open"]
