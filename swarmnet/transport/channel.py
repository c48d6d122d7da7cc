"""Calls over byte streams: one persistent channel to each peer, many calls multiplexed on it.

`Channel` is the asyncio protocol of one stream: it parses frames into messages and writes messages
as frames, small messages first and large ones in turn, part by part. `ChannelTransport` makes a
`Transport` of any `Carrier`: it opens channels when they are needed, finds the handler of a
request, and keeps each side's failures from the other.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarmnet.errors import (
    AddressError,
    Busy,
    ChannelClosed,
    DeadlineExceeded,
    NotReady,
    ProtocolViolation,
    Refused,
    RemoteError,
    SwarmnetError,
    Unreachable,
    WrongVersion,
    remote_error,
)
from swarmnet.transport.base import (
    PROTOCOL_VERSION,
    ByteStream,
    Carrier,
    Handler,
    Request,
    Traffic,
)
from swarmnet.transport.frames import (
    ERROR,
    HELLO,
    NOTIFY,
    PROGRESS,
    REPLY,
    REPLY_PART,
    REQUEST,
    REQUEST_PART,
    Assembly,
    Head,
    Reader,
    head_frame,
    part_frames,
)
from swarmnet.wire import Array, Message

log = logging.getLogger("swarmnet.transport")

HELLO_TIMEOUT_S = 10.0
OPEN_TIMEOUT_S = 15.0
REDIAL_AFTER_S = 0.3
"""A failed dial is answered from memory for so long, so that callers do not pile up."""
WRITE_BUFFER_BYTES = 1 << 20
MAX_OPEN_CALLS = 8192
"""Requests of one peer that are being served; more are answered `Busy`."""
MAX_RECEIVING_BYTES = 4 << 30
"""Of messages that are still coming over one channel."""
MAX_WAITING_NOTES = 256
"""Notifications that wait for a channel to one peer; the oldest are dropped."""
MAX_TEXT = 500
FIRST_BAN_S, LONGEST_BAN_S = 1.0, 300.0
MAX_OFFENDERS = 4096


@dataclass
class PendingCall:
    """A call that waits for its reply."""

    method: str
    future: asyncio.Future[Message]
    on_progress: Callable[[Message], None] | None


@dataclass
class Outgoing:
    """A message with arrays that is being written, part by part."""

    parts: Iterator[tuple[bytes, memoryview]]
    method: str


class Channel(asyncio.BufferedProtocol):
    """One stream to one peer."""

    def __init__(self, owner: ChannelTransport, remote: str) -> None:
        self.remote = remote
        self.run_id = ""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ready.add_done_callback(_seen)
        self.is_open = True
        self._owner = owner
        self._stream: ByteStream | None = None
        self._transport: asyncio.Transport | None = None
        self._reader = Reader(self)
        self._call_ids = itertools.count(1)
        self._calls: dict[int, PendingCall] = {}
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._notes: set[asyncio.Task[None]] = set()
        self._assemblies: dict[tuple[int, int], Assembly] = {}
        self._methods: dict[int, str] = {}
        self._receiving_bytes = 0
        self._small: deque[tuple[bytes, str]] = deque()
        self._large: deque[Outgoing] = deque()
        self._paused = False
        self._hello_timer = asyncio.get_running_loop().call_later(
            HELLO_TIMEOUT_S, lambda: self.abort("no hello in time")
        )

    def attach(self, stream: ByteStream) -> None:
        """Takes the stream over."""
        self._stream = stream
        self._transport = stream.transport
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._transport.set_protocol(self)
        self.say_hello()
        if stream.leftover:
            self._guard(lambda: self._reader.feed_bytes(stream.leftover))
        if self.is_open:
            self._transport.resume_reading()

    def say_hello(self) -> None:
        """Tells version and run; again whenever the run changes."""
        hello = {"v": PROTOCOL_VERSION, "r": self._owner.run_id, "g": self._owner.agent}
        self._send_small(HELLO, 0, hello, "hello")

    # ---- asyncio's side ---------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._guard(lambda: self._reader.feed(nbytes))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("the connection was lost")

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._pump()

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except ProtocolViolation as e:
            self._owner.offended(self.remote, str(e))
            self.abort(str(e))
        except SwarmnetError as e:
            self.abort(str(e))

    def abort(self, reason: str) -> None:
        """Closes the stream at once."""
        if self._transport is not None:
            self._transport.abort()
        self._end(reason)

    def _end(self, reason: str) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self._hello_timer.cancel()
        self._small.clear()
        self._large.clear()
        self._assemblies.clear()
        closed = ChannelClosed(f"the channel to {self.remote[-8:]} closed: {reason}")
        if not self.ready.done():
            self.ready.set_exception(closed)
        for call in self._calls.values():
            if not call.future.done():
                call.future.set_exception(closed)
        self._calls.clear()
        # Handlers run on: what a caller began may be joined by another (see swarm.step).
        self._owner.channel_ended(self)

    async def close(self) -> None:
        """Closes the stream and ends what is being served for the peer."""
        tasks = [*self._serving.values(), *self._notes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._transport is not None:
            self._transport.close()
        self._end("closed here")

    # ---- frames in --------------------------------------------------------------------------

    def head(self, head: Head) -> None:
        """`frames.Sink`"""
        if head.kind == HELLO:
            return self._on_hello(head)
        if not self.ready.done():
            raise ProtocolViolation("the first message is no hello")
        num_bytes = sum(a.num_bytes for a in head.arrays)
        if not num_bytes:
            return self._complete(head)
        key = (REQUEST_PART if head.kind == REQUEST else REPLY_PART, head.call_id)
        if key in self._assemblies:
            raise ProtocolViolation("a call id that is in use")
        if self._receiving_bytes + num_bytes > MAX_RECEIVING_BYTES:
            raise ProtocolViolation("too many bytes at a time")
        self._receiving_bytes += num_bytes
        self._assemblies[key] = Assembly(head)
        return None

    def assembly(self, kind: int, call_id: int) -> Assembly:
        """`frames.Sink`"""
        assembly = self._assemblies.get((kind, call_id))
        if assembly is None:
            raise ProtocolViolation("a part of nothing")
        return assembly

    def part(self, kind: int, call_id: int, num_bytes: int, is_end: bool) -> None:
        """`frames.Sink`"""
        assembly = self._assemblies[(kind, call_id)]
        self._receiving_bytes -= num_bytes
        if is_end != (assembly.left_bytes == 0):
            raise ProtocolViolation("a message that ends too early or not at all")
        if is_end:
            del self._assemblies[(kind, call_id)]
            self._complete(assembly.head)

    def received(self, call_id: int, kind: int, num_bytes: int) -> None:
        """`frames.Sink`"""
        call = self._calls.get(call_id) if kind in (REPLY, REPLY_PART, ERROR, PROGRESS) else None
        method = call.method if call is not None else self._methods.get(call_id, "other")
        self._owner.traffic.add_received(method, num_bytes)

    def _on_hello(self, head: Head) -> None:
        version, run_id = head.values.get("v"), head.values.get("r")
        if version != PROTOCOL_VERSION:
            text = (
                f"{self.remote[-8:]} speaks protocol version {str(version)[:16]}, "
                f"this peer {PROTOCOL_VERSION}"
            )
            if not self.ready.done():
                self.ready.set_exception(WrongVersion(text))
            log.warning("%s; update swarmnet on the older side", text)
            # The other side reads our hello before the stream ends, and says the same.
            asyncio.get_running_loop().call_later(0.2, self.abort, "another version")
            return
        if not isinstance(run_id, str) or len(run_id) > MAX_TEXT:
            raise ProtocolViolation("a hello without a run")
        self.run_id = run_id
        self._hello_timer.cancel()
        if not self.ready.done():
            self.ready.set_result(None)
            self._owner.channel_ready(self)

    def _complete(self, head: Head) -> None:
        message = Message(head.values.get("b"), head.arrays)
        if head.kind == REQUEST:
            self._on_request(head, message)
        elif head.kind == NOTIFY:
            method = _method_of(head)
            if len(self._notes) < MAX_OPEN_CALLS:
                task = asyncio.get_running_loop().create_task(self._hear(method, message))
                self._notes.add(task)
                task.add_done_callback(self._notes.discard)
        else:
            self._on_answer(head, message)

    def _on_answer(self, head: Head, message: Message) -> None:
        call = self._calls.get(head.call_id)
        if call is None or call.future.done():
            return  # the caller gave up
        if head.kind == PROGRESS:
            if call.on_progress is not None:
                call.on_progress(message)
        elif head.kind == REPLY:
            call.future.set_result(message)
        else:
            error = head.values.get("e")
            if not (isinstance(error, list) and len(error) == 3 and isinstance(error[2], dict)):
                raise ProtocolViolation("an error without code, text and details")
            code, text, details = str(error[0]), str(error[1])[:MAX_TEXT], error[2]
            if not all(isinstance(k, str) and k.isidentifier() for k in details):
                raise ProtocolViolation("an error with impossible details")
            details.pop("text", None)
            call.future.set_exception(remote_error(code, text, details))

    def _on_request(self, head: Head, message: Message) -> None:
        call_id, method = head.call_id, _method_of(head)
        if call_id in self._serving:
            raise ProtocolViolation("a call id that is in use")
        if len(self._serving) >= MAX_OPEN_CALLS:
            return self._send_error(call_id, method, Busy("too many calls", backlog_s=1.0))
        self._methods[call_id] = method
        self._serving[call_id] = asyncio.get_running_loop().create_task(
            self._serve(call_id, method, message)
        )
        return None

    # ---- serving ----------------------------------------------------------------------------

    async def _serve(self, call_id: int, method: str, message: Message) -> None:
        def progress(note: Message) -> None:
            if self.is_open:
                self._send_small(PROGRESS, call_id, {"b": note.body}, method)

        try:
            reply = await self._owner.answer(self, method, message, progress)
            self._send(REPLY, call_id, {"b": reply.body}, reply.arrays, method)
        except RemoteError as e:
            self._send_error(call_id, method, e)
        except ProtocolViolation as e:
            self._send_error(call_id, method, Refused(str(e)))
        except SwarmnetError as e:
            self._send_error(call_id, method, RemoteError(f"{type(e).__name__}: {e}"))
        except asyncio.CancelledError:
            self._send_error(call_id, method, NotReady("given up here"))
            raise
        except Exception as e:
            log.exception("%s failed", method)
            self._send_error(call_id, method, RemoteError(f"{type(e).__name__}: {e}"))
        finally:
            self._serving.pop(call_id, None)
            self._methods.pop(call_id, None)

    async def _hear(self, method: str, message: Message) -> None:
        """A notification: nobody waits for its outcome."""
        try:
            await self._owner.answer(self, method, message, lambda _: None)
        except SwarmnetError as e:
            log.debug("%s from %s: %s", method, self.remote[-8:], e)
        except Exception:
            log.exception("%s failed", method)

    def _send_error(self, call_id: int, method: str, e: RemoteError) -> None:
        self._send_small(ERROR, call_id, {"e": [e.code, str(e)[:MAX_TEXT], e.details]}, method)

    # ---- calling ----------------------------------------------------------------------------

    async def call(
        self, method: str, message: Message, on_progress: Callable[[Message], None] | None
    ) -> Message:
        """Without a deadline: the transport has it."""
        await asyncio.shield(self.ready)
        if not self.is_open:
            raise ChannelClosed(f"the channel to {self.remote[-8:]} is closed")
        call_id = next(self._call_ids) & 0xFFFFFFFF
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = PendingCall(method, future, on_progress)
        try:
            self._send(REQUEST, call_id, {"m": method, "b": message.body}, message.arrays, method)
            return await future
        finally:
            self._calls.pop(call_id, None)

    def notify(self, method: str, message: Message) -> None:
        """One way."""
        self._send_small(NOTIFY, 0, {"m": method, "b": message.body}, method)

    # ---- frames out -------------------------------------------------------------------------

    def _send(
        self, kind: int, call_id: int, head: dict[str, Any], arrays: tuple[Array, ...], method: str
    ) -> None:
        if not self.is_open:
            return
        first = head_frame(kind, call_id, head, arrays)
        self._small.append((first, method))
        if any(a.num_bytes for a in arrays):
            part_kind = REQUEST_PART if kind == REQUEST else REPLY_PART
            self._large.append(Outgoing(part_frames(part_kind, call_id, arrays), method))
        self._pump()

    def _send_small(self, kind: int, call_id: int, head: dict[str, Any], method: str) -> None:
        self._send(kind, call_id, head, (), method)

    def _pump(self) -> None:
        """Writes as much as the stream takes: small messages first, one part of each large one in
        turn. The head of a large message counts as small, so it always precedes its parts."""
        traffic = self._owner.traffic
        while self.is_open and self._transport is not None and not self._paused:
            if self._small:
                data, method = self._small.popleft()
                self._transport.write(data)
                traffic.add_sent(method, len(data))
            elif self._large:
                outgoing = self._large.popleft()
                part = next(outgoing.parts, None)
                if part is not None:
                    self._transport.write(part[0])
                    self._transport.write(part[1])
                    traffic.add_sent(outgoing.method, len(part[0]) + len(part[1]))
                    self._large.append(outgoing)
            else:
                return


@dataclass
class Offender:
    """A peer that broke the protocol."""

    banned_until: float
    ban_s: float


@dataclass
class ChannelTransport:
    """A `Transport` over any `Carrier`."""

    carrier: Carrier
    agent: str = ""
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        self.peer_id = self.carrier.peer_id
        self.run_id = ""
        self._handlers: dict[str, Handler] = {}
        self._channels: dict[str, list[Channel]] = {}
        self._unready: set[Channel] = set()
        self._opening: dict[str, asyncio.Task[Channel]] = {}
        self._failed: dict[str, tuple[float, SwarmnetError]] = {}
        self._waiting_notes: dict[str, deque[tuple[str, Message]]] = {}
        self._offenders: dict[str, Offender] = {}
        self._connected: list[Callable[[str], None]] = []
        self._disconnected: list[Callable[[str], None]] = []
        self._closed = False

    async def start(self) -> None:
        """Starts the carrier. Raises `AddressError` or `TransportError`."""
        await self.carrier.start(self._accept)

    # ---- the port ---------------------------------------------------------------------------

    def addresses(self) -> list[str]:
        return self.carrier.addresses()

    def set_run(self, run_id: str) -> None:
        self.run_id = run_id
        for channel in self._all():
            channel.say_hello()

    def handle(self, method: str, handler: Handler) -> None:
        self._handlers[method] = handler

    def learn(self, peer_id: str, addresses: Sequence[str]) -> None:
        if peer_id != self.peer_id:
            self.carrier.learn(peer_id, addresses)

    def connected(self) -> list[str]:
        return list(self._channels)

    def on_connected(self, callback: Callable[[str], None]) -> None:
        self._connected.append(callback)

    def on_disconnected(self, callback: Callable[[str], None]) -> None:
        self._disconnected.append(callback)

    async def dial(self, address: str, timeout_s: float = 10.0) -> str:
        try:
            async with asyncio.timeout(timeout_s):
                peer_id = await self.carrier.connect(address)
                if peer_id == self.peer_id:
                    raise AddressError("that is this peer's own address")
                channel = await self._channel(peer_id)
                await asyncio.shield(channel.ready)
                return peer_id
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
    ) -> Message:
        try:
            async with asyncio.timeout(timeout_s):
                channel = await self._channel(peer_id)
                return await channel.call(method, message, on_progress)
        except TimeoutError:
            text = f"{method}: {peer_id[-8:]} did not answer within {timeout_s:.1f} s"
            raise DeadlineExceeded(text) from None

    def notify(self, peer_id: str, method: str, message: Message) -> None:
        if self._closed or peer_id == self.peer_id:
            return
        channel = self._open_channel(peer_id)
        if channel is not None:
            try:
                channel.notify(method, message)
            except ProtocolViolation as e:
                log.warning("%s was not sent: %s", method, e)
            return
        notes = self._waiting_notes.setdefault(peer_id, deque(maxlen=MAX_WAITING_NOTES))
        notes.append((method, message))
        if peer_id not in self._opening and not self._failed_lately(peer_id):
            self._open(peer_id)
        elif peer_id not in self._opening:
            del self._waiting_notes[peer_id]

    async def close(self) -> None:
        self._closed = True
        opening = list(self._opening.values())
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in self._all()))
        await self.carrier.close()

    # ---- channels ---------------------------------------------------------------------------

    def _all(self) -> list[Channel]:
        return [c for channels in self._channels.values() for c in channels] + list(self._unready)

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
        return await asyncio.shield(task)

    def _open(self, peer_id: str) -> asyncio.Task[Channel]:
        task = asyncio.get_running_loop().create_task(self._dial(peer_id))
        self._opening[peer_id] = task
        task.add_done_callback(lambda t: self._opened(peer_id, t))
        return task

    async def _dial(self, peer_id: str) -> Channel:
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                channel = self._attach(await self.carrier.open(peer_id))
                await channel.ready
                return channel
        except TimeoutError:
            raise Unreachable(f"{peer_id[-8:]}: no stream within {OPEN_TIMEOUT_S:.0f} s") from None
        except OSError as e:
            raise Unreachable(f"{peer_id[-8:]}: {e}") from None

    def _opened(self, peer_id: str, task: asyncio.Task[Channel]) -> None:
        self._opening.pop(peer_id, None)
        notes = self._waiting_notes.pop(peer_id, ())
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            for method, message in notes:
                self.notify(peer_id, method, message)
        elif isinstance(error, SwarmnetError):
            self._failed = {p: f for p, f in self._failed.items() if self._failed_lately(p)}
            self._failed[peer_id] = (asyncio.get_running_loop().time(), error)
        else:
            log.error("dialling %s: %r", peer_id[-8:], error)

    def _failed_lately(self, peer_id: str) -> bool:
        failed = self._failed.get(peer_id)
        now = asyncio.get_running_loop().time()
        return failed is not None and now - failed[0] < REDIAL_AFTER_S

    def _raise_if_failed_lately(self, peer_id: str) -> None:
        if self._failed_lately(peer_id):
            error = self._failed[peer_id][1]
            raise type(error)(str(error))

    def _accept(self, stream: ByteStream) -> None:
        offender = self._offenders.get(stream.remote)
        now = asyncio.get_running_loop().time()
        if self._closed or (offender is not None and now < offender.banned_until):
            stream.transport.abort()
            return
        self._attach(stream)

    def _attach(self, stream: ByteStream) -> Channel:
        channel = Channel(self, stream.remote)
        self._unready.add(channel)
        channel.attach(stream)
        return channel

    def channel_ready(self, channel: Channel) -> None:
        """A channel's peer has said hello."""
        self._unready.discard(channel)
        if not channel.is_open:
            return
        channels = self._channels.setdefault(channel.remote, [])
        channels.append(channel)
        self._failed.pop(channel.remote, None)
        if len(channels) == 1:
            for callback in self._connected:
                callback(channel.remote)

    def channel_ended(self, channel: Channel) -> None:
        """A channel's stream is gone."""
        self._unready.discard(channel)
        channels = self._channels.get(channel.remote, [])
        if channel in channels:
            channels.remove(channel)
            if not channels:
                del self._channels[channel.remote]
                for callback in self._disconnected:
                    callback(channel.remote)

    def offended(self, peer_id: str, reason: str) -> None:
        """A peer broke the protocol: it loses the stream, and for a growing time any other."""
        now = asyncio.get_running_loop().time()
        before = self._offenders.get(peer_id)
        ban_s = FIRST_BAN_S if before is None else min(2 * before.ban_s, LONGEST_BAN_S)
        if len(self._offenders) >= MAX_OFFENDERS:
            self._offenders.clear()
        self._offenders[peer_id] = Offender(now + ban_s, ban_s)
        log.warning("%s broke the protocol (%s): its stream was closed", peer_id[-8:], reason)

    async def answer(
        self,
        channel: Channel,
        method: str,
        message: Message,
        progress: Callable[[Message], None],
    ) -> Message:
        """What the handler of a method says."""
        handler = self._handlers.get(method)
        if handler is None:
            raise NotReady(f"{method[:64]} is not served here")
        return await handler(Request(channel.remote, channel.run_id, method, message, progress))


def _method_of(head: Head) -> str:
    method = head.values.get("m")
    if not isinstance(method, str) or len(method) > MAX_TEXT:
        raise ProtocolViolation("a request without a method")
    return method


def _seen(future: asyncio.Future[None]) -> None:
    """Takes note of a failure that nobody waited for."""
    if not future.cancelled():
        future.exception()
