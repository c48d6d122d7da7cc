"""A deadline of a call that may be moved while the call is waited for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from swarmnet.wire import Message


@dataclass
class Deadline:
    """How long a call is waited for. May be prolonged while it is."""

    deadline: float
    _timeout: asyncio.Timeout | None = None

    async def wait(self, call: asyncio.Task[Message]) -> bool:
        """True when the call is done, False when patience has run out first."""
        try:
            async with asyncio.timeout_at(self.deadline) as self._timeout:
                await asyncio.wait((call,))
                return True
        except TimeoutError:
            return call.done()
        finally:
            self._timeout = None

    def until(self, deadline: float) -> None:
        """Prolongs it."""
        self.deadline = deadline
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(deadline)
