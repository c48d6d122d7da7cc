"""Opening channels: one attempt for all callers, and what is remembered of a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from swarmnet.errors import ChannelClosed, Unreachable
from swarmnet.protocol.timing import ANSWER_S
from swarmnet.simulation.clock import run
from swarmnet.transport.base import ByteStream, Request, Traffic
from swarmnet.transport.channel import ChannelTransport
from swarmnet.transport.dial_filter import DialFilter
from swarmnet.transport.dialer import REDIAL_AFTER_S, Dialer
from swarmnet.transport.handlers import Handlers
from swarmnet.transport.open_channels import OpenChannels
from swarmnet.wire import Message
from tests.transport.loopback import LoopbackCarrier, LoopbackHub


class Stubborn(LoopbackCarrier):
    """Opens no stream."""

    def __init__(self, takes_s: float, error: Exception) -> None:
        super().__init__(LoopbackHub(), "own")
        self._takes_s = takes_s
        self._error = error

    async def open(self, peer_id: str, protocol: str = "") -> ByteStream:
        self.opened += 1
        await asyncio.sleep(self._takes_s)
        raise self._error


def play(
    scenario: Callable[[Dialer, Stubborn], Any],
    takes_s: float = 0.0,
    error: Exception | None = None,
) -> None:
    """In virtual time."""

    async def main() -> None:
        carrier = Stubborn(takes_s, error or Unreachable("nobody there"))
        channels = OpenChannels(Handlers(), Traffic())
        dialer = Dialer(carrier, channels, None, DialFilter(carrier))
        await scenario(dialer, carrier)
        await dialer.close()

    run(main())


def test_a_failure_is_answered_from_memory_for_a_moment() -> None:
    async def scenario(dialer: Dialer, carrier: Stubborn) -> None:
        for _ in range(5):
            with pytest.raises(Unreachable, match="nobody there"):
                await dialer.channel("x")
            dialer.notify("x", "m", Message())
        assert carrier.opened == 1
        await asyncio.sleep(REDIAL_AFTER_S)
        with pytest.raises(Unreachable, match="nobody there"):
            await dialer.channel("x")
        assert carrier.opened == 2

    play(scenario)


def test_callers_and_notifications_share_one_attempt() -> None:
    async def scenario(dialer: Dialer, carrier: Stubborn) -> None:
        dialer.notify("x", "m", Message())
        results = await asyncio.gather(
            *(dialer.channel("x") for _ in range(5)), return_exceptions=True
        )
        assert [type(r) for r in results] == [Unreachable] * 5
        assert carrier.opened == 1

    play(scenario, takes_s=1.0)


def test_an_attempt_that_hangs_ends() -> None:
    async def scenario(dialer: Dialer, carrier: Stubborn) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(Unreachable, match="no answer within"):
            await dialer.channel("x")
        assert loop.time() - began == pytest.approx(ANSWER_S)

    play(scenario, takes_s=1e9)


def test_an_error_of_the_system_or_a_bug_is_unreachable_too() -> None:
    async def once(dialer: Dialer, carrier: Stubborn) -> None:
        with pytest.raises(Unreachable, match="no route"):
            await dialer.channel("x")

    async def twice(dialer: Dialer, carrier: Stubborn) -> None:
        with pytest.raises(ValueError, match="a bug"):
            await dialer.channel("x")
        with pytest.raises(Unreachable, match="a bug"):
            await dialer.channel("x")

    play(once, error=OSError("no route"))
    play(twice, error=ValueError("a bug"))


def test_what_waits_when_it_closes_is_told() -> None:
    async def scenario(dialer: Dialer, carrier: Stubborn) -> None:
        waiting = asyncio.create_task(dialer.channel("x"))
        await asyncio.sleep(1.0)
        await dialer.close()
        with pytest.raises(ChannelClosed):
            await waiting
        with pytest.raises(ChannelClosed):
            await dialer.channel("y")
        dialer.notify("y", "m", Message())
        assert carrier.opened == 1

    play(scenario, takes_s=1e9)


def test_a_peer_does_not_call_itself() -> None:
    async def scenario(dialer: Dialer, carrier: Stubborn) -> None:
        with pytest.raises(Unreachable, match="does not call itself"):
            await dialer.channel("own")
        assert carrier.opened == 0

    play(scenario)


def test_a_banned_peer_is_not_dialled() -> None:
    async def main() -> None:
        carrier = Stubborn(0.0, Unreachable("nobody there"))
        channels = OpenChannels(Handlers(), Traffic())
        dialer = Dialer(carrier, channels, None, DialFilter(carrier))
        channels.offended("x", "test")
        with pytest.raises(Unreachable, match="broke the protocol"):
            await dialer.channel("x")
        assert carrier.opened == 0
        await dialer.close()

    run(main())


def test_a_channel_that_the_other_side_opens_serves_what_waits_for_the_own_dial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        hub, dials = LoopbackHub(), asyncio.Event()
        near, far = (ChannelTransport(hub.carrier(name)) for name in ("near", "far"))
        noted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def echo(request: Request) -> Message:
            return request.message

        async def note(request: Request) -> Message:
            noted.set_result(request.message.body)
            return Message()

        async def swallowed(peer_id: str, protocol: str = "") -> ByteStream:
            dials.set()
            return await asyncio.get_running_loop().create_future()

        for transport in (near, far):
            await transport.start()
        far.handle("echo", echo)
        far.handle("note", note)
        monkeypatch.setattr(near.carrier, "open", swallowed)
        near.notify("far", "note", Message("a note"))
        calls = [
            asyncio.create_task(near.call("far", "echo", Message(n), timeout_s=1e9))
            for n in range(2)
        ]
        await dials.wait()
        await far.dial("/loopback/p2p/near")
        async with asyncio.timeout(ANSWER_S / 2):
            assert [(await call).body for call in calls] == [0, 1]
            assert await noted == "a note"
        for transport in (near, far):
            await transport.close()

    asyncio.run(main())
