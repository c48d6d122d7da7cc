from __future__ import annotations

import math

import pytest

from swarmnet.protocol.membership import failure_detector
from swarmnet.protocol.membership.failure_detector import FailureDetector


def test_a_peer_is_sound_until_it_is_silent_or_suspected() -> None:
    detector = FailureDetector("me", silence_s=10.0)
    assert not detector.is_sound("a", 0.0), "it is not known"
    detector.heard("a", (1, 5), 0.0)
    detector.heard("b", (1, 5), 5.0)
    assert detector.sound(["a", "b"], 10.0) == ["a", "b"]
    assert detector.sound(["a", "b"], 10.1) == ["b"]
    detector.suspect("b", (1, 5), 6.0)
    assert not detector.is_sound("b", 6.0)
    assert detector.is_sound("a", 6.0)


def test_the_own_peer_is_sound_however_long_it_is_silent() -> None:
    detector = FailureDetector("me", silence_s=10.0)
    detector.heard("me", (1, 5), 0.0)
    assert detector.is_sound("me", 1000.0)
    assert detector.sound(["me"], 1000.0) == ["me"]


def test_only_a_higher_stamp_refutes_a_suspicion() -> None:
    detector = FailureDetector("me")
    detector.heard("a", (1, 5), 0.0)
    assert detector.suspect("a", (1, 7), 1.0)
    assert not detector.suspect("a", (1, 6), 1.0)
    detector.heard("a", (1, 7), 2.0)
    assert detector.is_suspected("a")
    detector.heard("a", (1, 8), 3.0)
    assert not detector.is_suspected("a")


def test_only_the_newest_suspicions_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "MAX_SUSPICIONS", 2)
    detector = FailureDetector("me")
    for number, peer_id in enumerate("cba"):
        detector.suspect(peer_id, (1, number), 0.0)
    detector.suspect("c", (1, 9), 1.0)
    assert detector.suspicions() == [("a", (1, 2)), ("c", (1, 9))]
    assert detector.is_suspected("b"), "it is in force, though it is not told"


def test_the_time_since_a_peer_is_gone_begins_with_the_earlier_sign() -> None:
    detector = FailureDetector("me", silence_s=10.0)
    assert detector.gone_s("a", 0.0) == math.inf
    detector.heard("a", (1, 5), 0.0)
    assert detector.gone_s("a", 9.0) == 0.0
    assert detector.gone_s("a", 12.0) == 2.0
    assert detector.silent_s("a", 12.0) == 12.0
    detector.suspect("a", (1, 5), 4.0)
    assert detector.gone_s("a", 12.0) == 8.0
    detector.forget("a")
    assert detector.gone_s("a", 12.0) == math.inf


def test_time_in_which_the_own_process_stood_still_does_not_count() -> None:
    detector = FailureDetector("me", silence_s=10.0)
    detector.heard("a", (1, 5), 0.0)
    detector.suspect("b", (1, 5), 0.0)
    detector.stood_still(25.0, 30.0)
    assert detector.silent_s("a", 30.0) == 5.0
    assert detector.gone_s("b", 30.0) == math.inf, "its stamp never advanced here"


def test_no_peer_becomes_silent_before_the_next_silence() -> None:
    detector = FailureDetector("me", silence_s=10.0)
    for number, peer_id in enumerate("abc"):
        detector.heard(peer_id, (1, 1), 3.0 * number)
    assert detector.next_silence_at("abc", 9.0) == 10.0
    assert detector.next_silence_at("abc", 11.0) == 13.0, "a is silent already"
    assert detector.next_silence_at("", 11.0) == 21.0
