"""Turns on the uplink, for the long messages that leave room for microbatches.

An exchange that runs beside a round sends a stage's parameters several times, while microbatches
use the same link. If all of its messages were sent at once, a microbatch would share the link with
dozens of streams, or wait behind them in the modem's queue (bufferbloat, Gettys and Nichols 2011).
So they are sent one after the other, the next one when the link has sent the one before and little
waits for it. So the exchange takes all that microbatches leave of the link, and a microbatch waits
behind one message at most. Where microbatches leave nothing, a message waits as long as it takes
the link itself, and no longer: the exchange has half of the link then. All peers wait for the
slowest, and gradients that were not sent are lost with their machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarmnet.protocol.leftovers import ROOM_S
from swarmnet.swarm.timing import LOOK_LESS_S

LONGEST_UPLOAD_S = 600.0
"""A slower uplink is not waited for: by its owner's word alone, it might hold up a whole stage. And
a rate that was measured far too low delays a turn, but does not stop it."""


class Turns:
    """First come, first served, on one uplink. A message is sent when its turn begins, and has the
    link for as long as it takes."""

    def __init__(self, queued_bytes: Callable[[], int]) -> None:
        """`queued_bytes()`: of all long messages that wait for the uplink now."""
        self._queued_bytes = queued_bytes
        self._lock = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, num_bytes: int, rate: float) -> None:
        """Returns when the messages before this one have had their time, and what is urgent is gone
        or has had as much. `rate`: bytes/s of the uplink; 0 where that is unknown, and then nothing
        is held up."""
        if rate <= 0:
            return
        try:
            async with asyncio.timeout(LONGEST_UPLOAD_S):
                await self._lock.acquire()
        except TimeoutError:
            return
        takes_s = min(num_bytes / rate, LONGEST_UPLOAD_S)
        try:
            await self._until_room(rate, takes_s)
        except BaseException:
            self._lock.release()
            raise
        self._timer = asyncio.get_running_loop().call_later(takes_s, self._end)

    async def _until_room(self, rate: float, longest_s: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + longest_s
        while True:
            waits_s = min(self._queued_bytes() / rate - ROOM_S, end - loop.time())
            if waits_s <= 0:
                return
            await asyncio.sleep(min(max(waits_s, ROOM_S), LOOK_LESS_S))

    def _end(self) -> None:
        self._timer = None
        self._lock.release()

    def close(self) -> None:
        """Ends the present turn."""
        if self._timer is not None:
            self._timer.cancel()
            self._end()
