"""How long a peer waits before it begins a stage that nobody serves."""

from __future__ import annotations

from typing import Any

from swarmnet.protocol.empty_stage import ALONE_S, EMPTY_STAGE_S, known_round, patience_s
from swarmnet.protocol.membership.records import JOINING, OBSERVING, Record
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.recovery import RESTORE_PATIENCE_S
from tests.protocol.making import record

NOW = 100.0
SILENCE_S = 10.0


def view_of(*records: Record, at: float = NOW) -> View:
    view = View("own", silence_s=SILENCE_S)
    for one in records:
        view.merge(one, at)
    return view


def other(name: str, **said: Any) -> Record:
    return record(name, **said)


def test_the_first_peer_of_a_run_begins_at_once() -> None:
    assert patience_s(view_of(record("own", state=JOINING)), 0, NOW) == 0.0


def test_in_a_run_that_goes_on_a_replica_may_yet_be_heard_of() -> None:
    beside = other("a", stage=1, round=7)
    assert patience_s(view_of(beside), 0, NOW) == EMPTY_STAGE_S
    gone = other("b", stage=0, round=7, state=OBSERVING)
    assert patience_s(view_of(beside, gone), 0, NOW) == EMPTY_STAGE_S


def test_one_that_served_the_stage_and_did_not_leave_may_be_back() -> None:
    view = view_of(other("b", stage=0, round=6))
    view.merge(other("a", stage=1, round=7), NOW + 2 * SILENCE_S)
    assert patience_s(view, 0, NOW + 2 * SILENCE_S) == RESTORE_PATIENCE_S
    own = view_of(record("own", stage=0, round=6), other("a", stage=1, round=7))
    assert patience_s(own, 0, NOW) == EMPTY_STAGE_S, "that was this peer"


def test_who_hears_of_nobody_of_a_run_that_has_begun_is_cut_off_rather() -> None:
    view = view_of(other("a", stage=1, round=7))
    assert patience_s(view, 0, NOW + 2 * SILENCE_S) == ALONE_S
    assert known_round(view) == 7
    assert known_round(view_of(other("a", round=7, state=OBSERVING))) == 0
    assert known_round(view_of(other("a", round=7, state=JOINING, stage=-1))) == 0
