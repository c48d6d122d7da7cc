"""What happens when a peer dies: it is looked at, lost, and others look for themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from swarmnet.errors import DeadlineExceeded, Unreachable
from swarmnet.methods.contact import RELAY_RESERVE, RelayGrant
from swarmnet.methods.records import Suspicion
from swarmnet.protocol.membership.failure_detector import (
    ALIVE,
    DEAD,
    PROBE_TIMEOUT_S,
    SUSPECT,
    SUSPECT_S,
    State,
)
from swarmnet.protocol.membership.pace import REFUTE_EVERY_S
from swarmnet.protocol.membership.reach import MAX_STAMP_LEAD
from swarmnet.protocol.membership.records import LEFT
from swarmnet.protocol.timing import CONNECT_S
from swarmnet.simulation.clock import VirtualLoop, run
from swarmnet.transport.base import Request
from swarmnet.transport.memory import MemoryHub
from swarmnet.wire import Message
from tests.swarm.membership.parts import Site, acquainted, now


def test_a_closed_channel_leads_to_a_look_and_others_look_for_themselves() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        a, _, c = acquainted(hub, "a", "b", "c")
        await a.exchange.reconcile("b")  # there is a channel
        changes: list[tuple[str, State]] = []
        a.liveness.on_change(lambda peer_id, state: changes.append((peer_id, state)))
        hub.kill("b")
        await asyncio.sleep(1.0)
        assert changes == [("b", DEAD)], "its channels are closed"
        assert c.liveness.state_of("b") is DEAD, "which had no channel to it"

    run(scenario())


def test_a_suspicion_of_others_makes_nobody_dead() -> None:
    async def scenario() -> None:
        a, b, _ = acquainted(MemoryHub(), "a", "b", "c")
        a.liveness.hear([Suspicion("b", *b.own.published)])
        assert a.liveness.is_live("b")
        await asyncio.sleep(1.0)
        assert a.liveness.is_live("b")
        assert b.transport.traffic.received_bytes["ping"], "it was looked at"
        assert not a.liveness.suspicions()

    run(scenario())


def test_a_peer_that_answers_is_alive() -> None:
    async def scenario() -> None:
        a, *_ = acquainted(MemoryHub(), "a", "b")
        await a.liveness.look_into(["b", "a"])
        assert a.liveness.is_live("b")
        assert not a.liveness.suspicions()
        assert not len(a.tasks)

    run(scenario())


def test_who_has_left_is_not_looked_at_when_its_channel_closes() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        a, b = acquainted(hub, "a", "b")
        await a.exchange.reconcile("b")
        b.own.change(state=LEFT)
        a.knows(b)
        hub.kill("b")
        await asyncio.sleep(1.0)
        assert not a.view.detector.is_lost("b")

    run(scenario())


def test_what_has_ended_is_told_though_who_has_left_closes_its_channel() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        a, b, _ = acquainted(hub, "a", "b", "c")
        for other in ("b", "c"):
            await a.exchange.reconcile(other)
        b.own.change(state=LEFT)
        a.knows(b)
        hub.freeze("c")
        await a.liveness.look_into(["c"])
        changes: list[tuple[str, State]] = []
        a.liveness.on_change(lambda peer_id, state: changes.append((peer_id, state)))
        await asyncio.sleep(SUSPECT_S + 1.0)
        hub.kill("b")
        await asyncio.sleep(0.1)
        assert changes == [("c", DEAD)]
        assert not a.view.detector.is_lost("b")

    run(scenario())


def test_a_silent_peer_with_open_channels_is_suspect_for_a_while() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        a, b = acquainted(hub, "a", "b")
        a.liveness.start()
        await a.exchange.reconcile("b")
        hub.freeze("b")
        changes: list[State] = []
        a.liveness.on_change(lambda _, state: changes.append(state))
        began = now()
        await a.liveness.look_into(["b"])
        assert now() - began >= PROBE_TIMEOUT_S
        assert a.liveness.suspicions() == (Suspicion("b", *b.own.published),)
        assert a.liveness.state_of("b") is SUSPECT
        assert a.view.detector.suspect_until("b") == pytest.approx(now() + SUSPECT_S)
        await asyncio.sleep(SUSPECT_S + 1.0)
        assert a.liveness.state_of("b") is DEAD
        hub.thaw("b")
        await a.liveness.look_into(["b"])
        assert changes == [SUSPECT, DEAD, ALIVE]
        a.liveness.stop()

    run(scenario())


def test_a_dial_that_takes_longer_than_a_ping_says_nothing() -> None:
    """As the first one does over a link that is slow, or busy, or through a second relay."""

    async def scenario() -> None:
        a, _ = acquainted(MemoryHub(), "a", "b")
        call = a.transport.call

        async def dialled(peer_id: str, method: str, message: Message, **options: Any) -> Message:
            await asyncio.sleep(min(dial_s, options["timeout_s"]))
            if dial_s > options["timeout_s"]:
                raise DeadlineExceeded("no channel yet")
            return await call(peer_id, method, message, **options)

        a.transport.call = dialled  # type: ignore[method-assign]
        a.transport.connected = list  # type: ignore[method-assign]
        dial_s = PROBE_TIMEOUT_S + 1.0
        await a.liveness.look_into(["b"])
        assert a.liveness.state_of("b") is ALIVE
        dial_s = PROBE_TIMEOUT_S + CONNECT_S + 1.0
        began = now()
        await a.liveness.look_into(["b"])
        assert a.liveness.state_of("b") is SUSPECT
        assert now() - began == pytest.approx(PROBE_TIMEOUT_S + CONNECT_S)

    run(scenario())


def test_a_channel_that_the_other_opens_meanwhile_is_asked_again() -> None:
    async def scenario() -> None:
        a, _ = acquainted(MemoryHub(), "a", "b")
        call, tries = a.transport.call, list[float]()

        async def dials(peer_id: str, method: str, message: Message, **options: Any) -> Message:
            tries.append(options["timeout_s"])
            if len(tries) == 1:
                a.transport.connected = lambda: ["b"]  # type: ignore[method-assign]
                raise DeadlineExceeded("its own dial is under way")
            return await call(peer_id, method, message, **options)

        a.transport.call = dials  # type: ignore[method-assign]
        await a.liveness.look_into(["b"])
        assert a.liveness.state_of("b") is ALIVE
        assert tries == [PROBE_TIMEOUT_S + CONNECT_S, PROBE_TIMEOUT_S]

    run(scenario())


def test_a_peer_out_of_reach_stays_dead_whatever_is_heard_of_it_until_it_answers() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        a, b, c = acquainted(hub, "a", "b", "c", stage=0)
        await a.exchange.reconcile("b")
        hub.partition("a", "b")
        await a.liveness.look_into(["b"])
        for _ in range(10):
            b.own.change(round=b.own.record.round + 1)
            c.own.change()
            c.knows(b)
            a.knows(b, c)  # by c
            await asyncio.sleep(1.0)
            assert not a.liveness.is_live("b")
            assert a.view.is_live("b", now()), "it takes part in the run"
        assert a.own.record.unreached == ("b",)
        hub.heal("a", "b")
        await b.exchange.reconcile("a")  # b calls: a looks
        await asyncio.sleep(1.0)
        assert a.liveness.is_live("b")
        assert a.own.record.unreached == ()

    run(scenario())


def test_a_way_in_one_direction_is_no_way() -> None:
    """Messages of b arrive, and nothing that is sent to it."""

    class OneWay:
        def delivery_s(self, source: str, target: str, size: int, now: float) -> float | None:
            return None if (source, target) == ("a", "b") else 0.001

    async def scenario() -> None:
        hub = MemoryHub(network=OneWay())
        a, b, _ = acquainted(hub, "a", "b", "c")
        a.liveness.start()
        await a.liveness.look_into(["b"])
        b.own.change(round=1)
        a.knows(b)
        loop_pings = a.sent("ping")
        for _ in range(50):  # each message of b might lead to a look
            b.pushes.now()
            await asyncio.sleep(0.2)
            assert not a.liveness.is_live("b")
        assert 2 <= (a.sent("ping") - loop_pings) // (loop_pings or 1) <= 5
        a.liveness.stop()

    run(scenario())


def test_a_suspicion_of_this_peer_is_refuted_with_a_bounded_version() -> None:
    async def scenario() -> None:
        a, b = acquainted(MemoryHub(), "a", "b")
        incarnation, version = a.own.record.stamp
        a.liveness.hear([Suspicion("a", incarnation, version + 10**6)])
        assert a.own.record.version == version + MAX_STAMP_LEAD + 1
        refuted = a.own.record.version
        a.liveness.hear([Suspicion("a", incarnation + 1, 0)])
        assert a.own.record.version == refuted, "of a later life it can say nothing"
        await asyncio.sleep(1.0)
        known = b.view.get("a")
        assert known is not None
        assert known.version >= refuted, "it is pushed at once"

    run(scenario())


def test_suspicions_again_and_again_do_not_have_this_peer_sign_each_time() -> None:
    async def scenario() -> None:
        a, b = acquainted(MemoryHub(), "a", "b")
        a.liveness.start()
        first, signed = a.own.record.version, set()
        for _ in range(300):
            a.liveness.hear([Suspicion("a", *a.own.record.stamp)])
            await asyncio.sleep(0.01)
            signed.add(a.own.published)
        assert len(signed) <= 3.0 / REFUTE_EVERY_S + 1
        suspected = a.own.record.stamp
        a.liveness.hear([Suspicion("a", *suspected)])
        await asyncio.sleep(1.5)
        known = b.view.get("a")
        assert known is not None
        assert known.stamp > suspected
        assert a.own.record.version > first
        a.liveness.stop()

    run(scenario())


def _serves(site: Site, method: str, after_s: float) -> None:
    async def answer(request: Request) -> Message:
        await asyncio.sleep(after_s)
        return Message(RelayGrant((), 1.0))

    site.transport.handle(method, answer)


def test_a_call_to_a_dead_peer_is_not_begun() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        a, _ = acquainted(hub, "a", "b")
        hub.kill("b")
        await a.liveness.look_into(["b"])
        began = now()
        with pytest.raises(Unreachable):
            await a.liveness.call_while_live("b", RELAY_RESERVE, Message(), timeout_s=60.0)
        assert now() == began

    run(scenario())


def test_a_callee_that_answers_pings_and_not_the_call_is_waited_for_until_the_deadline() -> None:
    """Its handler hangs, say. Whoever calls decides how long."""

    async def scenario() -> None:
        a, b = acquainted(MemoryHub(), "a", "b")
        _serves(b, RELAY_RESERVE.name, 1000.0)
        a.liveness.start()
        began = now()
        with pytest.raises(DeadlineExceeded):
            await a.liveness.call_while_live("b", RELAY_RESERVE, Message(), timeout_s=20.0)
        assert now() - began == pytest.approx(20.0)
        assert a.liveness.is_live("b")
        assert a.transport.traffic.failed_calls == {RELAY_RESERVE.name: 1}
        a.liveness.stop()

    run(scenario())


def test_the_own_stall_does_not_end_a_call() -> None:
    """The answer came while this process stood still, and is read only after the deadline."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        a, b = acquainted(MemoryHub(), "a", "b")
        _serves(b, RELAY_RESERVE.name, 2.0)
        a.liveness.start()
        loop.call_later(1.0, loop.stand_still, 30.0)
        await a.liveness.call_while_live("b", RELAY_RESERVE, Message(), timeout_s=3.0)
        a.liveness.stop()

    run(scenario())
