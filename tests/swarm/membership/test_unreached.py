"""A peer learns through others that somebody cannot reach it."""

from __future__ import annotations

import asyncio

from swarmnet.methods.records import UNREACHED, Unreached
from swarmnet.protocol.membership.failure_detector import PROBE_TIMEOUT_S
from swarmnet.protocol.timing import CONNECT_S
from swarmnet.simulation.clock import run
from swarmnet.swarm.calls import notify, serve
from swarmnet.transport.base import Request
from swarmnet.transport.memory import MemoryHub
from swarmnet.wire import Message
from tests.swarm.membership.parts import acquainted

LOOK_S = PROBE_TIMEOUT_S + CONNECT_S + 1.0


def test_the_notice_is_passed_on_and_not_repeated_for_a_while() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        a, b, c = acquainted(hub, "a", "b", "c")
        hub.partition("a", "b")
        for _ in range(3):
            a.unreached.tell("b")
            await asyncio.sleep(0.2)
        await asyncio.sleep(LOOK_S)
        assert len(b.unreached.doubts) == 1
        a.unreached.tell("b")
        await asyncio.sleep(LOOK_S)
        assert len(b.unreached.doubts) == 2
        assert not a.unreached.doubts
        assert not c.unreached.doubts

    run(scenario())


def test_who_is_reached_accuses_in_vain() -> None:
    async def scenario() -> None:
        a, b, c = acquainted(MemoryHub(), "a", "b", "c")
        for _ in range(10):
            a.unreached.tell("b")
            for notice in (Unreached("b"), Unreached("b", by="a"), Unreached("b", by="nobody")):
                notify(c.transport, "b", UNREACHED, Message(notice))
            await asyncio.sleep(LOOK_S)
        assert not b.unreached.doubts

    run(scenario())


def test_nobody_accuses_in_the_name_of_another_who_is_reached() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        liar, b, *_ = acquainted(hub, "liar", "b", "c", "d")
        heard: list[Unreached] = []

        async def hear(request: Request[Unreached]) -> Message[None]:
            heard.append(request.message.body)
            return Message()

        serve(b.transport, UNREACHED, hear)
        notify(liar.transport, "c", UNREACHED, Message(Unreached("b", by="d")))
        await asyncio.sleep(0.2)
        assert [notice.by for notice in heard] == ["liar"]

    run(scenario())


def test_without_a_third_peer_nothing_is_said() -> None:
    async def scenario() -> None:
        a, b = acquainted(MemoryHub(), "a", "b")
        a.unreached.tell("b")
        await asyncio.sleep(1.0)
        assert not b.unreached.doubts
        assert not a.sent("unreached")

    run(scenario())
