"""Frames: how messages lie on a byte stream. Sans I/O; specified by `docs/protocol.md`.

A message is a head frame (msgpack: method, body, what arrays follow) and, for its arrays, part
frames of raw bytes. Parts of different messages interleave, so that a small message never waits
behind a tensor. The last frame of a message carries the END flag. A sender that gives a request up
in the middle says CANCEL, and no more parts of it follow.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import xxhash

from swarmnet.errors import ProtocolViolation
from swarmnet.wire import (
    MAX_ARRAYS,
    MAX_BODY_BYTES,
    Array,
    Packed,
    array_bytes,
    pack,
    unpack_plain,
)

MAGIC = b"sw"
FRAME_VERSION = 1
HEADER = struct.Struct("<2sBBIIII")
"""Magic, frame version, kind, call id, head bytes, payload bytes, checksum."""
CHECKED = struct.Struct("<2sBBIII")
"""The same without the checksum."""
CHECKSUM = struct.Struct("<I")
CHECKED_BYTES = CHECKED.size

HELLO, REQUEST, REPLY, ERROR, PROGRESS, NOTIFY, REQUEST_PART, REPLY_PART, CANCEL = range(1, 10)
END = 0x80
KINDS = range(HELLO, CANCEL + 1)
CALLS = (REQUEST, NOTIFY)
ANSWERS = (REPLY, ERROR, PROGRESS)
SHORT = (HELLO, CANCEL)
"""Kinds whose heads are short, and may come before anything is known of the peer."""
PARTS_OF = {REQUEST: REQUEST_PART, REPLY: REPLY_PART}
"""Kinds that may carry arrays, and the kind of the parts that do."""
PARTS = tuple(PARTS_OF.values())

PART_BYTES = 512 << 10
"""Payload of a part at most."""
BACKGROUND_PART_BYTES = 64 << 10
"""The same of a message in the background: what is urgent waits behind one of them."""
MAX_SHORT_BYTES = 8 << 10
"""Of the head of a message of a short kind."""
MAX_ENVELOPE_BYTES = 16 << 10
"""Of the head of a request or a notification, its body not counted."""
MAX_MESSAGE_BYTES = 1 << 30
"""Bytes of all arrays of a message."""
MAX_RECEIVING_BYTES = 4 << 30
"""Array bytes of one direction of a stream that are announced and have not come."""
DIRECT_BYTES = 16 << 10
"""Payload from which on the stream is read straight into an array."""
BUFFER_BYTES = 16 << 10
"""Read at a time while no array is being filled: a head, a header, and little of the payload behind
them, which has to be copied to its array."""


def frame_header(
    kind: int, call_id: int, head: Any, payload: Any = b"", *, is_sealed: bool = False
) -> bytes:
    """The header of a frame; head or payload follows it on the stream. `is_sealed`: the stream
    guards the payload itself."""
    checked = CHECKED.pack(MAGIC, FRAME_VERSION, kind, call_id, len(head), len(payload))
    return checked + CHECKSUM.pack(_checksum(checked, head or (b"" if is_sealed else payload)))


def head_frame(
    kind: int, call_id: int, head: dict[str, Any], arrays: tuple[Array, ...] = ()
) -> bytes:
    """The whole first frame of a message. Raises `ProtocolViolation` where it cannot travel:
    what the receiver would not take must fail here, where the mistake is."""
    num_bytes = check_arrays(kind, arrays)
    described = [(a.dtype, a.shape) for a in arrays]
    try:
        packed = pack({**head, "a": described} if described else head)
    except (TypeError, ValueError, OverflowError, RecursionError) as e:
        raise ProtocolViolation(f"a body that cannot travel: {str(e)[:100]}") from None
    if len(packed) > MAX_BODY_BYTES:
        raise ProtocolViolation(f"a body of {len(packed)} bytes; at most {MAX_BODY_BYTES}")
    return frame_header(kind | (0 if num_bytes else END), call_id, packed) + packed


def check_arrays(kind: int, arrays: tuple[Array, ...]) -> int:
    """Bytes of the arrays. Raises `ProtocolViolation` where they may not travel with this kind."""
    if arrays and kind not in PARTS_OF:
        raise ProtocolViolation("arrays travel with requests and replies only")
    if len(arrays) > MAX_ARRAYS:
        raise ProtocolViolation(f"{len(arrays)} arrays; at most {MAX_ARRAYS}")
    total = 0
    for array in arrays:
        view = memoryview(array.data)
        if view.nbytes != array.num_bytes or not view.c_contiguous:
            raise ProtocolViolation(
                f"an array of {array.num_bytes} bytes has {view.nbytes}, or they lie scattered"
            )
        total += view.nbytes
    if total > MAX_MESSAGE_BYTES:
        raise ProtocolViolation(f"arrays of {total} bytes; at most {MAX_MESSAGE_BYTES}")
    return total


def part_frames(
    kind: int,
    call_id: int,
    arrays: tuple[Array, ...],
    allocate: Callable[[int], memoryview] | None = None,
    part_bytes: int = PART_BYTES,
) -> Iterator[memoryview]:
    """Each part as one whole frame, in order. A part never reaches beyond one array.

    Each payload is copied when its turn comes: the stream may write it later than its owner
    changes the array, and then bytes and checksum would differ. The copy lies behind its header,
    so that a part is one write, and needs no TLS record for the header alone. `allocate`: gives
    memory of a size that is nobody else's for as long as the frame is; fresh where left out.
    """
    take = allocate or _fresh
    for flagged, data in _cut(kind, arrays, part_bytes):
        frame = take(HEADER.size + len(data))
        payload = frame[HEADER.size :]
        payload[:] = data
        frame[: HEADER.size] = frame_header(flagged, call_id, b"", payload)
        yield frame


def sealed_part_frames(
    kind: int, call_id: int, arrays: tuple[Array, ...], part_bytes: int = PART_BYTES
) -> Iterator[tuple[bytes, memoryview]]:
    """The same for a stream that is encrypted by this process, as header and payload. TLS takes
    the bytes when they are written, whatever becomes of the array later: none is copied. (A peer
    can delay that, by half a TLS message of its own; what it spoils is sent to itself.) And TLS
    finds every changed bit, so that the checksum is of the header alone."""
    for flagged, payload in _cut(kind, arrays, part_bytes):
        yield frame_header(flagged, call_id, b"", payload, is_sealed=True), payload


def _cut(kind: int, arrays: tuple[Array, ...], part_bytes: int) -> Iterator[tuple[int, memoryview]]:
    """The payload of each part, as a view, and its kind with its flag."""
    left = sum(a.num_bytes for a in arrays)
    for array in arrays:
        if not array.num_bytes:
            continue  # a view of no bytes cannot be cast
        data = memoryview(array.data)
        data = data if data.format == "B" and data.ndim == 1 else data.cast("B")
        for start in range(0, len(data), part_bytes):
            payload = data[start : start + part_bytes]
            left -= len(payload)
            yield kind | (0 if left else END), payload


def _fresh(num_bytes: int) -> memoryview:
    return memoryview(bytearray(num_bytes))


def _checksum(checked: bytes, content: Any) -> int:
    """The low 32 bits of xxh3-64 over a header without its checksum and what follows it."""
    digest = xxhash.xxh3_64(checked)
    digest.update(content)
    return int(digest.intdigest() & 0xFFFFFFFF)


@dataclass(slots=True)
class Head:
    """The first frame of a message, parsed."""

    kind: int
    call_id: int
    values: dict[str, Any]
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    """Dtype and shape of each array that follows."""
    array_bytes: int
    """Of all of them."""


_UNWANTED = memoryview(bytearray(PART_BYTES))
"""What nobody wants is read into it, from all streams: its bytes mean nothing."""


class Assembly:
    """A message whose parts are still coming."""

    def __init__(
        self, head: Head, allocate: Callable[[int], memoryview] | None, books: str = ""
    ) -> None:
        """`allocate`: gives memory of a size; None: nobody wants the arrays, and they are read
        past. `books`: what its bytes are counted under."""
        self.head = head
        self.books = books
        self.left_bytes = head.array_bytes
        self.is_wanted = allocate is not None
        sizes = [array_bytes(dtype, shape) for dtype, shape in head.arrays]
        self._left = [size for size in sizes if size]
        self._memory = [] if allocate is None else [allocate(size) for size in sizes]
        self._targets = [m for m in self._memory if len(m)]

    def discard(self) -> None:
        """Nobody wants the arrays any more: gives their memory up."""
        self.is_wanted = False
        self._memory = []
        self._targets = []

    def take(self, num_bytes: int) -> memoryview:
        """Where the next `num_bytes` of payload belong."""
        if not self._left or not 0 < num_bytes <= self._left[0]:
            raise ProtocolViolation("a part beyond the arrays that were declared")
        self.left_bytes -= num_bytes
        self._left[0] -= num_bytes
        target = _UNWANTED
        if self.is_wanted:
            target, self._targets[0] = self._targets[0], self._targets[0][num_bytes:]
        if not self._left[0]:
            del self._left[:1], self._targets[:1]
        return target[:num_bytes]

    def arrays(self) -> tuple[Array, ...]:
        """What has arrived."""
        pairs = zip(self.head.arrays, self._memory)
        return tuple(Array(dtype, shape, memory) for (dtype, shape), memory in pairs)


class Sink(Protocol):
    """Who hears of frames. Every method may raise `ProtocolViolation`."""

    def opening(self, kind: int, head_bytes: int) -> None:
        """The first frame of a message comes: nothing is kept of its head yet."""

    def head(self, head: Head, num_bytes: int) -> None:
        """The first frame of a message, of `num_bytes` on the stream."""

    def assembly(self, kind: int, call_id: int) -> Assembly:
        """The message that a part belongs to."""

    def part(self, kind: int, call_id: int, payload_bytes: int, is_end: bool) -> None:
        """A part has arrived and its checksum is right."""


class Reader:
    """Bytes in, frames out. Raises `ProtocolViolation` at the first wrong byte.

    To be driven like an `asyncio.BufferedProtocol`: large payloads are received where they belong.
    """

    def __init__(self, sink: Sink, *, is_sealed: bool = False) -> None:
        """`is_sealed`: payloads have no checksum, see `sealed_part_frames`."""
        self._sink = sink
        self._is_sealed = is_sealed
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._filled = 0
        self._target: memoryview | None = None
        self._target_filled = 0
        self._is_wanted = True
        """Whether anyone looks at what the target takes."""
        self._header: tuple[int, int, int, int] | None = None
        self._header_bytes = b""

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
        start, filled = 0, self._filled
        while True:
            target = self._target
            if target is not None:
                at = self._target_filled
                n = min(filled - start, len(target) - at)
                target[at : at + n] = self._buffer[start : start + n]
                self._target_filled = at + n
                start += n
                if at + n < len(target):
                    break
                self._end_payload()
            elif filled - start >= HEADER.size:
                self._begin(bytes(self._buffer[start : start + HEADER.size]))
                start += HEADER.size
            else:
                break
        rest = filled - start
        if start and rest:
            self._buffer[:rest] = bytes(self._buffer[start:filled])
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
        if head_bytes > MAX_BODY_BYTES or payload_bytes > PART_BYTES:
            raise ProtocolViolation("a frame that is too long")
        if kind in SHORT and head_bytes > MAX_SHORT_BYTES:
            raise ProtocolViolation("a frame that is too long")
        if (kind in PARTS) == bool(head_bytes) or (kind in PARTS) != bool(payload_bytes):
            raise ProtocolViolation("a frame with the wrong parts")
        self._header = (flagged, call_id, head_bytes, payload_bytes)
        self._header_bytes = raw
        if payload_bytes:
            assembly = self._sink.assembly(kind, call_id)
            self._target = assembly.take(payload_bytes)
            self._is_wanted = assembly.is_wanted
        else:
            self._sink.opening(kind, head_bytes)
            self._target = memoryview(bytearray(head_bytes))
            self._is_wanted = True
        self._target_filled = 0

    def _end_payload(self) -> None:
        """Head or payload is complete: checks it and tells."""
        assert self._header is not None
        assert self._target is not None
        flagged, call_id, head_bytes, payload_bytes = self._header
        raw = self._header_bytes
        target, self._target, self._header = self._target, None, None
        content = b"" if payload_bytes and self._is_sealed else target
        checksum = int.from_bytes(raw[CHECKED_BYTES:], "little")
        if self._is_wanted and _checksum(raw[:CHECKED_BYTES], content) != checksum:
            raise ProtocolViolation("a wrong checksum")
        kind, is_end = flagged & ~END, bool(flagged & END)
        if payload_bytes:
            self._sink.part(kind, call_id, payload_bytes, is_end)
        else:
            head = parse_head(kind, call_id, target)
            if is_end == bool(head.array_bytes):
                raise ProtocolViolation("a message that ends too early or not at all")
            self._sink.head(head, HEADER.size + head_bytes)


class _Call(msgspec.Struct):
    """The head of a request or a notification, with its larger parts left as they came."""

    m: Any = None
    b: msgspec.Raw = msgspec.Raw()
    s: Any = None
    a: msgspec.Raw = msgspec.Raw()


def _values_of_call(packed: Any) -> dict[str, Any]:
    """The body stays packed: whether the caller may say it is seen first."""
    try:
        call = msgspec.msgpack.decode(packed, type=_Call)
    except msgspec.ValidationError:
        raise ProtocolViolation("a head that is no map") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise ProtocolViolation(f"not msgpack: {str(e)[:100]}") from None
    body, described = bytes(call.b), bytes(call.a)
    if len(packed) - len(body) > MAX_ENVELOPE_BYTES:
        raise ProtocolViolation("a request with more than a body and arrays")
    said = {
        "m": call.m,
        "b": Packed(body) if body else None,
        "s": call.s,
        "a": unpack_plain(described) if described else None,
    }
    return {key: value for key, value in said.items() if value is not None}


def parse_head(kind: int, call_id: int, packed: Any) -> Head:
    """Checks the msgpack of a head frame. Raises `ProtocolViolation`."""
    values = _values_of_call(packed) if kind in CALLS else unpack_plain(packed)
    if not isinstance(values, dict):
        raise ProtocolViolation("a head that is no map")
    described = values.pop("a", [])
    if not isinstance(described, list) or len(described) > MAX_ARRAYS:
        raise ProtocolViolation("too many arrays")
    if described and kind not in PARTS_OF:
        raise ProtocolViolation("arrays where none may be")
    arrays, total = [], 0
    for entry in described:
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list)):
            raise ProtocolViolation("an array without dtype and shape")
        dtype, shape = entry[0] if isinstance(entry[0], str) else "", tuple(entry[1])
        total += array_bytes(dtype, shape)
        if any(n > MAX_MESSAGE_BYTES for n in shape):  # beside a 0, a size could be anything
            raise ProtocolViolation("an impossible shape")
        arrays.append((dtype, shape))
    if total > MAX_MESSAGE_BYTES:
        raise ProtocolViolation(f"arrays of {total} bytes; at most {MAX_MESSAGE_BYTES}")
    return Head(kind, call_id, values, tuple(arrays), total)
