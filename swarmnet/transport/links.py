"""Which carrier a call takes: libp2p's channel, or a direct one beside it.

The channel over libp2p stays: it is how a peer is found, watched and, where the direct connection
fails, reached. Calls that move arrays go over a direct channel as soon as there is one; the first
of them makes one be opened, and does not wait for it. When a direct channel breaks, calls that are
open on it are made again over libp2p.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from swarmnet.errors import Busy, ChannelClosed, Refused, SwarmnetError, Unreachable
from swarmnet.methods.contact import MAX_MEETING_WAIT_S, MEET, PING, TICKET, Meeting, Ticket
from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.timing import ANSWER_S
from swarmnet.protocol.upgrade import Attempts
from swarmnet.transport.base import ByteStream, Request
from swarmnet.transport.calls.channel import Channel
from swarmnet.transport.calls.heads import FIRST_SEATS, Route
from swarmnet.transport.dial_filter import DialFilter
from swarmnet.transport.dialer import Dialer
from swarmnet.transport.direct import (
    PREAMBLE,
    DirectListener,
    authenticated,
    dial_direct,
    is_here,
    resolved,
)
from swarmnet.transport.open_channels import OpenChannels
from swarmnet.transport.punching import Seen, dial_at_once, whence
from swarmnet.transport.relay import Relays
from swarmnet.wire import Message, convert

log = logging.getLogger("swarmnet.transport")

BULK_BYTES = 64 << 10
"""Array bytes of a call or its reply that make a direct connection worth opening."""
TICKET_TIMEOUT_S = 10.0
READY_TIMEOUT_S = 10.0
MAX_DIRECT = 4
"""Direct channels of one peer, those on which it has not said hello yet too."""
MAX_OPENING = 16
"""Attempts at a time; more wait for their next bulk call."""
NUM_JUDGES = 3
"""Peers that are asked where they see this one's port: two tell a symmetric router."""
SEEN_FOR_S = 8.0
"""What they say holds so long, while their connections stand (`direct.TOLD_FOR_S`)."""
MEETING_TIMEOUT_S = 10.0
"""To agree on a meeting."""
MEETING_S = 5.0
"""For both dials: a packet that a router has dropped is sent again after one second, and three."""


class DirectLinks:
    """The direct channels of one transport."""

    def __init__(
        self,
        listener: DirectListener,
        channels: OpenChannels,
        dialer: Dialer,
        dial_filter: DialFilter,
        addresses: Callable[[], list[str]],
        relays: Relays | None = None,
    ) -> None:
        """`dialer`: calls over libp2p; `addresses`: multiaddrs of this peer, for its tickets.
        `relays`: through which it meets others; None: through none."""
        self.channels: dict[str, list[Channel]] = {}
        """By peer, those that are ready."""
        self._listener = listener
        self._open_channels = channels
        self._dialer = dialer
        self._filter = dial_filter
        self._addresses = addresses
        self._relays = relays
        self._context = listener.client_context
        self._attempts = Attempts()
        self._opened_at: dict[Channel, float] = {}
        self._bulk_methods: dict[str, None] = {}
        self._opening: dict[str, asyncio.Task[None]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._meeting: dict[str, None] = {}
        """Peers whom this one has asked to dial it while it dials them."""
        self._answering: dict[str, asyncio.Task[None]] = {}
        """By peer that has asked for that."""
        self._came: dict[str, asyncio.Future[None]] = {}
        """Peers that are to come to the listener."""
        self._seen: Seen | None = None
        self._seen_until = float("-inf")
        self._looking = asyncio.Lock()
        self._closed = False

    async def start(self) -> None:
        """Raises `AddressError`."""
        await self._listener.start(self._accept)

    async def close(self) -> None:
        """Idempotent. The channels are their transport's to close."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        tasks = [*self._opening.values(), *self._answering.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._seen is not None:
            self._seen.transport.abort()
        await self._listener.close()

    # ---- calls ------------------------------------------------------------------------------

    async def call(
        self,
        peer_id: str,
        method: str,
        message: Message,
        on_progress: Callable[[Message], None] | None,
        route: Route = FIRST_SEATS,
        on_part: Callable[[], None] | None = None,
    ) -> Message:
        """Over the best channel there is; `on_part`: see `PendingCalls.add`. Raises as
        `Transport.call`."""
        num_bytes = sum(a.num_bytes for a in message.arrays)
        if num_bytes >= BULK_BYTES or method in self._bulk_methods:
            channel = self.channel(peer_id)
            if channel is None:
                self.want(peer_id)
            else:
                try:
                    return await channel.call(method, message, on_progress, route, on_part)
                except ChannelClosed as e:
                    log.debug("%s: %s; over libp2p then", method, e)
        reply = await self._dialer.call(peer_id, method, message, on_progress, route, on_part)
        if sum(a.num_bytes for a in reply.arrays) >= BULK_BYTES:
            self._bulk_methods[method] = None  # of our own calls: as many as there are methods
            self.want(peer_id)
        return reply

    @property
    def num_opening(self) -> int:
        """Attempts to open a direct channel that are under way."""
        return len(self._opening)

    def channel(self, peer_id: str) -> Channel | None:
        """A direct channel to a peer that is open now."""
        channels = self.channels.get(peer_id)
        return channels[0] if channels else None

    def want(self, peer_id: str) -> None:
        """Tries to open a direct channel, unless there is one or it failed lately."""
        now = asyncio.get_running_loop().time()
        if self._closed or peer_id in self.channels or peer_id in self._opening:
            return
        if len(self._opening) >= MAX_OPENING or not self._attempts.may_try(peer_id, now):
            return
        task = asyncio.get_running_loop().create_task(self._open(peer_id))
        self._opening[peer_id] = task
        task.add_done_callback(lambda _: self._opening.pop(peer_id, None))

    # ---- channels ---------------------------------------------------------------------------

    async def _open(self, peer_id: str) -> None:
        loop = asyncio.get_running_loop()
        channel: Channel | None = None
        try:
            stream = await self._dial(peer_id)
            if stream is None:
                return  # it came to the listener
            self._filter.reached(stream)
            channel = self._open_channels.attach(stream, direct=self)
            async with asyncio.timeout(READY_TIMEOUT_S):
                await asyncio.shield(channel.ready)
        except (SwarmnetError, TimeoutError) as e:
            if channel is not None:
                channel.abort("no hello in time")
            if peer_id in self.channels:
                return  # it came to us meanwhile
            pause_s = self._attempts.failed(peer_id, loop.time())
            log.info(
                "no direct connection to %s (%s); libp2p carries on, next attempt in %.0f s",
                peer_id[-8:],
                e or "no answer in time",
                pause_s,
            )

    async def _dial(self, peer_id: str) -> ByteStream | None:
        """None where the peer came to the listener meanwhile. Raises a `SwarmnetError` or
        `TimeoutError`."""
        if self._relays is not None and self._relays.carry(peer_id):
            try:
                return await self._meet(peer_id)
            except (SwarmnetError, TimeoutError) as e:
                why = e or "no answer in time"
                log.info("no way through the routers to %s: %s", peer_id[-8:], why)
        ticket = await self._ticket_of(peer_id)
        here = is_here(ticket, self._filter.own_peer_id)
        addresses = await resolved(ticket.addresses)
        named = self._filter.targets(peer_id, addresses, is_here=here)
        return await dial_direct(peer_id, replace(ticket, addresses=named), self._context)

    async def _ticket_of(self, peer_id: str) -> Ticket:
        async with asyncio.timeout(TICKET_TIMEOUT_S):
            reply = await self._dialer.call(peer_id, TICKET.name, Message(), None)
        return convert(reply.body, Ticket)

    def _accept(self, stream: ByteStream) -> None:
        channels = self._open_channels
        is_full = channels.num_direct(stream.remote) >= MAX_DIRECT
        if self._closed or is_full or not channels.may_attach(stream.remote):
            stream.transport.abort()
        else:
            self._open_channels.attach(stream, direct=self)

    def ready(self, channel: Channel) -> None:
        """The peer has said hello on a direct channel."""
        self.channels.setdefault(channel.remote, []).append(channel)
        self._open_channels.traffic.direct_links = len(self.channels)
        self._opened_at[channel] = asyncio.get_running_loop().time()
        timer = self._timers.pop(channel.remote, None)
        if timer is not None:
            timer.cancel()
        came = self._came.get(channel.remote)
        if came is not None and not came.done():
            came.set_result(None)

    def ended(self, channel: Channel) -> None:
        """A direct channel is gone."""
        channels = self.channels.get(channel.remote, [])
        if channel in channels:
            channels.remove(channel)
            if not channels:
                del self.channels[channel.remote]
                self._open_channels.traffic.direct_links = len(self.channels)
            now = asyncio.get_running_loop().time()
            self._attempts.broke(channel.remote, now - self._opened_at.pop(channel), now)

    # ---- tickets ----------------------------------------------------------------------------

    async def on_ticket(self, request: Request) -> Message:
        """For a peer that wants to connect directly. Where it does not come, it may be that it
        cannot reach us: then we try to reach it."""
        remote = machine_of(request.remote)  # its seats share its channels, and its faults
        if remote not in self._timers and remote not in self.channels and not self._closed:
            loop = asyncio.get_running_loop()
            self._timers[remote] = loop.call_later(ANSWER_S, self._unused, remote)
        return Message(self._listener.ticket(remote, self._addresses()))

    def _unused(self, peer_id: str) -> None:
        self._timers.pop(peer_id, None)
        self.want(peer_id)

    # ---- meetings ---------------------------------------------------------------------------

    async def _meet(self, peer_id: str) -> ByteStream | None:
        """Asks a peer that is reached through a relay to dial this one while it is dialled. Raises
        a `SwarmnetError` or `TimeoutError`."""
        loop = asyncio.get_running_loop()
        self._meeting[peer_id] = None
        try:
            async with asyncio.timeout(MEETING_TIMEOUT_S):
                seen = await self._seen_outside(peer_id)
                began = loop.time()
                await self._dialer.call(peer_id, PING.name, Message(), None)
                one_way_s = min((loop.time() - began) / 2, MAX_MEETING_WAIT_S)
                asked = Message(self._meeting_with(peer_id, seen, one_way_s))
                reply = await self._dialer.call(peer_id, MEET.name, asked, None)
            return await self._meet_at(peer_id, convert(reply.body, Meeting))
        finally:
            self._meeting.pop(peer_id, None)

    async def on_meet(self, request: Request) -> Message:
        """For a peer that is about to dial this one and wants to be dialled meanwhile."""
        remote = machine_of(request.remote)
        asked = convert(request.message.body, Meeting)
        if self._relays is None or not self._relays.carry(remote):
            raise Refused("the two do not need a relay")
        if self._closed or remote in self.channels or remote in self._answering:
            raise Refused("there is a direct connection, or will be")
        if remote in self._meeting and self._filter.own_peer_id < remote:
            raise Refused("this peer has asked for the same")
        if len(self._answering) >= MAX_OPENING:
            raise Busy("it meets others")
        seen = await self._seen_outside(remote)
        task = asyncio.get_running_loop().create_task(self._answer(remote, asked))
        self._answering[remote] = task
        task.add_done_callback(lambda _: self._answering.pop(remote, None))
        return Message(self._meeting_with(remote, seen))

    async def _answer(self, peer_id: str, asked: Meeting) -> None:
        channel: Channel | None = None
        try:
            await asyncio.sleep(asked.wait_s)
            stream = await self._meet_at(peer_id, asked)
            if stream is None:
                return
            self._filter.reached(stream)
            channel = self._open_channels.attach(stream, direct=self)
            async with asyncio.timeout(READY_TIMEOUT_S):
                await asyncio.shield(channel.ready)
        except (SwarmnetError, TimeoutError) as e:
            if channel is not None:
                channel.abort("no hello in time")
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
                stream = await authenticated(peer_id, sock, ticket, self._context)
            except (OSError, EOFError) as e:
                raise Unreachable(str(e) or "no answer in time") from None
            stream.transport.write(PREAMBLE + meeting.token)
            log.info("met %s: both routers let the two through", peer_id[-8:])
            return stream
        came = self._came[peer_id] = asyncio.get_running_loop().create_future()
        try:
            self._listener.adopt(sock)
            async with asyncio.timeout(READY_TIMEOUT_S):
                await came
            log.info("met %s: both routers let the two through", peer_id[-8:])
        finally:
            del self._came[peer_id]
        return None

    def _meeting_with(self, peer_id: str, seen: Seen, wait_s: float = 0.0) -> Meeting:
        ticket = self._listener.ticket(peer_id, ())
        return Meeting(seen.host, seen.port, ticket.fingerprint, ticket.token, wait_s)

    async def _seen_outside(self, peer_id: str) -> Seen:
        """Where the port for direct connections is seen, by peers that can be dialled. Raises
        `Unreachable`."""
        loop = asyncio.get_running_loop()
        async with self._looking:  # two would dial a judge from one port
            if self._seen is None or loop.time() >= self._seen_until:
                if self._seen is not None:
                    self._seen.transport.abort()
                    self._seen = None
                self._seen = await self._look(peer_id)
                self._seen_until = loop.time() + SEEN_FOR_S
            return self._seen

    async def _look(self, peer_id: str) -> Seen:
        assert self._relays is not None
        judges = [
            p for p in self._open_channels.connected() if p != peer_id and not self._relays.carry(p)
        ]
        asked = await asyncio.gather(
            *(self._ask(judge) for judge in judges[:NUM_JUDGES]), return_exceptions=True
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

    async def _ask(self, judge: str) -> Seen:
        ticket = await self._ticket_of(judge)
        addresses = await resolved(ticket.addresses)
        named = self._filter.targets(judge, addresses, is_here=False)
        return await whence(self._listener, judge, ticket, named)
