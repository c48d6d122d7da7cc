"""Pauses between two tries, of all shards of an exchange together.

Shards pause together so that what they ask for next shares calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

RETRY_S, MAX_RETRY_S = 0.05, 1.0
"""Before a shard's result is asked for again: at first, and later on."""
RETRY_GROWTH = 1.5
REMIND_S, REMIND_PART = 1.0, 0.3
"""Before those who have not contributed are reminded: so long at least, and so much of what an
exchange usually takes."""


class Pauses:
    """Short ones before another try, long ones before a reminder."""

    def __init__(self, usual_s: Callable[[], float], again: Callable[[list[int]], None]) -> None:
        """`again(shards)` when the pause of these is over."""
        self._usual_s, self._again = usual_s, again
        self._retry_s = RETRY_S
        self._waiting: dict[bool, list[int]] = {True: [], False: []}
        self._timers: dict[bool, asyncio.TimerHandle] = {}

    def close(self) -> None:
        """Ends all."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def add(self, shard: int, *, is_long: bool) -> None:
        """A shard pauses from now on, or shares the pause of another."""
        self._waiting[is_long].append(shard)
        if is_long in self._timers:
            return
        pause_s = max(REMIND_S, REMIND_PART * self._usual_s()) if is_long else self._retry_s
        if not is_long:
            self._retry_s = min(RETRY_GROWTH * self._retry_s, MAX_RETRY_S)
        loop = asyncio.get_running_loop()
        self._timers[is_long] = loop.call_later(pause_s, self._over, is_long)

    def _over(self, is_long: bool) -> None:
        del self._timers[is_long]
        shards, self._waiting[is_long] = self._waiting[is_long], []
        self._again(shards)
