"""Turns on the uplink, for the long messages that leave room for microbatches.

See `protocol.update.pacing` for the rates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarmnet.swarm.timing import LOOK_LESS_S

LONGEST_UPLOAD_S = 600.0
"""A slower uplink is not waited for: by its owner's word alone, it might hold up a whole stage. And
a rate that was measured far too low delays a turn, but does not stop it."""


class Turns:
    """First come, first served, on one uplink. A message is sent when its turn begins, and has the
    link for as long as it takes at the rate of that time."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, num_bytes: int, rate: Callable[[], float]) -> None:
        """Returns when the messages before this one have had their time. `rate()`: bytes/s that
        it gets, now; 0 where that is unknown, and then nothing is held up."""
        if rate() <= 0:
            return
        try:
            async with asyncio.timeout(LONGEST_UPLOAD_S):
                await self._lock.acquire()
        except TimeoutError:
            return
        self._hold(float(num_bytes), rate)

    def _hold(self, left: float, rate: Callable[[], float]) -> None:
        """Ends the turn when `left` bytes have had their time."""
        now_rate = rate()
        if now_rate <= 0:
            return self._end()
        loop = asyncio.get_running_loop()
        takes_s = left / now_rate
        if takes_s <= LOOK_LESS_S:  # to the end: what rounding leaves of the bytes is no turn
            self._timer = loop.call_later(takes_s, self._end)
        else:
            self._timer = loop.call_later(
                LOOK_LESS_S, self._hold, left - LOOK_LESS_S * now_rate, rate
            )
        return None

    def _end(self) -> None:
        self._timer = None
        self._lock.release()

    def close(self) -> None:
        """Ends the present turn."""
        if self._timer is not None:
            self._timer.cancel()
            self._end()
