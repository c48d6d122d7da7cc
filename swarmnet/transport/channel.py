"""The transport port over any carrier of byte streams: one persistent channel to each peer.

`ChannelTransport` puts the parts together: the handlers of its machine's seats, its channels, the
dialer that opens them, and the ways beside the carrier (direct connections, relays).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarmnet.errors import (
    AddressError,
    ChannelClosed,
    DeadlineExceeded,
    TransportError,
    Unreachable,
)
from swarmnet.identity import Identity
from swarmnet.methods.contact import MEET, TICKET
from swarmnet.protocol.dialing.addresses import full_address, peer_of
from swarmnet.protocol.dialing.dial_book import at_seen_host
from swarmnet.protocol.dialing.zones import target_of
from swarmnet.protocol.membership.peer_ids import machine_of, seat_id, split_seat
from swarmnet.protocol.rate import RateLimiter
from swarmnet.protocol.timing import ANSWER_S
from swarmnet.transport.base import (
    RELAY_PROTOCOL,
    ByteStream,
    Carrier,
    Gate,
    Handler,
    Traffic,
)
from swarmnet.transport.calls.heads import Route
from swarmnet.transport.calls.hello import Offer, offer
from swarmnet.transport.dial_filter import DialFilter
from swarmnet.transport.dialer import Dialer
from swarmnet.transport.direct import DirectListener
from swarmnet.transport.faster_ways import FasterWays
from swarmnet.transport.handlers import Handlers
from swarmnet.transport.libp2p.knocking import Heard, knock_at
from swarmnet.transport.links import DirectLinks
from swarmnet.transport.local_calls import LocalCalls
from swarmnet.transport.open_channels import OpenChannels, Queues
from swarmnet.transport.relay import CIRCUIT, Relays, peer_behind, split_circuit
from swarmnet.wire import Message

log = logging.getLogger("swarmnet.transport")

CALLS_PER_S, CALLS_BURST = 5_000.0, 20_000.0
"""Of one peer, notifications among them; more are answered `Busy`, or dropped."""


@dataclass
class ChannelTransport:
    """A `Transport` over any `Carrier`, and beside it over direct connections (`direct`: where to
    listen for them; None: there are none)."""

    carrier: Carrier
    agent: str = ""
    calls_per_peer: RateLimiter = field(
        default_factory=lambda: RateLimiter(CALLS_PER_S, CALLS_BURST)
    )
    direct: DirectListener | None = None
    identity: Identity | None = None
    """The key of this peer; without it no streams through relays."""
    offered: Offer = field(default_factory=offer)
    """The versions of the protocol that this peer speaks, and its features."""
    interfaces: Callable[[], Sequence[str]] = tuple
    """The IP addresses of this machine, by which it knows which private ones it may dial."""

    def __post_init__(self) -> None:
        self.peer_id = self.carrier.peer_id
        self.run_id = ""
        self.handlers = Handlers(self.calls_per_peer)
        queues = Queues()
        self.traffic = Traffic(queued_bytes=queues.queued_bytes, queued_to=queues.queued_to)
        self.channels = OpenChannels(
            self.handlers, self.traffic, queues, agent=self.agent, offered=self.offered
        )
        self._filter = DialFilter(self.carrier, self.interfaces)
        self.relays: Relays | None = None
        if self.identity is not None:
            self.relays = Relays(self.identity, self.carrier, self.channels, self._filter)
        self.dialer = Dialer(self.carrier, self.channels, self.relays, self._filter)
        self.links: DirectLinks | None = None
        if self.direct is not None:
            self.links = DirectLinks(
                self.direct, self.channels, self.dialer, self._filter, self.addresses, self.relays
            )
        self._local = LocalCalls(self.peer_id, self.handlers)
        self.channels.on_gone(self._forget_stranger)
        self._announced: list[str] = []
        self._forwarded: list[str] = []
        self._faster: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the carrier. Raises `AddressError` or `TransportError`."""
        await self.carrier.start(self._accept)
        if self.links is not None:
            try:
                await self.links.start()
                self.handle(TICKET.name, self.links.on_ticket)
                self.handle(MEET.name, self.links.meetings.on_meet)
            except BaseException:
                await self.carrier.close()
                raise
        self._faster = asyncio.get_running_loop().create_task(
            FasterWays(self.channels, self.dialer, self.links).run()
        )

    def _accept(self, stream: ByteStream) -> None:
        self._filter.opened(stream)
        if stream.protocol != RELAY_PROTOCOL:
            if self.relays is not None:
                self.relays.opened(stream.remote, through_relay=False)
            self.channels.accept(stream)
        elif self.relays is None or not self.channels.may_attach(stream.remote):
            stream.transport.abort()
        else:
            self.relays.accept(stream)

    # ---- the port ---------------------------------------------------------------------------

    def addresses(self) -> list[str]:
        return list(dict.fromkeys([*self._announced, *self.own_addresses()]))

    def ports(self) -> tuple[int, ...]:
        """The TCP ports at which it listens: the carrier's, and that of direct connections."""
        told = map(target_of, self.carrier.addresses()[-1:])  # announced ones come first
        found = [target[1] for target in told if target is not None]
        return (*found, *([self.direct.port] if self.direct is not None else []))

    def set_run(self, run_id: str) -> None:
        self.run_id = run_id
        self.channels.set_run(run_id)

    def handle(self, method: str, handler: Handler, *, ends_with_caller: bool = False) -> None:
        self.handlers.add(method, handler, ends_with_caller=ends_with_caller)

    def guard(self, gate: Gate) -> None:
        self.handlers.guard(gate)

    def learn(self, peer_id: str, addresses: Sequence[str]) -> None:
        machine = machine_of(peer_id)
        if machine == self.peer_id:
            return
        self._filter.learn(machine, [a for a in addresses if CIRCUIT not in a])
        if self.relays is not None:
            self.relays.learn(machine, addresses)

    def forget(self, peer_id: str) -> None:
        machine = machine_of(peer_id)
        if self.channels.has_any(machine):
            return  # `_forget_stranger` does, at their end
        self._filter.forget(machine)
        if self.relays is not None:
            self.relays.forget_peer(machine)
        if self.links is not None:
            self.links.forget_peer(machine)

    def _forget_stranger(self, machine: str) -> None:
        """The last channel to a machine is gone."""
        if not self.handlers.has_standing(machine):
            self.forget(machine)

    def connected(self) -> list[str]:
        return self.channels.connected()

    def on_connected(self, callback: Callable[[str], None]) -> None:
        self.channels.on_connected(callback)

    def on_disconnected(self, callback: Callable[[str], None]) -> None:
        self.channels.on_disconnected(callback)

    async def dial(self, address: str, timeout_s: float = ANSWER_S) -> str:
        try:
            async with asyncio.timeout(timeout_s):
                circuit = peer_behind(address)
                if circuit:
                    self.learn(circuit, [address])
                    way = split_circuit(address)
                    assert way is not None
                    self._filter.given(way[1], way[0])
                peer_id = circuit or await self.carrier.connect(address)
                if not circuit:
                    self._filter.given(peer_id, address)
                if peer_id == self.peer_id:
                    raise AddressError("that is this peer's own address")
                channel = await self.dialer.channel(peer_id)
                await asyncio.shield(channel.ready)
                return peer_id
        except TimeoutError:
            raise DeadlineExceeded(f"no answer within {timeout_s:.0f} s") from None

    async def dial_back(self, asker: str, address: str, timeout_s: float) -> str:
        try:
            async with asyncio.timeout(timeout_s):
                at = at_seen_host(address, await self.carrier.observed(machine_of(asker)))
                if not at or not self._filter.may_dial_back(asker, at):
                    raise Unreachable("that is not where the peer is seen to be")
                peer_id = peer_of(address)
                await self.carrier.connect(full_address(at, peer_id))
                channel = await self.dialer.channel(peer_id)
                await asyncio.shield(channel.ready)
                return at.split("/")[2]
        except TimeoutError:
            raise DeadlineExceeded(f"no answer within {timeout_s:.0f} s") from None

    async def call(
        self,
        peer_id: str,
        method: str,
        message: Message,
        *,
        timeout_s: float,
        on_progress: Callable[[Message], None] | None = None,
        seat: int = 0,
    ) -> Message:
        """`Transport.call`, by one of this machine's seats."""
        machine, target = split_seat(peer_id)
        route = (seat, target)
        loop = asyncio.get_running_loop()
        started = loop.time()
        deadline = asyncio.timeout(timeout_s)

        def part_came() -> None:
            if not deadline.expired():
                deadline.reschedule(loop.time() + timeout_s)

        try:
            async with deadline:
                if machine == self.peer_id and target != seat:
                    reply = await self._local.call(route, self.run_id, method, message, on_progress)
                else:
                    reply = await self._call_machine(
                        machine, method, message, on_progress, route, part_came
                    )
            self.traffic.add_call(method, loop.time() - started)
            return reply
        except TransportError:
            self.traffic.add_failed_call(method)
            raise
        except TimeoutError:
            self.traffic.add_failed_call(method)
            text = f"{method}: {peer_id[-8:]} did not answer within {timeout_s:.1f} s"
            raise DeadlineExceeded(text) from None

    async def _call_machine(
        self,
        machine: str,
        method: str,
        message: Message,
        on_progress: Callable[[Message], None] | None,
        route: Route,
        on_part: Callable[[], None],
    ) -> Message:
        """On a direct channel where the call is to take one, else on the carrier's. What breaks off
        on a direct channel is made again on the carrier's."""
        links = self.links
        if links is not None:
            direct = links.channel_for(machine, method, _num_bytes(message))
            if direct is not None:
                try:
                    return await direct.call(method, message, on_progress, route, on_part)
                except ChannelClosed as e:
                    log.debug("%s: %s; over libp2p then", method, e)
        channel = await self.dialer.channel(machine)
        reply = await channel.call(method, message, on_progress, route, on_part)
        if links is not None:
            links.replied(machine, method, _num_bytes(reply))
        return reply

    async def drop(self, peer_id: str) -> None:
        machine = machine_of(peer_id)
        if machine == self.peer_id:
            return
        await self.carrier.drop(machine)  # first: a caller that misses a channel opens the next one
        for channel in self.channels.all():
            if channel.remote == machine:
                channel.abort("let go, for nothing came of it")

    def ban(self, peer_id: str, reason: str) -> None:
        machine = machine_of(peer_id)
        if machine != self.peer_id:
            self.channels.ban(machine, reason)

    def notify(self, peer_id: str, method: str, message: Message, *, seat: int = 0) -> None:
        """`Transport.notify`, by one of this machine's seats."""
        machine, target = split_seat(peer_id)
        if machine != self.peer_id:
            self.dialer.notify(machine, method, message, (seat, target))
        elif target != seat:
            self._local.notify((seat, target), self.run_id, method, message)

    async def close(self) -> None:
        self.channels.refuse_streams()
        if self._faster is not None:
            self._faster.cancel()
            await asyncio.gather(self._faster, return_exceptions=True)
        await self.handlers.close()  # while the channels stand: their callers are told
        await self.dialer.close()
        if self.links is not None:
            await self.links.close()
        if self.relays is not None:
            await self.relays.close()
        await self.channels.close()
        await self.handlers.close()  # what came in meanwhile
        self.channels.pacer.close()
        await self.carrier.close()

    # ---- beyond the port --------------------------------------------------------------------

    def seat(self, seat: int) -> Seat:
        """A further peer on this machine (`protocol.membership.seats`), from 1; the first is this
        one."""
        return Seat(self, seat)

    def limit_upload(self, bytes_per_s: float | None) -> None:
        """Caps what all channels together send; None = no cap."""
        self.channels.pacer.limit(bytes_per_s)
        self.traffic.upload.limit(bytes_per_s)

    def own_addresses(self) -> list[str]:
        """Those of the carrier, and where a router forwards its port."""
        return [*self._forwarded, *self.carrier.addresses()]

    def forwarded(self, ports: Sequence[tuple[int, str, int]]) -> None:
        """A router forwards these ports of this machine, each from an IP address and a port
        outside, in place of those before."""
        carrier, *direct = self.ports()
        self._forwarded = [
            full_address(f"/ip4/{host}/tcp/{outside}", self.peer_id)
            for port, host, outside in ports
            if port == carrier
        ]
        if self.direct is not None:
            self.direct.forwarded({h: outside for port, h, outside in ports if [port] == direct})

    def announce(self, addresses: Sequence[str]) -> None:
        """Further addresses of this peer, in place of those announced before."""
        self._announced = list(addresses)

    async def observed(self, peer_id: str) -> str:
        """The multiaddr that a connected peer comes from; empty where unknown."""
        return await self.carrier.observed(peer_id)

    async def knock(self, host: str, port: int) -> bool:
        """Can a TCP connection be made there? It is closed at once."""
        return (await knock_at(host, port)).heard is Heard.OPEN

    def grant_relay(self, peer_id: str, for_s: float) -> None:
        """Lets others call a peer through this one."""
        if self.relays is not None:
            self.relays.grant(peer_id, asyncio.get_running_loop().time() + for_s)

    @property
    def num_grants(self) -> int:
        """Peers that may be called through this one."""
        return 0 if self.relays is None else self.relays.num_granted

    def has_grant(self, peer_id: str) -> bool:
        """May a peer be called through this one?"""
        return self.relays is not None and self.relays.has_grant(peer_id)


def _num_bytes(message: Message) -> int:
    """Of its arrays."""
    return sum(a.num_bytes for a in message.arrays)


class Seat:
    """A further peer behind a machine's channels, with an id of its own
    (`protocol.membership.seats`); the first is the `ChannelTransport` itself. On the wire its
    messages say from which seat to which they go."""

    def __init__(self, machine: ChannelTransport, seat: int) -> None:
        """`seat`: from 1."""
        self.peer_id = seat_id(machine.peer_id, seat)
        self.seat = seat
        self.traffic: Traffic = machine.traffic
        """The machine's: a link is shared."""
        self._machine = machine
        self._callbacks: list[Callable[[str], None]] = []
        """That the machine's channels tell."""
        machine.handlers.open_seat(seat)

    def addresses(self) -> list[str]:
        return self._machine.addresses()

    def set_run(self, run_id: str) -> None:
        if run_id != self._machine.run_id:
            self._machine.set_run(run_id)

    def handle(self, method: str, handler: Handler, *, ends_with_caller: bool = False) -> None:
        self._machine.handlers.add(method, handler, self.seat, ends_with_caller=ends_with_caller)

    def guard(self, gate: Gate) -> None:
        self._machine.handlers.guard(gate, self.seat)

    def learn(self, peer_id: str, addresses: Sequence[str]) -> None:
        self._machine.learn(peer_id, addresses)

    def forget(self, peer_id: str) -> None:
        self._machine.forget(peer_id)

    async def dial(self, address: str, timeout_s: float = ANSWER_S) -> str:
        return await self._machine.dial(address, timeout_s)

    async def dial_back(self, asker: str, address: str, timeout_s: float) -> str:
        return await self._machine.dial_back(asker, address, timeout_s)

    async def call(
        self,
        peer_id: str,
        method: str,
        message: Message,
        *,
        timeout_s: float,
        on_progress: Callable[[Message], None] | None = None,
    ) -> Message:
        return await self._machine.call(
            peer_id, method, message, timeout_s=timeout_s, on_progress=on_progress, seat=self.seat
        )

    async def drop(self, peer_id: str) -> None:
        await self._machine.drop(peer_id)

    def ban(self, peer_id: str, reason: str) -> None:
        self._machine.ban(peer_id, reason)

    def notify(self, peer_id: str, method: str, message: Message) -> None:
        self._machine.notify(peer_id, method, message, seat=self.seat)

    def connected(self) -> list[str]:
        return [*self._machine.connected(), self._machine.peer_id]

    def on_connected(self, callback: Callable[[str], None]) -> None:
        self._callbacks.append(callback)
        self._machine.channels.on_connected(callback)

    def on_disconnected(self, callback: Callable[[str], None]) -> None:
        self._callbacks.append(callback)
        self._machine.channels.on_disconnected(callback)

    async def close(self) -> None:
        """Nothing is served here any more, and nothing heard; the machine's channels stay."""
        self._machine.handlers.remove_seat(self.seat)
        for callback in self._callbacks:
            self._machine.channels.forget(callback)
