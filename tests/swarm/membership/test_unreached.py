"""A peer learns through others that somebody cannot reach it."""

from __future__ import annotations

import asyncio

from swarmnet.protocol.timing import CONNECT_S
from swarmnet.simulation.clock import run
from swarmnet.transport.memory import MemoryHub
from tests.swarm.membership.parts import acquainted


def test_the_notice_is_passed_on_and_not_repeated_for_a_while() -> None:
    async def scenario() -> None:
        a, b, c = acquainted(MemoryHub(), "a", "b", "c")
        for _ in range(3):
            a.unreached.tell("b")
            await asyncio.sleep(0.2)
        assert len(b.unreached.doubts) == 1
        await asyncio.sleep(CONNECT_S)
        a.unreached.tell("b")
        await asyncio.sleep(0.2)
        assert len(b.unreached.doubts) == 2
        assert not a.unreached.doubts
        assert not c.unreached.doubts

    run(scenario())


def test_without_a_third_peer_nothing_is_said() -> None:
    async def scenario() -> None:
        a, b = acquainted(MemoryHub(), "a", "b")
        a.unreached.tell("b")
        await asyncio.sleep(1.0)
        assert not b.unreached.doubts
        assert not a.sent("unreached")

    run(scenario())
