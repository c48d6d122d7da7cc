"""What is known of an exchange is kept as long as a straggler may ask."""

from __future__ import annotations

import pytest

from swarmnet.protocol.sync_modes import LOCAL, ZERO, SyncPlan
from swarmnet.protocol.update.exchange_turn import Turn, may_be_asked, turn_of


@pytest.mark.parametrize(
    "plan", [SyncPlan(ZERO, 100), SyncPlan(LOCAL, 100, local_steps=10)], ids=[ZERO, LOCAL]
)
def test_whoever_may_have_the_result_of_an_exchange_can_still_be_told_of_it(plan: SyncPlan) -> None:
    for ended in range(60):
        for exchange in range(ended + 1):
            if turn_of(plan, 0, exchange, ended + 1) is Turn.LAST:
                assert may_be_asked(plan, 0, exchange, ended)
    assert may_be_asked(plan, 0, 9, 18) == (plan.mode == LOCAL)
    assert not may_be_asked(plan, 0, 9, 22)
