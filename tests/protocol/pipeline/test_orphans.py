"""Microbatches of which nobody has said whether they count."""

from __future__ import annotations

import pytest

from swarmnet.protocol.membership.failure_detector import ALIVE, DEAD, SUSPECT, SUSPECT_S
from swarmnet.protocol.pipeline.orphans import (
    COUNTS,
    NEVER_COUNTS,
    WAITS,
    GoneFeeders,
    Question,
    fate,
)
from swarmnet.protocol.timing import LEAST_WAIT_S

LONGEST_S, MORE_S, AGAIN_S = 3.0, 1.0, 0.25


def asked(*, is_over: bool) -> Question:
    return Question(100.0, LONGEST_S, is_over=is_over, look_again_s=AGAIN_S)


def test_a_feeder_that_lives_is_asked_as_long_as_it_may_take() -> None:
    question = asked(is_over=True)
    assert question.left_s(100.0) == LONGEST_S
    assert question.goes_on(100.0, ALIVE, MORE_S, may_answer=True)
    assert not question.goes_on(100.0, ALIVE, MORE_S, may_answer=False), "it has said no"
    assert question.goes_on(103.0 - AGAIN_S, ALIVE, MORE_S, may_answer=True)
    assert not question.goes_on(103.1 - AGAIN_S, ALIVE, MORE_S, may_answer=True)
    assert question.left_s(200.0) == LEAST_WAIT_S


def test_before_it_is_late_one_looks_for_it_once() -> None:
    question = asked(is_over=True)
    assert not question.must_look(102.9)
    assert question.must_look(103.0)
    question.looked(104.0, MORE_S)
    assert question.left_s(104.0) == MORE_S
    assert not question.must_look(110.0)
    assert not asked(is_over=False).must_look(110.0), "there will be another time to ask"


@pytest.mark.parametrize("is_over", [True, False])
def test_one_that_may_be_back_is_waited_for_at_the_end_of_a_round(is_over: bool) -> None:
    question = asked(is_over=is_over)
    assert question.goes_on(103.0, SUSPECT, MORE_S, may_answer=False) == is_over
    if is_over:
        latest = 100.0 + LONGEST_S + SUSPECT_S
        assert question.goes_on(latest - AGAIN_S, SUSPECT, MORE_S, may_answer=False)
        assert not question.goes_on(latest, SUSPECT, MORE_S, may_answer=False)
    assert not question.goes_on(101.0, DEAD, MORE_S, may_answer=True)


def test_a_feeder_is_gone_when_it_does_not_live_at_two_looks_in_a_row() -> None:
    feeders, known = GoneFeeders(), {"a", "b"}

    def is_gone(feeder: str, *, is_live: bool) -> bool:
        return feeders.is_gone(feeder, is_live=is_live, is_known=known.__contains__)

    assert not is_gone("a", is_live=False)
    assert not is_gone("b", is_live=False)
    assert not is_gone("b", is_live=True)
    assert is_gone("a", is_live=False)
    assert not is_gone("b", is_live=False)
    known.clear()  # who is looked at is remembered all the same
    assert not is_gone("c", is_live=False)
    assert is_gone("c", is_live=False)
    assert not is_gone("a", is_live=False)


@pytest.mark.parametrize("is_over", [True, False])
def test_what_its_feeder_has_not_counted_may_count_only_while_the_round_goes_on(
    is_over: bool,
) -> None:
    fates = [fate(i, {1}, {2}, is_over=is_over) for i in (1, 2, 3)]
    assert fates == [COUNTS, NEVER_COUNTS if is_over else WAITS, NEVER_COUNTS]
