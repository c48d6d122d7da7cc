"""What is said of times may be anything that a record takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.membership.records import MAX_RATE
from swarmnet.protocol.update.auto_mode import MOST_STEPS, Adviser, Chooser, local_steps_for
from swarmnet.protocol.update.sync_modes import AUTO, SyncPlan

any_s = st.floats(0.0, MAX_RATE)


def test_as_many_steps_as_hide_an_exchange() -> None:
    assert local_steps_for(1.0, 2.0) == 18
    assert local_steps_for(10.0, 0.1) == 1


@given(any_s, any_s)
def test_no_time_that_a_peer_says_breaks_the_decision(round_s: float, exchange_s: float) -> None:
    adviser, chooser = Adviser(), Chooser()
    plan = SyncPlan(AUTO, rounds=100)
    for r in range(5):
        assert 0 <= adviser.steps(round_s, exchange_s) <= MOST_STEPS
        chooser.decide(plan, r, round_s, exchange_s)
