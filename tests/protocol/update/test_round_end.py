"""When a replica ends its round, and when it opens the next one before that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, Record
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.timing import PATIENCE_S
from swarmnet.protocol.update import round_end
from swarmnet.protocol.update.exchange_waits import UPLOAD_SLACK
from swarmnet.protocol.update.replica_phase import Heard, Phase, State
from swarmnet.protocol.update.round_end import Contributed, Newcomers
from tests.protocol.making import counted, with_count

NOW, NUM_SLOTS, NUM_ROUNDS = 100.0, 4, 20
OPEN = Phase(State.OPEN, 9)


def feeder(name: str = "feeder", round_index: int = 9, **slots: Any) -> Record:
    own = Record(name, "run", 1, 1, state=ACTIVE, stage=0, round=round_index, has_data=True)
    return with_count(own, counted(9, **slots))


def view_of(*records: Record) -> View:
    view = View("own")
    for record in records:
        view.merge(record, NOW)
    return view


def is_over(phase: Phase, *records: Record) -> bool:
    return round_end.is_over(view_of(*records), phase, 9, NOW, NUM_SLOTS)


def test_a_round_is_over_when_it_is_drained_or_others_are_past_it() -> None:
    assert not is_over(OPEN, feeder(launched=4))
    assert is_over(OPEN, feeder(launched=4, committed=4, sealed=True))
    assert is_over(OPEN, feeder(round_index=10))
    assert is_over(OPEN.hears(9, Heard.OVER), feeder())
    assert not is_over(OPEN.hears(9, Heard.LAUNCHED), feeder())


def test_a_round_is_fed_by_what_records_say_or_calls_tell() -> None:
    def is_fed(phase: Phase, *records: Record) -> bool:
        return round_end.is_fed(view_of(*records), phase, 9, NOW, NUM_SLOTS)

    assert not is_fed(OPEN, feeder(launched=3))
    assert is_fed(OPEN, feeder(launched=4))
    assert is_fed(OPEN.hears(9, Heard.LAUNCHED), feeder())


@pytest.mark.parametrize(
    ("phase", "said", "may"),
    [
        (OPEN, {}, True),
        (Phase(State.AHEAD, 9), {}, False),
        (Phase(State.OPEN, 8), {}, False),
        (OPEN, {"state": LEAVING}, False),
        (OPEN, {"moving_to": 1}, False),
    ],
)
def test_the_next_round_is_opened_ahead_by_who_will_be_there(
    phase: Phase, said: dict[str, Any], may: bool
) -> None:
    own = replace(Record("own", "run", 1, 1, state=ACTIVE, stage=0, round=9), **said)
    assert round_end.may_open_ahead(phase, own, 9, NUM_ROUNDS) == may
    assert not round_end.may_open_ahead(phase, own, 9, 10), "it is the last"


def test_contributions_of_most_others_show_that_a_round_is_over_and_one_does_not() -> None:
    contributed, others = Contributed(), ["a", "b", "c"]
    assert not contributed.is_over("a", 4, others)
    assert not contributed.is_over("a", 4, others), "one, twice"
    assert not contributed.is_over("stranger", 4, others)
    assert contributed.is_over("c", 4, others)
    assert not contributed.is_over("b", 5, others), "of another round"
    assert not contributed.is_over("b", 5, [])


def newcomer(name: str = "new", round_index: int = 3, state: str = JOINING) -> dict[str, Record]:
    return {name: Record(name, "run", 1, 1, state=state, stage=0, round=round_index)}


def test_a_round_waits_for_a_newcomer_until_it_has_begun_the_next_one() -> None:
    newcomers = Newcomers()
    assert not newcomers.are_waited_for(newcomer(), 9, 1e6, NOW), "it gets nothing from here"
    newcomers.gets("new", 1000, NOW)
    assert newcomers.are_waited_for(newcomer(), 9, 1000.0, NOW + 1)
    assert newcomers.are_waited_for(newcomer(round_index=9), 9, 1000.0, NOW + 1)
    assert not newcomers.are_waited_for(newcomer(round_index=10), 9, 1000.0, NOW + 1)
    for others in ({}, newcomer(state=ACTIVE)):
        newcomers.gets("new", 1000, NOW)
        assert not newcomers.are_waited_for(others, 9, 1000.0, NOW + 1)


def test_as_long_as_its_bytes_take_and_once() -> None:
    newcomers = Newcomers()
    rate, takes_s = 1000.0, UPLOAD_SLACK * 2.0
    for _ in range(2):
        newcomers.gets("new", 1000, NOW)
    assert newcomers.are_waited_for(newcomer(), 9, rate, NOW + takes_s - 0.1)
    assert not newcomers.are_waited_for(newcomer(), 9, rate, NOW + takes_s)
    newcomers.gets("new", 1000, NOW + takes_s)
    assert not newcomers.are_waited_for(newcomer(), 10, rate, NOW + takes_s)
    newcomers.gets("other", 10**9, NOW)
    assert newcomers.are_waited_for(newcomer("other"), 10, rate, NOW + PATIENCE_S - 0.1)
    assert not newcomers.are_waited_for(newcomer("other"), 10, rate, NOW + PATIENCE_S)
    newcomers.gets("third", 1, NOW)
    assert newcomers.are_waited_for(newcomer("third"), 10, 0.0, NOW + PATIENCE_S - 0.1)
