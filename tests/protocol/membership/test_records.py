"""Bounds of what a peer may say of itself."""

from __future__ import annotations

import math
from typing import Any

import pytest

from swarmnet.protocol.membership.records import (
    ACTIVE,
    MAX_COUNT,
    MAX_LOSS_SUM,
    MAX_RATE,
    Record,
    RoundCount,
)
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.pipeline.progress import round_progress
from swarmnet.protocol.pipeline.slots import MAX_SLOTS, SlotSet, all_slots


@pytest.mark.parametrize(
    "said",
    [
        {"committed": SlotSet.of(1)},
        {"launched": SlotSet.of(5), "committed": SlotSet.of(1), "settled": SlotSet.of(2)},
        {"tokens": MAX_COUNT},
        {"loss_sum": 2 * MAX_LOSS_SUM},
        {"loss_sum": math.nan},
        {"loss_sum": -math.inf},
    ],
)
def test_a_count_beyond_all_bounds_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"of a round|round's|committed"):
        RoundCount(0, **said)


@pytest.mark.parametrize("value", [2 * MAX_RATE, math.inf, math.nan, -1.0])
@pytest.mark.parametrize("name", ["samples_per_s", "exchange_s", "last_open_s", "spread"])
def test_a_rate_beyond_all_bounds_is_refused(name: str, value: float) -> None:
    rate: Any = {name: value}
    with pytest.raises(ValueError, match="rate"):
        Record("a", "run", 1, 1, **rate)


def test_what_many_say_at_most_adds_up_to_what_one_may_say() -> None:
    view = View("me")
    every = SlotSet.of(all_slots(MAX_SLOTS))
    most = RoundCount(0, every, every, True, MAX_COUNT - 1, MAX_LOSS_SUM)
    for i in range(100):
        view.merge(Record(f"p{i}", "run", 1, 1, state=ACTIVE, counts=(most,)), 0.0)
    state = round_progress(view, 0, 0.0, 64)
    assert state.committed == 64
    assert state.tokens < 2**62
    assert math.isfinite(state.loss_sum)
