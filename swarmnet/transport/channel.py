"""The transport port over any carrier of byte streams: one persistent channel to each peer.

`ChannelTransport` opens channels (`transport.calls.Channel`) when they are needed, finds the
handler of a request, remembers who broke the protocol, and keeps each side's failures from the
other.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from swarmnet.errors import (
    AddressError,
    ChannelClosed,
    DeadlineExceeded,
    NotReady,
    ProtocolViolation,
    SwarmnetError,
    TransportError,
    Unreachable,
    WrongVersion,
)
from swarmnet.identity import Identity
from swarmnet.protocol.membership.addresses import to_dial
from swarmnet.protocol.membership.seats import machine_of, seat_id, split_seat
from swarmnet.protocol.rate import RateLimiter
from swarmnet.transport.base import (
    RELAY_PROTOCOL,
    ByteStream,
    Carrier,
    Handler,
    Request,
    Traffic,
)
from swarmnet.transport.buffers import BufferPool
from swarmnet.transport.calls import PARTING_S, Channel, as_remote
from swarmnet.transport.direct import DirectListener
from swarmnet.transport.links import DirectLinks
from swarmnet.transport.pacing import Pacer
from swarmnet.transport.relay import CIRCUIT, Relays, race, split_circuit
from swarmnet.transport.seats import FIRST_SEATS, Route, Seat
from swarmnet.wire import Message

log = logging.getLogger("swarmnet.transport")

T = TypeVar("T")

OPEN_TIMEOUT_S = 15.0
RELAY_AFTER_S = 1.0
"""A peer that has a relay is tried through it when it has not answered for so long."""
NEXT_RELAY_AFTER_S = 0.4
"""Likewise the next of its relays."""
KNOCK_TIMEOUT_S = 3.0
REDIAL_AFTER_S = 0.3
"""A failed dial is answered from memory for so long, so that callers do not pile up."""
MAX_CHANNELS = 8
"""Of one peer; two are normal, when both sides open one at the same time."""
SUPERSEDED_AFTER_S = 15.0
"""Whoever opens a channel has none. So one that has been here for so long already (not opened by
both sides at the same moment) is dead, though its connection may not have noticed."""
MAX_WAITING_NOTES = 256
"""Notifications that wait for a channel to one peer; the oldest are dropped."""
FIRST_BAN_S, LONGEST_BAN_S = 1.0, 300.0
FORGIVEN_AFTER_S = 1800.0
"""After so long without another offence a ban starts at the beginning."""
MAX_OFFENDERS = 4096
CALLS_PER_S, CALLS_BURST = 5_000.0, 20_000.0
"""Of one peer, notifications among them; more are answered `Busy`, or dropped."""


@dataclass
class Offender:
    """A peer that broke the protocol."""

    since_s: float
    """Of the loop's clock."""
    ban_s: float

    def is_banned(self, now: float) -> bool:
        return now < self.since_s + self.ban_s


@dataclass
class ChannelTransport:
    """A `Transport` over any `Carrier`, and beside it over direct connections (`direct`: where to
    listen for them; None: there are none)."""

    carrier: Carrier
    agent: str = ""
    traffic: Traffic = field(default_factory=Traffic)
    calls_per_peer: RateLimiter = field(
        default_factory=lambda: RateLimiter(CALLS_PER_S, CALLS_BURST)
    )
    direct: DirectListener | None = None
    identity: Identity | None = None
    """Whose peer this is; without it no streams through relays."""

    def __post_init__(self) -> None:
        self.peer_id = self.carrier.peer_id
        self.run_id = ""
        self._handlers: dict[str, Handler] = {}
        self._seats: dict[int, Seat] = {}
        self._known_seats: dict[str, dict[str, None]] = {}
        """Of other machines, by their peer id."""
        self._channels: dict[str, list[Channel]] = {}
        self._ready_at: dict[Channel, float] = {}
        """By the loop's clock, of those in `_channels`."""
        self._unready: dict[Channel, None] = {}
        self._opening: dict[str, asyncio.Task[Channel]] = {}
        self._failed: dict[str, tuple[float, SwarmnetError]] = {}
        self._waiting_notes: dict[str, deque[tuple[str, Message, Route]]] = {}
        self._offenders: dict[str, Offender] = {}
        self._connected: list[Callable[[str], None]] = []
        self._disconnected: list[Callable[[str], None]] = []
        self._tasks: dict[asyncio.Task[Any], str] = {}
        self._num_running: dict[str, int] = {}
        self.pool = BufferPool()
        self.pacer = Pacer()
        self._closed = False
        self.traffic.queued_bytes = self._queued_bytes
        self.links = None if self.direct is None else DirectLinks(self, self.direct)
        self.relays = None if self.identity is None else Relays(self, self.identity)
        self._announced: list[str] = []

    async def start(self) -> None:
        """Starts the carrier. Raises `AddressError` or `TransportError`."""
        await self.carrier.start(self._accept)
        if self.links is not None:
            try:
                await self.links.start()
            except BaseException:
                await self.carrier.close()
                raise

    # ---- the port ---------------------------------------------------------------------------

    def addresses(self) -> list[str]:
        return [*self._announced, *self.carrier.addresses()]

    def own_addresses(self) -> list[str]:
        """Those of the carrier."""
        return self.carrier.addresses()

    def announce(self, addresses: Sequence[str]) -> None:
        """Further addresses of this peer, in place of those announced before."""
        self._announced = list(addresses)

    async def observed(self, peer_id: str) -> str:
        """The multiaddr that a connected peer comes from; empty where unknown."""
        return await self.carrier.observed(peer_id)

    async def knock(self, host: str, port: int) -> bool:
        """Can a TCP connection be made there? It is closed at once."""
        try:
            async with asyncio.timeout(KNOCK_TIMEOUT_S):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError):
            return False
        writer.transport.abort()
        return True

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

    def set_run(self, run_id: str) -> None:
        self.run_id = run_id
        for channel in self._all():
            channel.say_hello()

    def handle(self, method: str, handler: Handler) -> None:
        self._handlers[method] = handler

    def learn(self, peer_id: str, addresses: Sequence[str]) -> None:
        machine = machine_of(peer_id)
        if machine == self.peer_id:
            return
        if peer_id != machine:
            self._known_seats.setdefault(machine, {})[peer_id] = None
        straight = [a for a in addresses if CIRCUIT not in a]
        self.carrier.learn(machine, to_dial(straight, self.carrier.addresses()))
        if self.relays is not None:
            self.relays.learn(machine, addresses)

    def connected(self) -> list[str]:
        return list(self._channels)

    def on_connected(self, callback: Callable[[str], None]) -> None:
        self._connected.append(callback)

    def on_disconnected(self, callback: Callable[[str], None]) -> None:
        self._disconnected.append(callback)

    def limit_upload(self, bytes_per_s: float | None) -> None:
        """Caps what all channels together send; None = no cap."""
        self.pacer.limit(bytes_per_s)
        self.traffic.upload.limit(bytes_per_s)

    async def dial(self, address: str, timeout_s: float = 10.0) -> str:
        try:
            async with asyncio.timeout(timeout_s):
                peer_id = await self._connect(address)
                if peer_id == self.peer_id:
                    raise AddressError("that is this peer's own address")
                channel = await self._channel(peer_id)
                await asyncio.shield(channel.ready)
                return peer_id
        except TimeoutError:
            raise DeadlineExceeded(f"no answer within {timeout_s:.0f} s") from None

    async def _connect(self, address: str) -> str:
        """The peer id behind an address; there is a way to it, or there may be one."""
        circuit = split_circuit(address)
        if circuit is None:
            return await self.carrier.connect(address)
        if not circuit[2]:
            raise AddressError(f"{address[:200]} does not end in /p2p/<peer id>")
        self.learn(circuit[2], [address])
        return circuit[2]

    async def call(
        self,
        peer_id: str,
        method: str,
        message: Message,
        *,
        timeout_s: float,
        on_progress: Callable[[Message], None] | None = None,
    ) -> Message:
        return await self.call_from(
            0, peer_id, method, message, timeout_s=timeout_s, on_progress=on_progress
        )

    async def call_from(
        self,
        seat: int,
        peer_id: str,
        method: str,
        message: Message,
        *,
        timeout_s: float,
        on_progress: Callable[[Message], None] | None = None,
    ) -> Message:
        """`call`, by one of this machine's seats."""
        machine, target = split_seat(peer_id)
        if machine == self.peer_id and target != seat:
            calling = self._call_beside(seat, target, method, message, on_progress)
        elif self.links is not None:
            calling = self.links.call(machine, method, message, on_progress, (seat, target))
        else:
            calling = self.call_libp2p(machine, method, message, on_progress, (seat, target))
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(timeout_s):
                reply = await calling
            self.traffic.add_call(method, loop.time() - started)
            return reply
        except TransportError:
            self.traffic.add_failed_call(method)
            raise
        except TimeoutError:
            self.traffic.add_failed_call(method)
            text = f"{method}: {peer_id[-8:]} did not answer within {timeout_s:.1f} s"
            raise DeadlineExceeded(text) from None

    async def call_libp2p(
        self,
        peer_id: str,
        method: str,
        message: Message,
        on_progress: Callable[[Message], None] | None,
        route: Route = FIRST_SEATS,
    ) -> Message:
        """`links.Home`: a call over the carrier, without a deadline."""
        channel = await self._channel(peer_id)
        return await channel.call(method, message, on_progress, route)

    async def drop(self, peer_id: str) -> None:
        machine = machine_of(peer_id)
        if machine == self.peer_id:
            return
        await self.carrier.drop(machine)  # first: whoever misses a channel opens the next one
        for channel in [c for c in self._all() if c.remote == machine]:
            channel.abort("let go, for nothing came of it")

    def notify(self, peer_id: str, method: str, message: Message) -> None:
        self.notify_from(0, peer_id, method, message)

    def notify_from(self, seat: int, peer_id: str, method: str, message: Message) -> None:
        """`notify`, by one of this machine's seats."""
        machine, target = split_seat(peer_id)
        if machine != self.peer_id:
            self._notify(machine, method, message, (seat, target))
        elif target != seat and not self._closed:
            self.run(self.peer_id, self._hear_beside(seat, target, method, message))

    def _notify(self, peer_id: str, method: str, message: Message, route: Route) -> None:
        if self._closed:
            return
        channel = self._open_channel(peer_id)
        if channel is not None:
            try:
                channel.notify(method, message, route)
            except ProtocolViolation as e:
                log.warning("%s was not sent: %s", method, e)
            return
        notes = self._waiting_notes.setdefault(peer_id, deque(maxlen=MAX_WAITING_NOTES))
        notes.append((method, message, route))
        if peer_id not in self._opening and not self._failed_lately(peer_id):
            self._open(peer_id)
        elif peer_id not in self._opening:
            del self._waiting_notes[peer_id]

    def _queued_bytes(self) -> int:
        """`Traffic.queued_bytes`"""
        return sum(channel.queued_bytes for channel in self._all())

    # ---- seats ------------------------------------------------------------------------------

    def seat(self, seat: int) -> Seat:
        """A further peer on this machine (`protocol.membership.seats`), from 1; the first is this
        one."""
        self._seats[seat] = Seat(self, seat)
        return self._seats[seat]

    def remove_seat(self, seat: int) -> None:
        """Calls to it are answered `NotReady` from now on."""
        self._seats.pop(seat, None)

    async def _call_beside(
        self,
        seat: int,
        target: int,
        method: str,
        message: Message,
        on_progress: Callable[[Message], None] | None,
    ) -> Message:
        """A call to another seat of this machine. Like any handler, its handler runs on when the
        caller gives up."""
        if self._closed:
            raise ChannelClosed("this transport is closed")

        def progress(note: Message) -> None:
            if on_progress is not None and not task.done():
                try:
                    on_progress(note)
                except Exception:
                    log.exception("the progress of %s was not understood", method)

        work = self._answer_beside((seat, target), method, message, progress)
        task = self._start(self.peer_id, work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise ChannelClosed("this transport is closed") from None
            task.add_done_callback(_seen)
            raise

    async def _answer_beside(
        self, route: Route, method: str, message: Message, progress: Callable[[Message], None]
    ) -> Message:
        """Raises as a call over the wire would."""
        try:
            handle = self._handle(route, self.peer_id, self.run_id, method)
            return await handle(message, progress)
        except SwarmnetError as e:
            raise as_remote(e) from None
        except Exception as e:
            log.exception("%s failed", method)
            raise as_remote(e) from None

    async def _hear_beside(self, seat: int, target: int, method: str, message: Message) -> None:
        try:
            await self._handle((seat, target), self.peer_id, self.run_id, method)(
                message, lambda _: None
            )
        except SwarmnetError as e:
            log.debug("%s from seat %d: %s", method, seat, e)
        except Exception:
            log.exception("%s failed", method)

    async def close(self) -> None:
        self._closed = True
        await self._cancel_all()  # while the channels stand: their callers are told
        if self.links is not None:
            await self.links.close()
        if self.relays is not None:
            await self.relays.close()
        if any(channel.is_parting for channel in self._all()):
            await asyncio.sleep(PARTING_S)
        for channel in self._all():
            channel.close()
        await self._cancel_all()  # what came in meanwhile
        self.pacer.close()
        await self.carrier.close()

    async def _cancel_all(self) -> None:
        tasks = [*self._opening.values(), *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- channels ---------------------------------------------------------------------------

    def _all(self) -> list[Channel]:
        direct = {} if self.links is None else self.links.channels
        ready = [c for channels in (*self._channels.values(), *direct.values()) for c in channels]
        return [*ready, *self._unready]

    def _open_channel(self, peer_id: str) -> Channel | None:
        channels = self._channels.get(peer_id)
        return channels[0] if channels else None

    async def _channel(self, peer_id: str) -> Channel:
        """The channel to a peer, opened where there is none; callers share one attempt."""
        channel = self._open_channel(peer_id)
        if channel is not None:
            return channel
        if self._closed:
            raise ChannelClosed("this transport is closed")
        if peer_id == self.peer_id:
            raise Unreachable("a peer does not call itself")
        self._raise_if_failed_lately(peer_id)
        task = self._opening.get(peer_id) or self._open(peer_id)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if task.cancelled() and current is not None and not current.cancelling():
                raise ChannelClosed("this transport is closed") from None
            raise

    def _open(self, peer_id: str) -> asyncio.Task[Channel]:
        task = asyncio.get_running_loop().create_task(self._dial(peer_id))
        self._opening[peer_id] = task
        task.add_done_callback(lambda t: self._opened(peer_id, t))
        return task

    async def _dial(self, peer_id: str) -> Channel:
        """Raises a `SwarmnetError`."""
        name = peer_id[-8:]
        if self._is_banned(peer_id):
            raise Unreachable(f"{name} broke the protocol; it is not called for a while")
        channel = None
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                channel = self._attach(await self._open_stream(peer_id))
                await asyncio.shield(channel.ready)
                return channel
        except TimeoutError:
            if channel is not None:
                channel.abort("no hello in time")
            raise Unreachable(f"{name}: no answer within {OPEN_TIMEOUT_S:.0f} s") from None
        except OSError as e:
            raise Unreachable(f"{name}: {e}") from None

    async def _open_stream(self, peer_id: str) -> ByteStream:
        """Straight, or through a relay of the peer's."""
        relays = self.relays
        if relays is None or not relays.knows(peer_id):
            return await self.carrier.open(peer_id)
        ways = [lambda: self.carrier.open(peer_id), *relays.ways(peer_id)]
        first_s = 0.0 if relays.is_needed(peer_id) else RELAY_AFTER_S
        starts = [first_s, *[NEXT_RELAY_AFTER_S] * len(ways)][: len(ways) - 1]
        index, stream = await race(ways, starts)
        relays.opened(peer_id, through_relay=index > 0)
        return stream

    def _opened(self, peer_id: str, task: asyncio.Task[Channel]) -> None:
        self._opening.pop(peer_id, None)
        notes = self._waiting_notes.pop(peer_id, ())
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            # Not where it has closed already: the notes would open it again, without end.
            for method, message, route in notes if self._open_channel(peer_id) else ():
                self._notify(peer_id, method, message, route)
            return
        if not isinstance(error, SwarmnetError):
            log.error("dialling %s failed", peer_id[-8:], exc_info=error)
            error = Unreachable(f"{peer_id[-8:]}: {error!r}")
        self._failed = {p: f for p, f in self._failed.items() if self._failed_lately(p)}
        self._failed[peer_id] = (asyncio.get_running_loop().time(), error)

    def _failed_lately(self, peer_id: str) -> bool:
        failed = self._failed.get(peer_id)
        now = asyncio.get_running_loop().time()
        return failed is not None and now - failed[0] < REDIAL_AFTER_S

    def _raise_if_failed_lately(self, peer_id: str) -> None:
        if self._failed_lately(peer_id):
            error = self._failed[peer_id][1]
            raise type(error)(str(error))

    def accept(self, stream: ByteStream) -> None:
        """`relay.Home`"""
        self._accept(stream)

    def _accept(self, stream: ByteStream) -> None:
        if stream.protocol == RELAY_PROTOCOL:
            if self.relays is None or not self.may_attach(stream.remote):
                stream.transport.abort()
            else:
                self.relays.accept(stream)
            return
        num_open = sum(c.remote == stream.remote and not c.is_direct for c in self._all())
        if self._closed or num_open >= MAX_CHANNELS or self._is_banned(stream.remote):
            stream.transport.abort()
        else:
            self._attach(stream).ready.add_done_callback(_tell_wrong_version)

    def may_attach(self, peer_id: str) -> bool:
        """`links.Home`"""
        return not self._closed and not self._is_banned(peer_id)

    def num_direct(self, peer_id: str) -> int:
        """`links.Home`"""
        return sum(c.is_direct and c.remote == peer_id for c in self._all())

    def attach_direct(self, stream: ByteStream) -> Channel:
        """`links.Home`"""
        return self._attach(stream, is_direct=True)

    def _attach(self, stream: ByteStream, is_direct: bool = False) -> Channel:
        channel = Channel(self, stream.remote, is_direct=is_direct)
        self._unready[channel] = None
        channel.attach(stream)
        return channel

    def channel_ready(self, channel: Channel) -> None:
        """A channel's peer has said hello."""
        self._unready.pop(channel, None)
        if not channel.is_open:
            return
        if channel.is_direct:
            if self.links is not None:
                self.links.ready(channel)
            return
        channels = self._channels.setdefault(channel.remote, [])
        now = asyncio.get_running_loop().time()
        before = [c for c in channels if now - self._ready_at.get(c, now) > SUPERSEDED_AFTER_S]
        channels.append(channel)
        self._ready_at[channel] = now
        for old in before:
            old.abort("its peer has opened another")
        self._failed.pop(channel.remote, None)
        if len(channels) == 1:
            self._tell(self._connected, channel.remote)

    def channel_ended(self, channel: Channel) -> None:
        """A channel's stream is gone."""
        self._unready.pop(channel, None)
        if channel.is_direct:
            if self.links is not None:
                self.links.ended(channel)
            return
        channels = self._channels.get(channel.remote, [])
        if channel in channels:
            channels.remove(channel)
            self._ready_at.pop(channel, None)
            if not channels:
                del self._channels[channel.remote]
                for peer_id in (channel.remote, *self._known_seats.pop(channel.remote, ())):
                    self._tell(self._disconnected, peer_id)

    def _tell(self, callbacks: Sequence[Callable[[str], None]], peer_id: str) -> None:
        for callback in callbacks:
            try:
                callback(peer_id)
            except Exception:
                log.exception("a listener failed")

    # ---- offenders --------------------------------------------------------------------------

    def _is_banned(self, peer_id: str) -> bool:
        offender = self._offenders.get(peer_id)
        return offender is not None and offender.is_banned(asyncio.get_running_loop().time())

    def offended(self, peer_id: str, reason: str) -> None:
        """A peer broke the protocol: it loses the stream, and for a growing time any other."""
        now = asyncio.get_running_loop().time()
        before = self._offenders.pop(peer_id, None)
        if before is None or now > before.since_s + before.ban_s + FORGIVEN_AFTER_S:
            ban_s = FIRST_BAN_S
        else:
            ban_s = min(2 * before.ban_s, LONGEST_BAN_S)
        if len(self._offenders) >= MAX_OFFENDERS:
            del self._offenders[next(iter(self._offenders))]
        self._offenders[peer_id] = Offender(now, ban_s)
        log.warning("%s broke the protocol (%s): its stream was closed", peer_id[-8:], reason)

    # ---- handlers ---------------------------------------------------------------------------

    def serves(self, method: str) -> bool:
        """`calls.Owner`"""
        return method in self._handlers or any(method in s.handlers for s in self._seats.values())

    def allows(self, remote: str) -> bool:
        """`calls.Owner`"""
        return self.calls_per_peer.allows(remote, asyncio.get_running_loop().time())

    def num_running(self, remote: str) -> int:
        """`calls.Owner`"""
        return self._num_running.get(remote, 0)

    def run(self, remote: str, work: Coroutine[Any, Any, None]) -> None:
        """`calls.Owner`"""
        self._start(remote, work)

    def _start(self, remote: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = remote
        self._num_running[remote] = self.num_running(remote) + 1
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        remote = self._tasks.pop(task)
        self._num_running[remote] -= 1
        if not self._num_running[remote]:
            del self._num_running[remote]

    async def answer(
        self,
        channel: Channel,
        method: str,
        message: Message,
        progress: Callable[[Message], None],
        route: Route = FIRST_SEATS,
    ) -> Message:
        """What the handler of a method says."""
        handle = self._handle(route, channel.remote, channel.run_id, method)
        return await handle(message, progress)

    def _handle(
        self, route: Route, remote: str, run_id: str, method: str
    ) -> Callable[[Message, Callable[[Message], None]], Awaitable[Message]]:
        """The handler of a method at a seat. Raises `NotReady`."""
        caller, target = route
        seat = self._seats.get(target) if target else None
        handlers = self._handlers if not target else seat.handlers if seat is not None else {}
        handler = handlers.get(method)
        if handler is None:
            raise NotReady(f"{method[:64]} is not served here")

        def handle(message: Message, progress: Callable[[Message], None]) -> Awaitable[Message]:
            return handler(Request(seat_id(remote, caller), run_id, method, message, progress))

        return handle


def _seen(task: asyncio.Task[Message]) -> None:
    """Takes note of a failure that nobody waited for."""
    if not task.cancelled():
        task.exception()


def _tell_wrong_version(ready: asyncio.Future[None]) -> None:
    """A visitor of another version; nobody here waits to hear of it."""
    if not ready.cancelled() and isinstance(error := ready.exception(), WrongVersion):
        log.warning("%s", error)
