"""What a record of a run cannot say."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from swarmnet.protocol.membership.records import (
    ACTIVE,
    JOINING,
    HeldOut,
    Record,
    Restorable,
    RoundCount,
)
from swarmnet.protocol.membership.run_bounds import ANY_RUN, MAX_CLOCK_ERROR_MS, RunBounds
from swarmnet.protocol.slots import SlotPlan, SlotSet
from swarmnet.protocol.sync_modes import ZERO, Switch

BOUNDS = RunBounds(2, 100, SlotPlan(((0, 8),)), 4, 256, (3, 9))
TOLD_AT = 1_700_000_000_000
SAVED = Restorable(100, 1, 9, bytes(2), TOLD_AT)
HONEST = Record(
    "a",
    "run",
    TOLD_AT,
    1,
    ACTIVE,
    1,
    100,
    counts=(RoundCount(100, SlotSet.of(0xFF), SlotSet.of(0xFF)),),
    digests=bytes(72),
    holds=bytes(2),
    fresh=bytes(2),
    held_out=HeldOut(100, 5.6, 8.1),
    restorable=(SAVED,),
    history=TOLD_AT,
    samples=32,
    declared=(99, 1000),
    switches=(Switch(99, ZERO, 1.0, 1.0),),
    moving_to=0,
)


def found(bounds: RunBounds = BOUNDS, **said: object) -> str:
    return bounds.impossible(replace(HONEST, **said), TOLD_AT)  # type: ignore[arg-type]


def test_what_an_honest_peer_says_at_the_end_of_a_run_can_be() -> None:
    assert found() == ""
    assert found(ANY_RUN) == ""


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"round": 101}, "round 101 of 100"),
        ({"stage": 2}, "stage 2 of 2"),
        ({"moving_to": 5}, "stage 5 of 2"),
        ({"restorable": (replace(SAVED, stage=2),)}, "stage 2 of 2"),
        ({"samples": 33}, "33 samples of a round, which has 32"),
        ({"counts": (RoundCount(101),)}, "round 101 of 100"),
        ({"restorable": (replace(SAVED, round=101),)}, "round 101 of 100"),
        ({"switches": (Switch(101, ZERO, 1.0, 1.0),)}, "round 101 of 100"),
        ({"declared": (101, 1)}, "round 101 of 100"),
        ({"counts": (RoundCount(5, SlotSet.of(1 << 8)),)}, "a slot beyond the 8"),
        ({"held_out": HeldOut(101, 5.6, 8.1)}, "a loss of 5.6 in 101"),
        ({"held_out": HeldOut(5, -1e14, 8.1)}, "a loss of -1e[+]14"),
        ({"held_out": HeldOut(5, 101 * math.log(256), 8.1)}, "a loss of 560"),
        ({"held_out": HeldOut(5, 5.6, -0.1)}, "a loss"),
        ({"held_out": HeldOut(5, 5.6, 1e4)}, "a loss"),
        ({"history": 1 << 61}, "began in"),
        ({"restorable": (replace(SAVED, history=1 << 61),)}, "began in"),
        ({"restorable": (Restorable(5, 1, 8, bytes(1)),)}, "8 shards of stage 1"),
        ({"digests": bytes(24)}, "other shards of stage 1 than the 9"),
        ({"holds": bytes(3)}, "other shards"),
        ({"fresh": bytes(3)}, "other shards"),
    ],
)
def test_what_cannot_be_is_named(said: dict[str, object], reason: str) -> None:
    assert re.search(reason, found(**said))


def test_the_slots_of_a_round_are_its_own() -> None:
    grown = replace(BOUNDS, slots=SlotPlan(((0, 4), (50, 8))))
    assert found(grown) == ""
    said = (RoundCount(49, SlotSet.of(0xF)), RoundCount(50, SlotSet.of(0xFF)))
    assert found(grown, counts=said) == ""
    assert "beyond the 4 of round 49" in found(grown, counts=(RoundCount(49, SlotSet.of(0x1F)),))


def test_a_clock_may_be_wrong_by_years() -> None:
    assert found(history=TOLD_AT + MAX_CLOCK_ERROR_MS) == ""
    assert found(history=TOLD_AT + MAX_CLOCK_ERROR_MS + 1) != ""


def test_a_newcomer_may_have_digests_of_another_stage() -> None:
    assert found(state=JOINING, digests=bytes(24)) == ""


def test_the_loss_of_a_model_without_tokens_may_be_negative() -> None:
    custom = replace(BOUNDS, num_values=0)
    assert found(custom, held_out=HeldOut(5, -3.0, 0.0)) == ""
    assert found(custom, held_out=HeldOut(5, -1e16, 0.0)) != ""
