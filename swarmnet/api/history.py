"""What happens, in order, for several readers that each go on where they were: the events of a run,
or the pieces of a text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from swarmnet.swarm.condition import Condition

T = TypeVar("T")

MOST_EVENTS = 100_000
"""Kept, the newest. A reader that is further behind goes on with the oldest of them."""


class History(Generic[T]):
    """Kept on one event loop. When that has ended, `rest` may be asked from anywhere."""

    def __init__(self, most: int = MOST_EVENTS) -> None:
        self._events: deque[T] = deque(maxlen=most)
        self._num_told = 0
        self._changed = Condition()
        self._is_over = False
        self._error: Exception | None = None

    def add(self, events: Sequence[T]) -> None:
        self._events.extend(events)
        self._num_told += len(events)
        if events:
            self._changed.notify_all()

    def end(self, error: Exception | None = None) -> None:
        """Readers end when they have read all; with `error`, where there is one. The first call
        counts."""
        if not self._is_over:
            self._is_over, self._error = True, error
            self._changed.notify_all()

    async def after(self, num_read: int) -> tuple[list[T], int]:
        """As `rest`, when there is anything or the end has come."""
        while num_read >= self._num_told and not self._is_over:
            await self._changed.wait()
        return self.rest(num_read)

    def rest(self, num_read: int) -> tuple[list[T], int]:
        """Events after so many, and how many have been read then. None: that was all. Raises what
        `end` was given."""
        num_new = min(self._num_told - num_read, len(self._events))
        if num_new <= 0 and self._error is not None:
            raise self._error
        new = list(self._events)[-num_new:] if num_new > 0 else []
        return new, self._num_told
