"""Messages between devices, on links that carry one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Way:
    """Of a message from a device to another one; seconds."""

    up_s: float = 0.0
    """That it occupies the uplink of the one."""
    down_s: float = 0.0
    """That it occupies the downlink of the other one."""
    latency_s: float = 0.0
    """That occupies no link."""


Ways: TypeAlias = Callable[[int, int, bool], Way]
"""`(from device, to device, is back)`: of a microbatch, forward or back."""


def nothing(source: int, target: int, is_back: bool) -> Way:
    """Devices that are next to each other."""
    return Way()


class Links:
    """Of some devices: an uplink and a downlink each. What comes first goes first, and a downlink
    receives while the uplink still sends."""

    def __init__(self, ways: Ways, num_devices: int) -> None:
        self._ways = ways
        self._up_free, self._down_free = [0.0] * num_devices, [0.0] * num_devices

    def arrives(self, source: int, target: int, is_back: bool, now: float) -> float:
        """When a message is there that may go from `now` on. To be asked in the order of time."""
        way = self._ways(source, target, is_back)
        begin = max(now, self._up_free[source])
        self._up_free[source] = begin + way.up_s
        received = max(begin + way.latency_s, self._down_free[target]) + way.down_s
        self._down_free[target] = received
        return max(begin + way.up_s + way.latency_s, received)
