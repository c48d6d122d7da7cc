"""Points in time, of a clock that is the caller's: what a reading of it means is decided here.

Whoever reads a clock passes the reading on as `now`, in seconds; it is compared and added up
nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

NEVER = float("inf")
"""A point in time that does not come."""
LONG_AGO = float("-inf")
"""A point in time from which on everything is overdue."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """Until when something is waited for."""

    at: float

    @classmethod
    def after(cls, now: float, seconds: float) -> Deadline:
        """The one in `seconds` from now."""
        return cls(now + seconds)

    def is_over(self, now: float) -> bool:
        """True from the deadline on."""
        return now >= self.at

    def left_s(self, now: float) -> float:
        """Seconds until then; 0 where it is over."""
        return max(0.0, self.at - now)

    def has_more_than(self, seconds: float, now: float) -> bool:
        """True where more than that is left."""
        return self.at - now > seconds

    def first(self, other: Deadline) -> Deadline:
        """The earlier one of two."""
        return self if self.at <= other.at else other


@dataclass(slots=True)
class Since:
    """What began, or was done last, at a point in time; it may begin again."""

    at: float = LONG_AGO

    def begin(self, now: float) -> None:
        """It begins, or is done again, now."""
        self.at = now

    def s(self, now: float) -> float:
        """Seconds since then; infinite where it has never been."""
        return now - self.at

    def is_older(self, now: float, seconds: float) -> bool:
        """True where it is at least so long ago, or has never been."""
        return now - self.at >= seconds

    def is_due(self, now: float, every_s: float) -> bool:
        """What is done each `every_s`: True where it is time again, which counts as done then."""
        if now - self.at < every_s:
            return False
        self.at = now
        return True


@dataclass(slots=True)
class Stalls:
    """Whether a process has stood still meanwhile, by how long it has in all, in seconds."""

    seen_s: float
    """What was known of before."""

    def is_new(self, stalled_s: float) -> bool:
        """True where it has since then, or since it was found so the last time."""
        if stalled_s <= self.seen_s:
            return False
        self.seen_s = stalled_s
        return True
