"""When a peer needs places at relays, and where it keeps them."""

from __future__ import annotations

from swarmnet.protocol.membership.reachability import (
    DOUBTED_FOR_S,
    DOUBTED_S,
    KEPT_DOUBTS,
    NUM_RELAYS,
    Doubts,
    RelayPlaces,
    ToldUnreached,
    possible_relays,
)
from swarmnet.protocol.membership.records import LEFT
from swarmnet.protocol.timing import CONNECT_S, UPKEEP_S
from tests.protocol.making import record

AT = ("/ip4/198.51.100.7/tcp/1",)


def doubted(*times: float) -> Doubts:
    doubts = Doubts()
    for now in times:
        doubts.add(now)
    return doubts


def test_one_bad_moment_is_no_reason_for_relays() -> None:
    assert not Doubts().are_serious(0.0)
    assert not doubted(0.0, DOUBTED_S - 1.0).are_serious(DOUBTED_S)
    assert doubted(0.0, DOUBTED_S).are_serious(DOUBTED_S)
    assert not doubted(0.0, UPKEEP_S + 1.0).are_serious(UPKEEP_S + 1.0), "these are two moments"


def test_relays_are_kept_for_long_after_the_last_doubt() -> None:
    doubts = doubted(0.0, DOUBTED_S)
    assert doubts.are_serious(DOUBTED_S)
    assert doubts.are_serious(DOUBTED_S + DOUBTED_FOR_S)
    assert not doubts.are_serious(DOUBTED_S + DOUBTED_FOR_S + 1.0)


def test_only_the_newest_doubts_are_remembered() -> None:
    assert len(doubted(*map(float, range(2 * KEPT_DOUBTS)))) == KEPT_DOUBTS


def test_a_peer_is_told_that_it_cannot_be_reached_now_and_then() -> None:
    told = ToldUnreached()
    assert told.may_tell("a", 0.0)
    assert not told.may_tell("a", CONNECT_S - 0.1)
    assert told.may_tell("b", CONNECT_S - 0.1)
    assert told.may_tell("a", CONNECT_S)


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
