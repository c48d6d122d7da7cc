"""Pauses between two tries, of all shards of an exchange together.

Shards pause together so that what they ask for next shares calls. Each further pause of a kind is
longer: what has not come soon may take long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarmnet.protocol.backoff import next_pause_s
from swarmnet.swarm.timing import LOOK_LESS_S, RETRY_S

FIRST_S = {True: LOOK_LESS_S, False: RETRY_S}
"""By whether it is long."""


class Pauses:
    """Short ones before another try, long ones before a reminder."""

    def __init__(self, usual_s: Callable[[], float], again: Callable[[list[int]], None]) -> None:
        """`usual_s()`: how long an exchange takes: no long pause is longer, nor a short one than
        the first long one. `again(shards)` when the pause of these is over."""
        self._usual_s = usual_s
        self._again = again
        self._last_s: dict[bool, float | None] = {True: None, False: None}
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
        longest_s = max(LOOK_LESS_S, self._usual_s()) if is_long else LOOK_LESS_S
        pause_s = next_pause_s(self._last_s[is_long], FIRST_S[is_long], longest_s)
        self._last_s[is_long] = pause_s
        loop = asyncio.get_running_loop()
        self._timers[is_long] = loop.call_later(pause_s, self._over, is_long)

    def _over(self, is_long: bool) -> None:
        del self._timers[is_long]
        shards, self._waiting[is_long] = self._waiting[is_long], []
        self._again(shards)
