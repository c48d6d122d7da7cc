"""Pauses that grow: after a failure, and longer after each further one."""

from __future__ import annotations

GROWTH = 2.0
"""Of a pause, each time. It bounds what a peer spends on one that never answers to a few tries for
each power of two, and still finds one that was away for long within that time again.
(tests/transport/test_bans.py, tests/protocol/test_backoff.py)"""


def next_pause_s(last_s: float | None, first_s: float, longest_s: float) -> float:
    """The pause after one of `last_s` seconds; None or 0: there was none."""
    return min(GROWTH * last_s, longest_s) if last_s else first_s
