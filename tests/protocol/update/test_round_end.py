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
from swarmnet.protocol.update.members import RESTS
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


RATE = 1000.0


def waits(
    newcomers: Newcomers,
    now: float,
    live: dict[str, Record] | None = None,
    rate: float = RATE,
    queued: int = 0,
) -> bool:
    here = newcomer() if live is None else live
    return newcomers.are_waited_for(here, 9, lambda peer_id: queued, rate, now)


def test_a_round_waits_for_a_newcomer_until_it_has_begun_the_next_one() -> None:
    for others in ({}, newcomer(state=ACTIVE), newcomer(round_index=10)):
        newcomers = Newcomers()
        assert not waits(newcomers, NOW), "it gets nothing from here"
        newcomers.gets("new", 0, 1000, NOW)
        assert waits(newcomers, NOW)
        assert waits(newcomers, NOW + 1, newcomer(round_index=9))
        assert not waits(newcomers, NOW + 1, others)


def test_no_longer_than_its_bytes_take() -> None:
    newcomers = Newcomers()
    takes_s = UPLOAD_SLACK * 2.0
    for shard in (0, 1, 0, 1):
        newcomers.gets("new", shard, 1000, NOW)
    assert waits(newcomers, NOW + takes_s - 0.1)
    assert not waits(newcomers, NOW + takes_s)
    newcomers = Newcomers()
    newcomers.gets("new", 0, 10**9, NOW)
    assert waits(newcomers, NOW + PATIENCE_S - 0.1)
    assert not waits(newcomers, NOW + PATIENCE_S)


def test_where_no_rate_is_known_until_they_have_left() -> None:
    newcomers = Newcomers()
    newcomers.gets("new", 0, 1000, NOW)
    assert waits(newcomers, NOW + PATIENCE_S - 0.1, rate=0.0, queued=1)
    assert not waits(newcomers, NOW + PATIENCE_S, rate=0.0, queued=1)
    newcomers = Newcomers()
    newcomers.gets("new", 0, 1000, NOW)
    assert not waits(newcomers, NOW, rate=0.0)
    newcomers.gets("new", 0, 1000, NOW)
    assert waits(newcomers, NOW, rate=0.0, queued=1), "what took no time needs no rest"


def asks(newcomers: Newcomers, now: float) -> bool:
    """Whether one that asks now is waited for."""
    newcomers.gets("new", 0, 1000, now)
    return waits(newcomers, now)


def test_who_keeps_coming_and_is_slow_takes_a_small_part_of_the_time() -> None:
    newcomers, now = Newcomers(), NOW
    for rest in (RESTS, RESTS):  # each begins the next round a second after it was waited for
        assert asks(newcomers, now)
        now += 1.0
        assert not waits(newcomers, now, newcomer(round_index=10))
        assert not asks(newcomers, now + rest - 0.1)
        now += rest
    for rest in (2 * RESTS, 4 * RESTS, 8 * RESTS):  # and these never do
        assert asks(newcomers, now)
        now += UPLOAD_SLACK
        assert not waits(newcomers, now)
        assert not asks(newcomers, now + rest * UPLOAD_SLACK - 0.1)
        now += rest * UPLOAD_SLACK
    assert asks(newcomers, now)
    assert not waits(newcomers, now + 1.0, newcomer(round_index=10))
    assert asks(newcomers, now + 1.0 + RESTS)
