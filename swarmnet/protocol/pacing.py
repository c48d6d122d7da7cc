"""Long messages that can wait leave room on the uplink for those that cannot. Pure.

An exchange that runs beside a round sends a stage's parameters several times; microbatches go up
the same link meanwhile. If all shards were sent at once, a microbatch would share the link with
dozens of streams, or stand behind them in the modem's queue (bufferbloat, Gettys and Nichols
2011). So each takes its turn at a part of the measured bandwidth, one after the other. Gradients
get half of it, and more where the link is slow: all wait for the slowest, and they are lost with
the machine that has not sent them. Results get no more than lets them be there in good time: the
next round can be fed when all of the present one is, and with these. When all is launched, they are
what everybody waits for, and get nearly everything.
"""

from __future__ import annotations

BULK_SHARE, LEAST_SHARE = 0.5, 0.1
"""Of the uplink, for what runs beside the microbatches: at most, and at least."""
URGENT_SHARE = 0.9
"""Of the uplink, when the microbatches to come wait for it."""
FEEDING_PART = 0.3
"""Of the time in which a round is fed: in so long a link that is not too slow for it sends its
gradient, and then its part of the results."""


def gradient_share(num_bytes: float, upload_bytes_per_s: float, feeding_s: float | None) -> float:
    """As `share_beside`, for so many bytes of gradients."""
    if upload_bytes_per_s <= 0 or feeding_s is None:
        return BULK_SHARE
    return max(BULK_SHARE, _needed(num_bytes, upload_bytes_per_s, feeding_s))


def share_beside(num_bytes: float, upload_bytes_per_s: float, feeding_s: float | None) -> float:
    """The part of an uplink for so many bytes of results, beside a round whose microbatches are
    launched within `feeding_s` from its beginning (None while unknown); bytes/s and seconds."""
    if upload_bytes_per_s <= 0 or feeding_s is None:
        return BULK_SHARE
    needed = _needed(num_bytes, upload_bytes_per_s, feeding_s)
    most = BULK_SHARE if feeding_s > 0 else URGENT_SHARE
    return min(max(needed, LEAST_SHARE), most)


def _needed(num_bytes: float, upload_bytes_per_s: float, feeding_s: float) -> float:
    """To be sent in time, if it can be."""
    if feeding_s <= 0:
        return URGENT_SHARE
    return min(URGENT_SHARE, num_bytes / (upload_bytes_per_s * FEEDING_PART * feeding_s))
