"""Streams through a relay: who talks with whom, what the relay sees, what bounds it, and who is
looked at for a way without it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from swarmnet.errors import SwarmnetError, Unreachable
from swarmnet.protocol import relay_room
from swarmnet.simulation.clock import run
from swarmnet.transport import faster_ways, open_channels
from swarmnet.transport import relay as relay_module
from swarmnet.transport.base import RELAY_PROTOCOL, ByteStream, Request
from swarmnet.transport.calls.channel import Channel
from swarmnet.transport.calls.hello import offer
from swarmnet.transport.channel import ChannelTransport
from swarmnet.transport.direct import client_context
from swarmnet.transport.faster_ways import LOOK_EVERY_S, MAX_TRYING, FasterWays
from swarmnet.transport.relay import RELAYED, Relays, split_circuit
from swarmnet.wire import Array, Message
from tests.transport.loopback import LoopbackHub
from tests.transport.streams import identity

TIMEOUT_S = 20.0
GRANT_S = 60.0


async def echo(request: Request) -> Message:
    return Message([request.remote, request.message.body], request.message.arrays)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - the streams' ends set no event
            await asyncio.sleep(0.001)


@dataclass
class World:
    """Two peers that cannot dial each other, and others that both can."""

    hub: LoopbackHub
    a: ChannelTransport
    b: ChannelTransport
    relays: list[ChannelTransport]

    def circuit(self, peer: ChannelTransport, relay: ChannelTransport) -> str:
        return f"/loopback/p2p/{relay.peer_id}/p2p-circuit/p2p/{peer.peer_id}"

    async def call(self, size: int = 0, **options: Any) -> Message:
        arrays = (Array("uint8", (size,), bytes(i % 251 for i in range(size))),) if size else ()
        return await self.a.call(
            self.b.peer_id, "echo", Message("hello", arrays), timeout_s=TIMEOUT_S, **options
        )


@asynccontextmanager
async def world(num_relays: int = 1) -> AsyncIterator[World]:
    hub = LoopbackHub()
    ids = [identity(i + 1) for i in range(2 + num_relays)]
    made = [
        ChannelTransport(
            hub.carrier(i.peer_id), identity=i, offered=offer(features=("both", f"only {n}"))
        )
        for n, i in enumerate(ids)
    ]
    for transport in made:
        await transport.start()
        transport.set_run("r")
        transport.handle("echo", echo)
    a, b, *relays = made
    hub.apart.add(frozenset((a.peer_id, b.peer_id)))
    w = World(hub, a, b, relays)
    for r in relays:
        for peer in (a, b):
            await peer.dial(f"/loopback/p2p/{r.peer_id}")
        r.grant_relay(b.peer_id, GRANT_S)
    a.learn(b.peer_id, [w.circuit(b, r) for r in relays])
    try:
        yield w
    finally:
        for transport in made:
            await transport.close()


def play(
    scenario: Callable[[World], Coroutine[Any, Any, None]], num_relays: int = 1, loop: Any = None
) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), world(num_relays) as w:
            await scenario(w)

    with asyncio.Runner(loop_factory=loop or uvloop.new_event_loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_peers_that_cannot_dial_each_other_talk_through_a_third(loop: Any) -> None:
    async def scenario(w: World) -> None:
        reply = await w.call(3_000_000)
        assert reply.body == [w.a.peer_id, "hello"], "the callee knows who calls"
        assert bytes(reply.arrays[0].data) == bytes(i % 251 for i in range(3_000_000))
        back = await w.b.call(w.a.peer_id, "echo", Message(1), timeout_s=TIMEOUT_S)
        assert back.body == [w.b.peer_id, 1], "the same channel, the other way"
        (r,) = w.relays
        assert r.relays is not None
        assert r.relays.num_joined == 1
        assert r.traffic.sent_bytes[RELAYED] > 6_000_000
        assert w.a.connected() == [r.peer_id, w.b.peer_id]
        assert w.a.channels.features(w.b.peer_id) == {"both"}

    play(scenario, loop=loop)


def channel_of(near: ChannelTransport, far: ChannelTransport) -> Channel:
    channel = near.channels.first(far.peer_id)
    assert channel is not None
    return channel


@pytest.mark.parametrize("dials", ["caller", "callee"])
def test_a_straight_way_that_is_back_takes_the_place_of_a_relay(
    monkeypatch: pytest.MonkeyPatch, dials: str
) -> None:
    """What is on its way through the relay gets through, nobody is taken for gone, and who keeps
    the other out of the way back does not keep it out for long."""
    monkeypatch.setattr(faster_ways, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(open_channels, "SUPERSEDED_AFTER_S", -1.0)

    async def firewall(peer_id: str, protocol: str = "") -> ByteStream:
        raise Unreachable("nothing goes out")

    async def scenario(w: World) -> None:
        gone: list[str] = []
        w.a.on_disconnected(gone.append)
        w.b.on_disconnected(gone.append)
        entered, go_on = asyncio.Event(), asyncio.Event()

        async def slow(request: Request) -> Message:
            entered.set()
            await go_on.wait()
            return Message("in the end")

        w.b.handle("slow", slow)
        slow_call = asyncio.create_task(
            w.a.call(w.b.peer_id, "slow", Message(), timeout_s=TIMEOUT_S)
        )
        await entered.wait()
        assert channel_of(w.a, w.b).is_relayed
        assert channel_of(w.b, w.a).is_relayed
        quiet = w.b if dials == "caller" else w.a
        quiet.carrier.open = firewall  # type: ignore[method-assign]
        w.hub.apart.clear()
        await until(
            lambda: not channel_of(w.a, w.b).is_relayed and not channel_of(w.b, w.a).is_relayed
        )
        assert (await w.call(300_000)).body == [w.a.peer_id, "hello"]
        go_on.set()
        assert (await slow_call).body == "in the end"
        (r,) = w.relays
        assert r.relays is not None
        await until(lambda: r.relays.num_joined == 0)  # type: ignore[union-attr]
        assert len(w.a.channels.all()) == len(w.b.channels.all()) == 2, "one to the relay"
        assert not gone
        for one, other in ((w.a, w.b), (w.b, w.a)):
            assert one.relays is not None
            assert not one.relays.carry(other.peer_id)

    play(scenario)


def test_the_relay_sees_no_content() -> None:
    secret = b"the crown jewels" * 40
    seen = bytearray()
    forward = relay_module.Half.data_received

    def spying(self: Any, data: bytes) -> None:
        seen.extend(data)
        forward(self, data)

    async def scenario(w: World) -> None:
        arrays = (Array("uint8", (len(secret),), secret),)
        reply = await w.a.call(w.b.peer_id, "echo", Message(None, arrays), timeout_s=TIMEOUT_S)
        assert bytes(reply.arrays[0].data) == secret
        assert len(seen) > 2 * len(secret)
        assert secret[:16] not in seen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay_module.Half, "data_received", spying)
        play(scenario)


def test_a_relay_that_answers_itself_is_found_out() -> None:
    """It joins the caller to a peer of its own choosing, which cannot sign for the callee."""

    async def scenario(w: World) -> None:
        bad, other = w.relays
        assert bad.relays is not None
        bad.grant_relay(other.peer_id, GRANT_S)
        await other.dial(f"/loopback/p2p/{bad.peer_id}")
        w.a.learn(w.b.peer_id, [w.circuit(w.b, bad)])
        open_ = bad.carrier.open

        async def elsewhere(peer_id: str, protocol: str = "") -> Any:
            if protocol == RELAY_PROTOCOL and peer_id == w.b.peer_id:
                peer_id = other.peer_id
            return await open_(peer_id, protocol)

        bad.carrier.open = elsewhere  # type: ignore[method-assign]
        with pytest.raises(Unreachable, match="who answered is not who was called"):
            await w.call()

    play(scenario, 2)


def test_a_relay_cannot_pretend_that_somebody_calls() -> None:
    async def scenario(w: World) -> None:
        (r,) = w.relays
        stream = await r.carrier.open(w.b.peer_id, RELAY_PROTOCOL)
        talk = relay_module.Talk(stream)
        talk.say({"from": w.a.peer_id})
        assert await talk.hear() == {"ok": 1}
        assert r.identity is not None
        visitor = relay_module.Talk(None)
        transport = await asyncio.get_running_loop().start_tls(
            talk.transport, visitor, client_context(), server_hostname=""
        )
        assert transport is not None
        visitor.begin(transport)
        challenge = await visitor.read(96)
        transport.write(r.identity.sign(challenge))
        with pytest.raises(EOFError):
            await visitor.read(1)
        assert w.a.peer_id not in w.b.connected()

    play(scenario)


def test_what_a_relay_says_commands_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(w: World) -> None:
        monkeypatch.setattr(Relays, "_why_not", lambda *_: "\x1b[2J\u202eno")
        with pytest.raises(Unreachable) as caught:
            await w.call()
        assert "\\x1b[2J\\u202eno" in str(caught.value)
        assert str(caught.value).isprintable()

    play(scenario)


def test_another_relay_takes_over() -> None:
    async def scenario(w: World) -> None:
        await w.call()
        used = [r for r in w.relays if r.relays is not None and r.relays.num_joined]
        assert len(used) == 1
        await used[0].close()
        reply: Message | None = None
        for _ in range(100):
            try:
                reply = await w.call()
                break
            except SwarmnetError:
                await asyncio.sleep(0.05)
        assert reply is not None
        assert reply.body == [w.a.peer_id, "hello"]

    play(scenario, 2)


def test_without_a_place_nobody_is_called() -> None:
    async def scenario(w: World) -> None:
        w.relays[0].grant_relay(w.b.peer_id, -1.0)
        with pytest.raises(Unreachable, match="the relay keeps no place for it"):
            await w.call()

    play(scenario)


def test_circuits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "MAX_CIRCUITS", 0)

    async def scenario(w: World) -> None:
        with pytest.raises(Unreachable, match="the relay is full"):
            await w.call()

    play(scenario)


def test_a_caller_that_has_gone_leaves_no_circuit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another way has won the race meanwhile."""
    monkeypatch.setattr(relay_module, "MAX_CIRCUITS_EACH", 1)

    async def scenario(w: World) -> None:
        (r,) = w.relays
        assert r.relays is not None
        assert w.b.relays is not None
        at_relay: list[ByteStream] = []
        at_callee: list[ByteStream] = []
        greet, answer = r.relays.accept, w.b.relays.accept
        with monkeypatch.context() as patch:
            patch.setattr(r.relays, "accept", lambda s: (at_relay.append(s), greet(s)))
            patch.setattr(w.b.relays, "accept", at_callee.append)
            stream = await w.a.carrier.open(r.peer_id, RELAY_PROTOCOL)
            relay_module.Talk(stream).say({"to": w.b.peer_id})
            await until(lambda: bool(at_callee))
            stream.transport.abort()
            await until(lambda: at_relay[0].transport.is_closing())
            answer(at_callee[0])
            await until(lambda: at_callee[0].transport.is_closing())
        assert r.relays.num_joined == 0
        assert (await w.call()).body == [w.a.peer_id, "hello"]

    play(scenario)


def test_a_circuit_that_ends_in_the_handshake_is_no_way() -> None:
    """The callee says who it is, and goes at once."""

    async def scenario(w: World) -> None:
        assert w.a.relays is not None
        assert w.b.relays is not None
        read = relay_module.Talk.read

        async def read_to_the_end(self: Any, num_bytes: int) -> bytes:
            data = await read(self, num_bytes)
            if num_bytes == relay_module.NONCE_BYTES + relay_module.SIGNATURE_BYTES:
                self.eof_received()
            return data

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(relay_module.Talk, "read", read_to_the_end)
            with pytest.raises(Unreachable, match="the stream ended"):
                await w.a.relays.ways(w.b.peer_id)[0]()

    play(scenario)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xff",
        b"\x00\x01\xc1",
        b"\x00\x01\x01",
        b"\x00\x01\x80",
        b"\x00\x05\x81\xa2to\x01",
    ],
)
def test_garbage_costs_its_sender_the_stream_only(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "HEAD_TIMEOUT_S", 0.3)

    async def scenario(w: World) -> None:
        (r,) = w.relays
        stream = await w.a.carrier.open(r.peer_id, RELAY_PROTOCOL)
        talk = relay_module.Talk(stream)
        talk.transport.write(data)
        with pytest.raises(EOFError):
            await talk.read(1)
        monkeypatch.setattr(relay_module, "HEAD_TIMEOUT_S", 8.0)
        assert (await w.call()).body

    play(scenario)


def test_what_is_relayed_keeps_to_the_cap_on_the_upload() -> None:
    async def scenario(w: World) -> None:
        (r,) = w.relays
        await w.call()
        r.limit_upload(2e6)
        loop = asyncio.get_running_loop()
        began, before = loop.time(), r.traffic.sent_bytes[RELAYED]
        await w.call(1_000_000)
        sent = r.traffic.sent_bytes[RELAYED] - before
        assert sent > 2_000_000
        assert sent / (loop.time() - began) < 1.6 * 2e6

    play(scenario)


def test_addresses_of_circuits() -> None:
    assert split_circuit("/ip4/5.5.5.2/tcp/1/p2p/R/p2p-circuit/p2p/N") == (
        "/ip4/5.5.5.2/tcp/1/p2p/R",
        "R",
        "N",
    )
    assert split_circuit("/ip4/5.5.5.2/tcp/1/p2p/R/p2p-circuit") == (
        "/ip4/5.5.5.2/tcp/1/p2p/R",
        "R",
        "",
    )
    assert split_circuit("/ip4/5.5.5.2/tcp/1/p2p/R") is None


def relays_of(w: World) -> Relays:
    """The circuits of the first relay."""
    relays = w.relays[0].relays
    assert relays is not None
    return relays


async def silent_streams(w: World, num_names: int, each: int) -> list[Any]:
    """Streams to the first relay on which nothing is said, under many names."""
    (relay,) = w.relays
    streams = []
    for n in range(num_names):
        carrier = w.hub.carrier(f"liar-{n}")
        streams += [await carrier.open(relay.peer_id, RELAY_PROTOCOL) for _ in range(each)]
    return streams


@pytest.mark.parametrize(("num_names", "each"), [(1, 64), (64, 1), (200, 1)])
def test_silent_streams_keep_nobody_out(num_names: int, each: int) -> None:
    async def scenario(w: World) -> None:
        assert (await w.call()).body
        for channel in w.a.channels.all():
            if channel.remote == w.b.peer_id:
                channel.abort("once more")
        streams = await silent_streams(w, num_names, each)
        assert (await w.call()).body
        assert relays_of(w).num_greeting <= relay_room.MAX_GREETING
        for stream in streams:
            stream.transport.abort()
        assert (await w.call()).body

    play(scenario)


def test_a_silent_stream_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "HEAD_TIMEOUT_S", 0.1)

    async def scenario(w: World) -> None:
        (stream,) = await silent_streams(w, 1, 1)
        with pytest.raises(EOFError):
            await relay_module.Talk(stream).read(1)
        assert not relays_of(w).num_greeting

    play(scenario)


def test_a_silent_circuit_gives_way_where_the_relay_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_module, "MAX_CIRCUITS", 1)

    async def scenario(w: World) -> None:
        (relay,) = w.relays
        assert (await w.call()).body
        relay.grant_relay(w.a.peer_id, GRANT_S)
        w.b.learn(w.a.peer_id, [w.circuit(w.a, relay)])
        assert w.b.relays is not None
        way = w.b.relays.ways(w.a.peer_id)[0]
        with pytest.raises(Unreachable, match="the relay is full"):
            await way()
        monkeypatch.setattr(relay_room, "SILENT_CIRCUIT_S", 0.0)
        stream = await way()
        assert relays_of(w).num_joined == 1
        stream.transport.abort()

    play(scenario)


# ---- who is looked at for a straight or faster way; virtual time --------------------------------

PEERS = [f"peer-{number}" for number in range(5 * MAX_TRYING)]


class Ways:
    """Channels, dialer and direct links in one; a look takes its time."""

    def __init__(self, takes_s: float, *, is_relayed: bool = False) -> None:
        self.looks: Counter[str] = Counter()
        self.straightened: Counter[str] = Counter()
        self.at_once = self.most_at_once = 0
        self._takes_s = takes_s
        self._used = SimpleNamespace(is_relayed=is_relayed)

    def connected(self) -> list[str]:
        return PEERS

    def detours(self) -> list[Any]:
        return []

    def first(self, peer_id: str) -> Any:
        return self._used

    def close_left(self) -> None:
        pass

    async def straighten(self, peer_id: str) -> None:
        self.straightened[peer_id] += 1
        raise Unreachable("nobody there")

    async def look_for_faster(self, peer_id: str) -> None:
        self.looks[peer_id] += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self._takes_s)
        finally:
            self.at_once -= 1


def looked(ways: Any, for_s: float) -> None:
    async def main() -> None:
        task = asyncio.create_task(FasterWays(ways, ways, ways).run())
        await asyncio.sleep(for_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert ways.at_once == 0

    run(main())


def test_each_peer_has_its_turn_in_every_look() -> None:
    ways = Ways(takes_s=1.0)
    looked(ways, 4.5 * LOOK_EVERY_S)
    assert ways.looks == dict.fromkeys(PEERS, 4)
    assert ways.most_at_once == MAX_TRYING
    assert not ways.straightened


def test_where_looks_take_long_nobody_waits_for_ever() -> None:
    ways = Ways(takes_s=LOOK_EVERY_S)
    looked(ways, 6.5 * LOOK_EVERY_S)
    assert set(ways.looks) == {*PEERS}
    assert max(ways.looks.values()) - min(ways.looks.values()) <= 1


def test_who_is_called_through_a_relay_is_dialled_straight_and_looked_at() -> None:
    ways = Ways(takes_s=0.0, is_relayed=True)
    looked(ways, 1.5 * LOOK_EVERY_S)
    assert ways.straightened == ways.looks == dict.fromkeys(PEERS, 1)
