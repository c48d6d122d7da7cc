"""Which round a run ends with that is stopped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmnet.protocol.membership.records import ACTIVE, Record
from swarmnet.protocol.pipeline.ending import (
    MARGIN_ROUNDS,
    MAX_MARGIN_ROUNDS,
    is_over,
    may_stand_still_s,
    state_of,
    stop_round,
)
from swarmnet.protocol.sync_modes import NO_END
from swarmnet.protocol.timing import ANSWER_S, BULK_S
from tests.protocol.making import counted


def at(round_index: int, open_s: float = 0.0, exchange_s: float = 0.0) -> Record:
    return Record(
        "peer",
        "run",
        1,
        1,
        state=ACTIVE,
        stage=0,
        round=round_index,
        last_open_s=open_s,
        last_exchange_s=exchange_s,
    )


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        ([at(5, 100.0), at(7, 90.0)], 7 + MARGIN_ROUNDS),
        ([at(7, 0.5, 0.5)], 7 + int(ANSWER_S)),
        ([at(7)], 7 + MARGIN_ROUNDS),
        ([at(7, 1e-9)], 7 + MAX_MARGIN_ROUNDS),
        ([], MARGIN_ROUNDS),
    ],
)
def test_all_have_heard_of_the_order_when_the_last_round_begins(
    replicas: list[Record], expected: int
) -> None:
    assert stop_round(replicas, NO_END) == expected
    assert stop_round(replicas, 8) == min(expected, 8)


def test_a_run_is_over_when_all_have_come_to_the_round() -> None:
    assert is_over([at(8), at(9)], 8)
    assert not is_over([at(8), at(7)], 8)
    assert is_over([], 8), "nobody is left to wait for"


def test_a_run_that_stands_still_is_not_waited_for_and_one_that_goes_on_is() -> None:
    some = replace(at(8, 30.0), counts=(counted(8, 2, 1),))
    more = replace(some, counts=(counted(8, 2, 2),))
    states = [
        state_of([]),
        state_of([at(7)]),
        state_of([at(8)]),
        state_of([some]),
        state_of([more]),
    ]
    assert sorted(set(states)) == states, "each is further than the one before"
    assert may_stand_still_s([at(8, 30.0), at(8)]) == BULK_S + 30.0
