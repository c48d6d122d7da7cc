from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEFT, Record, RoundCount
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.pipeline.contests import Committed, Held
from swarmnet.protocol.pipeline.progress import (
    Shown,
    committed_by,
    doubled,
    held,
    helping_slot,
    is_committed_elsewhere,
    is_drained,
    is_launched,
    late_slots,
    newest_round,
    round_progress,
    shown_by_call,
    stuck_slot,
    turn_of,
)
from swarmnet.protocol.slots import SlotSet, next_slot, share_of, slots_in
from tests.protocol.making import counted, mask_of, record, slots, with_count

R = 4


def feeder(peer_id: str, *, version: int = 0, round_index: int = R, **count: object) -> Record:
    base = record(peer_id, version, has_data=True, round=round_index)
    return with_count(base, counted(R, **count))  # type: ignore[arg-type]


def view_of(*found: Record, at: float = 0.0) -> View:
    view = View(found[0].peer_id, silence_s=10.0)
    for r in found:
        view.merge(r, at)
    return view


def test_sums_over_live_feeders() -> None:
    view = view_of(
        feeder("a", launched=8, committed=4, tokens=400, loss_sum=1.5),
        feeder("b", first=8, launched=8, committed=8, tokens=800, loss_sum=2.0, sealed=True),
        record("c", stage=1, has_data=True),
    )
    state = round_progress(view, R, 0.0, num_slots=16)
    assert (state.launched, state.committed, state.tokens) == (16, 12, 1200)
    assert (state.loss_sum, state.num_feeders, state.drained) == (3.5, 2, False)
    assert round_progress(view, R + 1, 0.0, 16).launched == 0


def test_once_all_is_launched_nobody_waits_for_those_that_rest() -> None:
    def progress(launched_by_b: int, **count: int) -> tuple[int, int, bool]:
        view = view_of(
            feeder("a", launched=launched_by_b and 8, committed=8, sealed=True),
            feeder("b", first=8, launched=launched_by_b, **count),
        )
        view.await_all_but(frozenset({"b"}), is_unknown_heard=True)
        state = round_progress(view, R, 0.0, 12)
        return state.missing, state.given_up, state.drained

    b_has = 0b1111 << 8
    assert progress(2)[:2] == (0b11 << 10, 0), "others launch these, and b may come yet"
    assert progress(4) == (b_has, b_has, False)
    assert progress(4, committed=3) == (1 << 11, 1 << 11, False)
    assert progress(4, committed=4) == (0, 0, True), "it need not seal"


def test_what_the_end_of_a_round_waits_for() -> None:
    a = feeder("a", launched=4, committed=4, sealed=True)
    d = feeder("d", first=12, launched=4, committed=4, sealed=True)
    c = record("c", stage=1)

    def waits(*others: Record, own: Record = a, stages: int = 2) -> Held:
        view = view_of(own, d, c)
        for other in ("b", "d"):
            view.delivered(other)
        for other in others:
            view.merge(other, 0.0)
        return held(view, R, 0.0, 16, range(stages))

    b = feeder("b", first=4, launched=8, committed=7)
    assert waits(b) == Held(15, frozenset("b"))
    assert waits(feeder("b", first=4, launched=7, committed=7)) == Held(15), "one is not launched"
    done = feeder("b", first=4, launched=8, committed=8)
    assert waits(done) == Held(16, frozenset("b")), "it has not sealed"
    assert waits(feeder("b", first=4, launched=8, committed=8, sealed=True)) == Held(16)
    assert waits(b, stages=3) == Held(15), "a stage has no replica"
    own = feeder("a", launched=4, committed=3)
    assert waits(b, own=own) == Held(14), "this one has one in flight, too"
    unknown = feeder("x", first=4, launched=8, committed=7)
    assert waits(unknown) == Held(8, by_unknown=True)
    late = feeder("d", version=1, first=12, launched=4, committed=3)
    both = view_of(a, b, late, c)
    for other in ("b", "d"):
        both.delivered(other)
    assert held(both, R, 0.0, 16, range(2)) == Held(14), "most of those that feed"


def test_what_those_have_committed_that_count_and_those_that_do_not() -> None:
    a = feeder("a", launched=4, committed=4, tokens=40)
    b = feeder("b", first=4, launched=4, committed=3, tokens=30)
    x = feeder("x", first=8, launched=4, committed=2, tokens=7)
    view = view_of(a, b)
    view.delivered("a")
    view.delivered("b")
    view.merge(x, 0.0)
    assert committed_by(view, R, 0.0) == (Committed(7, 70), Committed(2, 7))


def test_drained_when_committed_and_all_sealed() -> None:
    a = feeder("a", launched=8, committed=8, sealed=True)
    unsealed = feeder("b", first=8, launched=8, committed=8)
    sealed = feeder("b", version=1, first=8, launched=8, committed=8, sealed=True)
    ahead = feeder("b", version=1, first=8, launched=8, committed=8, round_index=R + 1)
    assert not round_progress(view_of(a, unsealed), R, 0.0, 16).drained
    assert round_progress(view_of(a, sealed), R, 0.0, 16).drained
    assert round_progress(view_of(a, ahead), R, 0.0, 16).drained
    assert not round_progress(view_of(a, sealed), R, 0.0, 17).drained


def test_what_a_dead_feeder_did_not_commit_is_to_be_launched_again() -> None:
    view = view_of(feeder("a", launched=8, committed=8, sealed=True))
    view.merge(feeder("b", first=8, launched=8, committed=3), 0.0)
    assert round_progress(view, R, 0.0, 16).launched == 16
    view.reach.unanswered("b", (1, 0), 1.0)
    state = round_progress(view, R, 1.0, 16)
    assert (state.launched, state.committed, state.num_feeders) == (11, 11, 1)
    assert not state.drained
    view.merge(with_more(feeder("a", version=1, launched=8, committed=8, sealed=True)), 2.0)
    assert round_progress(view, R, 2.0, 16).drained


def with_more(record: Record) -> Record:
    """The first slots, and the last ones, which another feeder has left."""
    mask = mask_of([*range(8), *range(11, 16)])
    return with_count(record, RoundCount(R, SlotSet.of(mask), SlotSet.of(mask), True))


def test_a_feeder_that_left_still_counts() -> None:
    view = view_of(feeder("a", launched=8, committed=8, sealed=True))
    left = with_count(record("b", state=LEFT, has_data=True), counted(R, 8, 8, True, first=8))
    view.merge(left, 0.0)
    assert round_progress(view, R, 0.0, 16).drained


def test_slots_that_two_feeders_have() -> None:
    """A slot counts once in the progress of a round; over different replicas it is in the update
    twice, and is named. What was found to count already is not."""
    a = feeder("a", launched=9, committed=9, sealed=True)
    b = feeder("b", first=8, launched=8, committed=8, sealed=True)
    view = view_of(a, b)
    state = round_progress(view, R, 0.0, 16)
    assert (state.launched, state.committed, state.missing, state.drained) == (16, 16, 0, True)
    assert doubled(view, R, 0.0) == {8: ["a", "b"]}
    assert is_committed_elsewhere(view, R, 8, "a", 0.0)
    assert not is_committed_elsewhere(view, R, 7, "a", 0.0)
    found = RoundCount(R, slots(8, 8), slots(9, 7), True, settled=slots(8, 1))
    view.merge(with_count(record("b", 1, has_data=True, round=R), found), 0.0)
    assert doubled(view, R, 0.0) == {}
    assert round_progress(view, R, 0.0, 16).drained


def test_newest_round_of_those_that_serve() -> None:
    view = view_of(record("a", round=3), record("b", round=5, stage=1))
    view.merge(record("c", round=9, state=JOINING), 0.0)
    assert newest_round(view, 0.0) == 5
    assert newest_round(view, 0.0, stage=0) == 3
    assert newest_round(view, 0.0, stage=7) == 0


@settings(max_examples=30, deadline=None)
@given(
    num_feeders=st.integers(1, 5),
    num_slots=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    deaths=st.integers(0, 2),
)
def test_every_round_drains_at_every_survivor(
    num_feeders: int, num_slots: int, seed: int, deaths: int
) -> None:
    """Feeders that gossip at random, some of which die, end with the same unions: every slot. A
    slot is launched twice only where somebody died."""
    rng = random.Random(seed)
    names = [f"f{i}" for i in range(num_feeders)]
    views = {n: View(n, silence_s=30.0) for n in names}
    own = {n: feeder(n) for n in names}
    for n in names:
        for view in views.values():
            view.merge(own[n], 0.0)
    dies_at = {n: rng.uniform(0, 20) for n in rng.sample(names, min(deaths, num_feeders - 1))}
    quiet_since = dict.fromkeys(names, 0.0)
    now = 0.0
    while now < 600.0:
        now += rng.uniform(0.0, 0.5)
        alive = [n for n in names if now < dies_at.get(n, 1e9)]
        n = rng.choice(alive)
        state = round_progress(views[n], R, now, num_slots)
        count = own[n].count(R)
        live = [f for f in names if views[n].is_live(f, now)]
        rank = live.index(n)
        share = share_of(rank, len(live), num_slots)
        slot = next_slot(state.missing, share, rank, len(live))
        launched, committed = count.launched, count.committed
        if (
            rng.random() < 0.4
            and slot is not None
            and (slot in share or now - quiet_since[n] >= 60.0)
        ):
            launched = launched.with_slot(slot)
        elif (flying := sorted({*launched} - {*committed})) and rng.random() < 0.6:
            committed = committed.with_slot(rng.choice(flying))
        sealed = launched == committed and not round_progress(views[n], R, now, num_slots).missing
        count = RoundCount(R, launched, committed, sealed)
        r = own[n]
        own[n] = with_count(record(n, r.version + 1, has_data=True, round=R), count)
        views[n].merge(own[n], now)
        partner = rng.choice(alive)
        for one, other in ((n, partner), (partner, n)):
            for fresh in views[one].newer_than(views[other].digest.stamps()):
                views[other].merge(fresh, now)
                quiet_since[other] = now
        is_over = state.drained and now > max(dies_at.values(), default=0.0)
        if is_over and all(round_progress(views[n], R, now, num_slots).drained for n in alive):
            break  # nothing is missing any more that anybody could launch
    states = [round_progress(views[n], R, now, num_slots) for n in alive]
    assert all(s.drained for s in states)
    assert {s.committed for s in states} == {num_slots}
    if not dies_at:
        assert doubled(views[alive[0]], R, now) == {}


def test_many_feeders_take_what_others_come_to_late() -> None:
    """Of three feeders of ten slots each the first has launched all of its own in 100 s, the second
    half, the third nothing; news take 30 s."""
    missing = mask_of([*range(15, 20), *range(20, 30)])
    late = late_slots(missing, [10, 5, 0], 30, age_s=100.0, spread_s=30.0)
    assert set(late) == {*range(16, 20), *range(20, 30)}, "the next one it launches itself"
    assert set(late[:10]) == {*range(20, 30)}, "first those of a feeder that launches none"
    assert late[10:] == [19, 18, 17, 16], "then the latest first"
    assert late_slots(0, [10, 10, 10], 30, 100.0, 30.0) == []
    assert late_slots(missing, [10, 5, 1], 30, 100.0, 2000.0) == []


@given(st.integers(0, 60), st.integers(1, 20), st.floats(0.0, 1000.0), st.floats(0.0, 60.0))
def test_helpers_that_know_the_same_launch_different_slots(
    num_late: int, num_feeders: int, age_s: float, spread_s: float
) -> None:
    late, turn = list(range(100, 100 + num_late)), turn_of(age_s, spread_s)
    found = [helping_slot(late, k, num_feeders, turn) for k in range(num_feeders)]
    picked = [slot for slot in found if slot is not None]
    assert len(set(picked)) == len(picked) == min(num_late, num_feeders)
    assert set(picked) <= set(late)


def test_where_nothing_is_heard_feeders_take_turns() -> None:
    """The rest is in the share of somebody who launches nothing: two slots, two feeders a turn,
    never the same two twice in a row."""
    missing = mask_of([3, 8])

    def turn(quiet_s: float, spread_s: float = 30.0) -> dict[int, int]:
        found = {k: stuck_slot(missing, k, 10, quiet_s, spread_s) for k in range(10)}
        return {k: slot for k, slot in found.items() if slot is not None}

    turns = [turn(q) for q in (29.0, 31.0, 61.0, 91.0)]
    assert [len(t) for t in turns] == [0, 2, 2, 2]
    assert all(set(t.values()) == {3, 8} for t in turns[1:])
    assert turns[1].keys() != turns[2].keys() != turns[3].keys()
    assert turn(100.0, spread_s=0.0) == {}


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 30), st.booleans()),
        max_size=8,
    ),
    st.integers(1, 60),
)
def test_the_quick_answers_are_those_of_the_whole_union(
    said: list[tuple[int, int, int, bool]], num_slots: int
) -> None:
    view = View("own", silence_s=5.0)
    for i, (peer, launched, committed, sealed) in enumerate(said):
        count = counted(1, max(launched, committed), committed, sealed, first=7 * peer)
        view.merge(record(f"p{peer}", i, counts=(count,)), now=float(i))
    for now in (0.0, 6.0, 20.0):
        state = round_progress(view, 1, now, num_slots)
        assert is_drained(view, 1, now, num_slots) == state.drained
        assert is_launched(view, 1, now, num_slots) == (state.launched == num_slots)
        masks = [c.committed.mask for _, c in view.counters.by_peer(1)]
        union = {slot for mask in masks for slot in slots_in(mask) if slot < num_slots}
        assert state.committed == len(union)


def replicas(*rounds: int, state: str = ACTIVE) -> View:
    """Of the own stage: this peer, in round R, and others."""
    own = record("own", stage=0, round=R, state=ACTIVE)
    others = [record(f"r{i}", stage=0, round=r, state=state) for i, r in enumerate(rounds)]
    return view_of(own, *others)


@pytest.mark.parametrize(
    ("asked", "overlaps", "shown"),
    [
        (R - 1, False, Shown.NOTHING),
        (R, False, Shown.NOTHING),
        (R + 1, False, Shown.OVER),
        (R + 2, False, Shown.NOTHING),
        (R + 3, False, Shown.NOTHING),
        (R + 1, True, Shown.LAUNCHED),
        (R + 2, True, Shown.OVER),
        (R + 3, True, Shown.NOTHING),
    ],
)
def test_a_call_shows_how_far_its_caller_is(asked: int, overlaps: bool, shown: Shown) -> None:
    """Where rounds overlap, the next one is open before this one is over."""
    assert shown_by_call(replicas(R), "r0", asked, R, 0.0, overlaps=overlaps) is shown


def test_that_a_round_is_over_one_alone_does_not_show() -> None:
    view = replicas(R, R, R)
    found = [shown_by_call(view, f"r{i}", R + 1, R, 0.0, overlaps=False) for i in range(3)]
    assert found == [Shown.NOTHING, Shown.OVER, Shown.OVER]


def test_a_call_of_one_that_is_not_that_far_shows_nothing() -> None:
    for view in (replicas(R - 1), replicas(R, state=JOINING), replicas()):
        assert shown_by_call(view, "r0", R + 1, R, 0.0, overlaps=True) is Shown.NOTHING
        assert not view.is_past(R, 0.0)
