"""The upload bandwidth of this peer, from what its links drained while they had more to send. Pure.

Only *saturated* links tell the bandwidth: a link that had nothing left to send was as fast as its
sender. The rate of all links together is measured over the time in which at least one was
saturated, because they share an uplink. The published rate is rounded (`STEPS` to a doubling) and
changes only when the measured rate has moved well away from it: placement weighs owners by it, and
shards must not move because of noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarmnet.protocol.timing import UPKEEP_S

SAMPLE_S = 0.25
"""A sample covers at least this much saturated time. It protects the rate from single writes, and
tells that a slow link is slow (tests/protocol/test_bandwidth.py)..."""
SAMPLE_BYTES = 4 << 20
"""...or this number of bytes."""
SMOOTHING_BYTES = 64 << 20
"""Bytes after which an older measurement has lost two thirds of its weight."""
ENOUGH_BYTES = 16 << 20
"""Bytes measured before a rate is published."""
STEPS = 4
"""Steps to a doubling of the published rate."""
MOVE_LOG2 = 0.5
"""By how many powers of two the rate must differ from the published one to be published anew."""


@dataclass(slots=True)
class Rate:
    """A moving average of bytes per second, weighted by bytes."""

    bytes_per_s: float = 0.0
    seen_bytes: int = 0
    _num_bytes: int = 0
    _seconds: float = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        """Takes in that `num_bytes` took `seconds` of saturated time."""
        self._num_bytes += num_bytes
        self._seconds += seconds
        if self._seconds <= 0 or not self._num_bytes:
            return  # time without bytes counts with the next bytes
        if self._seconds < SAMPLE_S and self._num_bytes < SAMPLE_BYTES:
            return
        sample = self._num_bytes / self._seconds
        self.seen_bytes += self._num_bytes
        weight = -math.expm1(-self._num_bytes / SMOOTHING_BYTES)
        if self.seen_bytes < SMOOTHING_BYTES:  # while little is known, a plain average
            weight = max(weight, self._num_bytes / self.seen_bytes)
        self.bytes_per_s += weight * (sample - self.bytes_per_s)
        self._num_bytes = 0
        self._seconds = 0.0


class UploadMeter:
    """The upload rates of one peer's links, and of all together."""

    def __init__(self) -> None:
        self.total = Rate()
        self._links: dict[str, Rate] = {}
        self._saturated: dict[object, tuple[str, float]] = {}
        self._since_s = 0.0
        self._published = 0.0
        self._published_at_s = -math.inf
        self._limit = math.inf

    @property
    def known_bytes_per_s(self) -> float:
        """The rate of all links together; 0 while too little was measured. A short message, or one
        slow reader, says nothing of the uplink."""
        known = self.total.seen_bytes >= ENOUGH_BYTES and self.total.bytes_per_s >= 1
        return self.total.bytes_per_s if known else 0.0

    def limit(self, bytes_per_s: float | None) -> None:
        """Sets or (None) removes a limit on the upload; the published rate follows at once."""
        self._limit = math.inf if bytes_per_s is None else bytes_per_s
        self._published = 0.0
        self._published_at_s = -math.inf

    def began(self, link: object, peer_id: str, now: float) -> None:
        """A link is saturated now: it has more to send than it takes."""
        if not self._saturated:
            self._since_s = now
        self._saturated[link] = (peer_id, now)

    def drained(self, link: object, num_bytes: int, now: float, *, ended: bool) -> None:
        """A saturated link has taken bytes; `ended`: it has nothing left to send."""
        if link not in self._saturated:
            return
        peer_id, since_s = self._saturated[link]
        self._links.setdefault(peer_id, Rate()).add(num_bytes, max(0.0, now - since_s))
        self.total.add(num_bytes, max(0.0, now - self._since_s))
        self._since_s = now
        if ended:
            del self._saturated[link]
        else:
            self._saturated[link] = (peer_id, now)

    def link_bytes_per_s(self, peer_id: str) -> float:
        """The recent rate of a link to a peer; 0 where unknown."""
        rate = self._links.get(peer_id)
        return 0.0 if rate is None else rate.bytes_per_s

    def forget(self, peer_id: str) -> None:
        """A peer is gone."""
        self._links.pop(peer_id, None)

    def published(self, now: float) -> float:
        """The rate for the record, bytes/s, rounded; 0 while too little was measured."""
        rate = min(self.known_bytes_per_s or math.inf, self._limit)
        if rate == math.inf:
            return self._published
        exact = math.log2(rate)
        moved = not self._published or abs(exact - math.log2(self._published)) > MOVE_LOG2
        if moved and now - self._published_at_s >= UPKEEP_S:
            self._published = 2.0 ** (round(exact * STEPS) / STEPS)
            self._published_at_s = now
        return self._published
