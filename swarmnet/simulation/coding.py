"""The time that machines spend coding what they send, and decoding what they get.

A device that codes what crosses a boundary does not compute meanwhile: the harder case, since real
peers with cores to spare code beside the passes (`swarm.ports.Passage`). What belongs to an update
is coded on the averaging thread. How fast that goes is measured; a GPU is far faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swarmnet.protocol.codecs import BF16, INT4, INT6, INT8, NONE, TOPK, BoundaryCodec

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
    INT6: CodecSpeed(366 * MEGA, 391 * MEGA),
    INT4: CodecSpeed(390 * MEGA, 472 * MEGA),
    TOPK: CodecSpeed(356 * MEGA, 751 * MEGA),
}
"""Of one core of a shared Xeon: `python benchmarks/codecs.py`, of its three sizes the slowest. fp32
as it is takes no time."""


@dataclass(frozen=True, slots=True)
class PassCoding:
    """Seconds of coding in the passes of a microbatch through a stage."""

    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class Coding:
    """How fast the machines of a swarm code."""

    speeds: Mapping[str, CodecSpeed] = field(default_factory=lambda: MEASURED)
    """By codec, all but `none`."""
    factor: float = 1.0
    """So many times as fast as `speeds`; infinite where coding takes no time."""

    def encode_s(self, codec: str, num_values: int) -> float:
        """Seconds to code so many fp32 numbers. Raises `KeyError` for an unknown codec."""
        if codec == NONE:
            return 0.0
        return FP32_BYTES * num_values / (self.factor * self.speeds[codec].encode)

    def decode_s(self, codec: str, num_values: int) -> float:
        """Seconds to check and decode so many. Raises `KeyError` for an unknown codec."""
        if codec == NONE:
            return 0.0
        return FP32_BYTES * num_values / (self.factor * self.speeds[codec].decode)

    def passes(
        self, codec: BoundaryCodec, num_values: int, *, has_before: bool, has_after: bool
    ) -> PassCoding:
        """Of a stage with a stage before it or after it, whose boundaries have `num_values` numbers
        a microbatch: the activation comes in and goes out forward, its gradient backward."""
        forward_s = backward_s = 0.0
        if has_before:
            forward_s += self.decode_s(codec.activations, num_values)
            backward_s += self.encode_s(codec.gradients, num_values)
        if has_after:
            forward_s += self.encode_s(codec.activations, num_values)
            backward_s += self.decode_s(codec.gradients, num_values)
        return PassCoding(forward_s, backward_s)


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
