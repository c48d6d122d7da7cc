from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.protocol.membership.assignment import (
    Move,
    MoveGate,
    PassedOver,
    Staff,
    choose_stage,
    feeders,
    is_worth_it,
    pays,
    propose_move,
    settle,
)
from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, OBSERVER_STAGE, Record
from swarmnet.protocol.membership.view import View
from tests.protocol.making import record


def view_of(*found: Record) -> View:
    view = View("me")
    for r in found:
        view.merge(r, 0.0)
    return view


def replica(peer_id: str, stage: int, speed: float = 0.0, **fields: object) -> Record:
    return record(peer_id, stage=stage, samples_per_s=speed, **fields)


# -- choosing a stage --------------------------------------------------------------------------


def test_a_stage_without_a_replica_comes_first() -> None:
    view = view_of(replica("a", 0, 1.0), replica("b", 2, 1.0), replica("c", 3, state=LEAVING))
    rng = random.Random(0)
    assert {choose_stage(view, 4, 0.0, rng) for _ in range(40)} == {1, 3}


def test_who_is_on_the_way_counts() -> None:
    view = view_of(replica("a", 0, 1.0), replica("b", 1, state=JOINING))
    assert choose_stage(view, 3, 0.0, random.Random(0)) == 2


def test_else_the_least_throughput_for_its_cost() -> None:
    view = view_of(replica("a", 0, 10.0), replica("b", 1, 6.0), replica("c", 1, 5.0))
    assert choose_stage(view, 2, 0.0, random.Random(0)) == 0
    unknown = view_of(replica("a", 0), replica("b", 1))
    assert choose_stage(unknown, 2, 0.0, random.Random(0), costs=[1.0, 3.0]) == 1


def test_the_own_record_does_not_count() -> None:
    view = view_of(replica("me", 0, 1.0), replica("a", 1, 1.0))
    assert choose_stage(view, 2, 0.0, random.Random(0)) == 0


def test_newcomers_spread() -> None:
    view = View("me")
    rng = random.Random(0)
    for i in range(12):
        stage = choose_stage(view, 4, 0.0, rng)
        view.merge(replica(f"p{i}", stage, state=JOINING), 0.0)
    assert [len(view.members(k, 0.0)) for k in range(4)] == [3, 3, 3, 3]


def test_copies_come_before_speed() -> None:
    """The first machine of a stage was measured twice as fast as the others."""
    view = view_of(replica("a", 0, 9.0), replica("b", 1, 4.0), replica("c", 1, 4.0))
    assert choose_stage(view, 2, 0.0, random.Random(0)) == 1
    assert choose_stage(view, 2, 0.0, random.Random(0), copies=2) == 0
    view.merge(replica("d", 0, 9.0), 0.0)
    assert choose_stage(view, 2, 0.0, random.Random(0), copies=2) == 1  # enough: by speed
    view.merge(replica("e", 1, 4.0), 0.0)
    assert choose_stage(view, 2, 0.0, random.Random(0), copies=3) == 0


def test_machines_that_start_together_keep_two_copies_of_each_stage() -> None:
    """Equal ones whose cores were busy when they measured themselves (74 to 158 samples/s)."""
    for seed in range(200):
        rng = random.Random(seed)
        first = replica("a", 1, rng.uniform(70, 160))
        present = {"a"}
        speeds = {p: rng.uniform(70, 160) for p in "bcd"}
        stages = {p: choose_stage(view_of(first), 2, 0.0, rng, copies=2) for p in "bcd"}
        for _ in range(4):  # each sees the choices of all
            joining = [replica(p, stages[p], speeds[p], state=JOINING) for p in "bcd"]
            stages = {
                p: settle(view_from(p, first, *joining), 2, 0.0, stages[p], present, copies=2)
                for p in "bcd"
            }
        assert sorted(stages.values()) == [0, 0, 1], seed


def view_from(own: str, *found: Record) -> View:
    view = View(own)
    for r in found:
        view.merge(r, 0.0)
    return view


@given(
    st.lists(st.sampled_from([1.0, 2.0, 5.0, 10.0]), min_size=1, max_size=12),
    st.lists(st.integers(0, 2), min_size=12, max_size=12),
    st.lists(st.sampled_from([0.0, 4.0, 9.0]), min_size=3, max_size=3),
)
def test_newcomers_of_one_moment_settle_where_each_is_needed(
    speeds: list[float], choices: list[int], there: list[float]
) -> None:
    old = [replica(f"old{k}", k, rate) for k, rate in enumerate(there) if rate]
    new = [
        replica(f"new{i:02}", choices[i], speed, state=JOINING) for i, speed in enumerate(speeds)
    ]
    present = {r.peer_id for r in old}
    places = [settle(view_from(r.peer_id, *old, *new), 3, 0.0, r.stage, present) for r in new]
    rates = list(there)
    for place, speed in zip(places, speeds, strict=True):
        rates[place] += speed
    if len(new) >= there.count(0.0):
        assert all(rates), "a stage has nobody"
    least = min(range(3), key=lambda k: rates[k])
    for r, place in zip(new, places, strict=True):  # nobody's stage is too rich by all of it
        later = sum(
            s
            for o, p, s in zip(new, places, speeds, strict=True)
            if p == place and o.peer_id > r.peer_id
        )
        assert rates[place] - later - r.samples_per_s <= rates[least] + r.samples_per_s / 2
    # Who has gone there stays, unless others went too, and nobody is sent to and fro.
    moved = [replace(r, stage=place) for r, place in zip(new, places, strict=True)]
    for r in moved:
        assert settle(view_from(r.peer_id, *old, *moved), 3, 0.0, r.stage, present) == r.stage


def test_who_came_alone_stays_where_it_chose() -> None:
    old = [replica("a", 0, 5.0), replica("b", 1, 4.0), replica("c", 1, 3.0, state=JOINING)]
    own = replica("me", 0, 4.0, state=JOINING)
    view = view_of(*old, own)
    assert settle(view, 2, 0.0, 0, {"a", "b", "c"}) == 0
    rival = replica("bob", 0, 6.0, state=JOINING)
    view = view_of(*old, own, rival)
    assert settle(view, 2, 0.0, 0, {"a", "b", "c"}) == 1  # 11 and 7: bob is first
    assert settle(view, 2, 0.0, 0, {"a", "b", "c"}, allowed=[0]) == 0
    later = view_of(*old, own, replace(rival, peer_id="zoe"))
    assert settle(later, 2, 0.0, 0, {"a", "b", "c"}) == 0  # zoe goes, for me comes first
    assert settle(later, 2, 0.0, 0, {"a", "b", "c", "zoe"}) == 1  # unless she was there


# -- feeders -----------------------------------------------------------------------------------


def test_feeders_are_the_active_replicas_of_the_first_stage_with_data() -> None:
    view = view_of(
        replica("d", 0, has_data=True),
        replica("b", 0, has_data=True),
        replica("c", 0),
        replica("a", 1, has_data=True),
        replica("e", 0, has_data=True, state=LEAVING),
        replica("f", 0, has_data=True, state=JOINING),
    )
    assert feeders(view, 0.0) == ["b", "d"]


def test_one_other_feeds_where_the_first_stage_has_no_data() -> None:
    view = view_of(
        replica("d", 0),
        replica("c", 1, has_data=True),
        replica("b", 2, has_data=True),
        replica("a", 2, has_data=True, state=LEAVING),
    )
    assert feeders(view, 0.0) == ["b"]
    assert feeders(view_of(replica("d", 0)), 0.0) == []


# -- moves -------------------------------------------------------------------------------------


def test_a_move_from_the_richest_to_the_poorest() -> None:
    view = view_of(replica("a", 0, 4.0), *(replica(p, 1, 4.0) for p in "bcd"))
    assert propose_move(view, 2, 0.0, margin=0.2) == Move("b", 1, 0, 1.0)


def test_an_even_swarm_stays() -> None:
    view = view_of(*(replica(p, k, 4.0) for k, p in enumerate("abc")), replica("d", 0, 4.0))
    assert propose_move(view, 3, 0.0, margin=0.1) is None


def test_the_margin_is_a_margin() -> None:
    view = view_of(replica("a", 0, 10.0), replica("b", 1, 10.0), replica("c", 1, 2.0))
    assert propose_move(view, 2, 0.0, margin=0.1) is None
    view = view_of(replica("a", 0, 10.0), replica("b", 1, 13.0), replica("c", 1, 2.0))
    move = propose_move(view, 2, 0.0, margin=0.1)
    assert move is not None
    assert move.peer_id == "c"
    assert propose_move(view, 2, 0.0, margin=0.5) is None


def test_a_move_on_its_way_counts() -> None:
    view = view_of(replica("a", 0, 4.0), *(replica(p, 1, 4.0) for p in "bcd"))
    view.merge(record("b", 1, stage=0, state=JOINING, samples_per_s=4.0), 0.0)
    assert propose_move(view, 2, 0.0, margin=0.1) is None


def test_who_is_about_to_move_is_counted_where_it_goes() -> None:
    crowd = [replica(p, 1, 4.0) for p in "bcd"]
    view = view_of(replica("a", 0, 4.0), *crowd)
    for state in (ACTIVE, LEAVING):
        moving = record("b", 1 + (state == LEAVING), stage=1, state=state, moving_to=0)
        view.merge(replace(moving, samples_per_s=4.0), 0.0)
        assert propose_move(view, 2, 0.0, margin=0.1) is None
        staff = Staff(view, 2, 0.0, costs=[1.0, 3.0]).members
        assert [sorted(r.peer_id for r in rs) for rs in staff] == [["a", "b"], ["c", "d"]]
        assert staff[0][-1].samples_per_s == 12.0  # its new stage costs a third


def test_newcomers_go_where_those_that_are_to_move_are_not_yet() -> None:
    crowd = [replica(p, 1, 4.0) for p in "bcd"]
    for state, stage in ((ACTIVE, 0), (LEAVING, 1)):  # 4 and 12 samples/s; then 24 and 8
        view = view_of(replica("a", 0, 4.0), *crowd)
        moving = record("e", 1, stage=1, state=state, moving_to=0)
        view.merge(replace(moving, samples_per_s=20.0), 0.0)
        assert choose_stage(view, 2, 0.0, random.Random(0)) == stage


@pytest.mark.parametrize(
    ("others", "worth"),
    [
        ([("a", 0, 4.0)], True),
        ([("a", 0, 4.0), ("e", 0, 9.0)], False),  # a newcomer came first
        ([("a", 0, 4.0), ("e", 0, 3.0)], True),  # a slow one
        ([], True),
    ],
)
def test_a_move_that_waits_is_looked_at_again(
    others: list[tuple[str, int, float]], worth: bool
) -> None:
    """The mover has 4 samples/s and goes to stage 0; two with as much stay in stage 1."""
    moving = replica("b", 1, 4.0, moving_to=0)
    view = view_of(moving, replica("c", 1, 4.0), replica("d", 1, 4.0))
    for name, stage, rate in others:
        view.merge(replica(name, stage, rate), 0.0)
    assert is_worth_it(view, 2, 0.0, Move("b", 1, 0, 0.5)) is worth


def test_who_is_about_to_move_is_not_moved_again_and_leaves_somebody_behind() -> None:
    view = view_of(replica("a", 0, 1.0), replica("b", 1, 9.0, moving_to=2), replica("c", 1, 9.0))
    view.merge(replica("d", 2, 9.0), 0.0)
    assert propose_move(view, 3, 0.0, margin=0.1) is None  # c and d are the last ones there
    view.merge(replica("e", 2, 9.0), 0.0)
    move = propose_move(view, 3, 0.0, margin=0.1)
    assert move is not None
    assert move.peer_id in ("d", "e")


def test_two_equally_poor_stages_are_helped_in_turn() -> None:
    view = view_of(
        replica("a", 0, 1.0), replica("b", 1, 1.0), *(replica(p, 2, 1.0) for p in "cdef")
    )
    move = propose_move(view, 3, 0.0, margin=0.2)
    assert move is not None
    assert (move.source, move.target) == (2, 0)


def test_whose_speed_nobody_knows_stays_unless_a_stage_is_empty() -> None:
    crowd = [replica(p, 1, 0.0) for p in "bcd"]
    assert propose_move(view_of(replica("a", 0, 4.0), *crowd), 2, 0.0, margin=0.1) is None
    known = [replica("e", 1, 1.0), *crowd]
    move = propose_move(view_of(replica("a", 0, 4.0), *known), 2, 0.0, margin=0.1)
    assert move is not None
    assert move.peer_id == "e"
    assert propose_move(view_of(*crowd), 2, 0.0, margin=0.1) is not None


def test_a_stage_with_too_few_copies_gets_one_and_keeps_what_it_has() -> None:
    crowd = [replica(p, 1, 4.0) for p in "bcd"]
    view = view_of(replica("a", 0, 15.0), *crowd)  # no faster with another one
    assert propose_move(view, 2, 0.0, margin=0.15) is None
    assert propose_move(view, 2, 0.0, margin=0.15, copies=2) == Move("b", 1, 0, math.inf)
    wavering = [replica(p, 1, rate) for p, rate in (("b", 4.1), ("c", 4.0), ("d", 3.9))]
    view = view_of(replica("a", 0, 15.0), *wavering)
    assert propose_move(view, 2, 0.0, margin=0.15, copies=2) == Move("b", 1, 0, math.inf)
    fast = [replica("c", 1, 40.0), replica("d", 1, 40.0)]
    view = view_of(replica("a", 0, 4.0), replica("b", 0, 4.0), *fast)
    assert propose_move(view, 2, 0.0, margin=0.15) is not None
    assert propose_move(view, 2, 0.0, margin=0.15, copies=2) is None  # it would leave one copy
    view = view_of(replica("a", 0, 40.0), replica("b", 0, 40.0), replica("c", 1, 4.0))
    move = propose_move(view, 2, 0.0, margin=0.15, copies=2)
    assert move is not None  # one copy here or there
    assert move.gain == 9.0


@pytest.mark.parametrize(("here", "there", "worth"), [("cd", "a", True), ("c", "ae", False)])
def test_a_move_for_a_copy_is_looked_at_again(here: str, there: str, worth: bool) -> None:
    """The mover is `b`; it makes the richer stage richer."""
    view = view_of(replica("b", 1, 4.0, moving_to=0))
    for name in here:
        view.merge(replica(name, 1, 4.0), 0.0)
    for name in there:
        view.merge(replica(name, 0, 15.0), 0.0)
    assert not is_worth_it(view, 2, 0.0, Move("b", 1, 0, math.inf))
    assert is_worth_it(view, 2, 0.0, Move("b", 1, 0, math.inf), copies=2) is worth


stages = st.lists(
    st.lists(
        st.tuples(st.floats(0.5, 20.0), st.sampled_from([ACTIVE, ACTIVE, JOINING, LEAVING])),
        max_size=5,
    ),
    min_size=2,
    max_size=4,
)


@settings(max_examples=200, deadline=None)
@given(stages, st.integers(1, 3))
def test_moves_come_to_an_end_and_uncover_nothing(
    staff: list[list[tuple[float, str]]], copies: int
) -> None:
    view = View("me")
    num_stages = len(staff)
    for k, members in enumerate(staff):
        for i, (speed, state) in enumerate(members):
            view.merge(replica(f"p{k}{i}", k, speed, state=state), 0.0)

    def order() -> tuple[list[int], list[float]]:
        members = [
            [r for r in view.members(k, 0.0) if r.state != LEAVING] for k in range(num_stages)
        ]
        return (
            sorted(min(len(rs), copies) for rs in members),
            sorted(sum(r.samples_per_s for r in rs) for rs in members),
        )

    for version in range(1, 50):
        covered = [bool(view.replicas(k, 0.0)) for k in range(num_stages)]
        move = propose_move(view, num_stages, 0.0, margin=0.1, copies=copies)
        if move is None:
            break
        mover = view.get(move.peer_id)
        assert mover is not None
        assert (mover.stage, mover.state) == (move.source, ACTIVE)
        before = order()
        view.merge(replica(move.peer_id, move.target, mover.samples_per_s, version=version), 0.0)
        assert order() > before
        assert all(view.replicas(k, 0.0) for k in range(num_stages) if covered[k])
    assert propose_move(view, num_stages, 0.0, margin=0.1, copies=copies) is None


@pytest.mark.parametrize(
    ("gain", "passage_s", "worth"),
    [(0.02, 5.0, True), (0.02, 600.0, False), (0.2, 600.0, True), (float("inf"), 600.0, True)],
)
def test_a_small_gain_is_not_worth_a_long_time_without_work(
    gain: float, passage_s: float, worth: bool
) -> None:
    assert pays(Move("me", 1, 0, gain), passage_s, margin=0.15) is worth


def test_observers_do_not_move() -> None:
    view = view_of(replica("a", OBSERVER_STAGE, 100.0), replica("b", 0, 1.0))
    assert propose_move(view, 2, 0.0, margin=0.1) is None


def test_the_gate_wants_the_same_proposal_twice_and_then_rests() -> None:
    gate = MoveGate("me", times=2, cooldown_s=60.0)
    move, other = Move("me", 1, 0, 0.5), Move("me", 1, 2, 0.5)
    assert not gate.decide(move, 0.0)
    assert not gate.decide(other, 10.0)
    assert not gate.decide(move, 20.0)
    assert not gate.decide(None, 25.0)
    assert not gate.decide(move, 30.0)
    assert gate.decide(move, 40.0)
    assert not any(gate.decide(move, t) for t in (50.0, 60.0, 90.0))
    assert gate.decide(move, 101.0)
    assert not any(gate.decide(Move("you", 1, 0, 0.5), t) for t in (200.0, 210.0, 220.0))


def test_who_is_named_and_does_not_go_is_passed_over() -> None:
    passed = PassedOver("own", times=3, patient_times=5)
    move = Move("a", 0, 1, math.inf)
    for is_uncovered, times in ((True, 3), (False, 5)):  # a copy is missing in both

        def heard(move: Move | None, is_uncovered: bool = is_uncovered) -> None:
            passed.heard(move, is_uncovered=is_uncovered)

        heard(None)
        for _ in range(times - 1):
            heard(move)
        heard(Move("a", 2, 1, move.gain))  # another move: counted anew
        for _ in range(times - 1):
            heard(move)
        assert not passed.peers
        heard(move)
        assert passed.peers == {"a"}
        for _ in range(9):
            heard(Move("own", 0, 1, move.gain))  # its own gate decides
        assert passed.peers == {"a"}
    passed.heard(None, is_uncovered=False)
    assert not passed.peers


def test_of_two_that_decide_on_a_copy_in_one_moment_one_goes() -> None:
    for speed in (4.0, 15.0):
        going = [replica(p, 1, 4.0, moving_to=0) for p in "bc"]
        view = view_of(replica("a", 0, speed), *going, *(replica(p, 1, 4.0) for p in "de"))
        moves = [Move(p, 1, 0, math.inf) for p in "bc"]
        assert [is_worth_it(view, 2, 0.0, m, copies=2) for m in moves] == [True, False]
        one = [is_worth_it(view, 2, 0.0, m) for m in moves]
        assert one == ([True, False] if speed == 4.0 else [False, False])


def test_a_move_is_proposed_without_those_that_are_passed_over() -> None:
    view = view_of(replica("a", 0, 3.0), replica("b", 0, 2.0), replica("c", 0, 1.0))
    named: list[str] = []
    for _ in range(4):
        move = propose_move(view, 2, 0.0, margin=0.1, without=named)
        named += [move.peer_id] if move is not None else []
    assert sorted(named) == ["a", "b", "c"]
