"""A connection between two peers that are both behind routers.

A router lets in what answers something that went out. So both dial at once, each from the port at
which it listens for direct connections, to where the other's port is seen from outside. Each router
takes the other's packets for answers, and TCP makes one connection of the two dials (RFC 9293,
3.5; RFC 5382 asks routers to let that pass). The two agree on it over their channel through a relay
(`methods.contact.MEET`); who is the server of TLS follows from their ids.

Where the own port is seen, peers say that are dialled from it (`whence`). Where a router shows
another port to each of them it is a symmetric one, and this does not lead through it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from swarmnet.errors import Busy, ProtocolViolation, Refused, SwarmnetError, Unreachable
from swarmnet.methods.contact import MAX_MEETING_WAIT_S, MEET, PING, Meeting, Ticket
from swarmnet.protocol.dialing.zones import host_from
from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.transport.base import ByteStream, Request
from swarmnet.transport.calls.channel import Channel
from swarmnet.transport.dial_filter import DialFilter
from swarmnet.transport.dialer import Dialer
from swarmnet.transport.direct import (
    PREAMBLE,
    WHENCE,
    DirectListener,
    authenticated,
    resolved,
)
from swarmnet.transport.open_channels import OpenChannels
from swarmnet.transport.relay import Relays
from swarmnet.wire import Message, convert

log = logging.getLogger("swarmnet.transport")

NUM_JUDGES = 3
"""Peers that are asked where they see this one's port: two tell a symmetric router."""
SEEN_FOR_S = 8.0
"""What they say holds so long, while their connections stand (`direct.TOLD_FOR_S`)."""
MEETING_TIMEOUT_S = 10.0
"""To agree on a meeting."""
MEETING_S = 5.0
"""For both dials: a packet that a router has dropped is sent again after one second, and three."""
COMES_WITHIN_S = 10.0
"""Who has been met says hello."""
MAX_ANSWERING = 16
"""Meetings at a time for which others have asked."""

ANSWER_BYTES = 64
ASK_S = 4.0
"""For a judge's answer."""
AGAIN_S = 0.1
"""Between two dials of one meeting: a router may refuse what came before its own side dialled."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Where the port for direct connections is seen by one peer."""

    host: str
    port: int
    transport: Any
    """Of the connection; while it stands, the router keeps the port."""


async def whence(
    listener: DirectListener, peer_id: str, ticket: Ticket, targets: Sequence[tuple[str, int]]
) -> Seen:
    """What the peer that gave a ticket sees. `targets`: of its addresses, those that are dialled.
    Raises `Unreachable` or `ProtocolViolation`."""
    if not targets:
        raise Unreachable("the ticket names no address that may be dialled")
    host, port = targets[0]
    try:
        async with asyncio.timeout(ASK_S):
            sock = await dial_from_port(listener, host, port)
            stream = await authenticated(peer_id, sock, ticket, listener.client_context)
    except (OSError, EOFError) as e:
        raise Unreachable(f"{host} port {port}: {e or 'no answer in time'}") from None
    answer = _Answer()
    transport: Any = stream.transport
    try:
        transport.set_protocol(answer)
        transport.write(WHENCE + ticket.token)
        transport.resume_reading()
        async with asyncio.timeout(ASK_S):
            text = await answer.text
        seen, _, number = text.partition(" ")
        if not number.isdecimal() or not 0 < int(number) < 1 << 16:
            raise ProtocolViolation("an impossible port")
        return Seen(str(ipaddress.ip_address(seen)), int(number), transport)
    except BaseException as e:
        transport.abort()
        if isinstance(e, ValueError):
            raise ProtocolViolation("an impossible address") from None
        if isinstance(e, EOFError | OSError):
            raise Unreachable(str(e) or "no answer in time") from None
        raise


class _Answer(asyncio.Protocol):
    """One line."""

    def __init__(self) -> None:
        self.text: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._received = bytearray()

    def data_received(self, data: bytes) -> None:
        self._received += data
        line, end, _ = self._received.partition(b"\n")
        if self.text.done():
            return
        if end:
            self.text.set_result(line.decode("ascii", "replace"))
        elif len(line) > ANSWER_BYTES:
            self.text.set_exception(EOFError("too long an answer"))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.text.done():
            self.text.set_exception(EOFError("no answer"))
            self.text.exception()  # seen: nobody may be waiting any more


async def dial_from_port(listener: DirectListener, host: str, port: int) -> socket.socket:
    """A TCP connection from the port at which this peer listens. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = listener.dialling_socket(family)
    try:
        await asyncio.get_running_loop().sock_connect(sock, (host, port))
    except BaseException:
        sock.close()
        raise
    return sock


async def dial_at_once(
    listener: DirectListener, host: str, port: int, for_s: float
) -> socket.socket:
    """The same to a peer that dials this one meanwhile, again and again for so long. Raises
    `Unreachable`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + for_s
    while True:
        try:
            async with asyncio.timeout_at(end):
                return await dial_from_port(listener, host, port)
        except OSError as e:  # a `TimeoutError` is one
            if loop.time() + AGAIN_S >= end:
                raise Unreachable(f"{host} port {port}: {e or 'no answer in time'}") from None
        await asyncio.sleep(AGAIN_S)


class Links(Protocol):
    """The part of a transport that has direct channels."""

    channels: dict[str, list[Channel]]

    async def ticket_of(self, peer_id: str) -> Ticket:
        """Raises a `SwarmnetError` or `TimeoutError`."""

    async def open_on(self, stream: ByteStream) -> None:
        """A channel on a stream that this side has dialled. Raises as `ticket_of`."""


class Meetings:
    """Of one peer, with others that it reaches through relays."""

    def __init__(
        self,
        listener: DirectListener,
        links: Links,
        channels: OpenChannels,
        dialer: Dialer,
        dial_filter: DialFilter,
        relays: Relays | None,
    ) -> None:
        """`dialer`: calls over libp2p; `relays`: through which it reaches others; None: through
        none."""
        self._listener = listener
        self._links = links
        self._open_channels = channels
        self._dialer = dialer
        self._filter = dial_filter
        self._relays = relays
        self._asking: dict[str, None] = {}
        """Peers whom this one has asked to dial it while it dials them."""
        self._answering: dict[str, asyncio.Task[None]] = {}
        """By peer that has asked for that."""
        self._came: dict[str, asyncio.Future[None]] = {}
        """Peers that are to come to the listener."""
        self._seen: dict[int, tuple[Seen, float]] = {}
        """By version of IP: from where this peer is seen to come, and until when that holds."""
        self._looking = asyncio.Lock()
        self._is_closed = False

    async def close(self) -> None:
        """Idempotent."""
        self._is_closed = True
        tasks = list(self._answering.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for seen, _ in self._seen.values():
            seen.transport.abort()
        self._seen.clear()

    def may_help(self, peer_id: str) -> bool:
        """Whether a peer is reached in no other way."""
        return self._relays is not None and self._relays.carry(peer_id)

    def came(self, peer_id: str) -> None:
        """There is a direct channel to a peer."""
        waiting = self._came.get(peer_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    async def meet(self, peer_id: str) -> ByteStream | None:
        """Asks a peer that is reached through a relay to dial this one while it is dialled; None
        where it came to the listener then. Raises a `SwarmnetError` or `TimeoutError`."""
        loop = asyncio.get_running_loop()
        self._asking[peer_id] = None
        try:
            async with asyncio.timeout(MEETING_TIMEOUT_S):
                try:
                    seen = await self._seen_outside(peer_id, 4)
                except Unreachable:
                    seen = await self._seen_outside(peer_id, 6)
                began = loop.time()
                await self._dialer.call(peer_id, PING.name, Message(), None)
                one_way_s = min((loop.time() - began) / 2, MAX_MEETING_WAIT_S)
                asked = Message(self._meeting_with(peer_id, seen, one_way_s))
                reply = await self._dialer.call(peer_id, MEET.name, asked, None)
            return await self._meet_at(peer_id, convert(reply.body, Meeting))
        finally:
            self._asking.pop(peer_id, None)

    async def on_meet(self, request: Request) -> Message:
        """For a peer that is about to dial this one and wants to be dialled meanwhile."""
        remote = machine_of(request.remote)
        asked = convert(request.message.body, Meeting)
        if not self.may_help(remote):
            raise Refused("the two do not need a relay")
        if self._is_closed or remote in self._links.channels or remote in self._answering:
            raise Refused("there is a direct connection, or will be")
        if remote in self._asking and self._filter.own_peer_id < remote:
            raise Refused("this peer has asked for the same")
        if len(self._answering) >= MAX_ANSWERING:
            raise Busy("it meets others")
        host = host_from(asked.host)
        seen = await self._seen_outside(remote, 4 if host is None else host.version)
        task = asyncio.get_running_loop().create_task(self._answer(remote, asked))
        self._answering[remote] = task
        task.add_done_callback(lambda _: self._answering.pop(remote, None))
        return Message(self._meeting_with(remote, seen))

    async def _answer(self, peer_id: str, asked: Meeting) -> None:
        try:
            await asyncio.sleep(asked.wait_s)
            stream = await self._meet_at(peer_id, asked)
            if stream is not None:
                await self._links.open_on(stream)
        except (SwarmnetError, TimeoutError) as e:
            why = e or "no answer in time"
            log.info("no way through the routers to %s: %s", peer_id[-8:], why)

    async def _meet_at(self, peer_id: str, meeting: Meeting) -> ByteStream | None:
        """Dials a peer that dials this one meanwhile. Of the two the one with the lower id is the
        server, where the other comes to the listener: None then."""
        named = self._filter.targets(peer_id, [(meeting.host, meeting.port)], is_here=False)
        if not named:
            raise Unreachable("it is not to be dialled where it says")
        sock = await dial_at_once(self._listener, *named[0], MEETING_S)
        if self._filter.own_peer_id > peer_id:
            ticket = Ticket(named, meeting.fingerprint, meeting.token)
            try:
                context = self._listener.client_context
                stream = await authenticated(peer_id, sock, ticket, context)
            except (OSError, EOFError) as e:
                raise Unreachable(str(e) or "no answer in time") from None
            stream.transport.write(PREAMBLE + meeting.token)
            log.info("met %s: both routers let the two through", peer_id[-8:])
            return stream
        came = self._came[peer_id] = asyncio.get_running_loop().create_future()
        try:
            self._listener.adopt(sock)
            async with asyncio.timeout(COMES_WITHIN_S):
                await came
            log.info("met %s: both routers let the two through", peer_id[-8:])
        finally:
            del self._came[peer_id]
        return None

    def _meeting_with(self, peer_id: str, seen: Seen, wait_s: float = 0.0) -> Meeting:
        ticket = self._listener.ticket(peer_id, ())
        return Meeting(seen.host, seen.port, ticket.fingerprint, ticket.token, wait_s)

    async def _seen_outside(self, peer_id: str, version: int) -> Seen:
        """Where the port for direct connections is seen, by peers that can be dialled, at addresses
        of this version of IP. Raises `Unreachable`."""
        loop = asyncio.get_running_loop()
        async with self._looking:  # two would dial a judge from one port
            seen, until = self._seen.get(version, (None, float("-inf")))
            if seen is None or loop.time() >= until:
                if seen is not None:
                    seen.transport.abort()
                    del self._seen[version]
                seen = await self._look(peer_id, version)
                self._seen[version] = seen, loop.time() + SEEN_FOR_S
            return seen

    async def _look(self, peer_id: str, version: int) -> Seen:
        connected = self._open_channels.connected()
        judges = [p for p in connected if p != peer_id and not self.may_help(p)]
        asked = await asyncio.gather(
            *(self._ask(judge, version) for judge in judges[:NUM_JUDGES]), return_exceptions=True
        )
        found = [seen for seen in asked if isinstance(seen, Seen)]
        if not found:
            raise Unreachable("no peer says where it sees this one")
        is_same = len({seen.port for seen in found if seen.host == found[0].host}) == 1
        for seen in found[1:] if is_same else found:
            seen.transport.abort()
        if not is_same:
            raise Unreachable("the own router is symmetric: each peer sees another port")
        return found[0]

    async def _ask(self, judge: str, version: int) -> Seen:
        ticket = await self._links.ticket_of(judge)
        addresses = await resolved(ticket.addresses)
        named = self._filter.targets(judge, addresses, is_here=False)
        own = [target for target in named if (":" in target[0]) == (version == 6)]
        return await whence(self._listener, judge, ticket, own)
