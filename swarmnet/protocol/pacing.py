"""Long messages that can wait leave room on the uplink for those that cannot. Pure.

An exchange that runs beside a round sends a stage's parameters several times; microbatches go up
the same link meanwhile. If all shards were sent at once, a microbatch would share the link with
dozens of streams, or stand behind them in the modem's queue (bufferbloat, Gettys and Nichols
2011). So each takes its turn at a part of the measured bandwidth, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

BULK_SHARE = 0.5
"""Of the uplink, for what runs beside the microbatches."""
MAX_TURN_S = 900.0
"""Longest wait for a turn: a rate that was measured far too low delays, but does not stop."""


@dataclass(slots=True)
class Pacer:
    """Turns on one uplink."""

    share: float = BULK_SHARE
    _free_at: float = 0.0

    def wait_s(self, num_bytes: int, upload_bytes_per_s: float, now: float) -> float:
        """Seconds until a message of this length may be sent; its time is taken. 0 while the
        bandwidth is unknown (0)."""
        if upload_bytes_per_s <= 0:
            return 0.0
        begin = min(max(now, self._free_at), now + MAX_TURN_S)
        self._free_at = begin + num_bytes / (self.share * upload_bytes_per_s)
        return begin - now
