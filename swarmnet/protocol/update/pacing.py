"""Pacing of long messages that can wait, to leave room on the uplink for urgent ones. Pure.

An exchange that runs beside a round sends a stage's parameters several times, while microbatches
use the same link. If all shards were sent at once, a microbatch would share the link with dozens of
streams, or wait behind them in the modem's queue (bufferbloat, Gettys and Nichols 2011). So shards
are sent one after the other, at a part of the measured bandwidth. Gradients get half of it, and
more where the link is slow: all peers wait for the slowest, and gradients that were not sent are
lost with their machine. Results get no more than they need to arrive in time: the next round can be
fed when all of the present one has been launched and the results have arrived. When all is
launched, all peers wait for the results, which then get nearly everything.
"""

from __future__ import annotations

BULK_SHARE, LEAST_SHARE = 0.5, 0.1
"""Shares of the uplink for messages beside the microbatches: at most, and at least."""
URGENT_SHARE = 0.9
"""Share of the uplink when the next microbatches wait for the message."""
LEFT_PART = 0.3
"""Part of the time until all of the present round is launched. In this part a link that is fast
enough sends its gradient, and then in as much time its part of the results."""


def feeding_left_s(launched: int, num_slots: int, age_s: float) -> float | None:
    """Seconds until all of a round is launched, extrapolated from the `launched` slots of its
    first `age_s` seconds; None while it cannot be known."""
    if launched <= 0 or age_s <= 0:
        return None
    return age_s * max(0, num_slots - launched) / launched


def gradient_share(num_bytes: float, upload_bytes_per_s: float, left_s: float | None) -> float:
    """The share of an uplink for `num_bytes` of gradients; arguments as of `share_beside`."""
    if upload_bytes_per_s <= 0 or left_s is None:
        return BULK_SHARE
    return max(BULK_SHARE, _needed(num_bytes, upload_bytes_per_s, left_s))


def share_beside(num_bytes: float, upload_bytes_per_s: float, left_s: float | None) -> float:
    """The share of an uplink for `num_bytes` of results, beside a round whose last microbatch is
    launched in `left_s` seconds (None while unknown)."""
    if upload_bytes_per_s <= 0 or left_s is None:
        return BULK_SHARE
    needed = _needed(num_bytes, upload_bytes_per_s, left_s)
    most = BULK_SHARE if left_s > 0 else URGENT_SHARE
    return min(max(needed, LEAST_SHARE), most)


def _needed(num_bytes: float, upload_bytes_per_s: float, left_s: float) -> float:
    """The share that lets the message arrive in time, if that is possible."""
    if left_s <= 0:
        return URGENT_SHARE
    return min(URGENT_SHARE, num_bytes / (upload_bytes_per_s * LEFT_PART * left_s))
