"""Every listener hears, whatever another one does."""

from __future__ import annotations

import logging

import pytest

from swarmnet.transport.listeners import Listeners


def test_one_that_fails_is_logged_and_the_others_hear(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []

    def broken(peer_id: str) -> None:
        raise ValueError("a bug")

    listeners = Listeners()
    for callback in (heard.append, broken, heard.append):
        listeners.add(callback)
    listeners.add(gone := heard.clear)
    listeners.remove(gone)
    with caplog.at_level(logging.ERROR, "swarmnet.transport"):
        listeners.tell("p")
    assert heard == ["p", "p"]
    assert [r.getMessage() for r in caplog.records] == ["a listener failed"]
