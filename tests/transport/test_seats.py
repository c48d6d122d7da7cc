"""Several peers behind one machine's channels."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from swarmnet.errors import (
    ChannelClosed,
    DeadlineExceeded,
    NotReady,
    ProtocolViolation,
    Refused,
    RemoteError,
    Stale,
)
from swarmnet.transport.base import Request
from swarmnet.transport.channel import ChannelTransport
from swarmnet.wire import Array, Message
from tests.transport.loopback import LoopbackHub, run
from tests.transport.streams import PATIENCE_S

ACTIVATION = Array("float32", (4,), bytes(16))


async def machines() -> tuple[ChannelTransport, ChannelTransport]:
    hub = LoopbackHub()
    a, b = (ChannelTransport(hub.carrier(name), agent="test") for name in "ab")
    await a.start()
    await b.start()
    for machine in (a, b):
        machine.set_run("run")
    return a, b


def play(scenario: Callable[[ChannelTransport, ChannelTransport], Awaitable[None]]) -> None:
    async def main() -> None:
        a, b = await machines()
        try:
            await scenario(a, b)
        finally:
            await a.close()
            await b.close()

    run(main())


async def says_who(request: Request) -> Message:
    return Message([request.remote, request.run_id])


def test_a_call_goes_from_seat_to_seat() -> None:
    async def scenario(a: ChannelTransport, b: ChannelTransport) -> None:
        for transport in (b, b.seat(1), b.seat(2)):

            async def serve(request: Request, own: str = transport.peer_id) -> Message:
                return Message([own, request.remote])

            transport.handle("who", serve)
        third = a.seat(3)
        for caller in (a, third):
            for callee in ("b", "b/1", "b/2"):
                reply = await caller.call(callee, "who", Message(), timeout_s=PATIENCE_S)
                assert reply.body == [callee, caller.peer_id]
        assert a.connected() == ["b"], "one channel carries them all"

    play(scenario)


def test_nobody_sits_on_an_empty_seat() -> None:
    async def scenario(a: ChannelTransport, b: ChannelTransport) -> None:
        b.handle("who", says_who)
        seat = b.seat(1)
        seat.handle("who", says_who)
        with pytest.raises(NotReady):
            await a.call("b/2", "who", Message(), timeout_s=PATIENCE_S)
        await seat.close()
        with pytest.raises(NotReady):
            await a.call("b/1", "who", Message(), timeout_s=PATIENCE_S)
        with pytest.raises(ProtocolViolation):
            await a.call("b/01", "who", Message(), timeout_s=PATIENCE_S)

    play(scenario)


def test_a_seat_that_is_closed_hears_of_no_channel() -> None:
    async def scenario(a: ChannelTransport, b: ChannelTransport) -> None:
        heard: list[str] = []
        closed, open_one = a.seat(1), a.seat(2)
        for seat in (closed, open_one):
            for register in (seat.on_connected, seat.on_disconnected):
                register(lambda _, own=seat.peer_id: heard.append(own))  # type: ignore[misc]
        await closed.close()
        b.handle("who", says_who)
        await a.call("b", "who", Message(), timeout_s=PATIENCE_S)
        lost = asyncio.Event()
        a.on_disconnected(lambda _: lost.set())
        await b.close()
        await asyncio.wait_for(lost.wait(), PATIENCE_S)
        assert heard == ["a/2", "a/2"]

    play(scenario)


def test_notes_reach_their_seat_even_before_there_is_a_channel() -> None:
    async def scenario(a: ChannelTransport, b: ChannelTransport) -> None:
        heard: asyncio.Queue[str] = asyncio.Queue()

        async def hear(request: Request) -> Message:
            heard.put_nowait(request.remote)
            return Message()

        b.seat(2).handle("note", hear)
        b.handle("note", says_who)
        a.seat(1).notify("b/2", "note", Message())
        a.notify("b/2", "note", Message())
        found = {await asyncio.wait_for(heard.get(), PATIENCE_S) for _ in range(2)}
        assert found == {"a", "a/1"}

    play(scenario)


def test_between_seats_of_one_machine_there_is_no_wire() -> None:
    async def scenario(a: ChannelTransport, b: ChannelTransport) -> None:
        async def step(request: Request) -> Message:
            request.progress(Message("under way"))
            assert request.message.arrays[0] is ACTIVATION
            return Message(request.remote, request.message.arrays)

        first, second = a, a.seat(1)
        second.handle("step", step)
        told: list[object] = []
        reply = await first.call(
            "a/1",
            "step",
            Message(None, (ACTIVATION,)),
            timeout_s=PATIENCE_S,
            on_progress=lambda note: told.append(note.body),
        )
        assert reply.body == "a"
        assert reply.arrays[0] is ACTIVATION
        assert told == ["under way"]
        assert not a.traffic.sent_bytes.get("step"), "and no byte was sent"
        first.handle("who", says_who)
        assert (await second.call("a", "who", Message(), timeout_s=PATIENCE_S)).body[0] == "a/1"

    play(scenario)


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (Stale("over", round=3), Stale),
        (ProtocolViolation("wrong"), Refused),
        (ZeroDivisionError("a bug"), RemoteError),
    ],
)
def test_errors_beside_are_those_of_the_wire(raised: Exception, seen: type[RemoteError]) -> None:
    async def scenario(a: ChannelTransport, b: ChannelTransport) -> None:
        async def fail(request: Request) -> Message:
            raise raised

        a.seat(1).handle("fail", fail)
        with pytest.raises(seen):
            await a.call("a/1", "fail", Message(), timeout_s=PATIENCE_S)
        with pytest.raises(NotReady):
            await a.call("a/1", "nothing", Message(), timeout_s=PATIENCE_S)

    play(scenario)


def test_a_handler_beside_outlives_its_caller_but_not_its_machine() -> None:
    async def scenario(a: ChannelTransport, b: ChannelTransport) -> None:
        began, ended = asyncio.Event(), asyncio.Event()

        async def slow(request: Request) -> Message:
            began.set()
            try:
                await asyncio.sleep(3600)
            finally:
                ended.set()
            return Message()

        a.seat(1).handle("slow", slow)
        with pytest.raises(DeadlineExceeded):
            await a.call("a/1", "slow", Message(), timeout_s=0.05)
        assert began.is_set()
        assert not ended.is_set()
        other = asyncio.ensure_future(a.call("a/1", "slow", Message(), timeout_s=PATIENCE_S))
        await asyncio.sleep(0)
        await a.close()
        assert ended.is_set()
        with pytest.raises((NotReady, ChannelClosed)):
            await other

    play(scenario)


def test_an_impossible_route_costs_its_sender_the_stream() -> None:
    async def scenario(a: ChannelTransport, b: ChannelTransport) -> None:
        b.handle("who", says_who)
        await a.call("b", "who", Message(), timeout_s=PATIENCE_S)
        lost = asyncio.Event()
        a.on_disconnected(lambda _: lost.set())
        (channel,) = a.channels.all()
        channel.notify("who", Message(), (0, 99))
        await asyncio.wait_for(lost.wait(), PATIENCE_S)

    play(scenario)
