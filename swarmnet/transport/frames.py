"""Frames: how messages lie on a byte stream. Sans I/O; `docs/protocol.md` specifies it byte by byte.

A message is a head frame (msgpack: method, body, what arrays follow) and, for its arrays, part
frames of raw bytes. Parts of different messages interleave, so that a small message never waits
behind a tensor. The last frame of a message carries the END flag.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import xxhash

from swarmnet.errors import ProtocolViolation
from swarmnet.wire import MAX_ARRAYS, MAX_BODY_BYTES, Array, array_bytes, pack, unpack_plain

MAGIC = b"sw"
FRAME_VERSION = 1
HEADER = struct.Struct("<2sBBIIII")
"""Magic, frame version, kind, call id, head bytes, payload bytes, checksum."""
CHECKED_BYTES = HEADER.size - 4

HELLO, REQUEST, REPLY, ERROR, PROGRESS, NOTIFY, REQUEST_PART, REPLY_PART = range(1, 9)
END = 0x80
KINDS = range(HELLO, REPLY_PART + 1)
PARTS = (REQUEST_PART, REPLY_PART)

PART_BYTES = 256 << 10
"""Payload of a part at most."""
MAX_HEAD_BYTES = MAX_BODY_BYTES + (64 << 10)
MAX_MESSAGE_BYTES = 1 << 30
"""Bytes of all arrays of a message."""
DIRECT_BYTES = 16 << 10
"""Payload from which on the stream is read straight into an array."""
BUFFER_BYTES = 128 << 10


def frame(kind: int, call_id: int, head: bytes, payload: Any = b"") -> bytes:
    """The header of a frame; head and payload follow it on the stream."""
    checked = HEADER.pack(MAGIC, FRAME_VERSION, kind, call_id, len(head), len(payload), 0)
    digest = xxhash.xxh3_64(checked[:CHECKED_BYTES])
    digest.update(head)
    digest.update(payload)
    return checked[:CHECKED_BYTES] + struct.pack("<I", digest.intdigest() & 0xFFFFFFFF)


def head_frame(kind: int, call_id: int, head: dict[str, Any], arrays: tuple[Array, ...]) -> bytes:
    """The whole first frame of a message. Raises `ProtocolViolation` where the body is too long."""
    described = [(a.dtype, a.shape) for a in arrays]
    packed = pack({**head, "a": described} if described else head)
    if len(packed) > MAX_HEAD_BYTES:
        raise ProtocolViolation(f"a body of {len(packed)} bytes; at most {MAX_BODY_BYTES}")
    flag = 0 if any(a.num_bytes for a in arrays) else END
    return frame(kind | flag, call_id, packed) + packed


def part_frames(
    kind: int, call_id: int, arrays: tuple[Array, ...]
) -> Iterator[tuple[bytes, memoryview]]:
    """Header and payload of each part, in order. A part never reaches beyond one array."""
    left = sum(a.num_bytes for a in arrays)
    for array in arrays:
        data = memoryview(array.data)
        data = data if data.format == "B" and data.ndim == 1 else data.cast("B")
        for start in range(0, len(data), PART_BYTES):
            payload = data[start : start + PART_BYTES]
            left -= len(payload)
            flag = END if left == 0 else 0
            yield frame(kind | flag, call_id, b"", payload), payload


@dataclass(slots=True)
class Head:
    """The first frame of a message, parsed."""

    kind: int
    call_id: int
    values: dict[str, Any]
    arrays: tuple[Array, ...]
    """With memory for what the parts will bring."""


class Assembly:
    """A message whose parts are still coming."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self._left = [memoryview(a.data) for a in head.arrays if a.num_bytes]
        self.left_bytes = sum(len(m) for m in self._left)

    def take(self, num_bytes: int) -> memoryview:
        """Where the next `num_bytes` of payload belong."""
        if not self._left or num_bytes == 0 or num_bytes > len(self._left[0]):
            raise ProtocolViolation("a part beyond the arrays that were declared")
        target = self._left[0][:num_bytes]
        self._left[0] = self._left[0][num_bytes:]
        if not self._left[0]:
            self._left.pop(0)
        self.left_bytes -= num_bytes
        return target


class Sink(Protocol):
    """Who hears of frames."""

    def head(self, head: Head) -> None:
        """The first frame of a message; its arrays, if any, are still empty."""

    def assembly(self, kind: int, call_id: int) -> Assembly:
        """The message that a part belongs to. Raises `ProtocolViolation`."""

    def part(self, kind: int, call_id: int, num_bytes: int, is_end: bool) -> None:
        """A part has arrived and its checksum is right."""

    def received(self, call_id: int, kind: int, num_bytes: int) -> None:
        """For the books: a frame of so many bytes."""


class Reader:
    """Bytes in, frames out. Raises `ProtocolViolation` at the first wrong byte.

    To be driven like an `asyncio.BufferedProtocol`: large payloads are received where they belong.
    """

    def __init__(self, sink: Sink, max_receiving_bytes: int = 4 << 30) -> None:
        self._sink = sink
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._filled = 0
        self._target: memoryview | None = None
        self._target_filled = 0
        self._header: tuple[int, int, int, int] | None = None
        self._header_bytes = b""
        self._max_receiving_bytes = max_receiving_bytes

    def get_buffer(self) -> memoryview:
        """Memory for what comes next."""
        if self._target is not None and len(self._target) - self._target_filled >= DIRECT_BYTES:
            return self._target[self._target_filled :]
        return self._buffer[self._filled :]

    def feed(self, num_bytes: int) -> None:
        """So many bytes were written into the last `get_buffer()`."""
        if self._target is not None and len(self._target) - self._target_filled >= DIRECT_BYTES:
            self._target_filled += num_bytes
            if self._target_filled == len(self._target):
                self._end_payload()
            return
        self._filled += num_bytes
        self._parse()

    def feed_bytes(self, data: bytes) -> None:
        """Takes bytes that were read already."""
        view = memoryview(data)
        while view:
            target = self.get_buffer()
            n = min(len(target), len(view))
            target[:n] = view[:n]
            self.feed(n)
            view = view[n:]

    def _parse(self) -> None:
        start = 0
        while True:
            if self._target is not None:
                n = min(self._filled - start, len(self._target) - self._target_filled)
                end = self._target_filled + n
                self._target[self._target_filled : end] = self._buffer[start : start + n]
                self._target_filled = end
                start += n
                if end < len(self._target):
                    break
                self._end_payload()
            elif self._header is None:
                if self._filled - start < HEADER.size:
                    break
                self._begin(bytes(self._buffer[start : start + HEADER.size]))
                start += HEADER.size
            else:
                break
        rest = self._filled - start
        if start and rest:
            self._buffer[:rest] = bytes(self._buffer[start : self._filled])
        self._filled = rest

    def _begin(self, raw: bytes) -> None:
        """A header has arrived: says where its head or payload goes."""
        magic, version, flagged, call_id, head_bytes, payload_bytes, _ = HEADER.unpack(raw)
        kind = flagged & ~END
        if magic != MAGIC:
            raise ProtocolViolation("not a swarmnet frame")
        if version != FRAME_VERSION:
            raise ProtocolViolation(f"frames of version {version}; this side knows {FRAME_VERSION}")
        if kind not in KINDS:
            raise ProtocolViolation(f"a frame of unknown kind {kind}")
        if head_bytes > MAX_HEAD_BYTES or payload_bytes > PART_BYTES:
            raise ProtocolViolation("a frame that is too long")
        if (kind in PARTS) == bool(head_bytes) or (kind in PARTS) != bool(payload_bytes):
            raise ProtocolViolation("a frame with the wrong parts")
        self._header = (flagged, call_id, head_bytes, payload_bytes)
        self._header_bytes = raw
        if payload_bytes:
            self._target = self._sink.assembly(kind, call_id).take(payload_bytes)
        else:
            self._target = memoryview(bytearray(head_bytes))
        self._target_filled = 0

    def _end_payload(self) -> None:
        """Head or payload is complete: checks it and tells."""
        assert self._header is not None
        assert self._target is not None
        flagged, call_id, head_bytes, payload_bytes = self._header
        target, self._target, self._header = self._target, None, None
        digest = xxhash.xxh3_64(self._header_bytes[:CHECKED_BYTES])
        digest.update(target)
        if digest.intdigest() & 0xFFFFFFFF != struct.unpack("<I", self._header_bytes[-4:])[0]:
            raise ProtocolViolation("a wrong checksum")
        kind, is_end = flagged & ~END, bool(flagged & END)
        self._sink.received(call_id, kind, HEADER.size + head_bytes + payload_bytes)
        if payload_bytes:
            self._sink.part(kind, call_id, payload_bytes, is_end)
        else:
            head = parse_head(kind, call_id, target)
            if is_end == any(a.num_bytes for a in head.arrays):
                raise ProtocolViolation("a message that ends too early or not at all")
            self._sink.head(head)


def parse_head(kind: int, call_id: int, packed: memoryview) -> Head:
    """Checks a head frame's msgpack; makes room for the arrays that it declares."""
    values = unpack_plain(packed)
    if not isinstance(values, dict):
        raise ProtocolViolation("a head that is no map")
    described = values.pop("a", [])
    if not isinstance(described, list) or len(described) > MAX_ARRAYS:
        raise ProtocolViolation("too many arrays")
    shapes = []
    for entry in described:
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list)):
            raise ProtocolViolation("an array without dtype and shape")
        shapes.append((entry[0] if isinstance(entry[0], str) else "", tuple(entry[1])))
    total = sum(array_bytes(dtype, shape) for dtype, shape in shapes)
    if total > MAX_MESSAGE_BYTES:
        raise ProtocolViolation(f"arrays of {total} bytes; at most {MAX_MESSAGE_BYTES}")
    if shapes and kind not in (REQUEST, REPLY):
        raise ProtocolViolation("arrays where none may be")
    # numpy leaves the memory as it is: it is about to be written over.
    arrays = tuple(
        Array(dtype, shape, memoryview(np.empty(array_bytes(dtype, shape), dtype=np.uint8)))
        for dtype, shape in shapes
    )
    return Head(kind, call_id, values, arrays)
