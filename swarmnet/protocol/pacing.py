"""Long messages that can wait leave room on the uplink for those that cannot. Pure.

An exchange that runs beside a round sends a stage's parameters several times; microbatches go up
the same link meanwhile. If all shards were sent at once, a microbatch would share the link with
dozens of streams, or stand behind them in the modem's queue (bufferbloat, Gettys and Nichols
2011). So each takes its turn at a part of the measured bandwidth, one after the other. Gradients
get half of it: all wait for the slowest, and they are lost with the machine that has not sent
them. Results get no more than lets them be there in good time, for they have a whole round.
"""

from __future__ import annotations

from dataclasses import dataclass

BULK_SHARE, LEAST_SHARE = 0.5, 0.1
"""Of the uplink, for what runs beside the microbatches: at most, and at least."""
EXCHANGE_PART = 0.2
"""Of a round: in such a time a link that is not too slow for it sends its part of the results."""
MAX_TURN_S = 900.0
"""Longest wait for a turn: a rate that was measured far too low delays, but does not stop."""


def share_beside(num_bytes: float, upload_bytes_per_s: float, round_s: float) -> float:
    """The part of an uplink for so many bytes of results, beside a round that takes about `round_s`
    (0 while unknown); bytes/s and seconds."""
    if upload_bytes_per_s <= 0 or round_s <= 0:
        return BULK_SHARE
    needed = num_bytes / (upload_bytes_per_s * EXCHANGE_PART * round_s)
    return min(max(needed, LEAST_SHARE), BULK_SHARE)


@dataclass(slots=True)
class Pacer:
    """Turns on one uplink."""

    _free_at: float = 0.0

    def wait_s(
        self, num_bytes: int, upload_bytes_per_s: float, now: float, share: float = BULK_SHARE
    ) -> float:
        """Seconds until a message of this length may be sent; its time is taken, at this share of
        the bandwidth. 0 while that is unknown (0)."""
        if upload_bytes_per_s <= 0:
            return 0.0
        begin = min(max(now, self._free_at), now + MAX_TURN_S)
        self._free_at = begin + num_bytes / (share * upload_bytes_per_s)
        return begin - now
