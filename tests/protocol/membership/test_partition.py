"""Peers that are out of reach: of one peer, or of a whole part of the swarm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.membership.failure_detector import Look
from swarmnet.protocol.membership.reach import are_cut, connected, num_cuts
from swarmnet.protocol.membership.records import (
    ACTIVE,
    LEFT,
    MAX_UNREACHED,
    OBSERVER_STAGE,
    OBSERVING,
    Record,
)
from swarmnet.protocol.membership.view import View
from tests.protocol.membership.test_view import counted

NAMES = "abcdef"


def record(name: str, version: int = 0, *, unreached: str = "", **fields: Any) -> Record:
    fields = {"state": ACTIVE, "stage": 0, **fields}
    return Record(name, "r", 1, version, unreached=tuple(unreached), **fields)


def test_two_peers_are_cut_where_one_says_so() -> None:
    a, b, c = record("a", unreached="b"), record("b"), record("c")
    assert are_cut(a, b)
    assert are_cut(b, a)
    assert not are_cut(a, c)
    assert not are_cut(a, None)
    assert num_cuts([a, record("b", unreached="a"), c]) == {"a": 1, "b": 1}
    assert num_cuts([a, c]) == {}, "b is not among them"


@given(st.sets(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES))), st.booleans())
def test_a_path_of_peers_connects(cuts: set[tuple[str, str]], is_told: bool) -> None:
    """As a plain search of the graph finds it."""
    own = "a"
    lost = {q for p, q in cuts if p == own != q} | {p for p, q in cuts if q == own != p}
    serving = {
        n: record(n, unreached="".join(sorted(q for p, q in cuts if p == n and q != n)))
        for n in NAMES
    }
    found, frontier = {own}, [own]
    while frontier:
        p = frontier.pop()
        for q in NAMES:
            if q not in found and (p, q) not in cuts and (q, p) not in cuts:
                found.add(q)
                frontier.append(q)
    others = (serving[n] for n in NAMES if n not in {own, *lost})
    assert connected({n: serving[n] for n in NAMES if n in lost}, others) == found & lost


def halves(view: View, now: float) -> None:
    """`a` to `c` cannot reach `d` to `f`, by the word of all of them."""
    for name in "def":
        before = view.get(name)
        assert before is not None
        view.reach.unanswered(name, before.stamp, now)
    for name in "bc":
        view.merge(record(name, 1, unreached="def"), now)
    for name in "def":
        before = view.get(name)
        assert before is not None
        view.merge(replace(before, version=before.version + 1, unreached=tuple("abc")), now)


def view_of(*others: str) -> View:
    view = View("a")
    view.merge(record("a"), 0.0)
    for name in others:
        view.merge(record(name), 0.0)
    return view


def test_a_single_peer_out_of_reach_takes_part_in_the_run() -> None:
    view = view_of(*"bc")
    view.reach.unanswered("c", (1, 0), 1.0)
    view.merge(record("c", 1, unreached="a"), 2.0)
    assert view.is_live("c", 2.0)
    assert not view.reaches("c", 2.0)
    assert [r.peer_id for r in view.replicas(0, 2.0)] == ["a", "b", "c"]
    assert [r.peer_id for r in view.in_reach(0, 2.0)] == ["a", "b"]
    assert [r.peer_id for r in view.lost(0, 2.0)] == ["c"]
    view.reach.answered("c", 3.0)
    assert [r.peer_id for r in view.in_reach(0, 3.0)] == ["a", "b", "c"]


def test_the_other_half_is_not_live_whatever_an_onlooker_brings() -> None:
    view = view_of(*"bcdef")
    view.merge(record("onlooker", state=OBSERVING, stage=-1), 0.0)
    halves(view, 1.0)
    assert [r.peer_id for r in view.replicas(0, 1.0)] == ["a", "b", "c"]
    assert view.detector.apart == frozenset("def")
    for version in range(2, 5):
        view.merge(record("d", version, unreached="abc"), float(version))
    assert not view.is_live("d", 4.0)


@pytest.mark.parametrize("bridge", ["serving", "not"])
def test_one_that_serves_and_reaches_both_sides_connects_them(bridge: str) -> None:
    view = view_of(*"bcdef")
    fields: dict[str, Any] = {} if bridge == "serving" else {"state": OBSERVING, "stage": -1}
    view.merge(record("g", **fields), 0.0)
    halves(view, 1.0)
    assert view.is_live("d", 1.0) == (bridge == "serving")


def test_what_the_other_half_counts_does_not_count_here() -> None:
    """Its gradient is not here. What it counted before is, and what it has counted counts again
    as soon as both are one."""
    view = view_of(*"bcdef")
    view.merge(record("d", 1, counts=(counted(3, 2, 2),)), 0.5)
    halves(view, 1.0)
    view.merge(record("d", 3, unreached="abc", counts=(counted(3, 4, 4),)), 2.0)
    view.merge(record("d", 4, unreached="abc", counts=(counted(3, 6, 6),)), 2.0)
    assert view.counters.committed(3) == 2
    view.reach.answered("d", 3.0)
    assert view.counters.committed(3) == 6
    view.merge(record("d", 5, counts=(counted(3, 7, 7),)), 4.0)
    assert view.counters.committed(3) == 7


def test_what_a_forgotten_peer_of_the_other_half_counted_is_forgotten() -> None:
    view = view_of(*"bcd")
    view.merge(record("d", 1, counts=(counted(3, 2, 2),)), 0.5)
    view.reach.unanswered("d", (1, 1), 1.0)
    for name in "bc":
        view.merge(record(name, 1, unreached="d"), 1.0)
    view.merge(record("d", 2, counts=(counted(3, 4, 4),)), 2.0)
    view.merge(record("a", 9, round=9), 500.0)
    assert "d" in view.forget_old(500.0, 100.0)
    assert view.counters.committed(3) == view.counters.launched_at_most(3) == 0


def test_many_living_peers_out_of_reach_are_the_other_part() -> None:
    """Records cannot name them all."""
    view = view_of("b")
    names = [f"p{i:03}" for i in range(MAX_UNREACHED + 1)]
    for name in names:
        view.merge(Record(name, "r", 1, 0, state=ACTIVE, stage=0), 0.0)
        view.reach.unanswered(name, (1, 0), 1.0)
        view.merge(Record(name, "r", 1, 1, state=ACTIVE, stage=0), 1.0)
    assert [r.peer_id for r in view.live(1.0)] == ["a", "b"]


def test_what_records_say_of_reach_leads_to_looks() -> None:
    view = view_of(*"bcd")
    view.merge(record("b", 1, unreached="a"), 1.0)
    assert view.reach.take_commands() == [Look("b")], "the way back may be cut too"
    assert view.reach.take_commands() == []
    view.reach.unanswered("d", (1, 0), 1.0)
    view.merge(record("d", 1), 2.0)
    view.merge(record("c", 1, unreached="d"), 2.0)
    assert view.reach.take_commands() == [Look("d")], "the first news since it was lost"
    view.merge(record("c", 2), 3.0)
    assert view.reach.take_commands() == [Look("d")], "another peer reaches it again"
    view.merge(record("d", 2, addresses=("/ip4/5.5.5.5/tcp/1/p2p/r/p2p-circuit/p2p/d",)), 4.0)
    assert view.reach.take_commands() == [Look("d")], "at a relay, perhaps"


def test_the_first_that_reaches_both_goes_between_two_that_are_cut() -> None:
    view = View("a")
    for one in (record("a", unreached="c"), record("b", unreached="d"), record("c"), record("d")):
        view.merge(one, 0.0)
    serving = ["a", "b", "c", "d"]
    assert list(view.reach.go_betweens("c", serving)) == [("a", "b")]
    assert list(view.reach.go_betweens("d", serving)) == [("b", "a")]
    assert list(view.reach.go_betweens("a", ["a", "c"])) == [("c", None)]


def test_a_record_names_living_members_that_its_peer_cannot_call() -> None:
    view = View("a")
    for one in (
        record("a"),
        record("lost"),
        record("left", state=LEFT),
        record("onlooker", stage=OBSERVER_STAGE),
        record("silent"),
    ):
        view.merge(one, 0.0)
    for name in ("lost", "left", "onlooker", "silent"):
        view.reach.unanswered(name, (1, 0), 1.0)
    for name in ("lost", "left", "onlooker"):
        before = view.get(name)
        assert before is not None
        view.merge(replace(before, version=1), 2.0)
    assert view.reach.unreached() == ("lost",)
