"""Frames, messages and calls on a stream, by the words of `docs/protocol.md`.

It is as strict as a receiver must be: what "breaks the protocol" raises here."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgpack
import numpy as np
import trio
import xxhash

HEADER = struct.Struct("<2sBBIII")
HEADER_BYTES = 20
MAGIC, FRAME_VERSION, END = b"sw", 1, 0x80
HELLO, REQUEST, REPLY, ERROR, PROGRESS, NOTIFY, REQUEST_PART, REPLY_PART, CANCEL = range(1, 10)
PARTS = {REQUEST: REQUEST_PART, REPLY: REPLY_PART}
MAX_HEAD_BYTES, MAX_PART_BYTES = 4_194_304, 524_288
VERSION = 4
CALL_S = 30.0
"""Far more than an answer takes on this machine."""
DTYPES = {
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "float64": "<f8",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "uint16": "<u2",
    "int8": "<i1",
    "uint8": "<u1",
}
"""Of numpy, which has no bfloat16: two bytes a number."""
NAMES = {np.dtype(theirs): name for name, theirs in DTYPES.items() if name != "bfloat16"}


class Broken(Exception):
    """The other side breaks the protocol."""


class Answered(Exception):
    """The answer is an error."""

    def __init__(self, code: str, text: str, details: dict[str, Any]) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.details = details


class Stream(Protocol):
    """Bytes to and from an authenticated peer."""

    remote: str
    """Its peer id."""

    async def write(self, data: bytes) -> None: ...

    async def read_some(self) -> bytes:
        """What has come, at least a byte. Raises an exception at the end."""


@dataclass
class Message:
    """A head, and the arrays that follow it."""

    kind: int
    call_id: int
    head: dict[str, Any]
    arrays: list[np.ndarray] = field(default_factory=list)

    @property
    def body(self) -> Any:
        return self.head.get("b")


def frame(
    kind: int,
    call_id: int,
    head: bytes,
    payload: bytes,
    *,
    is_end: bool,
    is_direct: bool = False,
) -> bytes:
    packed = HEADER.pack(
        MAGIC, FRAME_VERSION, kind | (END if is_end else 0), call_id, len(head), len(payload)
    )
    summed = packed + head + (b"" if is_direct else payload)
    checksum = xxhash.xxh3_64_intdigest(summed) & 0xFFFFFFFF
    return packed + struct.pack("<I", checksum) + head + payload


def frames(
    kind: int, call_id: int, head: dict[str, Any], *arrays: np.ndarray, is_direct: bool = False
) -> bytes:
    """A whole message."""
    if arrays:
        head = {**head, "a": [[NAMES[a.dtype], list(a.shape)] for a in arrays]}
    data = [np.ascontiguousarray(a).tobytes() for a in arrays]
    packed = msgpack.packb(head)
    if not sum(map(len, data)):
        return frame(kind, call_id, packed, b"", is_end=True)
    cut = [d[at : at + MAX_PART_BYTES] for d in data for at in range(0, len(d), MAX_PART_BYTES)]
    parts = [
        frame(PARTS[kind], call_id, b"", part, is_end=i == len(cut) - 1, is_direct=is_direct)
        for i, part in enumerate(cut)
    ]
    return b"".join([frame(kind, call_id, packed, b"", is_end=False), *parts])


@dataclass
class Coming:
    """A message whose arrays are on their way."""

    message: Message
    about: list[tuple[str, tuple[int, ...]]]
    sizes: list[int]
    """Bytes of each array."""
    data: bytearray = field(default_factory=bytearray)

    def add(self, payload: bytes, *, is_end: bool) -> bool:
        """True where that was the last part."""
        ends = np.cumsum(self.sizes).tolist()
        reached = next(end for end in ends if end > len(self.data))
        if len(self.data) + len(payload) > reached:
            raise Broken("a part that reaches from one array into the next")
        self.data += payload
        if is_end != (len(self.data) == ends[-1]):
            raise Broken("END too early, or missing")
        return is_end

    def whole(self) -> Message:
        at = 0
        for (dtype, shape), size in zip(self.about, self.sizes, strict=True):
            values = np.frombuffer(bytes(self.data[at : at + size]), DTYPES[dtype])
            self.message.arrays.append(values.reshape(shape))
            at += size
        return self.message


class Reader:
    """Messages out of bytes."""

    def __init__(self, *, is_direct: bool = False) -> None:
        """`is_direct`: of a direct connection, where the checksum of a part is of its header."""
        self._is_direct = is_direct
        self._bytes = b""
        self._coming: dict[tuple[int, int], Coming] = {}

    def feed(self, data: bytes) -> list[Message]:
        """The messages that these bytes complete. Raises `Broken`."""
        self._bytes += data
        done = []
        while len(self._bytes) >= HEADER_BYTES:
            magic, version, kind, call_id, head_bytes, payload_bytes = HEADER.unpack_from(
                self._bytes
            )
            kind, is_end = kind & 0x7F, bool(kind & END)
            if (magic, version) != (MAGIC, FRAME_VERSION) or not HELLO <= kind <= CANCEL:
                raise Broken("no frame of ours")
            is_part = kind in PARTS.values()
            if not (0 if is_part else 1) <= head_bytes <= (0 if is_part else MAX_HEAD_BYTES):
                raise Broken("a head of an impossible length")
            if not (1 if is_part else 0) <= payload_bytes <= (MAX_PART_BYTES if is_part else 0):
                raise Broken("a payload of an impossible length")
            if (kind in (HELLO, NOTIFY)) != (call_id == 0):
                raise Broken("a call id where there must be none, or none")
            length = HEADER_BYTES + head_bytes + payload_bytes
            if len(self._bytes) < length:
                break
            whole, self._bytes = self._bytes[:length], self._bytes[length:]
            (checksum,) = struct.unpack_from("<I", whole, 16)
            summed = whole[:16] + (b"" if is_part and self._is_direct else whole[HEADER_BYTES:])
            if xxhash.xxh3_64_intdigest(summed) & 0xFFFFFFFF != checksum:
                raise Broken("a wrong checksum")
            message = self._take(kind, call_id, whole[HEADER_BYTES:], is_part, is_end)
            if message is not None:
                done.append(message)
        return done

    def _take(
        self, kind: int, call_id: int, content: bytes, is_part: bool, is_end: bool
    ) -> Message | None:
        if is_part:
            coming = self._coming.get((kind, call_id))
            if coming is None:
                raise Broken("a part of no message")
            if not coming.add(content, is_end=is_end):
                return None
            return self._coming.pop((kind, call_id)).whole()
        head = msgpack.unpackb(content, strict_map_key=False)
        if not isinstance(head, dict):
            raise Broken("a head that is no map")
        about = [(dtype, tuple(shape)) for dtype, shape in head.get("a", [])]
        if about and kind not in PARTS:
            raise Broken("arrays where there are none")
        sizes = [int(np.prod(shape)) * np.dtype(DTYPES[dtype]).itemsize for dtype, shape in about]
        coming = Coming(Message(kind, call_id, head), about, sizes)
        if is_end != (sum(sizes) == 0):
            raise Broken("END in a head that arrays follow, or none where none follow")
        if is_end:
            return coming.whole()
        self._coming[PARTS[kind], call_id] = coming
        return None


@dataclass
class Call:
    """One that waits for its answer."""

    ended: trio.Event = field(default_factory=trio.Event)
    answer: Message | None = None
    progress: list[Any] = field(default_factory=list)


class Channel:
    """Calls to the peer at the other end. Of what that one calls here, `ping` is answered."""

    def __init__(self, stream: Stream, *, is_direct: bool = False) -> None:
        self.remote = stream.remote
        self._is_direct = is_direct
        self.hello: dict[str, Any] = {}
        """The other's newest one."""
        self.noted: list[Message] = []
        """Notifications that have come."""
        self._stream = stream
        self._writing = trio.Lock()
        self._calls: dict[int, Call] = {}
        self._num_calls = 0
        self._has_greeted = trio.Event()

    async def say_hello(self, run_id: str = "") -> None:
        """At first, and whenever the run that it belongs to is another."""
        head = {"v": VERSION, "l": VERSION, "h": VERSION, "f": ["of-no-meaning"], "r": run_id}
        await self._write(frames(HELLO, 0, {**head, "g": "conformance test"}))
        with trio.fail_after(CALL_S):
            await self._has_greeted.wait()

    async def call(
        self, method: str, body: Any = None, *arrays: np.ndarray, seat: int = 0
    ) -> Message:
        """The reply. Raises `Answered`. `seat`: of the callee."""
        self._num_calls += 1
        call_id, call = self._num_calls, Call()
        self._calls[call_id] = call
        head = {"m": method, "b": body} | ({"s": [0, seat]} if seat else {})
        await self._write(frames(REQUEST, call_id, head, *arrays, is_direct=self._is_direct))
        with trio.fail_after(CALL_S):
            await call.ended.wait()
        answer = self._calls.pop(call_id).answer
        assert answer is not None
        if answer.kind == ERROR:
            code, text, details = answer.head["e"]
            raise Answered(code, text, details)
        return answer

    async def error(
        self, method: str, body: Any = None, *arrays: np.ndarray, seat: int = 0
    ) -> Answered:
        """The error that a call is answered with."""
        try:
            answer = await self.call(method, body, *arrays, seat=seat)
        except Answered as e:
            return e
        raise AssertionError(f"{method} was answered: {answer}")

    async def refused(
        self, method: str, body: Any = None, *arrays: np.ndarray, seat: int = 0
    ) -> str:
        """Its code."""
        return (await self.error(method, body, *arrays, seat=seat)).code

    async def begin_and_give_up(self, method: str, body: Any, array: np.ndarray) -> None:
        """Sends a part of the array, and no more of it."""
        self._num_calls += 1
        head = {"m": method, "b": body, "a": [[NAMES[array.dtype], list(array.shape)]]}
        part = array.tobytes()[:1000]
        await self._write(
            frame(REQUEST, self._num_calls, msgpack.packb(head), b"", is_end=False)
            + frame(REQUEST_PART, self._num_calls, b"", part, is_end=False)
            + frame(CANCEL, self._num_calls, msgpack.packb({}), b"", is_end=True)
        )

    async def notify(self, method: str, body: Any) -> None:
        await self._write(frames(NOTIFY, 0, {"m": method, "b": body}))

    async def read(self) -> None:
        """Takes what comes, until cancelled."""
        reader = Reader(is_direct=self._is_direct)
        while True:
            for message in reader.feed(await self._stream.read_some()):
                await self._take(message)

    async def _take(self, message: Message) -> None:
        if message.kind == HELLO:
            self._check_hello(message.head)
            self.hello = message.head
            self._has_greeted.set()
        elif not self.hello:
            raise Broken("a message before HELLO")
        elif message.kind == NOTIFY:
            self.noted.append(message)
        elif message.kind == REQUEST:
            reply = ["unsupported", "a test client", {}]
            is_ping = message.head["m"] == "ping"
            kind, head = (REPLY, {"b": None}) if is_ping else (ERROR, {"e": reply})
            await self._write(frames(kind, message.call_id, head))
        elif message.kind in (REPLY, ERROR, PROGRESS):
            self._answer(message)

    def _answer(self, message: Message) -> None:
        if not 1 <= message.call_id <= self._num_calls:
            raise Broken("an answer to no call")
        call = self._calls.get(message.call_id)
        if call is None:
            return
        if message.kind == PROGRESS:
            call.progress.append(message.body)
            return
        call.answer = message
        call.ended.set()

    @staticmethod
    def _check_hello(head: dict[str, Any]) -> None:
        low, high = head.get("l", head["v"]), head.get("h", head["v"])
        if not 1 <= low <= head["v"] <= high <= 65_535 or not low <= VERSION <= high:
            raise Broken(f"versions {low} to {high}")
        if not isinstance(head["r"], str) or len(head["r"]) > 500:
            raise Broken("a run id that is none")

    async def _write(self, data: bytes) -> None:
        async with self._writing:
            await self._stream.write(data)


@asynccontextmanager
async def opened(
    stream: Stream, run_id: str = "", *, is_direct: bool = False
) -> AsyncIterator[Channel]:
    """A channel on which both sides have said hello."""
    channel = Channel(stream, is_direct=is_direct)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(channel.read)
        await channel.say_hello(run_id)
        try:
            yield channel
        finally:
            nursery.cancel_scope.cancel()
