"""Few lines of one kind: about a trouble that lasts, such as a full disk, and about what others
cause as often as they like."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmnet.plurals import counted
from swarmnet.protocol.rate import TokenBucket
from swarmnet.protocol.timing import DAY_S, UPKEEP_S

SAY_AGAIN_S = DAY_S
"""Between two lines about one trouble, which has one when it begins and one when it ends. It
protects the lines that say something else (tests/protocol/test_trouble.py)."""


@dataclass(slots=True)
class Trouble:
    """What is tried again and again, and fails."""

    said_at: float | None = None
    """Seconds, of the caller's clock; None while it goes well."""
    num_untold: int = 0

    @property
    def lasts(self) -> bool:
        """It has failed, and not gone well since."""
        return self.said_at is not None

    def failed(self, now: float) -> str | None:
        """What a line about it ends with; None where none is due."""
        if self.said_at is not None and now < self.said_at + SAY_AGAIN_S:
            self.num_untold += 1
            return None
        times = counted(self.num_untold, "time")
        more = f" ({times} more since it was said last)" if self.num_untold else ""
        self.said_at = now
        self.num_untold = 0
        return more

    def is_over(self) -> bool:
        """It has gone well. True where a line has told otherwise before."""
        was_told = self.lasts
        self.said_at = None
        self.num_untold = 0
        return was_told


SUM_UP_S = UPKEEP_S
"""After so long, lines that were left out are told of, though none of their kind comes any more
(tests/protocol/test_trouble.py)."""
LINES_AT_ONCE, LINES_PER_S = 20, 1 / SUM_UP_S
"""Of one kind, at most: enough to see what is going on."""


def _full() -> TokenBucket:
    return TokenBucket(LINES_PER_S, LINES_AT_ONCE, LINES_AT_ONCE, 0.0)


@dataclass(slots=True)
class Kind:
    """Lines from one place of the program. Anybody who finds a way to cause one can cause many, and
    they would hide all others, and fill a disk."""

    num_untold: int = 0
    _untold_since: float = 0.0
    _bucket: TokenBucket = field(default_factory=_full)

    def line(self, now: float) -> str | None:
        """What the next one ends with; None where it is left out. `now`: seconds, of a clock that
        begins at 0 or later."""
        if not self._bucket.take(now):
            if not self.num_untold:
                self._untold_since = now
            self.num_untold += 1
            return None
        return self._sum(now)

    def sum(self, now: float) -> str:
        """What a line about those that were left out ends with; empty where none is due."""
        is_due = self.num_untold and now >= self._untold_since + SUM_UP_S
        return self._sum(now) if is_due else ""

    def _sum(self, now: float) -> str:
        if not self.num_untold:
            return ""
        minutes = max(1, round((now - self._untold_since) / SUM_UP_S))
        span = "minute" if minutes == 1 else counted(minutes, "minute")
        text = f" ({self.num_untold} more in the last {span})"
        self.num_untold = 0
        return text
