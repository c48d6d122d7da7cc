"""Which replicas may have a microbatch, whose answer is the last word, and who is silent."""

from __future__ import annotations

import math

import pytest

from swarmnet.errors import Busy, NotReady, Refused, Stale, SwarmnetError, Taken
from swarmnet.protocol.membership.records import Record
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.moments import Deadline
from swarmnet.protocol.pipeline.dispatching import (
    DEPTH_GRACE_S,
    MAX_AHEAD,
    MAX_REFUSALS,
    Patience,
    Search,
    is_refused,
    look_again_s,
    unfit,
)
from swarmnet.protocol.pipeline.routing import MIN_DEADLINE_S
from swarmnet.protocol.timing import LEAST_WAIT_S
from tests.protocol.making import record

R = 5
PROBE_PART = 0.2


def view_of(*records: Record) -> View:
    view = View("own", silence_s=1e9)
    for one in records:
        view.merge(one, 0.0)
    return view


def replicas(*rounds: int) -> View:
    return view_of(*(record(f"p{i}", round=r) for i, r in enumerate(rounds)))


def search() -> Search:
    return Search(R, 0, (), False, Deadline(100.0))


# ---- who may have it ----------------------------------------------------------------------------


def test_who_has_not_opened_the_round_is_passed_over_while_others_have() -> None:
    assert unfit(replicas(R, R - 1, R + 1), 0, R, "f", slack=0, now=0.0) == ["p1"]
    assert unfit(replicas(R, R - 1, R - 2), 0, R, "f", slack=1, now=0.0) == ["p2"]
    nearest = unfit(replicas(R - 2, R - 1, R - 2), 0, R, "f", slack=0, now=0.0)
    assert nearest == ["p0", "p2"], "those that are nearest to it are asked, and will"
    assert unfit(replicas(R - 1, R - 1), 0, R, "f", slack=0, now=0.0) == []


def test_whom_the_feeder_cannot_reach_is_passed_over_while_there_are_others() -> None:
    cut = record("f", stage=1, unreached=("p0",), round=R)
    both = [record(f"p{i}", round=R) for i in range(2)]
    view = view_of(cut, *both)
    assert view.reach.are_cut("f", "p0")
    assert unfit(view, 0, R, "f", slack=0, now=0.0) == ["p0"]
    assert unfit(view, 0, R, "g", slack=0, now=0.0) == []
    assert unfit(view_of(cut, both[0]), 0, R, "f", slack=0, now=0.0) == [], "better than none"
    late = view_of(cut, record("p0", round=R), record("p1", round=R - 1))
    assert unfit(late, 0, R, "f", slack=0, now=0.0) == ["p1"], "nobody else has opened it"
    behind = view_of(cut, *(record(f"p{i}", round=R - i - 1) for i in range(2)))
    assert unfit(behind, 0, R, "f", slack=0, now=0.0) == ["p0"], "the others will open it"


# ---- whose answer is the last word --------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "is_last"),
    [
        (Stale("closed", round=R), True),
        (Stale("closed"), True),
        (Stale("not there yet", round=R - 1), False),
        (Taken("another flight"), True),
        (Busy("full"), False),
        (NotReady("joining"), False),
    ],
)
def test_one_answer(error: SwarmnetError, is_last: bool) -> None:
    assert search().is_last_word("p0", error, replicas(R, R, R), 0.0) is is_last


def test_that_a_round_is_over_takes_two_to_say_or_the_records_of_most() -> None:
    over, looking, view = Stale("over", round=R + 1), search(), replicas(R, R, R)
    assert not looking.is_last_word("p0", over, view, 0.0)
    assert not looking.is_last_word("p0", over, view, 0.0), "the same one once more"
    assert MAX_AHEAD == 2
    assert looking.is_last_word("p1", over, view, 0.0)
    assert search().is_last_word("p0", over, replicas(R), 0.0), "there is no other"
    assert not search().is_last_word("p0", over, replicas(R, R, R + 1), 0.0), "one record"
    assert search().is_last_word("p0", over, replicas(R, R + 1, R + 1), 0.0), "records show it"


def test_that_arrays_are_wrong_takes_three_to_say_or_all() -> None:
    wrong, looking, view = Refused("not finite"), search(), replicas(R, R, R, R)
    said = [looking.is_last_word(f"p{i}", wrong, view, 0.0) for i in range(MAX_REFUSALS)]
    assert said == [False, False, True]
    assert search().is_last_word("p0", wrong, replicas(R), 0.0)
    assert is_refused(view, 0, ["p0", "p1", "p2"], 0.0)
    assert not is_refused(view, 0, ["p0", "p1"], 0.0)


def test_what_lies_beyond_a_replica_that_failed_need_not_be_done_again() -> None:
    looking = Search(R, 0, ("a", "b"), True, Deadline(math.inf))
    assert looking.preferred("own") == "own"
    assert looking.preferred(None) == "a"
    first = Busy("full")
    looking.failed("own", first, None)
    assert (looking.preferred("own"), looking.last_error) == ("a", first)
    looking.failed("a", first, ("c", "d"))
    assert looking.hint == ("a", "c", "d")
    assert Search(R, 0, (), False, Deadline(0.0)).preferred("own") is None


def test_replicas_are_looked_at_again_when_one_is_ready_and_never_at_once() -> None:
    assert look_again_s(10.0, None, 0.2) == 0.2
    assert look_again_s(10.0, 15.0, 0.2) == 0.2
    assert look_again_s(10.0, 10.05, 0.2) == pytest.approx(0.05)
    assert look_again_s(10.0, 10.0, 0.2) == LEAST_WAIT_S


# ---- who is silent ------------------------------------------------------------------------------


def patience(
    deadline_s: float = 20.0, depth: int = 2, upload_s: float = 0.0, late_s: float | None = None
) -> Patience:
    late_s = deadline_s if late_s is None else late_s
    return Patience.begin(
        100.0, deadline_s, late_s, depth=depth, probe_part=PROBE_PART, upload_s=upload_s
    )


def test_a_callee_is_asked_long_before_it_is_late() -> None:
    usual = patience()
    assert usual.silence_s == 20.0 + 2 * DEPTH_GRACE_S
    assert usual.look_at == 100.0 + PROBE_PART * 20.0
    assert patience(deadline_s=1.0).look_s == MIN_DEADLINE_S
    assert patience(deadline_s=0.5, depth=0).look_s == 0.5, "no later than it is late"
    assert patience(upload_s=7.0).look_at == usual.look_at + 7.0, "what is sent first takes that"


def test_one_that_says_nothing_is_given_up_at_once_and_one_that_lives_when_it_is_late() -> None:
    waits = patience()
    assert waits.ends(None, 101.0)
    assert not waits.ends(False, 120.9), "it may not have come there yet"
    assert waits.ends(False, 121.0)


def test_one_that_is_slower_than_it_used_to_be_gets_the_time_again() -> None:
    waits = patience()
    assert not waits.ends(True, 121.0)
    assert waits.silent_since == 121.0
    assert not waits.ends(False, 141.9)
    assert waits.ends(False, 142.0)


def test_a_word_is_believed_a_few_times() -> None:
    """As is progress that leads nowhere: else whoever answers holds a microbatch for ever."""
    waits, now, num = patience(), 100.0, 0
    while not waits.ends(True, now):
        waits.heard(now + 0.5, 1)
        now, num = now + 1.0, num + 1
        assert num < 200
    assert 3 * waits.silence_s < now - 100.0 < 5 * waits.silence_s
    alone = patience()
    asked_at = (100.0 + i for i in range(1000))
    assert not any(alone.ends(True, now, is_only=True) for now in asked_at), "there is no other"


def test_progress_begins_the_silence_anew() -> None:
    waits = patience(upload_s=50.0)
    waits.heard(110.0, 0)
    assert (waits.silent_since, waits.look_at) == (110.0, 114.0)
    waits.wait_more(114.0)
    assert (waits.silent_since, waits.look_at) == (110.0, 118.0)
    assert not waits.ends(False, 130.9)
    assert waits.ends(False, 131.0)


def test_one_on_trial_is_late_before_it_is_given_up_and_no_earlier_after_progress() -> None:
    earlier = patience(late_s=9.0)
    earlier.look(earlier.look_at)
    assert not earlier.is_late
    waits = patience(late_s=1.0)
    assert waits.look_at == 100.0 + 1.0 + 2 * DEPTH_GRACE_S
    waits.heard(101.0, 0)
    assert waits.look_at == 101.0 + 1.0 + 2 * DEPTH_GRACE_S
    waits.look(102.999)
    assert waits.is_late, "a timer may be early"
    assert not waits.ends(True, 103.0)
    waits.wait_more(103.0)
    assert waits.look_at == 103.0 + waits.look_s
