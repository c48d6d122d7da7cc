"""The upload bandwidth of this peer, from what its links drained while they had more to send. Pure.

Only *saturated* links tell the bandwidth: a link that had nothing left to send was as fast as its
sender. The rate of all links together is measured over the time in which at least one was
saturated, because they share an uplink. A link that takes far less than its share is held up by
whoever reads at its other end: what waits for that one does not wait for the uplink, and its time
is not that of the others. The published rate is rounded (`STEPS` to a doubling) and changes only
when the measured rate has moved well away from it: placement weighs owners by it, and shards must
not move because of noise.
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
SHARES_OF_SLOW = 8
"""A link that takes less than one in so many of its share of the uplink waits for its reader. Links
that the uplink holds up differ by their round trips, and by less than that
(tests/protocol/test_bandwidth.py)."""
MOST_UNTOLD_BYTES = 512 << 10
"""A saturated link tells of what it has taken at the latest after so many bytes."""
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


@dataclass(slots=True)
class Saturated:
    """A link that has more to send than it takes."""

    since: float
    """When it told last what it has taken."""
    is_slow: bool = False
    """By what it told last, its reader holds it up."""


class UploadMeter:
    """The upload rates of one peer's links, and of all together."""

    def __init__(self) -> None:
        self.total = Rate()
        self._saturated: dict[object, Saturated] = {}
        self._counted_until = -math.inf
        """Saturated time before that is in the rate of all links."""
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

    def began(self, link: object, now: float) -> None:
        """A link is saturated now: it has more to send than it takes."""
        self._saturated[link] = Saturated(now)

    def drained(self, link: object, num_bytes: int, now: float, *, ended: bool) -> None:
        """A saturated link has taken bytes; `ended`: it has nothing left to send."""
        told = self._saturated.get(link)
        if told is None:
            return
        seconds = max(0.0, now - told.since)
        told.is_slow = self._takes_little(num_bytes, seconds)
        at_work = [x.since for x in self._saturated.values() if not self._is_slow(x, now)]
        if not told.is_slow:
            since = max(min(at_work, default=told.since), self._counted_until)
            self.total.add(num_bytes, max(0.0, now - since))
            self._counted_until = now
        elif num_bytes and not at_work:  # it may be that the uplink is slower than it was
            self.total.add(num_bytes, seconds)
        told.since = now
        if ended:
            del self._saturated[link]

    def is_slow(self, link: object, now: float) -> bool:
        """Whether a link waits for its reader, and not for the uplink: it takes far less than its
        share."""
        told = self._saturated.get(link)
        return told is not None and self._is_slow(told, now)

    def _is_slow(self, told: Saturated, now: float) -> bool:
        return told.is_slow or self._takes_little(MOST_UNTOLD_BYTES, now - told.since)

    def _takes_little(self, num_bytes: int, seconds: float) -> bool:
        """Whether so many bytes in that time are far less than a share. Nothing is known of a short
        time, nor where the uplink is not measured."""
        if seconds < SAMPLE_S:
            return False
        num_shares = max(1, sum(not x.is_slow for x in self._saturated.values()))
        return num_bytes * SHARES_OF_SLOW * num_shares < self.known_bytes_per_s * seconds

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
