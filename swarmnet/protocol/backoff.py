"""Pauses that grow: after a failure, and longer after each further one."""

from __future__ import annotations

FIRST_PAUSE_S = 1.0
"""After a first failure. It protects from trying again in a loop (tests/transport/test_bans.py)."""
LONGEST_PAUSE_S = 300.0
"""At most. It protects one that comes back after a long time from being found as long after that
(tests/transport/test_bans.py, tests/protocol/membership/test_reconnect.py)."""
GROWTH = 2.0
"""Of a pause, each time. It bounds what a peer spends on one that never answers to a few tries for
each power of two, and still finds one that was away for long within that time again
(tests/transport/test_bans.py, tests/protocol/test_backoff.py)."""


def next_pause_s(
    last_s: float | None, first_s: float = FIRST_PAUSE_S, longest_s: float = LONGEST_PAUSE_S
) -> float:
    """The pause after one of `last_s` seconds; None or 0: there was none."""
    return min(GROWTH * last_s, longest_s) if last_s else first_s
