"""Waking the tasks of this peer that wait for a change of its view."""

from __future__ import annotations

import asyncio

from swarmnet.swarm.condition import Condition
from swarmnet.swarm.membership.pace import GossipPace


class News:
    """Notifies `changed`: at once in a small swarm, else once for all news of a short while."""

    def __init__(self, pace: GossipPace) -> None:
        self.changed = Condition()
        self._pace = pace
        self._timer: asyncio.TimerHandle | None = None

    def tell(self) -> None:
        """The view has changed."""
        if self._pace.is_small:
            self.changed.notify_all()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._pace.tell_together_s, self._tell_now)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tell_now(self) -> None:
        self._timer = None
        self.changed.notify_all()
