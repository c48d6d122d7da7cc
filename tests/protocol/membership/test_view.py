from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.membership import view as view_module
from swarmnet.protocol.membership.failure_detector import ALIVE, DEAD
from swarmnet.protocol.membership.reach import MAX_STAMP_LEAD
from swarmnet.protocol.membership.records import (
    ACTIVE,
    JOINING,
    LEAVING,
    LEFT,
    OBSERVING,
    Record,
)
from swarmnet.protocol.membership.view import View
from tests.protocol.making import counted, record

records = st.builds(
    record,
    st.sampled_from("abcd"),
    st.integers(0, 5),
    incarnation=st.integers(1, 3),
    stage=st.just(0),
)


def dedupe(found: list[Record]) -> list[Record]:
    """One record a stamp, as a signer makes them; the stage follows from the stamp."""
    return [replace(r, stage=(r.version + r.incarnation) % 3) for r in found]


@given(st.lists(records, max_size=30), st.randoms(use_true_random=False))
def test_views_merge_to_the_same_whatever_the_order(found: list[Record], rng: object) -> None:
    found = dedupe(found)
    shuffled = list(found)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = View("a"), View("b")
    for r in found:
        one.merge(r, 0.0)
    for r in shuffled + found:
        other.merge(r, 1.0)
    assert one.records() == other.records()
    for r in one.records():
        assert r.stamp == max(x.stamp for x in found if x.peer_id == r.peer_id)
        assert r in one.members(r.stage, 0.0)
    assert sum(len(one.members(k, 0.0)) for k in range(3)) == len(one)


@given(st.lists(records, max_size=20), st.lists(records, max_size=20))
def test_one_swap_of_digests_makes_two_views_equal(
    mine: list[Record], theirs: list[Record]
) -> None:
    one, other = View("a"), View("b")
    for r in dedupe(mine):
        one.merge(r, 0.0)
    for r in dedupe(theirs):
        other.merge(r, 0.0)
    wanted = other.digest.wanted_from(one.digest.stamps())
    sent = one.newer_than(other.digest.stamps())
    assert wanted == [r.peer_id for r in sent]
    for r in other.newer_than(one.digest.stamps()):
        one.merge(r, 0.0)
    for r in sent:
        other.merge(r, 0.0)
    assert one.digest.stamps() == other.digest.stamps()


def test_merge_says_what_is_news() -> None:
    view = View("me")
    assert view.merge(record("a", 3), 0.0)
    assert not view.merge(record("a", 3), 0.0)
    assert not view.merge(record("a", 2), 0.0)
    assert view.merge(record("a", 0, incarnation=2), 0.0)
    assert not view.merge(record("a", 9), 0.0)
    assert view.get("b") is None


def test_a_peer_is_live_while_its_stamp_advances() -> None:
    view = View("me", silence_s=10.0)
    view.merge(record("me"), 0.0)
    view.merge(record("a", 1), 0.0)
    assert view.is_live("a", 10.0)
    assert not view.is_live("a", 10.1)
    view.merge(record("a", 1), 10.0)
    assert not view.is_live("a", 10.1)
    view.merge(record("a", 2), 10.0)
    assert view.is_live("a", 20.0)
    view.set_silence(5.0)
    assert not view.is_live("a", 20.0)
    assert [r.peer_id for r in view.live(1e6)] == ["me"]
    assert not view.is_live("stranger", 0.0)


def test_who_serves_a_stage() -> None:
    view = View("me")
    states = {"e": ACTIVE, "d": JOINING, "c": LEAVING, "b": LEFT, "a": OBSERVING}
    for peer_id, state in states.items():
        view.merge(record(peer_id, state=state, stage=1), 0.0)
    assert [r.peer_id for r in view.replicas(1, 0.0)] == ["e"]
    assert [r.peer_id for r in view.members(1, 0.0)] == ["c", "d", "e"]
    assert [r.peer_id for r in view.live(0.0)] == ["a", "c", "d", "e"]
    view.merge(record("e", 1, stage=2), 0.0)
    assert view.replicas(1, 0.0) == []
    assert [r.peer_id for r in view.replicas(2, 0.0)] == ["e"]
    assert view.replicas(7, 0.0) == []


def test_a_lost_peer_is_not_live_until_there_is_news_of_it() -> None:
    view = View("me")
    view.merge(record("a", 5), 0.0)
    view.reach.unanswered("a", (1, 5), 0.0)
    assert not view.is_live("a", 0.0)
    assert view.detector.suspicions() == [("a", (1, 5))]
    view.merge(record("a", 6), 0.0)
    assert view.detector.suspicions() == []
    assert not view.reaches("a", 0.0)
    assert view.reach.state_of("a", 0.0) is DEAD
    view.reach.answered("a", 1.0)
    assert view.is_live("a", 1.0)
    assert view.reaches("a", 1.0)
    assert view.reach.state_of("a", 1.0) is ALIVE


def test_for_how_long_a_peer_has_been_gone() -> None:
    view = View("me", silence_s=10.0)
    assert view.gone_s("a", 0.0) == math.inf
    view.merge(record("a", 5), 0.0)
    assert view.gone_s("a", 9.0) == 0.0
    assert view.gone_s("a", 12.0) == 2.0  # by its silence
    view.reach.unanswered("a", (1, 5), 4.0)
    view.reach.unanswered("a", (1, 6), 5.0)  # the same stall
    assert view.gone_s("a", 12.0) == 8.0
    view.merge(record("a", 7), 13.0)
    view.reach.answered("a", 13.0)
    assert view.gone_s("a", 13.0) == 0.0
    view.reach.unanswered("a", (1, 7), 20.0)
    assert view.gone_s("a", 21.0) == 1.0
    view.merge(record("a", 8, state=LEFT), 22.0)
    assert view.gone_s("a", 22.0) == math.inf


def test_who_has_stood_still_itself_counts_nobody_as_silent_for_that() -> None:
    """Whoever is asked first after the stall knows of it."""
    for ask in (
        lambda v: v.is_live("a", 30.0),
        lambda v: [r.peer_id for r in v.live(30.0)] == ["a"],
        lambda v: v.reach.state_of("a", 30.0) is ALIVE,
        lambda v: v.reaches("a", 30.0),
    ):
        view = View("me", silence_s=10.0)
        view.merge(record("a", 5), 0.0)
        assert [r.peer_id for r in view.live(4.0)] == ["a"]
        view.detector.clock.tick(4.5)
        assert ask(view)
        view.detector.clock.tick(35.5)
        assert not view.is_live("a", 36.0)


def test_a_suspicion_may_overtake_the_record() -> None:
    view = View("me")
    view.merge(record("a", 5), 0.0)
    view.reach.unanswered("a", (1, 5), 0.0)
    view.reach.suspected_by_another("a", (1, 7), 0.0)
    view.merge(record("a", 7), 1.0)
    assert view.detector.is_suspected("a")
    view.merge(record("a", 8), 1.0)
    assert not view.detector.is_suspected("a")


def test_a_lie_about_the_far_future_does_not_silence_a_peer_for_good() -> None:
    view = View("me")
    view.merge(record("a", 5), 0.0)
    view.reach.unanswered("a", (1, 5), 0.0)
    view.reach.suspected_by_another("a", (2**61, 2**61), 0.0)
    view.merge(record("a", 5 + MAX_STAMP_LEAD + 1), 1.0)
    assert not view.detector.is_suspected("a")


def test_unknown_peers_are_not_suspected() -> None:
    view = View("me")
    assert view.reach.unanswered("a", (1, 1), 0.0) == []
    assert view.reach.suspected_by_another("a", (1, 1), 0.0) == []
    assert view.detector.suspicions() == []


def test_the_old_are_forgotten_and_do_not_come_back() -> None:
    view = View("me", silence_s=10.0)
    view.merge(record("me"), 0.0)
    view.merge(record("gone", 7, state=LEFT), 0.0)
    view.merge(record("silent", 7), 0.0)
    view.merge(record("alive", 7), 95.0)
    assert view.forget_old(60.0, 100.0) == []
    assert view.forget_old(100.0, 100.0) == ["gone", "silent"]
    assert [r.peer_id for r in view.records()] == ["alive", "me"]
    assert not view.merge(record("silent", 7), 101.0)
    assert view.digest.wanted_from({"silent": (1, 7)}) == []
    assert view.digest.wanted_from({"silent": (1, 8)}) == ["silent"]
    assert view.merge(record("silent", 8), 102.0)
    assert view.replicas(0, 102.0)[-1].peer_id == "silent"


def test_a_dead_feeder_is_remembered_as_long_as_its_round_goes_on() -> None:
    """Else a round that lasts longer would have to be made again in part."""
    view = View("me", silence_s=10.0)
    count = counted(3, launched=8, committed=5)
    view.merge(record("me", round=3), 0.0)
    view.merge(record("feeder", counts=(count,)), 0.0)
    assert view.forget_old(1000.0, 100.0) == []
    assert view.counters.committed(3) == 5
    view.merge(record("me", 1, round=4), 1000.0)
    assert view.forget_old(1000.0, 100.0) == ["feeder"]


def test_the_number_of_known_peers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "MAX_PEERS", 3)
    view = View("me", silence_s=10.0)
    view.merge(record("me"), 0.0)
    view.merge(record("a"), 0.0)
    view.merge(record("b"), 5.0)
    assert not view.merge(record("c"), 6.0)
    assert view.merge(record("c"), 12.0)
    assert [r.peer_id for r in view.records()] == ["b", "c", "me"]


def test_what_is_remembered_changes_with_records_time_and_suspicions() -> None:
    view = View("own", silence_s=10.0)
    view.merge(record("a", 1, stage=0), 0.0)
    view.merge(record("b", 1, stage=1), 5.0)
    assert [r.peer_id for r in view.live(5.0)] == ["a", "b"]
    assert [r.peer_id for r in view.live(11.0)] == ["b"], "a has been silent for too long"
    assert not view.replicas(0, 11.0)
    view.merge(record("a", 2, stage=1), 12.0)
    assert [r.peer_id for r in view.replicas(1, 12.0)] == ["a", "b"]
    assert not view.members(0, 12.0)
    view.reach.unanswered("b", (1, 1), 12.0)
    assert [r.peer_id for r in view.replicas(1, 12.0)] == ["a"]
    view.set_silence(1.0)
    assert not view.live(13.5)
    view.set_silence(100.0)
    assert [r.peer_id for r in view.live(13.5)] == ["a"]
    assert not view.is_past(0, 13.5)
    view.merge(record("a", 3, stage=1, round=1), 14.0)
    assert view.is_past(0, 14.0)
    assert not view.is_past(1, 14.0)
    assert not view.is_past(0, 200.0)
