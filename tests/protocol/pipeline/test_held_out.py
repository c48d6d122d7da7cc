"""Who measures the held-out loss, and in which rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmnet.protocol.membership.records import HeldOut, Record
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.pipeline.held_out import is_due, is_held, measurer, told, turn
from tests.protocol.making import counted, record, with_count

R, SLOTS, ROUNDS = 10, 4, 20


def view_of(*records: Record) -> View:
    view = View("own", silence_s=1e9)
    for one in records:
        view.merge(one, 0.0)
    return view


def feeder(peer_id: str, launched: int = 0, committed: int = 0, **fields: object) -> Record:
    one = record(peer_id, has_data=True, round=R, **fields)
    return with_count(one, counted(R, launched, committed)) if launched else one


def who(*records: Record, num_stages: int = 1) -> str | None:
    return measurer(view_of(*records), R, num_stages=num_stages, num_slots=SLOTS, now=0.0)


@pytest.mark.parametrize(
    ("round_index", "every", "due"),
    [(10, 5, True), (11, 5, False), (0, 5, True), (10, 0, False), (20, 0, True), (21, 5, True)],
)
def test_it_is_measured_every_so_often_and_at_the_end(
    round_index: int, every: int, due: bool
) -> None:
    assert is_due(round_index, every=every, rounds=ROUNDS) is due


def test_the_feeder_whose_turn_it_is_measures_where_every_stage_has_a_replica() -> None:
    first = turn("ab", R)
    assert first is not None
    assert who(feeder("b"), feeder("a")) == first
    assert who(record("a"), feeder("b")) == "b"
    assert who(record("a")) is None
    assert who(feeder("a"), num_stages=2) is None
    assert who(feeder("a"), record("c", stage=1), num_stages=2) == "a"


def test_every_feeder_has_its_turn_and_a_newcomer_changes_few() -> None:
    turns = [turn("abcd", r) for r in range(400)]
    assert all(70 < turns.count(p) < 130 for p in "abcd")
    with_one_more = [turn("abcde", r) for r in range(400)]
    assert all(now in (before, "e") for before, now in zip(turns, with_one_more, strict=True))


def test_only_who_has_the_turn_can_have_measured() -> None:
    mine = HeldOut(R, 2.0, 1.0)
    first, other = sorted("ab", key=lambda p: p != turn("ab", R))
    assert who(feeder(other), feeder(first, held_out=mine)) is None
    assert who(feeder(other), feeder(first, held_out=HeldOut(R + 1, 2.0, 1.0))) is None
    assert who(feeder(other, held_out=mine), feeder(first)) == first
    assert who(feeder(first), record("z", held_out=HeldOut(1 << 60, 2.0, 1.0))) == first


def test_what_another_says_to_have_measured_is_not_told() -> None:
    first, other = sorted("ab", key=lambda p: p != turn("ab", R))
    true, false = HeldOut(R, 2.0, 1.0), HeldOut(R, 0.1, 0.1)
    records = [feeder(first, held_out=true), feeder(other, held_out=false)]
    assert told(records, "ab") == {R: true}
    assert told(reversed(records), "ab") == {R: true}
    assert told([feeder(first, held_out=replace(false, round=R + 2))], [first]) == {}, "too early"
    assert told([record(first, round=R, held_out=false)], [other]) == {}, "it has no data"


def test_one_that_measured_for_whoever_held_no_round_is_believed() -> None:
    first, other = sorted("ab", key=lambda p: p != turn("ab", R))
    mine = HeldOut(R, 2.0, 1.0)
    late, measured = feeder(first), feeder(other, SLOTS, SLOTS, held_out=mine)
    assert told([late, measured], "ab") == {R: mine}


def test_who_came_when_all_slots_were_launched_measures_only_where_no_other_does() -> None:
    first, other = sorted("ab", key=lambda p: p != turn("ab", R))
    assert who(feeder(first), feeder(other, SLOTS - 1)) == first
    assert who(feeder(first), feeder(other, SLOTS)) == other


def test_a_round_is_held_when_all_of_it_is_committed() -> None:
    def held(committed: int, round_index: int = R) -> bool:
        view = view_of(feeder("a", SLOTS, committed))
        return is_held(view, round_index, rounds=ROUNDS, num_slots=SLOTS, now=0.0)

    assert not held(SLOTS - 1)
    assert held(SLOTS)
    assert not is_held(view_of(), ROUNDS, rounds=ROUNDS, num_slots=SLOTS, now=0.0)
