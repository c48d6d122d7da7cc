"""The reason of a failed dial, also when the daemon does not repeat it."""

from __future__ import annotations

import pytest

from swarmnet.transport.libp2p import dial_reasons
from swarmnet.transport.libp2p.dial_reasons import OTHER_PROTOCOL, DialReasons

A, B = "/ip4/192.0.2.7/tcp/1", "/ip4/192.0.2.8/tcp/2"
REFUSED = "connection refused: nothing listens there"


def failure(address: str, reason: str) -> str:
    return f"failed to dial: all dials failed\n  * [{address}] {reason}\n"


def test_a_reason_is_that_of_the_address_asked_for() -> None:
    text = failure(B, "i/o timeout") + failure(A, "dial tcp4: connect: connection refused")
    assert DialReasons().explain(text, [A, B]) == REFUSED
    assert DialReasons().explain(text, [B, A]) == "no answer in time"


def test_in_a_dial_backoff_the_reason_is_from_before() -> None:
    reasons = DialReasons()
    reasons.explain(failure(A, "connection refused"), [A])
    assert reasons.explain(failure(A, "dial backoff"), [A]) == REFUSED


def test_text_without_an_address_is_one_line_too() -> None:
    assert DialReasons().explain("protocols not supported: [/x]", []) == OTHER_PROTOCOL
    assert DialReasons().explain("something\n  new", [A]) == "something new"
    assert DialReasons().explain("\x1b[2Jnew", []) == "\\x1b[2Jnew"


def test_reasons_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial_reasons, "MAX_REASONS", 1)
    reasons = DialReasons()
    reasons.explain(failure(A, "connection refused"), [A])
    reasons.explain(failure(B, "i/o timeout"), [B])
    assert reasons.explain(failure(B, "dial backoff"), [B]) == "no answer in time"
    assert "dial backoff" in reasons.explain(failure(A, "dial backoff"), [A])
