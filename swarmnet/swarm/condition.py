"""A condition that tasks wait for, without polling and without missing a change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarmnet.protocol.moments import Deadline


class Condition:
    """Something that can change: `notify_all` wakes every waiter."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[bool], None] = {}

    def notify_all(self) -> None:
        if not self._waiters:
            return
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(True)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """True when notified, False when `timeout_s` passed first."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiters[waiter] = None
        timer = None
        if timeout_s is not None:
            timer = loop.call_later(max(0.0, timeout_s), self._expire, waiter)
        try:
            return await waiter
        finally:
            if timer is not None:
                timer.cancel()
            self._waiters.pop(waiter, None)

    def _expire(self, waiter: asyncio.Future[bool]) -> None:
        if not waiter.done():
            waiter.set_result(False)

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until `condition()` holds, looked at after every `notify_all`; False at the
        timeout."""
        loop = asyncio.get_running_loop()
        deadline = Deadline.after(loop.time(), timeout_s)
        while not condition():
            left_s = deadline.left_s(loop.time())
            if not left_s or not await self.wait(left_s):
                return condition()
        return True
