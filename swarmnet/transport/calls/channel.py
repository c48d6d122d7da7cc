"""One stream to one peer, and the calls that it carries.

`Channel` is the asyncio protocol of a stream. It greets the peer, tells its parts of what arrives
(`Inbox`) and of room to write (`Writer`), and ends them together. What becomes of a peer that
breaks the protocol, it leaves to its `Owner`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from swarmnet.errors import ChannelClosed, ProtocolViolation, WrongVersion
from swarmnet.protocol.timing import ANSWER_S, UPKEEP_S
from swarmnet.transport.base import ByteStream, Traffic
from swarmnet.transport.buffers import BufferPool
from swarmnet.transport.calls.heads import FIRST_SEATS, Route, request_head
from swarmnet.transport.calls.hello import Greeting, Offer, hello_head
from swarmnet.transport.calls.holdings import Holdings, Overfull
from swarmnet.transport.calls.inbox import Inbox
from swarmnet.transport.calls.outbox import Outbox, outgoing
from swarmnet.transport.calls.pending import PendingCalls
from swarmnet.transport.calls.replies import ReplyRoom
from swarmnet.transport.calls.served import ServedCalls, Service
from swarmnet.transport.calls.writer import Writer
from swarmnet.transport.frames import CANCEL, HELLO, NOTIFY, REQUEST, Reader
from swarmnet.transport.pacing import Pacer
from swarmnet.wire import Message

log = logging.getLogger("swarmnet.transport")

HELLO_TIMEOUT_S = ANSWER_S
LEASE_S = UPKEEP_S
"""What has begun to arrive is given up after so long, or at the latest after twice that: a
stranger's in any case, another's where nothing else came either."""
PARTING_S = 0.2
"""A peer of another version has so long to read our hello before its stream ends. It protects from
an end without a reason on both sides (tests/transport/test_channel.py)."""


class Owner(Protocol):
    """The part of a transport that has channels."""

    run_id: str
    agent: str
    offer: Offer
    traffic: Traffic
    pool: BufferPool
    pacer: Pacer
    handlers: Service
    holdings: Holdings
    replies: ReplyRoom

    def channel_ready(self, channel: Channel) -> None:
        """The peer has said hello."""

    def channel_ended(self, channel: Channel) -> None:
        """The stream is gone."""

    def offended(self, peer_id: str, reason: str) -> None:
        """The peer broke the protocol."""


class Channel(asyncio.BufferedProtocol):
    """One stream to one peer."""

    def __init__(self, owner: Owner, remote: str, *, is_direct: bool = False) -> None:
        loop = asyncio.get_running_loop()
        self.remote = remote
        self.is_direct = is_direct
        """Its stream is a TLS connection of our own, not one through libp2p."""
        self.greeting = Greeting(remote, owner.offer)
        """What the peer has said of itself."""
        self.ready: asyncio.Future[None] = loop.create_future()
        """Done when the peer has said hello. To be awaited through `asyncio.shield`."""
        self.ready.add_done_callback(_seen)
        self.is_open = True
        self.is_relayed = False
        """Its stream goes through a third peer."""
        self._owner = owner
        self._stream: ByteStream | None = None
        self._transport: asyncio.Transport | None = None
        self._calls = PendingCalls()
        self._outbox = Outbox(owner.pool.take, is_sealed=is_direct)
        self._writer = Writer(
            self._outbox, owner.pacer, owner.traffic, owner.replies, remote, is_direct=is_direct
        )
        self._served = ServedCalls(
            owner.handlers, self._writer, self.greeting, owner.holdings, owner.replies
        )
        self._inbox = Inbox(
            self.greeting, self._calls, self._served, owner.pool.take, owner.traffic, owner.holdings
        )
        self._reader = Reader(self._inbox, is_sealed=is_direct)
        self._timer = loop.call_later(HELLO_TIMEOUT_S, self.abort, "no hello in time")
        self._lease = loop.call_later(LEASE_S, self._renew_lease)

    @property
    def is_parting(self) -> bool:
        """The peer is of another version, and is left the time to read why."""
        return bool(self.greeting.mismatch)

    @property
    def is_idle(self) -> bool:
        """No call is open on it, of either side, and nothing is on its way."""
        is_busy = len(self._calls) or len(self._served)
        return not (is_busy or self._inbox.receiving_bytes or self._writer.waiting_bytes)

    @property
    def connection(self) -> Any:
        """The socket of its stream, as the event loop gives it; None where it has none."""
        return None if self._transport is None else self._transport.get_extra_info("socket")

    @property
    def leads_to(self) -> str:
        """The multiaddr at the other end of its stream's connection; empty where unknown."""
        return "" if self._stream is None else self._stream.seen_at

    @property
    def queued_bytes(self) -> int:
        """Of large messages: to be sent, and not yet taken by the operating system; without those
        of the background."""
        return self._writer.queued_bytes

    @property
    def uplink_bytes(self) -> int:
        """Of these, what waits for the uplink: none where the peer holds the stream up, or has no
        standing here."""
        num_bytes = self._writer.uplink_bytes
        return num_bytes if num_bytes and not self._owner.holdings.is_stranger(self.remote) else 0

    def attach(self, stream: ByteStream) -> None:
        """Takes the stream over."""
        self._stream = stream
        self.is_relayed = stream.is_relayed
        self._transport = stream.transport
        if self._transport.is_closing():
            return self._end("the connection was lost")
        self._writer.begin(self._transport)
        self._transport.set_protocol(self)
        self.say_hello()
        if stream.leftover:
            self._read(self._reader.feed_bytes, stream.leftover)
        if self.is_open:
            self._transport.resume_reading()
        return None

    def say_hello(self) -> None:
        """Tells versions, features and run; again whenever the run changes."""
        hello = hello_head(self._owner.offer, self._owner.run_id, self._owner.agent)
        self._writer.send(outgoing(HELLO, 0, hello, (), "hello"))

    def abort(self, reason: str) -> None:
        """Closes the stream at once."""
        if self._transport is not None:
            self._transport.abort()
        self._end(reason)

    def close(self) -> None:
        """Closes the stream when what was written is sent."""
        if self._transport is not None:
            self._transport.close()
        self._end("closed here")

    # ---- calls ------------------------------------------------------------------------------

    async def call(
        self,
        method: str,
        message: Message,
        on_progress: Callable[[Message], None] | None,
        route: Route = FIRST_SEATS,
        on_part: Callable[[], None] | None = None,
    ) -> Message:
        """A call without a deadline: the transport has it. `on_part`: see `PendingCalls.add`. A
        call that is over sends no more of its request, whose arrays are the caller's again. Raises
        `ChannelClosed`, `WrongVersion`, `RemoteError` or `ProtocolViolation`."""
        await asyncio.shield(self.ready)
        if not self.is_open:
            raise ChannelClosed(f"the channel to {self.remote[-8:]} is closed")
        call_id = self._calls.next_id()
        head = request_head(method, message, route)
        request = outgoing(
            REQUEST, call_id, head, message.arrays, method, is_background=message.is_background
        )
        future = self._calls.add(call_id, self.remote, method, on_progress, on_part)
        try:
            self._writer.send(request)
            return await future
        finally:
            self._calls.remove(call_id)
            self._inbox.give_up(call_id)
            is_given_up = not future.done() or future.cancelled()
            # An error may come while most of the request still waits to be sent.
            if (is_given_up or request.left_bytes) and self._outbox.withdraw(request):
                self._writer.send(outgoing(CANCEL, call_id, {}, (), method))

    def notify(self, method: str, message: Message, route: Route = FIRST_SEATS) -> None:
        """One way. Raises `ProtocolViolation` where the message cannot travel."""
        head = request_head(method, message, route)
        note = outgoing(NOTIFY, 0, head, message.arrays, method)
        if self.is_open:
            self._outbox.put_note(note)
            self._writer.pump()

    # ---- the greeting -----------------------------------------------------------------------

    def _greeted(self) -> None:
        """Acts on the peer's hello once it has come. Where the peer speaks none of our versions,
        the side that opened the stream hears it as `WrongVersion`, the side that accepted it logs
        it."""
        if self.ready.done() or not self.greeting.is_done:
            return
        self._timer.cancel()
        if self.greeting.mismatch:
            self.ready.set_exception(WrongVersion(self.greeting.mismatch))
            # The other side reads our hello before the stream ends, and says the same.
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(PARTING_S, self.abort, "another version")
        else:
            self.ready.set_result(None)
            self._owner.channel_ready(self)

    def _read(self, feed: Callable[[Any], None], what: Any) -> None:
        """Takes in what has come."""
        error: Exception | None = None
        try:
            feed(what)
        except Exception as e:
            error = e
        self._greeted()
        if error is not None:
            self._refuse(error)

    # ---- asyncio's side ---------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._inbox.heard()
        if self.is_open:
            self._read(self._reader.feed, nbytes)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(self._writer.why_ended or "the connection was lost")

    def pause_writing(self) -> None:
        self._writer.pause()

    def resume_writing(self) -> None:
        self._writer.resume()

    def _refuse(self, e: Exception) -> None:
        """What a peer sends may cost it this channel, and nobody anything else."""
        if isinstance(e, ProtocolViolation):
            self._owner.offended(self.remote, str(e))
            self.abort(str(e))
        elif isinstance(e, Overfull):
            log.debug("%s: %s", self.remote[-8:], e)
            self.abort(str(e))
        else:
            log.error("a frame of %s could not be handled", self.remote[-8:], exc_info=e)
            self.abort(repr(e))

    def _renew_lease(self) -> None:
        self._lease = asyncio.get_running_loop().call_later(LEASE_S, self._renew_lease)
        if not self._inbox.expire():
            self.abort("a message that does not come")

    def _end(self, reason: str) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self._timer.cancel()
        self._lease.cancel()
        self._writer.end()
        self._inbox.clear()
        if not self.ready.done():
            text = f"the channel to {self.remote[-8:]} closed: {reason}"
            self.ready.set_exception(ChannelClosed(text))
        self._calls.lose(reason)
        self._owner.channel_ended(self)


def _seen(future: asyncio.Future[None]) -> None:
    """Takes note of a failure that nobody waited for."""
    if not future.cancelled():
        future.exception()
