from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.backoff import FIRST_PAUSE_S
from swarmnet.protocol.membership import failure_detector
from swarmnet.protocol.membership.failure_detector import (
    ALIVE,
    DEAD,
    PROBE_PART,
    SUSPECT,
    SUSPECT_S,
    TICK_S,
    Changed,
    CopyDetector,
    FailureDetector,
    LateCallees,
    Look,
    TellSuspicion,
    TellUnreached,
)


def detector_with(*peer_ids: str, channels: tuple[str, ...] = ()) -> FailureDetector:
    """Of peers of which there was news at time 0."""
    detector = FailureDetector("me", silence_s=10.0)
    for peer_id in peer_ids:
        detector.heard(peer_id, (1, 5), 0.0)
    for machine in channels:
        detector.opened(machine)
    return detector


def test_a_peer_is_alive_until_it_is_silent_or_lost() -> None:
    detector = detector_with("a")
    assert detector.state_of("stranger", 0.0) is DEAD
    detector.heard("b", (1, 5), 5.0)
    assert detector.sound(["a", "b"], 10.0) == ["a", "b"]
    assert detector.sound(["a", "b"], 10.1) == ["b"]
    assert detector.state_of("a", 10.1) is DEAD, "there is no channel to it"
    detector.unanswered("b", (1, 5), 6.0)
    assert detector.state_of("b", 6.0) is DEAD
    assert not detector.is_sound("b", 6.0)
    assert detector.state_of("a", 6.0) is ALIVE


def test_the_own_peer_is_alive_however_long_it_is_silent() -> None:
    detector = detector_with("me")
    assert detector.state_of("me", 1000.0) is ALIVE
    assert detector.sound(["me"], 1000.0) == ["me"]
    assert detector.unanswered("me", (1, 5), 1000.0) == []


def test_a_lost_peer_is_suspect_as_long_as_a_channel_is_open_and_not_for_ever() -> None:
    detector = detector_with("a/1", channels=("a",))
    assert detector.unanswered("a/1", (1, 5), 2.0) == [
        TellUnreached("a/1"),
        TellSuspicion("a/1", (1, 5)),
        Changed("a/1", SUSPECT),
    ]
    assert detector.suspect_until("a/1") == 2.0 + SUSPECT_S
    assert detector.passed(2.0 + SUSPECT_S - 0.1) == []
    assert detector.passed(2.0 + SUSPECT_S) == [Changed("a/1", DEAD)]
    assert detector.passed(3.0 + SUSPECT_S) == [], "once"
    assert detector.state_of("a/1", 2.0 + SUSPECT_S) is DEAD


def test_a_channel_that_closes_ends_the_suspicion() -> None:
    detector = detector_with("a", channels=("a",))
    detector.unanswered("a", (1, 5), 2.0)
    assert detector.closed("a", 3.0) == [Look("a"), Changed("a", DEAD)]
    assert detector.state_of("a", 3.0) is DEAD


def test_all_seats_of_a_machine_are_looked_at_when_its_channel_closes() -> None:
    detector = detector_with("a", channels=("a",))
    for other in ("a/1", "ab", "b/1"):
        detector.heard(other, (1, 5), 2.0)
    assert detector.closed("a", 3.0) == [Look("a"), Look("a/1")]
    assert detector.closed("c", 3.0) == []


def test_a_silent_peer_with_a_channel_may_be_back() -> None:
    detector = detector_with("a", channels=("a",))
    assert detector.state_of("a", 10.1) is SUSPECT
    assert detector.state_of("a", 10.0 + SUSPECT_S) is DEAD


def test_news_by_others_do_not_make_a_lost_peer_alive() -> None:
    """They prove that it lives, so it takes part in the run; and lead to one look."""
    detector = detector_with("a")
    detector.unanswered("a", (1, 5), 2.0)
    assert detector.heard("a", (1, 6), 3.0) == [Look("a")]
    assert detector.heard("a", (1, 7), 4.0) == []
    assert detector.state_of("a", 4.0) is DEAD
    assert detector.is_sound("a", 4.0)
    assert detector.out_of_reach() == ["a"]
    assert detector.answered("a", 5.0) == [Changed("a", ALIVE)]
    assert detector.state_of("a", 5.0) is ALIVE
    assert detector.out_of_reach() == []


def test_others_only_make_this_peer_look() -> None:
    detector = detector_with("a")
    assert detector.suspected_by_another("a", (1, 4), (1, 5), 1.0) == [], "there is newer news"
    assert detector.suspected_by_another("a", (1, 5), (1, 5), 1.0) == [Look("a")]
    assert detector.state_of("a", 1.0) is ALIVE
    assert detector.suspected_by_another("stranger", (1, 5), (1, 5), 1.0) == []
    assert detector.suspected_by_another("me", (1, 5), (1, 5), 1.0) == []


def test_of_a_peer_out_of_reach_the_word_of_others_counts() -> None:
    """A look of this peer says nothing about whether it lives."""
    detector = detector_with("a")
    detector.unanswered("a", (1, 5), 1.0)
    detector.heard("a", (1, 6), 2.0)
    assert detector.suspected_by_another("a", (1, 6), (1, 6), 3.0) == []
    assert not detector.is_sound("a", 3.0)
    detector.heard("a", (1, 7), 4.0)
    assert detector.is_sound("a", 4.0)


def test_only_a_higher_stamp_refutes_a_suspicion() -> None:
    detector = detector_with("a")
    detector.unanswered("a", (1, 7), 1.0)
    detector.heard("a", (1, 7), 2.0)
    assert detector.is_suspected("a")
    detector.heard("a", (1, 8), 3.0)
    assert not detector.is_suspected("a")


def test_a_further_loss_is_told_to_the_lost_peer_only() -> None:
    detector = detector_with("a")
    detector.unanswered("a", (1, 5), 1.0)
    detector.heard("a", (1, 6), 2.0)
    assert detector.unanswered("a", (1, 6), 5.0) == [TellUnreached("a")]
    assert detector.suspicions() == [], "it lives"


def test_a_lost_peer_that_calls_is_looked_at_now_and_then() -> None:
    detector = detector_with("a", "b")
    detector.unanswered("a", (1, 5), 1.0)
    assert detector.called("a", 1.0 + FIRST_PAUSE_S / 2) == []
    assert detector.called("a", 1.0 + FIRST_PAUSE_S) == [Look("a")]
    detector.looks("a")
    assert detector.called("a", 50.0) == [], "a look is under way"
    detector.unanswered("a", (1, 5), 60.0)
    assert detector.called("a", 60.0 + FIRST_PAUSE_S) == [Look("a")]
    assert detector.called("b", 60.0) == []


def test_only_the_newest_suspicions_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "MAX_SUSPICIONS", 2)
    detector = detector_with(*"abc")
    for number, peer_id in enumerate("cba"):
        detector.unanswered(peer_id, (1, 5 + number), 0.0)
    detector.suspected_by_another("c", (1, 9), (1, 5), 1.0)
    assert detector.suspicions() == [("a", (1, 7)), ("c", (1, 9))]
    assert detector.is_suspected("b"), "it is in force, though it is not told"


def test_the_time_since_a_peer_is_gone_begins_with_the_earlier_sign() -> None:
    detector = detector_with()
    assert detector.gone_s("a", 0.0) == math.inf
    detector.heard("a", (1, 5), 0.0)
    assert detector.gone_s("a", 9.0) == 0.0
    assert detector.gone_s("a", 12.0) == 2.0
    assert detector.silent_s("a", 12.0) == 12.0
    detector.unanswered("a", (1, 5), 4.0)
    assert detector.gone_s("a", 12.0) == 8.0
    detector.forget("a")
    assert detector.gone_s("a", 12.0) == math.inf


def test_time_in_which_the_own_process_stood_still_does_not_count() -> None:
    detector = detector_with("a", "b", channels=("b",))
    detector.unanswered("b", (1, 5), 4.0)
    detector.clock.tick(4.5)
    assert detector.awake_s(30.0) == pytest.approx(5.0)
    assert detector.silent_s("a", 30.0) == pytest.approx(5.0)
    assert detector.state_of("b", 30.0) is SUSPECT
    assert detector.state_of("b", 30.0 + SUSPECT_S) is DEAD


def test_no_peer_becomes_silent_before_the_next_silence() -> None:
    detector = detector_with()
    for number, peer_id in enumerate("abc"):
        detector.heard(peer_id, (1, 1), 3.0 * number)
    assert detector.next_silence_at("abc", 9.0) == 10.0
    assert detector.next_silence_at("abc", 11.0) == 13.0, "a is silent already"
    assert detector.next_silence_at("", 11.0) == 21.0


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["heard", "answered", "unanswered", "suspected", "called", "opened", "closed", "passed"]
        ),
        st.floats(0.0, 12.0),
    ),
    max_size=30,
)


@given(EVENTS)
def test_what_is_told_is_what_is(events: list[tuple[str, float]]) -> None:
    """Whoever follows the changes knows the state, but for silence; a lost peer is alive again
    only by its own answer; and a dead one is never suspect again without having been alive."""
    detector, now, version = detector_with("a"), 0.0, 5
    known = ALIVE
    for event, after_s in events:
        now += after_s
        was_lost = detector.is_lost("a")
        due = detector.passed(now)
        match event:
            case "heard":
                version += 1
                due += detector.heard("a", (1, version), now)
            case "answered":
                due += detector.answered("a", now)
            case "unanswered":
                due += detector.unanswered("a", (1, version), now)
            case "suspected":
                due += detector.suspected_by_another("a", (1, version), (1, version), now)
            case "called":
                due += detector.called("a", now)
            case "opened":
                found = detector.opened("a")
                assert found == [Look("a")] * was_lost
                due += found
            case "closed":
                due += detector.closed("a", now)
            case _:
                pass
        for command in due:
            if isinstance(command, Changed):
                assert (known, command.state) not in {(DEAD, SUSPECT), (known, known)}
                known = command.state
        if was_lost and not detector.is_lost("a"):
            assert event == "answered"
        if detector.is_lost("a"):
            assert detector.state_of("a", now) is known
        else:
            assert known is ALIVE


def test_a_late_callee_is_looked_at_the_less_often_the_longer_its_calls_take() -> None:
    late = LateCallees()
    assert not late.is_due("a", 0.0, 0.0, TICK_S / 2)
    assert late.is_due("a", 0.0, 0.0, TICK_S)
    assert not late.is_due("a", 0.0, 0.0, 1.5 * TICK_S)
    assert late.is_due("a", 0.0, 0.0, 2 * TICK_S)
    assert not late.is_due("b", 0.0, 100.0, 100.0 * PROBE_PART - 0.1)
    assert late.is_due("b", 0.0, 100.0, 100.0 * PROBE_PART)
    assert not late.is_due("b", 0.0, 100.0, 1.5 * 100.0 * PROBE_PART)
    late.forget("b")
    assert late.is_due("b", 0.0, 100.0, 1.5 * 100.0 * PROBE_PART)


def test_only_a_later_process_that_goes_on_making_versions_is_a_living_copy() -> None:
    own, late, silence_s = 10, 12, 8.0

    def heard(*news: tuple[float, tuple[int, int]]) -> list[bool]:
        copies = CopyDetector()
        return [copies.heard(stamp, own, now, silence_s) for now, stamp in news]

    assert heard((0, (late, 1)), (4, (late, 2)), (8, (late, 3))) == [False, False, True]
    # One that died is heard of as long as its last records spread.
    assert not any(heard((0, (late, 7)), (7, (late, 9)), (90, (late, 8)), (100, (late, 9))))
    # What a part of the swarm that was cut off knows of it comes later still.
    assert not any(heard((0, (late, 3)), (30, (late, 5)), (60, (late, 6)), (64, (late, 7))))
    assert heard((0, (late, 3)), (30, (late, 5)), (34, (late, 6)), (38, (late, 7)))[-1]
    # The process before this one; and one that is started again and again.
    assert not any(heard((0, (own - 1, 1)), (50, (own - 1, 2))))
    assert heard((0, (late, 1)), (7, (late + 1, 1)), (11, (late + 1, 2)), (15, (late + 1, 3))) == [
        *([False] * 3),
        True,
    ]
