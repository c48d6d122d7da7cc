"""Groups of asyncio tasks: no task outlives its owner, and no failure goes unseen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from swarmnet.errors import SwarmnetError

log = logging.getLogger("swarmnet.tasks")


class Tasks:
    """The tasks of one owner. An error that ends a task is logged."""

    def __init__(self, name: str) -> None:
        """`name` is the owner's, for the log."""
        self._name = name
        self._tasks: dict[asyncio.Task[Any], None] = {}
        """In the order of their start. They are cancelled in this order too, so that a simulated
        history can be replayed."""

    def __len__(self) -> int:
        """Tasks that have not ended."""
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """Cancels all tasks and waits until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.DEBUG if isinstance(error, SwarmnetError) else logging.ERROR
            log.log(level, "%s: %s: %s", self._name, type(error).__name__, error, exc_info=error)
