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
LEFT_PART = 0.3
"""Of the time until all of the present round is launched: in so long a link that is not too slow
for it sends its gradient, and then its part of the results."""


def feeding_left_s(launched: int, global_batch: int, age_s: float) -> float | None:
    """Seconds until all of a round is launched, of which `launched` samples were in its first
    `age_s`, if that goes on so; None while nobody can know."""
    if launched <= 0 or age_s <= 0:
        return None
    return age_s * max(0, global_batch - launched) / launched


def gradient_share(num_bytes: float, upload_bytes_per_s: float, left_s: float | None) -> float:
    """As `share_beside`, for so many bytes of gradients."""
    if upload_bytes_per_s <= 0 or left_s is None:
        return BULK_SHARE
    return max(BULK_SHARE, _needed(num_bytes, upload_bytes_per_s, left_s))


def share_beside(num_bytes: float, upload_bytes_per_s: float, left_s: float | None) -> float:
    """The part of an uplink for so many bytes of results, beside a round whose last microbatch is
    launched in `left_s` (None while unknown); bytes/s and seconds."""
    if upload_bytes_per_s <= 0 or left_s is None:
        return BULK_SHARE
    needed = _needed(num_bytes, upload_bytes_per_s, left_s)
    most = BULK_SHARE if left_s > 0 else URGENT_SHARE
    return min(max(needed, LEAST_SHARE), most)


def _needed(num_bytes: float, upload_bytes_per_s: float, left_s: float) -> float:
    """To be sent in time, if it can be."""
    if left_s <= 0:
        return URGENT_SHARE
    return min(URGENT_SHARE, num_bytes / (upload_bytes_per_s * LEFT_PART * left_s))
