"""What a user is told while the run cannot go on."""

from __future__ import annotations

import logging
import random

import pytest

from swarmnet.simulation.clock import run
from swarmnet.swarm.membership.reconnecting import Reconnecting
from swarmnet.swarm.recovery.waiting_notice import (
    SAY_ENDLESS_EVERY_S,
    SAY_EVERY_S,
    WAY_OUT,
    WaitingNotice,
)
from tests.swarm.one_replica import OneReplica

REASON = "round 3 lacks stage 1"


def test_a_reason_is_repeated_only_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    notice = WaitingNotice(None)
    for now in (0.0, SAY_EVERY_S / 2, SAY_EVERY_S, 1.5 * SAY_EVERY_S):
        notice.say(REASON, now)
    notice.say("", 100 * SAY_EVERY_S)
    assert [r.message for r in caplog.records] == [f"waiting: {REASON}"] * 2


def test_a_wait_that_only_a_person_can_end_names_the_way_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    notice = WaitingNotice(None)
    for now in (0.0, SAY_EVERY_S, SAY_ENDLESS_EVERY_S):
        notice.say(REASON, now, is_endless=True)
    assert [r.message for r in caplog.records] == [f"waiting: {REASON}; {WAY_OUT}"] * 2


def test_nothing_is_said_of_a_short_wait(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    notice = WaitingNotice(None)
    notice.put_off(100.0)
    notice.say(REASON, 100.0 + SAY_EVERY_S / 2)
    assert not caplog.records


def test_nobody_is_sent_the_way_out_while_peers_are_looked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)

    async def scenario() -> None:
        pair = OneReplica()
        notice = WaitingNotice(Reconnecting(pair.gossip, random.Random(0)))
        notice.say(REASON, 0.0, is_endless=True)
        await pair.close()

    run(scenario())
    (line,) = [r.message for r in caplog.records]
    assert "looking for peers" in line
    assert WAY_OUT not in line
