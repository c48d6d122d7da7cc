"""What travels: a msgpack body, typed and bounded, and arrays as raw bytes beside it.

Bodies are frozen dataclasses. `pack` turns one into msgpack, `unpack` checks everything that
arrives against the dataclass (types, lengths, unknown values) and raises `ProtocolViolation`.
Never pickle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgpack
import msgspec

from swarmnet.errors import ProtocolViolation

MAX_BODY_BYTES = 4 << 20
MAX_ARRAYS = 64
MAX_DIMENSIONS = 8
ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "uint16": 2,
    "int8": 1,
    "uint8": 1,
}

T = TypeVar("T")
BodyT = TypeVar("BodyT")


@dataclass(frozen=True, slots=True)
class Array:
    """An n-dimensional array as it travels: C order, little endian.

    `data` is any C-contiguous buffer of exactly `num_bytes` bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Any

    @property
    def num_bytes(self) -> int:
        return array_bytes(self.dtype, self.shape)


def are_same(a: Any, b: Any) -> bool:
    """Whether two buffers hold the same bytes. A memoryview compares item by item: eight bytes at a
    time, it takes an eighth of the time."""
    a, b = memoryview(a).cast("B"), memoryview(b).cast("B")
    whole = len(a) & ~7
    if len(a) != len(b) or a[whole:] != b[whole:]:
        return False
    return bool(a[:whole].cast("Q") == b[:whole].cast("Q"))


@dataclass(frozen=True, slots=True)
class Packed:
    """A body as it came: msgpack into which nobody has looked yet."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Message(Generic[BodyT]):
    """`body`: a dataclass or plain msgpack values. `arrays`: travel as raw bytes."""

    body: BodyT = None  # type: ignore[assignment]
    arrays: tuple[Array, ...] = ()
    is_background: bool = False
    """Nobody's work waits for it: it takes what other messages leave of the sender's uplink. Said
    to the own transport; it does not travel."""


def array_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array; raises `ProtocolViolation` for a dtype or shape that cannot be."""
    if dtype not in ITEM_BYTES:
        raise ProtocolViolation(f"unknown dtype {str(dtype)[:32]!r}")
    if len(shape) == 1 and type(shape[0]) is int and shape[0] >= 0:
        return ITEM_BYTES[dtype] * shape[0]  # nearly all of them
    if len(shape) > MAX_DIMENSIONS:
        raise ProtocolViolation(f"impossible shape {str(shape)[:64]}")
    for n in shape:
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise ProtocolViolation(f"impossible shape {str(shape)[:64]}")
    return ITEM_BYTES[dtype] * math.prod(shape)


def pack(body: Any) -> bytes:
    """msgpack of a dataclass or of plain values."""
    return msgpack.packb(
        msgspec.to_builtins(body, builtin_types=(bytes, bytearray)), use_bin_type=True
    )


def unpack_plain(data: Any) -> Any:
    """msgpack to plain values, bounded."""
    if len(data) > MAX_BODY_BYTES:
        raise ProtocolViolation(f"a body of {len(data)} bytes; at most {MAX_BODY_BYTES}")
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as e:
        raise ProtocolViolation(f"not msgpack: {str(e)[:100]}") from None


def convert(value: Any, cls: type[T]) -> T:
    """Plain values, or a packed body, to `cls`, everything checked. A `cls` (of a local call)
    passes as it is."""
    if type(value) is cls:
        return value
    if type(value) is Packed:
        return unpack(value.data, cls)
    try:
        return msgspec.convert(value, cls, builtin_types=(bytes, bytearray))
    except (msgspec.ValidationError, ValueError, TypeError, OverflowError) as e:
        raise ProtocolViolation(f"not a {cls.__name__}: {str(e)[:200]}") from None


def unpack(data: Any, cls: type[T]) -> T:
    """msgpack to `cls`, everything checked. Nothing is built of what does not belong to it: a
    million nested lists are no million objects."""
    try:
        if len(data) > MAX_BODY_BYTES:
            raise ProtocolViolation(f"a body of {len(data)} bytes; at most {MAX_BODY_BYTES}")
        return msgspec.msgpack.decode(data, type=cls)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as e:
        is_malformed = type(e) in (msgspec.DecodeError, RecursionError)
        wanted = "msgpack" if is_malformed else f"a {cls.__name__}"
        raise ProtocolViolation(f"not {wanted}: {str(e)[:200]}") from None
