"""A clock that counts only the time in which this process ran, for deadlines of other peers.

A machine that swaps, or is suspended, or has a disk that hangs, stops for seconds without knowing.
When it goes on, deadlines of others have passed, and what these sent meanwhile has not been read:
the others were not silent. So such deadlines are kept in time awake."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

TICK_S = 0.5
STALL_S = 1.0
"""A process that wakes so much later than it wanted to has stood still."""


class AwakeClock:
    """The loop's time without that in which the loop did not run."""

    def __init__(self, on_stall: Callable[[float], None]) -> None:
        """`on_stall(seconds)` as soon as a stall is noticed: by the clock's own tick, or when
        the time is asked for first after it."""
        self._on_stall = on_stall
        self._due = math.inf
        """When the next tick ought to come; infinity while it does not tick."""
        self._stalled_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begins to tick."""
        loop = asyncio.get_running_loop()
        self._due = loop.time() + TICK_S
        self._timer = loop.call_later(TICK_S, self._tick)

    def stop(self) -> None:
        """Ends; from now on it is an ordinary clock."""
        self._due = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def time(self) -> float:
        """Seconds; never runs backwards by more than `STALL_S`."""
        now = asyncio.get_running_loop().time()
        late_s = now - self._due
        if late_s > STALL_S:
            self._due = now
            self._stalled_s += late_s
            self._on_stall(late_s)
        return now - self._stalled_s

    def stood_still_s(self) -> float:
        """How long the loop has not run, in all."""
        self.time()
        return self._stalled_s

    def _tick(self) -> None:
        self.time()
        self.start()
