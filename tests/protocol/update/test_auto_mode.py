"""What is said of times may be anything that a record takes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.membership.records import ACTIVE, MAX_RATE, Record
from swarmnet.protocol.sync_modes import AUTO, DELAYED, ZERO, Switch, SyncPlan
from swarmnet.protocol.update.auto_mode import (
    AHEAD_ROUNDS,
    KEPT_EXCHANGES,
    MOST_STEPS,
    Adviser,
    Chooser,
    OwnTimes,
    heard,
    known_switches,
    local_steps_for,
    merge,
)

any_s = st.floats(0.0, MAX_RATE)


def test_as_many_steps_as_hide_an_exchange() -> None:
    assert local_steps_for(1.0, 2.0) == 18
    assert local_steps_for(10.0, 0.1) == 1


def test_the_mode_after_a_warm_up_is_decided_by_its_last_rounds() -> None:
    plan = SyncPlan(AUTO, rounds=1000, warmup_rounds=100)
    chooser = Chooser()
    found = [(r, s) for r in range(120) if (s := chooser.decide(plan, r, 1.0, 1.0)) is not None]
    r, switch = found[0]
    assert 90 < r < 101
    assert switch.round >= 100
    assert switch.mode == DELAYED


@given(any_s, any_s)
def test_no_time_that_a_peer_says_breaks_the_decision(round_s: float, exchange_s: float) -> None:
    adviser, chooser = Adviser(), Chooser()
    plan = SyncPlan(AUTO, rounds=100)
    for r in range(5):
        assert 0 <= adviser.steps(round_s, exchange_s) <= MOST_STEPS
        chooser.decide(plan, r, round_s, exchange_s)


DELAYED_AT_3 = Switch(3, DELAYED, 1.0, 1.0)


def at(round_index: int, *switches: Switch) -> Record:
    return Record("a", "run", 1, 1, state=ACTIVE, stage=0, round=round_index, switches=switches)


def test_what_nobody_can_have_decided_yet_is_not_heard() -> None:
    early, late = (Switch(5 + AHEAD_ROUNDS + more, ZERO, 1.0, 0.01) for more in (1, 2))
    assert heard([at(5, DELAYED_AT_3, early, late)]) == [DELAYED_AT_3, early]


def test_a_round_that_one_says_alone_makes_no_decision_heard() -> None:
    far = [Switch(1 << 40, DELAYED, 1.0, 1.0)] * 4
    honest = [replace(at(5, DELAYED_AT_3), peer_id=p) for p in "bcd"]
    liar = replace(at(1 << 40, *far), peer_id="z")
    assert heard([*honest, liar]) == [DELAYED_AT_3] * 3


def test_the_holder_of_the_newest_parameters_is_asked_for_only_where_modes_differ() -> None:
    plan = SyncPlan(AUTO, 100, switches=(DELAYED_AT_3,))
    coming, late = Switch(9, ZERO, 1.0, 0.01), Switch(5, ZERO, 1.0, 0.01)

    def never() -> Record | None:
        raise AssertionError

    for others in ((), (DELAYED_AT_3,), (coming,)):
        found = known_switches(plan, 5, others, never, is_synced=True)
        assert found == (merge(plan.switches, others), False)
    ours, theirs = at(5, DELAYED_AT_3), at(6, DELAYED_AT_3, late)
    others = (DELAYED_AT_3, late, coming)
    found = known_switches(plan, 5, others, lambda: ours, is_synced=True)
    assert found == ((DELAYED_AT_3, coming), False), "the own parameters hold"
    found = known_switches(plan, 5, others, lambda: theirs, is_synced=True)
    assert found == ((DELAYED_AT_3, late, coming), True)
    found = known_switches(plan, 5, others, lambda: None, is_synced=True)
    assert found == ((DELAYED_AT_3, coming), False)


def test_a_newcomer_takes_what_the_newest_replica_knows() -> None:
    plan, late = SyncPlan(AUTO, 100), Switch(5, ZERO, 1.0, 0.01)
    found = known_switches(plan, 0, (late,), lambda: at(6, DELAYED_AT_3), is_synced=False)
    assert found == ((DELAYED_AT_3,), False)
    assert known_switches(plan, 0, (late,), lambda: None, is_synced=False) == ((late,), False)


def test_rounds_are_smoothed_and_of_exchanges_the_shortest_counts() -> None:
    times = OwnTimes()
    assert times.add(0.0, 8.0, 3.0, 0.25) == (8.0, 3.0)
    assert times.add(8.0, 4.0, 5.0, 0.25) == (7.0, 3.0)
    for _ in range(KEPT_EXCHANGES - 1):
        times.add(7.0, 7.0, 6.0, 0.25)
    assert times.add(7.0, 7.0, 6.0, 0.25) == (7.0, 6.0)
