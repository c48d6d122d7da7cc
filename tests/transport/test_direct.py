"""Direct TLS connections beside libp2p: that they are used, and what strangers cannot do."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import uvloop

import swarmnet.system as system
from swarmnet.errors import AddressError, PortTaken, ProtocolViolation, Refused, Unreachable
from swarmnet.methods.contact import MEET, PING, TICKET, Meeting, Ticket
from swarmnet.protocol import upgrade
from swarmnet.protocol.backoff import FIRST_PAUSE_S
from swarmnet.protocol.timing import ANSWER_S, UPKEEP_S
from swarmnet.transport import direct, faster_ways, links
from swarmnet.transport.base import ByteStream, Request
from swarmnet.transport.buffers import BufferPool
from swarmnet.transport.calls.hello import offer
from swarmnet.transport.channel import ChannelTransport
from swarmnet.transport.direct import (
    UNSENT_BYTES,
    DirectListener,
    client_context,
    dial_direct,
    port_after,
)
from swarmnet.transport.frames import NOTIFY, head_frame
from swarmnet.transport.libp2p.interfaces import ANY_INTERFACE, listening_hosts
from swarmnet.transport.links import MAX_DIRECT, DirectLinks
from swarmnet.transport.punching import Seen, whence
from swarmnet.wire import Array, Message, convert
from tests.transport.loopback import LoopbackCarrier, LoopbackHub
from tests.transport.streams import PATIENCE_S, identity

HOST = "127.0.0.1"
SIOCOUTQNSD = 0x894B
"""Linux: bytes of a socket that the kernel has not sent yet."""
BULK = Array("uint8", (300_000,), bytes(range(250)) * 1200)


class Carrier(LoopbackCarrier):
    """Says that its peer is on this machine."""

    where = HOST

    def addresses(self) -> list[str]:
        return [f"/ip4/{self.where}/tcp/4001/p2p/{self.peer_id}"]


@dataclass
class World:
    hub: LoopbackHub
    a: ChannelTransport
    b: ChannelTransport

    async def call(self, *arrays: Array, method: str = "echo") -> Message:
        message = Message("hello", arrays)
        return await self.a.call(self.b.peer_id, method, message, timeout_s=PATIENCE_S)

    async def upgraded(self) -> None:
        """Until a has a direct channel to b, after a bulk call."""
        await self.call(BULK)
        await until(lambda: channels(self.a, self.b) and channels(self.b, self.a))

    async def ticket(self) -> Ticket:
        """One of b's for a."""
        assert self.b.direct is not None
        return self.b.direct.ticket(self.a.peer_id, self.b.addresses())


def links_of(transport: ChannelTransport) -> DirectLinks:
    assert transport.links is not None
    return transport.links


def listener_of(transport: ChannelTransport) -> DirectListener:
    assert transport.direct is not None
    return transport.direct


def channels(near: ChannelTransport, far: ChannelTransport) -> list[Any]:
    return links_of(near).channels.get(far.peer_id, [])


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def echo(request: Request) -> Message:
    return request.message


@contextlib.asynccontextmanager
async def two(*, b_direct: bool = True, b_host: str = HOST) -> AsyncIterator[World]:
    hub = LoopbackHub()
    made = []
    for number, is_direct, host in ((1, True, HOST), (2, b_direct, b_host)):
        carrier = Carrier(hub, identity(number).peer_id)
        listener = DirectListener(host, 0) if is_direct else None
        offered = offer(features=("both", f"only {number}"))
        transport = ChannelTransport(carrier, agent="test", direct=listener, offered=offered)
        transport.handle("echo", echo)
        transport.handle("small", echo)
        await transport.start()
        made.append(transport)
    try:
        yield World(hub, *made)
    finally:
        for transport in made:
            await transport.close()


def play(scenario: Callable[[World], Any], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(2 * PATIENCE_S), two(**options) as world:
            await scenario(world)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    for loop_factory in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(main())


# ---- it is used ---------------------------------------------------------------------------------


def test_the_first_bulk_call_opens_a_direct_channel_that_both_sides_then_use() -> None:
    async def scenario(w: World) -> None:
        await w.call()
        assert not w.a.traffic.direct_sent_bytes
        await w.upgraded()
        before = w.a.traffic.direct_sent_bytes
        assert (await w.call(BULK)).arrays[0].data == BULK.data
        assert w.a.traffic.direct_sent_bytes - before > BULK.num_bytes
        assert len(channels(w.a, w.b)) == len(channels(w.b, w.a)) == 1
        (channel,) = channels(w.a, w.b)
        assert channel.greeting.features == {"both"}
        back = await w.b.call(w.a.peer_id, "echo", Message(1, (BULK,)), timeout_s=PATIENCE_S)
        assert back.arrays[0].data == BULK.data
        assert len(channels(w.b, w.a)) == 1  # the same one
        assert w.b.traffic.direct_sent_bytes > 2 * BULK.num_bytes

    play(scenario)


def test_what_was_written_is_what_arrives_whatever_becomes_of_the_array() -> None:
    async def scenario(w: World) -> None:
        stream = await dial_direct(w.b.peer_id, await w.ticket(), client_context())
        wire, data = stream.transport, bytearray(b"as it was " * 800_000)
        wanted, written = bytes(data), 0

        class Watched:
            """The stream; spoils what it has been given to write."""

            def writelines(self, buffers: list[Any]) -> None:
                nonlocal written
                wire.writelines(buffers)
                for piece in buffers:
                    if isinstance(piece, memoryview) and piece.obj is data:
                        written += len(piece)
                        piece[:] = bytes(len(piece))

            def __getattr__(self, name: str) -> Any:
                return getattr(wire, name)

        watched: Any = Watched()
        stream.transport = watched
        w.a.channels.attach(stream, direct=w.a.links)
        await until(lambda: channels(w.a, w.b))
        came = (await w.call(Array("uint8", (len(data),), data))).arrays[0].data
        assert written == len(data)  # none of it was copied before
        assert came == wanted

    play(scenario)


def test_what_arrives_is_put_where_what_nobody_looks_at_any_more_lay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fresh memory is most of what receiving costs."""
    take = BufferPool.take
    given: set[int] = set()

    def address(data: Any) -> int:
        return int(np.frombuffer(data, np.uint8).ctypes.data)

    def recorded(self: BufferPool, num_bytes: int) -> memoryview:
        memory = take(self, num_bytes)
        if num_bytes == BULK.num_bytes:
            given.add(address(memory))
        return memory

    async def scenario(w: World) -> None:
        await w.upgraded()
        for _ in range(8):
            reply = (await w.call(BULK)).arrays[0]
            assert reply.data == BULK.data
            assert address(reply.data) in given
            del reply
        pool = w.a.channels.pool
        assert pool.num_bytes <= 3 * BULK.num_bytes  # and its own requests are sent from there

    monkeypatch.setattr(BufferPool, "take", recorded)
    play(scenario)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the kernel's queue")
def test_the_kernel_holds_little_of_what_waits() -> None:
    """So that it is known what waits for the uplink."""
    num_bytes = 48 << 20

    async def scenario(w: World) -> None:
        await w.upgraded()
        (channel,) = channels(w.a, w.b)
        (far,) = channels(w.b, w.a)
        for _ in range(3):  # the kernel's buffers have grown
            await w.call(Array("uint8", (num_bytes,), bytes(num_bytes)))
        far._transport.pause_reading()  # noqa: SLF001  as a slow machine does
        call = asyncio.ensure_future(w.call(Array("uint8", (num_bytes,), bytes(num_bytes))))
        left = [0, 1]
        while left[-1] != left[-2] or not left[-1]:
            await asyncio.sleep(0.1)
            left.append(w.a.traffic.queued_to(w.b.peer_id))
        wire = channel._transport  # noqa: SLF001  what the kernel has
        handle = wire.get_extra_info("socket").fileno()
        unsent = int.from_bytes(fcntl.ioctl(handle, SIOCOUTQNSD, bytes(4)), sys.byteorder)
        assert 0 < unsent < 2 * UNSENT_BYTES
        far._transport.resume_reading()  # noqa: SLF001  as above
        await call

    play(scenario)


def test_a_method_whose_replies_are_large_goes_direct_too() -> None:
    async def scenario(w: World) -> None:
        async def fetch(request: Request) -> Message:
            return Message(None, (BULK,))

        w.b.handle("fetch", fetch)
        await w.call(method="fetch")
        await until(lambda: channels(w.a, w.b))
        before = w.b.traffic.direct_sent_bytes
        await w.call(method="fetch")
        assert w.b.traffic.direct_sent_bytes - before > BULK.num_bytes

    play(scenario)


def test_small_calls_stay_with_libp2p() -> None:
    async def scenario(w: World) -> None:
        await w.upgraded()
        w.b.handle("small", echo)
        before = w.a.traffic.direct_sent_bytes
        await w.call(method="small")
        assert w.a.traffic.direct_sent_bytes == before

    play(scenario)


def test_a_peer_without_direct_connections_is_spoken_to_over_libp2p() -> None:
    async def scenario(w: World) -> None:
        for _ in range(3):
            assert (await w.call(BULK)).arrays[0].data == BULK.data
        await until(lambda: links_of(w.a).num_opening == 0)
        asked = w.a.traffic.sent_bytes[TICKET.name]
        await w.call(BULK)
        assert w.a.traffic.sent_bytes[TICKET.name] == asked  # there is a pause before the next

    play(scenario, b_direct=False)


def test_a_break_in_the_middle_of_a_call_is_not_noticed() -> None:
    async def scenario(w: World) -> None:
        await w.upgraded()
        (channel,) = channels(w.a, w.b)
        calls = 0

        async def slow(request: Request) -> Message:
            nonlocal calls
            calls += 1
            if calls == 1:
                channel.abort("broken by the test")
            return Message("done", request.message.arrays)

        w.b.handle("slow", slow)
        lost: list[str] = []
        w.a.on_disconnected(lost.append)
        reply = await w.call(BULK, method="slow")
        assert (reply.body, reply.arrays[0].data, calls) == ("done", BULK.data, 2)
        assert lost == []
        await w.call(BULK)  # and there is a pause before another attempt
        assert channels(w.a, w.b) == []
        assert links_of(w.a).num_opening == 0

    play(scenario)


def test_who_cannot_be_reached_connects_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "ANSWER_S", 0.05)

    async def scenario(w: World) -> None:
        w.b.carrier.where = "0.0.0.0"  # type: ignore[attr-defined]  # nothing that can be dialled
        await w.call(BULK)
        await until(lambda: channels(w.a, w.b))
        before = w.a.traffic.direct_sent_bytes
        await w.call(BULK)
        assert w.a.traffic.direct_sent_bytes - before > BULK.num_bytes

    play(scenario)


def test_closed_with_the_transport() -> None:
    async def scenario(w: World) -> None:
        await w.upgraded()
        port = w.b.direct.port  # type: ignore[union-attr]
        await w.b.close()
        await until(lambda: not channels(w.a, w.b))
        with pytest.raises(OSError, match=r"refused|Connect call failed"):
            await asyncio.open_connection(HOST, port)

    play(scenario)


def test_a_port_that_is_taken_is_one_line() -> None:
    async def scenario(w: World) -> None:
        other = DirectListener(HOST, w.b.direct.port)  # type: ignore[union-attr]
        with pytest.raises(AddressError, match="choose another --direct-port"):
            await other.start(lambda stream: None)

    play(scenario)


# ---- strangers ----------------------------------------------------------------------------------


async def tls(w: World) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A TLS connection to b's listener, nothing said yet."""
    assert w.b.direct is not None
    return await asyncio.open_connection(
        HOST, w.b.direct.port, ssl=client_context(), server_hostname=""
    )


async def assert_cut_off(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(OSError):
            assert await reader.read() == b""


@pytest.mark.parametrize(
    "said",
    [
        direct.PREAMBLE + bytes(32),
        b"GET / HTTP/1.1\r\nHost: nobody.example\r\nUser-Agent: x\r\n\r\n",
        b"\0" * 1_000_000,
    ],
    ids=["a wrong token", "another protocol", "garbage"],
)
def test_who_has_no_token_is_cut_off(said: bytes) -> None:
    async def scenario(w: World) -> None:
        reader, writer = await tls(w)
        writer.write(said)
        await assert_cut_off(reader)
        writer.close()
        assert channels(w.b, w.a) == []
        await w.upgraded()

    play(scenario)


def test_a_token_is_good_once() -> None:
    async def scenario(w: World) -> None:
        ticket = await w.ticket()
        stream = await dial_direct(w.b.peer_id, ticket, client_context())
        w.a.channels.attach(stream, direct=w.a.links)
        await until(lambda: channels(w.b, w.a))
        reader, writer = await tls(w)
        writer.write(direct.PREAMBLE + ticket.token)
        await assert_cut_off(reader)
        writer.close()
        assert len(channels(w.b, w.a)) == 1

    play(scenario)


def test_who_comes_with_a_token_is_who_asked_for_it() -> None:
    """And nobody else, whatever it says of itself."""

    async def scenario(w: World) -> None:
        assert w.b.direct is not None
        ticket = w.b.direct.ticket("somebody", w.b.addresses())
        stream = await dial_direct(w.b.peer_id, ticket, client_context())
        w.a.channels.attach(stream, direct=w.a.links)
        assert w.b.links is not None
        await until(lambda: w.b.links.channels)  # type: ignore[union-attr]
        assert list(w.b.links.channels) == ["somebody"]

    play(scenario)


def test_another_certificate_gets_no_token() -> None:
    async def scenario(w: World) -> None:
        said = bytearray()
        impostor = direct.Certificate()

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                said.extend(await reader.read())
            writer.close()

        server = await asyncio.start_server(listen, HOST, 0, ssl=impostor.context)
        port = server.sockets[0].getsockname()[1]
        ticket = replace(await w.ticket(), addresses=((HOST, port),))
        with pytest.raises(Unreachable, match="another certificate"):
            await dial_direct(w.b.peer_id, ticket, client_context())
        server.close()
        await server.wait_closed()
        await asyncio.sleep(0)
        assert said == b""
        assert w.b.direct is not None
        assert w.b.direct.tickets.is_open(ticket.token)

    play(scenario)


def test_older_tls_is_refused() -> None:
    async def scenario(w: World) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, OSError)):
            await asyncio.open_connection(
                HOST,
                w.b.direct.port,
                ssl=context,
                server_hostname="",  # type: ignore[union-attr]
            )

    play(scenario)


def test_a_listener_with_older_tls_gets_no_token() -> None:
    async def scenario(w: World) -> None:
        said = bytearray()
        old = direct.Certificate()
        old.context.minimum_version = ssl.TLSVersion.TLSv1_2
        old.context.maximum_version = ssl.TLSVersion.TLSv1_2

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                said.extend(await reader.read())
            writer.close()

        server = await asyncio.start_server(listen, HOST, 0, ssl=old.context)
        port = server.sockets[0].getsockname()[1]
        ticket = replace(await w.ticket(), addresses=((HOST, port),), fingerprint=old.fingerprint)
        with pytest.raises(Unreachable):
            await dial_direct(w.b.peer_id, ticket, client_context())
        server.close()
        await server.wait_closed()
        assert said == b""

    play(scenario)


def test_who_is_slow_is_cut_off_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "GREETING_TIMEOUT_S", 0.5)

    async def scenario(w: World) -> None:
        assert w.b.direct is not None
        silent = [await asyncio.open_connection(HOST, w.b.direct.port) for _ in range(4)]
        reader, writer = await tls(w)
        writer.write(direct.PREAMBLE[:5])  # and no more
        await w.upgraded()
        await assert_cut_off(reader)
        for other, _ in silent:
            await assert_cut_off(other)
        for _, end in [*silent, (reader, writer)]:
            end.close()
        await until(lambda: listener_of(w.b).num_greeting == 0)

    play(scenario)


def test_visitors_who_have_not_greeted_are_bounded() -> None:
    async def scenario(w: World) -> None:
        assert w.b.direct is not None
        ends = [
            await asyncio.open_connection(HOST, w.b.direct.port)
            for _ in range(direct.MAX_GREETING_EACH)
        ]
        await until(lambda: listener_of(w.b).num_greeting == direct.MAX_GREETING_EACH)
        reader, writer = await asyncio.open_connection(HOST, w.b.direct.port)
        await assert_cut_off(reader)
        for _, end in [*ends, (reader, writer)]:
            end.close()

    play(scenario)


def test_what_breaks_the_protocol_on_a_direct_channel_bans_its_sender() -> None:
    async def scenario(w: World) -> None:
        stream = await dial_direct(w.b.peer_id, await w.ticket(), client_context())
        stream.transport.write(head_frame(NOTIFY, 0, {"m": "x"}))  # before any hello
        await until(lambda: not w.b.channels.may_attach(w.a.peer_id))
        again = await dial_direct(w.b.peer_id, await w.ticket(), client_context())
        await asyncio.sleep(0.05)
        assert channels(w.b, w.a) == []
        stream.transport.abort()
        again.transport.abort()

    play(scenario)


# ---- where a ticket leads -----------------------------------------------------------------------


def test_a_peer_of_another_machine_cannot_show_that_it_is_here() -> None:
    """It has tickets of peers that are: they say so to who asked, and to nobody else."""

    async def scenario(w: World) -> None:
        assert w.b.direct is not None
        asked = w.b.direct.ticket("liar", [f"/ip4/{HOST}/tcp/1"])
        assert direct.is_here(asked, "liar")
        assert not direct.is_here(asked, w.a.peer_id)
        assert not direct.is_here(replace(asked, machine=b""), "liar")

    play(scenario)


def test_a_ticket_leads_to_no_service_of_this_machine() -> None:
    """A peer that names this machine's loopback, and does not show that it is here, has nothing
    dialled there."""
    knocked: list[object] = []

    async def scenario(w: World) -> None:
        service = await asyncio.start_server(lambda _, writer: knocked.append(writer), HOST, 0)
        port = service.sockets[0].getsockname()[1]

        async def liar(request: Request) -> Message:
            ticket = await w.ticket()
            return Message(replace(ticket, addresses=((HOST, port),), machine=bytes(32)))

        w.a.carrier.where = "200.5.5.11"  # type: ignore[attr-defined]
        w.b.handle(TICKET.name, liar)
        links_of(w.a).want(w.b.peer_id)
        await until(lambda: not links_of(w.a).num_opening)
        service.close()

    play(scenario)
    assert not knocked


@pytest.mark.parametrize(
    "change",
    [
        {"token": b"short"},
        {"fingerprint": b""},
        {"machine": b"x"},
        {"addresses": (("192.0.2.7", 0),)},
        {"addresses": (("1" * 1000, 5000),)},
        {"addresses": (("192.0.2.7", 5000),) * 65},
    ],
)
def test_a_wrong_ticket_is_a_violation(change: dict[str, Any]) -> None:
    with pytest.raises(ProtocolViolation):
        replace(Ticket((), bytes(32), bytes(32)), **change)


@pytest.mark.parametrize("body", [None, 3, {"addresses": 1}, {"token": b"x" * 32}])
def test_a_ticket_that_is_none_ends_the_attempt_only(body: Any) -> None:
    async def scenario(w: World) -> None:
        async def wrong(request: Request) -> Message:
            return Message(body)

        w.b.handle(TICKET.name, wrong)
        await w.call(BULK)
        await until(lambda: links_of(w.a).num_opening == 0)
        assert (await w.call(BULK)).arrays[0].data == BULK.data
        assert channels(w.a, w.b) == []

    play(scenario)


def test_an_address_that_does_not_answer_costs_nobody_but_the_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(direct, "DIAL_TIMEOUT_S", 0.2)

    async def scenario(w: World) -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, HOST, 0)
        port = server.sockets[0].getsockname()[1]
        elsewhere = replace(await w.ticket(), addresses=((HOST, port),))
        with pytest.raises(Unreachable, match="no answer within"):
            await dial_direct(w.b.peer_id, elsewhere, client_context())
        server.close()
        await server.wait_closed()

    play(scenario)


def test_addresses_that_swallow_what_is_sent_do_not_use_the_ticket_up() -> None:
    async def scenario(w: World) -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        servers = [await asyncio.start_server(silent, HOST, 0) for _ in range(3)]
        ports = [s.sockets[0].getsockname()[1] for s in servers]
        ticket = await w.ticket()
        ticket = replace(ticket, addresses=(*((HOST, p) for p in ports), *ticket.addresses))
        async with asyncio.timeout(direct.DIAL_TIMEOUT_S):
            stream = await dial_direct("somebody", ticket, client_context())
        assert w.a.links is not None
        w.a.channels.attach(stream, direct=w.a.links)
        await until(lambda: w.b.links.channels)  # type: ignore[union-attr]
        for server in servers:
            server.close()
            await server.wait_closed()

    play(scenario)


# ---- pure ---------------------------------------------------------------------------------------


def test_pauses_double_and_a_steady_connection_is_opened_again_at_once() -> None:
    attempts = upgrade.Attempts()
    now, pauses = 0.0, []
    for _ in range(10):
        assert attempts.may_try("p", now)
        pauses.append(attempts.failed("p", now))
        assert not attempts.may_try("p", now + pauses[-1] - 0.01)
        now += pauses[-1]
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert max(pauses) == UPKEEP_S, "a way that is back is used within a minute"
    attempts.broke("p", UPKEEP_S, now)
    assert attempts.may_try("p", now)
    attempts.broke("p", FIRST_PAUSE_S / 2, now)
    assert not attempts.may_try("p", now)


def test_what_is_remembered_is_bounded() -> None:
    attempts = upgrade.Attempts()
    for n in range(upgrade.MAX_REMEMBERED + 10):
        attempts.failed(str(n), 0.0)
    refused = [n for n in range(upgrade.MAX_REMEMBERED + 10) if not attempts.may_try(str(n), 0.0)]
    assert len(refused) == upgrade.MAX_REMEMBERED
    counter = iter(range(1 << 20))
    tickets = upgrade.Tickets(lambda size: next(counter).to_bytes(size, "big"))
    for n in range(upgrade.MAX_TICKETS + 10):
        tickets.issue(str(n), 0.0)
    assert len(tickets) == upgrade.MAX_TICKETS


def test_tickets_expire_and_each_peer_has_few() -> None:
    counter = iter(range(1 << 20))
    tickets = upgrade.Tickets(lambda size: next(counter).to_bytes(size, "big"))
    old = tickets.issue("p", 0.0)
    assert tickets.redeem(old, ANSWER_S + 0.1) is None
    tokens = [tickets.issue("p", 1.0) for _ in range(upgrade.MAX_TICKETS_EACH + 1)]
    other = tickets.issue("q", 1.0)
    assert [tickets.redeem(t, 2.0) for t in tokens] == [None, *["p"] * upgrade.MAX_TICKETS_EACH]
    assert tickets.redeem(other, 2.0) == "q"
    assert tickets.redeem(other, 2.0) is None


def test_the_clock_of_tickets_is_the_loops() -> None:
    """A ticket is good although the loop's clock is not the time of day."""

    async def scenario(w: World) -> None:
        assert abs(asyncio.get_running_loop().time() - time.time()) > 1
        await w.upgraded()

    play(scenario)


def test_a_ticket_is_its_machines_whatever_seat_asks_for_it() -> None:
    """Else a peer that is banned would come back as one of its 63 other seats."""

    async def scenario(w: World) -> None:
        for seat in (0, 5, 6):
            reply = await w.a.dialer.call(w.b.peer_id, TICKET.name, Message(), None, (seat, 0))
            ticket = convert(reply.body, Ticket)
            stream = await dial_direct(w.b.peer_id, ticket, client_context())
            w.a.channels.attach(stream, direct=w.a.links)
        assert w.b.links is not None
        await until(lambda: len(channels(w.b, w.a)) == 3)
        assert list(w.b.links.channels) == [w.a.peer_id]

    play(scenario)


def test_channels_without_a_hello_are_bounded_too() -> None:
    async def scenario(w: World) -> None:
        streams = []
        for _ in range(3 * MAX_DIRECT):
            reply = await w.a.dialer.call(w.b.peer_id, TICKET.name, Message(), None, (0, 0))
            ticket = convert(reply.body, Ticket)
            streams.append(await dial_direct(w.b.peer_id, ticket, client_context()))
        await asyncio.sleep(0.3)
        assert w.b.channels.num_direct(w.a.peer_id) == MAX_DIRECT
        for stream in streams:
            stream.transport.abort()

    play(scenario)


@pytest.mark.parametrize(
    ("port", "second"), [(0, 0), (4001, 4002), (1023, 1024), (443, 0), (65_535, 0)]
)
def test_the_second_port_is_next_to_the_first_where_others_dial_that(
    port: int, second: int
) -> None:
    assert port_after(port) == second


def test_a_port_that_is_only_wished_for_may_be_another() -> None:
    async def main() -> None:
        first = DirectListener(HOST, 0)
        await first.start(lambda stream: None)
        wishing, insisting = (
            DirectListener(HOST, first.port, is_wish=is_wish) for is_wish in (True, False)
        )
        with pytest.raises(PortTaken, match="choose another --direct-port"):
            await insisting.start(lambda stream: None)
        await wishing.start(lambda stream: None)
        assert wishing.port not in (0, first.port)
        carrier = Carrier(LoopbackHub(), identity(1).peer_id)
        assert ChannelTransport(carrier, direct=wishing).ports() == (4001, wishing.port)
        assert ChannelTransport(carrier).ports() == (4001,)
        await first.close()
        await wishing.close()

    asyncio.run(main())


def test_the_second_port_is_the_same_at_addresses_of_both_kinds() -> None:
    async def main() -> None:
        listener = DirectListener(ANY_INTERFACE, 0)
        streams: list[ByteStream] = []
        await listener.start(streams.append)
        for host in ("127.0.0.1", "::1")[: len(listening_hosts(ANY_INTERFACE))]:
            ticket = replace(listener.ticket("asker", ()), addresses=((host, listener.port),))
            (await dial_direct("b", ticket, client_context())).transport.abort()
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with contextlib.closing(listener.dialling_socket(family)) as dialling:
                assert dialling.getsockname()[1] == listener.port
        other = DirectListener(ANY_INTERFACE, listener.port)
        with pytest.raises(PortTaken, match="choose another --direct-port"):
            await other.start(streams.append)
        await listener.close()
        await other.start(streams.append)  # nothing is left of the first
        await other.close()

    asyncio.run(main())


# ---- a faster way ---------------------------------------------------------------------------


def reached_at(w: World, *hosts: str) -> None:
    """Of b, by a."""
    carrier: Any = w.b.carrier
    carrier.addresses = lambda: [f"/ip4/{h}/tcp/4001/p2p/{w.b.peer_id}" for h in hosts]


def round_trips(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Of connections from or to a host, whose last number is named (`at_2`: 127.0.0.2)."""

    def measured(connection: Any) -> float | None:
        ends = (connection.getsockname()[0], connection.getpeername()[0])
        for name, round_trip_s in seconds.items():
            if f"127.0.0.{name[3:]}" in ends:
                return round_trip_s
        return None

    monkeypatch.setattr(system, "round_trip_s", measured)


def host_used(near: ChannelTransport, far: ChannelTransport) -> set[str]:
    [channel, *_] = channels(near, far)
    sock = channel.connection
    return {sock.getsockname()[0], sock.getpeername()[0]}


def connects_within(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """To a host, named as of `round_trips`, where the kernel does not say how far it is."""
    connected = direct._connected  # noqa: SLF001  what takes its time on a real link

    async def late(host: str, port: int) -> socket.socket:
        await asyncio.sleep(seconds[f"at_{host[-1]}"])
        return await connected(host, port)

    async def known(host: str, port: int) -> float:
        return seconds[f"at_{host[-1]}"]

    monkeypatch.setattr(system, "round_trip_s", lambda connection: None)
    monkeypatch.setattr(direct, "_connected", late)
    monkeypatch.setattr(links, "round_trip_to", known)
    monkeypatch.setattr(links, "STANDS_AFTER_S", 0.0)


@pytest.mark.parametrize("measured", [round_trips, connects_within])
def test_a_faster_address_takes_over_and_what_is_under_way_goes_on(
    monkeypatch: pytest.MonkeyPatch, measured: Callable[..., None]
) -> None:
    """On Linux, and on systems that do not say how long a round trip takes."""
    monkeypatch.setattr(faster_ways, "LOOK_EVERY_S", 0.02)
    measured(monkeypatch, at_2=0.001, at_3=0.05, at_1=0.0)

    async def scenario(w: World) -> None:
        go_on, entered = asyncio.Event(), asyncio.Event()

        async def slow(request: Request) -> Message:
            entered.set()
            await go_on.wait()
            return request.message

        w.b.handle("slow", slow)
        reached_at(w, "127.0.0.3")
        await w.upgraded()
        assert "127.0.0.3" in host_used(w.a, w.b)
        under_way = asyncio.create_task(w.call(BULK, method="slow"))
        await entered.wait()
        reached_at(w, "127.0.0.3", "127.0.0.2")
        await until(
            lambda: all("127.0.0.2" in host_used(*pair) for pair in ((w.a, w.b), (w.b, w.a)))
        )
        before = w.a.traffic.direct_sent_bytes
        await w.call(BULK)
        assert w.a.traffic.direct_sent_bytes - before > BULK.num_bytes
        assert len(channels(w.a, w.b)) == 2
        go_on.set()
        assert (await under_way).arrays[0].data == BULK.data
        await until(lambda: len(channels(w.a, w.b)) == len(channels(w.b, w.a)) == 1)
        assert "127.0.0.2" in host_used(w.a, w.b)

    play(scenario, b_host="0.0.0.0")


@pytest.mark.parametrize("measured", [round_trips, connects_within])
def test_an_address_that_is_no_faster_gets_no_channel_and_no_token(
    monkeypatch: pytest.MonkeyPatch, measured: Callable[..., None]
) -> None:
    monkeypatch.setattr(faster_ways, "LOOK_EVERY_S", 0.02)
    measured(monkeypatch, at_2=0.04, at_3=0.05, at_1=0.05)

    async def scenario(w: World) -> None:
        reached_at(w, "127.0.0.3")
        await w.upgraded()
        reached_at(w, "127.0.0.3", "127.0.0.2")
        asked: list[str] = []
        on_ticket = links_of(w.b).on_ticket

        async def counted(request: Request) -> Message:
            asked.append(request.remote)
            return await on_ticket(request)

        w.b.handle(TICKET.name, counted)
        await until(lambda: len(asked) > 3)
        assert "127.0.0.3" in host_used(w.a, w.b)
        assert len(channels(w.a, w.b)) == len(channels(w.b, w.a)) == 1

    play(scenario, b_host="0.0.0.0")


def carrier_leads_to(w: World, host: str, *places: str) -> Any:
    """a's channel to b over the carrier; b's record names these hosts too."""
    channel: Any = w.a.channels.first(w.b.peer_id)
    assert channel is not None
    channel._stream.seen_at = f"/ip4/{host}/tcp/4001"  # noqa: SLF001  this carrier does not say it
    named = [f"/ip4/{h}/tcp/4001/p2p/{w.b.peer_id}" for h in (host, *places)]
    w.a.learn(w.b.peer_id, named)
    return channel


async def goes_direct(w: World, method: str = "small") -> bool:
    """Whether a small call does."""
    before = w.a.traffic.direct_sent_bytes
    await w.call(method=method)
    return w.a.traffic.direct_sent_bytes > before


def test_where_the_direct_channel_is_faster_small_calls_take_it_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All but those that find out whether libp2p reaches a peer. When it breaks, they go back."""
    connects_within(monkeypatch, at_1=0.0, at_2=0.001, at_3=0.05)

    async def scenario(w: World) -> None:
        w.b.handle(PING.name, echo)
        reached_at(w, "127.0.0.2")
        await w.upgraded()
        look = links_of(w.a).look_for_faster
        for host, is_slow in (("127.0.0.2", False), ("127.0.0.3", True)):
            carrier_leads_to(w, host)
            await look(w.b.peer_id)
            assert await goes_direct(w) == is_slow
            assert not await goes_direct(w, PING.name)
        channels(w.a, w.b)[0].abort("cut")
        assert not await goes_direct(w)

    play(scenario, b_host="0.0.0.0")


def test_who_is_called_through_a_relay_and_met_directly_is_called_directly() -> None:
    async def scenario(w: World) -> None:
        await w.upgraded()
        assert not await goes_direct(w)
        carrier_leads_to(w, HOST).is_relayed = True
        assert await goes_direct(w)

    play(scenario)


@pytest.mark.parametrize("is_back", [False, True])
def test_a_faster_address_is_used_where_nobody_has_asked_for_large_messages(
    monkeypatch: pytest.MonkeyPatch, is_back: bool
) -> None:
    connects_within(monkeypatch, at_1=0.0, at_2=0.001 if is_back else 0.04, at_3=0.05)

    async def scenario(w: World) -> None:
        await w.call()
        reached_at(w, "127.0.0.2")
        carrier_leads_to(w, "127.0.0.3", "127.0.0.2")
        await links_of(w.a).look_for_faster(w.b.peer_id)
        assert bool(channels(w.a, w.b)) == is_back
        assert await goes_direct(w) == is_back

    play(scenario, b_host="0.0.0.0")


def test_to_a_host_where_nobody_may_knock_a_way_in_the_house_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The router's, from where the peer seems to come."""
    connects_within(monkeypatch, at_1=0.0)

    async def scenario(w: World) -> None:
        await w.upgraded()
        for host, is_slow in (("203.0.113.7", True), ("127.0.0.9", False)):
            carrier_leads_to(w, host)
            w.a.learn(w.b.peer_id, [f"/ip4/{HOST}/tcp/4001/p2p/{w.b.peer_id}"])
            await links_of(w.a).look_for_faster(w.b.peer_id)
            assert await goes_direct(w) == is_slow

    play(scenario)


@pytest.mark.skipif(system.PORTABLE, reason="only Linux says it")
def test_the_kernel_says_how_long_a_round_trip_takes() -> None:
    async def scenario(w: World) -> None:
        await w.upgraded()
        for near, far in ((w.a, w.b), (w.b, w.a)):
            took_s = system.round_trip_s(channels(near, far)[0].connection)
            assert took_s is not None
            assert 0 < took_s < 1

    play(scenario)
    assert system.round_trip_s(None) is None


# ---- from where a port is seen ------------------------------------------------------------------


async def asks(judge: DirectListener, listener: DirectListener) -> Seen:
    ticket = judge.ticket("asker", ())
    return await whence(listener, "judge", ticket, [(HOST, judge.port)])


@contextlib.asynccontextmanager
async def listeners(number: int = 2) -> AsyncIterator[list[DirectListener]]:
    """That take no streams."""
    made = [DirectListener(HOST, 0) for _ in range(number)]
    taken: list[ByteStream] = []
    for one in made:
        await one.start(taken.append)
    try:
        yield made
    finally:
        for one in made:
            await one.close()
    assert not taken


def test_a_judge_says_from_where_the_listeners_port_comes() -> None:
    async def main() -> None:
        async with listeners(3) as (asking, judge, other):
            seen = await asks(judge, asking)
            assert (seen.host, seen.port) == (HOST, asking.port)
            assert not seen.transport.is_closing(), "the router keeps the port meanwhile"
            also = await asks(other, asking)  # beside the first, from the same port
            assert also.port == seen.port
            await judge.close()
            await until(seen.transport.is_closing)

    asyncio.run(main())


def test_a_judge_says_nothing_without_a_ticket() -> None:
    async def main() -> None:
        async with listeners() as (asking, judge):
            ticket = judge.ticket("asker", ())
            for wrong in (replace(ticket, token=bytes(32)), replace(ticket, fingerprint=bytes(32))):
                with pytest.raises(Unreachable):
                    await whence(asking, "judge", wrong, [(HOST, judge.port)])
            with pytest.raises(Unreachable, match="may be dialled"):
                await whence(asking, "judge", ticket, [])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"here 4001\n", ProtocolViolation),
        (b"192.0.2.7 70000\n", ProtocolViolation),
        (b"192.0.2.7 0\n", ProtocolViolation),
        (b"192.0.2.7 -1\n", ProtocolViolation),
        (b"\xff\n", ProtocolViolation),
        (b"1" * 1000, Unreachable),
        (b"", Unreachable),
    ],
)
def test_a_judge_that_says_nonsense_is_not_believed(
    said: bytes, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tell(self: DirectListener, transport: asyncio.Transport) -> None:
        transport.write(said)
        transport.close()

    monkeypatch.setattr(DirectListener, "_tell_whence", tell)

    async def main() -> None:
        async with listeners() as (asking, judge):
            with pytest.raises(error):
                await asks(judge, asking)

    asyncio.run(main())


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": ""},
        {"host": "1" * 65},
        {"port": 0},
        {"port": 70_000},
        {"fingerprint": b"short"},
        {"token": bytes(31)},
        {"wait_s": -1.0},
        {"wait_s": 60.0},
        {"wait_s": float("nan")},
    ],
)
def test_a_meeting_with_impossible_values_is_refused(wrong: dict[str, Any]) -> None:
    good = {"host": HOST, "port": 4001, "fingerprint": bytes(32), "token": bytes(32)}
    convert({**good, "wait_s": 0.5}, Meeting)
    with pytest.raises(ProtocolViolation):
        convert({**good, **wrong}, Meeting)


def test_who_is_reached_without_a_relay_is_met_by_nobody() -> None:
    """No dial, and no answer that says where this peer is seen, for one that needs neither."""

    async def main() -> None:
        async with two() as world:
            asked = Meeting(HOST, 4001, bytes(32), bytes(32))
            with pytest.raises(Refused):
                await world.a.call(world.b.peer_id, MEET.name, Message(asked), timeout_s=PATIENCE_S)

    asyncio.run(main())


# ---- names --------------------------------------------------------------------------------------


def named_by(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """Each look-up of a name gives the next answer; what was looked up is in the result."""
    asked: list[str] = []

    async def look_up(name: str, port: int) -> list[tuple[str, int]]:
        asked.append(name)
        return [(host, port) for host in answers[min(len(asked), len(answers)) - 1]]

    monkeypatch.setattr(direct, "_look_up", look_up)
    return asked


def by_name(world: World, name: str = "home.example", kind: str = "dns") -> None:
    carrier: Any = world.b.carrier
    carrier.addresses = lambda: [f"/{kind}/{name}/tcp/4001/p2p/{world.b.peer_id}"]


async def dial(world: World) -> ByteStream | None:
    """One attempt, without the pause after one that failed."""
    return await links_of(world.a)._dial(world.b.peer_id)  # noqa: SLF001  `want` waits after a failure


@pytest.mark.parametrize("kind", ["dns", "dns4", "dns6"])
def test_a_peer_that_announces_a_name_is_connected_directly(kind: str) -> None:
    async def main() -> None:
        async with two() as world:
            by_name(world, "localhost", kind)
            await world.upgraded()

    asyncio.run(main())


def test_what_a_name_leads_to_passes_the_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of others is no way around it, to a router's page or a provider's secrets."""
    named_by(monkeypatch, ["169.254.169.254", "10.0.0.1", "192.168.1.1", "fd00::1", "224.0.0.1"])

    async def main() -> None:
        async with two() as world:
            by_name(world)
            monkeypatch.setattr(links, "is_here", lambda *_: False)
            with pytest.raises(Unreachable, match="names no address that may be dialled"):
                await dial(world)

    asyncio.run(main())


def test_a_name_is_looked_up_at_each_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = named_by(monkeypatch, ["192.0.2.1"], [HOST])

    async def main() -> None:
        async with two() as world:
            by_name(world)
            with pytest.raises(Unreachable):
                await dial(world)
            stream = await dial(world)
            assert stream is not None
            stream.transport.abort()
            assert asked == ["home.example"] * 2

    asyncio.run(main())


def test_few_names_of_a_ticket_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = named_by(monkeypatch, ["203.0.113.1"])
    given = [(f"n{i}.example", 4002) for i in range(64)] + [("192.0.2.7", 4002), ("not a name", 1)]
    found = asyncio.run(direct.resolved(given))
    assert found == [("203.0.113.1", 4002)] * direct.MAX_NAMES + [("192.0.2.7", 4002)]
    assert len(asked) == direct.MAX_NAMES
