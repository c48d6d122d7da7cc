"""What is left of an uplink beside messages that somebody waits for. Pure.

A transfer in the background (RFC 6297 calls the kind less-than-best-effort) must not delay what
others wait for, and must end all the same. How much of the link others take need not be asked of
the network: whoever sends knows how many bytes it has given to the link, and how fast that is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ROOM_S = 0.02
"""So much may be on its way into the link when more comes, so that it is never idle between two
parts (tests/protocol/test_leftovers.py)."""
LEAST_SHARE = 0.25
"""Of the uplink, in which a background has parts to send: where others leave nothing, they take a
third longer, and the background four times as long as alone. Optimizer state is of use only where a
shard of it comes within a round, in which an exchange sends a sixteenth of such state, or more, for
each of the stage's sixteen or more shards (tests/protocol/test_leftovers.py)."""
LONGEST_BACKLOG_S = 5.0
"""A rate that was measured too low makes a backlog that is not there; more than what buffers on
the way usually hold is not believed (tests/protocol/test_leftovers.py)."""


@dataclass(slots=True)
class Backlog:
    """What an uplink of known rate still has to send."""

    _free_at: float = -math.inf

    def add(self, num_bytes: int, bytes_per_s: float, now: float) -> None:
        """Bytes were given to the link; `bytes_per_s`: 0 where its rate is not known, and then
        nothing is known of a backlog."""
        if bytes_per_s > 0:
            end = max(now, self._free_at) + num_bytes / bytes_per_s
            self._free_at = min(end, now + LONGEST_BACKLOG_S)

    def seconds(self, now: float) -> float:
        """Until the link has nothing to send."""
        return max(0.0, self._free_at - now)


@dataclass(slots=True)
class Leftovers:
    """When the background may send its next part."""

    _due_at: float = -math.inf
    """By then it is sent in any case."""

    def wait_s(self, backlog_s: float, now: float) -> float:
        """Seconds until a part may be sent, if nothing else comes meanwhile. `backlog_s`: of time
        of the link that is spoken for."""
        return max(0.0, min(backlog_s - ROOM_S, self._due_at - now))

    def is_due(self, now: float) -> bool:
        """Whether a part is to be sent in any case."""
        return now >= self._due_at

    def sent(self, takes_s: float, now: float) -> None:
        """A part was sent that takes the link so long."""
        self._due_at = now + takes_s / LEAST_SHARE
