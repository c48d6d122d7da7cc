"""What an exchange waits for, and how long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmnet.protocol.leftovers import ROOM_S
from swarmnet.protocol.membership.failure_detector import SUSPECT_S
from swarmnet.protocol.membership.records import ACTIVE, DIGEST_BYTES, JOINING, Record, Restorable
from swarmnet.protocol.moments import Deadline
from swarmnet.protocol.update.exchange_waits import (
    LONGEST_UPLOAD_S,
    UPLOAD_SLACK,
    WAIT_FACTOR,
    ExchangeDurations,
    ExchangeWaits,
    Pauses,
    brings_state,
    may_miss_members,
    turn_wait_s,
    upload_s,
)
from swarmnet.protocol.update.roster import ALIVE, DEAD, SUSPECT, MemberStatus

NOTHING_KNOWN = ExchangeWaits(0.0, 0.0, 2.0, 0.0, 0.0, 1.0, 60.0, 5.0, 6.0)
"""A second at least for contributions, a minute while nothing was measured."""


def test_nothing_is_known_so_a_slow_peer_is_not_suspected() -> None:
    waits = NOTHING_KNOWN
    assert not waits.is_known
    assert waits.usual_s == 0.0
    assert waits.contributions_due_s == 3.0, "when they should be there: as early as may be"
    assert waits.contributions_s == 60.0
    assert waits.norm_s == 66.0, "until the last shard has been summed"
    assert waits.sum_s == 2 * 60.0 + 66.0
    assert waits.result_s == 60.0 + 6.0
    assert waits.call_s == 66.0 + 60.0


def test_neighbours_are_waited_for_as_the_slowest_uplink_and_not_as_exchanges_took() -> None:
    """The rest of the time until contributions are due is for sending the sum."""
    waits = replace(NOTHING_KNOWN, exchange_s=4.0, upload_s=9.0)
    assert waits.gather_s == 1.0 + 2.0 + 9.0 / UPLOAD_SLACK
    assert waits.gather_s == replace(waits, exchange_s=40.0).gather_s
    assert waits.gather_s < waits.contributions_due_s - 9.0
    assert NOTHING_KNOWN.gather_s == NOTHING_KNOWN.contributions_due_s


def test_what_exchanges_took_bounds_every_wait() -> None:
    waits = replace(NOTHING_KNOWN, exchange_s=2.0)
    assert waits.is_known
    assert waits.usual_s == 2.0
    assert waits.contributions_s == waits.contributions_due_s == WAIT_FACTOR * 2.0 + 1.0 + 2.0
    assert waits.norm_s == waits.contributions_s + 6.0
    assert waits.sum_s == 2 * waits.contributions_s + waits.norm_s
    assert waits.result_s == waits.contributions_s + waits.lease_s
    assert replace(waits, exchange_s=100.0).contributions_s == 60.0, "and never for longer"


def test_the_slowest_uplink_is_a_measure_while_there_is_none() -> None:
    waits = replace(NOTHING_KNOWN, upload_s=90.0)
    assert not waits.is_known
    assert waits.usual_s == 90.0 / UPLOAD_SLACK
    assert waits.contributions_s == 90.0
    assert waits.norm_s == 96.0
    assert waits.call_s == 96.0 + 90.0 + 90.0


def test_beside_a_round_and_behind_own_steps_there_is_time() -> None:
    for longest in ({"beside_s": 800.0}, {"behind_s": 800.0}):
        waits = replace(NOTHING_KNOWN, **longest)
        assert waits.contributions_s == 800.0
        assert waits.norm_s == 806.0
    is_short = replace(NOTHING_KNOWN, exchange_s=2.0, beside_s=800.0)
    assert is_short.contributions_s == 11.0
    assert is_short.norm_s == 800.0, "the norm of all stages may come as late as the round ends"


def test_the_slowest_rate_that_is_known_counts_and_not_without_end() -> None:
    assert upload_s(1000, []) == 0.0
    assert upload_s(1000, [100.0, 50.0]) == UPLOAD_SLACK * 20.0
    assert upload_s(1000, [1e-3]) == LONGEST_UPLOAD_S


def test_a_wait_in_vain_is_a_measure_only_where_the_late_one_comes_after_all() -> None:
    durations = ExchangeDurations()
    durations.took(10.0)
    usual_s = durations.usual_s
    assert 0.0 < usual_s < 10.0
    durations.took(100.0, missed={"late"})
    durations.straggled("another")
    assert (durations.usual_s, durations.last_s) == (usual_s, 10.0)
    durations.straggled("late")
    slower_s = durations.usual_s
    assert slower_s > usual_s
    durations.straggled("late")
    assert durations.usual_s == slower_s, "once"


def test_an_exchange_that_says_nothing_of_others_is_no_measure() -> None:
    durations = ExchangeDurations()
    durations.took(-0.5, is_usual=False)
    assert (durations.usual_s, durations.last_s) == (0.0, 0.0)
    durations.took(4.0, is_usual=False, missed={"late"})
    durations.straggled("late")
    assert durations.usual_s == 0.0


def test_a_message_goes_when_the_link_has_room_or_its_time_has_come() -> None:
    latest = Deadline(20.0)
    assert turn_wait_s(0, 100.0, latest, 10.0) == 0.0
    assert turn_wait_s(int(100.0 * ROOM_S), 100.0, latest, 10.0) == 0.0
    assert turn_wait_s(500, 100.0, latest, 10.0) == pytest.approx(5.0 - ROOM_S)
    assert turn_wait_s(5000, 100.0, latest, 10.0) == 10.0
    assert turn_wait_s(5000, 100.0, latest, 20.0) == 0.0


def test_shards_share_a_pause_and_each_further_one_is_longer() -> None:
    pauses = Pauses(0.1, 1.0)
    assert not pauses.add(3, is_long=False)
    assert pauses.begin_s(9.0, is_long=False) == 0.1
    assert pauses.add(1, is_long=False), "it shares that"
    assert not pauses.add(2, is_long=True), "long ones are apart"
    assert pauses.begin_s(9.0, is_long=True) == 1.0
    assert pauses.end(is_long=False) == [3, 1]
    assert pauses.end(is_long=True) == [2]
    for is_long, longest_s in ((False, 1.0), (True, 9.0)):
        lengths = list[float]()
        for _ in range(9):
            assert not pauses.add(0, is_long=is_long)
            lengths.append(pauses.begin_s(9.0, is_long=is_long))
            assert pauses.end(is_long=is_long) == [0]
        assert lengths == sorted(lengths)
        assert lengths[0] == {False: 0.2, True: 2.0}[is_long]
        assert lengths[-1] == longest_s
    assert Pauses(0.1, 1.0).begin_s(0.0, is_long=True) == 1.0


BEGAN = 50.0


@pytest.mark.parametrize(
    ("exchange", "now", "member", "has_own", "may_miss"),
    [
        (0, BEGAN, MemberStatus(ALIVE, 8), True, True),  # all join at once
        (0, BEGAN + SUSPECT_S, MemberStatus(ALIVE, 8), True, True),
        (
            0,
            BEGAN + SUSPECT_S + 0.1,
            MemberStatus(ALIVE, 8),
            True,
            False,
        ),  # who lives is known by now
        (4, BEGAN, MemberStatus(ALIVE, 8), True, False),
        (4, BEGAN, MemberStatus(ALIVE, 8), False, False),
        (4, BEGAN, MemberStatus(SUSPECT, 8), False, False),
        (4, BEGAN, MemberStatus(ALIVE, 0), True, False),
        (4, BEGAN, MemberStatus(ALIVE, 0), False, True),  # somebody has the tokens
        (4, BEGAN, MemberStatus(ALIVE), False, True),
        (4, BEGAN, MemberStatus(DEAD, 8), False, True),
    ],
)
def test_who_has_tokens_may_not_be_known_yet(
    exchange: int, now: float, member: MemberStatus, has_own: bool, may_miss: bool
) -> None:
    assert may_miss_members(exchange, BEGAN, now, [member], has_own=has_own) == may_miss
    assert not may_miss_members(exchange, None, now, [member], has_own=has_own)


def test_who_is_about_to_bring_the_state_of_a_checkpoint_is_waited_for() -> None:
    offer = Restorable(7, 0, 1, b"\1")
    record = Record("p", "run", 1, 1, state=JOINING, round=7, restorable=(offer,))
    record = replace(record, digests=b"d" * DIGEST_BYTES)
    assert brings_state(record, 7)
    assert not brings_state(record, 8)
    assert not brings_state(replace(record, state=ACTIVE), 7)
    assert not brings_state(replace(record, restorable=()), 7)
    assert not brings_state(replace(record, digests=b""), 7), "it has nothing in place yet"


def test_a_grace_is_as_long_as_the_quorum_took_and_as_closing_takes() -> None:
    assert NOTHING_KNOWN.grace_s(7.0) == 7.0
    assert NOTHING_KNOWN.grace_s(0.5) == NOTHING_KNOWN.closing_s == 2.0
