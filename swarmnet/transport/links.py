"""Which carrier a call takes: libp2p's channel, or a direct one beside it.

The channel over libp2p stays: it is how a peer is found, watched and, where the direct connection
fails, reached. Calls that move arrays go over a direct channel as soon as there is one; the first
of them makes one be opened, and does not wait for it. When a direct channel breaks, calls that are
open on it are made again over libp2p.

libp2p stays at the address at which it has met a peer: its daemon has one connection to each, and
all that the two have is on it. So what moves to a faster address is the direct channel
(`look_for_faster`), and where that is faster than libp2p's, calls of any size go over it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import swarmnet.system as system
from swarmnet.errors import SwarmnetError
from swarmnet.methods.contact import PING, TICKET, Ticket
from swarmnet.protocol.dialing.zones import target_of
from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.timing import ANSWER_S
from swarmnet.protocol.upgrade import Attempts, Way
from swarmnet.transport.base import ByteStream, Request
from swarmnet.transport.calls.channel import Channel
from swarmnet.transport.dial_filter import DialFilter
from swarmnet.transport.dialer import Dialer
from swarmnet.transport.direct import DirectListener, dial_direct, host_of, is_here, resolved
from swarmnet.transport.libp2p.knocking import round_trip_to
from swarmnet.transport.open_channels import OpenChannels
from swarmnet.transport.punching import Meetings
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
STANDS_AFTER_S = ANSWER_S
"""Two that open a direct channel at the same moment have done so by then."""
MAX_KNOCKED = 4
"""Addresses of one peer, beside the one that libp2p uses, of which it is found out how fast they
are."""


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
        """By peer, those that are ready; the first is used."""
        self._listener = listener
        self._open_channels = channels
        self._dialer = dialer
        self._filter = dial_filter
        self._addresses = addresses
        self.meetings = Meetings(listener, self, channels, dialer, dial_filter, relays)
        self._context = listener.client_context
        self._attempts = Attempts()
        self._opened_at: dict[Channel, float] = {}
        self._bulk_methods: dict[str, None] = {}
        self._opening: dict[str, asyncio.Task[None]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._faster: dict[Channel, None] = {}
        """Those that this side has opened beside a slower one."""
        self._fastest: dict[Channel, None] = {}
        """Those that are faster than libp2p's channel to their peer, as far as is known."""
        self._left: dict[Channel, None] = {}
        """Those beside which there is a faster one."""
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
        tasks = [*self._opening.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.meetings.close()
        await self._listener.close()

    # ---- calls ------------------------------------------------------------------------------

    def channel_for(self, peer_id: str, method: str, num_bytes: int) -> Channel | None:
        """The direct channel that a call with arrays of `num_bytes` takes; None: it goes over
        libp2p."""
        channel, is_bulk = self.channel(peer_id), num_bytes >= BULK_BYTES
        if is_bulk or method in self._bulk_methods:
            if channel is None:
                self.want(peer_id)
        elif method == PING.name or not self._is_fastest(channel):
            return None
        return channel

    def replied(self, peer_id: str, method: str, num_bytes: int) -> None:
        """A reply with arrays of so many bytes has come over libp2p: the next calls of such a
        method are to be made on a direct channel."""
        if num_bytes >= BULK_BYTES:
            self._bulk_methods[method] = None  # of our own calls: as many as there are methods
            self.want(peer_id)

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
        if len(self._opening) < MAX_OPENING and self._attempts.may_try(peer_id, now):
            self._start(peer_id, self._open(peer_id))

    def _start(self, peer_id: str, work: Coroutine[Any, Any, None]) -> None:
        self._opening[peer_id] = asyncio.get_running_loop().create_task(work)
        self._opening[peer_id].add_done_callback(lambda _: self._opening.pop(peer_id, None))

    def forget_peer(self, peer_id: str) -> None:
        """A peer has been gone for long."""
        self._attempts.forget(peer_id)

    # ---- faster ways ------------------------------------------------------------------------

    def close_left(self) -> None:
        """To be called from time to time: ends channels beside which there is a faster one."""
        for channel in [c for c in self._left if c.is_idle]:
            channel.close()

    async def look_for_faster(self, peer_id: str) -> None:
        """To be called from time to time, for each peer with a channel: where another address of it
        is faster than the one that is used, there is a direct channel to that soon."""
        if self._closed or peer_id in self._opening:
            return
        channel = self.channel(peer_id)
        if channel is not None:
            await self._move(peer_id, channel)
        elif await self._is_carrier_slow(peer_id):
            self.want(peer_id)
            if peer_id in self._opening:
                await asyncio.wait((self._opening[peer_id],))
        channel = self.channel(peer_id)
        if channel is not None:
            await self._compare(peer_id, channel)

    async def _move(self, peer_id: str, channel: Channel) -> None:
        """Opens a channel to an address that is faster than that of `channel`, if there is one."""
        try:
            ticket = await self._named(peer_id)
            others = tuple(a for a in ticket.addresses if a[0] != _host_of(channel))
            way = await self._way_in_use(channel, ticket.addresses) if others else None
            if way is None or self._open_channels.num_direct(peer_id) >= MAX_DIRECT:
                return

            def is_faster(connected: socket.socket, took_s: float) -> bool:
                other = self._way_of(connected, took_s)
                return other is not None and other.is_faster(way)

            ticket = replace(ticket, addresses=others)
            stream = await dial_direct(peer_id, ticket, self._context, is_faster)
            await self.open_on(stream, is_faster=True)
        except (SwarmnetError, TimeoutError) as e:
            log.debug("no faster way to %s: %s", peer_id[-8:], e)

    async def _compare(self, peer_id: str, channel: Channel) -> None:
        """Finds out whether a direct channel is faster than libp2p's."""
        way = await self._way_in_use(channel)
        carrier = await self._way_of_carrier(peer_id, _host_of(channel))
        is_fastest = way is not None and carrier is not None and way.is_faster(carrier)
        self._fastest.pop(channel, None)
        if is_fastest and channel.is_open:
            self._fastest[channel] = None

    async def _is_carrier_slow(self, peer_id: str) -> bool:
        """Whether another address of a peer without a direct channel is faster than libp2p's."""
        carrier = self._open_channels.first(peer_id)
        host = "" if carrier is None or carrier.is_relayed else host_of(carrier.leads_to)
        places = self._filter.places(peer_id) if host else []
        others = [place for place in places if place[0] != host][:MAX_KNOCKED]
        if not others:
            return False
        used = await self._way_to(host, places) or self._unmeasured(host)
        found = await asyncio.gather(*(self._way_to(place[0], [place]) for place in others))
        return any(way is not None and way.is_faster(used) for way in found)

    async def _way_of_carrier(self, peer_id: str, host: str) -> Way | None:
        """Of libp2p's channel to a peer; None where it leads to that host too, or nobody knows
        where."""
        carrier = self._open_channels.first(peer_id)
        at = "" if carrier is None else host_of(carrier.leads_to)
        if not at or at == host:
            return None
        return await self._way_to(at, self._filter.places(peer_id)) or self._unmeasured(at)

    def _is_fastest(self, channel: Channel | None) -> bool:
        """Whether a direct channel is faster than that of libp2p."""
        if channel is None:
            return False
        carrier = self._open_channels.first(channel.remote)
        return carrier is not None and (carrier.is_relayed or channel in self._fastest)

    def _way_of(self, connection: Any, took_s: float | None = None) -> Way | None:
        """`took_s`: to connect, which counts where the kernel says nothing."""
        said_s = system.round_trip_s(connection)
        round_trip_s = took_s if said_s is None else said_s
        if round_trip_s is None:
            return None
        return Way(round_trip_s, self._filter.is_near(_peer_host(connection)))

    async def _way_in_use(
        self, channel: Channel, addresses: Sequence[tuple[str, int]] = ()
    ) -> Way | None:
        """`addresses`: of a ticket, for who has not dialled the channel. None where that cannot be
        found out: the other side may."""
        dialled = target_of(channel.leads_to)
        places = [*addresses, *([(str(dialled[0]), dialled[1])] if dialled else [])]
        return self._way_of(channel.connection) or await self._way_to(_host_of(channel), places)

    async def _way_to(self, host: str, places: Iterable[tuple[str, int]]) -> Way | None:
        """To the place at this host, by knocks; None where there is none or nobody answers."""
        port = next((port for at, port in places if at == host), None)
        round_trip_s = inf if port is None else await round_trip_to(host, port)
        return None if round_trip_s == inf else Way(round_trip_s, self._filter.is_near(host))

    def _unmeasured(self, host: str) -> Way:
        """To a host at which nobody here may knock, a router's as a rule: no way is faster by its
        round trip then, but one within a house is."""
        return Way(0.0, self._filter.is_near(host))

    # ---- channels ---------------------------------------------------------------------------

    async def open_on(self, stream: ByteStream, *, is_faster: bool = False) -> None:
        """A channel on a stream that this side has dialled, until its peer has said hello.
        `is_faster`: than the one that is used. Raises a `SwarmnetError` or `TimeoutError`."""
        self._filter.reached(stream)
        channel = self._open_channels.attach(stream, direct=self)
        if is_faster and channel.is_open:
            self._faster[channel] = None
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await asyncio.shield(channel.ready)
        except (SwarmnetError, TimeoutError):
            channel.abort("no hello in time")
            raise

    async def _open(self, peer_id: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            stream = await self._dial(peer_id)
            if stream is not None:  # else it came to the listener
                await self.open_on(stream)
        except (SwarmnetError, TimeoutError) as e:
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
        if self.meetings.may_help(peer_id):
            try:
                return await self.meetings.meet(peer_id)
            except (SwarmnetError, TimeoutError) as e:
                why = e or "no answer in time"
                log.info("no way through the routers to %s: %s", peer_id[-8:], why)
        return await dial_direct(peer_id, await self._named(peer_id), self._context)

    async def _named(self, peer_id: str) -> Ticket:
        """One of a peer's tickets, with those of its addresses that are dialled."""
        ticket = await self.ticket_of(peer_id)
        here = is_here(ticket, self._filter.own_peer_id)
        addresses = await resolved(ticket.addresses)
        named = self._filter.targets(peer_id, addresses, is_here=here)
        return replace(ticket, addresses=named)

    async def ticket_of(self, peer_id: str) -> Ticket:
        """Raises a `SwarmnetError` or `TimeoutError`."""
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
        """The peer has said hello on a direct channel. It is used where it is faster than the one
        that was used so far."""
        channels = self.channels.setdefault(channel.remote, [])
        self._opened_at[channel] = asyncio.get_running_loop().time()
        if channels and (channel in self._faster or self._takes_over(channel, channels[0])):
            log.info("a faster way to %s: %s", channel.remote[-8:], _host_of(channel))
            self._left[channels[0]] = None
            channels.insert(0, channel)
        else:
            channels.append(channel)
        self._open_channels.traffic.has_direct(len(self.channels))
        timer = self._timers.pop(channel.remote, None)
        if timer is not None:
            timer.cancel()
        self.meetings.came(channel.remote)

    def _takes_over(self, channel: Channel, used: Channel) -> bool:
        """Whether a channel that the peer has opened is faster than the one that is used. Where the
        kernel does not say, it is: nobody opens another one beside one that has stood for long, but
        for that."""
        ways = self._way_of(channel.connection), self._way_of(used.connection)
        if ways[0] and ways[1]:
            return ways[0].is_faster(ways[1])
        return self._opened_at[channel] - self._opened_at[used] > STANDS_AFTER_S

    def ended(self, channel: Channel) -> None:
        """A direct channel is gone."""
        channels = self.channels.get(channel.remote, [])
        if channel in channels:
            channels.remove(channel)
            if not channels:
                del self.channels[channel.remote]
                self._open_channels.traffic.has_direct(len(self.channels))
            now = asyncio.get_running_loop().time()
            stood_s = now - self._opened_at.pop(channel)
            if channel not in self._left:
                self._attempts.broke(channel.remote, stood_s, now)
        for kept in (self._left, self._faster, self._fastest):
            kept.pop(channel, None)

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


def _peer_host(connection: Any) -> str:
    """The IP address at the other end of a TCP connection; empty where there is none."""
    try:
        return str(connection.getpeername()[0])
    except (AttributeError, OSError):
        return ""


def _host_of(channel: Channel | None) -> str:
    return "" if channel is None else _peer_host(channel.connection)
