"""The channels of a transport: who is connected, and whose streams are welcome."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from swarmnet.transport import open_channels
from swarmnet.transport.base import ByteStream, Traffic
from swarmnet.transport.calls.channel import Channel
from swarmnet.transport.handlers import Handlers
from swarmnet.transport.listeners import Listeners
from swarmnet.transport.open_channels import OpenChannels
from tests.transport.loopback import run
from tests.transport.streams import PATIENCE_S


class Watcher:
    """Hears of direct channels."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def ready(self, channel: Channel) -> None:
        self.seen.append(("ready", channel.remote))

    def ended(self, channel: Channel) -> None:
        self.seen.append(("ended", channel.remote))


class World:
    """Two transports, a and b, that have nothing but channels."""

    def __init__(self) -> None:
        self.a, self.b = (OpenChannels(Handlers(), Traffic()) for _ in range(2))

    async def pair(self) -> tuple[ByteStream, ByteStream]:
        """Both ends of a stream: a's to b, b's to a."""
        loop = asyncio.get_running_loop()
        made = []
        for remote, end in zip("ba", socket.socketpair()):
            transport, _ = await loop.create_connection(asyncio.Protocol, sock=end)
            transport.pause_reading()
            made.append(ByteStream(remote, transport))
        return made[0], made[1]

    async def connect(self, watcher: Watcher | None = None) -> Channel:
        """A channel from a to b that is ready."""
        near, far = await self.pair()
        channel = self.a.attach(near, watcher)
        if watcher is None:
            self.b.accept(far)
        else:
            self.b.attach(far, Watcher())
        await asyncio.shield(channel.ready)
        return channel


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    w = World()
    try:
        yield w
    finally:
        for channels in (w.a, w.b):
            await channels.close()
            channels.pacer.close()
        await asyncio.sleep(0)


def play(scenario: Callable[[World], Any]) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), world() as w:
            await scenario(w)

    run(main())


def test_a_peer_is_connected_from_its_first_channel_to_the_end_of_its_last() -> None:
    async def scenario(w: World) -> None:
        told: list[str] = []
        w.a.on_connected(lambda p: told.append(f"+{p}"))
        w.a.on_disconnected(lambda p: told.append(f"-{p}"))
        assert w.a.first("b") is None
        first, second = await w.connect(), await w.connect()
        assert told == ["+b"]
        assert w.a.connected() == ["b"]
        assert w.a.first("b") is first
        first.abort("test")
        assert w.a.first("b") is second
        second.abort("test")
        assert told == ["+b", "-b"]
        assert (w.a.connected(), w.a.all()) == ([], [])

    play(scenario)


def test_a_direct_channel_is_its_watchers() -> None:
    async def scenario(w: World) -> None:
        watcher = Watcher()
        channel = await w.connect(watcher)
        assert channel.is_direct
        assert w.a.num_direct("b") == 1
        assert w.a.connected() == []
        channel.abort("test")
        assert watcher.seen == [("ready", "b"), ("ended", "b")]
        assert w.a.num_direct("b") == 0

    play(scenario)


def test_a_channel_that_has_been_there_for_long_is_superseded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(w: World) -> None:
        old = await w.connect()
        monkeypatch.setattr(open_channels, "SUPERSEDED_AFTER_S", -1.0)
        new = await w.connect()
        assert not old.is_open
        assert w.a.first("b") is new

    play(scenario)


def test_streams_of_the_banned_and_too_many_of_one_peer_are_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_channels, "MAX_CHANNELS", 2)

    async def scenario(w: World) -> None:
        for _ in range(4):
            w.b.accept((await w.pair())[1])
        assert len(w.b.all()) == 2
        w.a.offended("b", "test")
        assert not w.a.may_attach("b")
        assert w.a.may_attach("c")
        near, _ = await w.pair()
        w.a.accept(near)
        assert near.transport.is_closing()

    play(scenario)


def test_after_the_end_no_stream_is_welcome() -> None:
    async def scenario(w: World) -> None:
        channel = await w.connect()
        await w.a.close()
        assert not channel.is_open
        assert not w.a.may_attach("b")

    play(scenario)


def test_the_run_is_told_to_every_channel() -> None:
    async def scenario(w: World) -> None:
        await w.connect()
        w.a.set_run("run")
        (other,) = w.b.all()
        async with asyncio.timeout(PATIENCE_S):
            while other.greeting.run_id != "run":  # noqa: ASYNC110 - nothing tells of a second hello
                await asyncio.sleep(0.001)

    play(scenario)


def test_a_listener_that_fails_is_logged_and_others_hear(
    caplog: pytest.LogCaptureFixture,
) -> None:
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
