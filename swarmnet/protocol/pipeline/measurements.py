"""Measurements of a replica's own work: for its record, for windows and deadlines, for users."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnet.protocol.histogram import Histogram
from swarmnet.protocol.pipeline.routing import DEADLINE_FACTOR
from swarmnet.protocol.pipeline.service_time import ServiceTime
from swarmnet.protocol.timing import PATIENCE_S

PIECES = 2
"""Parts of the device's work on a microbatch: a forward and a backward
(tests/protocol/pipeline/test_measurements.py)."""


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Seconds of the parts of one round at one replica."""

    open_s: float
    settling_s: float
    averaging_s: float
    opening_s: float
    """From the end of the update until the next round is known to the others."""


class Measurements:
    """Times of microbatches, rounds and exchanges of one replica. Times of day are of the loop's
    clock, in seconds."""

    def __init__(self) -> None:
        self.service = ServiceTime()
        self.services = Histogram()
        """Device seconds of a microbatch, one value for each forward and each backward."""
        self.rounds = Histogram()
        """Seconds of rounds, from opening to opening."""
        self.exchanges = Histogram()
        """Seconds of exchanges."""
        self.sent_bytes = 0
        """Size of the arrays that the newest microbatch made this replica send."""
        self.open_s = 0.0
        """Seconds that the last round was open here; 0 before the first one has ended."""
        self._opened_at = 0.0
        self._closed_at = self._settled_at = self._averaged_at = 0.0
        self._num_passes = 0
        self._last_pass_at = 0.0
        """Time when the device ended a pass last, or was given the first of those that wait."""

    @property
    def piece_s(self) -> float:
        """Device seconds of a piece of work, a forward or a backward: half a microbatch. 0 while
        unknown."""
        return self.service.seconds / PIECES

    def pass_waits(self, now: float) -> None:
        """The device is given a pass."""
        if not self._num_passes:
            self._last_pass_at = now
        self._num_passes += 1

    def pass_ended(self, now: float, *, is_done: bool) -> None:
        """Nobody waits for it any more, or (`is_done`) the device has come to it."""
        self._num_passes -= 1
        if is_done:
            self._last_pass_at = now

    def hangs(self, now: float) -> bool:
        """Passes wait, and the device ends none in the time of several microbatches."""
        longest_s = max(PATIENCE_S, DEADLINE_FACTOR * self.service.seconds)
        is_known = self._num_passes > 0 and self.service.seconds > 0
        return is_known and now > self._last_pass_at + longest_s

    def worked(self, took_s: float, part: float) -> None:
        """The device took so long for this part of the work on a microbatch."""
        self.service.add(took_s, part)
        self.services.add(took_s / part)

    def sent(self, num_bytes: int) -> None:
        """A microbatch made this replica send so much."""
        self.sent_bytes = num_bytes

    def serving(self, now: float) -> None:
        """Its rounds are driven from now on."""
        self._opened_at = now

    def closed(self, now: float) -> None:
        """The present round has."""
        self.open_s = now - self._opened_at
        self._closed_at = now

    def settled(self, now: float) -> None:
        """Every microbatch of it is known to count, or is taken out."""
        self._settled_at = now

    def averaged(self, now: float) -> None:
        """Its exchange is over here, or runs beside the next round."""
        self._averaged_at = now

    def opened(self, now: float) -> RoundTimes:
        """The next round has begun, and is known to the others too."""
        times = RoundTimes(
            self.open_s,
            self._settled_at - self._closed_at,
            self._averaged_at - self._settled_at,
            now - self._averaged_at,
        )
        self.rounds.add(now - self._opened_at)
        self._opened_at = now
        return times

    def exchanged(self, took_s: float) -> None:
        """An exchange is done."""
        self.exchanges.add(took_s)
