"""Channels to peers over the carrier, opened when somebody needs them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from swarmnet.errors import ChannelClosed, ProtocolViolation, SwarmnetError, Unreachable
from swarmnet.protocol.timing import ANSWER_S
from swarmnet.transport.base import ByteStream, Carrier
from swarmnet.transport.calls.channel import Channel
from swarmnet.transport.calls.heads import FIRST_SEATS, Route
from swarmnet.transport.dial_filter import DialFilter
from swarmnet.transport.open_channels import OpenChannels
from swarmnet.transport.racing import race
from swarmnet.transport.relay import Relays
from swarmnet.wire import Message

log = logging.getLogger("swarmnet.transport")

RELAY_AFTER_S = 1.0
"""A peer that has relays is tried through the next of them when it has not answered for so long. It
protects relays from calls that reach a peer directly (tests/transport/test_protocol_doc.py)."""
REDIAL_AFTER_S = 0.3
"""A failed dial is answered from memory for so long. It protects from a dial for each of many calls
to one that is gone (tests/transport/test_dialer.py)."""
MAX_WAITING_NOTES = 256
"""Notifications that wait for a channel to one peer; the oldest are dropped."""


class Dialer:
    """Opens one channel at a time to each peer. Callers share the attempt, and its failure for a
    moment; notifications wait for its end. A channel that the peer opens meanwhile ends it too."""

    def __init__(
        self,
        carrier: Carrier,
        channels: OpenChannels,
        relays: Relays | None,
        dial_filter: DialFilter,
    ) -> None:
        """`relays`: further ways to peers; None: there are none."""
        self._carrier = carrier
        self._filter = dial_filter
        self._channels = channels
        self._relays = relays
        self._opening: dict[str, asyncio.Task[Channel]] = {}
        self._failed: dict[str, tuple[float, SwarmnetError]] = {}
        self._waiting_notes: dict[str, deque[tuple[str, Message, Route]]] = {}
        self._is_closed = False
        channels.on_connected(self._reached)

    async def call(
        self,
        peer_id: str,
        method: str,
        message: Message,
        on_progress: Callable[[Message], None] | None,
        route: Route = FIRST_SEATS,
    ) -> Message:
        """A call over the carrier, without a deadline. Raises as `channel` and `Channel.call`."""
        channel = await self.channel(peer_id)
        return await channel.call(method, message, on_progress, route)

    def notify(
        self, peer_id: str, method: str, message: Message, route: Route = FIRST_SEATS
    ) -> None:
        """One-way and best effort: never raises."""
        if self._is_closed:
            return
        channel = self._channels.first(peer_id)
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

    async def channel(self, peer_id: str) -> Channel:
        """The channel to a peer, opened where there is none. Raises `ChannelClosed`, `Unreachable`
        or `WrongVersion`."""
        channel = self._channels.first(peer_id)
        if channel is not None:
            return channel
        if self._is_closed:
            raise ChannelClosed("this transport is closed")
        if peer_id == self._carrier.peer_id:
            raise Unreachable("a peer does not call itself")
        if self._failed_lately(peer_id):
            error = self._failed[peer_id][1]
            raise type(error)(str(error))
        task = self._opening.get(peer_id) or self._open(peer_id)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if not task.cancelled() or current is None or current.cancelling():
                raise
            if self._is_closed:
                raise ChannelClosed("this transport is closed") from None
            channel = self._channels.first(peer_id)
            if channel is None:
                raise ChannelClosed(f"the channel to {peer_id[-8:]} closed at once") from None
            return channel

    async def straighten(self, peer_id: str) -> None:
        """Opens a straight channel beside one through a relay. Raises as `channel`."""
        await self._greeted(peer_id, self._open_straight(peer_id))
        if self._relays is not None:
            self._relays.opened(peer_id, through_relay=False)

    async def close(self) -> None:
        """Gives up every attempt. Idempotent."""
        self._is_closed = True
        tasks = list(self._opening.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _open(self, peer_id: str) -> asyncio.Task[Channel]:
        task = asyncio.get_running_loop().create_task(self._dial(peer_id))
        self._opening[peer_id] = task
        task.add_done_callback(lambda t: self._opened(peer_id, t))
        return task

    async def _dial(self, peer_id: str) -> Channel:
        """Raises a `SwarmnetError`."""
        if self._channels.bans.is_banned(peer_id, asyncio.get_running_loop().time()):
            name = peer_id[-8:]
            raise Unreachable(f"{name} broke the protocol; it is not called for a while")
        return await self._greeted(peer_id, self._open_stream(peer_id))

    async def _greeted(self, peer_id: str, opening: Coroutine[Any, Any, ByteStream]) -> Channel:
        """A channel on a stream to a peer, which has said hello there. Raises a `SwarmnetError`."""
        name = peer_id[-8:]
        channel = None
        try:
            async with asyncio.timeout(ANSWER_S):
                channel = self._channels.attach(await opening)
                await asyncio.shield(channel.ready)
                return channel
        except TimeoutError:
            if channel is not None:
                channel.abort("no hello in time")
            raise Unreachable(f"{name}: no answer within {ANSWER_S:.0f} s") from None
        except OSError as e:
            raise Unreachable(f"{name}: {e}") from None

    async def _open_stream(self, peer_id: str) -> ByteStream:
        """Straight, or through a relay of the peer's."""
        relays = self._relays
        if relays is None or not relays.knows(peer_id):
            return await self._open_straight(peer_id)
        ways = [lambda: self._open_straight(peer_id), *relays.ways(peer_id)]
        first_s = 0.0 if relays.is_needed(peer_id) else RELAY_AFTER_S
        starts = [first_s, *[RELAY_AFTER_S] * len(ways)][: len(ways) - 1]
        index, stream = await race(ways, starts)
        relays.opened(peer_id, through_relay=index > 0)
        return stream

    async def _open_straight(self, peer_id: str) -> ByteStream:
        self._filter.prepare(peer_id)
        stream = await self._carrier.open(peer_id)
        self._filter.opened(stream)
        return stream

    def _opened(self, peer_id: str, task: asyncio.Task[Channel]) -> None:
        self._opening.pop(peer_id, None)
        notes = self._waiting_notes.pop(peer_id, ())
        # Not where it has closed already: the notes would open it again, without end.
        for method, message, route in notes if self._channels.first(peer_id) else ():
            self.notify(peer_id, method, message, route)
        error = None if task.cancelled() else task.exception()
        if error is None:
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

    def _reached(self, peer_id: str) -> None:
        """There is a channel to a peer, whichever side has opened it: what failed before says
        nothing any more, and who waits for an attempt waits no longer."""
        self._failed.pop(peer_id, None)
        attempt = self._opening.get(peer_id)
        if attempt is not None:
            attempt.cancel()
