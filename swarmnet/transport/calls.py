"""Calls multiplexed on one byte stream.

`Channel` is the asyncio protocol of a stream: it parses frames into messages and writes messages
as frames. It knows the calls that it made and those that it serves; who serves a method, and what
becomes of a peer that breaks the protocol, it asks its `Owner`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from swarmnet.errors import (
    Busy,
    ChannelClosed,
    NotReady,
    ProtocolViolation,
    Refused,
    RemoteError,
    SwarmnetError,
    WrongVersion,
    remote_error,
)
from swarmnet.transport.base import PROTOCOL_VERSION, ByteStream, Traffic
from swarmnet.transport.buffers import BufferPool
from swarmnet.transport.frames import (
    CANCEL,
    ERROR,
    HEADER,
    HELLO,
    MAX_RECEIVING_BYTES,
    NOTIFY,
    PARTS_OF,
    PROGRESS,
    REPLY,
    REQUEST,
    REQUEST_PART,
    Assembly,
    Head,
    Reader,
)
from swarmnet.transport.outbox import Outbox, Outgoing, Stalled, outgoing
from swarmnet.transport.pacing import Pacer
from swarmnet.transport.seats import FIRST_SEATS, Route, parse_route
from swarmnet.wire import Message

log = logging.getLogger("swarmnet.transport")

HELLO_TIMEOUT_S = 10.0
WRITE_BUFFER_BYTES = 1 << 20
"""Written and not yet taken by the operating system: what a small message waits behind at most."""
BATCH_BYTES = 128 << 10
"""Written at a time, about."""
JOINED_BYTES = 8 << 10
"""Smaller pieces are written as one."""
MAX_OPEN_CALLS = 8192
"""Requests (and notifications) of one peer that are being served; more are answered `Busy`."""
MAX_SERVING_BYTES = 4 << 30
"""Array bytes of the requests of one peer that are being served; more are answered `Busy`."""
BUSY_BACKLOG_S = 1.0
"""What a `Busy` of the channel itself says."""
PARTING_S = 0.2
"""A peer of another version has so long to read our hello before its stream ends."""
MAX_TEXT = 500
"""Characters of a method, a run id, an error's text."""
OTHER = "other"
"""Bytes of messages that belong to no method or call known here are counted under this."""
RESERVED_DETAILS = ("self", "text")
"""Parameters of `RemoteError` that are no details."""


class Owner(Protocol):
    """Who has channels."""

    run_id: str
    agent: str
    traffic: Traffic
    pool: BufferPool
    pacer: Pacer

    async def answer(
        self,
        channel: Channel,
        method: str,
        message: Message,
        progress: Callable[[Message], None],
        route: Route = FIRST_SEATS,
    ) -> Message:
        """What the handler of a method says."""

    def serves(self, method: str) -> bool:
        """Is there a handler?"""

    def run(self, remote: str, work: Coroutine[Any, Any, None]) -> None:
        """Runs a handler. It outlives its channel, not the owner."""

    def num_running(self, remote: str) -> int:
        """Handlers that work for a peer."""

    def allows(self, remote: str) -> bool:
        """Counts a call of a peer; False where it calls too often."""

    def channel_ready(self, channel: Channel) -> None:
        """The peer has said hello."""

    def channel_ended(self, channel: Channel) -> None:
        """The stream is gone."""

    def offended(self, peer_id: str, reason: str) -> None:
        """The peer broke the protocol."""


@dataclass(slots=True)
class PendingCall:
    """A call that waits for its reply."""

    method: str
    future: asyncio.Future[Message]
    on_progress: Callable[[Message], None] | None


@dataclass(slots=True)
class Serving:
    """A call that is being served."""

    books: str
    """The method that it is counted under."""
    is_cancelled: bool = False
    """The caller waits no more."""


class Channel(asyncio.BufferedProtocol):
    """One stream to one peer."""

    def __init__(self, owner: Owner, remote: str, *, is_direct: bool = False) -> None:
        loop = asyncio.get_running_loop()
        self.remote = remote
        self.is_direct = is_direct
        """Its stream is a TLS connection of our own, not one through libp2p."""
        self.run_id = ""
        self.ready: asyncio.Future[None] = loop.create_future()
        """Done when the peer has said hello. To be awaited through `asyncio.shield`."""
        self.ready.add_done_callback(_seen)
        self.is_open = True
        self.is_parting = False
        """The peer is of another version, and is left the time to read why."""
        self._owner = owner
        self._stream: ByteStream | None = None
        self._transport: asyncio.Transport | None = None
        self._reader = Reader(self, is_sealed=is_direct)
        self._outbox = Outbox(owner.pool.take, is_sealed=is_direct)
        self._is_paused = False
        self._is_pumping = False
        self._written_bytes = 0
        self._metered_bytes: int | None = None
        """Taken by the stream when it was last metered; None while it is not saturated."""
        self._last_call_id = 0
        self._calls: dict[int, PendingCall] = {}
        self._serving: dict[int, Serving] = {}
        self._serving_bytes = 0
        self._assemblies: dict[tuple[int, int], Assembly] = {}
        self._receiving_bytes = 0
        self._call_ids = itertools.count(1)
        self._timer = loop.call_later(HELLO_TIMEOUT_S, self.abort, "no hello in time")

    @property
    def queued_bytes(self) -> int:
        """Of large messages: to be sent, and not yet taken by the operating system."""
        written = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return self._outbox.bulk_bytes + written

    def attach(self, stream: ByteStream) -> None:
        """Takes the stream over."""
        self._stream = stream
        self._transport = stream.transport
        if self._transport.is_closing():
            return self._end("the connection was lost")
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._transport.set_protocol(self)
        self.say_hello()
        if stream.leftover:
            try:
                self._reader.feed_bytes(stream.leftover)
            except Exception as e:
                self._refuse(e)
        if self.is_open:
            self._transport.resume_reading()
        return None

    def say_hello(self) -> None:
        """Tells version and run; again whenever the run changes."""
        hello = {"v": PROTOCOL_VERSION, "r": self._owner.run_id, "g": self._owner.agent}
        self._send(outgoing(HELLO, 0, hello, (), "hello"))

    # ---- asyncio's side ---------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self.is_open:
                self._reader.feed(nbytes)
        except Exception as e:
            self._refuse(e)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("the connection was lost")

    def pause_writing(self) -> None:
        self._is_paused = True
        self._meter()

    def resume_writing(self) -> None:
        self._is_paused = False
        self._meter()
        self._pump()
        if not self._is_paused:
            self._meter(ended=True)

    def _meter(self, ended: bool = False) -> None:
        """Tells how much a stream that had more to send has taken."""
        if self._transport is None:
            return
        now = asyncio.get_running_loop().time()
        taken = self._written_bytes - self._transport.get_write_buffer_size()
        upload = self._owner.traffic.upload
        if self._metered_bytes is None:
            upload.began(self, self.remote, now)
        else:
            upload.drained(self, max(0, taken - self._metered_bytes), now, ended=ended)
        self._metered_bytes = None if ended else taken

    def _refuse(self, e: Exception) -> None:
        """What a peer sends may cost it this channel, and nobody anything else."""
        if isinstance(e, ProtocolViolation):
            self._owner.offended(self.remote, str(e))
            self.abort(str(e))
        else:
            log.error("a frame of %s could not be handled", self.remote[-8:], exc_info=e)
            self.abort(repr(e))

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

    def _end(self, reason: str) -> None:
        if not self.is_open:
            return
        self.is_open = False
        if self._metered_bytes is not None:
            now = asyncio.get_running_loop().time()
            self._owner.traffic.upload.drained(self, 0, now, ended=True)
        self._timer.cancel()
        self._outbox.clear()
        self._assemblies.clear()
        text = f"the channel to {self.remote[-8:]} closed: {reason}"
        if not self.ready.done():
            self.ready.set_exception(ChannelClosed(text))
        for call in self._calls.values():
            if not call.future.done():
                call.future.set_exception(ChannelClosed(text))
        self._calls.clear()
        self._owner.pacer.forget(self)
        self._owner.channel_ended(self)

    # ---- frames in --------------------------------------------------------------------------

    def head(self, head: Head, num_bytes: int) -> None:
        """`frames.Sink`"""
        books = self._books(head)
        self._owner.traffic.add_received(books, num_bytes)
        if head.kind == HELLO:
            self._on_hello(head)
        elif not self.ready.done():
            raise ProtocolViolation("the first message is no hello")
        elif self.ready.exception() is not None:
            pass  # of another version; its stream is about to end
        elif head.kind == CANCEL:
            self._on_cancel(head.call_id)
        elif head.array_bytes:
            self._assemble(head, books)
        elif head.kind == REQUEST:
            self._check_new(head.call_id)
            self._on_request(head, Message(head.values.get("b"), _empty(head)), books)
        elif head.kind == NOTIFY:
            self._on_note(head)
        else:
            self._on_answer(head, Message(head.values.get("b"), _empty(head)))

    def _books(self, head: Head) -> str:
        """Under which method a message is counted. Only names that mean something here: a peer must
        not be able to fill the books."""
        if head.kind in (REQUEST, NOTIFY):
            method = _method_of(head)
            return method if self._owner.serves(method) else OTHER
        if head.kind == HELLO:
            return "hello"
        if head.kind == CANCEL:
            serving = self._serving.get(head.call_id)
            return OTHER if serving is None else serving.books
        call = self._calls.get(head.call_id)
        return OTHER if call is None else call.method

    def _check_new(self, call_id: int) -> None:
        if call_id in self._serving or (REQUEST_PART, call_id) in self._assemblies:
            raise ProtocolViolation("a call id that is in use")

    def _assemble(self, head: Head, books: str) -> None:
        """A message of which parts will follow; `books`: as `_books` says."""
        key = (PARTS_OF[head.kind], head.call_id)
        is_wanted = True
        if head.kind == REQUEST:
            self._check_new(head.call_id)
        else:
            if key in self._assemblies or head.call_id > self._last_call_id:
                raise ProtocolViolation("a reply to no call")
            is_wanted = head.call_id in self._calls
        if self._receiving_bytes + head.array_bytes > MAX_RECEIVING_BYTES:
            raise ProtocolViolation(f"more than {MAX_RECEIVING_BYTES} bytes on their way")
        self._receiving_bytes += head.array_bytes
        allocate = self._owner.pool.take if is_wanted else None
        self._assemblies[key] = Assembly(head, allocate, books)

    def assembly(self, kind: int, call_id: int) -> Assembly:
        """`frames.Sink`"""
        assembly = self._assemblies.get((kind, call_id))
        if assembly is None:
            raise ProtocolViolation("a part of nothing")
        return assembly

    def part(self, kind: int, call_id: int, payload_bytes: int, is_end: bool) -> None:
        """`frames.Sink`"""
        assembly = self._assemblies[kind, call_id]
        head = assembly.head
        self._receiving_bytes -= payload_bytes
        self._owner.traffic.add_received(assembly.books, HEADER.size + payload_bytes)
        if is_end != (assembly.left_bytes == 0):
            raise ProtocolViolation("a message that ends too early or not at all")
        if not is_end:
            return
        del self._assemblies[kind, call_id]
        message = Message(head.values.get("b"), assembly.arrays())
        if head.kind == REQUEST:
            self._on_request(head, message, assembly.books)
        else:
            self._on_answer(head, message)

    def _on_hello(self, head: Head) -> None:
        version, run_id = head.values.get("v"), head.values.get("r")
        if version != PROTOCOL_VERSION:
            return self._part_from(str(version)[:16])
        if not isinstance(run_id, str) or len(run_id) > MAX_TEXT:
            raise ProtocolViolation("a hello without a run")
        self.run_id = run_id
        if not self.ready.done():
            self._timer.cancel()
            self.ready.set_result(None)
            self._owner.channel_ready(self)
        return None

    def _part_from(self, version: str) -> None:
        """The peer is of another version: who opened the stream hears it as `WrongVersion`, who
        accepted it logs it."""
        if self.ready.done():
            raise ProtocolViolation("a version that changes")
        text = (
            f"{self.remote[-8:]} speaks protocol version {version}, this peer {PROTOCOL_VERSION}; "
            "update swarmnet on the older side"
        )
        self.is_parting = True
        self.ready.set_exception(WrongVersion(text))
        self._timer.cancel()
        # The other side reads our hello before the stream ends, and says the same.
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(PARTING_S, self.abort, "another version")

    def _on_cancel(self, call_id: int) -> None:
        """The caller gave up: its reply is not sent, and of its request no more will come."""
        assembly = self._assemblies.pop((REQUEST_PART, call_id), None)
        if assembly is not None:
            self._receiving_bytes -= assembly.left_bytes
        serving = self._serving.get(call_id)
        if serving is not None:
            serving.is_cancelled = True

    def _on_answer(self, head: Head, message: Message) -> None:
        if head.call_id > self._last_call_id:
            raise ProtocolViolation("an answer to no call")
        call = self._calls.get(head.call_id)
        if call is None or call.future.done():
            return  # the caller gave up
        if head.kind == PROGRESS:
            _tell(call, message)
        elif head.kind == REPLY:
            call.future.set_result(message)
        else:
            call.future.set_exception(_parse_error(head))

    # ---- serving ----------------------------------------------------------------------------

    def _on_request(self, head: Head, message: Message, books: str) -> None:
        call_id, num_bytes = head.call_id, head.array_bytes
        is_full = self._owner.num_running(self.remote) >= MAX_OPEN_CALLS
        if not self._owner.allows(self.remote):
            busy = Busy("too many calls a second", backlog_s=BUSY_BACKLOG_S)
            return self._send_error(call_id, books, busy)
        if is_full or (self._serving and self._serving_bytes + num_bytes > MAX_SERVING_BYTES):
            busy = Busy("too many calls at a time", backlog_s=BUSY_BACKLOG_S)
            return self._send_error(call_id, books, busy)
        self._serving[call_id] = Serving(books)
        self._serving_bytes += num_bytes
        work = self._serve(call_id, _method_of(head), message, num_bytes, _route_of(head))
        return self._owner.run(self.remote, work)

    async def _serve(
        self, call_id: int, method: str, message: Message, num_bytes: int, route: Route
    ) -> None:
        serving = self._serving[call_id]

        def progress(note: Message) -> None:
            if self.is_open and not serving.is_cancelled and call_id in self._serving:
                try:
                    head = {"b": note.body}
                    self._send(outgoing(PROGRESS, call_id, head, note.arrays, method))
                except SwarmnetError as e:
                    log.warning("progress of %s was not sent: %s", method, e)

        try:
            reply = await self._owner.answer(self, method, message, progress, route)
            if not serving.is_cancelled:
                self._send(outgoing(REPLY, call_id, {"b": reply.body}, reply.arrays, method))
        except asyncio.CancelledError:
            self._send_error(call_id, serving.books, NotReady("given up here"))
            raise
        except SwarmnetError as e:
            self._send_error(call_id, serving.books, as_remote(e))
        except Exception as e:
            log.exception("%s failed", method)
            self._send_error(call_id, serving.books, as_remote(e))
        finally:
            del self._serving[call_id]
            self._serving_bytes -= num_bytes

    def _on_note(self, head: Head) -> None:
        is_full = self._owner.num_running(self.remote) >= MAX_OPEN_CALLS
        if not is_full and self._owner.allows(self.remote):
            message = Message(head.values.get("b"))
            work = self._hear(_method_of(head), message, _route_of(head))
            self._owner.run(self.remote, work)

    async def _hear(self, method: str, message: Message, route: Route) -> None:
        """A notification: nobody waits for its outcome."""
        try:
            await self._owner.answer(self, method, message, lambda _: None, route)
        except SwarmnetError as e:
            log.debug("%s from %s: %s", method, self.remote[-8:], e)
        except Exception:
            log.exception("%s failed", method)

    def _send_error(self, call_id: int, books: str, e: RemoteError) -> None:
        try:
            message = outgoing(ERROR, call_id, {"e": describe(e)}, (), books)
        except ProtocolViolation as wrong:
            log.warning("the details of an error of %s cannot travel: %s", books, wrong)
            message = outgoing(ERROR, call_id, {"e": [e.code, str(e)[:MAX_TEXT], {}]}, (), books)
        self._send(message)

    # ---- calling ----------------------------------------------------------------------------

    async def call(
        self,
        method: str,
        message: Message,
        on_progress: Callable[[Message], None] | None,
        route: Route = FIRST_SEATS,
    ) -> Message:
        """Without a deadline: the transport has it. When cancelled, sends no more of the request,
        so that its arrays are the caller's again."""
        await asyncio.shield(self.ready)
        if not self.is_open:
            raise ChannelClosed(f"the channel to {self.remote[-8:]} is closed")
        self._last_call_id = next(self._call_ids)
        call_id = self._last_call_id & 0xFFFFFFFF
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        head = _head(method, message, route)
        request = outgoing(REQUEST, call_id, head, message.arrays, method)
        self._calls[call_id] = PendingCall(method, future, on_progress)
        try:
            self._send(request)
            return await future
        finally:
            self._calls.pop(call_id, None)
            if (not future.done() or future.cancelled()) and self._outbox.withdraw(request):
                self._send(outgoing(CANCEL, call_id, {}, (), method))

    def notify(self, method: str, message: Message, route: Route = FIRST_SEATS) -> None:
        """One way. Raises `ProtocolViolation` where the message cannot travel."""
        head = _head(method, message, route)
        note = outgoing(NOTIFY, 0, head, message.arrays, method)
        if self.is_open:
            self._outbox.put_note(note)
            self._pump()

    # ---- frames out -------------------------------------------------------------------------

    def _send(self, message: Outgoing) -> None:
        if self.is_open:
            try:
                self._outbox.put(message)
                self._pump()
            except Stalled as e:
                self.abort(str(e))

    def pump(self) -> None:
        """`pacing.Sender`"""
        self._pump()

    def _pump(self) -> None:
        """Writes as much as the stream, and the cap on the upload, take."""
        if self._is_pumping:
            return  # a write that failed at once came back here
        self._is_pumping = True
        try:
            while self.is_open and self._transport is not None and not self._is_paused:
                buffers = self._take(bulk := self._owner.pacer.may_send())
                if not buffers:
                    if not bulk and self._outbox.has_bulk:
                        self._owner.pacer.wait(self)
                    return
                self._written_bytes += sum(map(len, buffers))  # before: it may be full at once
                self._transport.writelines(buffers)
        finally:
            self._is_pumping = False

    def _take(self, bulk: bool) -> list[bytes | memoryview]:
        """Frames for one write; small ones, and the head and first part of a large message, go to
        the operating system together."""
        frames: list[bytes | memoryview] = []
        small: list[bytes | memoryview] = []
        num_bytes = 0
        while num_bytes < BATCH_BYTES:
            taken = self._outbox.take(bulk=bulk)
            if taken is None:
                break
            method, frame = taken
            size = sum(map(len, frame))
            num_bytes += size
            self._owner.traffic.add_sent(method, size, is_direct=self.is_direct)
            for piece in frame:
                if len(piece) < JOINED_BYTES:
                    small.append(piece)
                    continue
                if small:
                    frames.append(b"".join(small))
                    small = []
                frames.append(piece)
        if small:
            frames.append(b"".join(small))
        self._owner.pacer.sent(num_bytes)
        return frames


def as_remote(error: Exception) -> RemoteError:
    """What a caller will see of a handler's error."""
    if isinstance(error, RemoteError):
        return error
    if isinstance(error, ProtocolViolation):
        return Refused(str(error))
    return RemoteError(f"{type(error).__name__}: {error}")


def describe(error: RemoteError) -> list[Any]:
    """An error as it travels: code, text, details."""
    return [error.code, str(error)[:MAX_TEXT], error.details]


def parse_error(described: Any) -> RemoteError:
    """The reverse of `describe`. Raises `ProtocolViolation`."""
    if not (isinstance(described, list) and len(described) == 3):
        raise ProtocolViolation("an error without code, text and details")
    code, text, details = described
    if not (isinstance(code, str) and isinstance(text, str) and isinstance(details, dict)):
        raise ProtocolViolation("an error without code, text and details")
    if not all(isinstance(name, str) for name in details):
        raise ProtocolViolation("an error with impossible details")
    kept = {name: value for name, value in details.items() if name not in RESERVED_DETAILS}
    return remote_error(code, text[:MAX_TEXT], kept)


def _method_of(head: Head) -> str:
    """Raises `ProtocolViolation`."""
    method = head.values.get("m")
    if not isinstance(method, str) or len(method) > MAX_TEXT:
        raise ProtocolViolation("a request without a method")
    return method


def _route_of(head: Head) -> Route:
    """Raises `ProtocolViolation`."""
    return parse_route(head.values.get("s"))


def _head(method: str, message: Message, route: Route) -> dict[str, Any]:
    head: dict[str, Any] = {"m": method, "b": message.body}
    return head if route == FIRST_SEATS else {**head, "s": list(route)}


def _parse_error(head: Head) -> RemoteError:
    return parse_error(head.values.get("e"))


def _empty(head: Head) -> tuple[Any, ...]:
    """The arrays of a message that has none, or only such without a byte."""
    return Assembly(head, lambda num_bytes: memoryview(b"")).arrays() if head.arrays else ()


def _tell(call: PendingCall, message: Message) -> None:
    if call.on_progress is None:
        return
    try:
        call.on_progress(message)
    except Exception:
        log.exception("the progress of %s was not understood", call.method)


def _seen(future: asyncio.Future[None]) -> None:
    """Takes note of a failure that nobody waited for."""
    if not future.cancelled():
        future.exception()
