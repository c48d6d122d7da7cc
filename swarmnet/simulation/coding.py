"""The time that machines spend coding what they send, and decoding what they get.

What crosses a boundary is coded beside the device, by a thread of its own, or by the device itself,
as its kind says (`training/device.py`). What belongs to an update is coded on the worker thread.
How fast one core codes is measured; how fast a GPU does is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swarmnet.protocol.codecs import (
    BF16,
    INT4,
    INT6,
    INT7,
    INT8,
    NONE,
    TOPK,
    BoundaryCodec,
    leaves_out,
)

MEGA = 1e6
FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """Bytes of fp32 in a second."""

    encode: float
    decode: float
    """With the checks of what arrives."""


MEASURED = {
    BF16: CodecSpeed(3449 * MEGA, 2150 * MEGA),
    INT8: CodecSpeed(1236 * MEGA, 1104 * MEGA),
    INT7: CodecSpeed(383 * MEGA, 382 * MEGA),
    INT6: CodecSpeed(383 * MEGA, 339 * MEGA),
    INT4: CodecSpeed(400 * MEGA, 390 * MEGA),
    TOPK: CodecSpeed(208 * MEGA, 238 * MEGA),
}
"""Of one core of a shared Xeon: `python benchmarks/codecs.py`, of its three sizes the slowest;
`topk` by how much slower than `int8` it was when it kept a quarter. The codecs were measured in
several runs: benchmarks/results/codecs.md has one more of them, and one of another machine. fp32 as
it is takes no time."""


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """How the peers of one kind of device code what crosses a boundary."""

    codes_beside: bool
    """On a thread beside the device, which computes meanwhile; else the device codes."""
    factor: float
    """So many times as fast as `MEASURED`."""


CPU, GPU = "cpu", "gpu"
DEVICE_KINDS = {
    CPU: DeviceKind(codes_beside=True, factor=1.0),
    GPU: DeviceKind(codes_beside=False, factor=50.0),
}
"""A GPU runs the codecs' kernels between those of the passes. Its factor is assumed, for kernels
that are fused: its memory is as much faster than that of a core, or more. Before they were fused,
an H200 was 7 times as fast with `int8` and 10 times with `int4` (benchmarks/results/gpu.md)."""


@dataclass(frozen=True, slots=True)
class PassCoding:
    """Seconds of coding for one pass of a microbatch."""

    arrive_s: float = 0.0
    """To check and decode what comes, before the pass."""
    depart_s: float = 0.0
    """To code what goes, after it."""

    @property
    def total_s(self) -> float:
        return self.arrive_s + self.depart_s


NO_CODING = PassCoding()


@dataclass(frozen=True, slots=True)
class Coding:
    """How fast the machines of a swarm code."""

    speeds: Mapping[str, CodecSpeed] = field(default_factory=lambda: MEASURED)
    """By codec, all but `none`."""
    factor: float = 1.0
    """So many times as fast as `speeds`; infinite where coding takes no time."""
    is_beside: bool = DEVICE_KINDS[CPU].codes_beside
    """What crosses a boundary is coded beside the device, and not by it."""

    def _speed(self, codec: str) -> CodecSpeed:
        return self.speeds[TOPK if leaves_out(codec) else codec]

    def encode_s(self, codec: str, num_values: int) -> float:
        """Seconds to code so many fp32 numbers. Raises `KeyError` for an unknown codec."""
        if codec == NONE:
            return 0.0
        return FP32_BYTES * num_values / (self.factor * self._speed(codec).encode)

    def decode_s(self, codec: str, num_values: int) -> float:
        """Seconds to check and decode so many. Raises `KeyError` for an unknown codec."""
        if codec == NONE:
            return 0.0
        return FP32_BYTES * num_values / (self.factor * self._speed(codec).decode)

    def forward(
        self, codec: BoundaryCodec, num_values: int, *, has_before: bool, has_after: bool
    ) -> PassCoding:
        """Of a forward pass in a stage with a stage before it or after it, whose boundaries have
        `num_values` numbers a microbatch. The last stage computes the loss and goes back at once:
        its activation's gradient is what goes."""
        goes_on = self.encode_s(codec.activations, num_values)
        goes_back = self.encode_s(codec.gradients, num_values) if has_before else 0.0
        return PassCoding(
            self.decode_s(codec.activations, num_values) if has_before else 0.0,
            goes_on if has_after else goes_back,
        )

    def backward(
        self, codec: BoundaryCodec, num_values: int, *, has_before: bool, has_after: bool
    ) -> PassCoding:
        """Of a backward pass, likewise. There is none of its own in the last stage."""
        if not has_after:
            return NO_CODING
        return PassCoding(
            self.decode_s(codec.gradients, num_values),
            self.encode_s(codec.gradients, num_values) if has_before else 0.0,
        )


class CodingTime:
    """Seconds that a thread has coded and that have not passed yet."""

    def __init__(self, coding: Coding) -> None:
        self._coding = coding
        self._seconds = 0.0

    def encoded(self, codec: str, num_values: int) -> None:
        """So many fp32 numbers were coded."""
        self._seconds += self._coding.encode_s(codec, num_values)

    def decoded(self, codec: str, num_values: int) -> None:
        """So many were decoded."""
        self._seconds += self._coding.decode_s(codec, num_values)

    def take(self) -> float:
        """All since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
