"""Who measures the held-out loss, and in which rounds."""

from __future__ import annotations

import pytest

from swarmnet.protocol.membership.records import HeldOut, Record
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.pipeline.held_out import is_due, is_held, measurer
from tests.protocol.making import counted, record

R, SLOTS, ROUNDS = 10, 4, 20


def view_of(*records: Record) -> View:
    view = View("own", silence_s=1e9)
    for one in records:
        view.merge(one, 0.0)
    return view


def feeder(peer_id: str, launched: int = 0, committed: int = 0, **fields: object) -> Record:
    one = record(peer_id, has_data=True, round=R, **fields)
    return one.with_count(counted(R, launched, committed)) if launched else one


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


def test_the_first_feeder_measures_where_every_stage_has_a_replica() -> None:
    assert who(feeder("b"), feeder("a")) == "a"
    assert who(record("a"), feeder("b")) == "b"
    assert who(record("a")) is None
    assert who(feeder("a"), num_stages=2) is None
    assert who(feeder("a"), record("c", stage=1), num_stages=2) == "a"


def test_what_another_has_measured_is_not_measured_again() -> None:
    assert who(feeder("a"), record("z", held_out=HeldOut(R, 2.0, 1.0))) is None
    assert who(feeder("a"), record("z", held_out=HeldOut(R + 1, 2.0, 1.0))) is None
    assert who(feeder("a"), record("z", held_out=HeldOut(R - 1, 2.0, 1.0))) == "a"


def test_who_came_when_all_slots_were_launched_measures_only_where_no_other_does() -> None:
    assert who(feeder("a"), feeder("b", SLOTS - 1)) == "a"
    assert who(feeder("a"), feeder("b", SLOTS)) == "b"


def test_a_round_is_held_when_all_of_it_is_committed() -> None:
    def held(committed: int, round_index: int = R) -> bool:
        view = view_of(feeder("a", SLOTS, committed))
        return is_held(view, round_index, rounds=ROUNDS, num_slots=SLOTS, now=0.0)

    assert not held(SLOTS - 1)
    assert held(SLOTS)
    assert not is_held(view_of(), ROUNDS, rounds=ROUNDS, num_slots=SLOTS, now=0.0)
