"""A trouble that lasts, such as a full disk, in few lines."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnet.protocol.backoff import LONGEST_PAUSE_S

SAY_AGAIN_S = LONGEST_PAUSE_S
"""Between two lines about one trouble. It protects the lines that say something else
(tests/protocol/test_trouble.py)."""


@dataclass(slots=True)
class Trouble:
    """What is tried again and again, and fails."""

    said_at: float | None = None
    """Seconds, of the caller's clock; None while it goes well."""
    num_untold: int = 0

    def failed(self, now: float) -> str | None:
        """What a line about it ends with; None where none is due."""
        if self.said_at is not None and now < self.said_at + SAY_AGAIN_S:
            self.num_untold += 1
            return None
        more = f" ({self.num_untold} times more since it was said last)" if self.num_untold else ""
        self.said_at = now
        self.num_untold = 0
        return more

    def is_over(self) -> bool:
        """It has gone well. True where a line has told otherwise before."""
        was_told = self.said_at is not None
        self.said_at = None
        self.num_untold = 0
        return was_told
