"""Frames: what is written is read, however it is cut; what is not a frame is refused."""

from __future__ import annotations

import array as arrays
import math
import random
import struct
from pathlib import Path

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import ProtocolViolation
from swarmnet.transport.frames import (
    CANCEL,
    END,
    HEADER,
    HELLO,
    MAX_MESSAGE_BYTES,
    NOTIFY,
    PART_BYTES,
    PARTS_OF,
    PROGRESS,
    REPLY,
    REQUEST,
    REQUEST_PART,
    Assembly,
    Head,
    Reader,
    head_frame,
    part_frames,
    sealed_part_frames,
)
from swarmnet.wire import ITEM_BYTES, MAX_ARRAYS, MAX_BODY_BYTES, Array, Packed, are_same, pack


class Messages:
    """A sink that collects whole messages."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int, dict[str, object], list[bytes]]] = []
        self.described: list[list[tuple[str, tuple[int, ...]]]] = []
        self.num_bytes = 0
        self._assemblies: dict[tuple[int, int], Assembly] = {}

    def head(self, head: Head, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.described.append(list(head.arrays))
        if head.array_bytes:
            take = lambda n: memoryview(bytearray(n))  # noqa: E731
            self._assemblies[PARTS_OF[head.kind], head.call_id] = Assembly(head, take)
        else:
            self.done.append((head.kind, head.call_id, head.values, [b"" for _ in head.arrays]))

    def opening(self, kind: int, head_bytes: int) -> None:
        pass

    def assembly(self, kind: int, call_id: int) -> Assembly:
        if (kind, call_id) not in self._assemblies:
            raise ProtocolViolation("a part of nothing")
        return self._assemblies[kind, call_id]

    def part(self, kind: int, call_id: int, payload_bytes: int, is_end: bool) -> None:
        self.num_bytes += HEADER.size + payload_bytes
        assembly = self._assemblies[kind, call_id]
        assert is_end == (assembly.left_bytes == 0)
        if is_end:
            del self._assemblies[kind, call_id]
            arrays = [bytes(a.data) for a in assembly.arrays()]
            self.done.append((assembly.head.kind, call_id, assembly.head.values, arrays))


def array(num_bytes: int, seed: int = 0) -> Array:
    return Array("uint8", (num_bytes,), random.Random(seed).randbytes(num_bytes))


def message(kind: int, call_id: int, body: object, arrays: tuple[Array, ...] = ()) -> bytes:
    data = head_frame(kind, call_id, {"m": "x", "b": body}, arrays)
    if any(a.num_bytes for a in arrays):
        data += b"".join(part_frames(PARTS_OF[kind], call_id, arrays))
    return data


def raw_frame(kind: int, call_id: int, head: bytes = b"", payload: bytes = b"") -> bytes:
    """As docs/protocol.md says it, not as the code does it."""
    checked = struct.pack("<2sBBIII", b"sw", 1, kind, call_id, len(head), len(payload))
    checksum = xxhash.xxh3_64_intdigest(checked + head + payload) & 0xFFFFFFFF
    return checked + struct.pack("<I", checksum) + head + payload


def read(data: bytes, cuts: list[int] | None = None, *, is_sealed: bool = False) -> Messages:
    sink = Messages()
    reader = Reader(sink, is_sealed=is_sealed)
    at = 0
    for size in cuts or []:
        reader.feed_bytes(data[at : at + size])
        at += size
    reader.feed_bytes(data[at:])
    return sink


def test_a_frame_is_as_specified() -> None:
    assert head_frame(NOTIFY, 7, {"m": "x"}) == raw_frame(
        NOTIFY | END, 7, msgpack.packb({"m": "x"})
    )
    part, *rest = part_frames(REQUEST_PART, 7, (array(3),))
    assert not rest
    assert part == raw_frame(REQUEST_PART | END, 7, b"", array(3).data)


def test_a_part_on_a_sealed_stream_has_a_checksum_of_its_header_alone() -> None:
    checked = struct.pack("<2sBBIII", b"sw", 1, REQUEST_PART | END, 7, 0, 3)
    checksum = struct.pack("<I", xxhash.xxh3_64_intdigest(checked) & 0xFFFFFFFF)
    ((header, payload),) = sealed_part_frames(REQUEST_PART, 7, (array(3),))
    assert header == checked + checksum
    assert payload == array(3).data
    head = head_frame(REQUEST, 7, {}, (array(3),))
    sealed, open_ = (
        head + header + bytes(payload),
        head + raw_frame(REQUEST_PART | END, 7, b"", array(3).data),
    )
    assert read(sealed, is_sealed=True).done[0][3] == [array(3).data]
    assert read(open_).done[0][3] == [array(3).data]
    for data, is_sealed in ((sealed, False), (open_, True)):
        with pytest.raises(ProtocolViolation, match="checksum"):
            read(data, is_sealed=is_sealed)
    damaged = bytearray(sealed)
    damaged[len(head)] ^= 1
    with pytest.raises(ProtocolViolation):
        read(bytes(damaged), is_sealed=True)


@given(
    sizes=st.lists(st.sampled_from([0, 1, 7, 5000, PART_BYTES, PART_BYTES + 1]), max_size=4),
    cuts=st.lists(st.integers(1, 40_000), max_size=40),
)
def test_messages_survive_any_cutting(sizes: list[int], cuts: list[int]) -> None:
    arrays = tuple(array(n, seed=i) for i, n in enumerate(sizes))
    data = (
        message(HELLO, 0, None) + message(REQUEST, 1, [1, "é"], arrays) + message(REPLY, 2, b"\0")
    )
    sink = read(data, cuts)
    assert [m[0] for m in sink.done] == [HELLO, REQUEST, REPLY]
    values = {"m": "x", "b": Packed(pack([1, "é"]))}
    assert sink.done[1] == (REQUEST, 1, values, [bytes(a.data) for a in arrays])
    assert sink.num_bytes == len(data)


def test_parts_of_several_messages_interleave() -> None:
    one, other = (array(PART_BYTES + 5, 1),), (array(2 * PART_BYTES, 2),)
    heads = head_frame(REQUEST, 1, {}, one) + head_frame(REPLY, 1, {}, other)
    first, last = (
        [bytes(p) for p in part_frames(PARTS_OF[kind], 1, arrays)]
        for kind, arrays in ((REQUEST, one), (REPLY, other))
    )
    data = heads + last[0] + first[0] + message(NOTIFY, 0, 3) + last[1] + first[1]
    sink = read(data)
    assert [m[0] for m in sink.done] == [NOTIFY, REPLY, REQUEST]
    assert sink.done[1][3] == [bytes(other[0].data)]
    assert sink.done[2][3] == [bytes(one[0].data)]


SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 70]), max_size=4).map(tuple)


@given(st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), SHAPES), max_size=5))
def test_every_dtype_and_shape_travels(described: list[tuple[str, tuple[int, ...]]]) -> None:
    """Scalars, and arrays without an element, included."""
    sizes = [ITEM_BYTES[dtype] * math.prod(shape) for dtype, shape in described]
    arrays = tuple(
        Array(dtype, shape, random.Random(n).randbytes(n))
        for (dtype, shape), n in zip(described, sizes, strict=True)
    )
    sink = read(message(REQUEST, 1, None, arrays))
    assert sink.described == [described]
    assert sink.done[0][3] == [a.data for a in arrays]


def test_arrays_of_any_layout_that_is_contiguous_travel() -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    sent = Array("float32", (2, 3, 4), values)
    assert read(message(REQUEST, 1, None, (sent,))).done[0][3] == [values.tobytes()]


@given(st.binary(max_size=400), st.lists(st.integers(1, 50), max_size=10))
def test_random_bytes_are_refused_or_waited_for(data: bytes, cuts: list[int]) -> None:
    sink = Messages()
    try:
        sink = read(data, cuts)
    except ProtocolViolation:
        pass
    assert sink.done == []


@given(data=st.data())
def test_a_flipped_bit_or_a_cut_never_gives_another_message(data: st.DataObject) -> None:
    good = message(REQUEST, 1, {"k": [1, 2, 3]}, (array(100),)) + message(NOTIFY, 0, "n")
    whole = read(good).done
    broken = bytearray(good[: data.draw(st.integers(0, len(good)))])
    if broken and data.draw(st.booleans()):
        broken[data.draw(st.integers(0, len(broken) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    sink = Messages()
    reader = Reader(sink)
    try:
        reader.feed_bytes(bytes(broken))
    except ProtocolViolation:
        pass
    assert sink.done == whole[: len(sink.done)]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
    lambda v: (
        st.lists(v, max_size=5) | st.dictionaries(st.text() | st.integers(0, 9), v, max_size=5)
    ),
    max_leaves=12,
)


@given(
    kind=st.integers(0, 255),
    call_id=st.integers(0, 2**32 - 1),
    head=VALUES | st.fixed_dictionaries({"m": VALUES, "b": VALUES, "a": VALUES}),
    payload=st.sampled_from([b"", b"x"]),
)
def test_a_right_checksum_over_wrong_content_raises_nothing_else(
    kind: int, call_id: int, head: object, payload: bytes
) -> None:
    """Hostile frames are either messages or violations; no other exception escapes."""
    try:
        read(raw_frame(kind, call_id, msgpack.packb(head), payload))
    except ProtocolViolation:
        pass


def arrays_head(*described: object) -> bytes:
    return msgpack.packb({"m": "x", "a": list(described)})


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n", "not a swarmnet frame"),
        (HEADER.pack(b"sw", 2, NOTIFY | END, 0, 1, 0, 0), "version 2"),
        (HEADER.pack(b"sw", 1, 0 | END, 0, 1, 0, 0), "unknown kind 0"),
        (HEADER.pack(b"sw", 1, (CANCEL + 1) | END, 0, 1, 0, 0), "unknown kind"),
        (HEADER.pack(b"sw", 1, NOTIFY | END, 0, MAX_BODY_BYTES + 1, 0, 0), "too long"),
        (HEADER.pack(b"sw", 1, REQUEST_PART, 0, 0, PART_BYTES + 1, 0), "too long"),
        (HEADER.pack(b"sw", 1, NOTIFY | END, 0, 0, 0, 0), "wrong parts"),
        (HEADER.pack(b"sw", 1, NOTIFY | END, 0, 1, 1, 0), "wrong parts"),
        (HEADER.pack(b"sw", 1, REQUEST_PART, 0, 1, 1, 0), "wrong parts"),
        (HEADER.pack(b"sw", 1, REQUEST_PART, 0, 0, 0, 0), "wrong parts"),
        (raw_frame(REQUEST_PART | END, 1, b"", b"x"), "part of nothing"),
        (raw_frame(NOTIFY | END, 0, b"\xc1"), "not msgpack"),
        (raw_frame(NOTIFY | END, 0, b"\x81"), "not msgpack"),
        (raw_frame(NOTIFY | END, 0, b"\x91" * 2000), "no map"),
        (raw_frame(NOTIFY | END, 0, msgpack.packb([1])), "no map"),
        (raw_frame(NOTIFY, 0, msgpack.packb({})), "ends too early or not at all"),
        (raw_frame(REQUEST | END, 1, arrays_head(["uint8", [1]])), "ends too early"),
        (raw_frame(REQUEST, 1, arrays_head(["uint8", [0]])), "not at all"),
        (raw_frame(NOTIFY, 1, arrays_head(["uint8", [1]])), "arrays where none"),
        (raw_frame(PROGRESS, 1, arrays_head(["uint8", [1]])), "arrays where none"),
        (raw_frame(REQUEST, 1, arrays_head(*[["uint8", [1]]] * (MAX_ARRAYS + 1))), "too many"),
        (raw_frame(REQUEST, 1, arrays_head(["complex64", [1]])), "unknown dtype"),
        (raw_frame(REQUEST, 1, arrays_head([["uint8"], [1]])), "unknown dtype"),
        (raw_frame(REQUEST, 1, arrays_head(["uint8", [-1]])), "impossible shape"),
        (raw_frame(REQUEST, 1, arrays_head(["uint8", [True]])), "impossible shape"),
        (raw_frame(REQUEST, 1, arrays_head(["uint8", [1.5]])), "impossible shape"),
        (raw_frame(REQUEST, 1, arrays_head(["uint8", [1] * 9])), "impossible shape"),
        (raw_frame(REQUEST | END, 1, arrays_head(["uint8", [0, 2**63]])), "impossible shape"),
        (
            raw_frame(REQUEST, 1, arrays_head(["uint8", [MAX_MESSAGE_BYTES + 1]])),
            "arrays? of|shape",
        ),
        (raw_frame(REQUEST, 1, arrays_head(*[["uint8", [2**30]]] * 2)), "at most"),
        (raw_frame(REQUEST, 1, arrays_head(["uint8"])), "without dtype and shape"),
        (raw_frame(REQUEST, 1, arrays_head(7)), "without dtype and shape"),
    ],
)
def test_what_breaks_the_protocol_is_named(data: bytes, reason: str) -> None:
    with pytest.raises(ProtocolViolation, match=reason):
        read(data)


def test_parts_must_fit_the_arrays_that_were_declared() -> None:
    head = head_frame(REQUEST, 1, {}, (array(10), array(10)))
    with pytest.raises(ProtocolViolation, match="beyond the arrays"):
        read(head + raw_frame(REQUEST_PART, 1, b"", bytes(11)))
    with pytest.raises(ProtocolViolation, match="part of nothing"):
        read(head + raw_frame(REQUEST_PART, 2, b"", bytes(10)))


@pytest.mark.parametrize(
    ("kind", "body", "arrays"),
    [
        (REQUEST, bytes(MAX_BODY_BYTES), ()),
        (REQUEST, object(), ()),
        (REQUEST, 2**70, ()),
        (REQUEST, None, (array(1),) * (MAX_ARRAYS + 1)),
        (REQUEST, None, (Array("uint8", (5,), b"1234"),)),
        (REQUEST, None, (Array("float32", (2,), np.arange(4, dtype=np.float32)[::2]),)),
        (REQUEST, None, (Array("complex64", (1,), bytes(8)),)),
        (NOTIFY, None, (array(1),)),
        (PROGRESS, None, (array(1),)),
    ],
)
def test_what_the_receiver_would_refuse_fails_at_the_sender(
    kind: int, body: object, arrays: tuple[Array, ...]
) -> None:
    with pytest.raises(ProtocolViolation):
        head_frame(kind, 1, {"b": body}, arrays)


def test_a_message_that_nobody_wants_is_read_past() -> None:
    head = Head(REPLY, 1, {}, (("uint8", (PART_BYTES,)), ("uint8", (10,))), PART_BYTES + 10)
    assembly = Assembly(head, None)
    assert len(assembly.take(PART_BYTES)) == PART_BYTES
    assert len(assembly.take(10)) == 10
    assert assembly.left_bytes == 0
    with pytest.raises(ProtocolViolation):
        assembly.take(1)


def test_the_example_in_the_specification() -> None:
    example = "73 77 01 86 00 00 00 00 05 00 00 00 00 00 00 00 67 06 57 b7   81 a1 6d a1 78"
    assert head_frame(NOTIFY, 0, {"m": "x"}) == bytes.fromhex(example)
    assert example in (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


@given(a=st.binary(max_size=40), b=st.binary(max_size=40), at=st.integers(0, 39))
def test_buffers_are_compared_by_their_bytes(a: bytes, b: bytes, at: int) -> None:
    changed = bytes(x ^ (n == at) for n, x in enumerate(a))
    for other in (b, changed, bytearray(a)):
        assert are_same(a, other) == (a == other)
    numbers = arrays.array("f", [math.nan, 1.0])
    assert are_same(numbers, memoryview(arrays.array("f", numbers))), "whatever they stand for"
