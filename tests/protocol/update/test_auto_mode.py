"""What is said of times may be anything that a record takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.membership.records import MAX_RATE
from swarmnet.protocol.sync_modes import AUTO, DELAYED, SyncPlan
from swarmnet.protocol.update.auto_mode import MOST_STEPS, Adviser, Chooser, local_steps_for

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
