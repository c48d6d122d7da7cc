"""Yamux on trio: many byte streams over one encrypted connection.

py-libp2p has a yamux of its own, and it speaks the same protocol. This one exists because
ours carries tensors for hours: py-libp2p 0.8.1 resets a stream whose reader pauses for 5
seconds, looks for a window every 10 ms, and cuts every full frame into two Noise messages.

Flow control: each stream may have `RECEIVE_WINDOW_BYTES` unread at the receiver, granted when
it opens and again after half of it was read. So the reader of the connection never waits
for a stream, nor a stream for another one. The protocol:
https://github.com/hashicorp/yamux/blob/master/spec.md
"""

from __future__ import annotations

import contextlib
import logging
import struct
from collections import deque
from collections.abc import Callable
from typing import Protocol

import trio

logger = logging.getLogger(__name__)

PROTOCOL_ID = "/yamux/1.0.0"

DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
HEADER = struct.Struct("!BBHII")
"""Version (0), kind, flags, stream id, length."""

INITIAL_WINDOW_BYTES = 256 << 10
"""What the protocol grants every new stream."""
RECEIVE_WINDOW_BYTES = 4 << 20
"""What we grant: at 100 ms it lets a stream carry 40 MB/s; a hostile peer makes us hold no more
than this for a stream."""
MAX_SEND_WINDOW_BYTES = 1 << 31
NOISE_PLAINTEXT_BYTES = 65_535 - 16
"""The most that one Noise message carries."""
MAX_PAYLOAD_BYTES = NOISE_PLAINTEXT_BYTES - HEADER.size
"""Of the frames that we send, so that one frame is one Noise message."""
MAX_INCOMING_STREAMS = 64
"""Open at once on a connection; more are reset."""
MAX_WAITING_CONTROL_FRAMES = 1024
"""Replies (pong, ack, reset) not yet written; a peer that provokes more is cut off."""
PING_INTERVAL_S = 10.0
PING_TIMEOUT_S = 30.0
"""A connection whose other end answers no ping for this long is dead."""


class YamuxError(Exception):
    """What arrived breaks the protocol."""


class StreamReset(Exception):
    """The stream is dead: reset by either side, or its connection ended."""


class SecureConnection(Protocol):
    """What yamux needs below it: a part of py-libp2p's `ISecureConn`."""

    async def read(self, n: int | None = None) -> bytes:
        """The next bytes, as many as there are; empty or an exception at the end."""

    async def write(self, data: bytes) -> None: ...


class Stream:
    """One duplex byte stream. One task may read while another writes."""

    def __init__(self, connection: Yamux, stream_id: int) -> None:
        self.connection = connection
        self.stream_id = stream_id
        self._chunks: deque[bytes] = deque()
        self._unread_bytes = 0
        self._is_dead = False
        self._received_end = False
        self._sent_end = False
        self._send_window = INITIAL_WINDOW_BYTES
        self._receive_window = RECEIVE_WINDOW_BYTES
        self._readable = trio.Event()
        self._writable = trio.Event()

    async def read(self, n: int | None = None) -> bytes:
        """The next 1 to `n` bytes (None: one chunk as it came), or b"" at the end. Raises
        `StreamReset`."""
        while not self._chunks:
            if self._received_end:
                return b""
            if self._is_dead:
                raise StreamReset(f"stream {self.stream_id} is dead")
            self._readable = trio.Event()
            await self._readable.wait()
        chunk = self._chunks.popleft()
        if n is not None and len(chunk) > n:
            self._chunks.appendleft(chunk[n:])
            chunk = chunk[:n]
        self._unread_bytes -= len(chunk)
        with contextlib.suppress(StreamReset):
            await self._grant()
        return chunk

    async def write(self, data: bytes) -> None:
        """Writes all of `data`; waits while the peer grants no window. Raises `StreamReset`."""
        view = memoryview(data)
        while len(view):
            while not self._send_window and not self._is_dead:
                self._writable = trio.Event()
                await self._writable.wait()
            if self._is_dead or self._sent_end:
                raise StreamReset(f"stream {self.stream_id} is closed")
            part = view[: min(self._send_window, MAX_PAYLOAD_BYTES)]
            self._send_window -= len(part)
            view = view[len(part) :]
            await self.connection.send(DATA, 0, self.stream_id, len(part), part)

    async def close(self) -> None:
        """Says that nothing more will be written; reading goes on. Idempotent."""
        if self._sent_end or self._is_dead:
            return
        await self.connection.send(WINDOW_UPDATE, FIN, self.stream_id, 0)
        self._sent_end = True
        self._forget_if_done()

    def reset(self) -> None:
        """Ends both directions at once and drops what was not read. Idempotent."""
        if not (self._is_dead or (self._sent_end and self._received_end)):
            self.connection.send_soon(WINDOW_UPDATE, RST, self.stream_id, 0)
        self.on_reset()

    def on_data(self, data: bytes) -> None:
        """Bytes of this stream arrived. Raises `YamuxError` where they exceed the window."""
        self._receive_window -= len(data)
        if self._receive_window < 0:
            raise YamuxError(f"more than the window on stream {self.stream_id}")
        if not self._is_dead and not self._received_end:
            self._chunks.append(data)
            self._unread_bytes += len(data)
            self._readable.set()

    def on_window(self, num_bytes: int) -> None:
        """The peer granted more."""
        self._send_window = min(self._send_window + num_bytes, MAX_SEND_WINDOW_BYTES)
        if self._send_window:
            self._writable.set()

    def on_end(self) -> None:
        """The peer will write nothing more."""
        self._received_end = True
        self._readable.set()
        self._forget_if_done()

    def on_reset(self) -> None:
        """The stream is dead; what was not read is dropped."""
        self._chunks.clear()
        self.on_connection_end()
        self.connection.forget(self)

    def on_connection_end(self) -> None:
        """The stream is dead; what arrived before can still be read."""
        self._is_dead = True
        self._readable.set()
        self._writable.set()

    async def _grant(self) -> None:
        grant = RECEIVE_WINDOW_BYTES - self._receive_window - self._unread_bytes
        if grant >= RECEIVE_WINDOW_BYTES // 2 and not (self._received_end or self._is_dead):
            self._receive_window += grant
            await self.connection.send(WINDOW_UPDATE, 0, self.stream_id, grant)

    def _forget_if_done(self) -> None:
        if self._sent_end and self._received_end:
            self.connection.forget(self)


class Yamux:
    """The streams of one connection. Nothing moves unless `run` runs."""

    def __init__(
        self, secure: SecureConnection, is_client: bool, abort: Callable[[], None]
    ) -> None:
        """`abort` closes the socket under `secure` at once, so that whoever waits on it wakes."""
        self.is_alive = True
        self.is_going_away = False
        """The peer takes no new streams, or is dead."""
        self._secure = secure
        self._abort = abort
        self._next_id = 1 if is_client else 2
        self._their_parity = 0 if is_client else 1
        self._streams: dict[int, Stream] = {}
        self._num_incoming = 0
        self._write_lock = trio.Lock()
        self._control_in, self._control_out = trio.open_memory_channel[bytes](
            MAX_WAITING_CONTROL_FRAMES
        )
        self._accept_in, self._accept_out = trio.open_memory_channel[Stream](MAX_INCOMING_STREAMS)
        self._last_pong_s = 0.0

    async def open_stream(self) -> Stream:
        """A new outgoing stream. Raises `StreamReset` where the connection is dead."""
        if self.is_going_away:
            raise StreamReset("the connection is closed")
        stream = Stream(self, self._next_id)
        self._next_id += 2
        self._streams[stream.stream_id] = stream
        extra = RECEIVE_WINDOW_BYTES - INITIAL_WINDOW_BYTES
        await self.send(WINDOW_UPDATE, SYN, stream.stream_id, extra)
        return stream

    async def accept_stream(self) -> Stream:
        """The next incoming stream. Raises `trio.EndOfChannel` when the connection ended."""
        return await self._accept_out.receive()

    async def run(self) -> None:
        """Moves bytes until the connection ends, breaks, or its peer breaks the protocol or falls
        silent; then the connection is closed and every stream is dead."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send_control)
                nursery.start_soon(self._ping)
                await self._receive()
                self.end()
                nursery.cancel_scope.cancel()
        finally:
            self.end()

    def end(self) -> None:
        """Closes the connection without a word. Idempotent."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.is_going_away = True
        self._abort()
        self._accept_in.close()
        self._control_in.close()
        for stream in self._streams.values():
            stream.on_connection_end()
        self._streams.clear()

    async def go_away(self) -> None:
        """Tells the peer that the connection is closed on purpose."""
        self.is_going_away = True
        with contextlib.suppress(StreamReset):
            await self.send(GO_AWAY, 0, 0, 0)

    async def send(
        self, kind: int, flags: int, stream_id: int, length: int, data: bytes | memoryview = b""
    ) -> None:
        """Writes one frame. Raises `StreamReset` where the connection is dead."""
        await self._write(b"".join((HEADER.pack(0, kind, flags, stream_id, length), data)))

    def send_soon(self, kind: int, flags: int, stream_id: int, length: int) -> None:
        """Queues one frame without data."""
        try:
            self._control_in.send_nowait(HEADER.pack(0, kind, flags, stream_id, length))
        except trio.WouldBlock:
            self.end()
        except trio.ClosedResourceError:
            pass

    def forget(self, stream: Stream) -> None:
        """Drops a stream that has ended in both directions."""
        if self._streams.pop(stream.stream_id, None) and self._is_theirs(stream.stream_id):
            self._num_incoming -= 1

    async def _write(self, frame: bytes) -> None:
        async with self._write_lock:
            if not self.is_alive:
                raise StreamReset("the connection is closed")
            try:
                # Half a frame would garble every stream: what was begun is finished, and a
                # connection that takes no more bytes is ended by `_ping`.
                with trio.CancelScope(shield=True):
                    await self._secure.write(frame)
            except Exception as e:
                self.end()
                raise StreamReset(f"the connection broke: {e}") from None
            if not self.is_alive:
                raise StreamReset("the connection is closed")

    async def _send_control(self) -> None:
        with contextlib.suppress(StreamReset):
            async for frame in self._control_out:
                await self._write(frame)

    async def _ping(self) -> None:
        self._last_pong_s = trio.current_time()
        nonce = 0
        while trio.current_time() - self._last_pong_s < PING_TIMEOUT_S:
            self.send_soon(PING, SYN, 0, nonce)
            nonce = (nonce + 1) % 2**32
            await trio.sleep(PING_INTERVAL_S)
        self.end()

    async def _receive(self) -> None:
        parser = _Parser(self)
        while self.is_alive:
            try:
                data = await self._secure.read()
                if not data:
                    return
                parser.feed(data)
            except YamuxError as e:
                logger.debug("yamux: the peer broke the protocol: %s", e)
                return
            except Exception as e:
                logger.debug("yamux: the connection broke: %s", e)
                return

    def on_frame(self, kind: int, flags: int, stream_id: int, length: int) -> Stream | None:
        """Handles a header; returns the stream that its `length` bytes of data are for. Raises
        `YamuxError`."""
        if kind == PING:
            self._on_ping(flags, length)
            return None
        if kind == GO_AWAY:
            self.is_going_away = True
            return None
        if kind not in (DATA, WINDOW_UPDATE):
            raise YamuxError(f"unknown kind of frame {kind}")
        if flags & SYN:
            self._on_syn(stream_id)
        stream = self._streams.get(stream_id)
        if stream and kind == WINDOW_UPDATE:
            stream.on_window(length)
        if stream and flags & RST:
            stream.on_reset()
        return stream

    def _on_ping(self, flags: int, nonce: int) -> None:
        if flags & SYN:
            self.send_soon(PING, ACK, 0, nonce)
        else:
            self._last_pong_s = trio.current_time()

    def _on_syn(self, stream_id: int) -> None:
        if not self._is_theirs(stream_id) or stream_id in self._streams:
            raise YamuxError(f"stream {stream_id} cannot be opened")
        if self._num_incoming >= MAX_INCOMING_STREAMS:
            self.send_soon(WINDOW_UPDATE, RST, stream_id, 0)
            return
        stream = self._streams[stream_id] = Stream(self, stream_id)
        self._num_incoming += 1
        self.send_soon(WINDOW_UPDATE, ACK, stream_id, RECEIVE_WINDOW_BYTES - INITIAL_WINDOW_BYTES)
        try:
            self._accept_in.send_nowait(stream)
        except (trio.WouldBlock, trio.ClosedResourceError):
            stream.reset()

    def _is_theirs(self, stream_id: int) -> bool:
        return stream_id > 0 and stream_id % 2 == self._their_parity


class _Parser:
    """Cuts what arrives into frames. Data goes to its stream in the parts in which it comes."""

    def __init__(self, connection: Yamux) -> None:
        self._connection = connection
        self._header = b""
        self._stream: Stream | None = None
        self._left = 0
        """Bytes of data still to come of the frame that has begun."""
        self._ends = False
        """The frame that has begun is the stream's last."""

    def feed(self, data: bytes) -> None:
        """Raises `YamuxError`."""
        position = 0
        while position < len(data):
            if self._left:
                part = data[position : position + self._left]
                position += len(part)
                self._left -= len(part)
                if self._stream:
                    self._stream.on_data(part)
            else:
                missing = HEADER.size - len(self._header)
                self._header += data[position : position + missing]
                position += missing
                if len(self._header) == HEADER.size:
                    self._begin(self._header)
                    self._header = b""
            if not self._left and self._ends:
                self._ends = False
                if self._stream:
                    self._stream.on_end()

    def _begin(self, header: bytes) -> None:
        version, kind, flags, stream_id, length = HEADER.unpack(header)
        if version:
            raise YamuxError(f"version {version}")
        if kind == DATA and length > RECEIVE_WINDOW_BYTES:
            raise YamuxError(f"a frame of {length} bytes")
        self._stream = self._connection.on_frame(kind, flags, stream_id, length)
        self._left = length if kind == DATA else 0
        self._ends = kind in (DATA, WINDOW_UPDATE) and bool(flags & FIN)
