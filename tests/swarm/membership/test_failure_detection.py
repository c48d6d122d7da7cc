"""What happens when a peer dies: it is probed, suspected, and others hear of it."""

from __future__ import annotations

import asyncio

from swarmnet.swarm.membership.failure_detection import PROBE_TIMEOUT_S, STALL_S

from swarmnet.protocol.membership.records import LEFT
from swarmnet.protocol.membership.view import MAX_STAMP_LEAD
from swarmnet.simulation.clock import run
from swarmnet.swarm.messages import Suspicion
from swarmnet.transport.memory import MemoryHub
from tests.swarm.membership.parts import acquainted, now


def test_a_closed_channel_leads_to_a_suspicion_that_others_hear() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        a, _, c = acquainted(hub, "a", "b", "c")
        await a.exchange.reconcile("b")  # there is a channel
        suspected: list[str] = []
        a.failures.on_suspected(suspected.append)
        hub.kill("b")
        await asyncio.sleep(1.0)
        assert suspected == ["b"]
        assert c.view.detector.is_suspected("b"), "which had no channel to it"
        assert not a.failures.has_stalled("b"), "its channels are closed"

    run(scenario())


def test_a_peer_that_answers_is_not_suspected() -> None:
    async def scenario() -> None:
        a, *_ = acquainted(MemoryHub(), "a", "b")
        await a.failures.look_into(["b", "a"])
        assert not a.failures.suspicions()
        assert not len(a.tasks)

    run(scenario())


def test_who_has_left_is_not_probed_when_its_channel_closes() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        a, b = acquainted(hub, "a", "b")
        await a.exchange.reconcile("b")
        b.own.change(state=LEFT)
        a.knows(b)
        hub.kill("b")
        await asyncio.sleep(1.0)
        assert not a.view.detector.is_suspected("b")

    run(scenario())


def test_a_silent_peer_with_open_channels_counts_as_stalled_for_a_while() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        a, b = acquainted(hub, "a", "b")
        await a.exchange.reconcile("b")
        hub.freeze("b")
        began = now()
        await a.failures.look_into(["b"])
        assert now() - began >= PROBE_TIMEOUT_S
        assert a.failures.suspicions() == (Suspicion("b", *b.own.published),)
        assert a.failures.has_stalled("b")
        await asyncio.sleep(STALL_S)
        assert not a.failures.has_stalled("b")

    run(scenario())


def test_a_suspicion_of_this_peer_is_refuted_with_a_bounded_version() -> None:
    async def scenario() -> None:
        a, b = acquainted(MemoryHub(), "a", "b")
        incarnation, version = a.own.record.stamp
        a.failures.hear([Suspicion("a", incarnation, version + 10**6)])
        assert a.own.record.version == version + MAX_STAMP_LEAD + 1
        refuted = a.own.record.version
        a.failures.hear([Suspicion("a", incarnation + 1, 0)])
        assert a.own.record.version == refuted, "of a later life it can say nothing"
        await asyncio.sleep(1.0)
        known = b.view.get("a")
        assert known is not None
        assert known.version >= refuted, "it is pushed at once"

    run(scenario())
