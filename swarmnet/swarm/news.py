"""Waiting for something to change, without polling and without missing it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class News:
    """A counter that can be waited on. `tell` wakes every waiter."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def tell(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """True when told, False when `timeout_s` passed first."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            if timeout_s is None:
                await waiter
                return True
            done, _ = await asyncio.wait((waiter,), timeout=max(0.0, timeout_s))
            return bool(done)
        finally:
            waiter.cancel()
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until `condition()` holds, looked at after every `tell`; False at the timeout."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while not condition():
            left = end - loop.time()
            if left <= 0 or not await self.wait(left):
                return condition()
        return True
