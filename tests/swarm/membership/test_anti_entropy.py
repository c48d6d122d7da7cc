"""An exchange makes two views equal, and carries suspicions."""

from __future__ import annotations

import asyncio

import pytest

from swarmnet.errors import WrongRun
from swarmnet.protocol.membership.failure_detector import PROBE_TIMEOUT_S
from swarmnet.protocol.timing import CONNECT_S
from swarmnet.simulation.clock import run
from swarmnet.transport.memory import MemoryHub
from tests.swarm.membership.parts import Site, acquainted


def test_after_one_exchange_both_know_what_either_knew() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        a, b, c, d = (Site(hub, name) for name in "abcd")
        a.knows(c)
        b.knows(d)
        assert await a.exchange.reconcile("b")
        await asyncio.sleep(1.0)  # what the partner wanted is sent on its way
        assert set(a.view.digest.stamps()) == set(b.view.digest.stamps()) == set("abcd")

    run(scenario())


def test_what_is_known_is_not_sent_again() -> None:
    async def scenario() -> None:
        a, _ = acquainted(MemoryHub(), "a", "b")
        await a.exchange.reconcile("b")
        assert not a.sent("records")

    run(scenario())


def test_a_suspicion_travels_and_its_subject_refutes_it() -> None:
    async def scenario() -> None:
        a, b, c = acquainted(MemoryHub(), "a", "b", "c")
        stamp = b.own.record.stamp
        a.liveness.unanswered("b", stamp)  # wrongly
        await a.exchange.reconcile("c")
        assert c.liveness.is_live("b"), "it looks for itself"
        await a.exchange.reconcile("b")
        assert b.own.record.stamp > stamp
        await asyncio.sleep(1.0)
        assert a.liveness.is_live("b")
        assert not a.liveness.suspicions()

    run(scenario())


def test_the_partner_is_another_live_peer() -> None:
    async def scenario() -> None:
        a, *_ = acquainted(MemoryHub(), "a", "b", "c")
        assert {a.exchange.partner() for _ in range(30)} == {"b", "c"}
        a.view.reach.unanswered("b", (9, 9), 0.0)
        assert {a.exchange.partner() for _ in range(30)} == {"c"}

    run(scenario())


def test_a_peer_that_cannot_be_reached_is_told_of_it_through_another() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        a, b, _ = acquainted(hub, "a", "b", "c")
        hub.partition("a", "b")
        assert not await a.exchange.reconcile("b", 2.0)
        await asyncio.sleep(PROBE_TIMEOUT_S + CONNECT_S + 1.0)
        assert len(b.unreached.doubts) == 1

    run(scenario())


def test_a_peer_of_another_run_is_an_error_only_where_it_is_asked_for() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        a, _ = acquainted(hub, "a", "b")
        hub.transports["a"].set_run("f" * 32)
        with pytest.raises(WrongRun):
            await a.exchange.reconcile("b")
        await a.exchange.hear_from("b", 2.0)

    run(scenario())
