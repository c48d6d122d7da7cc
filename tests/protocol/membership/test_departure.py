"""When a replica may leave its stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swarmnet.protocol.membership.assignment import LONG_PASSAGE_S
from swarmnet.protocol.membership.departure import (
    MOVE_PATIENCE_S,
    Inside,
    MovePatience,
    heirs,
    is_handed_over,
)
from swarmnet.protocol.membership.records import JOINING, Record, bitmap
from tests.protocol.making import record

EMPTY = Inside(round=9, shards=(0, 2))


def other(name: str, holds: list[int], round_index: int = 9) -> Record:
    return record(name, round=round_index, holds=bitmap(holds, 3))


def may_go(inside: Inside, *others: Record, alone: bool = False) -> bool:
    return is_handed_over(inside, others, (), num_rounds=20, alone=alone)


def test_each_shard_has_to_be_with_another_one_in_the_same_round() -> None:
    assert may_go(EMPTY, other("a", [0]), other("b", [2]))
    assert not may_go(EMPTY, other("a", [0, 1]))
    assert not may_go(EMPTY, other("a", [0]), other("b", [2], 8))
    assert may_go(replace(EMPTY, round=20), other("a", [])), "the run is over"


@pytest.mark.parametrize(
    "what",
    [{"num_in_flight": 1}, {"is_closing": True}, {"has_gradient": True}, {"is_owing": True}],
)
def test_nothing_may_be_inside(what: dict[str, Any]) -> None:
    assert not may_go(replace(EMPTY, **what), other("a", [0, 2]))


def test_where_no_other_is_there_it_may_only_go_for_good_and_not_before_a_newcomer() -> None:
    busy = replace(EMPTY, is_owing=True)
    assert may_go(busy, alone=True)
    assert not may_go(busy, alone=False)
    newcomers = [other("new", [])]
    assert not is_handed_over(EMPTY, (), newcomers, num_rounds=20, alone=True)


def test_a_moving_peer_stays_until_its_round_is_fed_or_for_a_while() -> None:
    quick: dict[str, Any] = {"is_fed": False, "may_give": True, "passage_s": 1.0}

    def begun() -> MovePatience:
        patience = MovePatience(9)
        assert not patience.is_over(100.0, 9, **quick)
        return patience

    late = 100.0 + MOVE_PATIENCE_S
    assert not begun().is_over(late - 0.1, 9, **quick)
    assert begun().is_over(late, 9, **quick)
    assert not begun().is_over(late, 9, **(quick | {"may_give": False}))
    assert not begun().is_over(late, 9, **(quick | {"passage_s": 2 * LONG_PASSAGE_S}))
    assert begun().is_over(101.0, 9, **(quick | {"is_fed": True}))
    assert begun().is_over(101.0, 10, **quick), "the round is over"


def test_heirs_stay_and_are_in_the_round() -> None:
    members = [
        record("own", round=9),
        record("b", round=9),
        record("a", round=9),
        record("late", round=8),
        record("moves", round=9, moving_to=1),
        record("joins", round=9, state=JOINING),
    ]
    assert heirs(members, "own", 9) == ["b", "a"]
