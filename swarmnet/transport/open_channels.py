"""Every channel of a transport, from the arrival of its stream to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from swarmnet.errors import WrongVersion
from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.timing import ANSWER_S
from swarmnet.transport.bans import Bans
from swarmnet.transport.base import ByteStream, Traffic
from swarmnet.transport.buffers import BufferPool
from swarmnet.transport.calls.channel import PARTING_S, Channel
from swarmnet.transport.calls.hello import Offer, offer
from swarmnet.transport.calls.holdings import Holdings
from swarmnet.transport.calls.replies import ReplyRoom
from swarmnet.transport.calls.served import Service
from swarmnet.transport.listeners import Listeners
from swarmnet.transport.pacing import Pacer

log = logging.getLogger("swarmnet.transport")

MAX_CHANNELS = 8
"""Of one peer; two are normal, when both sides open one at the same time."""
MAX_STRANGERS_CHANNELS = 512
"""Of all machines without standing together. One more takes the place of the oldest: those that
come in order to fill the places keep no newcomer out for long."""
SUPERSEDED_AFTER_S = ANSWER_S
"""A peer opens a channel only when it has none. So one that has been here for so long already (not
opened by both sides at the same moment) is dead, though its connection may not have noticed."""

MAX_TOLD = 1024
"""Lines about peers of other versions that are remembered, so that none is logged twice."""


class DirectWatcher(Protocol):
    """The part of a transport that uses direct channels."""

    def ready(self, channel: Channel) -> None:
        """The peer has said hello on a direct channel."""

    def ended(self, channel: Channel) -> None:
        """A direct channel is gone."""


class Queues:
    """What waits on the channels of a machine. A carrier's traffic and its pace go by that."""

    def __init__(self) -> None:
        self.channels: dict[Channel, DirectWatcher | None] = {}
        """All of them, in the order of their streams."""

    def queued_bytes(self) -> int:
        """Long messages that wait for the uplink. Neither what peers leave unread counts, nor what
        is for strangers, nor the background: nothing else waits behind them."""
        return sum(channel.uplink_bytes for channel in self.channels)

    def queued_to(self, peer_id: str) -> int:
        """Long messages that are to be sent to a peer's machine and that the network has not taken
        yet, without those of the background."""
        machine = machine_of(peer_id)
        return sum(c.queued_bytes for c in self.channels if c.remote == machine)


class OpenChannels:
    """The `calls.channel.Owner` of a transport's channels. A peer counts as connected while it has
    a channel over the carrier; direct channels are left to their watcher."""

    def __init__(
        self,
        handlers: Service,
        traffic: Traffic,
        queues: Queues | None = None,
        *,
        agent: str = "",
        offered: Offer | None = None,
    ) -> None:
        """`agent`: the software that this peer says it is; `offered`: the versions and features
        that it says it has; None: those of this program."""
        self.run_id = ""
        self.agent = agent
        self.offer = offered or offer()
        self.traffic = traffic
        self.pool = BufferPool()
        self.queues = queues or Queues()
        self.pacer = Pacer(traffic.upload, self.queues.queued_bytes)
        self.handlers = handlers
        self.holdings = Holdings(handlers)
        self.replies = ReplyRoom(handlers)
        self.bans = Bans()
        self._is_closed = False
        self._all = self.queues.channels
        self._ready: dict[str, dict[Channel, float]] = {}
        """By peer, those over the carrier; each with the loop's time of its hello."""
        self._told: dict[str, None] = {}
        """Lines about peers of other versions."""
        self._connected = Listeners()
        self._disconnected = Listeners()
        self._gone = Listeners()

    def set_run(self, run_id: str) -> None:
        """Says to every present and future channel which run this peer belongs to."""
        self.run_id = run_id
        for channel in self.all():
            channel.say_hello()

    def all(self) -> list[Channel]:
        """Direct ones and those without a hello too."""
        return list(self._all)

    def first(self, peer_id: str) -> Channel | None:
        """The oldest channel to a peer over the carrier that is ready; one through a relay only
        where there is no other."""
        return min(self._ready.get(peer_id, ()), key=lambda c: c.is_relayed, default=None)

    def detours(self) -> list[Channel]:
        """Those through a relay whose peer has a straight one too."""
        return [
            channel
            for channels in self._ready.values()
            if not all(c.is_relayed for c in channels)
            for channel in channels
            if channel.is_relayed
        ]

    def has_any(self, peer_id: str) -> bool:
        """Whether a machine has a channel of any kind, ready or not."""
        return any(channel.remote == peer_id for channel in self._all)

    def features(self, peer_id: str) -> frozenset[str]:
        """Those of the protocol that this peer and another machine both have; none where no
        channel to the other is ready."""
        channel = self.first(peer_id)
        return frozenset() if channel is None else channel.greeting.features

    def num_direct(self, peer_id: str) -> int:
        """Direct channels of a peer, those that are not ready too."""
        return sum(c.is_direct and c.remote == peer_id for c in self._all)

    def connected(self) -> list[str]:
        """Peers with a ready channel over the carrier."""
        return list(self._ready)

    def on_connected(self, callback: Callable[[str], None]) -> None:
        """`callback(peer_id)` when the first channel to a peer is ready."""
        self._connected.add(callback)

    def on_disconnected(self, callback: Callable[[str], None]) -> None:
        """`callback(peer_id)` when the last channel to a machine is gone."""
        self._disconnected.add(callback)

    def on_gone(self, callback: Callable[[str], None]) -> None:
        """`callback(peer_id)` when a machine has no channel of any kind any more."""
        self._gone.add(callback)

    def forget(self, callback: Callable[[str], None]) -> None:
        """`callback` hears of no channel any more."""
        self._connected.remove(callback)
        self._disconnected.remove(callback)

    # ---- streams ----------------------------------------------------------------------------

    def may_attach(self, peer_id: str) -> bool:
        """Is a stream of this peer welcome?"""
        now = asyncio.get_running_loop().time()
        return not self._is_closed and not self.bans.is_banned(peer_id, now)

    def accept(self, stream: ByteStream) -> None:
        """A stream that a peer has opened; one that is not welcome is aborted."""
        num_open = sum(c.remote == stream.remote and not c.is_direct for c in self._all)
        if num_open >= MAX_CHANNELS or not self.may_attach(stream.remote):
            stream.transport.abort()
        else:
            if self.holdings.is_stranger(stream.remote):
                self._make_room_for_stranger()
            self.attach(stream).ready.add_done_callback(self._tell_wrong_version)

    def _make_room_for_stranger(self) -> None:
        if len(self._all) < MAX_STRANGERS_CHANNELS:
            return
        strangers = [c for c in self._all if self.holdings.is_stranger(c.remote)]
        if len(strangers) >= MAX_STRANGERS_CHANNELS:
            strangers[0].abort("too many channels of strangers")

    def attach(self, stream: ByteStream, direct: DirectWatcher | None = None) -> Channel:
        """A new channel on a stream; `direct`: hears of it where the stream is a direct one."""
        channel = Channel(self, stream.remote, is_direct=direct is not None)
        self._all[channel] = direct
        channel.attach(stream)
        return channel

    def channel_ready(self, channel: Channel) -> None:
        """`calls.channel.Owner`"""
        if not channel.is_open:
            return
        watcher = self._all[channel]
        if watcher is not None:
            watcher.ready(channel)
            return
        channels = self._ready.setdefault(channel.remote, {})
        now = asyncio.get_running_loop().time()
        before = [c for c, ready_at in channels.items() if now - ready_at > SUPERSEDED_AFTER_S]
        if not channel.is_relayed:  # it leaves a relay that works for a way that is back
            before = [c for c in before if not c.is_relayed]
        channels[channel] = now
        for old in before:
            old.abort("its peer has opened another")
        if len(channels) == 1:
            self._connected.tell(channel.remote)

    def channel_ended(self, channel: Channel) -> None:
        """`calls.channel.Owner`"""
        watcher = self._all.pop(channel, None)
        channels = self._ready.get(channel.remote, {})
        if watcher is not None:
            watcher.ended(channel)
        elif channel in channels:
            del channels[channel]
            if not channels:
                del self._ready[channel.remote]
                self._disconnected.tell(channel.remote)
        if not self.has_any(channel.remote):
            self._gone.tell(channel.remote)

    def offended(self, peer_id: str, reason: str) -> None:
        """A peer broke the protocol: it loses the stream, and for a growing time any other."""
        self.bans.add(peer_id, asyncio.get_running_loop().time())
        log.warning("%s broke the protocol (%s): its stream was closed", peer_id[-8:], reason)

    def ban(self, peer_id: str, reason: str) -> None:
        """The same for what a peer said in a message that was well formed: it loses all of its
        streams."""
        self.offended(peer_id, reason)
        for channel in self.all():
            if channel.remote == peer_id:
                channel.abort(reason)

    # ---- the end ----------------------------------------------------------------------------

    def refuse_streams(self) -> None:
        """No further stream is welcome."""
        self._is_closed = True

    async def close(self) -> None:
        """Closes every channel, once peers of another version have had the time to read why.
        Idempotent."""
        self.refuse_streams()
        if any(channel.is_parting for channel in self._all):
            await asyncio.sleep(PARTING_S)
        for channel in self.all():
            channel.close()

    def _tell_wrong_version(self, ready: asyncio.Future[None]) -> None:
        """A visitor of another version; nobody here waits to hear of it. One that comes again and
        again is told once."""
        if ready.cancelled() or not isinstance(error := ready.exception(), WrongVersion):
            return
        text = str(error)
        if text not in self._told:
            if len(self._told) >= MAX_TOLD:
                del self._told[next(iter(self._told))]
            self._told[text] = None
            log.warning("%s", text)
